"""Attention back-ends, one final class each, and the choice among them.

    torch_varlen, flash_attn   varlen kernels, called with `cu_seqlens`            CUDA
    efficient                  a slower varlen kernel, for float32 and wide heads  CUDA, if the two above cannot serve
    flex                       a compiled kernel, called with each query's keys    CUDA, if those cannot serve
    sdpa_segments              one call of PyTorch's own attention per segment     anywhere; the default on a CPU
    eager_mask                 dense scores under a document mask                  the reference for all others

Shapes: T row tokens, T' key tokens, N query heads, K key-value heads (N a multiple of K), H head dimension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from inspect import signature
from itertools import groupby
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, current_flash_attention_impl, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask

from vlmpack.attention.flex import attend as flex_attend
from vlmpack.attention.flex import block_mask
from vlmpack.attention.patterns import (
    CAUSAL,
    Chunks,
    Pattern,
    key_bounds,
    last_queries,
    visible_keys,
    windowed,
    with_sinks,
    written_out,
)
from vlmpack.attention.sinks import attend_with_sinks
from vlmpack.errors import BackendError
from vlmpack.layout.segments import Segments, ranges


@final
@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The properties of an attention call that decide which back-ends can serve it."""

    device: str
    """Device type, "cpu" or "cuda"."""
    dtype: torch.dtype
    """Dtype of q, k and v."""
    head_dim: int
    """H."""
    num_heads: int
    """N."""
    num_kv_heads: int
    """K."""
    dropout: float = 0.0
    """Probability of dropping an attention weight."""
    value_dim: int | None = None
    """Head dimension of values; None: H."""
    pattern: tuple[str, ...] = ()
    """Names of the pattern's parts besides causal attention, such as "window"."""

    @classmethod
    def of(
        cls,
        q_TNH: Tensor,
        k_TKH: Tensor,
        *,
        value_dim: int | None = None,
        dropout: float = 0.0,
        pattern: Pattern = CAUSAL,
    ) -> AttentionCall:
        """Read the properties from tensors and a pattern."""
        return cls(
            device=q_TNH.device.type,
            dtype=q_TNH.dtype,
            head_dim=q_TNH.shape[-1],
            num_heads=q_TNH.shape[-2],
            num_kv_heads=k_TKH.shape[-2],
            dropout=dropout,
            value_dim=value_dim,
            pattern=() if pattern is CAUSAL else pattern.names,
        )


class Softmax(NamedTuple):
    """The settings of one attention call."""

    causal: bool
    """True if tokens do not attend to later tokens."""
    scale: float
    """Factor of the scores."""
    dropout: float
    """Probability of dropping an attention weight."""
    pattern: Pattern = CAUSAL
    """The pattern in addition to causal attention. Calls that compute spans are not causal, but may have a window."""


