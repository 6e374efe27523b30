"""What counts as a data set, and what does not although it can be iterated over."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from vlmpack.errors import ConfigError, SampleError


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
        raise ConfigError(f"{os.fsdecode(dataset)!r:.99} is a path: open it with vlmpack.open_dataset(path)")
    if isinstance(dataset, Mapping):
        raise ConfigError(
            f"a data set is needed, not a {type(dataset).__name__} with the keys "
            f"{', '.join(map(repr, list(dataset)[:8]))}; if they are splits, give one of them"
        )
