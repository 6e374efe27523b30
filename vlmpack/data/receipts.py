"""Synthetic receipts in the schema of CORD v2: drawn, annotated, and consistent to the last rupiah.

    seed, split, index ──▶ Bill ──▶ rows ──▶ picture + quads ──▶ valid_line ──▶ gt_parse
                           content   rows     drawing              (labels)     (nested values)

`gt_parse` is computed from `valid_line` by `parse_lines`, as the makers of CORD did it, so the two cannot disagree.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import index as whole
from typing import Any

import numpy as np

from vlmpack.data.content import make_bill, make_style
from vlmpack.data.drawing import Picture, PlacedWord, draw
from vlmpack.data.rows import rows_of
from vlmpack.errors import ConfigError

SPLITS = {"train": "train", "validation": "dev", "test": "test"}
"""Name of a split in the dataset, and the name that CORD writes into `meta.split`."""
SIZES = {"train": 800, "validation": 100, "test": 100}
"""Records in each split of CORD."""

SMALLEST_LEGIBLE = 0.35
"""Scale of the text, good for demos on a CPU: a tiny model gets 200 to 1300 tokens of each receipt."""

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


@dataclass(frozen=True, kw_only=True)
class SyntheticReceipts:
    """A map-style dataset of drawn receipts: `len()`, and `[i] -> {"image": PIL image, "ground_truth": JSON string}`.

    A record depends on seed, split and index alone: not on the order of access, the process or the platform's hash
    seed. Drawing takes some tens of milliseconds; nothing is cached.

    Raises:
        ConfigError: an unknown split, a negative seed or number, or a scale at which nothing is legible.
    """

    split: str = "train"
    """``train``, ``validation`` or ``test``: different receipts in each."""
    num: int | None = None
    """How many; None: as many as in CORD (800, 100, 100)."""
    seed: int = 0
    """Another seed gives other receipts."""
    scale: float = 1.0
    """Size of the text: 1 is CORD's, 0.35 the smallest that stays legible (good for demos on a CPU)."""

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ConfigError(f"no split {self.split!r} of the synthetic receipts; use one of {', '.join(SPLITS)}")
        if self.num is not None and self.num < 0:
            raise ConfigError(f"num is {self.num}; give a number of receipts that is not negative, or None for all")
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; give one that is not negative")
        if not 0.25 <= self.scale <= 4:
            raise ConfigError(f"scale is {self.scale}; give one from 0.25 (barely legible) to 4")

    def __len__(self) -> int:
        return SIZES[self.split] if self.num is None else self.num

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"receipt {index} of {len(self)}")
        return draw_receipt(index % len(self), split=self.split, seed=self.seed, scale=self.scale)


def draw_receipt(index: int, *, split: str = "train", seed: int = 0, scale: float = 1.0) -> dict[str, Any]:
    """One record: `{"image": RGB PIL image, "ground_truth": JSON string}`."""
    index = whole(index)  # the ids of a plan are numpy's, which JSON does not know
    content, look, grain = np.random.SeedSequence([seed, list(SPLITS).index(split), index]).spawn(3)
    rng = _python_rng(content)
    rows = rows_of(make_bill(rng), make_style(rng), rng)
    picture = draw(rows, _python_rng(look), np.random.PCG64(grain), scale)
    return {"image": picture.image, "ground_truth": json.dumps(_ground_truth(picture, split=split, index=index))}


def parse_lines(valid_line: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The nested values (`gt_parse`) of annotated lines (`valid_line`).

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
        found = [_in_order(group, FIELDS.get(top, ())) for (name, _), group in groups.items() if name == top]
        parse[top] = found if len(found) > 1 else found[0]
    return parse


def _add(group: dict[str, Any], name: str, text: str, sub_group: int) -> None:
    if name.startswith("sub_"):
        group = group.setdefault("sub", {}).setdefault(sub_group, {})
        name = name.removeprefix("sub_")
    seen = group.get(name)
    group[name] = text if seen is None else [*([seen] if isinstance(seen, str) else seen), text]


def _in_order(group: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    if "sub" in group:
        subs = [_in_order(sub, MENU_FIELDS) for sub in group["sub"].values()]
        group["sub"] = subs if len(subs) > 1 else subs[0]
    return {name: group[name] for name in _ordered(group, fields)}


def _ordered(names: Iterable[str], first: tuple[str, ...]) -> list[str]:
    """Each name once: those in `first` in that order, then any other as it comes."""
    seen = dict.fromkeys(names)
    return [name for name in first if name in seen] + [name for name in seen if name not in first]


def _ground_truth(picture: Picture, *, split: str, index: int) -> dict[str, Any]:
    width, height = picture.image.size
    valid_line = _valid_line([word for word in picture.words if word.cell.label and not word.cell.illegible])
    return {
        "gt_parse": parse_lines(valid_line),
        "meta": {
            "version": "2.0.0",
            "split": SPLITS[split],
            "image_id": index,
            "image_size": {"width": width, "height": height},
        },
        "valid_line": valid_line,
        "roi": picture.roi or {},
        "repeating_symbol": [[{"quad": quad, "text": text}] for text, quad in picture.rules],
        "dontcare": _dontcare([word for word in picture.words if word.cell.illegible]),
    }


def _valid_line(words: list[PlacedWord]) -> list[dict[str, Any]]:
    """One entry per annotated line, in reading order of their first words."""
    lines: dict[int, dict[str, Any]] = {}
    for word in words:
        label = word.cell.label
        assert label is not None, "only labelled words are annotated"
        line = lines.setdefault(
            word.cell.line,
            {
                "words": [],
                "category": label.category,
                "group_id": label.group,
                "sub_group_id": label.sub_group,
            },
        )
        entry = {"quad": word.quad, "is_key": int(word.cell.is_key), "row_id": word.row, "text": word.text}
        line["words"].append(entry)
    return list(lines.values())


def _dontcare(words: list[PlacedWord]) -> list[list[dict[str, int]]]:
    """The boxes that nobody can read, grouped by row."""
    rows: dict[int, list[dict[str, int]]] = {}
    for word in words:
        rows.setdefault(word.row, []).append(word.quad)
    return list(rows.values())


def _python_rng(sequence: np.random.SeedSequence) -> random.Random:
    return random.Random(int.from_bytes(sequence.generate_state(8).astype("<u4").tobytes(), "little"))
