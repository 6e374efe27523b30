"""Name the mechanism at fault, from what a pass computed otherwise than its samples alone (`difference.py`).

packing          the tokens and media that reach the model are not those of the samples
sample results   logits are right, and handed back at other positions
cache            a layer is given one
router           experts are sent others than the row's tokens; or their block's output differs
others           the output of the modules that `roles_of` says, each given right inputs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from vlmpack.layout.row import IGNORE
from vlmpack.model.mechanisms import ModelParts
from vlmpack.model.mechanisms.experts import expert_blocks
from vlmpack.model.result import StepResult
from vlmpack.probing.difference import (
    DELTA,
    DISABLED_FOR,
    LEAK,
    LIMITS,
    AloneCalls,
    Difference,
    error_of,
    roles_of,
)
from vlmpack.probing.forward_passes import ForwardResult, PackedPass, PlainPaddedPass, ProbedModel, total_targets
from vlmpack.probing.report import Cause, Check, Finding
from vlmpack.testing.comparison import distance, mean_losses, relative, target_losses
from vlmpack.testing.samples import Sample, num_targets

EMBEDDINGS = {"embeddings of images": "vision", "embeddings of audio": "audio"}
"""The roles of what the text model is given."""


# ---------------------------------------------------------------------- what goes in, and what comes back


def check_tokens(
    ids_1T: torch.Tensor,
    media: Mapping[str, Any],
    expected_media: Mapping[str, Any],
    expected_ids: Sequence[torch.Tensor],
    token_indices: Sequence[torch.Tensor],
    width: int,
) -> Check:
    """Compare a row, or what reaches the model, with its samples: tokens where they belong, media in order."""
    row_T = ids_1T[0].cpu()
    if len(row_T) != width:
        detail = f"the row is {len(row_T)} tokens wide, and its samples take {width}"
        return Check.wrong("packing", detail, value=len(row_T), allowed=width)
    for i, (index, ids) in enumerate(zip(token_indices, expected_ids, strict=True)):
        if not torch.equal(row_T[index], ids):
            return Check.wrong("packing", f"sample {i} has other tokens in the row")
    for name, expected in expected_media.items():
        packed = media.get(name)
        if packed is None or not torch.equal(packed.cpu().to(expected.dtype), expected):
            return Check.wrong("packing", f"{name} are not those of the samples in order")
    return Check.of_mechanism("packing", 0, 0, "")


def check_sample_logits(found: Difference, references: Sequence[AloneCalls], *, low: bool) -> Check:
    """Compare logits with those of the samples alone: every module gave right outputs, as each was put right."""
    assert found.result is not None
    errors = [
        error_of(ours, each.logits) if ours.shape == each.logits.shape else float("inf")
        for ours, each in zip(found.result.logits, references, strict=True)
    ]
    worst = max(range(len(errors)), key=errors.__getitem__)
    detail = f"sample {worst} gets logits that the head computed from other tokens: off by {errors[worst]:.1e}"
    return Check.of_mechanism("sample results", errors[worst], LIMITS[low], detail)


def check_cache(found: Difference) -> Check:
    """Count layers with a cache: training has no use for one, and with one transformers ignores packed positions."""
    detail = f"{found.caches} layers get a cache: it is filled and thrown away"
    return Check.of_mechanism("cache", found.caches, 0, detail)


# ---------------------------------------------------------------------- modules


def module_checks(
    found: Difference, probed: ProbedModel, token_indices: Sequence[torch.Tensor], *, low: bool, leaks: bool
) -> list[Check]:
    """Make a check of each mechanism of what its modules gave.

    Args:
        found: what they gave otherwise than alone.
        probed: the model.
        token_indices: int64 [L] of each sample: its tokens in the pass.
        low: the pass is in low precision.
        leaks: a sample's logits move when only other ones change.
    """
    family, limit, finding = probed.family, LIMITS[low], "leaks" if leaks else "differs"
    errors = _by_role(found, probed)
    rotary, scaled = errors.get("positions", {}), errors.get("query scale", {})
    masked = errors.get("mask", {})
    if any(not error <= limit for error in masked.values()):  # a wrong mask is one, whatever the queries' factors
        masked, scaled = masked | scaled, {}
    checks = [
        max(_check("positions", rotary, LEAK, "differs"), _check("positions", scaled, limit, "differs"), key=_is_bad),
        _check("mask", masked, limit, finding),
        check_cache(found),
        *_delta_checks(found, errors, token_indices, limit, finding),
        _check_router(found, errors, limit),
        _check("vision", errors.get("vision"), limit, finding) if family.has_vision else Check.skipped("vision"),
        _check("audio", errors.get("audio"), limit, finding) if family.has_audio else Check.skipped("audio"),
    ]
    others = ((name, error) for name, error in errors.get(None, {}).items() if not error <= limit)
    if (other := next(others, None)) is not None:
        check = Check(part="mechanism", name="other modules", finding=finding, value=other[1], allowed=limit)
        checks.append(replace(check, detail=_detail(*other)))
    return checks


def first_wrong(found: Difference, probed: ProbedModel, *, low: bool) -> str | None:
    """Name the first module whose output is wrong although its inputs are right."""
    roles = roles_of(probed)
    for name, error in found.errors.items():
        if name in roles and not error <= (LEAK if roles[name] == "positions" else LIMITS[low]):
            return name
    return None


def _is_bad(check: Check) -> bool:
    return check.is_bad


def _by_role(found: Difference, probed: ProbedModel) -> dict[str | None, dict[str, float]]:
    roles = roles_of(probed) | EMBEDDINGS
    errors: dict[str | None, dict[str, float]] = {}
    for name, error in found.errors.items():
        errors.setdefault(roles.get(name), {})[name] = error
    return errors


def _check(mechanism: Cause, errors: Mapping[str, float] | None, limit: float, finding: Finding) -> Check:
    """The first module that differs, or how far the worst one is off."""
    if not errors:
        return Check.skipped(mechanism, "not counted")
    name = next((name for name, error in errors.items() if not error <= limit), None)
    error = max(errors.values()) if name is None else errors[name]
    return Check.of_mechanism(mechanism, error, limit, _detail(name, error), finding=finding)


def _detail(name: str | None, error: float) -> str:
    return f"{name} gives other numbers of a sample than alone, given the same inputs: off by {error:.1e}"


def _delta_checks(
    found: Difference,
    errors: Mapping[str | None, Mapping[str, float]],
    token_indices: Sequence[torch.Tensor],
    limit: float,
    finding: Finding,
) -> list[Check]:
    """Run gated delta layers that differ again, with the convolution or the recurrent state disabled."""
    if convolutions := errors.get("conv taps"):
        return [_check("conv taps", convolutions, limit, finding), Check.skipped("recurrent state")]
    if not (layers := errors.get(DELTA)):
        return [Check.skipped("conv taps"), Check.skipped("recurrent state")]
    wrong = [name for name, error in layers.items() if not error <= limit]
    if not wrong:
        return [_check(cause, layers, limit, finding) for cause in DISABLED_FOR]
    calls = [found.delta[name] for name in wrong]
    checks = []
    for cause, weights_of in DISABLED_FOR.items():
        error = max(call.error_with(weights_of(call.module), token_indices) for call in calls)
        detail = _detail(f"{wrong[0]}, with the other one of convolution and state disabled,", error)
        checks.append(Check.of_mechanism(cause, error, limit, detail, finding=finding))
    if not any(check.is_bad for check in checks):
        checks[-1] = _check("recurrent state", layers, limit, finding)
    return checks


def _check_router(
    found: Difference,
    errors: Mapping[str | None, Mapping[str, float]],
    limit: float,
) -> Check:
    """Check that experts get the tokens of the row and nothing else, and what they give."""
    if not found.routed:
        return Check.skipped("router")
    width = found.inputs["input_ids"].numel()
    for name, counts in found.routed.items():
        if (routed := sum(counts)) != width:
            detail = f"{name} gets {routed} tokens of a row of {width}"
            return Check.wrong("router", detail, value=routed, allowed=width)
    check = _check("router", errors.get("router"), limit, "differs")
    return check if check.is_bad else Check.of_mechanism("router", width, width, "")


# ---------------------------------------------------------------------- losses


FLOAT32_LIMIT = 1e-5
"""Relative difference of two losses that are computed from the same numbers, in float32."""
LOSS_LIMIT = 2e-3
"""The same in low precision."""
TARGET_LIMIT = 2e-2
"""Of single targets in low precision: matrices of other heights may be multiplied by other kernels."""
BALANCE_LIMIT = 2e-2
"""Of load-balancing losses in low precision: rounding sends tokens to other experts."""
ROUTER_PART_LIMIT = 1e-2
"""Relative difference of what the routers add to a loss, which is a thousand times as large, and of its gradient."""


def check_losses(
    result: ForwardResult, samples: Sequence[Sample], *, by_step: Callable[[], ForwardResult]
) -> list[Check]:
    """Check the loss, the log-probabilities of the targets, and each sample's loss.

    Each is at fault only if those before it are right.

    Args:
        result: of the pass.
        samples: in its order.
        by_step: the same pass by `PackedStep`, which returns more; computed only if the loss is wrong.
    """
    with torch.no_grad():
        count = check_loss_count(result, samples)
        detailed = by_step() if count.is_bad and result.step is None else result
        head = [] if detailed.step is None else [_check_head(detailed.step, detailed, samples)]
        if count.is_bad:
            return [check for check in head if check.is_bad] or [count]
        return [count, *head, _check_sample_losses(result, samples)]


def check_loss_count(result: ForwardResult, samples: Sequence[Sample]) -> Check:
    """Compare the loss with that of each sample's targets under the logits of the same pass."""
    count = total_targets(samples)
    if (step := result.step) is not None and step.num_targets != count:
        detail = f"{step.num_targets} targets were counted, and the samples have {count}"
        return Check.wrong("loss count", detail, value=step.num_targets, allowed=count)
    loss, expected = float(result.mean_loss.detach()), float(torch.cat(_target_losses(result, samples)).sum()) / count
    detail = f"the loss is {loss:.6g}, but the samples' {count} targets make {expected:.6g} of these logits"
    return Check.of_mechanism("loss count", relative(loss, expected), _limit(result, LOSS_LIMIT), detail)


