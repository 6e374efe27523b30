"""How far two outcomes are apart, and how far they may be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vlmpack.testing.comparison import (
    FLOOR,
    Errors,
    GradientError,
    Limits,
    Outcome,
    compare,
    distance,
    group_of,
    relative,
)


def outcome(*, scale: float = 1.0, **gradients: float) -> Outcome:
    return Outcome(
        logits=[scale * torch.tensor([[1.0, -2.0]])],
        target_losses=[scale * torch.tensor([1.0]), scale * torch.tensor([3.0])],
        sample_losses=scale * torch.tensor([1.0, 3.0]),
        loss=2.0 * scale,
        gradients={name: torch.tensor([value, 0.5]) for name, value in gradients.items()},
    )


def test_an_outcome_is_as_far_as_its_worst_entry() -> None:
    errors = compare(outcome(scale=1.1), outcome())
    assert errors.logits == pytest.approx(0.1, rel=1e-5)
    assert errors.loss == pytest.approx(0.1, rel=1e-5)
    assert errors.target_losses == pytest.approx(0.1, rel=1e-5)


def test_in_low_precision_one_rounding_among_many_is_no_worst_case() -> None:
    truth = replace(outcome(), gradients={"a.weight": torch.ones(100), "a.bias": torch.ones(1)})
    seen = replace(truth, gradients={"a.weight": torch.ones(100), "a.bias": torch.full((1,), 2.0)})
    assert compare(seen, truth).gradients["a"] == GradientError(error=1.0, parameter="a.bias")
    assert compare(seen, truth, low=True).gradients["a"].error == pytest.approx(101**-0.5)


def test_a_group_is_as_far_as_its_worst_parameter() -> None:
    names = [f"model.language_model.layers.{i}.mlp.up_proj.weight" for i in (0, 1)]
    truth = replace(outcome(), gradients={name: torch.tensor([1.0]) for name in names})
    seen = replace(truth, gradients={**truth.gradients, names[1]: torch.tensor([1.5])})
    assert compare(seen, truth).gradients == {"language_model.layers.mlp": GradientError(error=0.5, parameter=names[1])}


@pytest.mark.parametrize(("seen", "expected"), [({}, {"a.weight": 2.0}), ({"a.weight": 2.0}, {})])
def test_a_gradient_that_one_side_lacks_is_wholly_wrong(seen: dict[str, float], expected: dict[str, float]) -> None:
    errors = compare(outcome(**seen), outcome(**expected))
    assert errors.gradients["a"].error >= 1


def test_nan_is_infinitely_far() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert distance(nan, torch.ones(2)) == float("inf")
    assert relative(float("nan"), 1.0) == float("inf")


def test_a_batch_of_nan_widens_limits_no_further_than_any_other() -> None:
    errors = compare(outcome(scale=float("nan")), outcome())
    limits = Limits.beyond(compare(outcome(), outcome()), errors)
    assert (limits.logits, limits.loss) == pytest.approx((21 * FLOOR.logits, 21 * FLOOR.loss))


@pytest.mark.parametrize(
    ("parameter", "group"),
    [
        ("model.language_model.layers.3.self_attn.q_proj.weight", "language_model.layers.self_attn"),
        ("model.visual.blocks.0.attn.qkv.bias", "visual.blocks.attn"),
        (
            "base_model.model.model.language_model.layers.1.mlp.up_proj.lora_A.default.weight",
            "language_model.layers.mlp",
        ),
        ("lm_head.weight", "lm_head"),
        ("weight", "weight"),
    ],
)
def test_a_group_is_one_module_of_all_layers(parameter: str, group: str) -> None:
    assert group_of(parameter) == group


def errors_of(error: float) -> Errors:
    gradients = {"a": GradientError(error=error, parameter="a.weight")}
    return Errors(
        logits=error, target_losses=error, loss=0.0, sample_losses=0.0, sample_target_losses=error, gradients=gradients
    )


@pytest.mark.parametrize(
    ("own", "padded", "counted"),
    [
        pytest.param(0.03, 0.01, 0.03, id="the model's own error"),
        pytest.param(0.03, 0.05, 0.05, id="that of the padded batch, which adds up over all samples too"),
        pytest.param(0.03, 1.0, 0.06, id="of a broken padded batch no more than twice the model's own"),
    ],
)
def test_limits_are_a_floor_and_twice_an_error_that_is_not_packings(own: float, padded: float, counted: float) -> None:
    limits = Limits.beyond(errors_of(own), errors_of(padded))
    assert limits.logits == pytest.approx(FLOOR.logits + 2 * counted)
    assert limits.loss == pytest.approx(FLOOR.loss + 2 * counted)
    assert limits.gradients == {"a": pytest.approx(FLOOR.gradient + 2 * counted)}
