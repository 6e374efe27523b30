"""Synthetic receipts in the schema of CORD v2: a picture and its values, with amounts that add up to the rupiah.

(seed, split, index) ─▶ Printer: rows of cells ─┬─▶ draw: picture
                                                └─▶ parse: gt_parse
"""

from __future__ import annotations

import json
import math
import operator
import random
import textwrap
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, final

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from vlmpack.data.open import OpenDataset
from vlmpack.errors import ConfigError

SPLITS = {"train": ("train", 800), "validation": ("dev", 100), "test": ("test", 100)}
"""For each split, CORD's name in `meta.split` and CORD's number of records."""
SMALLEST_LEGIBLE = 0.35
"""Scale of the text for demos on a CPU: a receipt has 200 to 1300 tokens in a tiny model."""
EM, SMALLEST_EM, WORD_GAP, PORTRAIT = 42, 8, 0.33, 1.2
"""Text size in pixels at scale 1, smallest legible size in pixels, gap between words in ems, minimum height / width."""
DISHES = "Nasi Goreng|Ayam Bakar|Soto Ayam|Sate Kambing|Beef Burger|Fish & Chips|Es Teh|Kopi Susu|Mineral Water"
KINDS = "||Spesial|Seafood|Pedas|Komplit|Kampung|Jumbo|Crispy|Sambal Matah|Lada Hitam|Cinnamon Sugar|Less Sugar|(R)"


@final
@dataclass(frozen=True, kw_only=True)
class SyntheticReceipts:
    """A map-style dataset of synthetic receipts: `len()`, `[i] -> {"image": PIL image, "ground_truth": JSON string}`.

    A record depends on the settings and the index only. Drawing takes some tens of milliseconds; nothing is cached.

    Raises:
        ConfigError: the split is unknown, `num` is negative, or `scale` is not between 0.25 and 4.
    """

    split: str = "train"
    """``train``, ``validation`` or ``test``; each has different receipts."""
    num: int | None = None
    """Number of receipts; None: as many as in CORD (800, 100, 100)."""
    seed: int = 0
    """Random seed; different seeds give different receipts."""
    scale: float = 1.0
    """Size of the text: 1 is CORD's, 0.35 the smallest that stays legible."""

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ConfigError(f"no split {self.split!r} of the synthetic receipts; use one of {', '.join(SPLITS)}")
        if self.num is not None and self.num < 0:
            raise ConfigError(f"num is {self.num}; give a number of receipts that is not negative, or None for all")
        if not 0.25 <= self.scale <= 4:
            raise ConfigError(f"scale is {self.scale}; give one from 0.25 (barely legible) to 4")

    def __len__(self) -> int:
        return SPLITS[self.split][1] if self.num is None else self.num

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"receipt {index} of {len(self)}")
        index = operator.index(index) % len(self)  # JSON cannot store numpy's integers
        rng = random.Random(f"{self.seed} {self.split} {index}")
        rows = Printer(rng).rows
        image = draw(rows, rng, self.scale)
        size = {"width": image.width, "height": image.height}
        meta = {"version": "2.0.0", "split": SPLITS[self.split][0], "image_id": index, "image_size": size}
        return {"image": image, "ground_truth": json.dumps({"gt_parse": parse(rows), "meta": meta})}


def receipt_conversations(**settings: Any) -> OpenDataset:
    """Open synthetic receipts as conversations, like a dataset from `open_dataset`.

    `settings` are the fields of `SyntheticReceipts`.
    """
    return OpenDataset(files=(SyntheticReceipts(**settings),), folders=(None,), name="synthetic")


class Cell(NamedTuple):
    """Words at one side of a row, and the value that they are: its class ("": none), its item, its extra."""

    text: str
    right: bool = False
    category: str = ""
    group: int = 0
    sub: int = 0
    illegible: bool = False


