"""Sources of samples: read one part of a source from any position on, and check saved states."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Protocol, final, runtime_checkable

from torch.utils.data import IterableDataset, _utils

from vlmpack.data.digest import content_digest
from vlmpack.data.readers import MapStyle
from vlmpack.errors import ConfigError, SampleError

END = object()
"""Marks the end of the samples."""


@runtime_checkable
class Resumable(Protocol):
    """A source with a state: an iterable data set of `datasets`, or a custom one."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@final
class Place:
    """Reads pass after pass of a source, the first one possibly from a loaded position.

    The source may count its passes, so each pass begins by iterating over the source again. After a pass that began at
    a loaded position, the next pass shows which of three ways the source behaves in:

        yields the next pass                          nothing to do
        was sent to its own end, so it yields         iterate once more, and it yields the next pass
        nothing
        restarts at the loaded position every time,   send it to the position it had before it was first read
        as data sets of `datasets` do (recognized
        by the state after the first sample)
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._begin = self.state_dict()
        self._after_first: dict[str, Any] | None = None
        """State of the source after the first sample of a pass from a loaded position, until the next pass begins."""

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the source's state: the position of the next sample."""
        return deepcopy(self._source.state_dict())

    def samples(self, state: dict[str, Any] | None, *, is_new_pass: bool) -> Iterator[Any]:
        """Yield the remaining samples of a pass from a state of the source; None: a new pass."""
        if state is None:
            yield from whole_source(self._source) if self._after_first is None else self._anew()
            return
        self._source.load_state_dict(deepcopy(state))
        samples = whole_source(self._source)
        first = next(samples, END)
        self._after_first = self.state_dict()
        if first is not END:
            yield first
            yield from samples
        elif is_new_pass:
            yield from self._anew()

    def _anew(self) -> Iterator[Any]:
        """Yield a new pass after one that began at a loaded position."""
        previous, self._after_first = self._after_first, None
        samples = whole_source(self._source)
        first = next(samples, END)
        if first is END or content_digest(self._source.state_dict()) == content_digest(previous):
            self._source.load_state_dict(deepcopy(self._begin))
            yield from whole_source(self._source)
            return
        yield first
        yield from samples


def has_numbers(source: object) -> bool:
    """Return whether a source's samples can be read by index and it has no state to resume from."""
    return isinstance(source, MapStyle) and not isinstance(source, IterableDataset | Resumable)


def sample_at(dataset: Any, place: int) -> Any:
    """Return a sample, or the SampleError if it cannot be read, which the collator then raises or skips."""
    try:
        return dataset[place]
    except SampleError as error:
        return error


def check_samples(dataset: object) -> None:
    """Check that the argument is one data set, rather than several or a path (whose letters would become samples).

    Raises:
        ConfigError: the argument is a path or a mapping.
    """
    if isinstance(dataset, str | bytes | os.PathLike):
        raise ConfigError(f"{os.fsdecode(dataset)!r:.99} is a path: open it with vlmpack.data.open_dataset(path)")
    if isinstance(dataset, Mapping):
        raise ConfigError(
            f"expected a data set, got a {type(dataset).__name__} with the keys "
            f"{', '.join(map(repr, list(dataset)[:8]))}; if they are splits, give one of them"
        )


def other_data(fault: str) -> ConfigError:
    """Return the error for a state that belongs to another source."""
    remedy = "give the data set of the run to continue, with the same samples"
    return ConfigError(f"the state is of another source: {fault}; {remedy}")


