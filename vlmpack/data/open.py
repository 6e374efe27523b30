"""Open any fine-tuning dataset as samples for `VLMCollator`. Nothing is decoded; only the index stays in memory.

    file of JSON, JSONL    ─┐           messages, conversations, prompt + completion, input_ids ──▶ unchanged
    parquet, saved, hub id ─┼─▶ row ──┼ any other shape, any names by columns= (formats.py)     ──▶ messages
    tar shards             ─┘

Relative paths of images, videos and audio start at the folder of the file that names them, or at `image_root`.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, islice
from operator import index as as_int
from pathlib import Path
from typing import Any, get_args, overload

import numpy as np
from torch.utils.data import Dataset

from vlmpack.data.formats import (
    CHAT,
    MEDIA,
    TURNS,
    Branches,
    ColumnMap,
    Columns,
    branch_turns,
    described_in,
    from_folder,
    id_column,
    num_branches,
    read_columns,
    sample_id_of,
)
from vlmpack.data.messages import no_columns
from vlmpack.data.readers import JsonRows, MapStyle, Source, StoredRows, find_rows, sample_at
from vlmpack.errors import ConfigError, SampleError, check_choice

_LOOKED_AT = 100
"""Number of leading rows in a JSON file to search for a column that is to be renamed."""


def open_dataset(
    source: Source,
    *,
    split: str = "train",
    num: int | None = None,
    image_root: str | Path | None = None,
    branches: Branches = "conversation",
    columns: Columns | None = None,
) -> OpenDataset:
    """Open samples as a map-style dataset: `len(dataset)`, and `dataset[i]` -> a mapping for `VLMCollator`.

    Args:
        source: a JSON, JSONL, parquet or tar file; a list or a folder of such files; a folder written by
            `save_to_disk`; a hub id; or a LLaMA-Factory dataset, `data/dataset_info.json#name`.
        split: the split to open, if the source has several. A file given by name is a single split, whatever its
            name: for a file, any split but "train" is refused.
        num: use only the first `num` samples; None: all of them.
        image_root: folder where relative paths of images, videos and audio start; None: the folder of the file that
            names them.
        branches: "conversation" makes each record one sample. "turns" makes one sample of each question, with its
            answer and the record's images (`branch_turns`). "answers" makes one sample of each answer, with everything
            before it. `num` counts these samples. To count them, all conversations are read once.
        columns: maps columns of the dataset to the names that vlmpack reads, such as `{"question": "query", "answer":
            "response"}`. Also accepts the same as JSON text (ms-swift's `--columns`), or the path of a LLaMA-Factory
            `dataset_info.json` that describes the source. If the map renames `chosen`, rejected answers are left out.
            None: the columns have known names.

    Raises:
        ConfigError: the source, split or number do not fit the stored data; the source cannot be read or holds no
            samples; `image_root` is not a folder; there are no questions to separate; a column in `columns` is missing
            or maps to a name that nothing reads; or an optional dependency is missing.
    """
    check_choice("branches", branches, get_args(Branches))
    described = described_in(source)
    if described is not None and columns is not None:
        raise ConfigError(f"{source} describes its own columns; leave columns= out")
    if described is not None:
        source, split, named = described.source, described.split or split, described.columns
    else:
        named = ColumnMap() if columns is None else read_columns(columns, source)
    root = named.folder if image_root is None else Path(image_root).expanduser().absolute()
    if root is not None and not root.is_dir():
        raise ConfigError(f"image_root={str(image_root)!r} is not a folder; give the root of the images' paths")
    files, folders = zip(*find_rows(source, split), strict=True)
    name = os.fspath(source) if isinstance(source, str | os.PathLike) else f"{len(source)} files"
    folders = folders if root is None else (root,) * len(files)
    dataset = OpenDataset(files=files, folders=folders, name=name, columns=named)
    _check_first_rows(dataset)
    first_turns = None if branches == "conversation" else _first_turns(dataset, branches)
    return replace(dataset, branches=branches, first_turns=first_turns, num=num)


class SampleDataset(Dataset[Any]):
    """A map-style dataset of samples. A batch of them holds an error in place of each unreadable sample."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of a batch for a DataLoader. An unreadable row becomes an error, which collators skip."""
        return [sample_at(self, index) for index in indices]


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenDataset(SampleDataset):
    """Stored rows that become samples when indexed. Cheap to send to a worker process.

    Raises:
        ConfigError: the source holds fewer samples than `num`.
    """

    files: tuple[MapStyle, ...]
    """The sources of the rows, in order."""
    folders: tuple[Path | None, ...]
    """For each file, the folder where relative paths in its rows start; None: the working directory."""
    name: str
    """Name of the source, for messages."""
    num: int | None = None
    """Use only the first `num` samples; None: all."""
    columns: ColumnMap = field(default_factory=ColumnMap)
    """How columns are renamed."""
    branches: Branches = "conversation"
    """What one sample is: a conversation, a question with its answer, or an answer with everything before it."""
    first_turns: np.ndarray | None = None
    """int64 [rows + 1]: index of each row's first sample, if a row can hold several; None: each row is one sample."""

    def __post_init__(self) -> None:
        if self.num is not None and not 0 <= self.num <= (total := len(replace(self, num=None))):
            raise ConfigError(f"num is {self.num}, but {self.name} holds {total}; take at most that many")

    def __len__(self) -> int:
        if self.num is not None:
            return self.num
        return self._starts[-1] if self.first_turns is None else int(self.first_turns[-1])

    @cached_property
    def _starts(self) -> list[int]:
        """Index of each file's first row, then the total number of rows. Cached, as there may be many files."""
        return [0, *accumulate(map(len, self.files))]

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        """Return a sample, or a list of samples. A sample without an `id` or `sample_id` gets its index as its id.

        Raises:
            IndexError: there is no such sample.
            TypeError: the index is not an integer (a column name, for example).
            SampleError: the row cannot be read.
        """
        if isinstance(index, slice):
            return [self._sample(at) for at in range(len(self))[index]]
        try:
            index = as_int(index)
        except TypeError:
            fault = f"index samples by position, dataset[0] or dataset[0:2], not by {index!r}; for a column:"
            raise TypeError(f"{fault} [sample['id'] for sample in dataset]") from None
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self.name}")
        return self._sample(index % len(self))

    def _sample(self, at: int) -> dict[str, Any]:
        if self.first_turns is None:
            sample = self.row(at)
        else:
            record = int(np.searchsorted(self.first_turns, at, side="right")) - 1
            branches = branch_turns(self.row(record, index=at), branches=self.branches)
            turn = at - int(self.first_turns[record])
            if turn >= len(branches):
                message = f"its record {record} had more questions when it was opened; open the dataset again"
                raise SampleError(message, index=at, reason="row_unreadable")
            sample = branches[turn]
        return {**sample, "id": at} if id_column(sample) is None else sample

    def row(self, at: int, *, index: int | None = None) -> dict[str, Any]:
        """Return a row with its columns renamed and its relative paths resolved.

        Args:
            at: index among all rows.
            index: index of the sample that errors name; None: same as `at`.

        Raises:
            SampleError: the row cannot be read.
        """
        file = bisect_right(self._starts, at) - 1
        folder, stored = self.folders[file], dict[str, Any]()
        try:
            stored = self.files[file][at - self._starts[file]]
            row = self.columns.apply(stored)
            return row if folder is None else from_folder(row, folder)
        except SampleError as error:
            own_id = sample_id_of({self.columns.names.get(name, name): value for name, value in stored.items()})
            raise error.of_sample(at if index is None else index, own_id) from error
        except RecursionError as error:
            fault = "it is nested too deeply to be read; give lists and mappings of a few levels"
            raise SampleError(fault, "row_unreadable", index=at if index is None else index) from error

    def __repr__(self) -> str:
        return f"OpenDataset({len(self)} samples of {self.name})"


