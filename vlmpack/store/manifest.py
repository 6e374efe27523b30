"""The manifest of a store: what it holds, how it was made, and the fixed sizes that CUDA graphs need."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, final

from vlmpack.errors import ConfigError
from vlmpack.store.files import unreadable

FORMAT, VERSION = "vlmpack.rows", 2
NAME, PLAN, LENGTHS, LEFT_OUT = "manifest.json", "plan.zip", "lengths.zip", "left_out.jsonl"
"""Files of a store, besides its shards."""


@final
@dataclass(frozen=True, kw_only=True)
class Shard:
    """One parquet file of rows."""

    file: str
    """Its name in the folder of the store."""
    rows: int
    """Rows in it."""
    bytes: int
    """Its size."""
    sha256: str
    """Of the file."""
    footer: str
    """SHA-256 of its footer, which says where everything lies and holds a checksum of each row."""


@final
@dataclass(frozen=True, kw_only=True)
class Counts:
    """What became of the samples, and what the rows hold together."""

    given: int
    """Samples of the data set."""
    refused: int
    """Samples that cannot be used, or are longer than the collator's `max_length`."""
    dropped: int
    """Samples that exceed a row by themselves."""
    samples: int
    """Samples in rows: those that are left."""
    rows: int
    """Rows."""
    tokens: int
    """Tokens of all samples."""
    targets: int
    """Tokens that are learnt."""
    images: int
    """Images."""
    videos: int
    """Videos."""
    patches: int
    """Patches that go into the vision tower."""


@final
@dataclass(frozen=True, kw_only=True)
class FixedSizes:
    """The largest sizes of any row: what is allocated, or captured in a CUDA graph, once for all rows."""

    longest_row: int
    """Tokens of the longest row, what slots and rows are rounded up by included."""
    longest_segment: int
    """Tokens of the longest sample."""
    most_segments: int
    """Samples."""
    most_images: int
    """Images and videos."""
    most_patches: int
    """Patches."""


@final
@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All there is to know of a store without reading its rows."""

    settings: Mapping[str, Any]
    """How rows were made: of which data, by which collator, in rows of which capacity."""
    processor: Mapping[str, Any]
    """The processor's fingerprint."""
    plan: str
    """SHA-256 of the plan."""
    counts: Counts
    """Samples, rows, tokens."""
    reasons: Mapping[str, int]
    """How many samples were left out for each reason; each of them is in `left_out.jsonl`."""
    fill: float
    """Tokens of samples per token of row, 0 to 1, rows as wide as the capacity."""
    sizes: FixedSizes
    """What CUDA graphs need."""
    shards: tuple[Shard, ...]
    """The files, in the order of their rows."""

    @property
    def capacity(self) -> int:
        """Tokens that a row may hold."""
        return self.settings["capacity"]

    @property
    def bytes(self) -> int:
        """Of all shards."""
        return sum(shard.bytes for shard in self.shards)

    def to_json(self) -> dict[str, Any]:
        """As the file has it."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return {**content, "digest": _digest(content)}

    @classmethod
    def load(cls, folder: str | Path) -> Manifest:
        """Read the manifest of a store.

        Raises:
            ConfigError: the folder holds no finished store, or one of another version, or the file is damaged.
        """
        path = Path(folder) / NAME
        text = _text(path)
        if text is None:
            raise ConfigError(
                f"{folder} holds no {NAME}, so it is no finished store; write one with `vlmpack pack`, or run that "
                "again where it was interrupted"
            )
        try:
            found = json.loads(text)
            if (found["format"], found["version"]) != (FORMAT, VERSION):
                raise ConfigError(
                    f"{path} is {found['format']} of version {found['version']}, and this vlmpack reads {FORMAT} of "
                    f"version {VERSION}; pack again"
                )
            manifest = cls._from_json(found)
            if json.loads(json.dumps(manifest.to_json())) != found:
                raise ValueError("it was changed since it was written: its digest is another one")
            _check_shards(manifest)
        except ConfigError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{path} is damaged ({error!r:.200}); restore it, or remove the folder and pack again"
            ) from error
        return manifest

    @classmethod
    def _from_json(cls, found: Mapping[str, Any]) -> Manifest:
        shards = tuple(Shard(**shard) for shard in found["shards"])
        parts = {"counts": Counts(**found["counts"]), "sizes": FixedSizes(**found["sizes"]), "shards": shards}
        return cls(**{**{field.name: found[field.name] for field in fields(cls)}, **parts})


def _text(path: Path) -> bytes | None:
    """The file's content; None: there is no such file."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        raise unreadable(path, error) from error


def _digest(content: Mapping[str, Any]) -> str:
    """SHA-256 of everything else in a manifest, however it is spaced and ordered."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def shard_name(number: int, files: int) -> str:
    """The name of one of so many files of rows, counted from 0."""
    return f"rows-{number:05d}-of-{files:05d}.parquet"


def _check_shards(manifest: Manifest) -> None:
    """Raise a ValueError unless files lie in the folder, each once and in order, and have the rows that are counted."""
    names = [shard.file for shard in manifest.shards]
    for number, name in enumerate(names):
        if name != (expected := shard_name(number, len(names))):
            raise ValueError(f"it names {name!r} where {expected} belongs")
    if (rows := sum(shard.rows for shard in manifest.shards)) != manifest.counts.rows:
        raise ValueError(f"its files have {rows} rows, and it counts {manifest.counts.rows}")
