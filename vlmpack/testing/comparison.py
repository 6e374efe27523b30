"""Compare a packed row with each of its samples alone in plain transformers: logits, losses and gradients.

    alone = run_alone(model, samples)                     # plain transformers, one sample at a time
    packed = run_packed(model, row, samples)              # one packed row, or a padded batch that the step packs
    errors = compare(packed, alone)                       # logits, losses and gradients, including the vision tower's
    assert all(each.error <= each.allowed for each in errors.measured(FLOOR))

Errors are fractions of the largest entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from vlmpack.context_parallel.mesh import gathered
from vlmpack.errors import ConfigError
from vlmpack.families.registry import family_of
from vlmpack.layout.batch import PaddedBatch
from vlmpack.layout.row import IGNORE, PackedRow
from vlmpack.model.enable import disable_packing, is_packing
from vlmpack.model.engine import StepConfig
from vlmpack.model.plain import find_model
from vlmpack.model.result import StepResult
from vlmpack.model.step import PackedStep
from vlmpack.testing.samples import Sample, alone, num_targets

Gradients = Mapping[str, torch.Tensor]
"""Gradients by name of the parameter; parameters without a gradient are left out."""

SMALLEST_GRADIENT = 1e-4
"""A gradient's error is divided by at least this fraction of the model's largest gradient entry. Gradients that almost
cancel have errors of that order: times the float32 limit, this is 1e-8 of the largest entry, less than one rounding."""
ROUNDING = 1e-6
"""A bias's gradient below this fraction of its weight's is only the rounding error of terms that cancel."""
LOW_PRECISION_FACTOR = 4.0
"""In low precision, errors may be this many times as large as without packing: rounding sends tokens to other experts,
and kernels round in other places. Isolation checks still find much smaller leaks: they repeat the same computation, so
no logit may move."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """Logits, losses and gradients of several samples. The gradients are the model's own tensors, moved out of it."""

    logits: list[torch.Tensor]
    """Logits of each sample: float32 or float64 [L, V], on the CPU."""
    target_losses: list[torch.Tensor]
    """Cross-entropy (nats) of each target of each sample: float32 [n]."""
    sample_losses: torch.Tensor
    """Mean cross-entropy (nats) of each sample, as the pass returned it: float32 [B]."""
    loss: float
    """Mean loss over the targets of all samples, as the pass returned it."""
    gradients: Gradients
    """Gradients of `loss`; frozen parameters have none."""


@final
@dataclass(frozen=True, kw_only=True)
class GradientError:
    """The error of the worst parameter of a group."""

    error: float
    """Largest difference, as a fraction of the parameter's largest entry; in low precision, the group's error by root
    mean square."""
    parameter: str
    """Name of the parameter."""
    parameters: Mapping[str, float] = field(default_factory=dict, compare=False)
    """The error of each parameter of the group, as a fraction of its largest entry."""

    def above(self, limit: float) -> list[str]:
        """Return the names of the parameters whose errors are above a limit."""
        return [name for name, error in self.parameters.items() if not error <= limit]


@final
@dataclass(frozen=True, kw_only=True)
class Errors:
    """Errors of one outcome against another, as fractions of the largest entry."""

    logits: float
    """Largest error of the logits at any position of any sample."""
    target_losses: float
    """Sum of the absolute errors of the targets' losses, as a fraction of the sum of those losses."""
    loss: float
    """Relative error of the loss."""
    sample_losses: float
    """Largest error of a sample's loss, as a fraction of the largest sample loss."""
    sample_target_losses: float
    """Largest mean absolute error of a sample's target losses, as a fraction of the largest sample loss."""
    gradients: Mapping[str, GradientError]
    """The worst parameter of each group. A group has the modules with one name in all layers."""

    def measured(self, limits: Limits) -> list[Measurement]:
        """List each error beside its limit."""
        measured = [
            Measurement(name="logits", error=self.logits, allowed=limits.logits),
            Measurement(name="loss", error=self.loss, allowed=limits.loss),
            Measurement(name="sample losses", error=self.sample_losses, allowed=limits.sample_losses),
        ]
        for group, worst in self.gradients.items():
            allowed = limits.of_group(group)
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
    """The error, as a fraction of the largest entry."""
    allowed: float
    """The limit of `error`."""
    parameter: str = ""
    """Name of the worst parameter of a group."""

    def __str__(self) -> str:
        text = f"off by {self.error:.1e}, allowed {self.allowed:.1e}"
        return f"{text}, in {self.parameter}" if self.parameter else text