class Backend(ABC):
    """Base class of attention back-ends: every segment of a row attends to itself and to nothing else."""

    name: ClassVar[str]
    patterns: ClassVar[frozenset[str]] = frozenset(Pattern.__dataclass_fields__)
    """Names of the pattern's parts that it supports."""
    by_mask: ClassVar[bool] = False
    """True if its mask contains chunks and spans; False: chunks become shorter segments, and spans further calls."""
    dtypes: ClassVar[tuple[torch.dtype, ...]] = ()
    """The dtypes that it takes; empty: all."""
    needs_cuda: ClassVar[bool] = False
    """Whether it runs on CUDA only."""
    has_dropout: ClassVar[bool] = True
    """Whether it drops attention weights."""

    def unsupported(self, call: AttentionCall) -> list[str]:
        """Return the reasons why this back-end cannot serve `call`, one sentence each; empty if it can.

        The back-ends of plain PyTorch (`sdpa_segments`, `eager_mask`) can serve every call.
        """
        reasons = []
        if missing := [name for name in call.pattern if name not in self.patterns]:
            reasons.append(f"it computes no {', no '.join(missing)}, which this layer has")
        if self.needs_cuda and call.device != "cuda":
            reasons.append(f"it runs on CUDA only, the tensors are on {call.device}")
        if self.dtypes and call.dtype not in self.dtypes:
            *first, last = (str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            reasons.append(f"it takes {', '.join(first)} and {last} only, the tensors are {call.dtype}")
        if call.dropout and not self.has_dropout:
            reasons.append(f"attention dropout is {call.dropout}, and this kernel has none: set attention_dropout=0")
        return reasons

    def __call__(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        segments: Segments,
        *,
        causal: bool,
        scale: float,
        dropout: float = 0.0,
        keys: Segments | None = None,
        pattern: Pattern = CAUSAL,
    ) -> Tensor:
        """Compute softmax(q k^T * scale) v within each segment: [T, N, H].

        Segments cover the row, as those of `Segments.without_gaps` do: padding is computed too, in its own segments.

        Args:
            q_TNH: queries.
            k_TKH: keys.
            v_TKH: values.
            segments: the boundaries of queries, keys and values; with `keys`, of the queries alone.
            causal: True if tokens do not attend to later tokens.
            scale: factor of the scores.
            dropout: probability of dropping an attention weight.
            keys: the boundaries of keys and values if segments have more keys than queries; None: the same as
                `segments`. Both must have the same number of segments, without gaps or empty segments, and the last
                query of each segment must be at the position of its last key.
            pattern: the layer's pattern in addition to causal attention, limited to the `patterns` of this back-end.
        """
        row, keys, others, spans = segments, keys or segments, keys, pattern.spans
        if (size := pattern.chunk) is not None and not self.by_mask:
            chunks = row.kept((Chunks, others, size), lambda: Chunks.of(row, others or row, size))
            if (index := chunks.key_index) is not None:
                index_S = chunks.keys.derived(Chunks, k_TKH.device, lambda: index)
                k_TKH, v_TKH = (x.index_select(0, index_S) for x in (k_TKH, v_TKH))
            segments, keys, pattern = chunks.queries, chunks.keys, replace(pattern, chunk=None)
        if spans is None or self.by_mask:
            return self.attend(q_TNH, k_TKH, v_TKH, segments, keys, Softmax(causal, scale, dropout, pattern))
        part = pattern.causal_part
        out_TNH = self.attend(q_TNH, k_TKH, v_TKH, segments, keys, Softmax(causal, scale, dropout, part))
        window = pattern.window
        for call in row.kept((spans, others, window), lambda: spans.cut(row, others or row, window)):
            index_R, index_S = call.query_index(q_TNH.device), call.key_index(q_TNH.device)
            rows = ((q_TNH, index_R), (k_TKH, index_S), (v_TKH, index_S))
            q_RNH, k_SKH, v_SKH = (x.index_select(0, index) for x, index in rows)
            both_ways = Softmax(False, scale, dropout, replace(part, window=call.window))
            out_RNH = self.attend(q_RNH, k_SKH, v_SKH, call.segments, call.keys, both_ways)
            out_TNH = out_TNH.index_copy(0, index_R, out_RNH)
        return out_TNH

    @abstractmethod
    def attend(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, segments: Segments, keys: Segments, softmax: Softmax
    ) -> Tensor:
        """Compute one call; `keys` is `segments` itself if queries and keys have the same tokens."""


# ---------------------------------------------------------------------- varlen kernels

MAX_HEAD_DIM = 256
AMPERE, BLACKWELL = (8, 0), (10, 0)


class VarlenKernel(Backend):
    """Base class of the FlashAttention 2 kernels."""

    patterns = frozenset({"window", "chunk", "spans"})
    dtypes = (torch.float16, torch.bfloat16)
    needs_cuda = True

    def unsupported(self, call: AttentionCall) -> list[str]:
        """Add FlashAttention's limits on the GPU and on heads."""
        reasons = super().unsupported(call)
        if call.device == "cuda" and (capability := _capability()) < AMPERE:
            reasons.append(f"it needs compute capability 8.0 (Ampere), this GPU has {'.'.join(map(str, capability))}")
        if call.head_dim % 8 or call.head_dim > MAX_HEAD_DIM:
            reasons.append(f"the head dimension must be a multiple of 8 up to {MAX_HEAD_DIM}, it is {call.head_dim}")
        if (call.value_dim or 0) > call.head_dim:
            reasons.append(f"values are {call.value_dim} wide, and keys only {call.head_dim}")
        if call.num_heads % call.num_kv_heads:
            reasons.append(f"{call.num_heads} query heads cannot share {call.num_kv_heads} key-value heads evenly")
        return reasons

    def attend(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, segments: Segments, keys: Segments, softmax: Softmax
    ) -> Tensor:
        """Call the kernel once. Segments must cover the row: the kernel does not write tokens behind the last one.

        Kernels need values as wide as keys: narrower values (multi-head latent attention) are padded with zeros, and
        the padding is cut off the result.
        """
        seqlens = (
            segments.cu_seqlens(q_TNH.device),
            keys.cu_seqlens(q_TNH.device),
            segments.longest,
            keys.longest,
        )
        width = v_TKH.shape[2]
        if narrower := k_TKH.shape[2] - width:
            v_TKH = F.pad(v_TKH, (0, narrower))
        return self.kernel(q_TNH, k_TKH, v_TKH, *seqlens, softmax=softmax)[..., :width]

    @abstractmethod
    def kernel(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, *seqlens: Any, softmax: Softmax) -> Tensor:
        """Call the kernel; `seqlens`: cu_seqlens of queries and of keys, then the longest segment of each."""


def _window(softmax: Softmax) -> tuple[int, int]:
    """FlashAttention's `window_size`: how many tokens before and after itself a query attends to; -1: all."""
    window = softmax.pattern.window
    return (-1 if window is None else window - 1), (0 if softmax.causal else -1)


@cache
def _capability() -> tuple[int, int]:
    """Compute capability of the current GPU; Ampere's without a GPU and on AMD, which numbers them differently."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return AMPERE
    return torch.cuda.get_device_capability()


@final
class TorchVarlen(VarlenKernel):
    """PyTorch's FlashAttention 2, or what `activate_flash_attention_impl` has put in its place: FlashAttention 3 or
    4."""

    name = "torch_varlen"
    patterns = frozenset({"window", "chunk", "spans", "sinks"})
    has_dropout = False

    def unsupported(self, call: AttentionCall) -> list[str]:
        """Add the limits of FlashAttention 4 if it is in place."""
        reasons = super().unsupported(call)
        is_fourth = call.device == "cuda" and current_flash_attention_impl() == "FA4"
        if is_fourth and _capability() >= BLACKWELL and call.head_dim not in (*range(129), MAX_HEAD_DIM):
            reasons.append(
                f"on this GPU FlashAttention 4 takes head dimensions up to 128, and {MAX_HEAD_DIM}; this one is "
                f"{call.head_dim}"
            )
        return reasons

    def kernel(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, *seqlens: Any, softmax: Softmax) -> Tensor:
        """Call `torch.nn.attention.varlen.varlen_attn`, or with sinks the kernel below it, which returns more."""
        from torch.nn.attention.varlen import varlen_attn

        inputs: list[Any] = [*(x.contiguous() for x in (q_TNH, k_TKH, v_TKH)), *seqlens]
        window, sinks = _window(softmax), softmax.pattern.sinks
        if sinks is None:
            is_grouped = q_TNH.shape[1] != k_TKH.shape[1]
            grouped: dict[str, Any] = {"enable_gqa": True} if is_grouped and _has_enable_gqa() else {}
            out: Any = varlen_attn(*inputs, scale=softmax.scale, window_size=window, **grouped)
            return out  # a tensor, because no auxiliary outputs are requested
        return attend_with_sinks(*inputs, sinks=sinks, scale=softmax.scale, window=window)


@cache
def _has_enable_gqa() -> bool:
    """Return whether `varlen_attn` has the argument `enable_gqa`; torch 2.11 groups heads without it."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in signature(varlen_attn).parameters


@final
class FlashAttn(VarlenKernel):
    """FlashAttention 2 of the package `flash-attn`, with attention dropout."""

    name = "flash_attn"
    patterns = frozenset({"window", "chunk", "softcap", "spans"})

    def unsupported(self, call: AttentionCall) -> list[str]:
        """Add that the package is installed, and that there are no softcaps with dropout."""
        reasons = super().unsupported(call)
        if call.dropout and "softcap" in call.pattern:
            reasons.append(
                f"attention dropout is {call.dropout} and scores have a softcap, which it does not compute together: "
                "set attention_dropout=0"
            )
        missing = _missing()
        return [*reasons, missing] if missing else reasons

    def kernel(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, *seqlens: Any, softmax: Softmax) -> Tensor:
        """Call `flash_attn.flash_attn_varlen_func`, with a deterministic backward pass if PyTorch asks for it."""
        from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportAttributeAccessIssue, reportMissingImports]

        causal, scale, dropout, pattern = softmax
        more: dict[str, Any] = {} if pattern.window is None else {"window_size": _window(softmax)}
        if pattern.softcap is not None:
            more["softcap"] = pattern.softcap
        if torch.are_deterministic_algorithms_enabled():
            more["deterministic"] = True
        return flash_attn_varlen_func(
            q_TNH, k_TKH, v_TKH, *seqlens, dropout_p=dropout, softmax_scale=scale, causal=causal, **more
        )


