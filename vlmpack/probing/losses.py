"""Compare the results of a packed pass with those of its samples alone: logits, log-probabilities and losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from vlmpack.layout.row import IGNORE
from vlmpack.model.mechanisms import ModelParts
from vlmpack.model.mechanisms.experts import expert_blocks
from vlmpack.model.result import StepResult
from vlmpack.probing.difference import LIMITS
from vlmpack.probing.forward_passes import ForwardResult, PackedPass, PlainPaddedPass, ProbedModel, total_targets
from vlmpack.probing.report import Check
from vlmpack.testing.comparison import (
    Gradients,
    backward,
    distance,
    gradient_errors,
    mean_losses,
    relative,
    take_gradients,
    target_losses,
)
from vlmpack.testing.samples import Sample

FLOAT32_LIMIT = 1e-5
"""Limit of the relative difference of two losses that are computed from the same numbers, in float32."""
LOSS_LIMIT = 2e-3
"""The same limit in low precision."""
TARGET_LIMIT = 2e-2
"""Limit for single targets in low precision, where matrices with more rows may use other kernels."""
BALANCE_LIMIT = 2e-2
"""Limit for load-balancing losses in low precision, where rounding sends tokens to other experts."""
ROUTER_PART_LIMIT = 1e-2
"""Limit of the relative difference of the routers' part of the loss, and of its gradient. The loss itself is a thousand
times as large as this part."""


def check_tokens(
    ids_1T: torch.Tensor,
    media: Mapping[str, Any],
    expected_media: Mapping[str, Any],
    samples: Sequence[Sample],
    token_indices: Sequence[torch.Tensor],
    width: int,
) -> Check:
    """Check that a row, or the model's input, has each sample's tokens in the right place and its media in order."""
    row_T = ids_1T[0].cpu()
    if len(row_T) != width:
        detail = f"the row is {len(row_T)} tokens wide, and its samples take {width}"
        return Check.wrong("packing", detail, value=len(row_T), allowed=width)
    for i, (index, sample) in enumerate(zip(token_indices, samples, strict=True)):
        if not torch.equal(row_T[index[index >= 0]], sample["input_ids"][index >= 0]):
            return Check.wrong("packing", f"sample {i} has other tokens in the row")
    for name, expected in expected_media.items():
        packed = media.get(name)
        if packed is None or not torch.equal(packed.cpu().to(expected.dtype), expected):
            return Check.wrong("packing", f"{name} are not those of the samples in order")
    return Check.of_mechanism("packing", 0, 0, "")


def result_checks(
    result: ForwardResult, samples: Sequence[Sample], alone_logits: Sequence[torch.Tensor], *, low: bool
) -> list[Check]:
    """Compare the results of a pass in which every module's output was correct.

    Logits, the head, the loss and the samples' losses are checked in this order. Only the first error is reported.

    Args:
        result: the result of the pass.
        samples: the samples, in the order of the pass.
        alone_logits: logits of each sample alone, [L, V].
        low: whether the pass is in low precision.
    """
    errors = [
        distance(ours, theirs) if ours.shape == theirs.shape else float("inf")
        for ours, theirs in zip(result.logits, alone_logits, strict=True)
    ]
    worst = max(range(len(errors)), key=errors.__getitem__)
    detail = f"sample {worst} gets logits that the head computed from other tokens: off by {errors[worst]:.1e}"
    logits = Check.of_mechanism("sample results", errors[worst], LIMITS[low], detail)
    losses = _target_losses(alone_logits, samples)
    step = result.step
    if logits.is_bad or step is None:
        return [logits if logits.is_bad else _check_loss(result, losses, low)]
    of_samples = _check_sample_losses(step, losses, samples, low)
    checks = [_check_head(step, losses, samples, low), _check_loss(result, losses, low), of_samples]
    first = next((at for at, check in enumerate(checks) if check.is_bad), None)
    return checks if first is None else [checks[first]]


def _check_head(step: StepResult, losses: Sequence[torch.Tensor], samples: Sequence[Sample], low: bool) -> Check:
    """Compare the positions of targets, and their log-probabilities."""
    index = torch.cat(
        [
            start + (sample["labels"][1:] != IGNORE).nonzero()[:, 0]
            for (start, _), sample in zip(step.segments.spans, samples, strict=False)
        ]
    )
    if step.num_targets != len(index) or not torch.equal(step.target_index.cpu(), index):
        detail = f"{step.num_targets} targets were counted, and the samples have {len(index)}, or have them elsewhere"
        return Check.wrong("loss count", detail, value=step.num_targets, allowed=len(index))
    error = distance(step.target_logprobs, -torch.cat([*losses]))
    detail = f"log-probabilities of targets are off by {error:.1e} from those of the samples' logits"
    return Check.of_mechanism("head", error, TARGET_LIMIT if low else FLOAT32_LIMIT, detail)


def _check_loss(result: ForwardResult, losses: Sequence[torch.Tensor], low: bool) -> Check:
    count = sum(map(len, losses))
    loss, expected = float(result.loss.detach()), float(torch.cat([*losses]).sum()) / count
    detail = f"the loss is {loss:.6g}, but the samples' {count} targets make {expected:.6g}"
    limit = LOSS_LIMIT if low else FLOAT32_LIMIT
    return Check.of_mechanism("loss count", relative(loss, expected), limit, detail)


def _check_sample_losses(
    step: StepResult, losses: Sequence[torch.Tensor], samples: Sequence[Sample], low: bool
) -> Check:
    """Check each sample's number of targets, its loss, and its log-probabilities in the shape of the padded batch."""
    counts, returned = [*map(len, losses)], step.sample_targets.tolist()
    if returned != counts:
        return Check.wrong("sample results", f"the samples have {counts} targets, and {returned} were returned")
    error, limit = distance(step.sample_losses, mean_losses(losses)), LOSS_LIMIT if low else FLOAT32_LIMIT
    in_place = [
        row[start : start + len(sample["labels"]) - 1][(sample["labels"][1:] != IGNORE).to(row.device)]
        for row, start, sample in zip(step.logprobs, step.offsets or [0] * len(samples), samples, strict=True)
    ]
    if error <= limit and not torch.equal(torch.cat(in_place), step.target_logprobs):
        return Check.wrong("sample results", "log-probabilities are at other places than their samples' targets")
    detail = f"a sample gets the loss of another one, or of none: off by {error:.1e}"
    return Check.of_mechanism("sample results", error, limit, detail)