@final
@dataclass(frozen=True, kw_only=True)
class Limits:
    """The largest errors that count as equal."""

    logits: float
    """Limit of the logits' error at any position."""
    loss: float
    """Limit of the loss's relative error."""
    gradient: float
    """Limit for each group of parameters that `gradients` does not name."""
    sample_losses: float = 1e-5
    """Limit of the error of each sample's loss."""
    gradients: Mapping[str, float] = field(default_factory=dict)
    """Limits by group of parameters."""
    cosine: float = inf
    """Limit of 1 - cosine of a parameter's two gradients."""

    def of_group(self, group: str) -> float:
        """Return the limit of a group of parameters."""
        return self.gradients.get(group, self.gradient)

    @classmethod
    def beyond(cls, alone: Errors, padded: Errors, *, factor: float = 2.0) -> Limits:
        """Set limits above the errors that the model makes without packing.

        Args:
            alone: errors of the samples alone: in low precision, their errors against float32; in float32, zero.
            padded: errors of plain transformers' padded batch, where the vision tower sums gradients over all images,
                as it does in a packed row. Each is capped at ten floors or twice `alone`, whichever is larger, so that
                a bug in that pass cannot widen a limit much.
            factor: the limits are the floor plus this many times these errors.
        """

        def limit(floor: float, error: float, batch: float) -> float:
            return floor + factor * max(error, min(batch, max(10 * floor, 2 * error)))

        def of_group(name: str) -> float:
            batch = padded.gradients.get(name)
            return limit(FLOOR.gradient, alone.gradients[name].error, 0.0 if batch is None else batch.error)

        return cls(
            logits=limit(FLOOR.logits, alone.logits, padded.logits),
            # The mean's own error may be 0 by chance, so use the summed absolute errors.
            loss=limit(FLOOR.loss, alone.target_losses, padded.target_losses),
            sample_losses=limit(FLOOR.loss, alone.sample_target_losses, padded.sample_target_losses),
            gradient=FLOOR.gradient,
            gradients={name: of_group(name) for name in alone.gradients},
        )


FLOOR = Limits(logits=2e-5, loss=1e-5, gradient=1e-4)
"""Errors that float32 rounding causes in any model on any device. A leak is a thousand times as large."""


# ---------------------------------------------------------------------- running


