"""Any data set for fine-tuning, as samples for `VLMCollator`: nothing is decoded, and nothing but the index is kept.

    CORD from anywhere    hub id, folder, parquet: `sources`                      ───▶ to_conversation ──┐
    file of JSON, JSONL   messages, conversations, prompt + completion, input_ids ─┐                     │
    the same, stored      parquet, tar shards, `save_to_disk` folder, hub id      ─┼──▶ as it stands ────┼──▶ samples
    of other libraries    Alpaca, query + response, any names by `columns=`       ─┴──▶ as messages ─────┘

Paths of images and videos that are not absolute are meant from the folder of the file that names them, or from
`image_root`.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import index as as_int
from pathlib import Path
from typing import Any, final, get_args, overload

from torch.utils.data import Dataset

from vlmpack.data.archive import ImageFolder
from vlmpack.data.branches import PAIRS_COLUMN, BranchedRows, Branches
from vlmpack.data.column_names import Columns, read_columns
from vlmpack.data.cord import to_conversation
from vlmpack.data.foreign import ColumnMap, with_columns
from vlmpack.data.json_files import JSON_FILES, JsonRows, json_rows
from vlmpack.data.readers import (
    COLUMNS,
    FirstRows,
    Rows,
    Source,
    StoredRows,
    check_source,
    complete_row,
    find_stored,
    readable,
)
from vlmpack.data.shards import COMPRESSED
from vlmpack.errors import ConfigError, SampleError, check_choice

CONVERSATIONS = ("messages", "conversations", "conversation", "prompt", "completion")
"""Columns that hold a sample's text; a tokenised one has `input_ids` instead."""
MEDIA = ("image", "images", "video", "videos", "image_url", "video_url", "url", "path")
"""Keys that may hold where an image or a video is."""


