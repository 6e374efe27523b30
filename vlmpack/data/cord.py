"""CORD v2 from anywhere, as one map-style dataset.

    hub id   ──┐
    folder   ──┼▶ sources.find_rows ──▶ rows ──▶ CordDataset ──▶ {"image": RGB, "ground_truth": JSON}
    parquet  ──┘

The image is decoded here, never by `datasets`: turned upright by its EXIF tag exactly once, put on white where it is
transparent, made RGB. The ground truth is checked when a record is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import index as whole
from typing import Any

from vlmpack.data.archive import SPLITS
from vlmpack.data.images import ImageError, load_image
from vlmpack.data.json_tokens import parse_of
from vlmpack.data.readers import Rows, Source, complete_row, find_rows
from vlmpack.errors import ConfigError, SampleError


def load_cord(source: Source, *, split: str = "train", num: int | None = None) -> CordDataset:
    """Open receipts as a map-style dataset: `len()`, `[i] -> {"image": RGB PIL image, "ground_truth": JSON string}`.

    Args:
        source: a hub id, a local folder, one parquet file or several.
        split: `"train"`, `"validation"` or `"test"`.
        num: the first so many records; None: all.

    Raises:
        ConfigError: the source, split, columns or number do not fit what is there; or an extra is missing.
    """
    if split not in SPLITS:
        raise ConfigError(f"no split {split!r}; CORD has {', '.join(SPLITS)} (its files say 'dev' for validation)")
    rows, name = find_rows(source, split)
    if num is not None and not 0 <= num <= len(rows):
        raise ConfigError(f"num is {num}, but {name} holds {len(rows)} records in {split!r}; ask for at most that many")
    return CordDataset(rows=rows, name=name, num=num)


@dataclass(frozen=True, kw_only=True)
class CordDataset:
    """Rows of any source, made equal. Raises `SampleError` for a record that cannot be used, naming its index."""

    rows: Rows
    """The raw records."""
    name: str
    """Where they come from, for messages."""
    num: int | None = None
    """Use the first so many; None: all."""

    def __len__(self) -> int:
        return len(self.rows) if self.num is None else self.num

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"record {index} of {len(self)} in {self.name}")
        at = whole(index) % len(self)
        row = complete_row(self.rows[at], self.name, index=at)
        parse_of(row["ground_truth"], index=at)
        try:
            image = load_image(row["image"])
        except ImageError as error:
            raise SampleError(error.detail, index=at, reason=error.reason) from error
        return {"image": image, "ground_truth": row["ground_truth"]}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))