def _target_losses(logits: Sequence[torch.Tensor], samples: Sequence[Sample]) -> list[torch.Tensor]:
    return [target_losses(x, sample["labels"]) for x, sample in zip(logits, samples, strict=True)]


# ---------------------------------------------------------------------- routers


@final
@dataclass(frozen=True, kw_only=True)
class RouterReference:
    """The routers' part of a loss."""

    balance: float
    """The load-balancing loss over the real tokens."""
    added: float
    """The load-balancing loss as it is added to the loss, with its coefficient."""
    gradients: Gradients
    """Gradients of `added` by the routers' parameters."""


def reference_router_losses(probed: ProbedModel, samples: Sequence[Sample]) -> RouterReference | None:
    """Compute the router losses of the padded batch with its 2D mask.

    None: the model has no routers, or this version of transformers computes no load-balancing loss.
    """
    if not probed.family.has("experts"):
        return None
    result = PlainPaddedPass(probed=probed)(samples, router_losses=True)
    if (balance := result.aux_loss) is None:
        return None
    cross_entropy = torch.cat(_target_losses(result.logits, samples)).sum() / total_targets(samples)
    added, size = float((result.loss - cross_entropy).detach()), float(balance.detach())
    of_balance = _router_gradients(balance + 0 * result.loss, probed, backward)  # FSDP2 waits for gradients of outputs
    gradients = {name: x * (added / size) for name, x in of_balance.items()}
    return RouterReference(balance=size, added=added, gradients=gradients)


def check_router_losses(
    packed: PackedPass, samples: Sequence[Sample], expected: RouterReference, result: ForwardResult, *, right: bool
) -> list[Check]:
    """Compare the load-balancing loss with that of the padded batch, also as it is added to the loss, and its gradient.

    The gradient is compared only in float32 and in train mode.

    Args:
        packed: the packed pass.
        samples: the samples.
        expected: the reference.
        result: the result of the pass with router losses, from `PackedStep`.
        right: whether logits and losses of targets are right. Only then are the routers named as the cause, because
            wrong hidden states change router losses, too.
    """
    step, circumstance = result.step, packed.circumstance
    assert step is not None
    assert step.aux_loss is not None
    divisor = circumstance.divisor(samples)
    added = step.loss - step.loss_sum / (step.num_targets if divisor is None else divisor)
    is_float32 = result.logits[0].dtype == torch.float32
    limit = FLOAT32_LIMIT if is_float32 else BALANCE_LIMIT
    part_limit = ROUTER_PART_LIMIT + (0.0 if is_float32 else BALANCE_LIMIT) + 1e-6 / max(abs(expected.added), 1e-30)
    errors = [
        ("load-balancing loss", relative(float(step.aux_loss.detach()), expected.balance), limit),
        ("routers' part of the loss", relative(float(added.detach()), expected.added), part_limit),
    ]
    if expected.gradients and circumstance.train and is_float32:
        found = gradient_errors(_router_gradients(added, packed.probed, packed.backward), expected.gradients)
        error = max(each.error for each in found.values())
        errors.append(("routers' gradient", error, ROUTER_PART_LIMIT))
    detail = "the {} is off by {:.1e} from that of the padded batch with its 2D mask"
    settings: Any = {"cause": "router" if right else None}
    return [
        Check.measured("equality", f"{circumstance.name}: {name}", error, limit, detail.format(name, error), **settings)
        for name, error, limit in errors
    ]


def _router_gradients(loss: torch.Tensor, probed: ProbedModel, backward: Callable[[torch.Tensor], None]) -> Gradients:
    """Return the gradients of `loss` by the parameters of all expert blocks, without those of the experts."""
    take_gradients(probed.model)
    backward(loss)  # not `autograd.grad`: FSDP2 gives its parameters gradients in a backward pass only
    gradients = {id(p): p.grad for p in probed.model.parameters()}
    take_gradients(probed.model)
    names = {module: name for name, module in probed.core.named_modules()}
    routers = {
        f"{names[block]}.{name}": gradients[id(p)]
        for block in expert_blocks(ModelParts(family=probed.family, core=probed.core))
        for name, p in block.named_parameters()
        if "experts" not in name.split(".")
    }
    return {name: gradient for name, gradient in routers.items() if gradient is not None}