@cache
def _missing() -> str | None:
    """Return why the kernel is missing, or None if it is there.

    Finding the package is not enough: FlashAttention 4 has another kernel under the same name, and a build for another
    PyTorch cannot be loaded.
    """
    if find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    try:
        from flash_attn import flash_attn_varlen_func  # noqa: F401  # pyright: ignore
    except Exception as error:  # whatever the import raises, other back-ends can serve
        return f"the package flash-attn has no kernel for this PyTorch ({type(error).__name__}: {error})"
    return None


# ---------------------------------------------------------------------- the memory-efficient kernel

NO_MASK, CAUSAL_FROM_THE_END = 0, 2
"""The kernel's `custom_mask_type`s: all keys, and causal with the last query at the last key."""


@final
class EfficientVarlen(Backend):
    """PyTorch's memory-efficient kernel, called with boundaries: float32, and head dimensions above 256.

    Windows are left out: its backward pass places them from the first key, so they need as many queries as keys.
    """

    name = "efficient"
    patterns = frozenset({"chunk", "spans"})
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    needs_cuda = True
    has_dropout = False

    def unsupported(self, call: AttentionCall) -> list[str]:
        """Add its limits on the GPU and on head dimensions."""
        reasons = super().unsupported(call)
        if torch.version.hip is not None:
            reasons.append("on AMD it takes no boundaries")
        elif call.dtype == torch.bfloat16 and _capability() < AMPERE:
            reasons.append("bfloat16 needs compute capability 8.0 (Ampere)")
        multiple = 4 if call.dtype == torch.float32 else 8
        if call.head_dim % multiple or (call.value_dim or 0) % multiple:
            reasons.append(
                f"head dimensions must be multiples of {multiple} in {call.dtype}, keys have {call.head_dim} and "
                f"values {call.value_dim or call.head_dim}"
            )
        return reasons

    def attend(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, segments: Segments, keys: Segments, softmax: Softmax
    ) -> Tensor:
        """Call the kernel once, on keys and values repeated for each query head; PyTorch differentiates the call."""
        device, group = q_TNH.device, q_TNH.shape[1] // k_TKH.shape[1]
        k_TNH, v_TNH = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k_TKH, v_TKH))
        out_1TNH, *_ = torch.ops.aten._efficient_attention_forward(
            *(x[None].contiguous() for x in (q_TNH, k_TNH, v_TNH)),
            None,
            segments.cu_seqlens(device),
            keys.cu_seqlens(device),
            segments.longest,
            keys.longest,
            0.0,
            CAUSAL_FROM_THE_END if softmax.causal else NO_MASK,
            True,
            scale=softmax.scale,
        )
        return out_1TNH[0]


