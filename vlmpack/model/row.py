"""A row as the layers see it: the part that goes through the model on this rank, and each mechanism's data.

    RowPart          all of the row goes through the model on this rank; prefixes that samples share only once
    └─ RowOverRanks  a contiguous part of the row; the other ranks of the context group have the other parts

Layers and losses call the methods of `RowPart` and contain no code for ranks or trees. T tokens in the row, t in the
part, D features, L targets in the row, l in the part, R ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any, final
from weakref import ref

import numpy as np
import torch

from vlmpack.attention.patterns import FULL_CAUSAL, LayerMask, attended_pairs
from vlmpack.context_parallel.attention import Attend, GatheredKV, attend_by_heads, to_heads, to_tokens
from vlmpack.context_parallel.mesh import Parallel
from vlmpack.context_parallel.partition import Partition
from vlmpack.errors import LayoutError
from vlmpack.layout.device import on_host, require
from vlmpack.layout.media import MediaTable
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.row import IGNORE, PackedRow, roll_left
from vlmpack.layout.segments import Segments
from vlmpack.model.opaque import handle_of
from vlmpack.model.pieces import PieceOfGroup

CONTEXT = "vlmpack_row"
"""The keyword that passes a `RowContext` to every layer."""

LAST_HIDDEN = "last hidden state"
"""The name under which a piece of a group keeps the final hidden state of its last token, [1, 1, D]."""

OnTensors = Callable[..., torch.Tensor]
"""Maps [1, T, D] and further tensors [1, T, ...] to [1, T, D']."""

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries [t, N, H], keys [t, K, H] and values [t, K, H]."""

OnHeads = Callable[[torch.Tensor], torch.Tensor]
"""Maps [T, F] to [T, F']."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class PartTargets:
    """The targets of a row that a part computes."""

    predictions: torch.Tensor
    """int64 [l]: the position in the part that predicts each target."""
    ids: torch.Tensor
    """int64 [l]: the target tokens."""
    index: torch.Tensor
    """int64 [l]: a position in the row that predicts each target."""
    entries: torch.Tensor | None = None
    """int64 [L]: for each target of the row, its index among the distinct targets of all ranks; None: all are distinct.
    """
    held: torch.Tensor | None = None
    """int64 [l]: the index of each target of the part among these; None: one rank has them all."""
    total: int = 0
    """Number of the distinct targets of all ranks, if there are several."""


class RowPart:
    """The part of a row that goes through the model on this rank: all of it, as a forest (other ranks: the subclass).

    If samples share prefixes, `tree` is their prefix tree:

        row      P A   P B C   P B D     3 samples, T tokens: ids, labels, results
        tree     P A B C D               t tokens: what the model sees; each attends to its ancestors and itself

    Row tensors become tree tensors by `row[source]`, and tree tensors row tensors by `part[place]`, whose backward pass
    sums the gradients of shared tokens, so nothing needs explicit weights. Each token of the tree is predicted by one
    token, the one before it on its path, no matter how many samples share it. So the head sees every distinct target
    once (l of L targets), and a branch point has as many targets as children.

    Raises:
        LayoutError: tokens that samples share differ, or the labels of a row with a tree are not its own next tokens.
    """

    ranks: int = 1
    """Number of ranks that share the row."""
    rank: int = 0
    """This rank's index among them."""

    def __init__(self, segments: Segments, row: PackedRow | None = None, *, piece: PieceOfGroup | None = None) -> None:
        """`segments`: the row's boundaries, or of one rank's part of it; `row`: the row, which may have a tree."""
        self.tree = None if row is None else row.tree
        """The prefix tree; None: each sample goes through the model by itself."""
        self.piece = piece
        """The row's place in a group that goes through the model piece by piece; None: it is no piece."""
        self.kept = 0 if piece is None else piece.kept_tokens
        """P: number of tokens, all of the tree's first node, that earlier pieces computed."""
        self.real = slice(0, segments.num_tokens)
        """The slice of the row's real tokens that the part holds."""
        tree = self.tree
        self.paths: Paths | PrefixTree | None = tree
        """The keys that each node's queries attend to; None: each sample attends to its own."""
        if tree is not None and self.kept:
            self.paths = Paths(
                nodes=Segments.from_lengths(tree.lengths[1:]),
                keys=Segments.from_lengths(tree.keys.lengths[1:]),
                key_index=lambda device: tree.key_index(device)[self.kept :],
            )
        self.segments = segments if self.paths is None else self.paths.nodes
        """The boundaries of the part: samples, or nodes of the tree."""
        self.computed = self.segments
        """The boundaries of everything that goes through the model, on all ranks together."""
        if row is not None and tree is not None:
            self._ids_1T, self._num_distinct_targets = row.input_ids, row.known_metadata.num_distinct_targets
            self.check_shared(row.input_ids, "input_ids")
            _check_labels(row)

    @property
    def is_whole(self) -> bool:
        """Whether the part is the whole row; with a tree it is not, as shared tokens occur only once."""
        return self.ranks == 1 and self.tree is None

    def attended_pairs(self, mask: LayerMask = FULL_CAUSAL) -> int:
        """Count query-key pairs of causal attention in a layer with this `mask`, on all ranks together.

        Along every node's path, pairs before the node are those of its ancestors.
        """
        if self.paths is None:
            return self.computed.attended_pairs if mask == FULL_CAUSAL else attended_pairs(self.computed, mask)
        pairs = zip(self.paths.keys.lengths, self.paths.nodes.lengths, strict=True)
        before = Segments.from_lengths([total - length for total, length in pairs])
        return attended_pairs(self.paths.keys, mask) - attended_pairs(before, mask)

    def spans(self, runs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        """Convert runs of the row's tokens, (start, stop) each, to positions in the tokens that attention gets. A run
        that samples share appears once.

        Raises:
            LayoutError: a run lies in several nodes, so samples share only a part of it.
        """
        if self.tree is None:
            return runs
        place, starts = self.tree.place().numpy(), [start for start, _ in self.tree.nodes.spans]
        shared = set()
        for start, stop in runs:
            first, last = int(place[start]), int(place[stop - 1])
            if bisect_right(starts, first) != bisect_right(starts, last):
                sample = int(self.tree.segments.seq_idx()[start])
                raise LayoutError(
                    f"sample {sample} shares only a part of a run of {stop - start} tokens that attend to each other "
                    "in both directions: share what comes before it, or all of it; or take the tree away with "
                    "unshare(row)"
                )
            shared.add((first - self.kept, last + 1 - self.kept))
        return tuple(sorted(run for run in shared if run[0] >= 0))

    def computed_media(self, table: MediaTable) -> MediaTable:
        """Return the media that go through the towers, on all ranks together, in order; `table`: all samples' media.
        Media that samples share appear once."""
        return table if self.tree is None else table.in_tree(self.tree)

    def check_shared(self, row_kT: torch.Tensor, name: str) -> None:
        """Check that tokens computed once for several samples are equal in all of these samples.

        Args:
            row_kT: [1, T], or [k, 1, T].
            name: name of the values in the error message.

        Raises:
            LayoutError: they differ (on an accelerator a device-side assertion fails instead, asynchronously).
        """
        if self.tree is None:
            return
        source, place = self.tree.source(row_kT.device), self.tree.place(row_kT.device)
        flat_kT = row_kT.reshape(-1, row_kT.shape[-1])
        is_equal_T = (flat_kT == flat_kT.index_select(1, source).index_select(1, place)).all(0)

        def where(at: int) -> str:
            seen, other = row_kT[..., at].tolist(), int(source[place[at]])
            return f"place {at} of the row has {seen}, place {other} {row_kT[..., other].tolist()}"

        message = f"{name} of tokens that the prefix tree says are shared differ between samples; {_CHANGED}"
        require(is_equal_T, message, LayoutError, where=where)

    def cut(self, row: torch.Tensor, *, dim: int = -1) -> torch.Tensor:
        """Select the part's entries from T entries of the whole row, along `dim`."""
        return row if self.tree is None else row.index_select(dim, self.tree.source(row.device)[self.kept :])

    def gather(self, part_t: torch.Tensor) -> torch.Tensor:
        """Gather [t, ...] from each rank to [T, ...]. All ranks compute the same from the result, so the backward pass
        communicates nothing."""
        return self.for_each_sample(part_t)

    def for_each_sample(self, part_t: torch.Tensor) -> torch.Tensor:
        """Return [t, ...] of this rank's tokens, with shared tokens repeated for each sample that shares them."""
        return part_t if self.tree is None else part_t.index_select(0, self.tree.place(part_t.device))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks. All ranks compute the same from the result, so the backward pass communicates nothing."""
        return x

    def attend(self, attend: Attend, qkv: QKV, segments: Segments, *, layer: Any = None) -> torch.Tensor:
        """Compute attention [t, N, H] of a layer with a back-end that takes a whole row and these boundaries of it.
        Each node's queries attend to the keys of its ancestors and its own."""
        if self.paths is None or self.tree is None:
            return attend(*qkv, segments)
        before = [] if self.piece is None else self.piece.read(layer)
        if self.piece is None or before or max(self.tree.parents) >= 0:
            out_tNH = attend_along_paths(attend, *qkv, self.paths, before)
        else:
            out_tNH = attend(*qkv, self.segments)
        return out_tNH if self.piece is None else self.piece.keep(layer, out_tNH, *qkv[1:])

    def by_heads(self, parts_tRF: Sequence[torch.Tensor], run: OnHeads, what: str) -> torch.Tensor:
        """Run `run` along the whole row for a subset of the heads: [t, R, F] per block of channels to [t, R F'].

        Args:
            parts_tRF: for each block, the channels that each rank computes.
            run: maps [T, sum of F] to [T, F'], for this rank's heads.
            what: name under which the communicated bytes are counted.
        """
        return self.cut(run(self.gather(torch.cat([part.flatten(1) for part in parts_tRF], -1))), dim=0)

    def on_whole_row(self, run: OnTensors, hidden_1tD: torch.Tensor, *others_1t: torch.Tensor) -> torch.Tensor:
        """Run `run` along the whole row for all channels, [1, t, D] to [1, t, D']. `others_1t` get no gradient. Shared
        tokens are computed once per sample."""
        return self.cut(run(*(self.gather(part[0])[None] for part in (hidden_1tD, *others_1t))), dim=1)

    def targets(self, index_L: torch.Tensor, labels_1T: torch.Tensor, *, distinct: bool = True) -> PartTargets:
        """Return the targets at these positions of the row (in increasing order) that are in the part. With a tree,
        the distinct ones: without their number in the metadata, an accelerator is read, a host–device sync.

        Args:
            index_L: int64 [L]: positions of predictions.
            labels_1T: int64 [1, T]: the row's shifted labels.
            distinct: False: a target that samples share is there for each of them.
        """
        ids_L = labels_1T[0].index_select(0, index_L)
        if self.tree is None:
            return PartTargets(predictions=index_L, ids=ids_L, index=index_L)
        device = index_L.device
        token_L, before = self.tree.place(device).index_select(0, index_L + 1), max(self.kept - 1, 0)
        if not distinct:
            predictions = self.tree.predecessor(device).index_select(0, token_L) - before
            return PartTargets(predictions=predictions, ids=ids_L, index=index_L)
        is_target_t = torch.zeros(self.tree.num_tokens, dtype=torch.bool, device=device).index_fill_(0, token_L, True)
        if (count := self._num_distinct_targets) is None or on_host(is_target_t):
            token_l = is_target_t.nonzero()[:, 0]
        else:
            message = f"{count} distinct targets were counted, but the row has another number; {_CHANGED}"
            require(is_target_t.sum() == count, message, LayoutError)
            token_l = torch.nonzero_static(is_target_t, size=count)[:, 0]
        source_l = self.tree.source(device).index_select(0, token_l)
        return PartTargets(
            predictions=self.tree.predecessor(device).index_select(0, token_l) - before,
            ids=self._ids_1T[0].index_select(0, source_l),
            index=source_l - 1,
            entries=(is_target_t.cumsum(0) - 1).index_select(0, token_L),
        )

    def gather_targets(self, part_l: torch.Tensor, targets: PartTargets) -> torch.Tensor:
        """Gather each rank's target values, [l, ...], into the row's, [L, ...]; all samples that share a target get its
        value."""
        return part_l if targets.entries is None else part_l.index_select(0, targets.entries)

    def with_predecessor(self, hidden_1tD: torch.Tensor) -> torch.Tensor:
        """Return the hidden states that predict the part's targets: its own, and that of the kept token before it."""
        last = None if self.piece is None else self.piece.read_last(LAST_HIDDEN)
        return hidden_1tD if last is None else torch.cat([*last, hidden_1tD], 1)


_CHANGED = "a row cannot be changed after share(row): change it before, or take the tree away with unshare(row)"


def _check_labels(row: PackedRow) -> None:
    """Check that each target is the sample's own next token: a shared token predicts one target per child.

    Raises:
        LayoutError: a target is another id, or a sample's last token has a target.
    """
    labels = row.shift_labels
    if labels is None:
        return
    following = roll_left(row.input_ids, row.segments, fill=IGNORE)
    require(
        (labels == IGNORE) | (labels == following),
        "a target of a row with a prefix tree is not the next token of its sample; labels are the tokens themselves, "
        "or -100: give this row without sharing, unshare(row)",
        LayoutError,
        where=lambda at: f"the label at place {at} of the row is {labels[0, at]}, and {following[0, at]} follows",
    )


@final
class RowContext:
    """One row, as its layers see it.

    It travels as one keyword through the model's own `**kwargs`. So when gradient checkpointing calls a layer again in
    the backward pass, the layer gets the same row as before, and any number of models and rows can be in flight at a
    time. It is not a dataclass, because FSDP's mixed precision would rebuild one for every layer.
    """

    def __init__(self, *, segments: Segments, part: RowPart | None = None, entries: Mapping[str, Any]) -> None:
        self.segments = segments
        """The row's boundaries."""
        self.part = part or RowPart(segments)
        """The part of the row on this rank."""
        self.entries = dict(entries)
        """Each mechanism's entry (returned by `Mechanism.prepare`), by the mechanism's name."""
        self.handle = handle_of(ref(self))
        """The tensor that stands for a weak reference to this object in compiled graphs."""

    def __deepcopy__(self, memo: dict[int, Any]) -> RowContext:
        """Return itself: the row belongs to one call."""
        return self


# ---------------------------------------------------------------------- path attention
#
# Attention along the paths of a prefix tree: each node's queries attend to the keys of its ancestors and its own.
#
#     tree     P A B C D                       t tokens of queries, keys and values
#     keys     P  P A  P B  P B C  P B D       the path of each node, one after the other, gathered for one call
#
# One call of any back-end computes all nodes (`keys=`). A back-end would save the gathered keys and values, which are
# copies, for its backward pass. Instead we save only their origin, and gather them again, bit for bit, when the
# backward pass needs them.
#
#     forward     k, v ── gather ──▶ k', v' ── attend, which saves q, k', v', out ──▶ out ── keep q, k, v, out ──▶ out
#     backward         ◀── add up ──           ◀── asks for k': gathered from k again ──   ◀── restores q, k, v, out ──
#
# Saved-tensor hooks do not stack: only the innermost ones are called. If our hook kept tensors by itself, gradient
# checkpointing and offloading, which use such hooks too, would not see them. `_Keep` therefore saves them with
# `save_for_backward`, as any layer does.
#
# t tree tokens, S tokens of all paths together, N query heads, K key-value heads, H head dimension.


@final
@dataclass(frozen=True, kw_only=True)
class Paths:
    """The keys of each node: those of its ancestors and its own, among P kept keys and t of the part."""

    nodes: Segments
    """Boundaries of the queries."""
    keys: Segments
    """Boundaries of the keys, node by node; their last queries see all of them."""
    key_index: Callable[[torch.device], torch.Tensor]
    """Returns int64 [S]: where to take each key from."""


def attend_along_paths(
    attend: Attend,
    q_tNH: torch.Tensor,
    k_tKH: torch.Tensor,
    v_tKH: torch.Tensor,
    paths: Paths | PrefixTree,
    kept: Sequence[tuple[torch.Tensor, ...]] = (),
) -> torch.Tensor:
    """Compute attention [t, N, H] with a back-end that takes separate boundaries for queries and keys.

    `kept`: (keys, values) of each kept prefix before the part, in order.
    """
    saved = _Saved(paths.key_index(k_tKH.device), 1 + len(kept))
    keys, values = [k for k, _ in kept] + [k_tKH], [v for _, v in kept] + [v_tKH]
    q_tNH, k_SKH, v_SKH = _Gather.apply(saved, q_tNH, *keys, *values)
    if not q_tNH.requires_grad:
        return attend(q_tNH, k_SKH, v_SKH, paths.nodes, keys=paths.keys)
    gathered = {x.untyped_storage().data_ptr(): half for half, x in enumerate((k_SKH, v_SKH))}

    def pack(x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return what restores a tensor that attention saves."""
        half = gathered.get(x.untyped_storage().data_ptr())
        if half is None:
            return saved.add(x)
        return partial(saved.gathered, half, x.size(), x.stride(), int(x.storage_offset()))

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda restore: restore()):
        out_tNH = attend(q_tNH, k_SKH, v_SKH, paths.nodes, keys=paths.keys)
    others, saved.tensors = saved.tensors, ()
    return _Keep.apply(saved, out_tNH, *(x.detach() for x in (*keys, *values)), *others)


class _Gather(torch.autograd.Function):
    """Gather keys and values, from several [t, K, H] each, to [S, K, H]; queries pass through. If several nodes gather
    a token, its gradients are summed in at least float32.

    Because queries pass through, its backward pass runs after that of attention, whichever of the three need gradients.
    It then drops the tensors that `_Keep` restored, because the graph lives as long as the loss.
    """

    @staticmethod
    def forward(ctx: Any, saved: _Saved, q_tNH: torch.Tensor, *parts: torch.Tensor) -> Any:
        ctx.saved, ctx.sizes = saved, [len(x) for x in parts[: saved.parts]]
        gathered = (_joined(each).index_select(0, saved.index_S) for each in saved.halves(parts))
        return q_tNH.view_as(q_tNH), *gathered

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad_q, *gathered = grads
        ctx.saved.tensors = ()
        sums = [_added_up(grad, ctx.saved.index_S, sum(ctx.sizes)) for grad in gathered]
        return None, grad_q, *(part for total in sums for part in total.split(ctx.sizes))


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def _added_up(grad_SKH: torch.Tensor, index_S: torch.Tensor, rows: int) -> torch.Tensor:
    terms = grad_SKH.to(torch.promote_types(grad_SKH.dtype, torch.float32))
    total = terms.new_zeros(rows, *terms.shape[1:]).index_add(0, index_S, terms)
    return total.to(grad_SKH.dtype)


@final
class _Saved:
    """The tensors that one attention call saved: the parts of the keys before gathering, those of the values, then the
    others.

    It holds tensors only while the call runs, and again after `_Keep` has restored them.
    """

    def __init__(self, index_S: torch.Tensor, parts: int) -> None:
        self.index_S = index_S
        """The gather index."""
        self.parts = parts
        """Number of tensors that the keys, and the values, are gathered from."""
        self.tensors: tuple[torch.Tensor, ...] = ()
        """While the call runs: the others. In the backward pass: all of them."""

    def add(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Add a tensor that was not gathered, and return what restores it."""
        self.tensors, place = (*self.tensors, x.detach()), 2 * self.parts + len(self.tensors)
        return lambda: self.tensors[place]

    def halves(self, tensors: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Return the parts of the keys and of the values."""
        return tensors[: self.parts], tensors[self.parts : 2 * self.parts]

    def gathered(self, half: int, size: torch.Size, stride: tuple[int, ...], offset: int) -> torch.Tensor:
        """Return a view of gathered keys (`half` 0) or values (1). Gather only the rows that the view covers."""
        x = _joined(self.halves(self.tensors)[half])
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


# ---------------------------------------------------------------------- over ranks


@final
class RowOverRanks(RowPart):
    """A contiguous part of a row, or of its prefix tree, on one rank of a context group, and a share of its images.

        row      a a a b | b b b b       on 2 ranks
        tree     P A B | C D .           a node of padding at the end makes the parts equal

    Each target is computed by the rank that has the token before it (in a tree: before it on its path).

    Raises:
        LayoutError: the row's width is not a multiple of the number of ranks.
    """

    def __init__(self, row: PackedRow, parallel: Parallel) -> None:
        super().__init__(row.segments, row)
        self.collectives = parallel.collectives
        """The ranks of the context group."""
        self.ranks, self.rank = parallel.ranks, self.collectives.rank
        self._padding = 0
        if (tree := self.tree) is not None:
            self._padding = -tree.num_tokens % self.ranks
            last, end = [self._padding] * (self._padding > 0), tree.num_tokens + self._padding
            self.computed = Segments.from_lengths([*tree.lengths, *last])
            self._padded = Paths(
                nodes=self.computed,
                keys=Segments.from_lengths([*tree.keys.lengths, *last]),
                key_index=lambda device: torch.cat(
                    [tree.key_index(device), torch.arange(tree.num_tokens, end, device=device)]
                ),
            )
        self.partition = Partition(segments=self.computed, ranks=self.ranks, layout="contiguous")
        """Assignment of tokens to ranks."""
        *before, self.segments = (self.partition.local_segments(rank) for rank in range(self.rank + 1))
        start = sum(segments.num_tokens for segments in before)
        self.real = slice(start, start + self.segments.num_tokens)

    def cut(self, row: torch.Tensor, *, dim: int = -1) -> torch.Tensor:
        """Return a view of the part; of a tree a copy, with zeros for padding."""
        computed = super().cut(row, dim=dim)
        if self._padding:
            shape = list(computed.shape)
            shape[dim] = self._padding
            computed = torch.cat([computed, computed.new_zeros(shape)], dim)
        return self.partition.cut(computed, self.rank, token_dim=dim)

    def gather(self, part_t: torch.Tensor) -> torch.Tensor:
        """All-gather the parts, and repeat shared tokens."""
        return self.for_each_sample(self.collectives.all_gather_equal(part_t, "loss"))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """All-reduce."""
        return self.collectives.all_reduce(x, "routers")

    def attend(self, attend: Attend, qkv: QKV, segments: Segments, *, layer: Any = None) -> torch.Tensor:
        """Use Ulysses if the number of ranks divides the number of heads, otherwise all-gather keys and values.

        Raises:
            LayoutError: the ranks do not divide the heads, and the row has a prefix tree.
        """

        def along_paths(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, nodes: Segments) -> torch.Tensor:
            return attend_along_paths(attend, q, k, v, self._padded)

        is_tree, heads = self.tree is not None, qkv[0].shape[1]
        if not heads % self.ranks:
            of_heads = along_paths if is_tree else attend
            return attend_by_heads(of_heads, *qkv, self.partition, self.collectives)
        if is_tree:
            raise LayoutError(
                f"{self.ranks} ranks share a row that has a prefix tree, and do not divide the {heads} heads "
                "of a layer: take the tree away with unshare(row), or use a number of ranks that divides them"
            )
        return self._gathered_kv.attend(attend, *qkv)

    @cached_property
    def _gathered_kv(self) -> GatheredKV:
        return GatheredKV(self.partition, self.collectives)

    def by_heads(self, parts_tRF: Sequence[torch.Tensor], run: OnHeads, what: str) -> torch.Tensor:
        """Use Ulysses: one all-to-all before the computation and one after it."""
        row_TF = to_heads(torch.cat([*parts_tRF], -1), self.collectives, what)
        return to_tokens(run(row_TF), self.collectives, what).flatten(1)

    def on_whole_row(self, run: OnTensors, hidden_1tD: torch.Tensor, *others_1t: torch.Tensor) -> torch.Tensor:
        """Compute the whole row on every rank; each rank then continues with its part."""
        row_1TD = self.collectives.all_gather(hidden_1tD[0], "whole rows")[None]
        others_1T = [self.collectives.all_gather_equal(part[0], "whole rows")[None] for part in others_1t]
        return self.cut(run(row_1TD, *others_1T), dim=1)

    def targets(self, index_L: torch.Tensor, labels_1T: torch.Tensor, *, distinct: bool = True) -> PartTargets:
        """Select the targets that tokens of this part predict: a host–device sync."""
        every = super().targets(index_L, labels_1T, distinct=distinct)
        start = self.rank * self.partition.local_total
        is_held = (every.predictions >= start) & (every.predictions < start + self.partition.local_total)
        held = is_held.nonzero()[:, 0]
        return replace(
            every,
            predictions=every.predictions.index_select(0, held) - start,
            ids=every.ids.index_select(0, held),
            index=every.index.index_select(0, held),
            held=held,
            total=len(every.ids),
        )

    def gather_targets(self, part_l: torch.Tensor, targets: PartTargets) -> torch.Tensor:
        """Add up the values of all ranks, with zeros for targets of the others."""
        assert targets.held is not None
        own = part_l.new_zeros(targets.total, *part_l.shape[1:]).index_add(0, targets.held, part_l)
        return super().gather_targets(self.collectives.all_reduce(own, "loss"), targets)

    def rank_of(self, places: np.ndarray) -> np.ndarray:
        """Return the rank that has the tokens at these places of the row, int16."""
        computed = places if self.tree is None else self.tree.place().numpy()[places]
        return (computed // self.partition.local_total).astype(np.int16)
