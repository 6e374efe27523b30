"""The two steps compute the same thing, and the work of each is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.cases.step import CountedFlops, StepPair, check_same_loss
from benchmarks.figures import BenchSettings
from benchmarks.receipts import MEASURED, ReceiptShapes, hf_inputs
from vlmpack.errors import VlmpackError

TINY = ReceiptShapes(
    hidden=64, layers=2, kv_heads=2, vision_hidden=32, vision_depth=1, vocab_size=131, samples=3, longest=40
)


def pair_of(family: str = "qwen3_vl", shapes: ReceiptShapes = TINY) -> StepPair:
    return StepPair.of(BenchSettings(family=family), shapes)


def test_the_padded_step_is_hugging_face_s_own():
    pair = pair_of()
    assert pair.padded() == pair.model(**hf_inputs(pair.batch)).loss


@pytest.mark.every_family
@pytest.mark.parametrize("family", MEASURED)
def test_both_steps_leave_the_same_gradients(family):
    pair = pair_of(family)
    assert float(pair.padded()) == pytest.approx(float(pair.packed()), rel=1e-5)
    theirs, ours = (dict(model.named_parameters()) for model in (pair.model, pair.packed_step.model))
    assert theirs.keys() == ours.keys()
    unused = [".indexer.", ".vision_tower.head."]  # it only chooses; it is not called
    if family == "qwen2_5_omni_thinker":  # samples that only hear, whose ends of audio are tokens of text
        unused += ["model.visual.", ".audio_bos_eos_token."]
    for name, parameter in theirs.items():
        if any(part in name for part in unused):
            assert parameter.grad is ours[name].grad is None
            continue
        assert parameter.grad is not None
        error = (parameter.grad - ours[name].grad).abs().max()
        assert error <= 1e-4 * parameter.grad.abs().max() + 1e-8, name


def test_steps_that_compute_different_things_are_not_compared():
    pair = pair_of()
    losses = {name: step() for name, step in pair.steps.items()}
    check_same_loss(losses)
    with pytest.raises(VlmpackError, match=r"do not compute the same loss .*padded.*packed"):
        check_same_loss({**losses, "packed": losses["padded"] * 1.01})


def test_work_is_not_counted_for_steps_that_compute_different_things():
    pair = pair_of()
    pair.packed_step.model.lm_head.weight.data *= 1.5
    with pytest.raises(VlmpackError, match="do not compute the same loss"):
        CountedFlops.of(pair)


def test_without_padding_there_is_nothing_to_gain():
    assert CountedFlops.of(pair_of(shapes=replace(TINY, ratio=1.0))).ideal_speedup == pytest.approx(1.0)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe"])
def test_the_packed_step_computes_what_the_samples_alone_need_less_the_rows_that_have_no_label(family):
    pair = pair_of(family)
    assert pair.batch.metadata is not None
    unlabelled = sum(TINY.lengths) - pair.batch.metadata.num_targets
    work = CountedFlops.of(pair)
    assert work.alone - work.packed == 3 * 2 * unlabelled * TINY.hidden * TINY.vocab_size


@pytest.mark.full
def test_only_a_step_s_own_weights_are_weighed():
    pair, wider = pair_of(), pair_of(shapes=replace(TINY, vocab_size=TINY.vocab_size + 1000))
    mixed = replace(pair, model=wider.model)
    for step in (*pair.steps.values(), wider.padded):
        step()
    assert mixed.peaks("cpu")["packed"] == pair.peaks("cpu")["packed"]
    assert mixed.peaks("cpu")["padded"] > pair.peaks("cpu")["padded"]
