"""Read stored rows: JSON files, tables of `datasets`, tar shards. Only an index stays in memory.

    JSON files                a row per line, arrays of rows, an object per file; a folder    no extra
    tar shards                one path, a list, shard-{000..012}.tar, a folder of them        no extra
    parquet files             one path, a list, a folder of them                              extra [data]
    folder of `save_to_disk`  dataset_dict.json, dataset_info.json                            extra [data]
    hub id                    naver-clova-ix/cord-v2                                          extra [data], network

In a folder, the split is a word in the name of a subfolder or file; a file without such a word belongs to train. No
image is decoded here.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from vlmpack.data.formats import ENDS, INFO, SOURCES, TURNS
from vlmpack.errors import ConfigError, SampleError, check_extra

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@runtime_checkable
class MapStyle(Protocol):
    """Samples that can be read by index: a list, a `datasets.Dataset`, the rows of a file."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def sample_at(dataset: Any, place: int) -> Any:
    """Return a sample, or the SampleError if it cannot be read, which the collator then raises or skips."""
    try:
        return dataset[place]
    except SampleError as error:
        return error.with_traceback(None)


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


# ---------------------------------------------------------------------- JSON files

JSON_FILES = (".json", ".jsonl", ".ndjson")
"""File name extensions of JSON files."""
MARK = b"\xef\xbb\xbf"
"""The byte-order mark that some editors put before UTF-8 text."""


