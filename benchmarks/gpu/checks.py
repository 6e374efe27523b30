"""gpu correctness and gpu equality: back-ends and whole models are exact on this device.

correctness compares every back-end with dense attention in float32 on the same numbers, forward and backward, with
empty segments and NaN in the gaps. Its output may be wrong by twice what dense attention in bfloat16 is wrong by, and
its gradients by three times, as in FlashAttention's own tests. A back-end that cannot serve a call is skipped with its
reasons, as in training.

equality compares whole models on a packed row with each sample alone, both in the device's type. The reference is each
sample alone in float32. Packed may be wrong by twice what a sample alone in low precision is wrong by, in the root mean
square over all logits. Weights are drawn so that a leak would be as large as the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from benchmarks.figures import Figure, Skipped, Target
from benchmarks.gpu.models import with_patch_products
from benchmarks.gpu.run import Cell, Entries, Lab
from benchmarks.gpu.shapes import GpuShapes, HeadShape
from benchmarks.receipts import alone, receipt_batch
from vlmpack.attention.backends import BACKENDS, AttentionCall, EagerMask
from vlmpack.errors import VlmpackError
from vlmpack.families import family_named
from vlmpack.layout import Segments, SlotRule
from vlmpack.model import PackedStep, StepConfig
from vlmpack.testing import tiny_model

CORRECTNESS = "gpu correctness"
LOW = torch.bfloat16
RULE = SlotRule(multiple=8, row_multiple=128)
ALLOWED = (2.0, 3.0, 3.0, 3.0)
"""Error over that of dense attention in the same type: of the output, and of the gradients."""
CORRECT = Target(limit=1.0, better="lower")
"""Error over what is allowed."""
SEEN = Target(limit=2.0, better="higher")
"""The same number where boundaries are ignored: a limit of `CORRECT` must detect that."""
FLOOR = 5e-6
"""Added to both errors: rounding of numbers that are exact by chance."""
CORRECTNESS_SECONDS = 1.0
Results = list[torch.Tensor]
"""The output, and the gradients of queries, keys and values."""
Attend = Callable[..., torch.Tensor]


def correctness_cells(shapes: GpuShapes) -> list[Cell]:
    """One for each back-end and kind of heads; and one that shows that a wrong result is seen."""
    checks = [
        Cell(
            case=CORRECTNESS,
            name=f"{name}, {heads}",
            guess=CORRECTNESS_SECONDS,
            run=lambda lab, name=name, heads=heads: _backend(lab, name, heads),
        )
        for heads in shapes.heads
        for name in BACKENDS
        if name != EagerMask.name
    ]
    return [*checks, Cell(case=CORRECTNESS, name="control", guess=CORRECTNESS_SECONDS, run=_control)]


def _backend(lab: Lab, name: str, heads: HeadShape) -> Entries:
    backend, segments = BACKENDS[name], Segments.from_lengths(lab.shapes.lengths, RULE)
    call = AttentionCall(
        device=lab.device.name, dtype=LOW, head_dim=heads.dim, num_heads=heads.heads, num_kv_heads=heads.kv_heads
    )
    if reasons := backend.unsupported(call):
        yield Skipped(case=CORRECTNESS, name=f"{name}, {heads}", why=f"refused: {'; '.join(reasons)}")
        return
    for causal in (True, False):
        words = f"{name}, {heads}, {'causal' if causal else 'full'}"
        for gaps, value in _errors(backend, _random_qkv(lab, heads, segments), segments, causal=causal):
            yield Figure(case=CORRECTNESS, name=f"{words}{gaps}", value=value, unit="x", target=CORRECT)


def _errors(
    backend: Attend, row: list[torch.Tensor], segments: Segments, *, causal: bool
) -> Iterator[tuple[str, float]]:
    """Yield (words, error) of a clean run, everywhere, and of a poisoned one, wherever the row has tokens."""
    truth = _forward_and_backward(EagerMask(), row, segments, torch.float32, causal=causal)
    plain = _forward_and_backward(EagerMask(), row, segments, LOW, causal=causal)
    yield "", _worst(_forward_and_backward(backend, row, segments, LOW, causal=causal), plain, truth)
    padding = segments.padding_mask(row[0].device)
    poisoned = [x.masked_fill(padding[:, None, None], float("nan")) for x in row]
    out, *gradients = _forward_and_backward(backend, poisoned, segments, LOW, causal=causal)
    kept = [out, *(x[~padding] for x in gradients)]
    others = [[results[0], *(x[~padding] for x in results[1:])] for results in (plain, truth)]
    yield ", NaN in gaps", _worst(kept, *others)


def _control(lab: Lab) -> Iterator[Figure]:
    """Boundaries that are ignored have to be seen."""
    segments, heads = Segments.from_lengths(lab.shapes.lengths, RULE), lab.shapes.heads[0]
    row = _random_qkv(lab, heads, segments)
    truth = _forward_and_backward(EagerMask(), row, segments, torch.float32, causal=True)
    plain = _forward_and_backward(EagerMask(), row, segments, LOW, causal=True)
    joined = Segments.from_lengths([segments.total])
    leaky = _forward_and_backward(BACKENDS["sdpa_segments"], row, joined, LOW, causal=True)
    yield Figure(case=CORRECTNESS, name="boundaries ignored", value=_worst(leaky, plain, truth), unit="x", target=SEEN)


def _random_qkv(lab: Lab, heads: HeadShape, segments: Segments) -> list[torch.Tensor]:
    """Queries, keys and values [T, N or K, H] that bfloat16 can hold."""
    rng = torch.Generator().manual_seed(lab.settings.seed)
    return [
        torch.randn(segments.total, n, heads.dim, generator=rng).to(lab.device.name, LOW)
        for n in (heads.heads, heads.kv_heads, heads.kv_heads)
    ]


def _forward_and_backward(
    attend: Attend, row: list[torch.Tensor], segments: Segments, dtype: torch.dtype, *, causal: bool
) -> Results:
    """Forward and backward."""
    qkv = [x.to(dtype, copy=True).requires_grad_() for x in row]
    out = attend(*qkv, segments, causal=causal, scale=qkv[0].shape[-1] ** -0.5)
    gradient = torch.cos(torch.arange(out.numel(), device=out.device) % 997).view_as(out)
    return [out.detach(), *torch.autograd.grad(out, qkv, gradient.to(dtype))]


def _worst(results: Results, plain: Results, truth: Results) -> float:
    """The largest error of output and gradients, over what is allowed.

    Raises:
        VlmpackError: something is not finite.
    """
    names = ("output", "gradient of queries", "gradient of keys", "gradient of values")
    if broken := [name for name, x in zip(names, results, strict=True) if not x.isfinite().all()]:
        raise VlmpackError(f"not finite: {', '.join(broken)}; padding, or memory that was never written, is read")
    return max(
        (_error(a, t) + FLOOR) / (_error(b, t) + FLOOR) / times
        for a, b, t, times in zip(results, plain, truth, ALLOWED, strict=True)
    )


def _error(low: torch.Tensor, truth: torch.Tensor) -> float:
    return float((low.float() - truth.float()).abs().max())


EQUALITY = "gpu equality"
LOW = torch.bfloat16
SAMPLES = 4
EQUAL = Target(limit=2.0, better="lower")
EQUALITY_SECONDS = 6.0


def equality_cells(shapes: GpuShapes) -> list[Cell]:
    """One for each family."""
    return [
        Cell(
            case=EQUALITY,
            name=shape.family,
            guess=EQUALITY_SECONDS,
            run=lambda lab, name=shape.family: _compare_family(lab, name),
        )
        for shape in shapes.models
    ]


def _compare_family(lab: Lab, name: str) -> Iterator[Figure]:
    model, family = tiny_model(name, seed=lab.settings.seed, dtype=LOW, **lab.shapes.small), family_named(name)
    model = with_patch_products(model).to(lab.device.name)
    receipts = replace(lab.shapes.receipts, samples=SAMPLES, vocab_size=family.text_config(model.config).vocab_size)
    batch = receipt_batch(family, model.config, receipts, seed=lab.settings.seed, device=lab.device.name)
    pixels = batch.media.pixel_values
    assert pixels is not None
    batch = replace(batch, media=replace(batch.media, pixel_values=pixels.to(LOW)))
    samples = alone(batch)
    with torch.no_grad():
        plain = _logits(model, samples)
        step = PackedStep(model, StepConfig(slots=SlotRule(multiple=8)))
        result = step(batch, logits=True)
        assert result.row_logits is not None
        packed = result.row_logits[0][result.segments.real_index(lab.device.name)].float()
        exact = with_patch_products(tiny_model(name, seed=lab.settings.seed, **lab.shapes.small)).to(lab.device.name)
        exact.load_state_dict({key: value.float() for key, value in model.state_dict().items()})
        truth = _logits(exact, [{**sample, "pixel_values": sample["pixel_values"].float()} for sample in samples])
    error, allowed = (float((x - truth).square().mean().sqrt()) for x in (packed, plain))
    more = {"family": name, "target": EQUAL}
    yield Figure(case=EQUALITY, name="error of logits, packed / alone", value=error / allowed, unit="x", **more)
    size = float(truth.square().mean().sqrt())
    yield Figure(case=EQUALITY, name="error of logits alone / logits", value=allowed / size, unit="x", family=name)


def _logits(model: torch.nn.Module, samples: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """float32 [R, V] of all samples, one by one."""
    return torch.cat([model(**sample, use_cache=False).logits[0].float() for sample in samples])