# ---------------------------------------------------------------------- FlexAttention


@final
class FlexAttention(Backend):
    """Compiled `torch.nn.attention.flex_attention`: one kernel for every pattern, without the scores in memory."""

    name = "flex"
    by_mask = True
    dtypes = (torch.float16, torch.bfloat16)  # float32 is for exactness checks, which need no kernel
    needs_cuda = True
    has_dropout = False

    def unsupported(self, call: AttentionCall) -> list[str]:
        """Add its limits on head dimensions, and that it can be compiled."""
        reasons = super().unsupported(call)
        if call.device == "cuda" and not _has_compiler():
            reasons.append("it needs Triton, with which PyTorch compiles it")
        if not 16 <= call.head_dim <= MAX_HEAD_DIM or not 16 <= (call.value_dim or 16) <= MAX_HEAD_DIM:
            reasons.append(f"head dimensions must be 16 to {MAX_HEAD_DIM}, this one is {call.head_dim}")
        return reasons

    def attend(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, segments: Segments, keys: Segments, softmax: Softmax
    ) -> Tensor:
        """Call the kernel once, with a mask that all layers of a row share, recomputation included."""
        causal, scale, _, pattern = softmax
        device = q_TNH.device
        limits = (causal, pattern.window, pattern.chunk, pattern.spans)
        others = None if keys is segments else keys

        def make() -> BlockMask:
            return block_mask(key_bounds(segments, keys, causal=causal, pattern=pattern), keys.total, device)

        mask = segments.kept(("block mask", others, device, *limits), make)
        return flex_attend(q_TNH, k_TKH, v_TKH, mask, scale=scale, pattern=pattern)


