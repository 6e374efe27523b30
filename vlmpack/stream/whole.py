"""Read a source whole, in a DataLoader worker too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import _utils

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
