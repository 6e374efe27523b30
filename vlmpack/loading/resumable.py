"""Sources of samples: one part of a source, read from any position on; and checks of the states of loading."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
import torch
from PIL import Image
from torch.utils.data import IterableDataset, _utils

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
        starts at that place ever after, as data sets    sent to where it was before it was first read
        of `datasets` do: the same first sample
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._begin = self.state_dict()
        self._after_first: dict[str, Any] | None = None
        """The state of the source after its first sample from that place, until the next pass is compared with it."""

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the source's state: the place of the next sample."""
        return deepcopy(self._source.state_dict())

    def samples(self, state: dict[str, Any] | None, *, is_new_pass: bool) -> Iterator[Any]:
        """Read the remaining samples of a pass from a state of the source on; None: a new pass."""
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
        """A new pass of a source that was sent to a place in the pass before."""
        previous, self._after_first = self._after_first, None
        samples = whole_source(self._source)
        first = next(samples, END)
        if first is END or digest_of(self._source.state_dict()) == digest_of(previous):
            self._source.load_state_dict(deepcopy(self._begin))
            yield from whole_source(self._source)
            return
        yield first
        yield from samples


@runtime_checkable
class MapStyle(Protocol):
    """A data set whose samples can be had by their places: a list, a `datasets.Dataset`."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def has_numbers(source: object) -> bool:
    """Return whether samples can be had by their numbers, and the source has no state of its own to go by."""
    return isinstance(source, MapStyle) and not isinstance(source, IterableDataset | Resumable)


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


def other_data(fault: str) -> ConfigError:
    """Return the error where a state is of another source."""
    remedy = "give the data set of the run that is continued, read anew with the same samples"
    return ConfigError(f"the state is of another source: {fault}; {remedy}")


def whole_source(source: Iterable[Any]) -> Iterator[Any]:
    """All samples of a source.

    Data sets yield only their share in a worker process, and a `Part` is dealt from all of them: while the source is
    read, `get_worker_info` hides the worker from it.
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


# ---------------------------------------------------------------------- a part of a source


@dataclass(frozen=True)
class Mark:
    """A position in a part of a source from which reading can go on."""

    position: int
    """Samples of the source before it."""
    groups: int = 0
    """Groups of neighbors with one key that began before it; a sample without a key is a group."""
    key: str | None = None
    """Of the last sample before it."""
    source: dict[str, Any] | None = None
    """The state of a source that has one."""


@final
class Part:
    """The samples that one of several processes packs. Together, the parts of a source are all its samples, once.

    Of a streaming data set of `datasets`, a process opens file shards of its own, if their number divides by the parts.
    Of other sources, samples are dealt in turn: those with numbers are read only where they are needed, the others by
    all. With keys, neighbors of one key stay together.

    Args:
        source: all samples, the same in every process.
        index: of the part.
        parts: how many there are.
        key: of a sample's group; None: samples are dealt one by one.
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
        """Samples of a source whose samples have numbers; None: it has none."""
        self.mark = Mark(0)
        """After the last sample that was read, but for the state of the source."""

    def marked(self) -> Mark | None:
        """Return where reading can go on; None: the source can only be read from its start."""
        if self._place is not None:
            return replace(self.mark, source=self._place.state_dict())
        return self.mark if self.size is not None or not self.mark.position else None

    def samples(self, since: Mark | None = None, *, wanted: Collection[int] = (), read: int = 0) -> Iterator[Any]:
        """Read (position, sample) of this part to the end of the pass.

        Args:
            since: go on there; None: a new pass.
            wanted: positions below `read` of the samples that are read again.
            read: samples of the source that were read before: of these, the others are skipped.

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
        """Read all samples of the source from a mark on."""
        if self._place is not None:
            if self._whole is not self._source:
                self._source.set_epoch(self._whole.epoch)
            return self._place.samples(since and since.source, is_new_pass=not self.mark.position)
        if self.size is not None:
            return (sample_at(self._source, at) for at in range(self.mark.position, self.size))
        return whole_source(self._source)

    def _is_mine(self, sample: Any) -> bool:
        """Count a sample that was read, and return whether it is of this part."""
        key = None if self._key is None else self._key(sample)
        groups = self.mark.groups + (key is None or key != self.mark.key)
        self.mark = Mark(self.mark.position + 1, groups, key)
        return (groups - 1) % self._parts == self._index


# ---------------------------------------------------------------------- digests


def digest_of(value: Any) -> str:
    """Compute the digest of any value of plain data: 32 hexadecimal digits.

    Mappings count in any order and tuples as lists, as loaders hand them back. Of an image its size counts, and of what
    has no content that could be read, its type.
    """
    try:
        text = json.dumps(_sorted(value), default=_content)
    except (TypeError, ValueError, RecursionError):  # lists in themselves
        text = type(value).__qualname__
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _sorted(value: Any) -> Any:
    """Mappings as lists of pairs, whose names may be of any type."""
    if isinstance(value, Mapping):
        return {"pairs": sorted(([repr(name), _sorted(one)] for name, one in value.items()), key=itemgetter(0))}
    if not isinstance(value, list | tuple) or {*map(type, value)} <= {
        int,
        float,
        str,
    }:  # token ids
        return value
    return [*map(_sorted, value)]


def _content(value: Any) -> Any:
    """What JSON has no type for: [type, content]."""
    content: Any = None
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
        plain = value.detach().cpu().contiguous()
        content = [str(value.dtype), list(value.shape), _content(plain.reshape(-1).view(torch.uint8).numpy().tobytes())]
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        content = [str(value.dtype), list(value.shape), _content(value.tobytes())]
    elif isinstance(value, bytes | bytearray | memoryview):
        return ["bytes", hashlib.blake2b(value).hexdigest()]
    elif isinstance(value, set | frozenset):
        content = sorted(map(digest_of, value))
    elif isinstance(value, SampleError):
        content = [value.reason, value.detail]
    elif isinstance(value, Image.Image):
        content = [value.mode, value.size]
    elif isinstance(value, Path | np.generic):
        content = str(value)
    return [type(value).__qualname__, content]


# ---------------------------------------------------------------------- states

LOAD_ANOTHER = "load another state, or begin the epoch anew"
"""The remedy where a state is refused."""


def sealed(fields: Mapping[str, Any], *, of: str) -> dict[str, Any]:
    """Return a state of the fields: plain data, with a digest of it all and of whose state it is.

    A state inside it has a digest of its own, which stands for it.
    """
    own = {
        name: value["seal"] if isinstance(value, dict) and "seal" in value else value for name, value in fields.items()
    }
    return {**fields, "seal": digest_of([of, own])}


def check_seal(state: Mapping[str, Any], *, of: str) -> None:
    """Refuse anything but a state of that class whose fields are what they were when it was made.

    Raises:
        ConfigError: it is something else.
    """
    fields = {name: value for name, value in state.items() if name != "seal"} if isinstance(state, Mapping) else {}
    if not fields or state.get("seal") != sealed(fields, of=of)["seal"]:
        raise ConfigError(f"this is no state of a {of}, or one that was changed since it was made; {LOAD_ANOTHER}")
