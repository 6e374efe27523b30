"""Attention along the paths of a prefix tree: each node's queries attend to the keys of its ancestors and its own.

    tree     P A B C D                       t tokens of queries, keys and values
    keys     P  P A  P B  P B C  P B D       the path of each node, one after the other, gathered for one call

One call of any back-end computes all nodes (`keys=`). The gathered keys and values are copies, which a back-end would
keep for its backward pass. So they are not kept: what is kept of them is where it lies, and it is gathered again when
the backward pass needs it, bit for bit.

    forward     k, v ── gather ──▶ k', v' ── attend, which saves q, k', v', out ──▶ out ── keep q, k, v, out ──▶ out
    backward         ◀── add up ──           ◀── asks for k': gathered of k again ──     ◀── restores q, k, v, out ──

Hooks of saved tensors do not add up: the innermost alone are called. Tensors that a hook keeps by itself would be lost
to gradient checkpointing and to offloading, which are such hooks too. `_Keep` therefore saves them as any layer does.

t tree tokens, S of all paths together, N query heads, K key-value heads, H head dimension.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple, final

import torch

from vlmpack.context_parallel.attention import Attend
from vlmpack.layout.prefix_tree import PrefixTree


def attend_along_paths(
    attend: Attend, q_tNH: torch.Tensor, k_tKH: torch.Tensor, v_tKH: torch.Tensor, tree: PrefixTree
) -> torch.Tensor:
    """[t, N, H] by a back-end that takes boundaries of queries and of keys."""
    saved = _Saved(tree.key_index(k_tKH.device))
    q_tNH, k_SKH, v_SKH = _Gather.apply(saved, q_tNH, k_tKH, v_tKH)
    if not q_tNH.requires_grad:
        return attend(q_tNH, k_SKH, v_SKH, tree.nodes, keys=tree.keys)
    gathered = {x.untyped_storage().data_ptr(): place for place, x in enumerate((k_SKH, v_SKH))}

    def pack(x: torch.Tensor) -> _Place:
        place = gathered.get(x.untyped_storage().data_ptr())
        return saved.add(x) if place is None else _Place(place, (x.size(), x.stride(), int(x.storage_offset())))

    with torch.autograd.graph.saved_tensors_hooks(pack, saved.take):
        out_tNH = attend(q_tNH, k_SKH, v_SKH, tree.nodes, keys=tree.keys)
    others, saved.tensors = saved.tensors, ()
    return _Keep.apply(saved, out_tNH, k_tKH.detach(), v_tKH.detach(), *others)


class _Gather(torch.autograd.Function):
    """Keys and values [t, K, H] to [S, K, H]; queries pass through. Gradients of what several nodes gather are added up
    in float32 at least.

    Its backward pass comes after that of attention, whichever of the three have gradients, and lets go of what `_Keep`
    restored: a graph lives on with its loss.
    """

    @staticmethod
    def forward(ctx: Any, saved: _Saved, q_tNH: torch.Tensor, k_tKH: torch.Tensor, v_tKH: torch.Tensor) -> Any:
        ctx.saved, ctx.rows = saved, k_tKH.shape[0]
        return q_tNH.view_as(q_tNH), *(x.index_select(0, saved.index_S) for x in (k_tKH, v_tKH))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad_q, *gathered = grads
        ctx.saved.tensors = ()
        return None, grad_q, *(_added_up(grad, ctx.saved.index_S, ctx.rows) for grad in gathered)


def _added_up(grad_SKH: torch.Tensor, index_S: torch.Tensor, rows: int) -> torch.Tensor:
    terms = grad_SKH.to(torch.promote_types(grad_SKH.dtype, torch.float32))
    total = terms.new_zeros(rows, *terms.shape[1:]).index_add(0, index_S, terms)
    return total.to(grad_SKH.dtype)


class _Place(NamedTuple):
    """Where a tensor that attention saved is found again."""

    place: int
    """0 in the keys, 1 in the values, or its place among all saved tensors."""
    view: tuple[torch.Size, tuple[int, ...], int] | None = None
    """Size, strides and offset of a view of gathered keys or values; None: another tensor, as it was."""


@final
class _Saved:
    """The tensors that one attention call saved: keys and values before they were gathered, then the others.

    It holds tensors only while the call runs, and again from when `_Keep` has restored them.
    """

    def __init__(self, index_S: torch.Tensor) -> None:
        self.index_S = index_S
        """Of the gathering."""
        self.tensors: tuple[torch.Tensor, ...] = ()
        """The others while the call runs; in the backward pass all of them."""

    def add(self, x: torch.Tensor) -> _Place:
        """Take up a tensor that was not gathered."""
        self.tensors = (*self.tensors, x.detach())
        return _Place(1 + len(self.tensors))

    def take(self, place: _Place) -> torch.Tensor:
        """The tensor again; of gathered ones only the rows that are asked for."""
        x = self.tensors[place.place]
        if place.view is None:
            return x
        size, stride, offset = place.view
        width = prod(x.shape[1:])
        first = offset // width
        last = (offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))) // width
        rows = x.index_select(0, self.index_S[first : last + 1])
        return rows.as_strided(size, stride, offset - first * width)


class _Keep(torch.autograd.Function):
    """Saves tensors with the graph, and restores them in the backward pass before attention needs them."""

    @staticmethod
    def forward(ctx: Any, saved: _Saved, out: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.saved, ctx.others = saved, (None,) * len(tensors)
        ctx.save_for_backward(*tensors)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        ctx.saved.tensors = ctx.saved_tensors
        return None, grad, *ctx.others
