"""Where samples are stored, and how their raw records are found.

    folder of `save_to_disk`      dataset_dict.json, dataset_info.json            extra [data]
    folder of parquet files       data/train-00000-of-00004-....parquet           extra [data]
                                  (a split by the names of folders and files; what names none is of train)
    folder of the CORD archive    train/image/receipt_00000.png, train/json/...   no extra
    parquet files                 one path or a list                              extra [data]
    tar shards                    one path, a list, shard-{000..012}.tar, a       no extra
                                  folder of them, or one that Energon prepared
    hub id                        naver-clova-ix/cord-v2                          extra [data], network

Nothing is decoded here, and the network is used for a hub id alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from operator import index as as_int
from pathlib import Path
from typing import Any, Protocol, final

from vlmpack.data.archive import ALIASES, ImageFolder, archive_in, in_files
from vlmpack.data.json_files import JSON_FILES, is_array
from vlmpack.data.shards import COMPRESSED, ShardRows, check_files, energon_rows, expand, shard_rows
from vlmpack.errors import ConfigError, SampleError, check_extra

COLUMNS = ("image", "ground_truth")
Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_SHARD = re.compile(r"(?P<split>\w+(\.\w+)*)-\d{5}-of-\d{5}.*")
_WORDS = re.compile(r"[-._ 0-9]+")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


class Rows(Protocol):
    """The rows of a source: raw records, images in any form that `images.load_image` reads."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


@final
@dataclass(frozen=True, kw_only=True)
class StoredRows:
    """A table of `datasets` as plain values: an image stays `{"bytes", "path"}`, however deep it is nested.

    Columns of the feature `datasets.Json`, nested ones included, are decoded: Arrow stores them as JSON text.
    """

    table: Any
    """A `datasets.Dataset` in Arrow's format, in which nothing is decoded."""

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return self.table.column_names

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One row.

        Raises:
            SampleError: a column of JSON holds something else.
        """
        row = self.table[index].to_pylist()[0]
        try:
            return self._decoded(row)
        except ValueError as error:
            detail = f"a column of the feature Json cannot be decoded: {error}; write the data set again"
            raise SampleError(detail, index=index, reason="row_unreadable") from error

    def batches(self, size: int = 1024) -> Iterator[dict[str, Any]]:
        """All rows in their order, so many read at a time; one that cannot be decoded is empty."""
        for start in range(0, len(self), size):
            for row in self.table[start : start + size].to_pylist():
                try:
                    yield self._decoded(row)
                except ValueError:
                    yield {}

    def _decoded(self, row: dict[str, Any]) -> dict[str, Any]:
        columns = ((name, feature) for name, feature in self._json_columns.items() if name in row)
        return {**row, **{name: _from_json(row[name], feature) for name, feature in columns}}

    @cached_property
    def _json_columns(self) -> dict[str, Any]:
        """The columns that hold JSON, with their features; a receipt's `ground_truth` is JSON text on purpose."""
        features = {name: self.table.features[name] for name in self.columns if name not in COLUMNS}
        return {name: feature for name, feature in features.items() if _holds_json(feature)}

    def only(self, columns: Sequence[str], name: str) -> StoredRows:
        """These columns of it.

        Raises:
            ConfigError: one of them is not there.
        """
        missing = [column for column in columns if column not in self.columns]
        if missing:
            raise ConfigError(
                f"{name} has no column {' and '.join(missing)} (it has {', '.join(self.columns)}); rename yours to "
                f"{' and '.join(columns)}"
            )
        return StoredRows(table=self.table.select_columns(list(columns)))


def _is_json(feature: Any) -> bool:
    """A `datasets.Json` whose users see values, not text; releases before 4.7 have no such feature."""
    import datasets

    return isinstance(feature, getattr(datasets, "Json", ())) and feature.decode


def _holds_json(feature: Any) -> bool:
    if isinstance(feature, Mapping):
        return any(map(_holds_json, feature.values()))
    return _is_json(feature) or (hasattr(feature, "feature") and _holds_json(feature.feature))


