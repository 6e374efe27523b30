"""FlexAttention: one compiled kernel for every pattern, called with the keys of each query.

The keys of a query are contiguous (`patterns.key_bounds`), so a mask is two numbers per query. Blocks of 128 queries
and 128 keys are classified on the host: blocks without any query-key pair are skipped, and blocks with all pairs need
no mask.

    row of samples a, b, c     keys  a a b b c c      # full    / masked    . skipped
    queries a                        / . . . . .
            a                        # / . . . .
            b                        . . / . . .
            ...

T queries, S keys, N query heads, K key-value heads, H head dimension, P blocks of queries, Q blocks of keys.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from vlmpack.attention.patterns import Pattern
from vlmpack.layout.device import to_device
from vlmpack.layout.segments import round_up

BLOCK = 128
RECOMPILATIONS = 64
"""Maximum number of kernels in a process: one for each combination of dtypes, heads and patterns, for any lengths."""


def block_mask(bounds_2T: np.ndarray, keys: int, device: torch.device) -> BlockMask:
    """Build the block mask of a row with `keys` keys; `bounds_2T`: the result of `key_bounds`."""
    queries = bounds_2T.shape[1]
    first_PB, end_PB = np.pad(bounds_2T, ((0, 0), (0, -queries % BLOCK))).reshape(2, -1, BLOCK)
    start_Q = np.arange(0, round_up(keys, BLOCK), BLOCK)
    least_P1 = np.where(first_PB < end_PB, first_PB, keys).min(1, keepdims=True)
    some_PQ = (least_P1 < start_Q + BLOCK) & (end_PB.max(1, keepdims=True) > start_Q)
    all_PQ = (first_PB.max(1, keepdims=True) <= start_Q) & (end_PB.min(1, keepdims=True) >= start_Q + BLOCK)
    masked_PQ = some_PQ & ~all_PQ

    def ordered(which: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return the number of selected blocks in each row of blocks, and all block indices, selected ones first."""
        arrays = which.sum(1), np.argsort(~which, axis=1, kind="stable")
        counts, numbers = (to_device(np.ascontiguousarray(x, np.int32), device)[None, None] for x in arrays)
        return counts, numbers

    first_T, end_T = (to_device(bound_T, device) for bound_T in bounds_2T)

    def has_key(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first_T[query]) & (key < end_T[query])

    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    names += ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
    tensors = [x for which in (masked_PQ, all_PQ, masked_PQ.T, all_PQ.T) for x in ordered(which)]
    blocks: dict[str, Any] = dict(zip(names, tensors, strict=True))
    return BlockMask(seq_lengths=(queries, keys), BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=has_key, **blocks)


def attend(q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, mask: BlockMask, *, scale: float, pattern: Pattern) -> Tensor:
    """Compute softmax attention [T, N, H] under a mask, with the softcap and sinks of `pattern`.

    Queries without keys get 0.
    """
    q_1NTH, k_1KSH, v_1KSH = (x.transpose(0, 1)[None] for x in (q_TNH, k_SKH, v_SKH))
    settings: dict[str, Any] = {"scale": scale, "enable_gqa": q_TNH.shape[1] != k_SKH.shape[1]}
    if pattern.softcap is not None:
        settings["score_mod"] = _softcap(pattern.softcap)
    if pattern.sinks is not None:
        settings["return_aux"] = AuxRequest(lse=True)
    with torch._dynamo.config.patch(recompile_limit=RECOMPILATIONS, specialize_float=True):
        out: Any = compiled()(q_1NTH, k_1KSH, v_1KSH, block_mask=mask, **settings)
    if pattern.sinks is None:
        return out[0].transpose(0, 1)
    out_1NTH, aux = out
    share_NT1 = torch.sigmoid(aux.lse[0] - pattern.sinks[:, None])[..., None]  # weight that the sink leaves
    return (out_1NTH[0] * share_NT1).to(q_TNH.dtype).transpose(0, 1)


@cache
def compiled() -> Any:
    """Return the kernel for rows of any length. It compiles or raises; uncompiled, it would store all scores."""
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


@cache
def _softcap(cap: float) -> Any:
    def score(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score
