"""Each case runs on tiny shapes and says what it promises to say. How fast is never asked here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tiers import full, only_exhaustive, tiers

from benchmarks.cases.attention import Site
from benchmarks.cases.head import all_rows, head_inputs, labelled_rows, measure_chunks
from benchmarks.cases.loader import long_batch
from benchmarks.cases.service import ServiceShapes, datum_loop, encoded, new_data, new_engine, own_loop, run_requests
from benchmarks.cases.step import target_of
from benchmarks.cases.tree import Rollouts, TreeShapes, row_flops, samples_of
from benchmarks.command import (
    CASES,
    AttentionShapes,
    CollateShapes,
    CompileShapes,
    LengthShapes,
    PackShapes,
    PixelShapes,
)
from benchmarks.figures import BenchSettings, Figure, Skipped
from benchmarks.receipts import MEASURED, ReceiptShapes, receipt_config
from vlmpack.errors import VlmpackError
from vlmpack.families import family_named
from vlmpack.layout import lengths_from_mask, pack, share
from vlmpack.testing import padded

QUICK = BenchSettings(seconds=0.0)
TINY = ReceiptShapes(
    hidden=64, layers=2, kv_heads=2, vision_hidden=32, vision_depth=1, vocab_size=131, samples=3, longest=40
)
SHAPES = {
    "pack": PackShapes(batches=((2, 10), (3, 7))),
    "collate": CollateShapes(samples=2, max_image_tokens=9),
    "pixels": PixelShapes(images=2, grid=(1, 2, 4), patch_size=3, words=5),
    "lengths": LengthShapes(images=5, files=2, width=40, height=56, part=2, processed=2),
    "attention": AttentionShapes(
        sites=(
            Site(name="language", lengths=(7, 3, 5), heads=6, kv_heads=2, head_dim=8, causal=True),
            Site(name="vision", lengths=(4, 9), heads=3, kv_heads=3, head_dim=8, causal=False),
        )
    ),
    "step": TINY,
    "memory": TINY,
    "tree": TreeShapes(
        receipts=TINY,
        rollouts=(Rollouts(prefix=70, branch=5, samples=3, image_tokens=8),),
        long=Rollouts(prefix=66, branch=9, samples=2, image_tokens=12),
        groups=2,
    ),
    "head": TINY,
    "thd": TINY,
    "service": ServiceShapes(
        receipts=TINY,
        small=replace(TINY, samples=1),
        wire=TINY,
        row_tokens=60,
        rank=2,
        clients=2,
        crowd=2,
        crowd_requests=1,
    ),
    "compile": CompileShapes(receipts=replace(TINY, layers=1), steps=4, samples=(1, 2), longest=(20, 30)),
}
TARGETS = {
    "pack": [3.0, 2.0, 3.0, 2.0],
    "collate": [1.1, 1.1],
    "pixels": [1.3, 1.3, 4.0],
    "lengths": [20.0],
    "attention": [],
    "step": [0.95],
    "memory": [0.7],
    "tree": [0.9, 0.85, 0.02, 0.01],
    "head": [1.1],
    "thd": [1.02],
    "service": [0.9, 2.0, 0.05, 3.0],
    "compile": [3, 0],
}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("name", tiers(SHAPES, [], exhaustive=["pixels", "lengths", "attention", "collate", "compile"]))
def test_a_case_measures_and_holds_its_figures_to_the_targets(name):
    found = CASES[name].run(QUICK, SHAPES[name])
    figures = [figure for figure in found if not isinstance(figure, Skipped)]
    assert [figure.target.limit for figure in figures if figure.target] == TARGETS[name]
    check(figures, name)


@pytest.mark.every_family
@pytest.mark.parametrize(
    "family", ["qwen3", *full("gemma3", "qwen4_exp"), *only_exhaustive("qwen3_vl_moe", "qwen2_5_vl", "qwen3_5")]
)
def test_a_step_is_measured_for_every_kind_of_family(family):
    figures = CASES["step"].run(replace(QUICK, family=family), TINY)
    check(figures, "step")
    assert {figure.family for figure in figures} == {family}


def check(figures: Sequence[Figure], name: str) -> None:
    assert figures
    assert all(figure.case == name and (figure.value > 0 or figure.unit in ("graphs", "steps")) for figure in figures)
    assert len({figure.name for figure in figures}) == len(figures)
    assert all((figure.family is not None) == bool(CASES[name].families) for figure in figures)
    measured = [figure for figure in figures if figure.rounds]
    assert all(figure.low <= figure.value <= figure.high for figure in measured if figure.low and figure.high)


def test_every_case_is_tried_here_or_next_door():
    assert set(CASES) - set(SHAPES) <= {"plan", "peers"}


def test_families_with_small_products_are_held_to_less():
    limits = {name: target_of(family_named(name)).limit for name in MEASURED}
    assert {name for name, limit in limits.items() if limit == 0.85} == {
        *("qwen3_vl_moe", "qwen4_exp", "gpt_oss", "llama4_text"),  # experts
        *("qwen3_5", "qwen3_5_moe", "qwen3_next"),  # gated delta layers
        *("gemma3", "paligemma"),  # image tokens, and prefixes, that see later ones
    }
    assert set(limits.values()) == {0.95, 0.85}


def named(figures: Sequence[Figure]) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures}


@pytest.mark.full
def test_the_share_of_ideal_is_the_speed_up_over_the_ideal():
    found = named(CASES["step"].run(QUICK, TINY))
    share = found["speed-up"].value / found["ideal speed-up"].value
    assert found["share of ideal"].value == pytest.approx(share)
    assert found["ideal, causal pairs"].value > found["ideal speed-up"].value


@pytest.mark.full
def test_both_cases_weigh_the_same_memory():
    step, memory = (named(CASES[name].run(QUICK, TINY)) for name in ("step", "memory"))
    assert step["memory, packed / padded"].value == memory["packed / padded"].value < 1


def test_equal_samples_are_computed_once_so_that_two_cost_twice_the_tree():
    family = family_named("qwen3_vl")
    config = receipt_config(family, TINY)
    sample = next(iter(samples_of(family, config, Rollouts(prefix=70, branch=5, samples=1, image_tokens=8), seed=0)))
    row = pack(padded([sample, sample]))
    shared = share(row)
    assert shared.tree is not None
    assert row_flops(family, config, row) == 2 * row_flops(family, config, shared)


def test_both_heads_give_the_same_loss_and_gradients():
    inputs = head_inputs(TINY, QUICK)
    found = []
    for loss in (lambda: labelled_rows(inputs, 11, chunk=4), lambda: all_rows(inputs, 11)):
        value = loss()
        assert inputs.hidden.grad is not None
        found.append((value, inputs.hidden.grad.clone()))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.full
def test_chunks_of_the_head_take_less_memory_than_all_rows_at_once(monkeypatch):
    monkeypatch.setattr("benchmarks.cases.head.CHUNKS", (100, 300, 10_000))
    shapes = replace(TINY, longest=400, vocab_size=1310)  # logits outweigh the weight and its gradient
    found = named(list(measure_chunks(head_inputs(shapes, QUICK), QUICK)))
    rows = sum(shapes.lengths)
    few, more = (found[f"memory, chunks of {chunk} / {rows} at once"].value for chunk in (100, 300))
    assert few < more < 1
    assert not any("10000" in name for name in found)


def test_layers_that_are_not_compiled_are_not_counted_as_compiled_once(monkeypatch):
    monkeypatch.setattr("benchmarks.cases.step.compile_layers", lambda model, **settings: model)
    with pytest.raises(VlmpackError, match="no layer was compiled"):
        CASES["compile"].run(QUICK, SHAPES["compile"])


def test_the_batch_to_pack_has_the_ratio_that_was_asked_for():
    lengths = lengths_from_mask(long_batch(6, 100, ratio=5.0).attention_mask).lengths
    assert sorted(lengths) == [20, 36, 52, 68, 84, 100]


def test_loops_of_ones_own_compute_what_the_engine_does():
    shapes = SHAPES["service"]
    engine = new_engine(QUICK, shapes, row_tokens=shapes.row_tokens)
    request = encoded(engine, new_data(shapes.receipts, seed=0), model_id="client 0")
    (result,) = run_requests(engine, [request])
    expected = pytest.approx(result.metrics["loss:sum"], rel=1e-5)
    assert own_loop(engine, request, QUICK, shapes)() == expected
    assert datum_loop(request, QUICK, shapes)() == expected
