"""The manifest of a store: its files and counts, its settings and processor, and the fixed sizes of CUDA graphs.

Two processors with the same fingerprint write the same rows. Classes are no part of it: images are stored encoded, and
the image processors of one model family, with torchvision or without, cut them by the same settings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, final

from vlmpack.collate.collator import VLMCollator
from vlmpack.collate.processor_metadata import AUDIO_FIELDS, TEMPLATE_FIELDS, ProcessorMetadata, parts_of, pixel_bounds
from vlmpack.errors import ConfigError
from vlmpack.files import unreadable

FORMAT, VERSION = "vlmpack.rows", 4
NAME, PLAN, LENGTHS, LEFT_OUT = "manifest.json", "plan.zip", "lengths.zip", "left_out.jsonl"
"""Files of a store, besides its shards."""
WORK = ".work"
"""Folder in a store that is not finished."""


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
    samples: str
    """Digest of the digests of its samples, which its footer has too: no file of another store is taken for it."""


@final
@dataclass(frozen=True, kw_only=True)
class Counts:
    """Samples, rows, and totals over all rows."""

    total: int
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
    """Tokens that are trained on."""
    images: int
    """Images."""
    videos: int
    """Videos."""
    patches: int
    """Patches that go into the vision tower."""


@final
@dataclass(frozen=True, kw_only=True)
class FixedSizes:
    """Largest sizes of any row: they are allocated, or captured in a CUDA graph, once for all rows."""

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
    """Everything about a store that can be read without its rows."""

    settings: Mapping[str, Any]
    """Data set, collator and capacity that the rows were made with."""
    processor: Mapping[str, Any]
    """The processor's fingerprint."""
    plan: str
    """SHA-256 of the plan."""
    counts: Counts
    """Samples, rows, tokens."""
    reasons: Mapping[str, int]
    """Number of samples left out, by reason; each of them is in `left_out.jsonl`."""
    fill_ratio: float
    """Tokens of samples per token of row, 0 to 1, rows as wide as the capacity."""
    sizes: FixedSizes
    """Largest sizes of any row, which CUDA graphs need."""
    shards: tuple[Shard, ...]
    """The files, in the order of their rows."""

    @property
    def capacity(self) -> int:
        """Tokens that a row may hold."""
        return self.settings["capacity"]

    @property
    def bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.bytes for shard in self.shards)

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return {**content, "digest": _digest(content)}

    @classmethod
    def load(cls, folder: str | Path) -> Manifest:
        """Read the manifest of a store.

        Raises:
            ConfigError: the folder holds no finished store, or one of another version, or the file is damaged.
        """
        path = Path(folder) / NAME
        try:
            text = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise ConfigError(
                f"{folder} holds no {NAME}, so it is no finished store; write one with `vlmpack pack`, or run that "
                "again where it was interrupted"
            ) from None
        except OSError as error:
            raise unreadable(path, error) from error
        try:
            content = json.loads(text)
            if (content["format"], content["version"]) != (FORMAT, VERSION):
                raise ConfigError(
                    f"{path} is {content['format']} of version {content['version']}, and this vlmpack reads {FORMAT} "
                    f"of version {VERSION}; pack again"
                )
            if content.pop("digest") != _digest(content):
                raise ValueError("it was changed since it was written: its digest is another one")
            counts, sizes = Counts(**content["counts"]), FixedSizes(**content["sizes"])
            shards = tuple(Shard(**shard) for shard in content["shards"])
            parts = {"counts": counts, "sizes": sizes, "shards": shards}
            return cls(**{**{field.name: content[field.name] for field in fields(cls)}, **parts})
        except ConfigError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{path} is damaged ({error!r:.200}); restore it, or remove the folder and pack again"
            ) from error


