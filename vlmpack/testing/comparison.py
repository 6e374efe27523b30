"""Compare a packed row with each of its samples alone in plain transformers: logits, losses, gradients and work.

    alone = run_alone(model, samples)                     # plain transformers, one sample at a time
    packed = run_packed(model, row, samples)              # one packed row, or a padded batch that the step packs
    errors = compare(packed, alone)                       # every logit, loss and parameter, the vision tower's too
    assert not problems(errors, EQUAL[torch.float32]) + work_problems(packed.work, samples)

Errors are parts of the largest entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any, final

import torch
import torch.nn.functional as F
from torch import nn

from vlmpack.errors import ConfigError
from vlmpack.families.registry import family_of
from vlmpack.layout.batch import PaddedBatch
from vlmpack.layout.row import IGNORE, PackedRow
from vlmpack.testing.samples import Sample, alone, num_targets

if TYPE_CHECKING:  # the face of the room loads no transformers
    from vlmpack.model.engine import StepConfig
    from vlmpack.model.result import StepResult, Work

Gradients = Mapping[str, torch.Tensor]
"""By name of the parameter; parameters without a gradient are left out."""

SMALLEST_GRADIENT = 1e-4
"""A parameter whose gradient is below this part of the model's largest entry is compared with that part instead: times
the float32 limit it is 1e-8 of that entry, less than one rounding. Gradients that almost cancel are off by as much."""
ROUNDING = 1e-6
"""A bias's gradient below this part of its weight's is what rounding leaves of terms that cancel."""
LOW_PRECISION_FACTOR = 4.0
"""Errors in low precision may be so many times as large as without packing: rounding sends tokens to other experts, and
kernels round at other places. A leak shows far below that, as nothing may move that is computed again."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """Logits, losses and gradients of several samples. The gradients are the model's tensors, moved out of it."""

    logits: list[torch.Tensor]
    """float32 or float64 [L, V] of each sample, on the CPU."""
    target_losses: torch.Tensor
    """float32 [N]: cross-entropy (nats) of each target, of all samples."""
    sample_losses: torch.Tensor
    """float32 [B]: mean cross-entropy (nats) of each sample, as it was returned."""
    sample_targets: tuple[int, ...]
    """Number of targets of each sample: how `target_losses` is cut."""
    loss: float
    """Mean over the targets of all samples, as it was returned."""
    gradients: Gradients
    """Of that mean; frozen parameters have none."""
    work: Work | None = None
    """The counts of a packed step."""


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
    """Distance of one outcome from another, as parts of the largest entry."""

    logits: float
    """At every position of every sample."""
    target_losses: float
    """Absolute differences of the targets' losses, summed, as a part of the sum of those losses."""
    loss: float
    """Relative."""
    sample_losses: float
    """The worst of the samples' losses, as a part of the largest."""
    sample_target_losses: float
    """The same with the absolute differences of a sample's targets summed."""
    gradients: Mapping[str, GradientError]
    """The worst parameter of every group: modules of one name in all layers."""

    def measured(self, limits: Limits) -> list[Measurement]:
        """List each error beside its limit."""
        measured = [
            Measurement(name="logits", error=self.logits, allowed=limits.logits),
            Measurement(name="loss", error=self.loss, allowed=limits.loss),
            Measurement(name="sample losses", error=self.sample_losses, allowed=limits.sample_losses),
        ]
        for group, worst in self.gradients.items():
            allowed = limits.gradients.get(group, limits.gradient)
            name = f"gradient of {group}"
            measured.append(Measurement(name=name, error=worst.error, allowed=allowed, parameter=worst.parameter))
        return measured


