"""What a way of computing several samples comes to, and how far two of them are apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import final

import torch
import torch.nn.functional as F
from torch import nn

from vlmpack.families import Family
from vlmpack.layout import IGNORE
from vlmpack.proof.samples import ProbeSample

FLOOR = {"logits": 2e-5, "loss": 1e-5, "gradients": 1e-4}
"""What float32 alone accounts for, as a part of the largest entry; a leak is a thousand times as much."""
SMALLEST_GRADIENT = 1e-6
"""A parameter whose gradient is below this part of the model's largest entry is compared with that instead."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """Logits, loss and gradients. The gradients are the model's own tensors, taken from it and not copied."""

    logits: list[torch.Tensor]
    """float32 [L, V] of each sample."""
    target_losses: torch.Tensor
    """float32 [N]: cross-entropy (nats) of each target, of all samples."""
    loss: float
    """Mean over the targets of all samples, as it was given."""
    gradients: Mapping[str, torch.Tensor]
    """Of that mean, by name of the parameter; frozen parameters have none."""


@final
@dataclass(frozen=True, kw_only=True)
class GradientError:
    """The worst parameter of a group."""

    error: float
    """Largest difference, as a part of the parameter's largest entry."""
    parameter: str
    """Its name."""


@final
@dataclass(frozen=True, kw_only=True)
class Errors:
    """How far one outcome is from another, as parts of the largest entry."""

    logits: float
    """At every position of every sample."""
    target_losses: float
    """Differences of the targets' own losses, added up without their signs, as a part of the sum of those losses."""
    loss: float
    """Relative."""
    gradients: Mapping[str, GradientError]
    """The worst parameter of every group: modules of one name in all layers."""


@final
@dataclass(frozen=True, kw_only=True)
class Limits:
    """What errors may be: what float32 accounts for, and twice the error that is not packing's."""

    logits: float
    """At every position."""
    loss: float
    """Relative."""
    gradients: Mapping[str, float]
    """By group."""

    @classmethod
    def beyond(cls, own: Errors, padded: Errors) -> Limits:
        """Limits beyond errors that the model makes without packing.

        Args:
            own: of the samples alone: in low precision against float32; in float32 none.
            padded: of plain transformers' padded batch, whose tower adds up gradients over all images as packing does.
                Ten floors, or twice `own`, are counted at most, so that a mistake of that path widens no limit.
        """

        def limit(floor: float, error: float, batch: float) -> float:
            return floor + 2 * max(error, min(batch, max(10 * floor, 2 * error)))

        def of_group(name: str) -> float:
            batch = padded.gradients.get(name)
            return limit(FLOOR["gradients"], own.gradients[name].error, 0.0 if batch is None else batch.error)

        return cls(
            logits=limit(FLOOR["logits"], own.logits, padded.logits),
            # Not of the mean's own error, which may be 0 by chance.
            loss=limit(FLOOR["loss"], own.target_losses, padded.target_losses),
            gradients={name: of_group(name) for name in own.gradients},
        )


def compare(seen: Outcome, truth: Outcome) -> Errors:
    """How far `seen` is from `truth`. A parameter that has a gradient in one of them only counts as 0 in the other."""
    largest = max((float(g.abs().max()) for g in truth.gradients.values()), default=0.0)
    groups: dict[str, GradientError] = {}
    for name, like in {**seen.gradients, **truth.gradients}.items():
        found, expected = (of.gradients.get(name, torch.zeros_like(like)) for of in (seen, truth))
        error = distance(found, expected, least=SMALLEST_GRADIENT * largest)
        group = group_of(name)
        if group not in groups or not error <= groups[group].error:
            groups[group] = GradientError(error=error, parameter=name)
    return Errors(
        logits=max(distance(*pair) for pair in zip(seen.logits, truth.logits, strict=True)),
        target_losses=_or_infinite((seen.target_losses - truth.target_losses).abs().sum() / truth.target_losses.sum()),
        loss=relative(seen.loss, truth.loss),
        gradients=groups,
    )


def distance(seen: torch.Tensor, expected: torch.Tensor, *, least: float = 0.0) -> float:
    """Largest difference as a part of the largest entry (at least `least`); NaN counts as infinitely far."""
    expected = expected.detach().float()
    difference = (seen.detach().to(expected.device).float() - expected).abs().nan_to_num(nan=inf)
    return float(difference.max()) / max(float(expected.abs().max()), least, 1e-30)


def relative(seen: float, expected: float) -> float:
    """Relative difference of two numbers; NaN counts as infinitely far."""
    return _or_infinite(abs(seen - expected) / max(abs(expected), 1e-30))


def _or_infinite(difference: float | torch.Tensor) -> float:
    """NaN is farther than anything."""
    return float(difference) if difference == difference else inf


def group_of(parameter: str) -> str:
    """`model.language_model.layers.3.self_attn.q_proj.weight` is one of `language_model.layers.self_attn`."""
    modules = parameter.split(".")[:-1]
    named = [part for part in modules if not part.isdigit() and part not in ("model", "base_model", "module")]
    return ".".join(named[:3]) or parameter


# ---------------------------------------------------------------------- its parts


def outcome_of(
    model: nn.Module, samples: Sequence[ProbeSample], logits: Sequence[torch.Tensor], loss: float
) -> Outcome:
    """Of these logits [L, V] of each sample, and of the gradients that the model holds by now."""
    on_host = [host(x) for x in logits]
    return Outcome(
        logits=on_host,
        target_losses=torch.cat([target_losses(x, sample) for x, sample in zip(on_host, samples, strict=True)]),
        loss=loss,
        gradients=take_gradients(model),
    )


def target_losses(logits_LV: torch.Tensor, sample: ProbeSample) -> torch.Tensor:
    """float32 [N]: cross-entropy (nats) of each of a sample's own targets under its own logits."""
    targets = sample.targets.to(logits_LV.device)
    is_target = targets != IGNORE
    return F.cross_entropy(logits_LV[:-1][is_target].float(), targets[is_target], reduction="none")


def without_routers(family: Family) -> dict[str, bool]:
    """Whatever the configuration asks for, the load-balancing loss is looked at apart from the rest."""
    return {} if family.experts is None else {"output_router_logits": False}


def backward(loss: torch.Tensor) -> None:
    """Gradients, if anything is trained."""
    if loss.requires_grad:
        loss.backward()


def take_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients themselves: the model lets go of them."""
    taken = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for p in model.parameters():
        p.grad = None
    return taken


def host(x: torch.Tensor) -> torch.Tensor:
    """float32, on the CPU, without a graph."""
    return x.detach().float().cpu()
