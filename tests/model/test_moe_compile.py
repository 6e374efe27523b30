"""torch.compile around a model with experts: the gate before its experts is no reason to compile every row anew."""

from __future__ import annotations

import pytest
import torch
from moe import fresh, samples_of
from torch._dynamo.utils import counters
from training import distance, gradients

from vlmpack.layout import SlotRule, pack
from vlmpack.model import PackedStep, StepConfig
from vlmpack.testing import padded

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.exhaustive,
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]


def small(family):
    return fresh(family, layers=2, vision_depth=1)


def text_row(model, seed, multiple):
    """Text only: compiling the vision tower too takes long, and has nothing to do with experts."""
    return pack(padded(samples_of(model, seed=seed, kinds=("text",) * 3)), rule=SlotRule(multiple=multiple))


def test_a_compiled_step_is_the_step_and_rows_of_other_lengths_and_gaps_are_not_compiled_anew():
    """Nothing is compiled after one row without gaps and one with, and one of another length of each."""
    config = StepConfig(z_loss_coef=0.25)
    model, plain = small("qwen3_vl_moe"), small("qwen3_vl_moe")
    step, reference = PackedStep(torch.compile(model, backend="aot_eager"), config), PackedStep(plain, config)
    graphs = []
    for seed, multiple in ((1, 1), (2, 8), (3, 1), (4, 8), (5, 1), (6, 16), (7, 4)):
        row = text_row(model, seed, multiple)
        ours, theirs = (each(row, output_router_logits=True) for each in (step, reference))
        for each in (ours, theirs):
            each.loss.backward()
        assert torch.isclose(ours.loss, theirs.loss, rtol=1e-6, atol=0)
        assert torch.isclose(ours.aux_loss, theirs.aux_loss, rtol=1e-6, atol=0)
        assert torch.equal(ours.expert_counts, theirs.expert_counts)
        assert [len(logits) for logits in ours.router_logits] == [row.segments.num_tokens] * 2
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0, "nothing was compiled"
    assert graphs[3:] == graphs[3:4] * 4
    assert distance(gradients(plain), gradients(model)) <= 1e-5
