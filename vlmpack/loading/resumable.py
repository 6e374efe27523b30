"""A source that knows where it is: told to go on there, and afterwards to begin anew."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
import torch
from torch.utils.data import _utils

from vlmpack.errors import ConfigError, SampleError

END = object()
"""After the last sample."""


@runtime_checkable
class Resumable(Protocol):
    """A source that knows where it is: an iterable data set of `datasets`, or of one's own."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@final
class Place:
    """Pass after pass of a source, the first of them from a place that was loaded.

    The source may count its passes, so it is left to begin each by itself wherever it does: only what was told a place
    is watched in the pass after that. There are three kinds:

        gives the next pass                              nothing to do
        was told its own end, so it gives nothing        asked once more, it gives the next pass
        starts where it was told ever after, as data     told where it was when the stream was made
        sets of `datasets` do: the same first sample
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._begin = deepcopy(source.state_dict())
        self._to_tell: dict[str, Any] | None = None
        self._after_first: dict[str, Any] | None = None
        """Where the source was after the first sample from the place that it was told, while it is watched."""

    def state_dict(self) -> dict[str, Any]:
        """Where the source is, or will go before its next sample: `datasets` tells only where it has been."""
        return self._source.state_dict() if self._to_tell is None else self._to_tell

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Where the source will go when it is next asked for a sample; None: it stays where it is."""
        self._to_tell = state

    def samples(self, *, is_new_pass: bool) -> Iterator[Any]:
        """The remaining samples of the current pass, or a new pass."""
        if self._to_tell is None:
            yield from whole_source(self._source) if self._after_first is None else self._anew()
            return
        self._source.load_state_dict(self._to_tell)
        samples = whole_source(self._source)
        first = next(samples, END)
        self._to_tell, self._after_first = None, deepcopy(self._source.state_dict())
        if first is not END:
            yield first
            yield from samples
        elif is_new_pass:
            yield from self._anew()

    def _anew(self) -> Iterator[Any]:
        """A new pass of a source that was told a place in the one before."""
        told, self._after_first = self._after_first, None
        samples = whole_source(self._source)
        first = next(samples, END)
        if first is END or _equal_states(self._source.state_dict(), told):
            self._source.load_state_dict(self._begin)
            yield from whole_source(self._source)
            return
        yield first
        yield from samples


def _equal_states(one: Any, other: Any) -> bool:
    """Return whether two states are equal, whatever arrays or tensors are in them."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal_states(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal_states, one, other))
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | torch.Tensor):
        return one.shape == other.shape and bool((one == other).all())
    return bool(one == other)


@runtime_checkable
class MapStyle(Protocol):
    """A data set whose samples can be had by their places: a list, a `datasets.Dataset`."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def sample_at(dataset: Any, place: int) -> Any:
    """One sample, or why the data set has none to give: collators refuse it under its own name."""
    try:
        return dataset[place]
    except SampleError as error:
        return error


def check_samples(dataset: object) -> None:
    """Raise unless one data set was given: not several, and no path, of whose letters samples would be made.

    Raises:
        ConfigError: it is a path, or a mapping; says what to give.
    """
    if isinstance(dataset, str | bytes | os.PathLike):
        raise ConfigError(f"{os.fsdecode(dataset)!r:.99} is a path: open it with vlmpack.data.open_dataset(path)")
    if isinstance(dataset, Mapping):
        raise ConfigError(
            f"a data set is needed, not a {type(dataset).__name__} with the keys "
            f"{', '.join(map(repr, list(dataset)[:8]))}; if they are splits, give one of them"
        )


_END = object()


def whole_source(source: Iterable[Any]) -> Iterator[Any]:
    """All samples of a source.

    Data sets that find themselves in a worker give out their share only. Every worker packs alike, so each needs all
    samples: while the source is asked for one, it does not see the worker.
    """
    with _no_worker():
        samples = iter(source)
    while True:
        with _no_worker():
            sample = next(samples, _END)
        if sample is _END:
            return
        yield sample


@contextmanager
def _no_worker() -> Iterator[None]:
    """`get_worker_info` says None, in this process alone. PyTorch has no public way to make it."""
    before = _utils.worker._worker_info
    _utils.worker._worker_info = None
    try:
        yield
    finally:
        _utils.worker._worker_info = before
