"""A step's result tells what it is, and never waits for a device to tell it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import slow
from fixtures.processors import tiny_model, tiny_processor
from torch import nn

from vlmpack.collate import VLMCollator
from vlmpack.layout import SlotRule
from vlmpack.layout.batch import IGNORE
from vlmpack.layout.device import nothing_on_host
from vlmpack.model import PackedStep, StepConfig, StepResult
from vlmpack.testing import padded
from vlmpack.testing.samples import random_sample


@pytest.fixture(scope="module")
def result() -> StepResult:
    model = tiny_model("qwen3")
    samples = [random_sample(model.config, "text", seed=seed) for seed in range(2)]
    return PackedStep(model, StepConfig(slots=SlotRule(row_multiple=64)))(padded(samples))


def told(result: StepResult, loss: str) -> str:
    tokens = sum(result.segments.lengths)
    assert 0 < result.num_targets < tokens < 64
    return (
        f"StepResult(loss {loss}, {result.num_targets} targets, 2 samples, {tokens} tokens in a row of 64, 0 patches)"
    )


def test_a_loss_on_a_device_is_not_waited_for(result: StepResult) -> None:
    assert repr(replace(result, loss=result.loss.to("meta"))) == told(result, "on meta")
    with nothing_on_host():
        assert repr(result) == told(result, "on cpu")


def test_temperature_and_entropies_are_those_of_plain_logits() -> None:
    model = tiny_model("qwen3")
    samples = [random_sample(model.config, "text", seed=seed) for seed in range(2)]
    batch = padded(samples)
    with torch.no_grad():
        tempered = (model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits / 0.7).log_softmax(-1)
    entropies = -(tempered.exp() * tempered).sum(-1)
    logprobs = tempered[:, :-1].gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    targets = batch.labels[:, 1:] != IGNORE
    result = PackedStep(model)(batch, temperature=0.7, entropy=True)
    assert result.entropies is not None
    assert targets.sum() == result.num_targets > 0
    torch.testing.assert_close(result.entropies[:, :-1], entropies[:, :-1] * targets)
    torch.testing.assert_close(result.logprobs[:, :-1], logprobs * targets)
    torch.testing.assert_close(result.sample_losses, -(logprobs * targets).sum(1) / targets.sum(1))
    assert PackedStep(model)(batch).entropies is None


class Wrapped(nn.Module):
    """A wrapper whose work in the backward pass hangs on outputs, as that of DDP and FSDP2 does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module, self.called = model, list[str]()

    def forward(self, **inputs: Any) -> Any:
        output = self.module(**inputs)
        for name, value in output.items():
            if value.requires_grad:
                output[name] = value.clone()
                output[name].register_hook(lambda gradient, name=name: self.called.append(name))
        return output


def test_the_backward_pass_of_single_targets_goes_through_the_output_of_wrappers() -> None:
    model = Wrapped(tiny_model("qwen3"))
    result = PackedStep(model)(padded([random_sample(model.module.config, "text", seed=0)]), entropy=True)
    assert result.entropies is not None
    (result.logprobs.sum() + result.entropies.sum()).backward()
    assert sorted(model.called) == ["target_entropies", "target_logprobs"]


# ---------------------------------------------------------------------- test no samples
#
# The row that stands in for no samples: a step of loss 0 through every part of the model.


NO_SAMPLES = ("qwen3_vl_moe", *slow("qwen2_vl", "qwen2_5_vl", "qwen3_5"))


@pytest.mark.parametrize("family", NO_SAMPLES)
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
