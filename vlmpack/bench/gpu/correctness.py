"""gpu correctness: every back-end against float32, forward and backward, with segments of none and NaN in the gaps.

The truth is dense attention in float32 on the same numbers. A back-end's output may be wrong by twice what dense
attention in bfloat16 is wrong by, and its gradients by three times, as FlashAttention's own tests have it. One that
cannot serve a call is refused with its reasons, as in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from vlmpack.attention import BACKENDS, AttentionCall, EagerMask
from vlmpack.bench.figure import Figure, Skipped, Target
from vlmpack.bench.gpu.run import Cell, Found, Lab
from vlmpack.bench.gpu.shapes import GpuShapes, HeadShape
from vlmpack.errors import VlmpackError
from vlmpack.layout import Segments, SlotRule

CASE = "gpu correctness"
LOW = torch.bfloat16
RULE = SlotRule(multiple=8, row_multiple=128)
ALLOWED = (2.0, 3.0, 3.0, 3.0)
"""Error over that of dense attention in the same type: of the output, and of the gradients."""
PASSED = Target(limit=1.0, better="lower")
"""Error over what is allowed."""
SEEN = Target(limit=2.0, better="higher")
"""The same number where boundaries are ignored: what is held to `PASSED` has to see that."""
FLOOR = 5e-6
"""Added to both errors: rounding of numbers that are exact by chance."""
GUESS = 1.0
Results = list[torch.Tensor]
"""The output, and the gradients of queries, keys and values."""
Attend = Callable[..., torch.Tensor]


def cells(shapes: GpuShapes) -> list[Cell]:
    """One for each back-end and kind of heads; and one that shows that a wrong result is seen."""
    checks = [
        Cell(
            case=CASE,
            name=f"{name}, {heads}",
            guess=GUESS,
            run=lambda lab, name=name, heads=heads: _backend(lab, name, heads),
        )
        for heads in shapes.heads
        for name in BACKENDS
        if name != EagerMask.name
    ]
    return [*checks, Cell(case=CASE, name="control", guess=GUESS, run=_control)]


def _backend(lab: Lab, name: str, heads: HeadShape) -> Found:
    backend, segments = BACKENDS[name], Segments.from_lengths(lab.shapes.lengths, RULE)
    call = AttentionCall(
        device=lab.device.name, dtype=LOW, head_dim=heads.dim, num_heads=heads.heads, num_kv_heads=heads.kv_heads
    )
    if reasons := backend.unsupported(call):
        yield Skipped(case=CASE, name=f"{name}, {heads}", why=f"refused: {'; '.join(reasons)}")
        return
    for causal in (True, False):
        words = f"{name}, {heads}, {'causal' if causal else 'full'}"
        for gaps, value in _errors(backend, _row(lab, heads, segments), segments, causal=causal):
            yield Figure(case=CASE, name=f"{words}{gaps}", value=value, unit="x", target=PASSED)


def _errors(
    backend: Attend, row: list[torch.Tensor], segments: Segments, *, causal: bool
) -> Iterator[tuple[str, float]]:
    """(words, error) of a clean run, everywhere, and of a poisoned one, wherever the row has tokens."""
    truth = _run(EagerMask(), row, segments, torch.float32, causal=causal)
    plain = _run(EagerMask(), row, segments, LOW, causal=causal)
    yield "", _worst(_run(backend, row, segments, LOW, causal=causal), plain, truth)
    padding = segments.padding_mask(row[0].device)
    poisoned = [x.masked_fill(padding[:, None, None], float("nan")) for x in row]
    out, *gradients = _run(backend, poisoned, segments, LOW, causal=causal)
    kept = [out, *(x[~padding] for x in gradients)]
    others = [[one[0], *(x[~padding] for x in one[1:])] for one in (plain, truth)]
    yield ", NaN in gaps", _worst(kept, *others)


def _control(lab: Lab) -> Iterator[Figure]:
    """Boundaries that are ignored have to be seen."""
    segments, heads = Segments.from_lengths(lab.shapes.lengths, RULE), lab.shapes.heads[0]
    row = _row(lab, heads, segments)
    truth = _run(EagerMask(), row, segments, torch.float32, causal=True)
    plain = _run(EagerMask(), row, segments, LOW, causal=True)
    one = Segments.from_lengths([segments.total])
    leaky = _run(BACKENDS["sdpa_segments"], row, one, LOW, causal=True)
    yield Figure(case=CASE, name="boundaries ignored", value=_worst(leaky, plain, truth), unit="x", target=SEEN)


def _row(lab: Lab, heads: HeadShape, segments: Segments) -> list[torch.Tensor]:
    """Queries, keys and values [T, N or K, H] that bfloat16 can hold."""
    rng = torch.Generator().manual_seed(lab.settings.seed)
    return [
        torch.randn(segments.total, n, heads.dim, generator=rng).to(lab.device.name, LOW)
        for n in (heads.heads, heads.kv_heads, heads.kv_heads)
    ]


def _run(attend: Attend, row: list[torch.Tensor], segments: Segments, dtype: torch.dtype, *, causal: bool) -> Results:
    """Forward and backward."""
    qkv = [x.to(dtype, copy=True).requires_grad_() for x in row]
    out = attend(*qkv, segments, causal=causal, scale=qkv[0].shape[-1] ** -0.5)
    gradient = torch.cos(torch.arange(out.numel(), device=out.device) % 997).view_as(out)
    return [out.detach(), *torch.autograd.grad(out, qkv, gradient.to(dtype))]


def _worst(ours: Results, plain: Results, truth: Results) -> float:
    """The largest error of output and gradients, over what is allowed.

    Raises:
        VlmpackError: something is not finite.
    """
    names = ("output", "gradient of queries", "gradient of keys", "gradient of values")
    if broken := [name for name, x in zip(names, ours, strict=True) if not x.isfinite().all()]:
        raise VlmpackError(f"not finite: {', '.join(broken)}; padding, or memory that nobody wrote, is read")
    return max(
        (_error(a, t) + FLOOR) / (_error(b, t) + FLOOR) / times
        for a, b, t, times in zip(ours, plain, truth, ALLOWED, strict=True)
    )


def _error(low: torch.Tensor, truth: torch.Tensor) -> float:
    return float((low.float() - truth.float()).abs().max())