def _check_head(step: StepResult, result: ForwardResult, samples: Sequence[Sample]) -> Check:
    """Compare log-probabilities of the targets with those of the logits, if they are of the right targets at all."""
    token_indices = [
        start + (sample["labels"][1:] != IGNORE).nonzero()[:, 0]
        for (start, _), sample in zip(step.segments.spans, samples, strict=False)
    ]
    if not torch.equal(step.target_index.cpu(), torch.cat(token_indices)):
        return Check.skipped("head")
    error = distance(step.target_logprobs, -torch.cat(_target_losses(result, samples)))
    detail = f"log-probabilities of targets are off by {error:.1e} from those of the same pass's logits"
    return Check.of_mechanism("head", error, _limit(result, TARGET_LIMIT), detail)


def _check_sample_losses(result: ForwardResult, samples: Sequence[Sample]) -> Check:
    """Check each sample's loss, its number of targets, and its log-probabilities where a padded batch has them."""
    assert result.sample_losses is not None
    assert result.sample_targets is not None
    counts = [num_targets(sample) for sample in samples]
    if (returned := result.sample_targets.tolist()) != counts:
        return Check.wrong("sample results", f"the samples have {counts} targets, and {returned} were returned")
    expected = mean_losses(_target_losses(result, samples))
    error, limit = distance(result.sample_losses, expected), _limit(result, LOSS_LIMIT)
    if error > limit and _are_of_other_targets(result, expected, counts):
        return Check.wrong("loss count", "the loss is the mean of the samples' losses, and these are of other targets")
    if error <= limit and result.step is not None and not _logprobs_in_place(result.step, samples):
        return Check.wrong("sample results", "log-probabilities are at other places than their samples' targets")
    detail = f"a sample gets the loss of another one, or of none: off by {error:.1e}"
    return Check.of_mechanism("sample results", error, limit, detail)