class Printer:
    """A bill with random items, printed as rows in one shop's style."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.rows, self.group = rng, list[list[Cell]](), 0
        self.separator, self.cents = rng.choices(((",", ""), (".", ""), (",", ".00"), (".", ",00")), (60, 30, 4, 2))[0]
        self.count_form = rng.choices(("{}", "{} x", "{}x", "x{}", "{}.00"), (40, 25, 18, 7, 4))[0]
        self.two_rows, self.upper, self.counts, self.units = (rng.random() < p for p in (0.4, 0.6, 0.9, 0.2))
        self.wrap = rng.choice((14, 18, 22, 26)) if rng.random() < 0.3 else 40
        self.hidden, rule = "menu" if rng.random() < 0.01 else " ", Cell(text=rng.choice("--=.*") * 20)
        self._row(Cell(text=self._pick("KOPI PAGI|BAKSO PAK DARTO|Roti Butter|Green Bowl")))
        self._row(Cell(text=f"{rng.randrange(1, 29):02}/05/2019"), Cell(text=f"#{rng.randrange(10**5)}", right=True))
        self._row(rule)
        kinds = rng.choices(range(1, 17), (20, 18, 14, 11, 9, 7, 5, 4, 3, 3, 2, 2, 1, 1, 1, 1))[0]
        counts, prices = zip(*[self._item() for _ in range(kinds)], strict=True)
        self._row(rule)
        self._totals(sum(prices), kinds, sum(counts))
        self._row(rule)

    def _pick(self, choices: str) -> str:
        return self.rng.choice(choices.split("|"))

    def _amount(self, value: int) -> str:
        return f"{value:,}".replace(",", self.separator) + self.cents

    def _row(self, *cells: Cell) -> None:
        self.rows.append([*cells])

    def _cell(self, category: str, text: str, right: bool = False, *, sub: int = 0) -> Cell:
        """Return the cell of a value. An item's name, count and prices may be illegible, but not discounts, taxes or
        totals: without them the other amounts would not seem to add up."""
        smudged = category in ("menu.nm", "menu.cnt", "menu.unitprice", "menu.price") and self.rng.random() < 0.006
        return Cell(text, right, category, self.group, sub, smudged or category.startswith(self.hidden))

    def _pair(self, category: str, keys: str, value: str) -> None:
        """Print a key on the left and its value on the right."""
        cell = self._cell(category, value, True)
        self._row(Cell(self._pick(keys), illegible=cell.illegible), cell)

    def _item(self) -> tuple[int, int]:
        """Print an item with its extras; return its count and its full charge."""
        rng, self.group = self.rng, self.group + 1
        unit, count = 500 * rng.randrange(8, 200), rng.choices((1, 2, 3, 4, 5, 10), (66, 20, 7, 4, 2, 1))[0]
        left = [self._cell("menu.cnt", self.count_form.format(count))] if self.counts else []
        left += [self._cell("menu.unitprice", f"@{self._amount(unit)}")] if self.two_rows or self.units else []
        price = self._cell("menu.price", self._amount(unit * count), True)
        name = f"{self._pick(DISHES)} {self._pick(KINDS)}"
        parts = textwrap.wrap(name.upper() if self.upper else name, self.wrap)
        first, *more = [self._cell("menu.nm", part) for part in parts]  # a name on several rows becomes a list
        self._row(*([first] if self.two_rows else [first, *left, price]))
        self.rows += [[cell] for cell in more] + ([[*left, price]] if self.two_rows else [])
        charged = unit * count
        if rng.random() < 0.04:
            self._pair("menu.discountprice", "Disc|Promo", self._amount(-500))
            charged -= 500
            self._row(self._cell("menu.itemsubtotal", self._amount(charged), True))
        for sub in range(1, 1 + rng.choices((0, 1, 2, 3), (94, 3, 2, 1))[0]):
            unit, pieces = rng.choice((0, 0, 2000, 3500, 5000)), rng.choice((1, 1, 1, 2))
            texts = {"nm": self._pick("Extra Keju|Telur|Nasi Putih|No Onion"), "cnt": f"{pieces}x"}
            texts |= {"unitprice": f"@{self._amount(unit)}", "price": self._amount(unit * pieces)} if unit else {}
            self._row(*[self._cell(f"menu.sub_{key}", text, key == "price", sub=sub) for key, text in texts.items()])
            charged += unit * pieces
        return count, charged

    def _totals(self, subtotal: int, kinds: int, count: int) -> None:
        """Print the subtotal, discounts and charges, the total, and the payment."""
        rng, amount = self.rng, self._amount
        discounted, served, packed, taxed, rounded = (rng.random() < p for p in (0.12, 0.15, 0.03, 0.42, 0.6))
        discount, packing = -(subtotal // 5000 * 500) * discounted, 2000 * packed
        service = (subtotal + discount) // 20 * served
        tax = (subtotal + discount + service) // 10 * taxed
        total = subtotal + discount + service + packing + tax
        shown, rounding = rng.random() < (0.4 if total == subtotal else 0.85), -(total % 100) * rounded
        total += rounding
        payment = rng.choices(("cash", "card", "voucher", "voucher and cash", ""), (64, 15, 3, 2, 16))[0]
        voucher = (total if payment == "voucher" else total // 2) * ("voucher" in payment)
        cash = -(-(total - voucher) // 10_000) * 10_000 * ("cash" in payment)
        for category, keys, value in (
            ("sub_total.subtotal_price", "Subtotal|SUB TOTAL|Sub-Total|SUBTTL", amount(subtotal) * shown),
            ("sub_total.discount_price", "Discount|DISC|Potongan|Promo Disc", amount(discount) * bool(discount)),
            ("sub_total.service_price", "Service Charge|SERVICE 5%|Svc Chg|Service", amount(service) * served),
            ("sub_total.othersvc_price", "Packing Fee|Delivery|Admin Fee", amount(packing) * packed),
            ("sub_total.tax_price", "PB1 10%|TAX 10%|Pajak (10%)|PPN 10%|Tax", amount(tax) * taxed),
            ("sub_total.etc", "Rounding|Pembulatan|ROUND", amount(rounding) * bool(rounding)),
            ("total.menutype_cnt", "Total Item|Items|ITEM", str(kinds) * (rng.random() < 0.07)),
            ("total.menuqty_cnt", "Total Qty|Qty|TOTAL QTY", self.count_form.format(count) * (rng.random() < 0.3)),
            ("total.total_price", "TOTAL|Total|GRAND TOTAL|JUMLAH", self._pick("||||Rp |Rp. ") + amount(total)),
            ("total.emoneyprice", "E-Money|Voucher|Points", amount(voucher) * bool(voucher)),
            ("total.creditcardprice", "DEBIT CARD|Credit Card|BCA CARD|VISA", amount(total) * (payment == "card")),
            ("total.cashprice", "CASH|Tunai|Cash|BAYAR", amount(cash) * bool(cash)),
            ("total.changeprice", "CHANGE|Kembali|KEMBALIAN", amount(cash + voucher - total) * bool(cash)),
        ):  # a string times False is empty, and an empty value is not printed
            self.group += category in ("sub_total.subtotal_price", "total.menutype_cnt")
            if value:
                self._pair(category, keys, value)


def draw(rows: list[list[Cell]], rng: random.Random, scale: float) -> Image.Image:
    """Draw printed rows on paper, on a desk or without one."""
    em = max(SMALLEST_EM, round(EM * scale * math.exp(rng.uniform(-0.28, 0.28))))
    font = _font(em)

    def width_of(cells: list[Cell]) -> float:
        return sum(font.getlength(x) + WORD_GAP * em for cell in cells for x in cell.text.split())

    margin, desk = round(em * rng.uniform(0.8, 2.0)), round(em * rng.choice((0, 0, 0.8, 0, 0, 2.0)))
    width = 2 * margin + math.ceil(max(map(width_of, rows)))
    height = max(2 * margin + len(rows) * round(1.35 * em), math.ceil(PORTRAIT * width))
    image = Image.new("RGB", (width + 2 * desk, height + 2 * desk), (rng.randrange(36, 120), 70, 52))
    pen, paper = ImageDraw.Draw(image), (desk, desk, desk + width - 1, desk + height - 1)
    pen.rectangle(paper, fill=(rng.randrange(228, 250), 240, 228))
    for at, cells in enumerate(rows):
        top = desk + margin + at * round(1.35 * em)
        right = desk + width - margin - width_of([cell for cell in cells if cell.right])
        for side, left in ((False, float(desk + margin)), (True, right)):
            for cell in (cell for cell in cells if cell.right is side):
                for text in cell.text.split():
                    pen.text((round(left), top), text, font=font, fill=(45, 45, 55))
                    if cell.illegible:
                        x1, y1, x2, y2 = pen.textbbox((round(left), top), text, font=font)
                        box = (math.floor(x1), math.floor(y1), math.ceil(x2), math.ceil(y2))
                        image.paste(image.crop(box).filter(ImageFilter.GaussianBlur(em / 4)), box[:2])
                    left += font.getlength(text) + WORD_GAP * em
    grain = np.frombuffer(rng.randbytes(math.prod(image.size)), np.uint8).reshape(image.height, -1, 1)
    level = (grain % 7).astype(np.int16) - 3
    return Image.fromarray(np.clip(np.asarray(image) + level, 0, 255).astype(np.uint8))


@lru_cache(maxsize=64)
def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont), "reinstall pillow from its wheel, which has FreeType"
    return font.font_variant(layout_engine=ImageFont.Layout.BASIC)  # draws the same picture with and without libraqm


# ---------------------------------------------------------------------- values

FIELDS = {
    "menu": ["nm", "unitprice", "cnt", "discountprice", "price", "itemsubtotal", "sub"],
    "sub_total": ["subtotal_price", "discount_price", "service_price", "othersvc_price", "tax_price", "etc"],
    "total": [
        "total_price",
        "cashprice",
        "changeprice",
        "creditcardprice",
        "emoneyprice",
        "menutype_cnt",
        "menuqty_cnt",
    ],
}
"""The classes that are printed, in CORD's order. Source: github.com/clovaai/cord, README."""


