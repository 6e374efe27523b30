"""Each mechanism that keeps the tokens of samples apart, run by itself: whatever moves there is its own fault.

    positions        the rotary inputs that reach attention, against those of the sample alone
    cache            what a layer was handed to keep keys and values in
    mask             every attention layer with one sample's hidden states changed
    conv taps        every gated delta layer so that its state forgets everything at once, likewise
    recurrent state  every gated delta layer with no tap but the current one, likewise

The last three are given the hidden states, positions and boundaries that reached them in the row, so that nothing that
went wrong before them counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from vlmpack.proof.report import Cause, Check
from vlmpack.proof.scene import CACHES, LEAK, Call, Scene, Span, changed, most_moved, moved

FORGETS_EVERYTHING = 20.0
"""A_log of a gated delta layer whose state is multiplied by exp(-exp(20) * softplus(...)) = 0 at every token."""

Rotary = tuple[torch.Tensor, ...]


def rotary_of(call: Call) -> Rotary:
    """cos and sin that an attention layer was given, [..., T, H], by keyword or second."""
    return tuple(call.args[1] if len(call.args) > 1 else call.kwargs["position_embeddings"])


def check_positions(scene: Scene, alone: Sequence[Rotary]) -> Check:
    """`alone`: the same of each sample by itself."""
    row = rotary_of(next(iter(scene.attention.values())))
    worst, at = 0.0, 0
    for i, ((start, stop), own) in enumerate(zip(scene.segments.spans, alone, strict=True)):
        pairs = zip(row, own, strict=True)
        error = max(float((x[..., start:stop, :].float() - y.float()).abs().max()) for x, y in pairs)
        if not error <= worst:
            worst, at = error, i
    if worst <= LEAK:
        return Check.of_mechanism("positions", "ok", seen=worst, allowed=LEAK)
    detail = f"sample {at} has other rotary positions than alone: cos and sin differ by {worst:.1e}"
    return Check.of_mechanism("positions", "differs", seen=worst, allowed=LEAK, detail=detail)


def check_cache(scene: Scene) -> Check:
    """A training step has no use for a cache, and with one transformers no longer looks for samples in a row."""
    holders = [*scene.attention.items(), *scene.delta.items()]
    found = [at for at, call in holders if any(call.kwargs.get(name) is not None for name in CACHES)]
    if not found:
        return Check.of_mechanism("cache", "ok", seen=0, allowed=0)
    detail = f"{len(found)} layers were handed a cache: it is filled and thrown away"
    return Check.of_mechanism("cache", "differs", seen=len(found), allowed=0, detail=detail)


def check_mask(scene: Scene) -> Check:
    """Others do not move; a sample's last token sees its first half; nothing before it sees its last token."""
    leak, at = _worst(scene.attention, scene, lambda call: lambda hidden: call.again(hidden)[0])
    if not leak <= LEAK:
        return _leak("mask", leak, f"{at}: what a sample attends to moves by {leak:.1e} when only another one changes")
    for name, call in scene.attention.items():
        if finding := _not_causal(call, scene.segments.spans, sparse=scene.family.has("per_sample")):
            return Check.of_mechanism("mask", "differs", detail=f"{name}: {finding}")
    return Check.of_mechanism("mask", "ok", seen=leak, allowed=LEAK)


def check_delta(scene: Scene) -> list[Check]:
    """Convolution and recurrence of gated delta layers, each with the other one out of the way."""
    names: tuple[Cause, ...] = ("conv taps", "recurrent state")
    if not scene.delta:
        return [Check.of_mechanism(name, "absent") for name in names]
    return [_delta_part(scene, name) for name in names]


def _delta_part(scene: Scene, cause: Cause) -> Check:
    exchange = _forgetful if cause == "conv taps" else _current_tap_only

    def make(call: Call) -> Callable[[torch.Tensor], torch.Tensor]:
        weights = exchange(call)
        return lambda hidden: call.again(hidden, weights)[0]

    leak, at = _worst(scene.delta, scene, make)
    if leak <= LEAK:
        return Check.of_mechanism(cause, "ok", seen=leak, allowed=LEAK)
    other = "the state forgets everything" if cause == "conv taps" else "the convolution sees one token"
    return _leak(cause, leak, f"{at}: while {other}, a sample moves by {leak:.1e} when only another one changes")


def _forgetful(call: Call) -> dict[str, torch.Tensor]:
    return {"A_log": torch.full_like(call.module.get_parameter("A_log"), FORGETS_EVERYTHING)}


def _current_tap_only(call: Call) -> dict[str, torch.Tensor]:
    weight = call.module.get_parameter("conv1d.weight")
    taps = torch.zeros_like(weight)
    taps[..., -1] = weight[..., -1]
    return {"conv1d.weight": taps}


def _worst(
    calls: Mapping[str, Call], scene: Scene, make: Callable[[Call], Callable[[torch.Tensor], torch.Tensor]]
) -> tuple[float, str]:
    """The layer in which most moves, and how much."""
    moves = {
        name: most_moved(make(call), call.hidden, scene.segments.spans, scene.gaps) for name, call in calls.items()
    }
    at = max(moves, key=moves.__getitem__)
    return moves[at], at


def _not_causal(call: Call, spans: Sequence[Span], *, sparse: bool) -> str:
    """What is wrong inside samples, if anything. A query of sparse attention may do without a sample's first half."""
    long = [(start, stop) for start, stop in spans if stop - start > 1]
    firsts, lasts = [(a, (a + b) // 2) for a, b in long], [(b - 1, b) for _, b in long]
    before = call.again(call.hidden)[0]
    after_first = call.again(changed(call.hidden, firsts, dim=1))[0]
    if not sparse and any(moved(after_first, before, [last], dim=1) == 0 for last in lasts):
        return "a sample's last token does not see its first half"
    after_last = call.again(changed(call.hidden, lasts, dim=1))[0]
    if not (ahead := moved(after_last, before, [(a, b - 1) for a, b in long], dim=1)) <= LEAK:
        return f"a sample sees its own future: it moves by {ahead:.1e} when its last token changes"
    return ""


def _leak(cause: Cause, seen: float, detail: str) -> Check:
    return Check.of_mechanism(cause, "leaks", seen=seen, allowed=LEAK, detail=detail)
