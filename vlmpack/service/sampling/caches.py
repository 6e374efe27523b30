"""Let sequences join and leave the key-value caches of transformers.

A cache holds a batch of sequences of different lengths, padded on the left; the attention mask hides the padding:

    . . a a a        b b b b b       join     . . a a a
                                              b b b b b        leave (the second)     a a a

A cache layer holds tensors along the sequence (keys, values, the keys of sparse attention's indexer) and states of
whole sequences (convolution and recurrent states of gated delta layers, the last ids of n-gram layers). A
sliding-window layer holds the last W - 1 tokens, and the total count of tokens, which the masks are made from:

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
    """Layout of one kind of cache tensor."""

    batch: int
    """Dimension of the sequences."""
    time: int | None
    """Dimension of the tokens, counted from the last; None: a state of a whole sequence."""


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
"""Tensors of the cache itself. Older versions of transformers keep the positions of sparse attention here."""

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
"""Cache layer classes that hold no tensors besides `_KINDS`."""

_WINDOW, _COUNT = "sliding_window", "cumulative_length"
"""Attributes of sliding-window layers: the window's width, and the number of tokens seen."""

Change = Callable[[torch.Tensor, _Kind], torch.Tensor]


def check_cache(cache: Any) -> None:
    """Check that sequences can join and leave this cache.

    Raises:
        FamilyError: the cache has an unsupported class, which the message names.
    """
    layers = getattr(cache, "layers", None)
    held = {type(cache).__name__} if layers is None else {type(layer).__name__ for layer in layers} - _LAYERS
    if held:
        names = ", ".join(sorted(held))
        raise FamilyError(f"this model caches in {names}, whose sequences cannot leave one by one; sample with vLLM")


def selected(cache: Any, rows: Sequence[int]) -> Any:
    """Return a new, independent cache with the given sequences; a sequence may be repeated."""
    tensors = {id(tensor): tensor for _, _, tensor, _ in _tensors(cache)}
    taken = copy.deepcopy(cache, {**tensors})  # copy everything except the tensors
    select(taken, torch.tensor(rows))
    return taken


def select(cache: Any, rows: torch.Tensor) -> None:
    """Keep the given sequences, int64 [n], in this order; a sequence may be repeated."""
    _change(cache, lambda tensor, kind: tensor.index_select(kind.batch, rows.to(tensor.device)))


def shift(cache: Any, count: int) -> None:
    """Insert `count` padding tokens before all sequences; below 0: remove tokens, which must be padding in every one.

    A sliding-window layer may change by fewer tokens, because it holds at most W - 1 of them.
    """
    for attributes, kinds in _holders(cache):
        columns = count
        if _WINDOW in attributes and _COUNT in attributes:
            widest, before = attributes[_WINDOW] - 1, attributes[_COUNT]
            attributes[_COUNT] = before + count
            columns = min(before + count, widest) - min(before, widest)
        for holder, key, tensor, kind in list(_held(attributes, kinds)):
            if kind.time is not None and columns:
                holder[key] = F.pad(tensor, (0, 0) * (-1 - kind.time) + (columns, 0))


def join(cache: Any, other: Any) -> None:
    """Append the sequences of `other`, which must have the same number of cached tokens, to `cache`."""
    tensors = iter([tensor for _, _, tensor, _ in _tensors(other)])
    _change(cache, lambda tensor, kind: torch.cat((tensor, next(tensors)), kind.batch))


def _change(cache: Any, change: Change) -> None:
    for holder, key, tensor, kind in list(_tensors(cache)):
        holder[key] = change(tensor, kind)


_Held = tuple[dict[Any, Any], Any, torch.Tensor, _Kind]


def _holders(cache: Any) -> list[tuple[dict[str, Any], Mapping[str, _Kind]]]:
    """Return the attributes of the cache and of its layers, each with the tensors that may be there."""
    return [(vars(cache), _SHARED), *((vars(layer), _KINDS) for layer in cache.layers)]


def _tensors(cache: Any) -> Iterator[_Held]:
    """Yield every tensor with its holder and key."""
    for attributes, kinds in _holders(cache):
        yield from _held(attributes, kinds)


def _held(holder: dict[str, Any], kinds: Mapping[str, _Kind]) -> Iterator[_Held]:
    for name, kind in kinds.items():
        value = holder.get(name)
        if isinstance(value, torch.Tensor):
            yield holder, name, value, kind
        elif isinstance(value, dict):
            yield from ((value, key, state, kind) for key, state in value.items() if state is not None)
