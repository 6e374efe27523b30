"""Gated delta layers over a prefix tree: every token once, each node from the state in which its parent ended.

    tree      P ─┬─ A            level 0    P            starts from nothing
                 └─ B ─┬─ C      level 1    A, B         start where P ended
                       └─ D      level 2    C, D         start where B ended

The unmodified layer asks a cache for a recurrent state and for the tokens before the convolution's first ones, and
gives it new ones. `HandedState` stands in for that cache in one call. What it is given it keeps with its graph, where
the cache of transformers copies into buffers that have none.

`BucketTree`, for a recurrence in PyTorch: nodes of one level that have no children are computed in right-padded batches
(`layout.Buckets`). Those that have some are never padded: their last state is read. They share a call with nodes of the
same length.

`SpacedTree`, for kernels that restart at given boundaries (flash-linear-attention): one call a level, each node behind
the tokens that the convolution reads before its first ones (`layout.SpacedNodes`).

That protocol is an inner one of transformers. `hands_states` tries it out on a small layer of the same class, once a
process; where it fails, layers run along the paths of the samples (`PrefixTreeRow.by_heads`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from torch import nn

from vlmpack.layout.device import to_device
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.segments import Segments
from vlmpack.model.mechanisms.gated_delta_fla import fla_boundaries
from vlmpack.model.mechanisms.recurrent_rows import Bucket, Buckets, SpacedNodes
from vlmpack.model.plain import cache_name

# ---------------------------------------------------------------------- one call


class HandedState:
    """Stands in for the cache of one layer in one call of n sequences. C channels of the convolution, which reads K
    tokens before each; H heads of the recurrence."""

    record_past = True
    """So that a call of one token goes through the convolution as any other, and changes nothing in place (to 5.19)."""

    def __init__(self, tail_nCK: torch.Tensor | None = None, state_nHDD: torch.Tensor | None = None) -> None:
        """Begin from what another call ended in; None: from nothing."""
        self.tail = tail_nCK
        """[n, C, K]: projected tokens before the first ones; after the call, those before what follows."""
        self.state = state_nHDD
        """[n, H, D, D']: state of the recurrence; after the call, the one in which it ended."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: `update_conv_state` puts the tail before the new tokens, in calls of one token too."""
        return

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The state to start from."""
        return self.state

    def is_recording_past(self, layer_idx: int) -> bool:
        """True, see `record_past`."""
        return self.record_past

    def update_conv_state(self, tokens_nCL: torch.Tensor, layer_idx: int, **settings: Any) -> torch.Tensor:
        """[n, C, K + L]: the tail and the tokens; the layer leaves out what it computes of the tail."""
        reach = settings["conv_kernel_size"] - 1
        tail = tokens_nCL.new_zeros(*tokens_nCL.shape[:2], reach) if self.tail is None else self.tail
        joined = torch.cat([tail, tokens_nCL], -1)
        self.tail = joined[..., joined.shape[-1] - reach :]
        return joined

    def update_recurrent_state(self, state_nHDD: torch.Tensor, layer_idx: int, state_idx: int = 0) -> None:
        """Keep the state in which the call ended."""
        self.state = state_nHDD

    # what 5.17 asks for instead of `get_recurrent_state` and `is_recording_past`

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        """Return whether the call starts from a state."""
        return self.state is not None

    @property
    def layers(self) -> HandedState:
        """Itself, for every layer."""
        return self

    def __getitem__(self, layer_idx: int) -> HandedState:
        return self

    @property
    def recurrent_states(self) -> list[torch.Tensor | None]:
        """The state to start from."""
        return [self.state]


@final
class HandedStateAlone(HandedState):
    """The same in a call of [1, W] tokens that hold those before the first ones of each node."""

    def __init__(self, state_nHDD: torch.Tensor | None = None) -> None:
        """Begin from what another call ended in; None: from nothing."""
        super().__init__(state_nHDD=state_nHDD)

    def update_conv_state(self, tokens_nCL: torch.Tensor, layer_idx: int, **settings: Any) -> torch.Tensor:
        """[1, C, W]: the tokens as they are."""
        return tokens_nCL


# ---------------------------------------------------------------------- all calls of a tree, in buckets


@final
@dataclass(frozen=True, kw_only=True)
class Call:
    """Nodes that one call of a layer computes."""

    starts: tuple[int, ...] | None
    """For each node the number of its parent among those of the level above that have children; None: roots."""
    ends: bool
    """True if the nodes have children, which start where they end."""


@final
@dataclass(frozen=True, kw_only=True)
class BucketTree:
    """The calls of a gated delta layer that compute every token of a tree once."""

    buckets: Buckets
    """The nodes of the tree, a bucket a call, level by level."""
    levels: tuple[tuple[Call, ...], ...]
    """The calls of each level, in the order of the buckets."""

    @classmethod
    def cheapest(cls, tree: PrefixTree, *, call_cost: float) -> BucketTree:
        """Cut every level as `Buckets.cheapest` does; `call_cost`: the cost of one more call, in tokens."""
        have_children = {*tree.parents}
        buckets, levels = [], []
        numbers: dict[int, int] = {}
        for depth in range(max(tree.depths) + 1):
            level = [node for node, of_node in enumerate(tree.depths) if of_node == depth]
            inner = _cut(tree, [node for node in level if node in have_children], call_cost=0)
            leaves = _cut(tree, [node for node in level if node not in have_children], call_cost=call_cost)
            calls = []
            for bucket in (*inner, *leaves):
                starts = tuple(numbers[tree.parents[node]] for node in bucket.members) if depth else None
                calls.append(Call(starts=starts, ends=bucket in inner))
            buckets += [*inner, *leaves]
            levels.append(tuple(calls))
            numbers = {node: number for number, node in enumerate(n for bucket in inner for n in bucket.members)}
        return cls(buckets=Buckets(segments=tree.nodes, buckets=tuple(buckets)), levels=tuple(levels))

    @cached_property
    def _on_device(self) -> dict[tuple[int, int, torch.device], torch.Tensor]:
        return {}

    @property
    def tokens(self) -> int:
        """Tokens that all calls compute."""
        return self.buckets.tokens

    def run(self, layer: Callable[..., torch.Tensor], hidden_1tD: torch.Tensor) -> torch.Tensor:
        """[1, t, D] through a layer, [n, L, D] and a cache to [n, L, D], level by level."""
        parts, outputs = iter(self.buckets.split(hidden_1tD)), []
        tails = states = hidden_1tD.new_zeros(0)
        for depth, calls in enumerate(self.levels):
            ended = []
            for number, call in enumerate(calls):
                handed = HandedState()
                if call.starts is not None:
                    start_n = self._starts(depth, number, call.starts, hidden_1tD.device)
                    handed = HandedState(tails.index_select(0, start_n), states.index_select(0, start_n))
                outputs.append(layer(next(parts), handed))
                if call.ends:
                    ended.append(handed)
            if ended:
                tails, states = torch.cat([end.tail for end in ended]), torch.cat([end.state for end in ended])
        return self.buckets.join(outputs)

    def _starts(self, depth: int, number: int, starts: Sequence[int], device: torch.device) -> torch.Tensor:
        place = depth, number, device
        if place not in self._on_device:
            self._on_device[place] = to_device(np.asarray(starts, np.int64), device)
        return self._on_device[place]


def _cut(tree: PrefixTree, nodes: Sequence[int], *, call_cost: float) -> list[Bucket]:
    """The cheapest cut of these nodes."""
    if not nodes:
        return []
    cut = Buckets.cheapest(Segments.from_lengths([tree.lengths[node] for node in nodes]), call_cost=call_cost)
    return [replace(bucket, members=tuple(nodes[i] for i in bucket.members)) for bucket in cut.buckets]


# ---------------------------------------------------------------------- one call a level


@final
@dataclass(frozen=True, kw_only=True)
class SpacedTree:
    """The calls of a gated delta layer that compute a tree by kernels which restart at boundaries, one a level."""

    tree: PrefixTree
    """The tree, t tokens."""
    levels: tuple[SpacedNodes, ...]
    """The nodes of each depth."""

    @classmethod
    def of(cls, tree: PrefixTree, *, reach: int) -> SpacedTree:
        """Cut a tree for a convolution that reads `reach` tokens before each token."""
        return cls(tree=tree, levels=SpacedNodes.by_depth(tree, reach))

    @property
    def tokens(self) -> int:
        """Tokens that all calls compute, those before each node included."""
        return sum(level.tokens for level in self.levels)

    def run(self, layer: Callable[..., torch.Tensor], hidden_1tD: torch.Tensor) -> torch.Tensor:
        """[1, t, D] through a layer, [1, W, D], a cache and boundaries to [1, W, D], level by level."""
        device, outputs = hidden_1tD.device, []
        ended = None
        for depth, level in enumerate(self.levels):
            handed = HandedStateAlone(None if ended is None else self._starts(depth, ended))
            (spaced,) = level.split(hidden_1tD)
            computed = layer(spaced, handed, **fla_boundaries(level.stretches, device))
            outputs.append(level.join([computed]))
            ended = handed.state
        return torch.cat(outputs, 1).index_select(1, self._derived("order", device, self._order))

    def _starts(self, depth: int, ended_mHDD: torch.Tensor) -> torch.Tensor:
        """[n, H, D, D']: the state in which each stretch of a level starts, out of those in which the level above
        ended; zeros where no node begins."""
        level, above = self.levels[depth], self.levels[depth - 1]
        device, parents = ended_mHDD.device, dict(zip(above.nodes, above.numbers, strict=True))
        of_parent = self._derived(
            ("parents", depth), device, lambda: np.asarray([parents[self.tree.parents[node]] for node in level.nodes])
        )
        of_node = self._derived(("nodes", depth), device, lambda: np.asarray(level.numbers))
        starts = ended_mHDD.new_zeros(len(level.stretches.lengths), *ended_mHDD.shape[1:])
        return starts.index_copy(0, of_node, ended_mHDD.index_select(0, of_parent))

    def _order(self) -> np.ndarray:
        """int64 [t]: where each token of the tree lies among the outputs of all levels."""
        spans = [self.tree.nodes.spans[node] for level in self.levels for node in level.nodes]
        return np.argsort(np.concatenate([np.arange(*span) for span in spans]))

    def _derived(self, what: Hashable, device: torch.device, make: Callable[[], np.ndarray]) -> torch.Tensor:
        return self.tree.nodes.derived(("spaced tree", what), device, make)


# ---------------------------------------------------------------------- the protocol, tried out


def with_cache(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The forward of a layer as a function of hidden states and a cache, under whatever name it takes that."""
    name = cache_name(forward)
    return lambda hidden, cache, **kwargs: forward(hidden, **{**kwargs, name: cache})


_HANDS: dict[tuple[type[nn.Module], str, bool], bool] = {}
"""By class of layer, type of device, and whether gradients are computed."""

_PIECES = 5, 1, 2
"""Tokens of a node, of its child, and of its child's child."""
_FORGETS = -4.0
"""Logarithm of a rate so low that states count: random ones forget within a few tokens."""
CLOSE = {"cpu": 1e-4}
CLOSE_IN_TF32 = 2e-2
"""Largest error that counts as rounding, as a part of the largest entry, on a type of device, and on any other."""


def hands_states(
    layer_class: Any, text_config: Any, *, cut: Callable[[PrefixTree], BucketTree | SpacedTree], device: torch.device
) -> bool:
    """Return whether layers of this class compute, node by node with `HandedState`, what they compute in one call, and
    the same gradients where gradients are computed.

    Args:
        layer_class: the class of an unmodified layer.
        text_config: the text part's configuration.
        cut: cuts a tree into calls.
        device: where to try it out; any that computes the layers will do.
    """
    key = layer_class, device.type, torch.is_grad_enabled()
    if key not in _HANDS:
        try:
            _HANDS[key] = _is_exact(layer_class, text_config, cut(_chain()), device)
        except Exception:  # whatever another version of transformers raises: its protocol is another one
            _HANDS[key] = False
    return _HANDS[key]


def _chain() -> PrefixTree:
    """One sample, cut into its nodes."""
    sample = Segments.from_lengths([sum(_PIECES)])
    return PrefixTree(segments=sample, parents=(-1, 0, 1), lengths=_PIECES, leaves=(2,))


def _is_exact(layer_class: Any, text_config: Any, delta: BucketTree | SpacedTree, device: torch.device) -> bool:
    """Compare outputs, and the gradient of the input, of a layer with few channels and the model's own heads."""
    small, training = copy.copy(text_config), torch.is_grad_enabled()
    small.hidden_size = 8
    # no device listed: the generator of the CPU alone is touched, and put back
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.device("cpu"):
        torch.default_generator.manual_seed(0)
        layer = layer_class(small, 0).float()
        nn.init.constant_(layer.A_log, _FORGETS)
        hidden = torch.randn(1, sum(_PIECES), small.hidden_size, dtype=torch.float32)
        weights = torch.randn_like(hidden)
    layer, hidden, weights = layer.to(device), hidden.to(device), weights.to(device)
    with torch.inference_mode(False), torch.set_grad_enabled(training), torch.autocast(device.type, enabled=False):
        whole = _computed(layer, hidden, weights)
        by_node = _computed(functools.partial(delta.run, with_cache(layer.forward)), hidden, weights)
    close = CLOSE.get(device.type, CLOSE_IN_TF32)
    return all(bool((a - b).abs().max() <= close * a.abs().max()) for a, b in zip(whole, by_node, strict=True))


def _computed(
    function: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, weights: torch.Tensor
) -> list[torch.Tensor]:
    """The output, and the gradient of the input where gradients are computed."""
    leaf = hidden.clone().requires_grad_(torch.is_grad_enabled())
    out = function(leaf)
    if not torch.is_grad_enabled():
        return [out]
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaf)]