@cache
def _has_compiler() -> bool:
    from torch.utils._triton import has_triton

    return has_triton()


# ---------------------------------------------------------------------- PyTorch's own attention

MANY = 256
"""Number of segments from which on segments of the same length are computed in one call."""

PADDED_ON, MAX_PADDING, MAX_MASKED = ("cuda",), 1.5, 2048
"""Types of devices on which segments are padded, and how many times as long a padded segment is, at most. Where padding
needs a mask, no segment has more keys than the last number: masks grow with its square."""

AT_ONCE = 1 << 15
"""Maximum number of segments in a call: a CUDA grid dimension is limited to 65,535."""

WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@final
class SdpaSegments(Backend):
    """One call of `scaled_dot_product_attention` per segment, without a mask where possible."""

    name = "sdpa_segments"

    def attend(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, segments: Segments, keys: Segments, softmax: Softmax
    ) -> Tensor:
        """Call attention once per segment. If there are many segments, call it once per length; on a GPU, segments of
        similar length are padded to the same."""

        # Padding comes after all tokens that read it, if queries and keys are the same tokens. Else it needs a mask.
        device, others = q_TNH.device, None if keys is segments else keys
        is_hidden = softmax.causal and others is None
        pads = device.type in PADDED_ON and (is_hidden or keys.max_length <= MAX_MASKED)
        is_few = len(segments.lengths) < (2 if pads else MANY)
        make, key = _in_order if is_few else partial(_by_length, pads=pads), ("calls", others, is_few, pads)
        calls = segments.kept(key, lambda: make(segments, keys))

        def moved(x: Tensor, index: np.ndarray | None, what: str) -> Tensor:
            return x if index is None else x.index_select(0, segments.derived((*key, what), device, lambda: index))

        sizes, key_sizes = [n * queries for n, queries, _ in calls.shapes], [n * seen for n, _, seen in calls.shapes]
        # One split per tensor: slicing each segment would make the backward pass write G full-size gradients.
        q_parts = moved(q_TNH, calls.queries, "queries").split_with_sizes(sizes)
        k_parts, v_parts = (moved(x, calls.keys, "keys").split_with_sizes(key_sizes) for x in (k_TKH, v_TKH))
        bounds: Sequence[Tensor | None] = [None] * len(sizes)
        if calls.first_keys is not None and not is_hidden:
            limits = softmax.causal, softmax.pattern.window
            bounds_R2 = segments.derived((*key, *limits), device, lambda: calls.bounds(segments, keys, softmax))
            bounds = bounds_R2.split_with_sizes(sizes)
        out = []
        for (n, _, seen), q, k, v, of_call in zip(calls.shapes, q_parts, k_parts, v_parts, bounds, strict=True):
            mask = None if of_call is None else _between(of_call.unflatten(0, (n, 1, -1)), seen)
            q_nLNH, k_nLKH, v_nLKH = (x.unflatten(0, (n, -1)) for x in (q, k, v))
            out.append(_attend_alike(q_nLNH, k_nLKH, v_nLKH, mask, softmax).flatten(0, 1))
        return moved(out[0] if len(out) == 1 else torch.cat(out), calls.results, "results")


