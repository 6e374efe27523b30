"""What is counted over the whole row: the tokens and losses of routers, and the targets that the loss divides by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from vlmpack.proof.outcome import Outcome, distance, host, relative, target_losses
from vlmpack.proof.report import Check
from vlmpack.proof.samples import ProbeSample
from vlmpack.proof.scene import Scene
from vlmpack.proof.ways import Packed, Pass

SAME = {torch.float32: 1e-5}
"""Relative difference of two losses that are computed from the same numbers."""
SAME_IN_LOW_PRECISION = 2e-3
BALANCE_IN_LOW_PRECISION = 2e-2
"""Of routers' losses: rounding sends tokens to other experts."""


def check_dispatch(scene: Scene) -> Check:
    """Experts are given the real tokens of a row and nothing else: as many of them, and padding gets nothing back."""
    if not scene.experts:
        return Check.of_mechanism("router", "absent")
    real = scene.segments.num_tokens
    for name, call in scene.experts.items():
        hidden = call.hidden
        if (seen := hidden.numel() // hidden.shape[-1]) != real:
            return _misrouted(seen, real, f"{name} was given {seen} tokens, and {real} are real")
    for name, call in scene.blocks.items():
        answer = call.output[0][0]
        on_padding = scene.segments.padding_mask(answer.device)
        if stray := int((answer[on_padding] != 0).any(-1).sum()):
            return _misrouted(real - stray, real, f"{name} computed padding in place of {stray} real tokens")
    return Check.of_mechanism("router", "ok", seen=real, allowed=real)


def _misrouted(seen: int, real: int, detail: str) -> Check:
    detail = f"{detail}: padding is routed and counted" if seen > real else detail
    return Check.of_mechanism("router", "differs", seen=seen, allowed=real, detail=detail)


@torch.no_grad()
def check_balance(way: Packed, samples: Sequence[ProbeSample], padded: float, truth: Outcome, limit: float) -> Check:
    """The row's load-balancing loss against that of the padded batch with its 2D mask (`padded`).

    Hidden states that are wrong already make other routers' losses, so routers are at fault only if the logits are as
    in `truth`, within `limit`.
    """
    found = way(samples, routers=True)
    assert found.result is not None
    assert found.result.aux_loss is not None
    packed = float(found.result.aux_loss)
    dtype = found.logits[0].dtype
    error, allowed = relative(packed, padded), SAME.get(dtype, BALANCE_IN_LOW_PRECISION)
    check = Check(part="equality", name="row: load-balancing loss", finding="ok", seen=error, allowed=allowed)
    if error <= allowed:
        return check
    right = all(distance(host(x), own) <= limit for x, own in zip(found.logits, truth.logits, strict=True))
    detail = f"the routers' loss is {packed:.6g} in the row, {padded:.6g} in the padded batch with its 2D mask"
    return replace(check, finding="differs", cause="router" if right else None, detail=detail)


@torch.no_grad()
def check_loss_count(way_pass: Pass, samples: Sequence[ProbeSample]) -> Check:
    """The loss that was given, against each sample's own targets under the logits of the same pass."""
    own_count = sum(sample.num_targets for sample in samples)
    own_sum = sum(float(target_losses(x, sample).sum()) for x, sample in zip(way_pass.logits, samples, strict=True))
    given, expected = float(way_pass.loss), own_sum / own_count
    if (result := way_pass.result) is not None and result.num_targets != own_count:
        return _miscounted(result.num_targets, own_count, f"{result.num_targets} targets were counted, {own_count} are")
    error, allowed = relative(given, expected), SAME.get(way_pass.logits[0].dtype, SAME_IN_LOW_PRECISION)
    if not error <= allowed:
        text = f"the loss is {given:.6g}, but the samples' own {own_count} targets make {expected:.6g} of these logits"
        return _miscounted(error, allowed, text)
    return Check.of_mechanism("loss count", "ok", seen=error, allowed=allowed)


def _miscounted(seen: float, allowed: float, detail: str) -> Check:
    return Check.of_mechanism("loss count", "differs", seen=seen, allowed=allowed, detail=detail)