@final
@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One error and its limit."""

    name: str
    """"logits", "loss", "sample losses", or "gradient of" a group of parameters."""
    error: float
    """A part of the largest entry."""
    allowed: float
    """The most that it may be."""
    parameter: str = ""
    """The worst parameter of a group."""

    @property
    def exceeds(self) -> bool:
        """Return whether the error is above its limit, or NaN."""
        return not self.error <= self.allowed

    def __str__(self) -> str:
        text = f"off by {self.error:.1e}, allowed {self.allowed:.1e}"
        return f"{text}, in {self.parameter}" if self.parameter else text


@final
@dataclass(frozen=True, kw_only=True)
class Limits:
    """The largest errors that count as equal."""

    logits: float
    """At every position."""
    loss: float
    """Relative."""
    gradient: float
    """Of any group of parameters that `gradients` does not name."""
    sample_losses: float = 1e-5
    """Of each sample's loss."""
    gradients: Mapping[str, float] = field(default_factory=dict)
    """By group."""
    cosine: float = inf
    """Of 1 - cosine of a parameter's two gradients."""

    @classmethod
    def beyond(cls, alone: Errors, padded: Errors, *, factor: float = 2.0) -> Limits:
        """Set limits beyond the errors that the model makes without packing.

        Args:
            alone: of the samples alone: in low precision against float32; in float32 none.
            padded: of plain transformers' padded batch, whose tower adds up gradients over all images as packing does.
                Ten floors, or twice `alone`, are counted at most, so that a mistake of that path widens no limit.
            factor: how much larger than these errors may be.
        """

        def limit(floor: float, error: float, batch: float) -> float:
            return floor + factor * max(error, min(batch, max(10 * floor, 2 * error)))

        def of_group(name: str) -> float:
            batch = padded.gradients.get(name)
            return limit(FLOOR.gradient, alone.gradients[name].error, 0.0 if batch is None else batch.error)

        return cls(
            logits=limit(FLOOR.logits, alone.logits, padded.logits),
            # Not beyond the mean's error, which may be 0 by chance.
            loss=limit(FLOOR.loss, alone.target_losses, padded.target_losses),
            sample_losses=limit(FLOOR.loss, alone.sample_target_losses, padded.sample_target_losses),
            gradient=FLOOR.gradient,
            gradients={name: of_group(name) for name in alone.gradients},
        )


FLOOR = Limits(logits=2e-5, loss=1e-5, gradient=1e-4)
"""Errors that float32 alone accounts for in any model on any device; a leak is a thousand times as much."""
EQUAL = {
    torch.float32: Limits(logits=5e-6, loss=1e-6, gradient=1e-5, cosine=1e-9),
    torch.float64: Limits(logits=1e-12, loss=1e-6, gradient=1e-12, cosine=1e-12),
}
"""Limits of tiny models on a CPU. Losses are summed in float32 in either. In low precision `Limits.beyond` the errors
of the samples alone count."""


# ---------------------------------------------------------------------- running


