"""Gated delta layers over a prefix tree: every token once, each node from the state in which its parent ended.

    tree      P ─┬─ A            level 0    P            starts from nothing
                 └─ B ─┬─ C      level 1    A, B         start where P ended
                       └─ D      level 2    C, D         start where B ended

The unmodified layer asks a cache for a recurrent state and for the tokens before the convolution's first ones, and
gives it new ones. `HandedState` stands in for that cache in one call. What it is given it keeps with its graph, where
the cache of transformers copies into buffers that have none.

Nodes of one level that have no children are computed in right-padded batches (`layout.Buckets`). Those that have some
are never padded: their last state is read. They share a call with nodes of the same length.

That protocol is an inner one of transformers. `hands_states` tries it out on a small layer of the same class, once a
process; where it fails, layers run along the paths of the samples (`PrefixTreeRow.by_heads`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from torch import nn

from vlmpack.layout import Bucket, Buckets, PrefixTree, Segments, to_device

# ---------------------------------------------------------------------- one call


@final
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


# ---------------------------------------------------------------------- all calls of a tree


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
class DeltaTree:
    """The calls of a gated delta layer that compute every token of a tree once."""

    buckets: Buckets
    """The nodes of the tree, a bucket a call, level by level."""
    levels: tuple[tuple[Call, ...], ...]
    """The calls of each level, in the order of the buckets."""

    @classmethod
    def cheapest(cls, tree: PrefixTree, *, call_cost: float) -> DeltaTree:
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
                outputs.append(layer(next(parts), cache_params=handed))
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


# ---------------------------------------------------------------------- the protocol, tried out

_HANDS: dict[type[nn.Module], bool] = {}
"""By class of layer."""

_SIZES = {
    "hidden_size": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
}
_PIECES = 5, 1, 2
"""Tokens of a node, of its child, and of its child's child."""
_FORGETS = -4.0
"""Logarithm of a rate so low that states count: random ones forget within a few tokens."""
CLOSE = 1e-4
"""Largest error that counts as rounding, as a part of the largest entry."""


def hands_states(layer_class: Any, text_config: Any) -> bool:
    """Return whether layers of this class compute, in pieces with `HandedState`, what they compute in one call, and the
    same gradients.

    Args:
        layer_class: the class of an unmodified layer.
        text_config: the text part's configuration.
    """
    if layer_class not in _HANDS:
        try:
            _HANDS[layer_class] = _is_exact(layer_class, text_config)
        except Exception:  # whatever another version of transformers raises: its protocol is another one
            _HANDS[layer_class] = False
    return _HANDS[layer_class]


def _is_exact(layer_class: Any, text_config: Any) -> bool:
    """Compare outputs, and the gradient of the input, of a small layer on the CPU."""
    small = copy.copy(text_config)
    for name, size in _SIZES.items():
        setattr(small, name, size)
    # no device listed: the generator of the CPU alone is touched, and put back
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        torch.default_generator.manual_seed(0)
        layer = layer_class(small, 0).float()
        nn.init.constant_(layer.A_log, _FORGETS)
        hidden = torch.randn(1, sum(_PIECES), small.hidden_size, dtype=torch.float32)
        weights = torch.randn_like(hidden)
        with torch.autocast("cpu", enabled=False):
            whole = _computed(layer, hidden, weights)
            handed = HandedState()
            in_pieces = _computed(lambda x: _in_pieces(layer, x, handed), hidden, weights)
    return all(_are_close(a, b) for a, b in zip(whole, in_pieces, strict=True))


def _in_pieces(layer: Any, hidden: torch.Tensor, handed: HandedState) -> torch.Tensor:
    return torch.cat([layer(piece, cache_params=handed) for piece in hidden.split(_PIECES, dim=1)], 1)


def _computed(
    function: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, gradient of the input)."""
    leaf = hidden.clone().requires_grad_()
    out = function(leaf)
    (out * weights).sum().backward()
    assert leaf.grad is not None
    return out.detach(), leaf.grad


def _are_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).abs().max() <= CLOSE * a.abs().max())
