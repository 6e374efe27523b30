"""Each case runs on tiny shapes and says what it promises to say. How fast is never asked here."""

from __future__ import annotations

import pytest
import torch

from vlmpack.bench.cases import CASES, CollateShapes, PackShapes
from vlmpack.bench.cases.head import all_rows, head_inputs, labelled_rows
from vlmpack.bench.cases.pack import long_batch
from vlmpack.bench.cases.step import both_steps, check_same_loss, ideal_speedup
from vlmpack.bench.figure import Figure
from vlmpack.bench.settings import BenchSettings
from vlmpack.bench.workload import ReceiptShapes, hf_inputs, receipt_batch, receipt_model
from vlmpack.errors import VlmpackError
from vlmpack.layout import lengths_from_mask

QUICK = BenchSettings(seconds=0.0)
TINY = ReceiptShapes(
    hidden=64, layers=2, kv_heads=2, vision_hidden=32, vision_depth=1, vocab_size=131, samples=3, longest=40
)
SHAPES = {
    "pack": PackShapes(batches=((2, 10), (3, 7))),
    "collate": CollateShapes(samples=2, max_image_tokens=9),
    "step": TINY,
    "memory": TINY,
    "head": TINY,
}
TARGETS = {"pack": [3.0, 3.0], "collate": [1.1, 1.1], "step": [0.9], "memory": [0.7, 1.1], "head": []}


@pytest.mark.parametrize("name", CASES)
def test_a_case_measures_and_holds_its_figures_to_the_targets(name):
    figures = CASES[name].run(QUICK, SHAPES[name])
    assert [figure.target.limit for figure in figures if figure.target] == TARGETS[name]
    assert all(figure.case == name and figure.value > 0 for figure in figures)
    assert len({figure.name for figure in figures}) == len(figures)
    measured = [figure for figure in figures if figure.rounds]
    assert all(figure.low <= figure.value <= figure.high for figure in measured if figure.low and figure.high)


def named(figures: list[Figure]) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures}


def test_the_share_of_ideal_is_the_speed_up_over_the_ideal():
    found = named(CASES["step"].run(QUICK, TINY))
    share = found["speed-up"].value / found["ideal speed-up"].value
    assert found["share of ideal"].value == pytest.approx(share)
    assert found["ideal speed-up, causal pairs"].value > found["ideal speed-up"].value


def test_without_padding_there_is_nothing_to_gain():
    equal = ReceiptShapes(**{**vars(TINY), "ratio": 1.0})
    model = receipt_model(equal)
    assert ideal_speedup(model, receipt_batch(model.config, equal)) == pytest.approx(1.0)


def test_steps_that_compute_different_things_are_not_compared():
    model = receipt_model(TINY)
    steps = both_steps(model, receipt_batch(model.config, TINY), TINY, QUICK)
    check_same_loss(steps)
    with pytest.raises(VlmpackError, match=r"do not compute the same loss .*padded.*packed"):
        check_same_loss({**steps, "packed": lambda: steps["padded"]() * 1.01})


def test_the_padded_step_is_hugging_face_s_own():
    model = receipt_model(TINY)
    batch = receipt_batch(model.config, TINY)
    expected = model(**hf_inputs(batch)).loss
    assert both_steps(model, batch, TINY, QUICK)["padded"]() == expected


def test_both_heads_give_the_same_loss_and_gradients():
    inputs = head_inputs(TINY, QUICK)
    found = []
    for loss in (lambda: labelled_rows(inputs, 11, chunk=4), lambda: all_rows(inputs, 11)):
        value = loss()
        assert inputs.hidden.grad is not None
        found.append((value, inputs.hidden.grad.clone()))
    torch.testing.assert_close(found[0], found[1])


def test_the_batch_to_pack_has_the_ratio_that_was_asked_for():
    lengths = lengths_from_mask(long_batch(6, 100, ratio=5.0).attention_mask).lengths
    assert sorted(lengths) == [20, 36, 52, 68, 84, 100]
