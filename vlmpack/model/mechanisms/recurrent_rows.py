"""Layouts of rows and prefix trees for layers that carry state along a sequence. A plain row is a tree of roots only.

`Buckets` splits a row into right-padded batches of segments of similar length. Lengths [3, 5, 2, 5], two buckets:

    row       a a a b b b b b c c d d d d d
    buckets   a a a        b b b b b
              c c ~        d d d d d            ~ a copy of the sample's last token: finite, and its output is not used

`ConvLayout` concatenates segments with zeros between them, which a convolution reads before a segment's first token; in
a tree, with the last tokens on the path to it. A recurrence restarts where `pieces` begin.

Both are computed parents first: each node of a tree starts from what its parent left, such as its final state.

    tree      P ─┬─ A            level 0    P            starts from nothing
                 └─ B ── C       level 1    A, B         start where P ended
                                 level 2    C            starts where B ended
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, final

import numpy as np
import torch
from torch import nn

from vlmpack.errors import ConfigError
from vlmpack.layout.device import to_device
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.segments import Segments, ranges
from vlmpack.model.mechanisms import RowSetup
from vlmpack.model.row import RowPart

CALL_COST = {"cpu": 16.0, "cuda": 65536.0}
"""The cost of one more call of a layer, in tokens, by device type. A GPU scans a batch in the time of its longest
sample, so there the fewest calls that `MAX_OVERHEAD` allows are best."""

MAX_OVERHEAD = 1.25
"""Maximum number of tokens that a bucket may compute per real token in it."""

Path = list[tuple[torch.Tensor, ...]]
"""What each node of a path left for the nodes after it, from the root on."""


def with_tail(tree: PrefixTree, kept: int, taps: int) -> PrefixTree:
    """Return the tree of a piece whose first node, a kept prefix of `kept` tokens, has only its last `taps` tokens."""
    samples = Segments.from_lengths([length - kept + taps for length in tree.segments.lengths])
    return PrefixTree(segments=samples, parents=tree.parents, lengths=(taps, *tree.lengths[1:]), leaves=tree.leaves)


def tail_of(row_1TD: torch.Tensor, taps: int) -> torch.Tensor:
    """Return the last tokens of a row, [1, taps, D], with zeros before its first one."""
    return torch.cat([row_1TD.new_zeros(1, taps, row_1TD.shape[-1]), row_1TD], 1)[:, -taps:]


@final
class LayerState:
    """A cache of one layer: the initial state of a call of n sequences, and afterwards its final state. C
    channels of the convolution, which reads K tokens before each; H heads of the recurrence."""

    record_past = True
    """Makes calls of one token use the ordinary convolution and change nothing in place (transformers up to 5.19)."""

    reads_row = False
    """Whether the call's own tokens include the ones before the first."""

    def __init__(self, tail_nCK: torch.Tensor | None = None, state_nHDD: torch.Tensor | None = None) -> None:
        """Start from another call's final state; None: from nothing."""
        self.tail = tail_nCK
        """[n, C, K]: projected tokens before the first ones; after the call, the last K tokens."""
        self.state = state_nHDD
        """[n, H, D, D']: initial state of the recurrence; after the call, its final state."""

    @classmethod
    def behind(cls, paths: Sequence[Path]) -> LayerState:
        """Start each sequence from the last state of its path; from nothing if the paths are empty."""
        ends = [path[-1] for path in paths if path]
        return cls(*map(torch.cat, zip(*ends, strict=True)))

    def left(self, lengths: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
        """Return (tail, state) of each sequence, none of which was padded."""
        assert self.tail is not None
        assert self.state is not None
        return list(zip(self.tail.split(1), self.state.split(1), strict=True))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None: `update_conv_state` prepends the tail to the new tokens, even in calls of one token."""
        return

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the state to start from."""
        return self.state

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return True; see `record_past`."""
        return True

    def update_conv_state(self, tokens_nCL: torch.Tensor, layer_idx: int, **settings: Any) -> torch.Tensor:
        """Return the tail and the tokens, [n, C, K + L]. The layer drops its output for the tail."""
        if self.reads_row:
            return tokens_nCL
        taps = settings["conv_kernel_size"] - 1
        tail = tokens_nCL.new_zeros(*tokens_nCL.shape[:2], taps) if self.tail is None else self.tail
        joined = torch.cat([tail, tokens_nCL], -1)
        self.tail = joined[..., joined.shape[-1] - taps :]
        return joined

    def update_recurrent_state(self, state_nHDD: torch.Tensor, layer_idx: int, state_idx: int = 0) -> None:
        """Keep the call's final state."""
        self.state = state_nHDD

    # transformers 5.17 calls the following instead of `get_recurrent_state` and `is_recording_past`

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        """Return whether the call starts from a state."""
        return self.state is not None

    @property
    def layers(self) -> LayerState:
        """Return itself, for every layer."""
        return self

    def __getitem__(self, layer_idx: int) -> LayerState:
        return self

    @property
    def recurrent_states(self) -> list[torch.Tensor | None]:
        """Return the state to start from."""
        return [self.state]


# ---------------------------------------------------------------------- right-padded batches


@final
@dataclass(frozen=True, kw_only=True)
class Bucket:
    """n segments that are computed together in one call."""

    members: tuple[int, ...]
    """Indices of the segments in the row, shortest first."""
    width: int
    """W: number of tokens of the longest segment."""
    ends: bool = False
    """Whether the segments have children, which start where these end. Such segments are never padded."""

    @property
    def tokens(self) -> int:
        """Number of tokens that the call computes, n * W."""
        return len(self.members) * self.width


@final
@dataclass(frozen=True, kw_only=True)
class Buckets:
    """All non-empty segments of a row, or nodes of a tree, each in one bucket."""

    segments: Segments
    """The row, or the nodes of the tree."""
    buckets: tuple[Bucket, ...]
    """The calls, those of parents before those of their children."""
    tree: PrefixTree | None = None
    """The tree; None: all segments are roots."""

    @classmethod
    def of_row(cls, setup: RowSetup, *, by_parent: bool = False) -> Buckets:
        """Find the cheapest split of a row, or of its tree, on its device; see `cheapest`."""
        tree, piece, segments = setup.row.tree, setup.part.piece, setup.row.segments
        if tree is not None:
            segments = Segments.from_lengths([0, *tree.lengths[1:]]) if setup.part.kept else tree.nodes
        cost = CALL_COST.get(setup.row.input_ids.device.type, CALL_COST["cuda"])
        keeps_last = piece is not None and piece.own is not None
        return cls.cheapest(segments, call_cost=cost, tree=tree, keeps_last=keeps_last, by_parent=by_parent)

    @classmethod
    def cheapest(
        cls,
        segments: Segments,
        *,
        call_cost: float,
        tree: PrefixTree | None = None,
        keeps_last: bool = False,
        by_parent: bool = False,
    ) -> Buckets:
        """Find the cheapest split, where a batch costs its tokens (padding included) plus `call_cost` for the call.

        Segments are sorted by length and split into runs. best[j] is the least cost of the j shortest lengths:

            best[j] = min over i < j of  best[i] + call_cost + segments(i .. j) * length[j]

        where runs that would pad by more than `MAX_OVERHEAD` are excluded. One segment per bucket is always allowed,
        and is the result if calls are cheap. Nodes with children share a call only with nodes of the same length.

        Args:
            segments: the row, or `tree.nodes`, where a length of 0 stands for a kept prefix, the first node.
            call_cost: cost of one more call, in tokens.
            tree: the tree; None: all segments are roots.
            keeps_last: whether later pieces start where the last node ends.
            by_parent: whether only the children of one node share a call; otherwise, all nodes of a level.
        """
        nodes = [i for i, n in enumerate(segments.lengths) if n]
        if tree is None:
            return cls(segments=segments, buckets=_cheapest(segments, nodes, call_cost))
        have_children = {*tree.parents} | ({len(tree.parents) - 1} if keeps_last else set[int]())
        together: dict[tuple[int, bool], list[int]] = {}
        for node in nodes:
            of = tree.parents[node] if by_parent else tree.depths[node]
            together.setdefault((of, node in have_children), []).append(node)
        buckets: list[Bucket] = []
        for (_, ends), members in together.items():
            calls = _cheapest(segments, members, 0 if ends else call_cost)
            buckets += [replace(bucket, ends=ends) for bucket in calls]
        return cls(segments=segments, buckets=tuple(buckets), tree=tree)

    @property
    def tokens(self) -> int:
        """Number of tokens that all buckets compute."""
        return sum(bucket.tokens for bucket in self.buckets)

    def run(
        self,
        layer: Callable[..., torch.Tensor],
        module: nn.Module,
        start: Callable[[Sequence[Path]], Any],
        part: RowPart,
        *rows_1T: torch.Tensor,
    ) -> torch.Tensor:
        """Run a row, or a part of it, through a layer: [1, T, D].

        Args:
            layer: maps a cache (None: the layer needs none) and one [n, W, ...] of each row to [n, W, D].
            module: the layer's module, under which pieces of a group keep what their last node leaves.
            start: makes the cache of a call of n sequences from the path before each. Its method `left` returns what
                each sequence, of the given length without padding, leaves for those after it.
            part: the part of the row.
            rows_1T: hidden states, and further inputs, [1, T, ...].
        """
        outputs: list[torch.Tensor] = []
        parents = (-1,) * len(self.segments.lengths) if self.tree is None else self.tree.parents
        paths: dict[int, Path] = {-1: [], 0: [] if part.piece is None else part.piece.read(module)}
        for bucket, *inputs in zip(self.buckets, *map(self.split, rows_1T), strict=True):
            before = [paths[parents[node]] for node in bucket.members]
            cache: Any = start(before) if bucket.ends or before[0] else None
            outputs.append(layer(cache, *inputs))
            if bucket.ends:
                left = cache.left([self.segments.lengths[node] for node in bucket.members])
                paths |= {node: [*path, own] for node, path, own in zip(bucket.members, before, left, strict=True)}
        out_1TD = self.join(outputs)
        if part.piece is None or part.piece.own is None:
            return out_1TD
        return part.piece.keep(module, out_1TD, *paths[len(parents) - 1][-1])

    def split(self, row_1TD: torch.Tensor) -> list[torch.Tensor]:
        """Split [1, T, ...] into one [n, W, ...] per bucket.

        All tokens are gathered at once and then split, because the gradient of a slice of the row is as wide as the
        row.
        """
        index, tokens = self._on(row_1TD.device)[0], row_1TD[0]
        tokens = tokens if index is None else tokens.index_select(0, index)
        parts = tokens.split([bucket.tokens for bucket in self.buckets])
        shapes = [(len(bucket.members), bucket.width) for bucket in self.buckets]
        return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join one [n, W, D] per bucket into [1, T, D]."""
        tokens_1D = torch.cat([part.flatten(0, 1)[None] for part in parts], 1)
        index = self._on(tokens_1D.device)[1]
        return tokens_1D if index is None else tokens_1D.index_select(1, index)

    def _on(self, device: torch.device) -> Sequence[torch.Tensor | None]:
        """Return the `_indices` on a device; None for one that only counts up."""
        if device not in self._devices:
            totals = zip(self._indices, (self.segments.total, self.tokens), strict=True)
            self._devices[device] = [
                None if np.array_equal(index, np.arange(total)) else to_device(index, device) for index, total in totals
            ]
        return self._devices[device]

    @cached_property
    def _devices(self) -> dict[torch.device, list[torch.Tensor | None]]:
        return {}

    @cached_property
    def _indices(self) -> tuple[np.ndarray, np.ndarray]:
        """(Row token at each position of the concatenated buckets; position there of each token of the row, [T]), both
        int64."""
        members = np.asarray([node for bucket in self.buckets for node in bucket.members], np.int64)
        widths = np.asarray([bucket.width for bucket in self.buckets for _ in bucket.members], np.int64)
        starts, stops = np.asarray(self.segments.spans, np.int64).reshape(-1, 2).T
        source = np.minimum(ranges(starts[members], widths), np.repeat(stops[members] - 1, widths))
        firsts = np.zeros_like(starts)
        firsts[members] = widths.cumsum() - widths
        return source, ranges(firsts, stops - starts)


def _cheapest(segments: Segments, nodes: Sequence[int], call_cost: float) -> tuple[Bucket, ...]:
    """Return the cheapest split of these segments."""
    if not nodes:
        return ()
    order = sorted(nodes, key=segments.lengths.__getitem__)
    lengths = np.asarray([segments.lengths[i] for i in order], np.int64)
    runs = [order[start:stop] for start, stop in pairwise(_cheapest_cuts(lengths, call_cost))]
    if len(runs) == len(order):  # one by one: keep the row's order, so that nothing has to be moved back
        runs.sort()
    return tuple(Bucket(members=tuple(run), width=segments.lengths[run[-1]]) for run in runs)


def _cheapest_cuts(lengths: np.ndarray, call_cost: float) -> list[int]:
    """Return where to split `lengths`, int64 [n] in increasing order: 0, ..., n.

    Equal lengths always stay together: moving them into the later run, which is at least as wide, would never be
    cheaper.
    """
    widths, counts = np.unique(lengths, return_counts=True)
    edges = np.concatenate([[0], np.cumsum(counts)])
    tokens = np.concatenate([[0], np.cumsum(counts * widths)])
    best, before = np.zeros(len(edges)), np.zeros(len(edges), np.int64)
    for stop in range(1, len(edges)):
        computed = (edges[stop] - edges[:stop]) * widths[stop - 1]
        allowed = computed <= MAX_OVERHEAD * (tokens[stop] - tokens[:stop])
        cost = np.where(allowed, best[:stop] + call_cost + computed, np.inf)
        before[stop] = np.argmin(cost)
        best[stop] = cost[before[stop]]
    cuts = [len(widths)]
    while cuts[-1]:
        cuts.append(int(before[cuts[-1]]))
    return edges[cuts[::-1]].tolist()


# ---------------------------------------------------------------------- one call per level


@final
@dataclass(frozen=True, kw_only=True)
class ConvLayout:
    """Segments in one call, kept apart by the `taps` tokens that a convolution reads before each token. Lengths
    [3, 5, 2], taps 3:

        row          a a a b b b b b c c
        laid out     a a a 0 0 0  b b b b b 0 0 0  c c
        pieces       6            8                2         zeros come after all used tokens of a segment

    Each node of a tree is preceded by the last tokens on the path to it; taps 2, P = p q r s, A = a a a, B = b b:

        all nodes    0 0 p q r s  r s a a a  r s b b
        pieces       2   4        2   3      2   2

    `split` takes the segments out of the row. `join` is its inverse on the segments' own tokens.
    """

    segments: Segments
    """The row, or the nodes of the tree."""
    taps: int
    """Number of tokens that a convolution reads before each token: its width minus one."""
    nodes: tuple[int, ...]
    """The call's segments, none empty, in call order."""
    tree: PrefixTree | None = None
    """The tree; None: all segments are roots, and all of them are in the call."""

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each segment."""
        return [self.segments.lengths[node] for node in self.nodes]

    @property
    def tokens(self) -> int:
        """W: number of tokens that the call computes, repeated tokens and zeros included."""
        return self.pieces.total

    @cached_property
    def pieces(self) -> Segments:
        """Pieces over which a recurrence runs. A segment's piece begins at its first token. A node's piece ends at its
        last token, because its children start from its final state. The pieces cover the whole call: kernels leave
        everything after the last boundary unwritten."""
        *others, last = self.lengths
        if self.tree is None:
            return Segments.from_lengths([*(length + self.taps for length in others), last])
        return Segments.from_lengths([piece for length in self.lengths for piece in (self.taps, length)])

    def split(self, row_1TD: torch.Tensor) -> list[torch.Tensor]:
        """Lay out [1, T, D] as a list of one [1, W, D]."""
        device, width = row_1TD.device, row_1TD.shape[-1]
        if self.tree is not None:
            with_zero = torch.cat([row_1TD[0], row_1TD.new_zeros(1, width)])
            return [with_zero.index_select(0, self._derived("source", device, self._source))[None]]
        if len(self.nodes) == 1:
            return [row_1TD]
        return [row_1TD.new_zeros(1, self.tokens, width).index_copy(1, self._places(device), row_1TD)]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Select the segments' own tokens: from a list of one [1, W, D] to [1, r, D]."""
        (laid_1WD,) = parts
        return laid_1WD if self.tokens == sum(self.lengths) else laid_1WD.index_select(1, self._places(laid_1WD.device))

    def _source(self) -> np.ndarray:
        """Return int64 [W]: the tree's token at each position; t, the index after the last token, for a zero."""
        assert self.tree is not None
        starts = np.asarray([self.segments.stride[node] for node in self.nodes], np.int64)
        before = np.append(self.tree.predecessor("cpu").numpy(), -1)  # nothing comes before nothing, -1
        tails_GK = np.empty((len(self.nodes), self.taps), np.int64)
        reached = starts
        for tap in reversed(range(self.taps)):
            reached = tails_GK[:, tap] = before[reached]
        is_own = np.zeros(self.tokens, bool)
        is_own[self._own()] = True
        source = np.empty(self.tokens, np.int64)
        source[is_own], source[~is_own] = ranges(starts, np.asarray(self.lengths)), tails_GK.ravel()
        return np.where(source < 0, self.segments.total, source)

    def _own(self) -> np.ndarray:
        """Return int64 [r]: the positions of the segments' own tokens."""
        before = self.taps * (np.arange(len(self.nodes)) + (self.tree is not None))
        return np.arange(sum(self.lengths)) + np.repeat(before, self.lengths)

    def _places(self, device: torch.device) -> torch.Tensor:
        return self._derived("places", device, self._own)

    def _derived(self, what: str, device: torch.device, make: Callable[[], np.ndarray]) -> torch.Tensor:
        return self.segments.derived(("conv layout", self.taps, self.nodes, what), device, make)


@final
@dataclass(frozen=True, kw_only=True)
class VarlenCalls:
    """Calls for a row or a tree, whose segments are kept apart by zeros: one call, or with a recurrence along a tree
    one per level, for kernels that restart at given boundaries."""

    segments: Segments
    """The row, or the nodes of the tree."""
    levels: tuple[ConvLayout, ...]
    """The calls, parents first."""
    tree: PrefixTree | None = None
    """The tree; None: all segments are roots. Behind a kept prefix, its first node is the prefix's tail (`with_tail`)
    and in no call."""
    is_recurrent: bool = False
    """Whether the layers have a recurrence beside the convolution."""

    @classmethod
    def of_row(cls, setup: RowSetup, taps: int, *, is_recurrent: bool = False) -> VarlenCalls:
        """Lay out a row, or its tree, for a convolution that reads `taps` tokens before each token."""
        tree, kept = setup.row.tree, setup.part.kept
        if tree is None:
            return cls.of(setup.row.segments, taps, is_recurrent=is_recurrent)
        tree = with_tail(tree, kept, taps) if kept else tree
        return cls.of(tree.nodes, taps, tree=tree, first=int(kept > 0), is_recurrent=is_recurrent)

    @classmethod
    def of(
        cls,
        segments: Segments,
        taps: int,
        *,
        tree: PrefixTree | None = None,
        first: int = 0,
        is_recurrent: bool = False,
    ) -> VarlenCalls:
        """Lay out the segments of a row, or `tree.nodes`, from number `first` on."""
        levels: dict[int, list[int]] = {}
        for node, length in enumerate(segments.lengths[first:], first):
            if length:
                depth = tree.depths[node] if tree is not None and is_recurrent else 0
                levels.setdefault(depth, []).append(node)
        calls = [ConvLayout(segments=segments, taps=taps, nodes=tuple(levels[at]), tree=tree) for at in sorted(levels)]
        return cls(segments=segments, levels=tuple(calls), tree=tree, is_recurrent=is_recurrent)

    @property
    def tokens(self) -> int:
        """Number of tokens that all calls compute, including the tokens before each segment."""
        return sum(level.tokens for level in self.levels)

    def run(
        self, layer: Callable[..., torch.Tensor], module: nn.Module, part: RowPart, row_1TD: torch.Tensor
    ) -> torch.Tensor:
        """Run [1, T, D], a row or a part of it, through a layer.

        Args:
            layer: maps a `LayerState` (None: no state is passed), [1, W, D] and the pieces of the call to [1, W, D].
            module: the layer's module, under which pieces of a group keep what their last node leaves.
            part: the part of the row.
            row_1TD: hidden states.

        Raises:
            ConfigError: zeros would not keep the segments apart; see `check_zeros`.
        """
        check_zeros(module)
        outputs, left = list[torch.Tensor](), list[torch.Tensor]()
        kept = () if part.piece is None else part.piece.read_last(module) or ()
        row_1TD = torch.cat([kept[0], row_1TD], 1) if kept else row_1TD
        ended, nodes = (kept[1], (0,)) if len(kept) > 1 else (None, ())
        for level in self.levels:
            state = None
            if self.tree is not None and self.is_recurrent:
                state = LayerState(state_nHDD=None if ended is None else self._starts(level, nodes, ended))
                state.reads_row = True
            outputs.append(level.join([layer(state, *level.split(row_1TD), level.pieces)]))
            if state is not None and state.state is not None:
                ended, nodes = state.state[1::2], level.nodes
                if (last := len(self.segments.lengths) - 1) in nodes:
                    left = [ended[nodes.index(last), None]]
        out_1TD = torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]
        if len(outputs) > 1:
            out_1TD = out_1TD.index_select(1, self._derived("order", row_1TD.device, self._order))
        if part.piece is None:
            return out_1TD
        return part.piece.keep(module, out_1TD, tail_of(row_1TD, self.levels[0].taps), *left)

    def _starts(self, level: ConvLayout, ended: Sequence[int], ended_mHDD: torch.Tensor) -> torch.Tensor:
        """Return [2 n, H, D, D']: the initial state of each piece of a level. Nodes start from the final states of the
        level above (nodes `ended`), and the tokens before them from zeros."""
        assert self.tree is not None
        parents = [ended.index(self.tree.parents[node]) for node in level.nodes]
        index_n = self._derived(("parents", level.nodes), ended_mHDD.device, lambda: np.asarray(parents))
        starts_nHDD = ended_mHDD.index_select(0, index_n)
        return torch.stack([torch.zeros_like(starts_nHDD), starts_nHDD], 1).flatten(0, 1)

    def _order(self) -> np.ndarray:
        """Return int64 [t]: the position of each token of the tree among the outputs of all levels."""
        spans = [self.segments.spans[node] for level in self.levels for node in level.nodes]
        return np.argsort(np.concatenate([np.arange(*span) for span in spans]))

    def _derived(self, what: Hashable, device: torch.device, make: Callable[[], np.ndarray]) -> torch.Tensor:
        return self.segments.derived(("varlen calls", what), device, make)


def check_zeros(layer: nn.Module) -> None:
    """Check that zero hidden states are still zero at the convolution of a gated delta or short convolution layer.

    Raises:
        ConfigError: a projection before the convolution has a bias, either its own or an adapter's.
    """
    projections = [child for name, child in layer.named_children() if name.startswith("in_proj")]
    names = [name for projection in projections for name, _ in projection.named_parameters()]
    if any(name.rpartition(".")[2] == "bias" for name in names):
        raise ConfigError(
            f"a projection before the convolution of a {type(layer).__name__} has a bias, which would turn the zeros "
            "that keep samples apart into something else: train without it (LoRA: lora_bias=False), or gated delta "
            "layers without fla"
        )
