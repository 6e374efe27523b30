"""The examples of models that take boundaries run, and Megatron-Core's own schedule takes the forward step of one."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_models import one_process
from test_example import EXAMPLES, run
from torch import nn

from vlmpack.layout import SlotRule
from vlmpack.testing import mixed_samples, padded, tiny_model


def numbers(text: str) -> list[float]:
    return [float(number) for number in text.split()]


@pytest.mark.slow
def test_the_model_prints_the_losses_of_receipts_alone(tmp_path: Path) -> None:
    lines = run("thd_model.py", folder=tmp_path)
    assert len(lines) == 3
    for line in lines:
        packed, alone = line.removeprefix("packed").split("alone")
        assert numbers(packed) == pytest.approx(numbers(alone), abs=2e-4)  # printed with four decimals


@pytest.mark.slow
def test_the_forward_step_trains(tmp_path: Path) -> None:
    losses = [float(line.rsplit(maxsplit=1)[1]) for line in run("megatron_step.py", folder=tmp_path)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


@pytest.fixture
def forward_steps(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return import_module("megatron_step")


class Scheduled(nn.Module):
    """A model as Megatron's schedules need it: with their configuration, and a place for a pipeline's input."""

    def __init__(self, module: nn.Module) -> None:
        from megatron.core.enums import ModelType
        from megatron.core.transformer import TransformerConfig

        super().__init__()
        self.module, self.model_type = module, ModelType.encoder_or_decoder
        self.config = TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=1, calculate_per_token_loss=True, cuda_graph_scope=[]
        )

    def set_input_tensor(self, _: Any) -> None:
        """There is one stage."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def test_megatrons_own_schedule_adds_up_micro_batches(forward_steps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = tiny_model("qwen3_vl_moe", layers=1, vision_depth=1)
    samples = mixed_samples(reference.config, kinds=("image", "text", "text", "image"))
    batches = [padded(samples[:2]), padded(samples[2:])]
    model = forward_steps.ThdQwen3VLMoe(reference)
    settings = {"slots": SlotRule(multiple=4), "config": reference.config}
    forward_steps.train_step(forward_steps.ForwardStep(**settings), iter(batches), model, 2)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    with one_process():
        from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

        zeros = torch.zeros  # the schedule counts targets on "cuda"
        monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **others: zeros(*size, **others))
        forward_backward_no_pipelining(
            forward_step_func=forward_steps.ForwardStep(**settings),
            data_iterator=iter(batches),
            model=Scheduled(model),
            num_microbatches=2,
            seq_length=1,
            micro_batch_size=1,
        )
    total = sum(batch.metadata.num_targets for batch in batches)
    compared = 0
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (expected[name] is None)
        if parameter.grad is not None:
            compared += 1
            torch.testing.assert_close(parameter.grad / total, expected[name], msg=name)
    assert compared > 20
