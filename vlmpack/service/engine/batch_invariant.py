"""Batch-invariant computation: each token's numbers depend on the tokens before it alone, to the bit.

The kernels of linear layers and attention choose their order of summation by the number of rows and keys, so the last
bits of a token's log-probability depend on how many other tokens are computed with it, and on whether it is decoded or
trained on. Inside `BatchInvariant`, functions of PyTorch that have such a choice get inputs of a few fixed shapes:

    linear layers, experts     blocks of 16, 32, ... 1,024 rows, filled up with zeros
    attention                  blocks of queries; keys from the first one of the sequence on, filled up with masked ones
    activations                whole SIMD vectors in every thread: a rest is computed by another function

Norms, softmax and rotary embeddings compute each row by itself anyway. A shape is used only after it has given the same
bits as the smallest one on this machine, wherever a row is in its block; the others are never used. What has no
replacement and sums over tokens or features is refused by name.

Values are those of the fixed shapes, gradients those of PyTorch's own kernels at these values. The modules of the model
stay as they are.

M rows, K and N features of a linear layer; B sequences, A key-value heads, G query heads of each, Q queries, S keys, H
head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from vlmpack.errors import ConfigError, FamilyError
from vlmpack.families.family import Family
from vlmpack.model.engine import packing_state
from vlmpack.model.mechanisms.attention import layer_masks

ROWS = (16, 1024)
"""Numbers of rows of the smallest and the largest block. Blocks in between are powers of two."""
QUERIES = (8, 16, 32)
"""Numbers of queries of a block: the smaller ones for decoding, the last one for prompts and training."""
KEYS = 512
"""Number of keys in a block of PyTorch's attention kernel for CPUs."""
FEW_KEYS = (64, 128, 192, 256, 384)
"""Numbers of keys that may replace `KEYS` in short sequences."""
TOGETHER = 256
"""Maximum number of tokens whose queries get the same number of keys."""
GRAIN = 32768
"""Number of elements that PyTorch gives to each thread at least."""
LANES = 256
"""A multiple of the elements that an activation computes at once."""

ELEMENTWISE = ("silu", "sigmoid", "gelu", "softplus", "mish", "hardswish", "rsqrt")
"""Functions that compute the last elements of a tensor in another way than all others."""
REFUSED = ("mm", "bmm", "mv", "einsum", "tensordot", "conv1d", "conv_transpose1d")
"""Functions that sum and have no replacement."""

Compute = Callable[..., torch.Tensor]