def _attend_alike(q_nLNH: Tensor, k_nLKH: Tensor, v_nLKH: Tensor, mask: Tensor | None, softmax: Softmax) -> Tensor:
    """Compute n segments of the same length; `mask`: the keys of each, bool [n, 1, L, L']; None: by the window."""
    window, queries, visible = softmax.pattern.window, q_nLNH.shape[1], k_nLKH.shape[1]
    if mask is None and softmax.causal:
        return windowed(q_nLNH, k_nLKH, v_nLKH, window, partial(_attend, softmax=softmax))
    if mask is None and window is not None and window < visible:
        mask = last_queries(queries, visible, q_nLNH.device, causal=False, window=window)
    return _attend(q_nLNH, k_nLKH, v_nLKH, mask, softmax)


def _attend(q_nLNH: Tensor, k_nLKH: Tensor, v_nLKH: Tensor, mask: Tensor | None, softmax: Softmax) -> Tensor:
    """Compute n segments [n, L, N, H] under one mask, bool [L, L'], or one mask each, bool [n, 1, L, L'].

    Without a mask: all keys, or causal attention with L' = L or L = 1.
    """
    causal, scale, dropout, pattern = softmax
    if mask is None and not (pattern.softcap is None and pattern.sinks is None):
        mask = last_queries(q_nLNH.shape[1], k_nLKH.shape[1], q_nLNH.device, causal=causal)
    if mask is not None and pattern.softcap is not None:
        return written_out(q_nLNH, k_nLKH, v_nLKH, mask, scale=scale, dropout=dropout, pattern=pattern)
    if mask is not None and pattern.sinks is not None:
        q_nLNH, k_nLKH, v_nLKH, mask = with_sinks(q_nLNH, k_nLKH, v_nLKH, mask, sinks=pattern.sinks, scale=scale)
    q_nNLH, k_nKLH, v_nKLH = (x.transpose(1, 2) for x in (q_nLNH, k_nLKH, v_nLKH))
    in_flash = mask is None and _fits_flash(q_nNLH.dtype, q_nNLH.shape[3], v_nKLH.shape[3])
    if q_nNLH.device.type == "cuda" and not in_flash:  # the memory-efficient kernel does not group heads
        group = q_nNLH.shape[1] // k_nKLH.shape[1]
        k_nKLH, v_nKLH = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k_nKLH, v_nKLH))
    with _kernels(q_nNLH.device):
        out_nNLH = F.scaled_dot_product_attention(
            q_nNLH,
            k_nKLH,
            v_nKLH,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=causal and mask is None and q_nNLH.shape[2] > 1,
            scale=scale,
            enable_gqa=q_nNLH.shape[1] != k_nKLH.shape[1],
        )
    return out_nNLH.transpose(1, 2)


def _fits_flash(dtype: torch.dtype, head_dim: int, value_dim: int) -> bool:
    """Return whether PyTorch's attention takes its flash kernel, if it has no mask."""
    return dtype in (torch.float16, torch.bfloat16) and head_dim == value_dim <= MAX_HEAD_DIM


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class SegmentCalls:
    """The calls that compute the segments of a row, on views of it or on copies. R queries of all calls."""

    shapes: Sequence[tuple[int, int, int]]
    """(n segments, queries of each, keys of each) of each call."""
    queries: np.ndarray | None = None
    """int64 [R]: the query at each place of the calls; None: those of the row, in order."""
    keys: np.ndarray | None = None
    """int64: the key at each place of the calls; None: those of the row, in order."""
    results: np.ndarray | None = None
    """int64 [T]: the place of each query in the calls; None: they are in order."""
    first_keys: np.ndarray | None = None
    """int64 [R]: the first key of each query's segment in the row; None: no segment is padded."""

    def bounds(self, segments: Segments, keys: Segments, softmax: Softmax) -> np.ndarray:
        """Return the first key of each query and the end, counted from its segment's first: int32 [R, 2]."""
        bounds_2T = key_bounds(segments, keys, causal=softmax.causal, pattern=softmax.pattern)
        return np.ascontiguousarray((bounds_2T[:, self.queries] - self.first_keys).astype(np.int32).T)