@dataclass(frozen=True, kw_only=True, eq=False)
class JsonRows:
    """Rows of one JSON file. The file is opened anew for each row, so that any number of processes can share this."""

    path: Path
    """The file."""
    spans: np.ndarray
    """int64 [N, 2]: start and end byte of each row."""

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one row.

        Raises:
            SampleError: the row is not a JSON object, or the file can no longer be read.
        """
        start, stop = self.spans[index].tolist()
        text, row = b"", {}
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                text = file.read(stop - start)
            row = json.loads(text)
            fault = None if isinstance(row, dict) else f"is a {type(row).__name__}"
        except OSError as error:
            message = f"{self.path} cannot be read any more: {error}; open the dataset again"
            raise SampleError(message, "row_unreadable") from error
        except RecursionError:
            fault = "is nested too deeply to be read"
        except ValueError as error:  # includes UnicodeDecodeError
            fault = f"is no JSON ({error})"
        if fault is None:
            return row
        seen = f"the text at byte {start} of {self.path} {fault}: {text.strip()[:40].decode(errors='replace')!r}"
        remedy = "a sample is a JSON object, with a line of its own or in one array with all others"
        raise SampleError(f"{seen}; {remedy}", "row_unreadable")


def json_rows(path: Path) -> JsonRows:
    """Find the rows of a JSON file, without keeping them.

    Raises:
        ConfigError: the file holds no rows, or begins like an array but is not one.
    """
    rows = JsonRows(path=path, spans=_array_spans(path) if is_array(path) else _line_spans(path))
    if path.suffix == ".json" and len(rows) > 1 and (span := _object_span(path)) is not None:
        rows = JsonRows(path=path, spans=span)
    if not len(rows):
        raise ConfigError(f"{path} holds no samples; expected a JSON object a line, or one array of objects")
    return rows


def is_array(path: Path) -> bool:
    """Return whether a JSON file begins like a list of rows."""
    with path.open("rb") as file:
        return file.read(256).removeprefix(MARK).lstrip().startswith(b"[")


def _line_spans(path: Path) -> np.ndarray:
    """Find all lines that are not blank."""
    spans, at = array("q"), 0
    with path.open("rb") as file:
        for line in file:
            if not line.isspace():
                spans.extend((at, at + len(line)))
            at += len(line)
    return np.frombuffer(spans, np.int64).reshape(-1, 2) if spans else np.zeros((0, 2), np.int64)


def _object_span(path: Path) -> np.ndarray | None:
    """Return the span of the whole file if it is one object over several lines, or None."""
    with path.open("rb") as file:
        begins_alone = file.readline().removeprefix(MARK).strip() == b"{"
        data = file.read() if begins_alone else b""
    try:
        json.loads(b"{" + data)
    except (ValueError, RecursionError):
        return None
    return np.array([[0, path.stat().st_size]], np.int64)


def _array_spans(path: Path) -> np.ndarray:
    """Find the items of JSON arrays, or of arrays in an array. Each item is parsed to find its end, then dropped."""
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
        edges = np.asarray(_item_edges(text), np.int64)
    except RecursionError as error:
        raise ConfigError(f"{path} holds a sample that is nested too deeply to be read; leave it out") from error
    except ValueError as error:
        raise ConfigError(f"{path} begins like a JSON array but is not one ({error}); write it again") from error
    if not text.isascii():  # characters -> bytes
        pieces = (text[a:b] for a, b in zip([0, *edges[:-1]], edges, strict=True))
        edges = np.cumsum([len(piece.encode()) for piece in pieces], dtype=np.int64)
    return edges.reshape(-1, 2) + (len(MARK) if data.startswith(MARK) else 0)


def _item_edges(text: str) -> list[int]:
    """Return the start and end of each item of lists, in characters, also of those in lists inside them (Qwen's)."""
    decoder, between, edges = json.JSONDecoder(), re.compile(r"[ \t\r\n,]*"), list[int]()
    at, depth = text.index("["), 0
    while at < len(text):
        opens = text[at] == "[" and depth < 2
        if opens:
            depth, at = depth + 1, at + 1
        elif text[at] == "]" and depth:
            depth, at = depth - 1, at + 1
        elif depth:
            edges.append(at)
            _, at = decoder.raw_decode(text, at)
            edges.append(at)
        else:
            raise ValueError(f"the array has ended, but there is more at character {at}")
        gap = between.match(text, at)[0]  # pyright: ignore[reportOptionalSubscript]
        at += len(gap)
        if depth and at == len(text):
            raise ValueError("the end of the array is missing")
        if gap.count(",") != (depth > 0 and not opens and text[at] != "]"):
            raise ValueError(f"a comma is missing, or one too many, before character {at}")
    return edges


# ---------------------------------------------------------------------- tables of `datasets`


@dataclass(frozen=True, kw_only=True)
class StoredRows:
    """A table of `datasets` as plain values. An image stays `{"bytes", "path"}` at any depth.

    Columns with the feature `datasets.Json`, including nested ones, are decoded: Arrow stores them as JSON text.
    """

    table: Any
    """A `datasets.Dataset` in Arrow format, which decodes nothing."""

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return self.table.column_names

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one row.

        Raises:
            SampleError: a JSON column holds something else.
        """
        row = self.table[index].to_pylist()[0]
        try:
            return {**row, **self._features.decode_example(row)}
        except ValueError as error:
            detail = f"a column of the feature Json cannot be decoded: {error}; write the dataset again"
            raise SampleError(detail, "row_unreadable") from error

    @cached_property
    def _features(self) -> Any:
        """Features that decode JSON and nothing else. A receipt's `ground_truth` is meant to stay JSON text."""
        import datasets

        features = {name: _undecoded(feature) for name, feature in self.table.features.items()}
        if "ground_truth" in features:
            features["ground_truth"] = datasets.Value("string")
        return datasets.Features(features)


def _undecoded(feature: Any) -> Any:
    """Copy a feature so that images, videos and audio in it stay encoded."""
    if isinstance(feature, Mapping):
        return {name: _undecoded(inner) for name, inner in feature.items()}
    if isinstance(feature, list):
        return [*map(_undecoded, feature)]
    if hasattr(feature, "feature"):
        return replace(feature, feature=_undecoded(feature.feature))
    is_media = hasattr(feature, "decode") and type(feature).__name__ != "Json"
    return replace(feature, decode=False) if is_media else feature


def _stored(source: str, read: Callable[[Any], Any], fault: str) -> StoredRows:
    """Return the table that `read` makes with the `datasets` library, and turn its errors into a ConfigError."""
    check_extra("data", "datasets", needed_by=f"reading {source}")
    import datasets

    try:
        return StoredRows(table=read(datasets).with_format("arrow"))
    except ConfigError:
        raise
    except Exception as error:  # datasets and pyarrow raise many kinds for a broken file, and more for the network
        remedy = "; HF_DATASETS_CACHE names another folder for its cache" if isinstance(error, OSError) else ""
        raise ConfigError(f"{fault}: {error}{remedy}") from error


def _parquet_rows(paths: Sequence[Path]) -> StoredRows:
    fault = f"{paths[0]} cannot be read as parquet, or not be copied into the cache of datasets"
    names = [str(path) for path in paths]
    return _stored(f"parquet file {paths[0]}", lambda datasets: datasets.Dataset.from_parquet(names), fault)


def _saved_rows(folder: Path, split: str) -> StoredRows:
    wanted = ALIASES.get(split, split)

    def read(datasets: Any) -> Any:
        saved = datasets.load_from_disk(str(folder))
        splits = saved if isinstance(saved, dict) else {} if saved.split is None else {str(saved.split): saved}
        meant = {ALIASES.get(name, name): table for name, table in splits.items()} | splits
        if splits and not {split, wanted} & meant.keys():
            raise ConfigError(f"no split {split!r} in {folder}; it holds {', '.join(splits)}")
        return meant.get(split, meant.get(wanted, saved))

    return _stored(f"folder {folder}", read, f"{folder} cannot be read as a saved dataset; save it again")


def _hub_rows(source: str, split: str) -> StoredRows:
    fault = (
        f"{source!r} is no local folder, and the hub did not give its split {split!r} (check the id, the split and the "
        "network, or give a local copy)"
    )
    return _stored(f"hub id {source!r}", lambda datasets: datasets.load_dataset(source, split=split), fault)


# ---------------------------------------------------------------------- tar shards

COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_NAME = re.compile(r"(?P<key>(?:.*/|)[^.]+)[.](?P<part>[^/]*)")
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_CONTENTS = (*TURNS, "content")
"""Keys whose values may hold media in nested values; strings directly under these keys are texts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardRows:
    """Rows of tar shards in WebDataset's format: files with the same name up to the first dot are one sample.

        shard_0000.tar                      row
          sample_0000.jpg      ─┐             {"id": "sample_0000",
          sample_0000.txt       ├─────────▶    "image": {"bytes", "path"},   images, or videos, in order
          sample_0000.json     ─┘              "txt": ..., and the keys of its JSON}

    A row is the contiguous part of its shard that holds these files. Only its start and end are kept, and nothing is
    unpacked. Images that the JSON names are put where it names them. A shard is opened anew for each row, so that any
    number of processes can share this.
    """

    shards: tuple[Path, ...]
    """The shards: uncompressed files."""
    which: np.ndarray
    """int32 [N]: index of each row's shard."""
    spans: np.ndarray
    """int64 [N, 2]: start and end byte of each row in its shard."""

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one row.

        Raises:
            SampleError: the shard can no longer be read, a file's content does not match its name, or the JSON names a
                medium that the sample lacks.
        """
        path = self.shards[self.which[index]]
        start, stop = self.spans[index].tolist()
        try:
            with path.open("rb") as file:
                file.seek(start)
                content = io.BytesIO(file.read(stop - start))
            key, parts = None, dict[str, Any]()
            with tarfile.open(fileobj=content, mode="r:") as tar:
                for member in tar:
                    if (key_of := _key(member)) is None:
                        continue
                    key, end = key_of, member.name[len(key_of) + 1 :].lower()
                    if end in parts:
                        raise ValueError(f"it holds {member.name} twice")
                    data = tar.extractfile(member)
                    parts[end] = _part(member.name, data.read() if data else b"")
            if key is None:
                raise ValueError("it is not there any more")
            return {"id": key, **_columns(parts)}
        except (OSError, tarfile.TarError, ValueError) as error:
            detail = f"the sample at byte {start} of {path} cannot be read: {error}"
            raise SampleError(detail, "row_unreadable") from error


def _shard_rows(paths: Sequence[Path]) -> ShardRows:
    """Find the samples of tar shards from the headers of their files, without reading the content between them."""
    if packed := [str(path) for path in paths if path.name.endswith(COMPRESSED)]:
        raise ConfigError(f"{packed[0]} is compressed, and its samples cannot be indexed; unpack it to a .tar (gunzip)")
    spans = [_shard_spans(path) for path in paths]
    which = np.repeat(np.arange(len(paths), dtype=np.int32), list(map(len, spans)))
    return ShardRows(shards=tuple(paths), which=which, spans=np.concatenate(spans))


def _shard_spans(path: Path) -> np.ndarray:
    """Return the spans of one shard's samples, int64 [N, 2]."""
    spans: dict[str, list[int]] = {}
    last = None
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                key = _key(member)
                if key is not None:
                    if key in spans and key != last:
                        fault = f"{path} holds files of {key!r} in two places"
                        raise ConfigError(f"{fault}; write it with `tar --sort=name`")
                    stop = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                    spans.setdefault(key, [member.offset, stop])[1] = stop
                last = key
    except tarfile.TarError as error:
        fault = f"{path} is not an uncompressed tar file: {error}; unpack it with gunzip, or download it again"
        raise ConfigError(fault) from error
    if not spans:
        raise ConfigError(f"{path} holds no samples: files such as 0001.jpg and 0001.json, named alike up to a dot")
    return np.asarray(list(spans.values()), np.int64)


def _key(member: tarfile.TarInfo) -> str | None:
    """Return the sample key of a file. None: it is a folder, or a file that WebDataset also ignores."""
    match = _NAME.fullmatch(member.name)
    is_meta = Path(member.name).name.startswith((".", "__"))
    return match["key"] if member.isfile() and match and not is_meta else None


def _part(name: str, data: bytes) -> Any:
    """Read a part by its extension: JSON is parsed, text decoded, a medium kept encoded, the rest kept as bytes."""
    end = Path(name).suffix.lower()
    if end == ".json":
        try:
            return json.loads(data)
        except ValueError as error:
            raise ValueError(f"{name} is no JSON ({error})") from error
    if end in (".txt", ".text"):
        return data.decode("utf-8").strip()
    return {"bytes": data, "path": name} if any(end in ends for ends in ENDS.values()) else data


def _columns(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Build a row: the keys of the JSON, the media it names (or else all media), and other parts by their names."""
    described = parts.get("json", {})
    if not isinstance(described, dict | list):
        raise ValueError(f"its JSON is a {type(described).__name__}; a sample is an object, or a list of turns")
    media = {name: part for name, part in parts.items() if isinstance(part, dict) and {"bytes", "path"} == set(part)}
    row, named = _with_media(described if isinstance(described, dict) else {"conversations": described}, media)
    rest = {name: part for name, part in parts.items() if name != "json" and name not in media}
    unnamed = {name: part for name, part in media.items() if name not in named}
    if named:
        rest |= unnamed
    for kind, ends in {} if named else ENDS.items():
        values = [part for name, part in unnamed.items() if f".{name}".endswith(ends)]
        if values and any(row.get(name) is not None for name in (kind, f"{kind}s")):
            raise ValueError(f"its JSON names another {kind} than its parts {', '.join(unnamed)}; correct the name")
        if values:
            row |= {kind: values[0]} if len(values) == 1 else {f"{kind}s": values}
    if clash := next((name for name in rest if name in row), None):
        raise ValueError(f"its JSON has the key {clash!r}, and it has a part of that name; rename one of them")
    return {**row, **rest}


def _with_media(row: dict[str, Any], media: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Put media where the JSON names them, by part (`1.jpg`) or by file name. Return the row and the used parts."""
    named: set[str] = set()
    files = {Path(part["path"]).name: name for name, part in media.items()}
    files |= {part["path"]: name for name, part in media.items()} | {name: name for name in media}

    def put(value: Any, key: str) -> Any:
        if isinstance(value, str) and key not in _CONTENTS:
            name = files.get(value, files.get(value.lower()))
            if name is None:
                return value
            named.add(name)
            return media[name]
        if isinstance(value, list):
            return [put(item, key) for item in value]
        if isinstance(value, dict):
            return put_each(value)
        return value

    def put_each(value: Mapping[str, Any]) -> dict[str, Any]:
        return {key: put(item, key) if key in (*SOURCES, *_CONTENTS) else item for key, item in value.items()}

    return put_each(row), named


def expand(pattern: str) -> list[str]:
    """Expand a WebDataset pattern such as `shard-{000..012}.tar`."""
    match = _RANGE.search(pattern)
    if match is None:
        return [pattern]
    numbers = [str(number).zfill(len(match[1])) for number in range(int(match[1]), int(match[2]) + 1)]
    return [name for number in numbers for name in expand(pattern[: match.start()] + number + pattern[match.end() :])]


# ---------------------------------------------------------------------- files and folders of tables and shards

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
ALIASES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Names of splits in files and folders -> the split, as in `datasets`."""
_KINDS = ("parquet", "tar", "JSON")
"""Kinds of files, in the order in which a folder is searched for them."""
_SHARD = re.compile(r"(?P<split>\w+(\.\w+)*)-\d{5}-of-\d{5}.*")
_WORDS = re.compile(r"[-._ 0-9]+")


def find_rows(source: Source, split: str) -> list[tuple[MapStyle, Path | None]]:
    """Find the rows of a source, each file with the folder where relative paths in it start.

    Raises:
        ConfigError: the source or split does not exist, or cannot be read.
    """
    is_name = isinstance(source, str | os.PathLike)
    is_list = isinstance(source, list | tuple) and all(isinstance(name, str | os.PathLike) for name in source)
    if not is_name and not is_list:
        of = f" of {type(source[0]).__name__}" if isinstance(source, list | tuple) else ""
        raise ConfigError(
            "what is opened is a file, a list of files, a folder or a hub id, each by its name; got a "
            f"{type(source).__name__}{of}. Samples that are in memory, such as a list of dicts or a datasets.Dataset, "
            "need no opening: give them to VLMCollator, to a DataLoader or to the trainer as they are"
        )
    names = [os.fspath(name) for name in ([source] if is_name else source)]  # pyright: ignore
    if split != "train" and all(Path(name).suffix in (*JSON_FILES, ".parquet", ".tar") for name in names):
        fault = f"split {split!r} of {', '.join(names[:3])}: a file given by name is one split"
        raise ConfigError(f"{fault}; leave the split out, or give the folder of the files")
    name = names[0] if is_name else f"{len(names)} files"
    try:
        paths = [Path(each).expanduser().absolute() for pattern in names for each in expand(pattern)]
        if is_name and paths[0].is_dir():
            return _folder_rows(paths[0], split)
        if is_name and not paths[0].exists() and not paths[0].name.endswith((".parquet", ".tar")):
            if not isinstance(source, str) or not _HUB_ID.fullmatch(source) or paths[0].suffix in JSON_FILES:
                fault = f"{name!r} is no file or folder here and no hub id such as 'naver-clova-ix/cord-v2'"
                raise ConfigError(f"{fault}; check the path")
            return [(_hub_rows(name, split), None)]
        return _files_rows(paths)
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error}; check the permissions") from error


def _files_rows(paths: Sequence[Path], folder: Path | None = None) -> list[tuple[MapStyle, Path | None]]:
    """Return the rows of files of one kind, with the folder where relative paths in them start.

    That is `folder`, or each file's own folder if it is None. Files that are named one by one are one split, whatever
    their names.

    Raises:
        ConfigError: files do not exist, differ in kind, or are of an unsupported kind.
    """
    kinds = {path: _kind_of(path) for path in paths}
    if len({*kinds.values()}) > 1:
        fault = f"a list holds {', '.join(f'{p.name} ({kind or p.suffix})' for p, kind in [*kinds.items()][:4])}"
        raise ConfigError(f"{fault}; give files of one kind, and mix the data sets")
    if absent := [str(path) for path in paths if not path.is_file()] or ["the list is empty"] * (not paths):
        raise ConfigError(f"no such file: {', '.join(absent[:6])}; check the path")
    if foreign := next((path for path, kind in kinds.items() if not kind), None):
        fault = f"{foreign} is a {foreign.suffix} file; give {', '.join(JSON_FILES)}, .parquet or .tar, unpacked"
        raise ConfigError(f"{fault} (datasets.load_dataset('csv', data_files=...)['train'].to_parquet(...))")
    if kinds[paths[0]] == "JSON":
        return [(json_rows(path), folder or path.parent) for path in paths]
    read = _shard_rows if kinds[paths[0]] == "tar" else _parquet_rows
    return [(read(paths), folder or paths[0].parent)]


def _kind_of(path: Path) -> str:
    if path.suffix in JSON_FILES:
        return "JSON"
    if path.name.endswith((".tar", *COMPRESSED)):
        return "tar"
    return "parquet" if path.suffix in (".parquet", "") else ""


def _folder_rows(folder: Path, split: str) -> list[tuple[MapStyle, Path | None]]:
    """Return the rows of a split in a folder of `save_to_disk`, parquet files, tar shards or JSON files.

    Raises:
        ConfigError: there are no such rows, or it is ambiguous which files are meant.
    """
    if (folder / ".nv-meta").is_dir():
        fault = f"{folder} was prepared by Energon, whose splits and fields are not read here"
        raise ConfigError(f"{fault}; write JSONL or WebDataset with Energon's own loader, or list the shards")
    files = [path for path in sorted(folder.rglob("*")) if not _is_hidden(path.relative_to(folder))]
    described = any((folder / name).is_file() for name in (INFO, "dataset_dict.json", "state.json"))
    of_kind = {kind: [path for path in files if path.suffix and _kind_of(path) == kind] for kind in _KINDS}
    of_kind["JSON"] = [path for path in of_kind["JSON"] if not path.name.startswith(Path(INFO).stem)]
    has_tables = of_kind["parquet"] or of_kind["tar"] or any(path.suffix == ".arrow" for path in files)
    if described and (has_tables or not of_kind["JSON"]):
        return [(_saved_rows(folder, split), folder)]
    for kind in _KINDS[: 2 if has_tables else 3]:
        if of_kind[kind]:
            chosen = _of_split(of_kind[kind], folder, split, kind)
            return _files_rows(chosen, None if kind == "JSON" else folder)
    content = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    fault = f"{folder} holds no table for split {split!r} (it holds: {content})"
    raise ConfigError(
        f"{fault}; expected a dataset saved by datasets, {split}-*.parquet files or tar "
        f"shards; of media alone, write {split}.jsonl with a line for each sample that names its files"
    )


def _of_split(files: Sequence[Path], folder: Path, split: str, kind: str) -> list[Path]:
    wanted, splits = ALIASES.get(split, split), {path: _split_of(path.relative_to(folder)) for path in files}
    chosen = [path for path in files if splits[path] == wanted]
    unnamed = [path for path in files if splits[path] is None] if wanted == "train" else []
    if chosen and unnamed:
        fault = f"{folder} holds {_some(chosen, folder)}, named after split 'train', and {_some(unnamed, folder)},"
        raise ConfigError(f"{fault} named after no split; list the files of this split")
    if not (chosen or unnamed):
        names = ", ".join(sorted({repr(name or "train") for name in splits.values()}))
        fault = f"no {kind} file of split {split!r} under {folder}; its files are of {names}: {_some(files, folder)}"
        raise ConfigError(f"{fault}; pass one of these as split, or list the files")
    if kind == "JSON":
        return chosen or unnamed
    # An object in a JSON file beside them describes the dataset; lines or a list may be the samples.
    beside = sorted({path for file in chosen or unnamed for path in file.parent.iterdir() if path.suffix in JSON_FILES})
    if beside := [path for path in beside if path.suffix != ".json" or is_array(path)]:
        fault = f"{folder} holds {kind} files and {_some(beside, folder)}, and either may be the samples"
        raise ConfigError(f"{fault}; list the files that are")
    return chosen or unnamed


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "__")) for part in path.parts)


def _some(paths: Sequence[Path], folder: Path) -> str:
    names = [str(path.relative_to(folder)) for path in paths]
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")


def _split_of(path: Path) -> str | None:
    """Return the split of a file from the names of its folders and its own name, as in `datasets`.

        data/train_sft-00000-of-00004.parquet    'train_sft': everything before the shard number
        validation/0000.parquet                  'validation': the outermost folder that names a split
        receipts-dev-2.parquet                   'validation': a word in the name
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