def run_alone(
    model: nn.Module,
    samples: Sequence[Sample],
    *,
    gradients: bool = True,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Outcome:
    """Compute each sample alone through the unmodified model; the loss is the mean over all targets.

    Args:
        model: without packing.
        samples: on any device.
        gradients: also run the backward passes.
        forward_context: entered around each forward pass, and not around backward passes: mode, autocast.

    Raises:
        ConfigError: packing is enabled on the model.
    """
    from vlmpack.model.enable import is_packing

    if is_packing(model):
        raise ConfigError("packing is enabled on the model that is the reference; call disable_packing(model) first")
    count = sum(num_targets(sample) for sample in samples)
    logits, loss = [], 0.0
    take_gradients(model)
    for sample in samples:
        with torch.set_grad_enabled(gradients), forward_context():
            logits_LV = plain_output(model, alone(sample, labels=False)).logits[0]
            sample_loss = target_losses(logits_LV, sample["labels"]).sum() / count
        if gradients:
            backward(sample_loss)
        logits.append(logits_LV.detach())
        loss += float(sample_loss.detach())
    return outcome_of(model, samples, logits, loss)


def run_packed(
    model: nn.Module,
    packed: PackedRow | PaddedBatch,
    samples: Sequence[Sample],
    *,
    settings: StepConfig | None = None,
    gradients: bool = True,
) -> Outcome:
    """Compute samples as one packed row by `PackedStep`; `samples` are those of the row, in its order.

    Packing is enabled meanwhile, and afterwards as it was.
    """
    from vlmpack.model.enable import disable_packing, is_packing
    from vlmpack.model.step import PackedStep

    enabled = is_packing(model)
    take_gradients(model)
    try:
        with torch.set_grad_enabled(gradients):
            result = PackedStep(model, settings)(packed, logits=True)
        if gradients:
            backward(result.loss)
        return outcome_of_step(model, result, samples)
    finally:
        if not enabled:
            disable_packing(model)


def plain_output(
    model: nn.Module, inputs: Mapping[str, Any], *, use_cache: bool | None = False, **settings: bool
) -> Any:
    """Call an unmodified model on its device; by default without its load-balancing loss.

    `use_cache`: None leaves it to the model's configuration.
    """
    from vlmpack.model.plain import find_model

    device = next(model.parameters()).device
    placed = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    if use_cache is not None:
        settings["use_cache"] = use_cache
    if family_of(find_model(model)).has("experts"):
        settings.setdefault("output_router_logits", False)
    return model(**placed, **settings)


def outcome_of_step(model: nn.Module, result: StepResult, samples: Sequence[Sample]) -> Outcome:
    """Collect the outcome of a packed step that returned its logits, and of the gradients that the model holds."""
    loss, losses = float(result.loss.detach()), result.sample_losses
    return outcome_of(model, samples, logits_by_sample(result), loss, sample_losses=losses, work=result.work)


def outcome_of(
    model: nn.Module,
    samples: Sequence[Sample],
    logits: Sequence[torch.Tensor],
    loss: float,
    *,
    sample_losses: torch.Tensor | None = None,
    work: Work | None = None,
) -> Outcome:
    """Collect an outcome from logits [L, V] of each sample and from the gradients that the model holds.

    `sample_losses` [B] as they were returned; None: those of the logits. `work` of a packed step.
    """
    on_host = [to_host(x) for x in logits]
    losses = [target_losses(x, sample["labels"]) for x, sample in zip(on_host, samples, strict=True)]
    return Outcome(
        logits=on_host,
        target_losses=torch.cat(losses),
        sample_losses=mean_losses(losses) if sample_losses is None else to_host(sample_losses),
        sample_targets=tuple(map(len, losses)),
        loss=loss,
        gradients=take_gradients(model),
        work=work,
    )


def logits_by_sample(result: StepResult) -> list[torch.Tensor]:
    """[L, V] logits of each sample, cut from those of the row."""
    assert result.row_logits is not None
    return [result.row_logits[0, start:stop] for start, stop in result.segments.spans]


def target_losses(logits_LV: torch.Tensor, labels_L: torch.Tensor) -> torch.Tensor:
    """float32 [N]: cross-entropy (nats) of each of a sample's targets under its logits; labels are not shifted."""
    targets = labels_L[1:].to(logits_LV.device)
    is_target = targets != IGNORE
    return F.cross_entropy(logits_LV[:-1][is_target].float(), targets[is_target], reduction="none")


def mean_losses(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """float32 [B]: mean of each sample's target losses [n]; 0 for a sample without targets."""
    return torch.stack([x.sum() / max(len(x), 1) for x in losses])


def backward(loss: torch.Tensor) -> None:
    """Compute gradients, if anything is trained."""
    if loss.requires_grad:
        loss.backward()


def take_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Move the gradients out of the model."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for p in model.parameters():
        p.grad = None
    return gradients


def to_host(x: torch.Tensor) -> torch.Tensor:
    """Copy to the CPU in float32 at least, without a graph."""
    return x.detach().to("cpu", torch.promote_types(x.dtype, torch.float32))


# ---------------------------------------------------------------------- comparing


def compare(
    actual: Outcome, truth: Outcome, *, low: bool = False, smallest_gradient: float = SMALLEST_GRADIENT
) -> Errors:
    """Measure the distance of `actual` from `truth`. A gradient that one of them lacks counts as 0.

    Args:
        actual: what is compared.
        truth: what it is compared with.
        low: one of them is in low precision. The largest error of a few roundings is chance, so logits and groups of
            gradients are then compared by their root mean square, as a part of that of the truth.
        smallest_gradient: see `SMALLEST_GRADIENT`.
    """
    pairs = list(zip(actual.logits, truth.logits, strict=True))
    return Errors(
        logits=rms_distance(pairs) if low else max(distance(*pair) for pair in pairs),
        target_losses=_or_infinite(
            (actual.target_losses - truth.target_losses).abs().sum() / truth.target_losses.sum()
        ),
        loss=relative(actual.loss, truth.loss),
        sample_losses=distance(actual.sample_losses, truth.sample_losses),
        sample_target_losses=_worst_sample(actual, truth),
        gradients=_gradient_errors(actual.gradients, truth.gradients, low=low, smallest=smallest_gradient),
    )


def problems(errors: Errors, limits: Limits) -> list[str]:
    """Describe every error above its limit, one line each; empty: packed equals alone."""
    return [f"{each.name}: {each}" for each in errors.measured(limits) if each.exceeds]


@final
@dataclass(frozen=True, kw_only=True)
class GradientCosine:
    """The parameter whose two gradients differ most in direction."""

    cosine: float
    """The smallest of all parameters, computed in float64."""
    parameter: str
    """Its name."""
    parameters: int
    """Number of those that were compared."""


def smallest_cosine(actual: Gradients, truth: Gradients) -> GradientCosine:
    """Find the smallest cosine of any parameter's two gradients.

    A parameter with a gradient on one side only counts as 0, one whose gradient is 0 on both as 1, and so does a bias
    of whose gradient rounding alone is left.
    """
    cosines = {name: _cosine(actual.get(name), truth.get(name)) for name in {**truth, **actual}}
    for name in cosines.keys() & truth.keys():
        pair = (truth[name], actual.get(name, truth[name]))
        if all(float(gradient.abs().max()) < ROUNDING * _largest_of_weight(name, truth) for gradient in pair):
            cosines[name] = 1.0
    worst = min(cosines, key=cosines.__getitem__)
    return GradientCosine(cosine=cosines[worst], parameter=worst, parameters=len(cosines))


def _cosine(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    if a is None or b is None:
        return 0.0
    x, y = a.double().flatten(), b.double().flatten()
    norms = float(x.norm() * y.norm())
    return float(x @ y) / norms if norms else float(not x.any() and not y.any())


def _gradient_errors(actual: Gradients, truth: Gradients, *, low: bool, smallest: float) -> dict[str, GradientError]:
    largest = max((float(g.abs().max()) for g in truth.values()), default=0.0)
    groups: dict[str, GradientError] = {}
    pairs: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for name, like in {**actual, **truth}.items():
        pair = (actual.get(name, torch.zeros_like(like)), truth.get(name, torch.zeros_like(like)))
        least = max(smallest * largest, _largest_of_weight(name, truth))
        error, group = distance(*pair, least=least), group_of(name)
        pairs.setdefault(group, []).append(pair)
        if group not in groups or not error <= groups[group].error:
            groups[group] = GradientError(error=error, parameter=name)
    if low:
        return {name: replace(worst, error=rms_distance(pairs[name])) for name, worst in groups.items()}
    return groups


def _largest_of_weight(name: str, truth: Gradients) -> float:
    """The largest entry of the gradient of a bias's weight; 0 for other parameters.

    Both sum the same terms over tokens. In a bias they may cancel: that of keys which are not rotated shifts all scores
    of a query alike, and its gradient is what rounding leaves.
    """
    weight = truth.get(f"{name.removesuffix('bias')}weight") if name.endswith(".bias") else None
    return 0.0 if weight is None else float(weight.abs().max())


def group_of(parameter: str) -> str:
    """`model.language_model.layers.3.self_attn.q_proj.weight` is one of `language_model.layers.self_attn`."""
    modules = parameter.split(".")[:-1]
    named = (part for part in modules if not part.isdigit() and part not in ("model", "base_model", "module"))
    return ".".join([*named][:3]) or parameter


def distance(actual: torch.Tensor, expected: torch.Tensor, *, least: float = 0.0) -> float:
    """Largest difference as a part of the largest entry (at least `least`); NaN counts as infinitely far."""
    expected = _at_least_float32(expected)
    difference = (_at_least_float32(actual).to(expected.device) - expected).abs().nan_to_num(nan=inf)
    return float(difference.max()) / max(float(expected.abs().max()), least, 1e-30)


def rms_distance(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Root mean square of the differences as a part of that of what is expected; NaN counts as infinitely far."""
    squares = [0.0, 0.0]
    for actual, expected in pairs:
        expected = _at_least_float32(expected)
        squares[0] += float((_at_least_float32(actual).to(expected.device) - expected).square().sum())
        squares[1] += float(expected.square().sum())
    return _or_infinite((squares[0] / max(squares[1], 1e-30)) ** 0.5)


def relative(actual: float, expected: float) -> float:
    """Relative difference of two numbers; NaN counts as infinitely far."""
    return _or_infinite(abs(actual - expected) / max(abs(expected), 1e-30))


def _at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def _or_infinite(difference: float | torch.Tensor) -> float:
    return float(difference) if difference == difference else inf


def _worst_sample(actual: Outcome, truth: Outcome) -> float:
    difference = (actual.target_losses - truth.target_losses).abs()
    means = [part.mean() for part in difference.split(truth.sample_targets) if len(part)]
    return _or_infinite(torch.stack(means).max() / truth.sample_losses.max())