def _in_order(segments: Segments, keys: Segments) -> SegmentCalls:
    """One call per segment, or run of segments of the same length, on views of the row."""
    pairs = ((n, m) for n, m in zip(segments.lengths, keys.lengths, strict=False) if n)
    return SegmentCalls(shapes=[(len([*same]), *pair) for pair, same in groupby(pairs)])


def _by_length(segments: Segments, keys: Segments, *, pads: bool) -> SegmentCalls:
    """One call for all segments of the same length, on copies: for short segments, the calls cost more than copying.
    `pads`: segments are padded by up to `MAX_PADDING`, so that there are few lengths."""
    lengths_G2 = np.asarray([segments.lengths, keys.lengths[: len(segments.lengths)]], np.int64).T
    widths_G2 = padded_lengths(lengths_G2) if pads else lengths_G2
    order = np.lexsort(widths_G2.T[::-1])
    order = order[lengths_G2[order, 0] > 0]
    widths_R2 = widths_G2[order]
    distinct, counts = np.unique(widths_R2, axis=0, return_counts=True)
    firsts_G = np.zeros(len(lengths_G2), np.int64)
    firsts_G[order] = widths_R2[:, 0].cumsum() - widths_R2[:, 0]
    first_keys = np.repeat(np.asarray(keys.spans, np.int64)[order, 0], widths_R2[:, 0])
    return SegmentCalls(
        shapes=[
            (min(AT_ONCE, count - done), queries, seen)
            for (queries, seen), count in zip(distinct.tolist(), counts.tolist(), strict=True)
            for done in range(0, count, AT_ONCE)
        ],
        queries=_tokens(segments, order, widths_R2[:, 0]),
        keys=_tokens(keys, order, widths_R2[:, 1]),
        results=ranges(firsts_G, lengths_G2[:, 0]),
        first_keys=first_keys if (widths_G2 != lengths_G2).any() else None,
    )


def _between(bounds_2: Tensor, keys: int) -> Tensor:
    """Return bool [..., L, L']: whether each of the keys is between a query's bounds, [..., L, 2]."""
    key_L = torch.arange(keys, device=bounds_2.device)
    return (key_L >= bounds_2[..., :1]) & (key_L < bounds_2[..., 1:])


def padded_lengths(lengths_G2: np.ndarray) -> np.ndarray:
    """Return the padded number of queries and keys of each segment for `SdpaSegments`, int64 [G, 2], as the lengths."""
    widths_G2 = lengths_G2.copy()
    widths_G2[:, 0] = _padded(lengths_G2[:, 0])
    for queries in {*widths_G2[:, 0].tolist()}:
        like = widths_G2[:, 0] == queries
        widths_G2[like, 1] = _padded(lengths_G2[like, 1])
    return widths_G2


def _padded(lengths_G: np.ndarray) -> np.ndarray:
    order = lengths_G.argsort()
    lengths_R, widths_G, stop = lengths_G[order], lengths_G.copy(), len(order)
    while stop:
        start = int(np.searchsorted(lengths_R, lengths_R[stop - 1] / MAX_PADDING))
        widths_G[order[start:stop]], stop = lengths_R[stop - 1], start
    return widths_G


def _tokens(segments: Segments, order: np.ndarray, widths_R: np.ndarray) -> np.ndarray:
    """int64: positions of the tokens of these segments; padding repeats the last one."""
    starts_R, stops_R = np.asarray(segments.spans, np.int64)[order].T
    return np.minimum(ranges(starts_R, widths_R), np.repeat(stops_R - 1, widths_R))


def _kernels(device: torch.device) -> AbstractContextManager[object]:
    """Exclude cuDNN on a GPU: it makes a new plan for every length, which takes longer than the attention itself."""
    return sdpa_kernel(WITHOUT_PLANS) if device.type == "cuda" else nullcontext()


# ---------------------------------------------------------------------- the dense mask


@final
class EagerMask(Backend):
    """Softmax over a dense [T, T'] score matrix; memory and work grow with T squared."""

    name = "eager_mask"
    by_mask = True

    def attend(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, segments: Segments, keys: Segments, softmax: Softmax
    ) -> Tensor:
        """Compute the scores, the mask and the weighted sum of values explicitly."""
        causal, scale, dropout, pattern = softmax
        visible_TT = visible_keys(segments, keys, q_TNH.device, causal=causal, pattern=pattern)
        q_1TNH, k_1TKH, v_1TKH = (x[None] for x in (q_TNH, k_TKH, v_TKH))
        return written_out(q_1TNH, k_1TKH, v_1TKH, visible_TT, scale=scale, dropout=dropout, pattern=pattern)[0]