def _are_of_other_targets(result: ForwardResult, expected: torch.Tensor, counts: Sequence[int]) -> bool:
    """Return whether wrong losses of samples are what the loss is made of, and not those of one another: in low
    precision a loss of wrong targets may be right by chance."""
    assert result.sample_losses is not None
    losses, weights = result.sample_losses.detach(), torch.tensor(counts).to(result.sample_losses)
    is_mean = relative(float(result.mean_loss.detach()), float((losses * weights).sum() / weights.sum())) <= 1e-4
    pairs = ((losses, expected.to(losses)), (losses * weights, expected.to(losses) * weights))
    exchanged = min(distance(ours.sort().values, theirs.sort().values) for ours, theirs in pairs)
    return is_mean and exchanged > _limit(result, LOSS_LIMIT)


def _logprobs_in_place(step: StepResult, samples: Sequence[Sample]) -> bool:
    """Return whether [B, S] log-probabilities hold those of the row, sample after sample, target after target."""
    offsets = step.offsets or (0,) * len(samples)
    table = step.logprobs.detach()
    by_sample = [
        row[start : start + len(sample["labels"]) - 1][(sample["labels"][1:] != IGNORE).to(row.device)]
        for row, start, sample in zip(table, offsets, samples, strict=True)
    ]
    return torch.equal(torch.cat(by_sample), step.target_logprobs.detach())


