"""The row that stands in for no samples: a step of loss 0 through every part of the model."""

from __future__ import annotations

import pytest
import torch
from cases import slow

from vlmpack.collate import VLMCollator
from vlmpack.model import PackedStep, StepConfig
from vlmpack.testing import tiny_model, tiny_processor

FAMILIES = ("qwen3_vl_moe", *slow("qwen2_vl", "qwen2_5_vl", "qwen3_5"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("items", [None, 7, 0], ids=["its own count", "others have targets", "nobody has targets"])
def test_it_costs_nothing_and_every_parameter_takes_part(family, items):
    model = tiny_model(family, processor=(processor := tiny_processor(family)))
    result = PackedStep(model)(VLMCollator(processor, layout="packed").collate([]), num_items_in_batch=items)
    result.loss.backward()
    assert result.loss == result.num_targets == 0
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert [name for name, gradient in gradients.items() if gradient is None] == []
    assert [name for name, gradient in gradients.items() if torch.count_nonzero(gradient)] == []


def test_its_tokens_balance_no_experts():
    model = tiny_model("qwen3_vl_moe", processor=(processor := tiny_processor("qwen3_vl_moe")))
    model.config.text_config.output_router_logits = True
    result = PackedStep(model, StepConfig(z_loss_coef=0.1))(VLMCollator(processor, layout="packed").collate([]))
    assert result.routers is not None
    assert result.routers.added > 0  # the guard: there was something to add
    assert result.loss == 0