# ---------------------------------------------------------------------- the choice

AUTO = "auto"

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (TorchVarlen(), FlashAttn(), EfficientVarlen(), FlexAttention(), SdpaSegments(), EagerMask())
}
"""The back-ends by name, in the order in which "auto" tries them."""


@final
class _Recorder(Backend):
    """Records calls and computes nothing."""

    name = "recorder"
    by_mask = True

    def attend(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, segments: Segments, keys: Segments, softmax: Softmax
    ) -> Tensor:
        return q_TNH.new_empty(*q_TNH.shape[:2], v_TKH.shape[2])


_RECORDED: ContextVar[list[AttentionCall] | None] = ContextVar("vlmpack_recorded_calls", default=None)


@contextmanager
def recorded_calls() -> Iterator[list[AttentionCall]]:
    """Record attention calls in a `with` block, and return empty tensors: for models on the meta device."""
    token = _RECORDED.set(calls := [])
    try:
        yield calls
    finally:
        _RECORDED.reset(token)


def kernel_of(call: AttentionCall, name: str) -> str:
    """Name the kernel with which a back-end serves `call`.

    `sdpa_segments` leaves the choice to PyTorch, by the rules of its kernels. "scores in memory" is PyTorch's own
    softmax over all scores: its memory grows with the square of a segment's length.
    """
    if name == EagerMask.name:
        return "scores in memory"
    if name != SdpaSegments.name:
        others = {"flex": "FlexAttention", "efficient": "memory-efficient attention", "torch_varlen": _in_pytorch()}
        return others.get(name, "FlashAttention 2")
    if "softcap" in call.pattern:
        return "scores in memory"
    if call.device == "cpu":
        return "PyTorch's CPU attention"
    value_dim = call.value_dim or call.head_dim
    if not {"window", "sinks"} & {*call.pattern} and _fits_flash(call.dtype, call.head_dim, value_dim):
        return _in_pytorch()
    multiple = 4 if call.dtype == torch.float32 else 8
    is_aligned = call.head_dim % multiple == 0 and value_dim % multiple == 0
    return "memory-efficient attention" if is_aligned and call.dtype != torch.float64 else "scores in memory"


def _in_pytorch() -> str:
    """Name PyTorch's flash kernel: FlashAttention 2, or what `activate_flash_attention_impl` has put in its place."""
    return f"FlashAttention {(current_flash_attention_impl() or 'FA2').removeprefix('FA')}"


def choose(call: AttentionCall, name: str = AUTO, *, chosen: dict[AttentionCall, Backend] | None = None) -> Backend:
    """Choose the back-end for `call`: the named one, or with "auto" the first that can serve it.

    Args:
        call: the call.
        name: name of the back-end, or "auto".
        chosen: the choices under this name so far. Layers of a row mostly make the same call.

    Raises:
        BackendError: there is no back-end of that name, or it cannot serve the call; the message gives its reasons. A
            named back-end is never replaced by another one.
    """
    if (calls := _RECORDED.get()) is not None:
        calls.append(call)
        return _Recorder()
    if chosen is not None:
        if (known := chosen.get(call)) is None:
            known = chosen[call] = choose(call, name)
        return known
    if name == AUTO:
        return next(backend for backend in BACKENDS.values() if not backend.unsupported(call))
    if name not in BACKENDS:
        raise BackendError(f"there is no attention back-end {name!r}; choose one of {[AUTO, *BACKENDS]}")
    reasons = BACKENDS[name].unsupported(call)
    if reasons:
        raise BackendError(f"attention back-end {name!r} cannot serve this call: {'; '.join(reasons)}")
    return BACKENDS[name]


def explain(call: AttentionCall) -> dict[str, list[str]]:
    """Return every back-end's reasons for not serving `call`, in the order in which "auto" tries them."""
    return {name: backend.unsupported(call) for name, backend in BACKENDS.items()}
