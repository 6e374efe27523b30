"""attention: forward and backward of packed attention, against the padded batch and a dense mask, as models do it.

    packed       every back-end that can serve here, on [T, N, H]
    padded       scaled_dot_product_attention on [B, N, S, H] under the mask that Hugging Face makes of the 2D mask
    dense mask   the same on [1, N, T, H] under a block-diagonal mask: the usual way to pack without varlen kernels

Language attention is causal with fewer key-value heads than heads; vision attention is full, a segment an image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F

from benchmarks.figures import BenchSettings, Figure, Skipped
from benchmarks.timing import alternate
from vlmpack.attention.backends import BACKENDS, AttentionCall, explain
from vlmpack.errors import VlmpackError
from vlmpack.layout import Segments, unpack

CASE = "attention"
TOKENS = (768, 154, 680, 242, 592, 330, 505, 417)
PATCHES = (920, 184, 816, 288, 712, 396, 604, 500)
ORACLE = "eager_mask"
"""The back-end that others are compared with; too slow to be timed."""


@final
@dataclass(frozen=True, kw_only=True)
class Site:
    """One kind of attention layer and a row for it."""

    name: str
    """For people."""
    lengths: tuple[int, ...]
    """Tokens (patches) of each sample (image)."""
    heads: int
    """N."""
    kv_heads: int
    """K."""
    head_dim: int
    """H."""
    causal: bool
    """True: a token attends to those before it only."""


@final
@dataclass(frozen=True, kw_only=True)
class AttentionShapes:
    """Sites of Qwen3-VL-2B with a quarter of its heads, which changes no ratio on a CPU: 4 of 16 heads of 128 on 2 of 8
    key-value heads, and 4 of 16 heads of 64 in the vision tower."""

    sites: tuple[Site, ...] = (
        Site(name="language", lengths=TOKENS, heads=4, kv_heads=2, head_dim=128, causal=True),
        Site(name="vision", lengths=PATCHES, heads=4, kv_heads=4, head_dim=64, causal=False),
    )
    """8 samples at 5:1, and an image of 30 % of each."""


@final
@dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """Queries, keys and values of one row, and the gradient of the result."""

    site: Site
    segments: Segments
    q_TNH: torch.Tensor
    k_TKH: torch.Tensor
    v_TKH: torch.Tensor
    grad_TNH: torch.Tensor

    @classmethod
    def of(cls, site: Site, settings: BenchSettings, dtype: torch.dtype) -> AttentionInputs:
        """Random numbers, the same for the same seed."""
        rng = torch.Generator().manual_seed(settings.seed)
        tokens = sum(site.lengths)

        def random(heads: int) -> torch.Tensor:
            return torch.randn(tokens, heads, site.head_dim, generator=rng).to(settings.device, dtype)

        q, k, v = random(site.heads), random(site.kv_heads), random(site.kv_heads)
        return cls(
            site=site,
            segments=Segments.from_lengths(site.lengths),
            q_TNH=q.requires_grad_(),
            k_TKH=k.requires_grad_(),
            v_TKH=v.requires_grad_(),
            grad_TNH=random(site.heads),
        )

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return self.site.head_dim**-0.5

    @property
    def ideal(self) -> float:
        """Pairs of the padded batch over those that are needed: what a speed-up could be if time went with pairs."""
        longest, count = max(self.site.lengths), len(self.site.lengths)
        needed = sum(n * (n + 1) // 2 if self.site.causal else n * n for n in self.site.lengths)
        return count * longest**2 / needed

    def backward(self, out: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Run the backward pass; the result of the forward pass."""
        inputs = (self.q_TNH, self.k_TKH, self.v_TKH)
        torch.autograd.grad(out, inputs, grad)
        return out.detach()


def measure_attention(settings: BenchSettings, shapes: AttentionShapes) -> list[Figure | Skipped]:
    """Time every way at every site, once they are seen to compute the same.

    Raises:
        VlmpackError: two ways differ.
    """
    figures: list[Figure | Skipped] = []
    dtype = torch.float32 if settings.device == "cpu" else torch.bfloat16
    for site in shapes.sites:
        inputs = AttentionInputs.of(site, settings, dtype)
        figures += _site(inputs, settings, seconds=settings.seconds / len(shapes.sites))
    return figures