# ---------------------------------------------------------------------- checks of the rows


def _check_first_rows(dataset: OpenDataset) -> None:
    """Read the first row of each file.

    Raises:
        ConfigError: a file holds no samples or none in a known format, its first row cannot be read, or a column that
            is to be renamed is missing. The first row stands for all rows: if it cannot be read, the names or the
            format are more often at fault than that row.
    """
    if not len(dataset):
        raise ConfigError(f"{dataset.name} holds no samples")
    names = dataset.columns.names
    for rows, at in zip(dataset.files, dataset._starts, strict=False):
        name = str(rows.path) if isinstance(rows, JsonRows) else dataset.name
        known = _columns(rows) if dataset.columns.required else ()
        if absent := [column for column in dataset.columns.required if column not in known]:
            raise ConfigError(
                f"{name} has no column {' and '.join(map(repr, absent))}, which columns= reads as "
                f"{' and '.join(map(names.__getitem__, absent))}; it has {', '.join(map(str, known))}"
            )
        try:
            first = dataset.row(at)
        except SampleError as error:
            raise ConfigError(f"the first sample of {name} cannot be read: {error.detail}{_hint(rows)}") from error
        if set(first).isdisjoint(CHAT):
            raise ConfigError(f"of {name}, {no_columns(first).detail}{_hint(rows) if len(rows) == 1 else ''}")


def _hint(rows: MapStyle) -> str:
    """Suggest a remedy if a JSON file begins like an object that holds a list: the samples may be under its key."""
    if not isinstance(rows, JsonRows):
        return ""
    with rows.path.open("rb") as file:
        key = re.match(rb'\s*\{\s*"([^"]+)"\s*:\s*\[', file.read(256))
    if key is None or key[1].decode(errors="replace") in TURNS:  # an ordinary line of turns
        return ""
    return f". If the samples are the list under its key {key[1].decode(errors='replace')!r}, write that list alone"


def _columns(rows: MapStyle) -> Collection[str]:
    """Return the columns of a table, or the columns of the first rows of any other source."""
    if isinstance(rows, StoredRows):
        return rows.columns
    return dict.fromkeys(name for row in islice(_each(rows), _LOOKED_AT) for name in row)


def _each(rows: MapStyle) -> Iterator[Mapping[str, Any]]:
    """Yield all rows in order. An unreadable row is yielded empty; it is refused later, when it is indexed."""
    for at in range(len(rows)):
        try:
            yield rows[at]
        except SampleError:
            yield {}


def _first_turns(dataset: OpenDataset, branches: Branches) -> np.ndarray:
    """Return the index of each row's first sample, int64 [rows + 1]. Reads all conversations, but no media of tables.

    Raises:
        ConfigError: no row has a conversation.
    """
    counts = []
    for rows in dataset.files:
        if isinstance(rows, StoredRows):
            names = [name for name in rows.columns if dataset.columns.names.get(name, name) not in MEDIA]
            rows = StoredRows(table=rows.table.select_columns(names))
        for row in _each(rows):
            try:
                counts.append(num_branches(dataset.columns.apply(row), branches))
            except ValueError:  # the row is refused when it is indexed
                counts.append(0)
    if not any(counts):
        fault = f"branches={branches!r} splits conversations, but {dataset.name} holds none of {', '.join(TURNS[:3])}"
        raise ConfigError(f"{fault}; leave branches out")
    return np.append(0, np.cumsum(np.maximum(counts, 1)))