@final
class BatchInvariant(TorchFunctionMode):
    """Makes what is computed inside the block batch-invariant; a backward pass inside gets gradients."""

    def __init__(self) -> None:
        super().__init__()
        self._agreed: dict[tuple[Any, ...], bool] = {}
        self._mask: torch.Tensor | None = None
        self._bounds: tuple[torch.Tensor, torch.Tensor] | None = None
        self._replaced: Mapping[str, Callable[..., Any]] = {
            "linear": self._linear,
            "addmm": lambda func, y, x, w: y + self._linear(F.linear, x, w.t()),
            "matmul": self._matmul,
            "grouped_mm": self._grouped,
            "_grouped_mm": self._grouped,
            "conv2d": self._convolution,
            "conv3d": self._convolution,
            "scaled_dot_product_attention": self._attention,
            "backward": self._backward,
            **dict.fromkeys(ELEMENTWISE, self._elementwise),
            **dict.fromkeys(REFUSED, _refuse),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replaced = self._replaced.get(getattr(func, "__name__", ""))
        if replaced is None:
            return func(*args, **(kwargs or {}))
        return replaced(func, *args, **(kwargs or {}))

    def _backward(self, func: Any, tensors: Sequence[torch.Tensor], **settings: Any) -> None:
        """Stay on in the backward pass, for layers that are computed again there. Edges do not leave the mode."""
        edges = [get_gradient_edge(x) for x in tensors]
        with self:
            func(edges, **settings)

    # ------------------------------------------------------------------ linear layers

    def _linear(self, func: Compute, x: torch.Tensor, w_NK: torch.Tensor, bias: Any = None) -> torch.Tensor:
        return _Linear.apply(self, x, w_NK, bias)

    def product(self, x: torch.Tensor, w_NK: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return a linear layer's output [..., N] for x [..., K]."""
        x_MK = x.reshape(-1, x.shape[-1]).contiguous()
        out, start, rows = [], 0, len(x_MK)
        shape = (w_NK.shape, w_NK.stride(), w_NK.dtype, bias is None, torch.get_num_threads())
        while start < rows:
            size = self._block(rows - start, (*shape, "rows"), partial(_linear_agrees, w_NK, bias))
            x_mK = x_MK[start : start + size]
            out.append(F.linear(F.pad(x_mK, (0, 0, 0, size - len(x_mK))), w_NK, bias)[: len(x_mK)])
            start += size
        out_MN = out[0] if len(out) == 1 else torch.cat(out) if out else x_MK.new_empty(0, w_NK.shape[0])
        return out_MN.view(*x.shape[:-1], w_NK.shape[0])

    def _block(self, rows: int, key: tuple[Any, ...], agrees: Callable[[int], bool]) -> int:
        """Return the size of the next block of `rows` rows: one that agrees and is not more than a quarter empty."""
        smallest, size = ROWS
        while size > smallest and (4 * rows < 3 * size or not self._agrees((*key, size), partial(agrees, size))):
            size //= 2
        if not self._agrees((*key, smallest), partial(agrees, smallest)):
            raise ConfigError(_NOT_HERE.format(f"a linear layer of shape {list(key[0])} in {key[2]}"))
        return size

    def _agrees(self, key: tuple[Any, ...], check: Callable[[], bool]) -> bool:
        if key not in self._agreed:
            with torch.no_grad():
                self._agreed[key] = check()
        return self._agreed[key]

    def _matmul(self, func: Compute, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.shape[-1] != 1:  # a sum of one product, as in rotary embeddings, has only one order
            _refuse(func)
        return func(a, b)

    def _grouped(
        self, func: Compute, x_MK: torch.Tensor, w_EKN: torch.Tensor, *, offs: torch.Tensor, **nothing: None
    ) -> torch.Tensor:
        def exact(x_MK: torch.Tensor, w_EKN: torch.Tensor) -> torch.Tensor:
            sizes = offs.diff(prepend=offs.new_zeros(1)).tolist()
            pairs = zip(x_MK[: sum(sizes)].split(sizes), w_EKN, strict=True)
            out_MN = torch.cat([self.product(x_mK, w_KN.t(), None) for x_mK, w_KN in pairs])
            return F.pad(out_MN, (0, 0, 0, len(x_MK) - len(out_MN)))

        return _with_gradient(exact, partial(func, offs=offs), x_MK, w_EKN)

    def _convolution(self, func: Compute, x: torch.Tensor, w: torch.Tensor, bias: Any = None, *args: Any) -> Any:
        """Compute a convolution whose kernel covers its input, as that of patches does."""
        if x.shape[1:] != w.shape[1:]:
            _refuse(func)
        out_MN = self._linear(F.linear, x.flatten(1), w.flatten(1), bias)
        return out_MN.view(*out_MN.shape, *(1,) * (w.ndim - 2))

    # ------------------------------------------------------------------ activations

    def _elementwise(self, func: Compute, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("inplace", None)

        def fast(x: torch.Tensor) -> torch.Tensor:
            return func(x, *args, **kwargs)

        return _with_gradient(partial(_by_vectors, fast), fast, x)

    # ------------------------------------------------------------------ attention

    def _attention(
        self,
        func: Compute,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        mask, scale = attn_mask, kwargs.get("scale")
        width, v = v.shape[3], F.pad(v, (0, k.shape[3] - v.shape[3]))  # narrower in multi-head latent attention
        if dropout_p or (mask is not None and mask.dtype != torch.bool):
            raise FamilyError(_NO_ATTENTION)
        first_b, limit_bQ = self._bounds_of(mask, queries=q.shape[2], keys=k.shape[2], causal=is_causal)
        exact = partial(self._attend, first_b=first_b, limit_bQ=limit_bQ, scale=scale)
        fast = partial(func, attn_mask=mask, is_causal=is_causal, **kwargs)
        return _with_gradient(exact, fast, q, k, v)[..., :width]

    def _bounds_of(
        self, mask: torch.Tensor | None, *, queries: int, keys: int, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first key of each sequence, int64 [b], and the number of keys from there on that each query
        attends to, int64 [b, Q]. b is B, or 1 if all sequences have the same."""
        if mask is None:
            ends = torch.arange(1, queries + 1) if causal else torch.full((queries,), keys)
            return torch.zeros(1, dtype=torch.int64), ends[None]
        if self._bounds is not None and mask is self._mask and self._bounds[1].shape[1] == queries:
            return self._bounds  # all layers of a pass have the same mask
        mask_bQS = mask.expand(*mask.shape[:-2], queries, keys).reshape(-1, queries, keys)
        count_bQ, first_bQ = mask_bQS.sum(-1), mask_bQS.to(torch.uint8).argmax(-1)
        is_real_bQ = count_bQ > 0
        first_b = torch.where(is_real_bQ, first_bQ, keys - 1).amin(1)
        seen_bQS = torch.arange(keys) < (first_b[:, None] + count_bQ)[..., None]
        if (mask.ndim == 4 and mask.shape[1] != 1) or bool((mask_bQS & ~seen_bQS).any()):
            raise FamilyError(_NO_ATTENTION)
        self._mask, self._bounds = mask, (first_b, count_bQ.clamp(min=1))
        return self._bounds

    def _attend(
        self,
        q_BNQH: torch.Tensor,
        k_BASH: torch.Tensor,
        v_BASH: torch.Tensor,
        *,
        first_b: torch.Tensor,
        limit_bQ: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        (B, N, Q, _), A = q_BNQH.shape, k_BASH.shape[1]
        limit_BQ = limit_bQ.expand(B, -1)
        longest = int(limit_BQ.max())
        if first_b.any():  # padding on the left: count the keys from the first one of each sequence
            index_BS = (first_b[:, None] + torch.arange(longest)).clamp(max=k_BASH.shape[2] - 1)
            rows_B1 = torch.arange(len(index_BS))[:, None]
            k_BASH, v_BASH = (x[rows_B1, :, index_BS].transpose(1, 2) for x in (k_BASH, v_BASH))
        widest = -longest % KEYS + longest
        k_BASH, v_BASH = (F.pad(x[:, :, :longest], (0, 0, 0, widest - longest)) for x in (k_BASH, v_BASH))
        q_BAGQH, out = q_BNQH.unflatten(1, (A, -1)), []
        kernel = partial(_kernel, scale=scale)
        for start in range(0, Q, TOGETHER):
            limit_Bn = limit_BQ[:, start : start + TOGETHER]
            q_BARH = q_BAGQH[:, :, :, start : start + TOGETHER].flatten(2, 3)
            rows = q_BARH.shape[2]
            size, keys = self._shape(q_BARH, int(limit_Bn.max()))
            fill = -rows % size
            q_BAcrH = F.pad(q_BARH, (0, 0, 0, fill)).unflatten(2, (-1, size))
            limit_Bcr = F.pad(limit_Bn.repeat(1, N // A), (0, fill), value=1).unflatten(1, (-1, size))
            q_BcArH = q_BAcrH.transpose(1, 2)
            if q_BcArH.shape[1] == 1:
                out_BcArH = kernel(q_BcArH[:, 0], k_BASH[:, :, :keys], v_BASH[:, :, :keys], limit_Bcr[:, 0])[:, None]
            else:
                pieces = zip(q_BcArH, k_BASH[:, :, :keys], v_BASH[:, :, :keys], limit_Bcr, strict=True)
                out_BcArH = torch.stack([kernel(*piece) for piece in pieces])
            out_BARH = out_BcArH.transpose(1, 2).flatten(2, 3)[:, :, :rows]
            out.append(out_BARH.unflatten(2, (N // A, -1)).flatten(1, 2))
        return torch.cat(out, 2)

    def _shape(self, q_BARH: torch.Tensor, keys: int) -> tuple[int, int]:
        """Return the numbers of queries and keys of a block, for queries that attend to `keys` keys."""
        whole = -keys % KEYS + keys
        of = (q_BARH.shape[-1], q_BARH.dtype, torch.get_num_threads())
        for size in (*(size for size in QUERIES if size >= q_BARH.shape[2]), QUERIES[-1]):
            for width in (*(few for few in FEW_KEYS if few >= keys), whole):
                if self._agrees(("keys", size, width, *of), partial(_attention_agrees, size, width, *of[:2])):
                    return size, width
        raise ConfigError(_NOT_HERE.format(f"attention with head dimension {of[0]} in {of[1]}"))


_NO_FORM = "has no batch-invariant form here; serve without --batch-invariant"
_NOT_HERE = (
    "on this machine {} gives a row other bits in another place of a block, so that sampling cannot equal training; "
    "serve without --batch-invariant"
)
_NO_ATTENTION = f"this model's attention with windows, biases or dropout {_NO_FORM}"


def _refuse(func: Any, *args: Any, **kwargs: Any) -> Any:
    raise FamilyError(f"this model calls {func.__name__}, which {_NO_FORM}")


# ---------------------------------------------------------------------- the check of a service

_RECURRENT = ("gated_delta", "short_conv")


def check(model: Any, family: Family, *, context: int, is_sharded: bool) -> None:
    """Check that a model may have a batch-invariant form, and move its weights to addresses of the same kind.

    `context` is the number of tokens of the longest sequence.

    Raises:
        FamilyError: a layer of the model has no such form.
        ConfigError: the model is not on a CPU, or is sharded.
    """
    if is_sharded or model.device.type != "cpu":
        raise ConfigError("--batch-invariant: it replaces kernels of CPUs, and no shards; serve with --device cpu")
    parts = packing_state(model).parts_of(model)
    if any(family.has(mechanism) for mechanism in _RECURRENT):
        raise FamilyError(f"{family.model_type}: a model with recurrent layers or convolutions {_NO_FORM}")
    if narrow := next((mask for mask in layer_masks(parts).values() if mask.first_key(context - 1)), None):
        remedy = f"set --max-length to that instead of {context}, or serve without --batch-invariant"
        raise FamilyError(f"{family.model_type}: only sequences within its {narrow} are batch-invariant: {remedy}")
    for parameter in model.parameters():  # kernels may treat weights at other addresses differently
        parameter.data = parameter.data.clone()


# ---------------------------------------------------------------------- kernels


def _kernel(
    q_BArH: torch.Tensor, k: torch.Tensor, v: torch.Tensor, limit_Br: torch.Tensor, *, scale: float | None
) -> torch.Tensor:
    """Attend to the first keys, `limit_Br` of them. Keys and values: [B, A, S, H], or [A, S, H] for all B."""
    hidden_BrS = torch.arange(k.shape[-2]) >= limit_Br[..., None]
    mask_B1rS = torch.zeros(hidden_BrS.shape, dtype=q_BArH.dtype).masked_fill_(hidden_BrS, -torch.inf)[:, None]
    k, v = (x.expand(len(q_BArH), *x.shape[-3:]) for x in (k, v))
    call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return call(q_BArH, k, v, 0.0, False, attn_mask=mask_B1rS, scale=scale)[0]


def _by_vectors(func: Compute, x: torch.Tensor) -> torch.Tensor:
    """Compute an elementwise function so that every thread gets whole vectors."""
    flat = x.reshape(-1)
    padded, out = F.pad(flat, (0, -len(flat) % LANES)), []
    each, start = GRAIN * torch.get_num_threads(), 0
    while start < len(padded):
        size = each if len(padded) - start >= each else GRAIN
        out.append(func(padded[start : start + size]))
        start += size
    return torch.cat(out)[: len(flat)].view(x.shape) if out else func(x)


# ---------------------------------------------------------------------- do shapes agree


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


LARGE = 1 << 22
"""Number of weights of a layer from which on its own weights are used in the check."""


def _linear_agrees(w_NK: torch.Tensor, bias: torch.Tensor | None, rows: int) -> bool:
    """Return whether blocks of `rows` rows give what blocks of the smallest size give, wherever a row is."""
    smallest = ROWS[0]
    x_MK = _random(rows, w_NK.shape[1], dtype=w_NK.dtype)
    if w_NK.numel() < LARGE:
        w_NK = torch.empty_like(w_NK).copy_(_random(*w_NK.shape, dtype=w_NK.dtype))
    out_MN = F.linear(x_MK, w_NK, bias)
    if rows > smallest:
        return torch.equal(out_MN, torch.cat([F.linear(x_mK, w_NK, bias) for x_mK in x_MK.split(smallest)]))
    moved = F.linear(x_MK.roll(1, 0), w_NK, bias).roll(-1, 0)
    alone = F.linear(F.pad(x_MK[:1], (0, 0, 0, rows - 1)), w_NK, bias)
    return torch.equal(out_MN, moved) and torch.equal(out_MN[:1], alone[:1])


def _attention_agrees(queries: int, keys: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether blocks give what the most queries and more masked keys give, wherever a query is."""
    most, more = QUERIES[-1], -keys % KEYS + keys + KEYS
    q_BAqH, (k_AsH, v_AsH) = _random(4, 2, most, head_dim, dtype=dtype), _random(2, 2, more, head_dim, dtype=dtype)
    limit_Bq = torch.randint(1, keys + 1, (4, most), generator=torch.Generator().manual_seed(0))

    def run(q_BAqH: torch.Tensor, limit_Bq: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
        pieces = zip(q_BAqH.split(queries, 2), limit_Bq.split(queries, 1), strict=True)
        return torch.cat([_kernel(q, k_AsH[:, :keys], v_AsH[:, :keys], limit, scale=None) for q, limit in pieces], 2)

    expected = run(q_BAqH, limit_Bq, most, more)
    moved = run(q_BAqH.roll(1, 2), limit_Bq.roll(1, 1), queries, keys).roll(-1, 2)
    alone = torch.cat([run(*one, queries, keys) for one in zip(q_BAqH.split(1), limit_Bq.split(1), strict=True)])
    return torch.equal(expected, moved) and torch.equal(expected, alone)


# ---------------------------------------------------------------------- gradients


def _with_gradient(exact: Compute, fast: Compute, *tensors: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return _Exact.apply(exact, fast, *tensors)
    return exact(*tensors)


class _Exact(torch.autograd.Function):
    """The values of one function with the gradient of another, which is computed in the backward pass."""

    @staticmethod
    def forward(ctx: Any, exact: Compute, fast: Compute, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.fast = fast
        ctx.save_for_backward(*tensors)
        return exact(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        needed = ctx.needs_input_grad[2:]
        with torch.enable_grad(), torch._C.DisableTorchFunction():
            inputs = [
                x.detach().requires_grad_(is_needed) for x, is_needed in zip(ctx.saved_tensors, needed, strict=True)
            ]
            wanted = [x for x in inputs if x.requires_grad]
            found = iter(torch.autograd.grad(ctx.fast(*inputs), wanted, grads))
        return None, None, *(next(found) if is_needed else None for is_needed in needed)


class _Linear(torch.autograd.Function):
    """A linear layer with exact values."""

    @staticmethod
    def forward(ctx: Any, invariant: BatchInvariant, x: torch.Tensor, w_NK: torch.Tensor, bias: Any) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, w_NK)
        return invariant.product(x, w_NK, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,), (x, w_NK), (_, for_x, for_w, for_bias) = grads, ctx.saved_tensors, ctx.needs_input_grad
        with torch._C.DisableTorchFunction():
            grad_MN = grad.flatten(0, -2)
            of_x = grad @ w_NK if for_x else None
            of_w = grad_MN.t() @ x.flatten(0, -2) if for_w else None
            return None, of_x, of_w, grad_MN.sum(0) if for_bias else None
