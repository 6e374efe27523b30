"""How rows are planned and stored, and what of it has to be the same when a store is continued."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import lcm
from pathlib import Path
from typing import Any, final

import numpy as np

from vlmpack.collate import VLMCollator
from vlmpack.errors import ConfigError
from vlmpack.loading import MapStyle
from vlmpack.offline.files import WorkFolder, unreadable, writing
from vlmpack.offline.fingerprint import differences, fingerprint
from vlmpack.offline.manifest import LENGTHS, NAME, PLAN, Manifest
from vlmpack.offline.media import IMAGES, Images
from vlmpack.plan import OVERSIZE, Oversize, check_seed, checked_capacity, strategy_name

STARTED = "settings.json"
"""In the work folder: what is being made."""


@final
@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """How rows are planned and stored."""

    capacity: int
    """Tokens that a row may hold."""
    max_patches: int | None = None
    """Most patches of the vision tower in a row; None: no limit."""
    max_images: int | None = None
    """Most images and videos in a row; None: no limit."""
    strategy: str = "exact_fill"
    """How samples are placed: see `plan_bins`."""
    oversize: Oversize = "error"
    """What becomes of a sample that exceeds a row by itself: "error", "drop" (listed) or "own_row"."""
    seed: int | None = None
    """Shuffles samples and rows; None: samples keep their order."""
    rows_multiple: int = 1
    """Rows of many samples are cut in two until the number of rows is a multiple of this: ranks times accumulation."""
    images: Images = "bytes"
    """Images are kept as encoded "bytes", or as a "reference" to their files."""
    shard_rows: int = 128
    """Rows of a file. A kill costs the work on one file."""

    def __post_init__(self) -> None:
        for name in ("capacity", "max_patches", "max_images", "rows_multiple", "shard_rows"):
            if (value := self.__dict__[name]) is not None:
                object.__setattr__(self, name, checked_capacity(value, f"StoreSettings.{name}"))
        check_seed(self.seed)
        object.__setattr__(self, "seed", None if self.seed is None else int(self.seed))
        object.__setattr__(self, "strategy", strategy_name(self.strategy))
        if self.oversize not in OVERSIZE:
            raise ConfigError(f"oversize must be one of {', '.join(OVERSIZE)}, got {self.oversize!r}")
        if self.images not in IMAGES:
            raise ConfigError(f"images must be one of {', '.join(IMAGES)}, got {self.images!r}")


def check_collator(collator: VLMCollator, settings: StoreSettings) -> None:
    """Refuse the collator unless its rows can be stored.

    Raises:
        ConfigError: it pads, fixes sizes that are fixed when rows are read, or has slots that do not fit the capacity.
    """
    slots = collator.slots
    if collator.layout != "packed":
        raise ConfigError("rows are stored by VLMCollator(layout='packed'); this one has layout='padded'")
    if slots.pad_to is not None:
        raise ConfigError(
            f"slots.pad_to={slots.pad_to}: rows are stored without padding, and get a fixed width when they are read, "
            "by PackedDataset(pad_to_max_length=True); leave it out"
        )
    unit = lcm(slots.multiple, slots.row_multiple)
    if settings.capacity % unit:
        raise ConfigError(
            f"a capacity of {settings.capacity} tokens is no multiple of {unit}, which slots and rows are rounded up "
            f"to (multiple={slots.multiple}, row_multiple={slots.row_multiple}); choose "
            f"{settings.capacity // unit * unit or unit} or {(settings.capacity // unit + 1) * unit}"
        )


def described(dataset: MapStyle, collator: VLMCollator, settings: StoreSettings) -> dict[str, Any]:
    """Everything besides the samples that decides the bytes of a store, as JSON has it."""
    slots = {name: value for name, value in asdict(collator.slots).items() if name != "pad_to"}
    made = {"max_length": collator.max_length, "overlength": collator.overlength, "train_on": collator.train_on}
    made |= {} if collator.markers == "auto" else {"markers": collator.markers}
    limits = {**asdict(collator.limits), "formats": list(collator.limits.formats)}
    made_of = {
        "settings": {
            **asdict(settings),
            "slots": slots,
            "collator": {**made, "on_bad": collator.on_bad, "limits": limits},
            "data": {"samples": len(dataset)},
        },
        "processor": fingerprint(collator),
    }
    return json.loads(json.dumps(made_of, default=_number))


def _number(value: Any) -> Any:
    """A NumPy number, as settings of a collator may be, as a Python one."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r} is a {type(value).__name__}, and settings are numbers and texts")


def finished(out: Path, description: Mapping[str, Any]) -> Manifest | None:
    """The manifest of a folder in which this very store was finished before; None: there is none.

    Raises:
        ConfigError: another store was finished there; says in what they differ.
    """
    if not (out / NAME).is_file():
        return None
    manifest = Manifest.load(out)
    _check_same({"settings": manifest.settings, "processor": manifest.processor}, description, out)
    return manifest


def check_free(out: Path) -> None:
    """Refuse a folder unless a store may be begun or continued in it: nothing is made in somebody else's.

    Raises:
        ConfigError: it is a file, or holds something that is no part of a store.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file, and a store is a folder; name one that is empty or not there yet")
    folder = WorkFolder(out=out)
    if out.is_dir() and not (folder.path / STARTED).is_file():
        _check_empty(folder)


def claim(folder: WorkFolder, description: Mapping[str, Any]) -> None:
    """Make sure that a folder in which no store was finished holds parts of this one, or nothing.

    `check_free` has looked before there was a work folder. Until there is a plan, settings and samples may change:
    lengths are then measured again, out of their cache.

    Raises:
        ConfigError: it holds rows of other settings, data or processor (says which differ), or something else.
    """
    path = folder.path / STARTED
    stored = _stored(path)
    if stored and (folder.out / PLAN).is_file():
        _check_same(stored, description, folder.out)
    elif stored != description:
        _check_empty(folder)
        for outdated in (folder.out / LENGTHS, *folder.path.glob("lengths-*")):
            with writing(outdated):
                outdated.unlink(missing_ok=True)
        folder.write_json(path, description)


def _stored(path: Path) -> dict[str, Any]:
    """The description with which a store was begun; empty: there is none."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if not isinstance(stored, dict):
            raise ValueError(f"it holds a {type(stored).__name__}")
        return stored
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged ({error}); remove {path.parent.parent} and pack again") from error


def _check_same(stored: Mapping[str, Any], seen: Mapping[str, Any], out: Path) -> None:
    found = list(differences(stored, seen))
    if found:
        raise ConfigError(
            f"{out} holds rows that were made otherwise: {'; '.join(found)}. Pack into another folder, or remove this "
            "one"
        )


def _check_empty(folder: WorkFolder) -> None:
    ours = (folder.path.name, LENGTHS)
    try:
        others = sorted(path.name for path in folder.out.iterdir() if path.name not in ours)
    except OSError as error:
        raise unreadable(folder.out, error) from error
    if others:
        raise ConfigError(f"{folder.out} is no store and not empty ({', '.join(others[:5])}); choose another folder")
