"""Tar shards as rows: WebDataset's, and those that Energon prepared.

    shard_0000.tar                      row
      sample_0000.jpg      ─┐             {"id": "sample_0000",
      sample_0000.txt       ├─────────▶    "image": {"bytes", "path"},   images, or videos, in their order
      sample_0000.json     ─┘              "txt": ..., and the keys of its JSON}

Files with one name up to the first dot are one sample, as in WebDataset. A row is the stretch of its shard that holds
them: of each is kept where it begins and ends, and nothing is unpacked. Images that the JSON names are put where it
names them. An Energon folder has `.nv-meta/split.yaml`, the shards of a split, and `.nv-meta/dataset.yaml`, the parts
that are the fields of a sample type.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np

from vlmpack.data.archive import ALIASES
from vlmpack.errors import ConfigError, SampleError

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm")
VIDEOS = (".mp4", ".m4v", ".avi", ".mkv", ".mov", ".webm")
AUDIOS = (".wav", ".mp3", ".flac", ".ogg", ".m4a", ".opus")
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
META = ".nv-meta"
"""The folder of Energon's own files."""
_NAME = re.compile(r"(?P<key>(?:.*/|)[^.]+)[.](?P<part>[^/]*)")
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_FIELD = re.compile(r"(?P<part>[^\[\]]+)(?P<steps>(\[[^\[\]]+\])*)")
_TYPES: dict[str, dict[str, str]] = {
    "CaptioningSample": {"image": "image", "caption": "response"},
    "OCRSample": {"image": "image", "text": "response"},
    "VQASample": {"image": "image", "context": "query", "answers": "response", "answer_weights": "answer_weights"},
    "VidQASample": {"video": "video", "context": "query", "answers": "response", "answer_weights": "answer_weights"},
}
"""Energon's sample type -> its fields, and the columns that they are read as."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ShardRows:
    """Rows of tar shards. A shard is opened anew for each row, so that rows can be sent to any number of processes."""

    shards: tuple[Path, ...]
    """Files, not compressed."""
    which: np.ndarray
    """int32 [N]: number of each row's shard."""
    spans: np.ndarray
    """int64 [N, 2]: first byte of each row in its shard, and the one after its last."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Column -> part of the sample that holds it, such as `jpg` or `json[0][value]`; empty: every part by its kind."""

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One row.

        Raises:
            SampleError: the shard cannot be read any more, a part is not what its name says, or the JSON or a field
                names a part that is not there.
        """
        path = self.shards[self.which[index]]
        start, stop = self.spans[index].tolist()
        try:
            with path.open("rb") as file:
                file.seek(start)
                members = dict(_members(io.BytesIO(file.read(stop - start))))
            key = _split(next(iter(members)))[0]
            parts = {_split(name)[1]: _part(name, data) for name, data in members.items()}
            row = _fields(parts, self.fields) if self.fields else _flat(parts)
        except (OSError, tarfile.TarError, ValueError, StopIteration) as error:
            detail = f"the sample at byte {start} of {path} cannot be read: {error}"
            raise SampleError(detail, index=int(index), reason="row_unreadable") from error
        return {"id": key, **row}


# ---------------------------------------------------------------------- shards and their index


def shard_rows(
    paths: Sequence[Path], *, fields: Mapping[str, str] | None = None, exclude: Sequence[str] = ()
) -> ShardRows:
    """Find the samples of tar shards by the headers of their files; nothing between these is read.

    Args:
        paths: of the shards.
        fields: see `ShardRows.fields`.
        exclude: names of samples that are left out, `<shard>/<key>`, as the ends of paths.

    Raises:
        ConfigError: a shard cannot be read, holds no samples, or one of them in two places.
    """
    excluded = frozenset(exclude)
    spans = [_index(path, excluded) for path in paths]
    which = np.repeat(np.arange(len(paths), dtype=np.int32), list(map(len, spans)))
    return ShardRows(shards=tuple(paths), which=which, spans=np.concatenate(spans), fields=fields or {})


def _index(path: Path, excluded: frozenset[str]) -> np.ndarray:
    """int64 [N, 2] of one shard."""
    keys: dict[str, list[int]] = {}
    last = None
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                key = _key(member)
                if key is None:
                    last = None  # a part after it would begin a second stretch
                    continue
                if key in keys and key != last:
                    raise ConfigError(
                        f"{path} holds files of {key!r} in two places; those of a sample follow each other: write it "
                        "again with `tar --sort=name`"
                    )
                stop = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                keys.setdefault(key, [member.offset, stop])[1] = stop
                last = key
    except tarfile.TarError as error:
        raise ConfigError(
            f"{path} cannot be read as a tar file that is not compressed: {error}; unpack `.gz` and the like with "
            "gunzip, or download it again"
        ) from error
    if not keys:
        raise ConfigError(f"{path} holds no samples: files such as 0001.jpg and 0001.json, named alike up to a dot")
    shard = path.as_posix()
    kept = [span for key, span in keys.items() if not excluded or not _is_excluded(f"{shard}/{key}", excluded)]
    return np.asarray(kept, np.int64).reshape(-1, 2)


def _is_excluded(name: str, excluded: frozenset[str]) -> bool:
    steps = name.split("/")
    return any("/".join(steps[at:]) in excluded for at in range(len(steps)))


def _key(member: tarfile.TarInfo) -> str | None:
    """The sample of a file; None: a folder, or a file that WebDataset passes over too."""
    name = Path(member.name).name
    match = _NAME.fullmatch(member.name)
    is_meta = name.startswith((".", "__"))
    return match["key"] if member.isfile() and match and not is_meta else None


def _split(name: str) -> tuple[str, str]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"its file {name!r} is no part of a sample")
    return match["key"], match["part"].lower()


def _members(file: io.BytesIO) -> Iterator[tuple[str, bytes]]:
    names = set()
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            if _key(member) is None:
                continue
            if member.name in names:
                raise ValueError(f"it holds {member.name} twice")
            names.add(member.name)
            content = tar.extractfile(member)
            yield member.name, content.read() if content is not None else b""


def _part(name: str, data: bytes) -> Any:
    """A part by the end of its name: JSON parsed, text decoded, a medium still encoded; else its bytes."""
    end = Path(name).suffix.lower()
    if end == ".json":
        try:
            return json.loads(data)
        except ValueError as error:
            raise ValueError(f"{name} is no JSON ({error})") from error
    if end in (".txt", ".text"):
        return data.decode("utf-8").strip()
    return {"bytes": data, "path": name} if end in (*IMAGES, *VIDEOS, *AUDIOS) else data


# ---------------------------------------------------------------------- parts as columns


def _flat(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the JSON, the media that it names or else all of them, and every other part under its own name."""
    row: dict[str, Any] = {}
    described = parts.get("json")
    if isinstance(described, dict):
        row |= described
    elif isinstance(described, list):
        row["conversations"] = described
    elif described is not None:
        raise ValueError(f"its JSON is a {type(described).__name__}; a sample is an object, or a list of turns")
    media = {name: part for name, part in parts.items() if isinstance(part, dict) and {"bytes", "path"} == set(part)}
    row, named = _with_media(row, media)
    rest = {name: part for name, part in parts.items() if name not in ("json", *named) and name not in media}
    unnamed = {name: part for name, part in media.items() if name not in named}
    for kind, ends in (("image", IMAGES), ("video", VIDEOS), ("audio", AUDIOS)):
        values = [part for name, part in unnamed.items() if f".{name}".endswith(ends)]
        if values and not named and any(row.get(name) is not None for name in (kind, f"{kind}s")):
            raise ValueError(f"its JSON names another {kind} than its parts {', '.join(unnamed)}; correct the name")
        if values and not named:
            row |= {kind: values[0]} if len(values) == 1 else {f"{kind}s": values}
        elif values:
            rest |= unnamed
    if clash := next((name for name in rest if name in row), None):
        raise ValueError(f"its JSON has the key {clash!r}, and it has a part of that name; rename one of them")
    return {**row, **rest}