def whole_source(source: Iterable[Any]) -> Iterator[Any]:
    """Yield all samples of a source.

    In a worker process, data sets yield only their share, but a `SourcePart` needs all samples. So `get_worker_info`
    hides the worker from the source while it is read.
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
    """Make `get_worker_info` return None, in this process only. PyTorch has no public way to do this."""
    before = _utils.worker._worker_info
    _utils.worker._worker_info = None
    try:
        yield
    finally:
        _utils.worker._worker_info = before


# ---------------------------------------------------------------------- a part of a source


@dataclass(frozen=True)
class Mark:
    """A position in a source from which reading can continue."""

    position: int
    """Number of samples of the source before it."""
    groups: int = 0
    """Number of groups (neighbors with one key) that began before it; a sample without a key is its own group."""
    key: str | None = None
    """Key of the last sample before it."""
    source: dict[str, Any] | None = None
    """State of the source, if it has one."""


@final
class SourcePart:
    """The samples that one of several processes packs. Together, the parts contain every sample exactly once.

    If the source is a streaming data set of `datasets` whose number of shards is divisible by the number of parts, each
    process opens only its own file shards. Otherwise samples are distributed in turn, and neighbors with one key stay
    together. Each process then reads all samples, unless they can be read by index and there are no keys.

    Args:
        source: all samples, the same in every process.
        index: index of the part.
        parts: number of parts.
        key: function that returns the key of a sample's group; None: samples are distributed one by one.
    """

    def __init__(self, source: Any, index: int, parts: int, key: Callable[[Any], str | None] | None) -> None:
        self.index, self.parts, self._whole, self._source = index, parts, source, source
        hub: Any = sys.modules.get("datasets")
        if hub is not None and isinstance(source, hub.IterableDataset) and source.num_shards % parts == 0 and parts > 1:
            from datasets.distributed import split_dataset_by_node

            self._source = split_dataset_by_node(source, rank=index, world_size=parts)
            index, parts = 0, 1
        self._index, self._parts = index, parts
        self._key = None if parts == 1 else key
        self._place = Place(self._source) if isinstance(source, Resumable) else None
        self.size = len(source) if has_numbers(source) else None  # pyright: ignore
        """Number of samples of a source that can be read by index; None: it cannot."""
        self.mark = Mark(0)
        """Position after the last sample read, without the state of the source."""

    def marked(self) -> Mark | None:
        """Return the position where reading can continue; None: the source can only be read from its start."""
        if self._place is not None:
            return replace(self.mark, source=self._place.state_dict())
        return self.mark if self.size is not None or not self.mark.position else None

    def samples(self, since: Mark | None = None, *, wanted: Collection[int] = (), read: int = 0) -> Iterator[Any]:
        """Yield (position, sample) of this part until the end of the pass.

        Args:
            since: position to continue from; None: a new pass.
            wanted: positions below `read` whose samples are read again.
            read: number of samples of the source read before; those not in `wanted` are skipped.

        Raises:
            ConfigError: the source ends before `read`.
        """
        if self.size is not None and self._key is None:
            first = read + (self._index - read) % self._parts
            for at in (*sorted(wanted), *range(first, self.size, self._parts)):
                self.mark = Mark(max(at + 1, read))
                yield at, sample_at(self._source, at)
            return
        self.mark = since or Mark(0)
        for sample in self._from(since):
            at = self.mark.position
            if self._is_mine(sample) and (at >= read or at in wanted):
                yield at, sample
        if self.mark.position < read:
            raise other_data(f"it ends after {self.mark.position} samples, and {read} were read before")

    def _from(self, since: Mark | None) -> Iterator[Any]:
        """Return all samples of the source from a mark on."""
        if self._place is not None:
            if self._whole is not self._source:
                self._source.set_epoch(self._whole.epoch)
            return self._place.samples(since and since.source, is_new_pass=not self.mark.position)
        if self.size is not None:
            return (sample_at(self._source, at) for at in range(self.mark.position, self.size))
        return whole_source(self._source)

    def _is_mine(self, sample: Any) -> bool:
        """Count a sample that was read, and return whether it belongs to this part."""
        key = None if self._key is None else self._key(sample)
        groups = self.mark.groups + (key is None or key != self.mark.key)
        self.mark = Mark(self.mark.position + 1, groups, key)
        return (groups - 1) % self._parts == self._index


# ---------------------------------------------------------------------- states

LOAD_ANOTHER = "load another state, or restart the epoch"
"""What to do when a state is refused."""


def sealed(fields: Mapping[str, Any], *, of: str) -> dict[str, Any]:
    """Return a state: the fields plus a digest of all of them and of the owner's class name."""
    return {**fields, "seal": content_digest([of, fields])}


def check_seal(state: Mapping[str, Any], *, of: str) -> None:
    """Check that a state belongs to that class and that its fields were not changed.

    Raises:
        ConfigError: it is something else.
    """
    fields = {name: value for name, value in state.items() if name != "seal"} if isinstance(state, Mapping) else {}
    if not fields or state.get("seal") != sealed(fields, of=of)["seal"]:
        raise ConfigError(f"this is not the state of a {of}, or it was changed; {LOAD_ANOTHER}")
