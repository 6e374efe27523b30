"""What is counted over the whole row: the tokens and losses of routers, and the targets that the loss divides by."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlmpack.proof.outcome import loss_sum, relative
from vlmpack.proof.report import Check
from vlmpack.proof.samples import ProbeSample
from vlmpack.proof.scene import Scene
from vlmpack.proof.ways import Packed, Pass, PlainPadded

SAME = {torch.float32: 1e-5}
"""Relative difference of two losses that are computed from the same numbers."""
SAME_IN_LOW_PRECISION = 2e-2


def check_dispatch(scene: Scene) -> Check:
    """Experts are given the real tokens of a row and nothing else."""
    if not scene.experts:
        return Check(part="mechanism", name="router", finding="absent")
    real = scene.segments.num_tokens
    for name, call in scene.experts.items():
        hidden = call.hidden
        if (seen := hidden.numel() // hidden.shape[-1]) != real:
            return Check(
                part="mechanism",
                name="router",
                finding="differs",
                seen=seen,
                allowed=real,
                cause="router",
                detail=f"{name} was given {seen} tokens, and {real} are real: padding is routed and counted",
            )
    return Check(part="mechanism", name="router", finding="ok", seen=real, allowed=real)


@torch.no_grad()
def packed_balance(way: Packed, samples: Sequence[ProbeSample]) -> float:
    """The routers' load-balancing loss of the packed row."""
    result = way(samples, routers=True).result
    assert result is not None
    assert result.aux_loss is not None
    return float(result.aux_loss)


@torch.no_grad()
def padded_balance(way: PlainPadded, samples: Sequence[ProbeSample]) -> float:
    """The same of the padded batch with its 2D mask, through plain transformers."""
    return way.balance(samples)


def check_balance(packed: float, padded: float, dtype: torch.dtype) -> Check:
    """The load-balancing loss, of the row and of the padded batch with its 2D mask."""
    error, allowed = relative(packed, padded), SAME.get(dtype, SAME_IN_LOW_PRECISION)
    name = "load-balancing loss"
    if error <= allowed:
        return Check(part="mechanism", name=name, finding="ok", seen=error, allowed=allowed)
    return Check(
        part="mechanism",
        name=name,
        finding="differs",
        seen=error,
        allowed=allowed,
        cause="router",
        detail=f"the routers' loss is {packed:.6g} in the row, {padded:.6g} in the padded batch with its 2D mask",
    )


@torch.no_grad()
def check_loss_count(way_pass: Pass, samples: Sequence[ProbeSample]) -> Check:
    """The loss that was given, against each sample's own targets under the logits of the same pass."""
    own_count = sum(sample.num_targets for sample in samples)
    own_sum = sum(float(loss_sum(x, sample)) for x, sample in zip(way_pass.logits, samples, strict=True))
    given, expected = float(way_pass.loss), own_sum / own_count
    if (result := way_pass.result) is not None and result.num_targets != own_count:
        return _miscounted(result.num_targets, own_count, f"{result.num_targets} targets were counted, {own_count} are")
    error, allowed = relative(given, expected), SAME.get(way_pass.logits[0].dtype, SAME_IN_LOW_PRECISION)
    if not error <= allowed:
        text = f"the loss is {given:.6g}, but the samples' own {own_count} targets make {expected:.6g} of these logits"
        return _miscounted(error, allowed, text)
    return Check(part="mechanism", name="loss count", finding="ok", seen=error, allowed=allowed)


def _miscounted(seen: float, allowed: float, detail: str) -> Check:
    return Check(
        part="mechanism",
        name="loss count",
        finding="differs",
        seen=seen,
        allowed=allowed,
        cause="loss count",
        detail=detail,
    )