_HOLDERS = ("messages", "conversations", "conversation", "prompt", "completion", "content")
"""Keys of what may hold media; their own strings are texts."""
_PLACES = ("image", "images", "video", "videos", "audio", "audios", "path", "url", "image_url", "video_url", *_HOLDERS)
"""Keys under which a part may be named."""


def _with_media(row: dict[str, Any], media: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Put media where the JSON names them: by their part, `1.jpg`, or by the name of their file."""
    named: set[str] = set()
    files = {Path(part["path"]).name: name for name, part in media.items()}
    files |= {part["path"]: name for name, part in media.items()} | {name: name for name in media}

    def place(value: Any, key: str) -> Any:
        if isinstance(value, str) and key not in _HOLDERS:
            name = files.get(value, files.get(value.lower()))
            if name is None:
                return value
            named.add(name)
            return media[name]
        if isinstance(value, list):
            return [place(item, key) for item in value]
        if isinstance(value, dict):
            return {inner: place(item, inner) if inner in _PLACES else item for inner, item in value.items()}
        return value

    placed = {key: place(value, key) if key in _PLACES else value for key, value in row.items()}
    return placed, named


def _fields(parts: Mapping[str, Any], fields: Mapping[str, str]) -> dict[str, Any]:
    """The columns of an Energon field map."""
    row = {column: _field(parts, where) for column, where in fields.items()}
    weights, answers = row.pop("answer_weights", None), row.get("response")
    if isinstance(answers, list):
        row["response"] = _best(answers, weights)
    return row


def _field(parts: Mapping[str, Any], where: str) -> Any:
    match = _FIELD.fullmatch(where)
    if match is None:
        raise ValueError(f"the field {where!r} is no part, such as jpg or json[caption]")
    name = next((name for name in match["part"].lower().split(";") if name in parts), None)
    if name is None:
        raise ValueError(f"it has no part {match['part']} (it has {', '.join(parts)})")
    value = parts[name]
    for step in re.findall(r"\[([^\[\]]+)\]", match["steps"]):
        try:
            value = value[int(step)] if isinstance(value, list) else value[step]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"its part {name} has no {where.removeprefix(name)}") from error
    return value


def _best(answers: list[Any], weights: Any) -> Any:
    """The answer of the largest weight; without weights there has to be one answer only."""
    if isinstance(weights, list) and len(weights) == len(answers) and answers:
        return answers[max(range(len(answers)), key=lambda at: weights[at])]
    if len(set(map(str, answers))) == 1:
        return answers[0]
    raise ValueError(f"it has {len(answers)} answers and no weights of them; keep one answer, or add answer_weights")


# ---------------------------------------------------------------------- folders


def expand(pattern: str) -> list[str]:
    """Return the names of a pattern, `shard-{000..012}.tar`, as WebDataset and Energon write them."""
    match = _RANGE.search(pattern)
    if match is None:
        return [pattern]
    first, last = match[1], match[2]
    numbers = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return [name for number in numbers for name in expand(pattern[: match.start()] + number + pattern[match.end() :])]


def energon_rows(folder: Path, split: str) -> ShardRows | None:
    """The rows of a folder that `energon prepare` has described; None: there is no `.nv-meta` in it.

    Raises:
        ConfigError: it has no such split, is of a sample type that has no question and answer, or is read by code.
    """
    if not (folder / META).is_dir():
        return None
    described = _yaml(folder / META / "dataset.yaml")
    fields = _columns_of(described, folder)
    splits = _yaml(folder / META / "split.yaml")
    parts = splits.get("split_parts") or {}
    wanted = ALIASES.get(split, split)
    names = [name for part, shards in parts.items() if ALIASES.get(part, part) == wanted for name in shards or ()]
    names = [name for pattern in names for name in expand(pattern)]
    exclude = [str(name) for name in splits.get("exclude") or ()]
    shards = [folder / name for name in names if name not in exclude]
    if not shards:
        listed = ", ".join(part for part, shards in parts.items() if shards) or "nothing"
        raise ConfigError(f"no shard of split {split!r} in {folder / META}/split.yaml; it has {listed}")
    check_files(shards)
    return shard_rows(shards, fields=fields, exclude=exclude)


def _columns_of(described: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Column -> part, of a `dataset.yaml`; nothing for Energon's crude data sets."""
    remedy = (
        'write its turns into a JSON part of each sample, {"messages": [...], "images": ["1.jpg"]}, and describe the '
        "folder as a CrudeWebdataset"
    )
    if described.get("__class__") == "CrudeWebdataset":
        return {}
    kind = (described.get("sample_type") or {}).get("__class__")
    if "sample_loader" in described:
        loader = described["sample_loader"]
        raise ConfigError(f"{folder} is read by its own code, {loader!r}, which is not run; {remedy}")
    if kind not in _TYPES:
        raise ConfigError(
            f"{folder} holds samples of the type {kind}, which are no conversations; {', '.join(_TYPES)} and "
            f"CrudeWebdataset are read: {remedy}"
        )
    columns = _TYPES[kind]
    mapped = described.get("field_map") or {}
    if unread := [name for name in mapped if name not in columns]:
        raise ConfigError(
            f"{folder} maps the field {', '.join(unread)} of {kind}, which nothing reads; leave it out of dataset.yaml"
        )
    if missing := [name for name in columns if name not in mapped and name != "answer_weights"]:
        raise ConfigError(
            f"{folder} maps no part to {', '.join(missing)} of {kind}; add it to dataset.yaml's field_map"
        )
    return {columns[name]: where for name, where in mapped.items()}


def _yaml(path: Path) -> dict[str, Any]:
    import yaml  # which transformers brings

    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); run `energon prepare` again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is no mapping; run `energon prepare` again")
    return value


def check_files(paths: Sequence[Path]) -> None:
    """Refuse shards that are not there, or compressed.

    Raises:
        ConfigError: with their names.
    """
    if packed := [str(path) for path in paths if path.name.endswith(COMPRESSED)]:
        raise ConfigError(f"{packed[0]} is compressed, and its samples cannot be indexed; unpack it to a .tar (gunzip)")
    if absent := [str(path) for path in paths if not path.is_file()]:
        raise ConfigError(f"no such shard: {', '.join(absent[:6])}; check the path")
