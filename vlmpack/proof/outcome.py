"""What a way of computing several samples comes to, and how far two of them are apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
IN_LOW_PRECISION = 4.0
"""How much larger errors may be in low precision than without packing: rounding sends tokens to other experts, and
kernels round at other places. A leak shows far below that, as nothing may move that is computed again."""
SMALLEST_GRADIENT = 1e-4
"""A parameter whose gradient is below this part of the model's largest entry is compared with that instead: times the
floor it is 1e-8 of that entry, less than one rounding in float32. Gradients that almost cancel are off by as much."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """Logits, loss and gradients. The gradients are the model's own tensors, taken from it and not copied."""

    logits: list[torch.Tensor]
    """float32 [L, V] of each sample."""
    target_losses: torch.Tensor
    """float32 [N]: cross-entropy (nats) of each target, of all samples."""
    sample_losses: torch.Tensor
    """float32 [B]: mean cross-entropy (nats) of each sample, as it was given."""
    sample_targets: tuple[int, ...]
    """Targets of each sample: how `target_losses` is cut."""
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
    sample_losses: float
    """The worst of the samples' own losses, as a part of the largest."""
    sample_target_losses: float
    """The same with the differences of a sample's targets added up without their signs."""
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
    sample_losses: float
    """Of each sample's own."""
    gradients: Mapping[str, float]
    """By group."""

    @classmethod
    def beyond(cls, own: Errors, padded: Errors, *, factor: float = 2.0) -> Limits:
        """Limits beyond errors that the model makes without packing.

        Args:
            own: of the samples alone: in low precision against float32; in float32 none.
            padded: of plain transformers' padded batch, whose tower adds up gradients over all images as packing does.
                Ten floors, or twice `own`, are counted at most, so that a mistake of that path widens no limit.
            factor: how much larger than these errors may be.
        """

        def limit(floor: float, error: float, batch: float) -> float:
            return floor + factor * max(error, min(batch, max(10 * floor, 2 * error)))

        def of_group(name: str) -> float:
            batch = padded.gradients.get(name)
            return limit(FLOOR["gradients"], own.gradients[name].error, 0.0 if batch is None else batch.error)

        return cls(
            logits=limit(FLOOR["logits"], own.logits, padded.logits),
            # Not of the mean's own error, which may be 0 by chance.
            loss=limit(FLOOR["loss"], own.target_losses, padded.target_losses),
            sample_losses=limit(FLOOR["loss"], own.sample_target_losses, padded.sample_target_losses),
            gradients={name: of_group(name) for name in own.gradients},
        )


def compare(seen: Outcome, truth: Outcome, *, low: bool = False) -> Errors:
    """Measure how far `seen` is from `truth`. A parameter with a gradient in one of them only counts as 0 in the other.

    `low`: one of them is in low precision. The largest error of a few roundings is chance, so logits and groups of
    gradients are then compared by their root mean square, as a part of that of the truth.
    """
    pairs = list(zip(seen.logits, truth.logits, strict=True))
    return Errors(
        logits=rms_distance(pairs) if low else max(distance(*pair) for pair in pairs),
        target_losses=_or_infinite((seen.target_losses - truth.target_losses).abs().sum() / truth.target_losses.sum()),
        loss=relative(seen.loss, truth.loss),
        sample_losses=distance(seen.sample_losses, truth.sample_losses),
        sample_target_losses=_unsigned(seen, truth),
        gradients=_gradients(seen, truth, low=low),
    )


def _gradients(seen: Outcome, truth: Outcome, *, low: bool) -> dict[str, GradientError]:
    largest = max((float(g.abs().max()) for g in truth.gradients.values()), default=0.0)
    groups: dict[str, GradientError] = {}
    pairs: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for name, like in {**seen.gradients, **truth.gradients}.items():
        found, expected = (of.gradients.get(name, torch.zeros_like(like)) for of in (seen, truth))
        error = distance(found, expected, least=SMALLEST_GRADIENT * largest)
        group = group_of(name)
        pairs.setdefault(group, []).append((found, expected))
        if group not in groups or not error <= groups[group].error:
            groups[group] = GradientError(error=error, parameter=name)
    if low:
        return {name: replace(worst, error=rms_distance(pairs[name])) for name, worst in groups.items()}
    return groups


def rms_distance(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Root mean square of the differences as a part of that of what is expected; NaN counts as infinitely far."""
    squares = [0.0, 0.0]
    for seen, expected in pairs:
        expected = expected.detach().float()
        squares[0] += float((seen.detach().to(expected.device).float() - expected).square().sum())
        squares[1] += float(expected.square().sum())
    return _or_infinite((squares[0] / max(squares[1], 1e-30)) ** 0.5)


def _unsigned(seen: Outcome, truth: Outcome) -> float:
    difference = (seen.target_losses - truth.target_losses).abs()
    means = [part.mean() for part in difference.split(truth.sample_targets) if len(part)]
    return _or_infinite(torch.stack(means).max() / truth.sample_losses.max())


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
    model: nn.Module,
    samples: Sequence[ProbeSample],
    logits: Sequence[torch.Tensor],
    loss: float,
    *,
    sample_losses: torch.Tensor | None = None,
) -> Outcome:
    """Put an outcome together: of these logits [L, V] of each sample, and of the gradients that the model holds by now.

    `sample_losses` [B] as they were given; None: those of the logits.
    """
    on_host = [host(x) for x in logits]
    losses = [target_losses(x, sample) for x, sample in zip(on_host, samples, strict=True)]
    return Outcome(
        logits=on_host,
        target_losses=torch.cat(losses),
        sample_losses=means_of(losses) if sample_losses is None else host(sample_losses),
        sample_targets=tuple(map(len, losses)),
        loss=loss,
        gradients=take_gradients(model),
    )


def target_losses(logits_LV: torch.Tensor, sample: ProbeSample) -> torch.Tensor:
    """float32 [N]: cross-entropy (nats) of each of a sample's own targets under its own logits."""
    targets = sample.targets.to(logits_LV.device)
    is_target = targets != IGNORE
    return F.cross_entropy(logits_LV[:-1][is_target].float(), targets[is_target], reduction="none")


def means_of(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """float32 [B]: the mean of each sample's target losses [n]; 0 for a sample without targets."""
    return torch.stack([x.sum() / max(len(x), 1) for x in losses])


def without_routers(family: Family) -> dict[str, bool]:
    """Whatever the configuration asks for, the load-balancing loss is looked at apart from the rest."""
    return {} if not family.has("experts") else {"output_router_logits": False}


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
