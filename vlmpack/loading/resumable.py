"""Sources with a state of their own, continued where they stopped; sources that every worker reads whole."""

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
    """A source with a state: an iterable data set of `datasets`, or of one's own."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@final
class Place:
    """Pass after pass of a source, the first of them from a place that was loaded.

    The source may count its passes, so each begins by the source's own means. Only a source that was sent to a place is
    compared in the pass after that. There are three kinds:

        yields the next pass                             nothing to do
        was sent to its own end, so it yields nothing    read once more, it yields the next pass
        starts at that place ever after, as data sets    sent to where it was when the stream was made
        of `datasets` do: the same first sample
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._begin = deepcopy(source.state_dict())
        self._pending: dict[str, Any] | None = None
        """The place to which the source will be sent before its next sample."""
        self._after_first: dict[str, Any] | None = None
        """The state of the source after its first sample from that place, until the next pass is compared with it."""

    def state_dict(self) -> dict[str, Any]:
        """The place of the source, or the one to which it will be sent: `datasets` has only the place of its reader."""
        return self._source.state_dict() if self._pending is None else self._pending

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Send the source to a place before its next sample; None: it stays where it is."""
        self._pending = state

    def samples(self, *, is_new_pass: bool) -> Iterator[Any]:
        """The remaining samples of the current pass, or a new pass."""
        if self._pending is None:
            yield from whole_source(self._source) if self._after_first is None else self._anew()
            return
        self._source.load_state_dict(self._pending)
        samples = whole_source(self._source)
        first = next(samples, END)
        self._pending, self._after_first = None, deepcopy(self._source.state_dict())
        if first is not END:
            yield first
            yield from samples
        elif is_new_pass:
            yield from self._anew()

    def _anew(self) -> Iterator[Any]:
        """A new pass of a source that was sent to a place in the pass before."""
        previous, self._after_first = self._after_first, None
        samples = whole_source(self._source)
        first = next(samples, END)
        if first is END or _equal_states(self._source.state_dict(), previous):
            self._source.load_state_dict(self._begin)
            yield from whole_source(self._source)
            return
        yield first
        yield from samples


def _equal_states(a: Any, b: Any) -> bool:
    """Return whether two states are equal, whatever arrays or tensors are in them."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal_states(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal_states, a, b))
    if isinstance(a, np.ndarray | torch.Tensor):
        return type(a) is type(b) and a.shape == b.shape and bool((a == b).all())
    return type(a) is type(b) and bool(a == b)


@runtime_checkable
class MapStyle(Protocol):
    """A data set whose samples can be had by their places: a list, a `datasets.Dataset`."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def sample_at(dataset: Any, place: int) -> Any:
    """Return a sample, or the SampleError of one that cannot be read: collators refuse it under its own name."""
    try:
        return dataset[place]
    except SampleError as error:
        return error


def check_samples(dataset: object) -> None:
    """Raise unless the argument is one data set: not several, and no path, of whose letters samples would be made.

    Raises:
        ConfigError: it is a path, or a mapping.
    """
    if isinstance(dataset, str | bytes | os.PathLike):
        raise ConfigError(f"{os.fsdecode(dataset)!r:.99} is a path: open it with vlmpack.data.open_dataset(path)")
    if isinstance(dataset, Mapping):
        raise ConfigError(
            f"a data set is needed, not a {type(dataset).__name__} with the keys "
            f"{', '.join(map(repr, list(dataset)[:8]))}; if they are splits, give one of them"
        )


def whole_source(source: Iterable[Any]) -> Iterator[Any]:
    """All samples of a source.

    Data sets yield only their share in a worker process. Every worker packs alike, so each needs all samples: while the
    source is read, `get_worker_info` hides the worker from it.
    """
    with _no_worker():
        samples = iter(source)
    while True:
        with _no_worker():
            sample = next(samples, END)
        if sample is END:
            return
        yield sample


@contextmanager
def _no_worker() -> Iterator[None]:
    """Make `get_worker_info` return None, in this process alone. PyTorch has no public way to do it."""
    before = _utils.worker._worker_info
    _utils.worker._worker_info = None
    try:
        yield
    finally:
        _utils.worker._worker_info = before
