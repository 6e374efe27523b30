"""Key-value caches of transformers, of which sequences leave and which others join.

A cache holds a batch of sequences of different lengths, padded on the left, where the attention mask hides it:

    . . a a a        b b b b b       join     . . a a a
                                              b b b b b        leave (the second)     a a a

A layer of a cache holds tensors along the sequence (keys, values, what sparse attention compares) and states, which
stand for a whole sequence (convolution and recurrence of gated delta layers, the last ids of n-gram layers). A layer
with a window holds the last W - 1 tokens and the number of all, by which masks are made:

    S = 8, W = 5      . . a a a a a a        holds a a a a
                      b b b b b b b b              b b b b

B sequences, S cached tokens, W tokens of a window.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F

from vlmpack.errors import FamilyError


@final
@dataclass(frozen=True, kw_only=True)
class _Kind:
    """One kind of tensor of a cache layer."""

    batch: int
    """Dimension of the sequences."""
    time: int | None
    """Dimension of the tokens, from the last; None: a state of whole sequences."""


_KINDS = {
    "keys": _Kind(batch=0, time=-2),
    "values": _Kind(batch=0, time=-2),
    "indexer_keys": _Kind(batch=0, time=-2),
    "indexer_position_ids": _Kind(batch=1, time=-1),
    "conv_states": _Kind(batch=0, time=None),
    "recurrent_states": _Kind(batch=0, time=None),
}
"""Tensors of a layer."""

_SHARED = {"position_ids": _Kind(batch=1, time=-1)}
"""Tensors of the cache itself: positions that sparse attention reads, until transformers kept them in a layer."""

_LAYERS = frozenset(
    (
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "DynamicIndexedLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    )
)
"""Classes of cache layers of which these are all tensors."""

_WINDOW, _COUNT = "sliding_window", "cumulative_length"
"""Attributes of layers that hold a window: its width, and the tokens that they were given."""

Change = Callable[[torch.Tensor, _Kind], torch.Tensor]


def check_cache(cache: Any) -> None:
    """Check that sequences can join and leave this cache.

    Raises:
        FamilyError: it is of another kind; names it.
    """
    layers = getattr(cache, "layers", None)
    held = {type(cache).__name__} if layers is None else {type(layer).__name__ for layer in layers} - _LAYERS
    if held:
        raise FamilyError(
            f"this model caches in {', '.join(sorted(held))}, whose sequences cannot leave one by one; sample with vLLM"
        )


def selected(cache: Any, rows: Sequence[int]) -> Any:
    """Return a cache of these sequences; one may come several times. Neither cache changes with the other."""
    tensors = {id(tensor): tensor for _, _, tensor, _ in _tensors(cache)}
    taken = copy.deepcopy(cache, {**tensors})  # all but the tensors
    select(taken, torch.tensor(rows))
    return taken


def select(cache: Any, rows: torch.Tensor) -> None:
    """Keep these sequences, int64 [n] in this order; one may come several times."""
    _change(cache, lambda tensor, kind: tensor.index_select(kind.batch, rows.to(tensor.device)))


def pad_left(cache: Any, count: int) -> None:
    """Put `count` tokens of padding before all sequences."""

    def padded(tensor: torch.Tensor, kind: _Kind, columns: int) -> torch.Tensor:
        assert kind.time is not None
        return F.pad(tensor, (0, 0) * (-1 - kind.time) + (columns, 0))

    _change_columns(cache, count, padded)


def trim_left(cache: Any, count: int) -> None:
    """Take away the first `count` tokens of all sequences, which are padding in each of them."""

    def trimmed(tensor: torch.Tensor, kind: _Kind, columns: int) -> torch.Tensor:
        assert kind.time is not None
        return tensor.narrow(kind.time, -columns, tensor.shape[kind.time] + columns).clone()

    _change_columns(cache, -count, trimmed)


def join(cache: Any, other: Any) -> None:
    """Put the sequences of `other`, which has as many cached tokens, behind those of `cache`."""
    tensors = iter([tensor for _, _, tensor, _ in _tensors(other)])
    _change(cache, lambda tensor, kind: torch.cat((tensor, next(tensors)), kind.batch))


def _change(cache: Any, change: Change) -> None:
    for holder, key, tensor, kind in list(_tensors(cache)):
        holder[key] = change(tensor, kind)


def _change_columns(cache: Any, count: int, change: Callable[[torch.Tensor, _Kind, int], torch.Tensor]) -> None:
    """Let all sequences begin `count` tokens earlier, or later; a layer with a window has fewer columns to change."""
    holders = [(vars(cache), _SHARED), *((vars(layer), _KINDS) for layer in cache.layers)]
    for attributes, kinds in holders:
        columns = count
        if _WINDOW in attributes and _COUNT in attributes:
            widest, before = attributes[_WINDOW] - 1, attributes[_COUNT]
            attributes[_COUNT] = before + count
            columns = min(before + count, widest) - min(before, widest)
        for holder, key, tensor, kind in list(_held(attributes, kinds)):
            if kind.time is not None and columns:
                holder[key] = change(tensor, kind, columns)


_Held = tuple[dict[Any, Any], Any, torch.Tensor, _Kind]


def _tensors(cache: Any) -> Iterator[_Held]:
    """Every tensor, where it is held and under which key."""
    yield from _held(vars(cache), _SHARED)
    for layer in cache.layers:
        yield from _held(vars(layer), _KINDS)


def _held(holder: dict[str, Any], kinds: Mapping[str, _Kind]) -> Iterator[_Held]:
    for name, kind in kinds.items():
        value = holder.get(name)
        if isinstance(value, torch.Tensor):
            yield holder, name, value, kind
        elif isinstance(value, dict):
            yield from ((value, key, state, kind) for key, state in value.items() if state is not None)