def parse(rows: list[list[Cell]]) -> dict[str, Any]:
    """Return the legible values as `gt_parse` nests them.

    Several values of one class in one item become a list. A menu with one item is a dict, not a list.
    """
    parsed: dict[str, Any] = {}
    groups: dict[tuple[str, int], dict[str, Any]] = {}
    for cell in (cell for row in rows for cell in sorted(row, key=lambda cell: cell.right)):
        text, (top, _, name) = " ".join(cell.text.split()), cell.category.partition(".")
        if top and text and not cell.illegible:
            _add(groups.setdefault((top, cell.group if top == "menu" else 0), {}), name, text, cell.sub)
    for top in (top for top in FIELDS if any(name == top for name, _ in groups)):
        values = [_in_order(group, FIELDS[top]) for (name, _), group in groups.items() if name == top]
        parsed[top] = values if len(values) > 1 else values[0]
    return parsed


def _add(group: dict[str, Any], name: str, text: str, sub_group: int) -> None:
    if name.startswith("sub_"):
        group = group.setdefault("sub", {}).setdefault(sub_group, {})
        name = name.removeprefix("sub_")
    value = group.get(name)
    group[name] = text if value is None else [*([value] if isinstance(value, str) else value), text]


def _in_order(group: dict[str, Any], fields: list[str]) -> dict[str, Any]:
    if "sub" in group:
        subs = [_in_order(sub, FIELDS["menu"]) for sub in group["sub"].values()]
        group["sub"] = subs if len(subs) > 1 else subs[0]
    return {name: group[name] for name in fields if name in group}