def _digest(content: Mapping[str, Any]) -> str:
    """Compute the SHA-256 of a manifest without its digest, whatever its spaces and the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def shard_name(number: int, files: int) -> str:
    """Name one of so many files of rows, counted from 0."""
    return f"rows-{number:05d}-of-{files:05d}.parquet"


# ---------------------------------------------------------------------- the folder


def is_store(folder: str | Path) -> bool:
    """Return whether a finished store lies in a folder."""
    return (Path(folder) / NAME).is_file()


def is_unfinished_store(folder: str | Path) -> bool:
    """Return whether a store was begun in a folder and not finished."""
    return not is_store(folder) and (Path(folder) / WORK).is_dir()


def check_files(folder: Path, manifest: Manifest, *, others: Sequence[str] = (), verify: bool = False) -> None:
    """Refuse a store that has lost a file of rows, or whose files have another size; with `verify` another SHA-256.

    Args:
        folder: of the store.
        manifest: of the store.
        others: files besides those of rows that have to be there.
        verify: read all files of rows.

    Raises:
        ConfigError: it has; names the file.
    """
    expected = {**dict.fromkeys(others), **{shard.file: shard for shard in manifest.shards}}
    for name, shard in expected.items():
        path, fault = folder / name, ""
        try:
            size = path.stat().st_size if path.is_file() else None
        except OSError as error:
            raise unreadable(path, error) from error
        if size is None:
            fault = "is not there"
        elif shard is not None and size != shard.bytes:
            fault = f"has {size} bytes, and {NAME} lists it with {shard.bytes}"
        elif shard is not None and verify and sha256_of(path) != shard.sha256:
            fault = f"is damaged: its SHA-256 is not that of {NAME}"
        if fault:
            raise ConfigError(f"{path} {fault}; restore it, or remove the folder and pack again")


def sha256_of(path: Path) -> str:
    """Compute the SHA-256 of a file, in hexadecimal digits.

    Raises:
        ConfigError: it cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    except OSError as error:
        raise unreadable(path, error) from error
    return digest.hexdigest()


# ---------------------------------------------------------------------- the processor


IMAGE_SETTINGS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb", "rescale_factor", "resample")
"""Of an image processor, besides its sizes."""
_SIZES = ("patch_size", "merge_size", "temporal_patch_size")
NOT_TOKENS = {"assistant_ids", "newline_ids", *_SIZES, *TEMPLATE_FIELDS, *AUDIO_FIELDS}
"""Fields of `ProcessorMetadata` that vocabulary, template and image settings decide."""
PROBE = "The total is 75,000 Rp.\n\n  Größe 3½\u3000合計：１２３円 👍🏽 <|im_start|>user\nfoo_bar\t\\n 1e-5"
"""A text on whose tokens tokenizers of one vocabulary may still differ: merges, numbers, spaces, normalization."""


def fingerprint(collator: VLMCollator) -> dict[str, Any]:
    """Describe the parts of a collator's processor that decide tokens and patches, as JSON; texts by their digests."""
    metadata, parts = collator.metadata, parts_of(collator.processor)
    tokenizer = parts.tokenizer
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))
    template = collator.processor.chat_template
    return {
        "vocabulary": _short_digest(vocabulary),
        "tokenizer": _short_digest(json.dumps(tokenizer(PROBE)["input_ids"])),
        "chat_template": None if template is None else _short_digest(json.dumps(template)),
        "tokens": {name: value for name, value in asdict(metadata).items() if name not in NOT_TOKENS},
        "images": _image_settings(parts.image_processor, metadata) if metadata.has_vision else None,
    }


def differences(stored: Mapping[str, Any], current: Mapping[str, Any], name: str = "") -> Iterator[str]:
    """Yield a line for each part in which two descriptions differ."""
    for key in sorted({*stored, *current}):
        before, now, path = stored.get(key), current.get(key), f"{name}{key}"
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            yield from differences(before, now, f"{path}.")
        elif before != now:
            yield f"{path} was {json.dumps(before)} and is {json.dumps(now)}"


def _image_settings(image_processor: Any, metadata: ProcessorMetadata) -> dict[str, Any]:
    settings = image_processor.to_dict()
    if metadata.by_processor:  # of which no setting is known to have no effect
        text = json.dumps(settings, sort_keys=True, default=str)
        return {"settings": _short_digest(text)}
    fewest, most = pixel_bounds(image_processor, image_processor.size)
    return {
        **{name: settings.get(name) for name in IMAGE_SETTINGS},
        "min_pixels": fewest,
        "max_pixels": most,
        "image_mean": [float(value) for value in image_processor.image_mean],
        "image_std": [float(value) for value in image_processor.image_std],
        "patch_size": metadata.patch_size,
        "merge_size": metadata.merge_size,
        "temporal_patch_size": metadata.temporal_patch_size,
    }


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
