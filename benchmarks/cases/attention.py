"""The two parts of a step that packing changes, each by itself: attention, and the case `head`.

attention   forward and backward of one layer on a row by a back-end, on the padded batch under the mask that Hugging
            Face makes, and on the row under a block-diagonal mask; `benchmarks.gpu` times them
head        logits and cross-entropy of labelled rows only against those of all rows
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.measuring import BenchSettings, Figure, alternate
from benchmarks.receipts import ReceiptShapes
from vlmpack.attention.backends import BACKENDS
from vlmpack.errors import VlmpackError
from vlmpack.layout import IGNORE, Segments, unpack
from vlmpack.machine import peak_bytes
from vlmpack.model import StepConfig, target_logprobs


@final
@dataclass(frozen=True, kw_only=True)
class Site:
    """One kind of attention layer and a row for it."""

    name: str
    lengths: Sequence[int]
    """Tokens (patches) of each sample (image)."""
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool

    @property
    def ideal(self) -> float:
        """Pairs of the padded batch over those that are needed: the speed-up if time went with pairs."""
        needed = sum(n * (n + 1) // 2 if self.causal else n * n for n in self.lengths)
        return len(self.lengths) * max(self.lengths) ** 2 / needed


@final
class AttentionRow:
    """Queries, keys and values of one row, and the ways to attend; each runs forward and backward."""

    def __init__(self, site: Site, settings: BenchSettings, dtype: torch.dtype) -> None:
        """Draw random numbers, the same for the same seed."""
        rng = torch.Generator().manual_seed(settings.seed)
        shapes = [(sum(site.lengths), n, site.head_dim) for n in (site.heads, site.kv_heads, site.kv_heads, site.heads)]
        *qkv, self.grad = (torch.randn(*shape, generator=rng).to(settings.device, dtype) for shape in shapes)
        self.qkv = [x.requires_grad_() for x in qkv]
        self.site, self.segments, self.scale = site, Segments.from_lengths(site.lengths), site.head_dim**-0.5

    def packed(self, name: str) -> torch.Tensor:
        """[T, N, H] by a back-end of vlmpack."""
        q, k, v = self.qkv
        out = BACKENDS[name](q, k, v, self.segments, causal=self.site.causal, scale=self.scale)
        torch.autograd.grad(out, self.qkv, self.grad)
        return out.detach()

    def padded(self, *, without_mask: bool = False) -> Callable[[], torch.Tensor]:
        """The same samples as a padded batch; its result is put into a row again, outside the backward pass.

        Args:
            without_mask: under the causal mask alone, CUDA's fastest kernel: right padding changes no real token.
        """
        longest, device = max(self.site.lengths), self.grad.device
        real_BS = torch.arange(longest, device=device) < torch.tensor(self.site.lengths, device=device)[:, None]
        mask_B1SS = real_BS[:, None, None, :].expand(-1, 1, longest, -1)
        if self.site.causal:
            mask_B1SS = mask_B1SS & torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
        rows, columns = real_BS.nonzero(as_tuple=True)  # once: a mask as an index would make the host wait each time
        batch = [unpack(x.detach()[None], self.segments).transpose(1, 2).contiguous() for x in (*self.qkv, self.grad)]
        *qkv, grad = batch
        q, k, v = qkv = [x.requires_grad_() for x in qkv]

        def way() -> torch.Tensor:
            if without_mask:
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
            else:
                out = _masked(qkv, mask_B1SS, self.scale)
            torch.autograd.grad(out, qkv, grad)
            return out.detach().transpose(1, 2)[rows, columns]

        return way

    def dense(self) -> Callable[[], torch.Tensor]:
        """The row itself under a block-diagonal mask."""
        seq_T = self.segments.seq_idx(self.grad.device)
        mask_TT = seq_T[:, None] == seq_T[None, :]
        mask_TT = mask_TT.tril() if self.site.causal else mask_TT

        def way() -> torch.Tensor:
            out = _masked([x.transpose(0, 1)[None] for x in self.qkv], mask_TT, self.scale)[0].transpose(0, 1)
            torch.autograd.grad(out, self.qkv, self.grad)
            return out.detach()

        return way


def _masked(qkv_BNSH: Sequence[torch.Tensor], mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention under a mask as transformers calls it: key-value heads are repeated before, because CUDA has no fused
    kernel that takes a mask and groups heads."""
    q, *kv = qkv_BNSH
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in kv)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def check_same(results: Mapping[str, torch.Tensor], oracle: str) -> None:
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


# ---------------------------------------------------------------------- head

SHARES = (0.1, 0.5)
"""Labelled rows of all rows."""


@final
class Head:
    """A head from D to V and hidden states [T, D], of which the last rows are labelled."""

    def __init__(
        self, tokens: int, hidden: int, vocabulary: int, *, seed: int, device: str, dtype: torch.dtype
    ) -> None:
        torch.manual_seed(seed)
        where = {"device": device, "dtype": dtype}
        self.hidden = torch.randn(tokens, hidden, **where).requires_grad_()
        self.targets = torch.randint(vocabulary, (tokens,), device=device)
        self.head = nn.Linear(hidden, vocabulary, bias=False, **where)
        self.device = device

    def labelled(self, count: int, chunk: int) -> None:
        """The packed step's way: the last `count` rows go through the head, `chunk` of them at a time."""
        self._clear()
        index = torch.arange(len(self.targets) - count, len(self.targets), device=self.device)
        hidden, targets = self.hidden.index_select(0, index), self.targets.index_select(0, index)
        (-target_logprobs(hidden, targets, self.head, chunk=chunk).sum() / count).backward()

    def all_rows(self, count: int) -> None:
        """The usual way: logits of every row in float32, of which the loss then leaves most out."""
        self._clear()
        targets = self.targets.clone()
        targets[: len(targets) - count] = IGNORE
        F.cross_entropy(self.head(self.hidden).float(), targets, ignore_index=IGNORE).backward()

    def peak(self, way: Callable[[], None]) -> int:
        """Bytes at the peak of a call, its inputs included."""
        self._clear()
        return peak_bytes(way, held=[self.hidden, self.targets, self.head.weight], device=self.device)

    def _clear(self) -> None:
        self.hidden.grad = self.head.weight.grad = None


def measure_head(settings: BenchSettings, shapes: ReceiptShapes) -> Iterator[Figure]:
    """Time the head of the step's model on the CPU's type."""
    sizes = (sum(shapes.lengths), shapes.hidden, shapes.vocab_size)
    yield from measure_rows(Head(*sizes, seed=settings.seed, device=settings.device, dtype=torch.float32), settings)


def measure_rows(head: Head, settings: BenchSettings, case: str = "head") -> Iterator[Figure]:
    """Time and weigh labelled against all rows at several shares."""
    rows, seconds = len(head.targets), settings.seconds / len(SHARES)
    for share in SHARES:
        count = round(share * rows)
        ways = {
            "labelled": lambda count=count: head.labelled(count, StepConfig().head_chunk),
            "all": lambda count=count: head.all_rows(count),
        }
        name = f"{share:.0%} labelled"
        memory = head.peak(ways["labelled"]) / head.peak(ways["all"])
        yield Figure(case=case, name=f"memory, labelled / all rows, {name}", value=memory, unit="x")
        timings = alternate(ways, seconds=seconds, device=settings.device)
        yield Figure.timed(case, f"all rows, {name}", timings, "all", settings)
        yield Figure.compared(case, f"labelled / all rows, {name}", timings, ("labelled", "all"), settings)
