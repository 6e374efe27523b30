"""What it takes to continue: sources with a state of their own, sources that are read whole, and checks of states."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
import torch
from PIL import Image
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


# ---------------------------------------------------------------------- digests

DEPTH = 99
"""Lists in lists that a digest looks into."""


def digest_of(value: Any) -> str:
    """Compute the digest of any value of plain data: 32 hexadecimal digits.

    Mappings count in any order and tuples as lists, as loaders hand them back. Of an image its size counts, and of what
    has no content that could be read, its type.
    """
    content = hashlib.blake2b(digest_size=16)
    _update(content, value, 0)
    return content.hexdigest()


def _update(content: Any, value: Any, depth: int) -> None:
    if isinstance(value, Mapping | list | tuple | set | frozenset) and depth < DEPTH:
        kind = "map" if isinstance(value, Mapping) else "set" if isinstance(value, set | frozenset) else "list"
        content.update(f"{kind} {len(value)}:".encode())
        for inner in _in_order(value):
            _update(content, inner, depth + 1)
    else:
        leaf = _leaf(value)
        content.update(f"{len(leaf)}:".encode() + leaf)


def _in_order(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return sorted(value.items(), key=lambda item: repr(item[0]))
    return value if isinstance(value, list | tuple) else sorted(value, key=repr)


def _leaf(value: Any) -> bytes:
    """A single value as bytes."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
        values = value.detach().cpu().contiguous().reshape(-1)
        return f"{value.dtype} {tuple(value.shape)}".encode() + values.view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"{value.dtype} {value.shape}".encode() + value.tobytes()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, SampleError):
        return f"{value.reason} {value.detail}".encode(errors="surrogatepass")
    if isinstance(value, Image.Image):
        return f"{value.mode} {value.size}".encode()
    if value is None or isinstance(value, str | bool | int | float | Path | np.generic):
        return f"{type(value).__name__} {value}".encode(errors="surrogatepass")
    return type(value).__qualname__.encode()


@final
class SampleDigests:
    """Digests of the samples of one state after the other, computed once for each sample while it stays."""

    def __init__(self) -> None:
        self._computed: dict[int, tuple[Any, str]] = {}

    def of(self, samples: Sequence[Any]) -> list[str]:
        """The digest of each."""
        computed = self._computed
        self._computed = {id(sample): computed.get(id(sample)) or (sample, digest_of(sample)) for sample in samples}
        return [self._computed[id(sample)][1] for sample in samples]

    def __getstate__(self) -> dict[str, Any]:
        return {"_computed": {}}


# ---------------------------------------------------------------------- states

SEAL = "seal"
"""Field of a state: a digest of the others."""
LOAD_ANOTHER = "load another state, or begin the epoch anew"
"""The remedy where a state is refused."""


def check_seal(state: Mapping[str, Any], seal: Callable[[Mapping[str, Any]], str], *, of: str) -> None:
    """Refuse anything but a state whose fields are what they were when it was made.

    Args:
        state: as it was loaded.
        seal: computes the digest of its fields.
        of: whose state it is.

    Raises:
        ConfigError: it is something else.
    """
    try:
        is_whole = state[SEAL] == seal(state)
    except (LookupError, TypeError, ValueError, AttributeError):
        is_whole = False
    if not is_whole:
        raise ConfigError(f"this is no state of a {of}, or one that was changed since it was made; {LOAD_ANOTHER}")