def from_folder(row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The row with its media's paths starting at `folder`; texts and the arguments of tools are left alone."""
    changed = {name: _placed(row[name], folder) for name in MEDIA if name in row}
    changed |= {name: [_message(m, folder) for m in row[name]] for name in CONVERSATIONS if _is_list(row.get(name))}
    return {**row, **changed}


def _message(message: Any, folder: Path) -> Any:
    has_content = isinstance(message, Mapping) and "content" in message
    return {**message, "content": _content(message["content"], folder)} if has_content else message


def _content(content: Any, folder: Path) -> Any:
    """A list of parts, or one part alone."""
    return [_part(part, folder) for part in content] if _is_list(content) else _part(content, folder)


def _part(part: Any, folder: Path) -> Any:
    return part if not isinstance(part, Mapping) or part.get("type") == "text" else _placed(part, folder)


def _placed(media: Any, folder: Path) -> Any:
    """A path, or paths in lists and under the keys of `MEDIA`, starting at `folder`."""
    if isinstance(media, str):
        is_address = "://" in media[:32] or media.startswith("data:")
        return media if is_address else str(folder / media)
    if isinstance(media, Mapping):
        return {key: _placed(value, folder) if key in MEDIA else value for key, value in media.items()}
    return [_placed(item, folder) for item in media] if _is_list(media) else media


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def open_dataset(
    source: Source,
    *,
    split: str = "train",
    num: int | None = None,
    image_root: str | Path | None = None,
    branches: Branches = "conversation",
    columns: Columns | None = None,
) -> OpenDataset:
    """Open samples as a map-style data set: `len()`, and `[i]` -> a mapping that `VLMCollator` takes.

    Args:
        source: a file of JSON or JSONL or a list of them, parquet files or a folder of them, a folder written by
            `save_to_disk`, an unpacked CORD archive, or a hub id.
        split: of a source that has several. A file that is named is one split, whatever it is called.
        num: the first so many samples; None: all of them.
        image_root: folder at which paths of images and videos start that are not absolute; None: at the folder of the
            file that names them.
        branches: "conversation" makes a record one sample; "turns" makes each of its questions, with its answer and the
            record's images, a sample of its own (`branch_turns`), and `num` counts those. All conversations are read
            once to count them.
        columns: columns of the data set -> the names that are read, such as `{"question": "query", "answer":
            "response"}`; as JSON, as ms-swift's `--columns` has it; or the path of a LLaMA-Factory `dataset_info.json`
            that describes the source. Where `chosen` is read, rejected answers are left out. None: the columns have
            known names.

    Raises:
        ConfigError: the source, split or number do not fit what is there; it cannot be read, or holds no samples;
            `image_root` is no folder, or the source names no paths; there are no questions to tell apart; a column of
            `columns` is not there, or read as a name that nothing reads; or an extra is missing.
    """
    check_source(source)
    check_choice("branches", branches, get_args(Branches))
    foreign = None if columns is None else read_columns(columns, source)
    root = (foreign.folder if foreign else None) if image_root is None else _root(image_root)
    with readable(source):
        dataset = _find(source, split, root, foreign)
        are_receipts = _are_receipts(dataset.rows, dataset.name)
    if isinstance(dataset.rows, ImageFolder) and (image_root is not None or foreign is not None):
        setting = "columns=" if image_root is None else "image_root"
        raise ConfigError(f"{setting} is of samples with paths and columns, and {dataset.name} has none; leave it out")
    rows = BranchedRows.of(dataset.rows, dataset.name) if branches == "turns" else dataset.rows
    return replace(dataset, rows=rows, folder=root or dataset.folder, num=num, are_receipts=are_receipts)


@final
@dataclass(frozen=True, kw_only=True)
class OpenDataset(FirstRows, Dataset[dict[str, Any]]):
    """Rows of any source, made samples as they are indexed. Cheap to send to a worker process."""

    are_receipts: bool = False
    """True if a row is an image and its ground truth, and not a conversation."""
    folder: Path | None = None
    """Where paths in the rows start; None: in the working directory, unless the rows have folders of their own."""

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        """Return a sample, or a list of them; without an `id` or `sample_id`, its id is its place in the data set.

        Raises:
            IndexError: there is no such sample.
            TypeError: the index is no place, such as the name of a column.
            SampleError: its row cannot be read, or is no receipt where all others are.
        """
        if isinstance(index, slice):
            return [self._sample(at) for at in range(len(self))[index]]
        try:
            index = as_int(index)
        except TypeError:
            raise TypeError(
                f"samples are taken by their place, dataset[0] or dataset[0:2], not by {index!r}; of a column: "
                "[sample['id'] for sample in dataset]"
            ) from None
        return self._sample(self.place(index))

    def _sample(self, at: int) -> dict[str, Any]:
        try:
            row = self.rows[at]
            sample = from_folder(row, self.folder) if self.folder is not None else dict(row)
        except RecursionError as error:  # JSON is read a little deeper than Python calls itself
            message = f"its images or videos, in {self.name}, are nested too deeply; give a list of paths"
            raise SampleError(message, index=at, reason="row_unreadable") from error
        if self.are_receipts:
            return to_conversation(complete_row(sample, self.name, index=at), index=at)
        has_name = sample.get("id") is not None or sample.get("sample_id") is not None
        return sample if has_name else {**sample, "id": at}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any] | SampleError]:
        """Return the samples of a batch for a DataLoader; an unreadable row is its error, which collators skip.

        Raises:
            IndexError: there is no such sample.
        """
        return [self._sample_or_error(index) for index in indices]

    def _sample_or_error(self, index: int) -> dict[str, Any] | SampleError:
        try:
            return self[index]
        except SampleError as error:
            return error.with_traceback(None)

    def __repr__(self) -> str:
        return f"OpenDataset({len(self)} samples of {self.name})"


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class JoinedRows:
    """Rows of several files of JSON, one file after the other; paths start at each file's own folder, or at one."""

    files: tuple[Rows, ...]
    """In the order given."""
    paths: tuple[Path, ...]
    """Of the files."""
    root: Path | None
    """Where paths of all of them start; None: at the folder of each."""

    def __len__(self) -> int:
        return self._starts[-1]

    @cached_property
    def _starts(self) -> list[int]:
        """Place of each file's first row among all, and the number of all: counted once, as there may be many."""
        return [0, *accumulate(map(len, self.files))]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One row.

        Raises:
            SampleError: it is no JSON object.
        """
        which = bisect_right(self._starts, index) - 1
        file = self.files[which]
        try:
            row = file[index - self._starts[which]]
        except SampleError as error:
            raise SampleError(error.detail, index=index, reason=error.reason) from error
        return from_folder(row, self.root or self.paths[which].parent)


def _find(source: Source, split: str, root: Path | None, columns: ColumnMap | None) -> OpenDataset:
    if not isinstance(source, str | os.PathLike):
        return _find_list(source, split, root, columns)
    path = Path(source).expanduser().absolute()
    if path.suffix in JSON_FILES and path.is_file():
        return OpenDataset(
            rows=with_columns(json_rows(path), str(source), columns), name=str(source), folder=path.parent
        )
    if path.is_file() and path.suffix not in ("", ".parquet", ".tar") and not path.name.endswith(COMPRESSED):
        raise ConfigError(f"{source} is a {path.suffix} file; {_conversion(path)}")
    rows, name = find_stored(source, split)
    rows = rows if isinstance(rows, ImageFolder) else with_columns(rows, name, columns)
    return OpenDataset(rows=rows, name=name, folder=path if path.is_dir() else path.parent if path.is_file() else None)


def _find_list(
    source: Sequence[str | os.PathLike[str]], split: str, root: Path | None, columns: ColumnMap | None
) -> OpenDataset:
    paths = [Path(path).expanduser().absolute() for path in source]
    json_files = [path for path in paths if path.suffix in JSON_FILES]
    if not json_files:
        rows, name = find_stored(source, split)
        rows = rows if isinstance(rows, ImageFolder) else with_columns(rows, name, columns)
        return OpenDataset(rows=rows, name=name, folder=paths[0].parent)
    if no_json := next((path for path in paths if path.suffix not in JSON_FILES), None):
        raise ConfigError(f"a list holds {json_files[0].name} and {no_json.name}; give files of JSON, or parquet files")
    if absent := [str(path) for path in paths if not path.is_file()]:
        raise ConfigError(f"no such file: {', '.join(absent)}; check the path")
    files = tuple(with_columns(json_rows(path), str(path), columns) for path in paths)
    return OpenDataset(rows=JoinedRows(files=files, paths=tuple(paths), root=root), name=f"{len(paths)} files")


def _conversion(path: Path) -> str:
    """The way to a file that can be read."""
    if path.suffix in (".csv", ".tsv", ".arrow", ".txt"):
        kind = {".tsv": "csv", ".txt": "text"}.get(path.suffix, path.suffix[1:])
        return (
            f"write it as parquet: datasets.load_dataset({kind!r}, data_files={path.name!r})['train'].to_parquet("
            f"{path.stem + '.parquet'!r}), and open that, with columns= for its names"
        )
    if path.suffix in (".yaml", ".yml"):
        return "open each data set that it names, and mix them with vlmpack.data.mix_datasets"
    return f"give {', '.join(JSON_FILES)}, .parquet or .tar, unpacked"


def _root(image_root: str | Path) -> Path:
    if not isinstance(image_root, str | os.PathLike):
        raise ConfigError(f"image_root has to be the path of a folder, got a {type(image_root).__name__}")
    root = Path(image_root).expanduser().absolute()
    if not root.is_dir():
        raise ConfigError(f"image_root={str(image_root)!r} is no folder; give the one at which images' paths start")
    return root


def _are_receipts(rows: Rows, name: str) -> bool:
    """Return whether rows are receipts, by their columns; of several files all have to be."""
    if isinstance(rows, ImageFolder):
        return True
    if isinstance(rows, JoinedRows):
        named = zip(map(str, rows.paths), rows.files, strict=True)
        kinds = {path: _are_receipts(file, path) for path, file in named}
        if len(set(kinds.values())) > 1:
            receipts = ", ".join(path for path, are_receipts in kinds.items() if are_receipts)
            raise ConfigError(f"of {name}, these hold receipts and the others do not: {receipts}; open them apart")
        return next(iter(kinds.values()))
    if not len(rows):
        raise ConfigError(f"{name} holds no samples")
    columns = rows.columns if isinstance(rows, StoredRows) else list(rows[0])
    if {"input_ids", *CONVERSATIONS} & set(columns):
        return False
    if set(COLUMNS) <= set(columns):
        return True
    if PAIRS_COLUMN in columns:
        return False
    known = ", ".join(("input_ids", *CONVERSATIONS, PAIRS_COLUMN))
    raise ConfigError(
        f"{name} holds {', '.join(map(str, columns)) or 'nothing'}, and none of {known}; {_remedy(rows, columns)}"
    )


def _remedy(rows: Rows, columns: Sequence[str]) -> str:
    """A file of one object may hold all samples under a key; pairs of answers are for other trainers."""
    if {"chosen", "rejected"} <= set(columns):
        return (
            "PackedDPOTrainer of vlmpack.trainer.trl trains on these pairs as datasets.load_dataset reads them; to "
            "learn the chosen answers alone: columns={'chosen': 'messages'}"
        )
    lists = [name for name, value in rows[0].items() if isinstance(value, list)] if isinstance(rows, JsonRows) else []
    if len(rows) == 1 and lists:
        return f"if the samples are the list under its key {lists[0]!r}, write that list alone into a file"
    return (
        "name its columns with columns={'your column': 'messages'} (or query and response, prompt and completion), or "
        f"give receipts as {' and '.join(COLUMNS)}"
    )