def _target_losses(result: ForwardResult, samples: Sequence[Sample]) -> list[torch.Tensor]:
    return [target_losses(x, sample["labels"]) for x, sample in zip(result.logits, samples, strict=True)]


def _limit(result: ForwardResult, in_low_precision: float) -> float:
    return FLOAT32_LIMIT if result.logits[0].dtype == torch.float32 else in_low_precision


# ---------------------------------------------------------------------- routers


@final
@dataclass(frozen=True, kw_only=True)
class RouterLosses:
    """The routers' part of a loss."""

    balance: float
    """The load-balancing loss over the real tokens."""
    added: float
    """The part of the loss that it is."""
    gradients: Sequence[torch.Tensor]
    """Of the routers' parameters, by what is added."""


def reference_router_losses(probed: ProbedModel, samples: Sequence[Sample]) -> RouterLosses | None:
    """Compute the padded batch with its 2D mask. None: no routers, or this version computes no loss of them."""
    if not probed.family.has("experts"):
        return None
    result, balance = PlainPaddedPass(probed=probed).with_router_losses(samples)
    if balance is None:
        return None
    cross_entropy = torch.cat(_target_losses(result, samples)).sum()
    added = float((result.loss - cross_entropy / total_targets(samples)).detach())
    size = float(balance.detach())
    gradients = _router_gradients(balance, probed)
    return RouterLosses(balance=size, added=added, gradients=[x * (added / size) for x in gradients])


def check_router_losses(
    packed: PackedPass, samples: Sequence[Sample], expected: RouterLosses, result: ForwardResult, *, right: bool
) -> list[Check]:
    """Compare the load-balancing loss, what it adds, and in float32 its gradient with those of the padded batch.

    Args:
        packed: how the samples were packed.
        samples: the samples.
        expected: the reference.
        result: of the pass with the routers' losses, by `PackedStep`.
        right: logits and loss are right but for the routers. Wrong hidden states already make other routers' losses, so
            only then are routers at fault.
    """
    step, circumstance = result.step, packed.circumstance
    assert step is not None
    assert step.aux_loss is not None
    divisor = circumstance.divisor(samples)
    added = step.loss - step.loss_sum / (step.num_targets if divisor is None else divisor)
    is_float32 = result.logits[0].dtype == torch.float32
    part_limit = ROUTER_PART_LIMIT + (0.0 if is_float32 else BALANCE_LIMIT) + 1e-6 / max(abs(expected.added), 1e-30)
    compared = [
        ("load-balancing loss", step.aux_loss, expected.balance, _limit(result, BALANCE_LIMIT)),
        ("routers' part of the loss", added, expected.added, part_limit),
    ]
    cause = "router" if right else None
    checks = []
    for name, router_loss, reference, limit in compared:
        value = float(router_loss.detach())
        detail = f"the {name} is {value:.6g}, and {reference:.6g} of the padded batch with its 2D mask"
        error = relative(value, reference)
        checks.append(Check.measured("equality", f"{circumstance.name}: {name}", error, limit, detail, cause=cause))
    if expected.gradients and circumstance.train and is_float32:
        pairs = zip(_router_gradients(added, packed.probed), expected.gradients, strict=True)
        error = max((distance(x, y) for x, y in pairs if y.any()), default=0.0)
        name = f"{circumstance.name}: routers' gradient"
        detail = f"the gradient of what routers add to the loss is off by {error:.1e}"
        checks.append(Check.measured("equality", name, error, ROUTER_PART_LIMIT, detail, cause=cause))
    return checks


def _router_gradients(loss: torch.Tensor, probed: ProbedModel) -> list[torch.Tensor]:
    """Of the parameters of each block that are not its experts'; none where nothing of it is trained."""
    blocks = expert_blocks(ModelParts(family=probed.family, core=probed.core))
    routers = [p for block in blocks for name, p in block.named_parameters() if "experts" not in name.split(".")]
    trained = [p for p in routers if p.requires_grad]
    if not trained or not loss.requires_grad:
        return []
    gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g.detach() for p, g in zip(trained, gradients, strict=True)]