def _site(inputs: AttentionInputs, settings: BenchSettings, *, seconds: float) -> Iterator[Figure | Skipped]:
    call = AttentionCall.of(inputs.q_TNH, inputs.k_TKH)
    reasons = explain(call)
    packed = {name: packed_way(inputs, name) for name, why in reasons.items() if not why and name != ORACLE}
    ways = {**packed, "padded": padded_way(inputs), "dense mask": dense_way(inputs)}
    check_same({name: way() for name, way in {**ways, ORACLE: packed_way(inputs, ORACLE)}.items()})
    timings = alternate(ways, seconds=seconds, device=settings.device)
    site = inputs.site.name
    yield Figure(case=CASE, name=f"{site}, ideal: padded / needed pairs", value=inputs.ideal, unit="x")
    for name in packed:
        yield Figure.timed(CASE, f"{site}, {name}", timings, name, settings)
        for other in ("padded", "dense mask"):
            yield Figure.compared(CASE, f"{site}, {other} / {name}", timings, (other, name), settings)
    for name, why in reasons.items():
        if why:
            yield Skipped(case=CASE, name=f"{site}, {name}", why="; ".join(why))


# ---------------------------------------------------------------------- the ways


def packed_way(inputs: AttentionInputs, name: str) -> Callable[[], torch.Tensor]:
    """[T, N, H] by a back-end of vlmpack."""
    backend, causal = BACKENDS[name], inputs.site.causal

    def way() -> torch.Tensor:
        out = backend(inputs.q_TNH, inputs.k_TKH, inputs.v_TKH, inputs.segments, causal=causal, scale=inputs.scale)
        return inputs.backward(out, inputs.grad_TNH)

    return way


def padded_way(inputs: AttentionInputs, *, without_mask: bool = False) -> Callable[[], torch.Tensor]:
    """The same samples as a padded batch; its result is put into a row again, outside the backward pass.

    Args:
        inputs: the samples.
        without_mask: under the causal mask alone, CUDA's fastest kernel: right padding changes no real token.
    """
    segments, longest = inputs.segments, max(inputs.site.lengths)
    device = inputs.q_TNH.device
    real_BS = torch.arange(longest, device=device) < torch.tensor(inputs.site.lengths, device=device)[:, None]
    mask_B1SS = real_BS[:, None, None, :].expand(-1, 1, longest, -1)
    if inputs.site.causal:
        mask_B1SS = mask_B1SS & torch.ones(longest, longest, dtype=torch.bool, device=device).tril()

    rows, columns = real_BS.nonzero(as_tuple=True)  # once: a mask as an index would make the host wait each time

    def batch(row: torch.Tensor) -> torch.Tensor:
        return unpack(row.detach()[None], segments).transpose(1, 2).contiguous()

    q, k, v = (batch(x).requires_grad_() for x in (inputs.q_TNH, inputs.k_TKH, inputs.v_TKH))
    grad = batch(inputs.grad_TNH)

    def way() -> torch.Tensor:
        if without_mask:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=inputs.scale, enable_gqa=True)
        else:
            out = masked(q, k, v, mask_B1SS, inputs.scale)
        torch.autograd.grad(out, (q, k, v), grad)
        return out.detach().transpose(1, 2)[rows, columns]

    return way


def dense_way(inputs: AttentionInputs) -> Callable[[], torch.Tensor]:
    """The row itself under a block-diagonal mask."""
    seq_T = inputs.segments.seq_idx(inputs.q_TNH.device)
    mask_TT = seq_T[:, None] == seq_T[None, :]
    mask_TT = mask_TT.tril() if inputs.site.causal else mask_TT

    def way() -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (inputs.q_TNH, inputs.k_TKH, inputs.v_TKH))
        out = masked(q, k, v, mask_TT, inputs.scale)
        return inputs.backward(out[0].transpose(0, 1), inputs.grad_TNH)

    return way


def masked(
    q_BNSH: torch.Tensor, k_BKSH: torch.Tensor, v_BKSH: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Compute attention under a mask as transformers calls it: key-value heads are repeated before, because CUDA has no
    fused kernel that takes a mask and groups heads."""
    group = q_BNSH.shape[1] // k_BKSH.shape[1]
    k_BNSH, v_BNSH = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k_BKSH, v_BKSH))
    return F.scaled_dot_product_attention(q_BNSH, k_BNSH, v_BNSH, attn_mask=mask, scale=scale)


def check_same(results: dict[str, torch.Tensor], *, oracle: str = ORACLE) -> None:
    """Times of ways that compute different things mean nothing.

    Raises:
        VlmpackError: a way differs from the oracle by more than low precision explains.
    """
    truth = results[oracle].float()
    # relative to the largest number: among millions, some have a last bit of bfloat16 that is worth 3e-2
    limit = (1e-4 if results[oracle].dtype == torch.float32 else 2e-2) * max(1.0, float(truth.abs().max()))
    for name, result in results.items():
        if not (difference := float((result.float() - truth).abs().max())) <= limit:
            raise VlmpackError(f"{name} differs from {oracle} by {difference:.1e}, more than {limit:.0e}")