def run_alone(
    model: nn.Module,
    samples: Sequence[Sample],
    *,
    gradients: bool = True,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Outcome:
    """Run each sample alone through the unmodified model; the loss is the mean over all targets.

    Args:
        model: a model without packing.
        samples: samples on any device.
        gradients: also run the backward passes.
        forward_context: a context manager around each forward pass, but not around backward passes: mode, autocast.

    Raises:
        ConfigError: packing is enabled on the model.
    """
    if is_packing(model):
        raise ConfigError("packing is enabled on the model that is the reference; call disable_packing(model) first")
    count = sum(num_targets(sample) for sample in samples)
    is_divided = any(isinstance(p, DTensor) for p in model.parameters())
    logits, loss, summed = [], 0.0, dict[str, torch.Tensor]()
    take_gradients(model)
    for sample in samples:
        with torch.set_grad_enabled(gradients), forward_context():
            logits_LV = plain_output(model, alone(sample, labels=False)).logits[0]
            sample_loss = target_losses(logits_LV, sample["labels"]).sum() / count
        if gradients:
            backward(sample_loss)
            if is_divided:  # transformers sums some gradients over ranks after every backward pass, earlier ones again
                for name, gradient in take_gradients(model).items():
                    summed[name] = summed[name] + gradient if name in summed else gradient
        logits.append(logits_LV.detach())
        loss += float(sample_loss.detach())
    outcome = outcome_of(model, samples, logits, loss)
    return replace(outcome, gradients=summed) if is_divided else outcome


def run_packed(
    model: nn.Module,
    packed: PackedRow | PaddedBatch,
    samples: Sequence[Sample],
    *,
    settings: StepConfig | None = None,
    gradients: bool = True,
) -> Outcome:
    """Run a packed row, or a padded batch, through `PackedStep`; `samples` are its samples, in order.

    Packing is enabled during the run, and disabled afterwards if it was disabled before.
    """
    enabled = is_packing(model)
    take_gradients(model)
    try:
        with torch.set_grad_enabled(gradients):
            result = PackedStep(model, settings)(packed, logits=True)
        if gradients:
            backward(result.loss)
        loss, logits = float(result.loss.detach()), logits_by_sample(result)
        return outcome_of(model, samples, logits, loss, sample_losses=result.sample_losses)
    finally:
        if not enabled:
            disable_packing(model)


def plain_output(
    model: nn.Module, inputs: Mapping[str, Any], *, use_cache: bool | None = False, **settings: bool
) -> Any:
    """Call an unmodified model on its device, by default without its load-balancing loss.

    `use_cache`: None uses the setting of the model's configuration.
    """
    device = next(model.parameters()).device
    placed = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    if use_cache is not None:
        settings["use_cache"] = use_cache
    if family_of(find_model(model)).has("experts"):
        settings.setdefault("output_router_logits", False)
    return model(**placed, **settings)


def outcome_of(
    model: nn.Module,
    samples: Sequence[Sample],
    logits: Sequence[torch.Tensor],
    loss: float,
    *,
    sample_losses: torch.Tensor | None = None,
) -> Outcome:
    """Collect an outcome from the logits [L, V] of each sample and the gradients that the model holds.

    `sample_losses`: [B], as the pass returned them; None: computed from the logits.
    """
    on_host = [to_host(x) for x in logits]
    losses = [target_losses(x, sample["labels"]) for x, sample in zip(on_host, samples, strict=True)]
    return Outcome(
        logits=on_host,
        target_losses=losses,
        sample_losses=mean_losses(losses) if sample_losses is None else to_host(sample_losses),
        loss=loss,
        gradients=take_gradients(model),
    )


def logits_by_sample(result: StepResult) -> list[torch.Tensor]:
    """Split the logits of a row into [L, V] of each sample."""
    assert result.row_logits is not None
    samples = range(result.segments.num_samples)
    return [result.row_logits[0, slice(*result.segments.spans[sample])] for sample in samples]


def target_losses(logits_LV: torch.Tensor, labels_L: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy (nats) of each target of a sample, float32 [N]; labels are not shifted."""
    targets = labels_L[1:].to(logits_LV.device)
    is_target = targets != IGNORE
    return F.cross_entropy(logits_LV[:-1][is_target].float(), targets[is_target], reduction="none")


def mean_losses(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean of each sample's target losses [n], float32 [B]; 0 for a sample without targets."""
    return torch.stack([x.sum() / max(len(x), 1) for x in losses])


def backward(loss: torch.Tensor) -> None:
    """Compute gradients if any parameter is trained."""
    if loss.requires_grad:
        loss.backward()


def take_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's gradients by parameter name, and remove them from the model."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for p in model.parameters():
        p.grad = None
    return gradients


def to_host(x: torch.Tensor) -> torch.Tensor:
    """Return a detached tensor on the CPU, in float32 or higher precision."""
    return x.detach().to("cpu", torch.promote_types(x.dtype, torch.float32))


# ---------------------------------------------------------------------- comparing


def compare(
    actual: Outcome, truth: Outcome, *, low: bool = False, smallest_gradient: float = SMALLEST_GRADIENT
) -> Errors:
    """Compute the errors of `actual` against `truth`. A gradient that only one of them has counts as 0 in the other.

    Args:
        actual: the outcome to check.
        truth: the reference.
        low: one of them is in low precision. There the largest of a few rounding errors is a matter of chance, so
            logits and groups of gradients are compared by root mean square, as a fraction of that of the reference.
        smallest_gradient: see `SMALLEST_GRADIENT`.
    """
    pairs = list(zip(actual.logits, truth.logits, strict=True))
    losses = [(x - y).abs() for x, y in zip(actual.target_losses, truth.target_losses, strict=True)]
    return Errors(
        logits=rms_distance(pairs) if low else max(distance(*pair) for pair in pairs),
        target_losses=_or_infinite(torch.cat(losses).sum() / torch.cat(truth.target_losses).sum()),
        loss=relative(actual.loss, truth.loss),
        sample_losses=distance(actual.sample_losses, truth.sample_losses),
        sample_target_losses=_or_infinite(mean_losses(losses).max() / truth.sample_losses.max()),
        gradients=gradient_errors(actual.gradients, truth.gradients, low=low, smallest=smallest_gradient),
    )


@final
@dataclass(frozen=True, kw_only=True)
class GradientCosine:
    """The parameter whose two gradients differ most in direction."""

    cosine: float
    """The smallest cosine of all parameters, computed in float64."""
    parameter: str
    """Name of its parameter."""
    parameters: int
    """Number of parameters that were compared."""


def smallest_cosine(actual: Gradients, truth: Gradients) -> GradientCosine:
    """Find the smallest cosine between the two gradients of any parameter.

    The cosine counts as 0 if only one side has a gradient. It counts as 1 if both gradients are 0, or if the parameter
    is a bias whose gradients are only rounding errors (see `ROUNDING`).
    """
    cosines: dict[str, float] = {}
    for name, like in {**actual, **truth}.items():
        zero, weight = torch.zeros_like(like), truth.get(_weight_of(name) or "")
        pair = [gradients.get(name, zero).double().flatten() for gradients in (actual, truth)]
        least = 0.0 if weight is None else ROUNDING * float(weight.abs().max())
        is_rounding = all(float(x.abs().max()) <= least for x in pair)
        cosines[name] = 1.0 if is_rounding else float(F.cosine_similarity(*pair, dim=0, eps=1e-30))
    worst = min(cosines, key=cosines.__getitem__)
    return GradientCosine(cosine=cosines[worst], parameter=worst, parameters=len(cosines))


def _size(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the largest difference, the largest expected entry, and the sums of squares of both: float64 [4]."""
    if not expected.numel():  # of a weight with fewer rows than ranks
        return torch.zeros(4, dtype=torch.float64)
    expected = _at_least_float32(expected)
    difference = _at_least_float32(actual).to(expected.device) - expected
    largest = [difference.abs().nan_to_num(nan=inf).max(), expected.abs().nan_to_num().max()]
    return torch.stack([*largest, difference.square().sum(), expected.square().sum()]).to("cpu", torch.float64)


def _together(sizes: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the size of several tensors together; see `_size`."""
    sizes_N4 = torch.stack([*sizes])
    return torch.cat([sizes_N4[:, :2].amax(0), sizes_N4[:, 2:].sum(0)])


def gradient_errors(
    actual: Gradients, truth: Gradients, *, low: bool = False, smallest: float = SMALLEST_GRADIENT
) -> dict[str, GradientError]:
    """Compute the error of the worst parameter of each group; the arguments are those of `compare`.

    Of a model that is divided over ranks, each rank compares its parts, and all of them get the same errors.
    """
    sizes: dict[str, torch.Tensor] = {}
    for name, like in {**actual, **truth}.items():
        zero = torch.zeros_like(local(like))
        sizes[name] = _size(local(actual.get(name, zero)), local(truth.get(name, zero)))
    if any(isinstance(gradient, DTensor) for gradient in truth.values()):
        of_ranks = gathered(sizes)
        sizes = {name: _together(of_rank[name] for of_rank in of_ranks) for name in sizes}
    expected = {name: float(size[1]) for name, size in sizes.items()}
    largest = max(expected.values(), default=0.0)
    found: dict[str, dict[str, float]] = {}
    for name, size in sizes.items():
        least = max(smallest * largest, expected.get(_weight_of(name) or "", 0.0))
        found.setdefault(group_of(name), {})[name] = float(size[0]) / max(expected[name], least, 1e-30)
    errors: dict[str, GradientError] = {}
    for group, of_group in found.items():
        worst = max(of_group, key=of_group.__getitem__)
        squares = _together(sizes[name] for name in of_group)[2:].tolist()
        error = _root(*squares) if low else of_group[worst]
        errors[group] = GradientError(error=error, parameter=worst, parameters=of_group)
    return errors


def _weight_of(name: str) -> str | None:
    """Return the name of the weight of a bias, whose gradient may be only rounding errors.

    The gradients of bias and weight sum the same terms over tokens, but those of a bias may cancel. For example, the
    bias of keys without rotary positions shifts all scores of a query equally, so its true gradient is 0.
    """
    return f"{name.removesuffix('bias')}weight" if name.endswith(".bias") else None


def local(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that is divided over ranks; of others, the tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def group_of(parameter: str) -> str:
    """Return the group of a parameter.

    `model.language_model.layers.3.self_attn.q_proj.weight` is in the group `language_model.layers.self_attn`.
    """
    modules = parameter.split(".")[:-1]
    named = (part for part in modules if not part.isdigit() and part not in ("model", "base_model", "module"))
    return ".".join([*named][:3]) or parameter


def distance(actual: torch.Tensor, expected: torch.Tensor, *, least: float = 0.0) -> float:
    """Return the largest difference as a fraction of the largest expected entry (at least `least`); NaN counts as
    infinite."""
    difference, largest, *_ = _size(actual, expected).tolist()
    return difference / max(largest, least, 1e-30)


def rms_distance(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the root mean square of the differences as a fraction of that of the expected values; NaN counts as
    infinite."""
    return _root(*_together(_size(*pair) for pair in pairs)[2:].tolist())


def _root(difference: float, expected: float) -> float:
    return _or_infinite((difference / max(expected, 1e-30)) ** 0.5)


def relative(actual: float, expected: float) -> float:
    """Return the relative difference of two numbers; NaN counts as infinite."""
    return _or_infinite(abs(actual - expected) / max(abs(expected), 1e-30))


def _at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def _or_infinite(difference: float | torch.Tensor) -> float:
    return float(difference) if difference == difference else inf