def _from_json(value: Any, feature: Any) -> Any:
    """A value of Arrow with the JSON in it decoded, as `datasets` decodes it; images and audio are left alone.

    Raises:
        ValueError: it is no JSON.
    """
    if value is None:
        return None
    if isinstance(feature, Mapping):
        return {name: _from_json(value[name], inner) for name, inner in feature.items()}
    if _is_json(feature):
        return feature.decode_example(value)
    if hasattr(feature, "feature"):
        return [_from_json(item, feature.feature) for item in value]
    return value


@dataclass(frozen=True, kw_only=True)
class FirstRows:
    """The first rows of a source, or all of them, by their places.

    Raises:
        ConfigError: there are fewer rows than `num`.
    """

    rows: Rows
    """The raw rows."""
    name: str
    """Where they come from, for messages."""
    num: int | None = None
    """Use the first so many; None: all."""

    def __post_init__(self) -> None:
        if self.num is not None and not 0 <= self.num <= len(self.rows):
            raise ConfigError(f"num is {self.num}, but {self.name} holds {len(self.rows)}; take at most that many")

    def __len__(self) -> int:
        return len(self.rows) if self.num is None else self.num

    def place(self, index: int) -> int:
        """Return the place from the start; negative numbers count from the end.

        Raises:
            IndexError: there is no such row.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self.name}")
        return as_int(index) % len(self)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError


@contextmanager
def readable(source: Source) -> Iterator[None]:
    """Raise what the file system refuses as a ConfigError that names the source."""
    try:
        yield
    except OSError as error:
        name = source if isinstance(source, str | os.PathLike) else f"the list of {len(source)} files"
        raise ConfigError(f"{name} cannot be read: {error}; check that this user may read it, and all of it") from error


def find_rows(source: Source, split: str) -> tuple[Rows, str]:
    """The receipts of a real source (their two columns) and its name for messages."""
    with readable(source):
        rows, name = find_stored(source, split)
    return (rows.only(COLUMNS, name) if isinstance(rows, StoredRows) else rows), name


def check_source(source: Any) -> None:
    """Refuse a source unless it can be the name of a data set.

    Raises:
        ConfigError: it is samples, or nothing.
    """
    is_list = isinstance(source, Sequence) and not isinstance(source, bytes | bytearray)
    if isinstance(source, str | os.PathLike) or (is_list and all(isinstance(p, str | os.PathLike) for p in source)):
        return
    of = f" of {type(source[0]).__name__}" if is_list else ""
    raise ConfigError(
        "what is opened is a file, a list of files, a folder or a hub id, each by its name; got a "
        f"{type(source).__name__}{of}. Samples that are in memory, such as a list of dicts or a datasets.Dataset, need "
        "no opening: give them to VLMCollator, to a DataLoader or to the trainer as they are (receipts: what "
        "to_conversation makes of them)"
    )


def find_stored(source: Source, split: str) -> tuple[StoredRows | ImageFolder | ShardRows, str]:
    """The rows of a real source, whatever their columns, and its name for messages."""
    check_source(source)
    if not isinstance(source, str | os.PathLike):
        paths = [Path(name).expanduser() for pattern in source for name in expand(os.fspath(pattern))]
        kind = "tar shards" if paths and _is_shard(paths[0]) else "parquet files"
        return _named_rows(paths, split), f"{len(paths)} {kind}"
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder_rows(path, split), str(source)
    if _is_shard(path):
        return _named_rows([Path(name) for name in expand(str(path))], split), str(source)
    if path.is_file() or path.suffix == ".parquet":
        return _named_rows([path], split), str(source)
    if isinstance(source, str) and _HUB_ID.fullmatch(source) and path.suffix not in JSON_FILES:
        return _hub_rows(source, split), source
    raise ConfigError(
        f"{str(source)!r} is no file or folder here and no hub id; give a folder or file that is there, or an "
        "id such as 'naver-clova-ix/cord-v2'"
    )


def complete_row(row: Mapping[str, Any], name: str, *, index: int) -> Mapping[str, Any]:
    """The row of a receipt, if all of it is there.

    Raises:
        SampleError: it has no image, or no ground truth.
    """
    missing = [column for column in COLUMNS if row.get(column) is None]
    if missing:
        fault = f"{' and '.join(missing)} missing in {name} (the record has {', '.join(row) or 'nothing'})"
        remedy = "CORD records have an image and a ground_truth"
        raise SampleError(f"{fault}; {remedy}", index=index, reason="missing_column")
    return row


def _folder_rows(folder: Path, split: str) -> StoredRows | ImageFolder | ShardRows:
    for read in (energon_rows, _saved_in, _parquet_in, _shards_in, archive_in):
        rows = read(folder, split)
        if rows is not None:
            return rows
    if json_files := sorted(path.name for path in folder.iterdir() if path.suffix in JSON_FILES):
        raise ConfigError(
            f"{folder} holds {', '.join(json_files[:6])}{', ...' if len(json_files) > 6 else ''}, and which of them "
            f"are samples is not known: name the file, such as {folder / json_files[0]}, or give a list of files"
        )
    content = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    raise ConfigError(
        f"{folder} holds no CORD data or table for split {split!r} (it holds: {content}); expected a dataset saved by "
        f"datasets, {split}-*.parquet files, tar shards, or {in_files(split)}/image with {in_files(split)}/json"
    )


_SAVED = ("dataset_dict.json", "dataset_info.json", "state.json")
"""Files of which `save_to_disk` writes one or more."""


def _is_shard(path: Path) -> bool:
    return path.name.endswith((".tar", *COMPRESSED))


def _parquet_in(folder: Path, split: str) -> StoredRows | None:
    files = _files_of(folder, split, ".parquet")
    return None if files is None else _parquet_rows(files)


def _shards_in(folder: Path, split: str) -> ShardRows | None:
    files = _files_of(folder, split, ".tar")
    return None if files is None else shard_rows(files)


def _files_of(folder: Path, split: str, end: str) -> list[Path] | None:
    """The files of a split, by their names; None: the folder holds none of this kind.

    Raises:
        ConfigError: there are none of this split, or it is not known which are.
    """
    files = [path for path in sorted(folder.rglob(f"*{end}")) if not _is_hidden(path.relative_to(folder))]
    if not files:
        return None
    wanted, splits = ALIASES.get(split, split), {path: _split_of(path.relative_to(folder)) for path in files}
    chosen = [path for path in files if splits[path] == wanted]
    unnamed = [path for path in files if splits[path] is None] if wanted == "train" else []
    if chosen and unnamed:
        raise ConfigError(
            f"{folder} holds {_some(chosen, folder)}, named after split 'train', and {_some(unnamed, folder)}, named "
            "after no split; give a list of the files of this split"
        )
    if not (chosen or unnamed):
        names = ", ".join(sorted({repr(name or "train") for name in splits.values()}))
        raise ConfigError(
            f"no {end[1:]} file of split {split!r} under {folder}; its files are of {names}: {_some(files, folder)}; "
            "pass one of these as split, or give the files themselves"
        )
    if json_files := _json_in_folders_of(chosen or unnamed):
        raise ConfigError(
            f"{folder} holds {end[1:]} files and {_some(json_files, folder)}: which of them are samples is not known; "
            f"give a list of the {end[1:]} files, or of the files of JSON"
        )
    return chosen or unnamed


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "__")) for part in path.parts)


def _json_in_folders_of(files: Sequence[Path]) -> list[Path]:
    """Files of JSON in the folders of these that may hold samples; an object that describes them all is none."""
    folders = sorted({path.parent for path in files})
    paths = [path for folder in folders for path in sorted(folder.iterdir()) if path.suffix in JSON_FILES]
    return [path for path in paths if path.suffix != ".json" or is_array(path)]


def _some(paths: Sequence[Path], folder: Path) -> str:
    names = [str(path.relative_to(folder)) for path in paths]
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")


def _split_of(path: Path) -> str | None:
    """The split that a parquet file is of, by the names of its folders and its own, as `datasets` reads them.

        data/train_sft-00000-of-00004.parquet    'train_sft': all that stands in front of the number of a shard
        validation/0000.parquet                  'validation', of the outermost folder that names one
        receipts-dev-2.parquet                   'validation', a word of the name
        0000.parquet                             None

    Raises:
        ConfigError: a name has words of two splits.
    """
    if path.parent.name == "data" and (shard := _SHARD.fullmatch(path.name)):
        return ALIASES.get(shard["split"], shard["split"])
    for part in path.with_suffix("").parts:
        splits = {ALIASES[word] for word in _WORDS.split(part.lower()) if word in ALIASES}
        if len(splits) > 1:
            raise ConfigError(f"{path} is named after splits {' and '.join(sorted(splits))}; give a list of the files")
        if splits:
            return splits.pop()
    return None


def _named_rows(paths: list[Path], split: str) -> StoredRows | ShardRows:
    """Files that were named one by one: their names decide nothing, and may contradict another split."""
    are_shards = [_is_shard(path) for path in paths]
    if any(are_shards):
        if not all(are_shards):
            raise ConfigError("a list holds tar shards and other files; give files of one kind, and mix the data sets")
        check_files(paths)
    absent = [str(path) for path in paths if not path.is_file()]
    if absent or not paths:
        raise ConfigError(f"no such parquet file: {', '.join(absent) or 'the list is empty'}; check the path")
    names = {_split_of(Path(path.name)) for path in paths} - {ALIASES.get(split, split), None}
    if split != "train" and names:  # "train" is the default
        name = sorted(filter(None, names))[0]
        raise ConfigError(
            f"a file named after split {name!r} was given for split {split!r}; files that are named are read whatever "
            "they are called, so leave split= out"
        )
    return shard_rows(paths) if any(are_shards) else _parquet_rows(paths)


def _parquet_rows(paths: list[Path]) -> StoredRows:
    datasets = _datasets(f"parquet file {paths[0]}")
    try:
        table = datasets.Dataset.from_parquet([str(path) for path in paths])
    except OSError as error:
        raise ConfigError(
            f"{paths[0]} cannot be read, or not be copied into the cache of datasets: {error}; HF_DATASETS_CACHE names "
            "another folder for that"
        ) from error
    except Exception as error:  # datasets and pyarrow raise many kinds for a broken file
        raise ConfigError(f"{paths[0]} cannot be read as parquet: {error}; download it again") from error
    return StoredRows(table=table.with_format("arrow"))


def _saved_in(folder: Path, split: str) -> StoredRows | None:
    if not any((folder / name).is_file() for name in _SAVED):
        return None
    datasets = _datasets(f"folder {folder}")
    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:  # datasets and pyarrow raise many kinds for a broken folder
        raise ConfigError(f"{folder} cannot be read as a saved dataset: {error}; save it again") from error
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise ConfigError(f"no split {split!r} in {folder}; it holds {', '.join(saved)}")
        saved = saved[split]
    elif saved.split is not None and str(saved.split) != split:
        raise ConfigError(f"{folder} holds split {str(saved.split)!r}, not {split!r}; pass split={str(saved.split)!r}")
    return StoredRows(table=saved.with_format("arrow"))


def _hub_rows(source: str, split: str) -> StoredRows:
    datasets = _datasets(f"hub id {source!r}")
    try:
        table = datasets.load_dataset(source, split=split)
    except Exception as error:  # no network, no such repository, no such split: each library layer has its own kind
        raise ConfigError(
            f"{source!r} is no local folder, and the hub did not give its split {split!r}: {error}; check the id, the "
            "split and the network, or give a local copy"
        ) from error
    return StoredRows(table=table.with_format("arrow"))


def _datasets(source: str) -> Any:
    check_extra("data", "datasets", needed_by=f"reading {source}")
    import datasets

    return datasets
