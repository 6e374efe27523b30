"""The routers' part of the loss: its size, coefficient and gradient, against plain transformers' padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from vlmpack.families import Family
from vlmpack.model import ModelParts, expert_layers
from vlmpack.proof.outcome import distance, relative, target_losses
from vlmpack.proof.report import Check
from vlmpack.proof.samples import ProbeSample
from vlmpack.proof.ways import Packed, Pass, PlainPadded

SAME = {torch.float32: 1e-5}
"""Relative difference of two load-balancing losses that are computed from the same numbers."""
SAME_IN_LOW_PRECISION = 2e-2
"""Rounding sends tokens to other experts."""
ADDED = 1e-2
"""Relative difference of what the routers add to a loss, which is a thousand times as large, and of its gradient."""


@final
@dataclass(frozen=True, kw_only=True)
class Routers:
    """The routers' part of a loss."""

    balance: float
    """The load-balancing loss over the real tokens."""
    added: float
    """What it adds to the loss."""
    gradients: Sequence[torch.Tensor]
    """Of the routers' own parameters, by what is added."""


def routers_of(core: nn.Module, family: Family, padded: PlainPadded, samples: Sequence[ProbeSample]) -> Routers | None:
    """The truth: the padded batch with its 2D mask. None: no routers, or this version computes no loss of them."""
    if not family.has("experts"):
        return None
    given, balance = padded.with_routers(samples)
    if balance is None:
        return None
    cross_entropy = sum(target_losses(x, sample).sum() for x, sample in zip(given.logits, samples, strict=True))
    added = float((given.loss - cross_entropy / sum(sample.num_targets for sample in samples)).detach())
    size = float(balance.detach())
    gradients = _gradients(balance, core, family)
    return Routers(balance=size, added=added, gradients=[x * (added / size) for x in gradients])


def check_balance(
    way: Packed, core: Any, samples: Sequence[ProbeSample], expected: Routers, found: Pass, *, right: bool
) -> list[Check]:
    """The load-balancing loss, what it adds, and in float32 its gradient, against those of the padded batch.

    Args:
        way: how the samples were packed.
        core: the model with its head.
        samples: the samples.
        expected: the truth.
        found: the pass with the routers' losses, by `PackedStep`.
        right: logits and loss are right but for the routers. Wrong hidden states already make other routers' losses, so
            only then are routers at fault.
    """
    result = found.result
    assert result is not None
    assert result.aux_loss is not None
    items = way.circumstance.items(samples)
    added = result.loss - result.loss_sum / (result.num_targets if items is None else items)
    low = SAME_IN_LOW_PRECISION
    same = SAME.get(found.logits[0].dtype, low)
    size, sum_of = float(result.aux_loss.detach()), float(added.detach())
    where = way.circumstance.name
    checks = [
        _equal(f"{where}: load-balancing loss", size, expected.balance, same, right=right),
        _equal(
            f"{where}: routers' part of the loss",
            sum_of,
            expected.added,
            ADDED + (0.0 if found.logits[0].dtype in SAME else low) + 1e-6 / max(abs(expected.added), 1e-30),
            right=right,
        ),
    ]
    if expected.gradients and way.circumstance.train and found.logits[0].dtype in SAME:
        gradients = _gradients(added, core, way.family)
        error = max(
            (distance(x, y) for x, y in zip(gradients, expected.gradients, strict=True) if y.any()), default=0.0
        )
        detail = f"the gradient of what routers add to the loss is off by {error:.1e}"
        checks.append(_check(f"{where}: routers' gradient", error, ADDED, detail, right=right))
    return checks


def _equal(name: str, seen: float, expected: float, allowed: float, *, right: bool) -> Check:
    what = name.partition(": ")[2]
    detail = f"the {what} is {seen:.6g}, and {expected:.6g} of the padded batch with its 2D mask"
    return _check(name, relative(seen, expected), allowed, detail, right=right)


def _check(name: str, error: float, allowed: float, detail: str, *, right: bool) -> Check:
    if error <= allowed:
        return Check(part="equality", name=name, finding="ok", seen=error, allowed=allowed)
    cause = "router" if right else None
    return Check(part="equality", name=name, finding="differs", seen=error, allowed=allowed, cause=cause, detail=detail)


def _gradients(loss: torch.Tensor, core: nn.Module, family: Family) -> list[torch.Tensor]:
    """Of the parameters of each block that are not its experts'; none where nothing of it is trained."""
    blocks = [layer.block for layer in expert_layers(ModelParts(family=family, core=core))]
    own = [p for block in blocks for name, p in block.named_parameters() if not name.startswith("experts.")]
    trained = [p for p in own if p.requires_grad]
    if not trained or not loss.requires_grad:
        return []
    found = torch.autograd.grad(loss, trained, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g.detach() for p, g in zip(trained, found, strict=True)]
