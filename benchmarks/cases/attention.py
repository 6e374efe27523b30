"""The two parts of a step that packing changes, measured separately: attention, and the case `head`.

attention   forward and backward of one layer: on a row with a back-end, on the padded batch with Hugging Face's mask,
            and on the row with a block-diagonal mask; `benchmarks.gpu` times them
head        logits and cross-entropy of labeled rows only, against those of all rows
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
from vlmpack.layout import Segments, unpack
from vlmpack.layout.batch import IGNORE
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
        """Query-key pairs of the padded batch / pairs needed: the speed-up if time were proportional to pairs."""
        needed = sum(n * (n + 1) // 2 if self.causal else n * n for n in self.lengths)
        return len(self.lengths) * max(self.lengths) ** 2 / needed


@final
class AttentionRow:
    """Queries, keys and values of one row, and variants of attention; each runs forward and backward."""

    def __init__(self, site: Site, settings: BenchSettings, dtype: torch.dtype) -> None:
        """Draw random queries, keys and values, the same for the same seed."""
        rng = torch.Generator().manual_seed(settings.seed)
        shapes = [(sum(site.lengths), n, site.head_dim) for n in (site.heads, site.kv_heads, site.kv_heads, site.heads)]
        *qkv, self.grad = (torch.randn(*shape, generator=rng).to(settings.device, dtype) for shape in shapes)
        self.qkv = [x.requires_grad_() for x in qkv]
        self.site, self.segments, self.scale = site, Segments.from_lengths(site.lengths), site.head_dim**-0.5

    def packed(self, name: str) -> torch.Tensor:
        """Compute the output [T, N, H] with a back-end of vlmpack."""
        q, k, v = self.qkv
        out = BACKENDS[name](q, k, v, self.segments, causal=self.site.causal, scale=self.scale)
        torch.autograd.grad(out, self.qkv, self.grad)
        return out.detach()

    def padded(self, *, without_mask: bool = False) -> Callable[[], torch.Tensor]:
        """Return a function that attends in the same samples as a padded batch.

        Its output is converted back to a row, outside the backward pass.

        Args:
            without_mask: use only the causal flag, which has CUDA's fastest kernel. Right padding does not change real
                tokens.
        """
        longest, device = max(self.site.lengths), self.grad.device
        real_BS = torch.arange(longest, device=device) < torch.tensor(self.site.lengths, device=device)[:, None]
        mask_B1SS = real_BS[:, None, None, :].expand(-1, 1, longest, -1)
        if self.site.causal:
            mask_B1SS = mask_B1SS & torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
        rows, columns = real_BS.nonzero(as_tuple=True)  # once, because indexing with a mask syncs each time
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
        """Return a function that attends in the row with a dense block-diagonal mask."""
        seq_T = self.segments.seq_idx(self.grad.device)
        mask_TT = seq_T[:, None] == seq_T[None, :]
        mask_TT = mask_TT.tril() if self.site.causal else mask_TT

        def way() -> torch.Tensor:
            out = _masked([x.transpose(0, 1)[None] for x in self.qkv], mask_TT, self.scale)[0].transpose(0, 1)
            torch.autograd.grad(out, self.qkv, self.grad)
            return out.detach()

        return way


def _masked(qkv_BNSH: Sequence[torch.Tensor], mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute attention with a mask, as transformers does.

    Key-value heads are repeated first, because CUDA has no fused kernel for a mask with grouped heads.
    """
    q, *kv = qkv_BNSH
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in kv)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def check_same(results: Mapping[str, torch.Tensor], oracle: str) -> None:
    """Check that all variants compute the same; otherwise, comparing their times would be meaningless.

    Raises:
        VlmpackError: a variant differs from the oracle by more than rounding explains.
    """
    truth = results[oracle].float()
    # relative to the largest number: among millions of numbers, for some the last bit of bfloat16 is worth 3e-2
    limit = (1e-4 if results[oracle].dtype == torch.float32 else 2e-2) * max(1.0, float(truth.abs().max()))
    for name, result in results.items():
        if not (difference := float((result.float() - truth).abs().max())) <= limit:
            raise VlmpackError(f"{name} differs from {oracle} by {difference:.1e}, more than {limit:.0e}")


# ---------------------------------------------------------------------- head

SHARES = (0.1, 0.5)
"""Fractions of rows that are labeled."""


@final
class Head:
    """A head from D to V, and hidden states [T, D]; the last rows are labeled."""

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
        """Run the head like the packed step: only the last `count` rows, `chunk` rows at a time."""
        self._clear()
        index = torch.arange(len(self.targets) - count, len(self.targets), device=self.device)
        hidden, targets = self.hidden.index_select(0, index), self.targets.index_select(0, index)
        (-target_logprobs(hidden, targets, self.head, chunk=chunk).sum() / count).backward()

    def all_rows(self, count: int) -> None:
        """Run the head as usual: compute float32 logits of every row, although the loss ignores most of them."""
        self._clear()
        targets = self.targets.clone()
        targets[: len(targets) - count] = IGNORE
        F.cross_entropy(self.head(self.hidden).float(), targets, ignore_index=IGNORE).backward()

    def peak(self, way: Callable[[], None]) -> int:
        """Return the peak memory of a call in bytes, including its inputs."""
        self._clear()
        return peak_bytes(way, held=[self.hidden, self.targets, self.head.weight], device=self.device)

    def _clear(self) -> None:
        self.hidden.grad = self.head.weight.grad = None


def measure_head(settings: BenchSettings, shapes: ReceiptShapes) -> Iterator[Figure]:
    """Time a head with the sizes of the step's model, in float32."""
    sizes = (sum(shapes.lengths), shapes.hidden, shapes.vocab_size)
    yield from measure_rows(Head(*sizes, seed=settings.seed, device=settings.device, dtype=torch.float32), settings)


def measure_rows(head: Head, settings: BenchSettings, case: str = "head") -> Iterator[Figure]:
    """Measure time and memory of labeled rows against all rows, for several fractions of labeled rows."""
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
