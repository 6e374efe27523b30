"""A step's result tells what it is, and never waits for a device to tell it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vlmpack.layout import SlotRule
from vlmpack.layout.device import nothing_on_host
from vlmpack.model import PackedStep, StepConfig, StepResult
from vlmpack.testing import padded, random_sample, tiny_model


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


def test_a_result_tells_its_loss_and_its_counts(result: StepResult) -> None:
    assert repr(result) == told(result, f"{result.loss.item():.4f}")


def test_a_loss_on_a_device_is_not_waited_for(result: StepResult) -> None:
    assert repr(replace(result, loss=result.loss.to("meta"))) == told(result, "on meta")
    with nothing_on_host():
        assert repr(result) == told(result, "on cpu")


def test_a_loss_that_is_no_number_does_not_stand_in_the_way(result: StepResult) -> None:
    assert repr(replace(result, loss=torch.ones(2))) == told(result, "not known")
