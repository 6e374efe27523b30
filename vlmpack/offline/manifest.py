"""The manifest of a store: what it holds, how it was made, and the fixed sizes that CUDA graphs need."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, final

from vlmpack.errors import ConfigError

FORMAT, VERSION = "vlmpack.rows", 1
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
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    @classmethod
    def load(cls, folder: str | Path) -> Manifest:
        """Read the manifest of a store.

        Raises:
            ConfigError: the folder holds no finished store, or one of another version, or the file is damaged.
        """
        path = Path(folder) / NAME
        if not path.is_file():
            raise ConfigError(
                f"{folder} holds no {NAME}, so it is no finished store; write one with `vlmpack pack`, or run that "
                "again where it was interrupted"
            )
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if (found["format"], found["version"]) != (FORMAT, VERSION):
                raise ConfigError(
                    f"{path} is {found['format']} of version {found['version']}, and this vlmpack reads {FORMAT} of "
                    f"version {VERSION}; pack again"
                )
            shards = tuple(Shard(**shard) for shard in found["shards"])
            parts = {"counts": Counts(**found["counts"]), "sizes": FixedSizes(**found["sizes"]), "shards": shards}
            return cls(**{**{field.name: found[field.name] for field in fields(cls)}, **parts})
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is damaged ({error!r}); pack again") from error
