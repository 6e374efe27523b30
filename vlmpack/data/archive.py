"""The CORD archive, unpacked: a folder of images beside a folder of annotations, and no library needed to read it.

train/image/receipt_00000.png
train/json/receipt_00000.json
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmpack.errors import ConfigError, SampleError

SPLITS = {"train": "train", "validation": "dev", "test": "test"}
"""Name of a split in the dataset, and the name that CORD writes into `meta.split`."""
ALIASES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Names of splits in files and folders -> the splits; as `datasets` reads them."""

MENU_FIELDS = ("nm", "num", "unitprice", "cnt", "discountprice", "price", "itemsubtotal", "vatyn", "etc", "sub")
FIELDS = {
    "menu": MENU_FIELDS,
    "void_menu": ("nm", "price"),
    "sub_total": ("subtotal_price", "discount_price", "service_price", "othersvc_price", "tax_price", "etc"),
    "total": (
        "total_price", "total_etc", "cashprice", "changeprice", "creditcardprice", "emoneyprice", "menutype_cnt",
        "menuqty_cnt",
    ),
}  # fmt: skip
"""CORD's classes in the order in which `gt_parse` lists them. Source: github.com/clovaai/cord, README."""


def archive_in(folder: Path, split: str) -> ImageFolder | None:
    """The split in an unpacked archive; None: the folder holds none.

    Raises:
        ConfigError: it holds another split, or images without annotations.
    """
    for place in (folder / split, folder / in_files(split), folder):
        if (place / "image").is_dir() and (place / "json").is_dir():
            return _image_rows(place, split)
    return None


def in_files(split: str) -> str:
    """Return the name of the split in CORD's own files."""
    return SPLITS.get(split, split)


@dataclass(frozen=True, kw_only=True)
class ImageFolder:
    """The layout of the CORD archive: `image/receipt_00000.png` beside `json/receipt_00000.json`."""

    images: tuple[Path, ...]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The archive of version 0 has no `gt_parse`; it is then computed from the annotated lines."""
        image = self.images[index]
        try:
            text = _json_of(image).read_text(encoding="utf-8")
            truth = json.loads(text)
            if "gt_parse" not in truth and "valid_line" in truth:
                text = json.dumps({"gt_parse": parse_lines(truth["valid_line"]), **truth})
        except (OSError, ValueError, KeyError, TypeError) as error:  # UnicodeDecodeError is a ValueError
            fault = f"{_json_of(image)} cannot be read as a CORD annotation ({error!r}); download it again or remove it"
            raise SampleError(fault, index=index, reason="ground_truth_unreadable", sample_id=image.stem) from error
        return {"image": image, "ground_truth": text}


def _image_rows(folder: Path, split: str) -> ImageFolder:
    images = sorted(path for path in (folder / "image").iterdir() if path.suffix.lower() in (".png", ".jpg", ".jpeg"))
    if alone := [image.name for image in images if not _json_of(image).is_file()]:
        raise ConfigError(
            f"{len(alone)} images in {folder}/image have no annotation, first {alone[0]}; add it to json/"
        )
    if not images:
        raise ConfigError(f"no .png or .jpg in {folder / 'image'}; unpack the CORD archive there")
    rows = ImageFolder(images=tuple(images))
    written = _written_split(rows[0]["ground_truth"])
    if (name := ALIASES.get(written, split)) != split:
        raise ConfigError(
            f"{folder} holds split {name!r} ({written!r} in its files), not {split!r}; pass split={name!r}"
        )
    return rows


def _written_split(ground_truth: str) -> str:
    """Return `meta.split`, or nothing where there is no such entry."""
    truth = json.loads(ground_truth)
    meta = truth.get("meta") if isinstance(truth, dict) else None
    return str(meta.get("split", "")) if isinstance(meta, dict) else ""


def _json_of(image: Path) -> Path:
    return image.parent.parent / "json" / f"{image.stem}.json"


# ---------------------------------------------------------------------- annotated lines


def parse_lines(valid_line: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Compute the nested values (`gt_parse`) of annotated lines (`valid_line`).

    Key words are left out; words of a line are joined by spaces; several lines of one class in one group become a list;
    a menu of one item is a dict, not a list. Lines without `sub_group_id` (CORD v0) belong to sub group 0.
    """
    parse: dict[str, Any] = {}
    groups: dict[tuple[str, int], dict[str, Any]] = {}
    for line in valid_line:
        text = " ".join(word["text"] for word in line["words"] if not word["is_key"])
        top, _, name = line["category"].replace("menu.sub.", "menu.sub_").partition(".")
        group = line["group_id"] if top in ("menu", "void_menu") else 0
        if text:
            _add(groups.setdefault((top, group), {}), name, text, line.get("sub_group_id", 0))
    for top in _ordered((top for top, _ in groups), tuple(FIELDS)):
        values = [_in_order(group, FIELDS.get(top, ())) for (name, _), group in groups.items() if name == top]
        parse[top] = values if len(values) > 1 else values[0]
    return parse


def _add(group: dict[str, Any], name: str, text: str, sub_group: int) -> None:
    if name.startswith("sub_"):
        group = group.setdefault("sub", {}).setdefault(sub_group, {})
        name = name.removeprefix("sub_")
    value = group.get(name)
    group[name] = text if value is None else [*([value] if isinstance(value, str) else value), text]


def _in_order(group: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    if "sub" in group:
        subs = [_in_order(sub, MENU_FIELDS) for sub in group["sub"].values()]
        group["sub"] = subs if len(subs) > 1 else subs[0]
    return {name: group[name] for name in _ordered(group, fields)}


def _ordered(names: Iterable[str], first: tuple[str, ...]) -> list[str]:
    """Each name once: those in `first` in that order, then any other as it comes."""
    unique = dict.fromkeys(names)
    return [name for name in first if name in unique] + [name for name in unique if name not in first]
