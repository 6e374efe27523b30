"""The formula is what is counted as a model runs, family by family."""

from __future__ import annotations

import pytest
import torch

from vlmpack.bench.flops import count_flops
from vlmpack.bench.formula import CHUNK, step_flops
from vlmpack.bench.workload import ReceiptShapes, alone, hf_inputs, receipt_batch, receipt_config, receipt_model
from vlmpack.families import FAMILIES, family_named

TINY = ReceiptShapes(
    hidden=64,
    layers=4,
    kv_heads=2,
    experts=8,
    experts_per_token=2,
    vision_hidden=32,
    vision_depth=3,
    vocab_size=131,
    samples=3,
    longest=80,  # of gated delta layers' chunks: two, one and one
)
CLOSE = 1e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_a_padded_batch(name):
    family, model, batch = parts(name)
    counted = count_flops(lambda: model(**hf_inputs(batch)).loss.backward())
    formula = step_flops(family, model.config, [TINY.longest] * TINY.samples, batch.metadata.image_grids)
    assert formula.total == pytest.approx(counted, rel=CLOSE)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_sample_alone(name):
    family, model, batch = parts(name)
    grids = [[grid] for grid in batch.metadata.image_grids] or [[]] * TINY.samples
    counts = {}
    for inputs, length, grid in zip(alone(batch), TINY.lengths, grids, strict=True):
        counts[length] = count_flops(lambda inputs=inputs: model(**inputs).loss.backward())
        formula = step_flops(family, model.config, [length], grid)
        assert formula.total == pytest.approx(counts[length], rel=CLOSE)
    assert len(counts) == TINY.samples


@pytest.mark.parametrize("name", FAMILIES)
def test_every_part_that_a_family_has_is_counted_and_no_other(name):
    family, model, batch = parts(name)
    flops = step_flops(family, model.config, TINY.lengths, batch.metadata.image_grids)
    assert (flops.vision > 0) == family.has_vision
    assert (flops.experts > 0) == (family.experts is not None)
    assert (flops.delta > 0) == (family.delta is not None)
    assert min(flops.text_linear, flops.text_attention, flops.head) > 0


def test_what_is_not_computed_is_left_out():
    family = family_named("qwen3_vl")
    config = receipt_config(family, TINY)
    whole = step_flops(family, config, [10, 30])
    assert whole.vision == 0
    assert step_flops(family, config, [10, 30], head_tokens=20).head * 2 == whole.head
    assert step_flops(family, config, [10, 30], causal=True).text_attention * 1000 == whole.text_attention * (55 + 465)
    assert step_flops(family, config, [20, 20]).text_linear == whole.text_linear


def test_a_gated_delta_layer_computes_whole_chunks():
    family = family_named("qwen3_5")
    config = receipt_config(family, TINY)
    scans = [step_flops(family, config, [n]).delta for n in (1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK)]
    convolution = scans[1] - scans[0]  # grows with every token, the recurrence with every chunk
    assert 0 < convolution < scans[0] / 10
    assert scans[3] - scans[2] == convolution
    assert scans[4] - scans[3] == scans[3] - scans[1]


def parts(name: str):
    """A family, a tiny model of it, and a batch."""
    torch.manual_seed(0)
    family = family_named(name)
    model = receipt_model(family, TINY)
    return family, model, receipt_batch(family, model.config, TINY)
