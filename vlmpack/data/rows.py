"""From a bill to the rows of text on paper. Every cell knows its place in the row and its CORD label.

    TextRow   [1 x  Nasi Goreng            @ 25,000   25,000]     cells at the left, in two right-hand columns, centred
    RuleRow   --------------------------------------------
    TextRow   [TOTAL                                  25,000]     one annotated line: a key word and its value

Cells with the same `line` number become one `valid_line` of the ground truth.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

from vlmpack.data import catalogue as words
from vlmpack.data.content import Bill, Item, Style, SubItem

Place = Literal["left", "inner", "right", "centre"]

SMUDGED = ("menu.nm", "menu.cnt", "menu.unitprice", "menu.price")
"""What may be illegible on its own. Charges never are: without them the other amounts would seem to disagree."""


@dataclass(frozen=True, kw_only=True)
class Label:
    """The annotation of one line of text, as CORD names it."""

    category: str
    group: int
    sub_group: int = 0


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Some words at one place of a row."""

    text: str
    place: Place = "left"
    label: Label | None = None
    """None: printed, but not part of the annotation (the head and foot of a receipt)."""
    line: int = -1
    is_key: bool = False
    """Whether the text names the value (``TOTAL``) instead of being it."""
    indent: float = 0.0
    """Free space before it, in ems."""
    illegible: bool = False
    """Printed, then blurred: the annotation lists it under `dontcare`."""


@dataclass(frozen=True, kw_only=True)
class TextRow:
    cells: tuple[Cell, ...]
    size: float = 1.0
    """Height of the letters against the receipt's normal text."""


@dataclass(frozen=True, kw_only=True)
class RuleRow:
    symbol: str


Row = TextRow | RuleRow


def rows_of(bill: Bill, style: Style, rng: random.Random) -> list[Row]:
    """All rows of the receipt, top to bottom."""
    printer = _Printer(style, rng)
    printer.head()
    for item in bill.items:
        printer.item(item)
    for void in bill.voids:
        printer.void(void)
    printer.rule()
    printer.charges(bill)
    printer.payment(bill)
    printer.foot()
    return _hide_menu(printer.rows) if rng.random() < 0.01 else printer.rows


def _hide_menu(rows: list[Row]) -> list[Row]:
    """The quirk of a record without `menu`: its rows are there, but nobody can read them."""
    return [
        replace(row, cells=tuple(replace(cell, illegible=cell.illegible or _in_menu(cell)) for cell in row.cells))
        if isinstance(row, TextRow)
        else row
        for row in rows
    ]


def _in_menu(cell: Cell) -> bool:
    return cell.label is not None and cell.label.category.split(".")[0] in ("menu", "void_menu")


class _Printer:
    """Appends rows; counts groups and lines."""

    def __init__(self, style: Style, rng: random.Random) -> None:
        self.style = style
        self.rng = rng
        self.rows: list[Row] = []
        self.group = 0
        self.line = 0

    def row(self, *cells: Cell, size: float = 1.0) -> None:
        self.rows.append(TextRow(cells=cells, size=size))

    def rule(self) -> None:
        self.rows.append(RuleRow(symbol=self.style.rule))

    def labelled(self, name: str, text: str, place: Place = "left", *, sub: int = 0, indent: float = 0.0) -> Cell:
        """A cell that is an annotated line of its own, illegible at times."""
        self.line += 1
        label = Label(category=name, group=self.group, sub_group=sub)
        smudged = name in SMUDGED and self.rng.random() < 0.006
        return Cell(text=text, place=place, label=label, line=self.line, indent=indent, illegible=smudged)

    def head(self) -> None:
        rng = self.rng
        self.row(Cell(text=rng.choice(words.SHOPS), place="centre"), size=1.45)
        blurred = rng.random() < 0.15
        street = f"{rng.choice(words.STREETS)} No. {rng.randrange(1, 200)}"
        self.row(Cell(text=street, place="centre", illegible=blurred), size=0.85)
        self.row(Cell(text=rng.choice(words.CITIES), place="centre", illegible=blurred), size=0.85)
        day = f"{rng.randrange(1, 29):02}/{rng.randrange(1, 13):02}/{rng.randrange(2017, 2020)}"
        time = f"{rng.randrange(8, 23):02}:{rng.randrange(60):02}"
        self.row(Cell(text=f"{day} {time}"), Cell(text=f"#{rng.randrange(10**5):05}", place="right"))
        if rng.random() < 0.6:
            table = Cell(text=f"Table {rng.randrange(1, 40)}", place="right")
            self.row(Cell(text=f"Cashier: {rng.choice(words.CASHIERS)}"), table)
        self.rule()

    def foot(self) -> None:
        self.rule()
        self.row(Cell(text=self.rng.choice(words.THANKS), place="centre"))

    def item(self, item: Item) -> None:
        self.group += 1
        style = self.style
        number = [self.labelled("menu.num", item.number)] if style.prints_numbers and item.number else []
        count = [self.labelled("menu.cnt", style.count_form.format(item.count))] if style.prints_count else []
        unit = [self.labelled("menu.unitprice", self._unit(item.unit), "inner")] if style.prints_unit else []
        price = [self.labelled("menu.price", style.amount(item.price), "right")]
        price += [self.labelled("menu.vatyn", "T", "right")] if item.taxed else []
        first, *more = self._name("menu.nm", item.name)
        if style.layout == "two_rows":
            self.row(*number, first)
            self._continue(more)
            count = [replace(cell, indent=1.5) for cell in count]
            self.row(*count, *[replace(cell, place="left", indent=0.8) for cell in unit], *price)
        elif style.layout == "count_first":
            self.row(*number, *count, first, *unit, *price)
            self._continue(more)
        else:
            self.row(*number, first, *(unit or [replace(cell, place="inner") for cell in count]), *price)
            self._continue(more)
            if unit and count:
                self.row(*[replace(cell, indent=1.5) for cell in count])
        self._item_details(item)

    def _item_details(self, item: Item) -> None:
        if item.note:
            self.row(self.labelled("menu.etc", item.note, indent=1.5))
        for at, extra in enumerate(item.extras, start=1):
            self._extra(extra, sub=at)
        if item.discount:
            self._pair("menu.discountprice", "Disc", self.style.amount(-item.discount), indent=1.5)
            self.row(self.labelled("menu.itemsubtotal", self.style.amount(item.net), "right"))

    def _extra(self, extra: SubItem, sub: int) -> None:
        style = self.style
        count = f"{extra.count}x" if extra.count > 1 else ""
        cells = [self.labelled("menu.sub_cnt", count, sub=sub, indent=1.5)] if count else []
        cells.append(self.labelled("menu.sub_nm", extra.name, sub=sub, indent=0.0 if count else 1.5))
        if extra.unit and style.prints_unit and style.layout != "two_rows" and count:
            cells.append(self.labelled("menu.sub_unitprice", self._unit(extra.unit), "inner", sub=sub))
        if extra.price:
            cells.append(self.labelled("menu.sub_price", style.amount(extra.price), "right", sub=sub))
        self.row(*cells)

    def void(self, void: Item) -> None:
        self.group += 1
        first, *more = self._name("void_menu.nm", void.name)
        price = self.labelled("void_menu.price", self.style.amount(-void.price), "right")
        self.row(Cell(text="VOID"), first, price)
        self._continue(more)

    def charges(self, bill: Bill) -> None:
        self.group += 1
        keys = self.style.keys
        charged = any((bill.discount, bill.service, bill.other, bill.tax))
        if self.rng.random() < (0.85 if charged else 0.4):
            self._pair("sub_total.subtotal_price", keys["subtotal"], self.style.amount(bill.subtotal))
        amounts = (
            ("sub_total.discount_price", keys["discount"], -bill.discount),
            ("sub_total.service_price", keys["service"], bill.service),
            ("sub_total.othersvc_price", keys["other"], bill.other),
            ("sub_total.tax_price", keys["tax"], bill.tax),
            ("sub_total.etc", keys["rounding"], bill.rounding),
        )
        for name, key, value in amounts:
            if value:
                self._pair(name, key, self.style.amount(value))

    def payment(self, bill: Bill) -> None:
        self.group += 1
        style, rng, keys = self.style, self.rng, self.style.keys
        if rng.random() < 0.07:
            self._pair("total.menutype_cnt", keys["types"], str(len(bill.items)))
        if rng.random() < 0.3:
            self._pair("total.menuqty_cnt", keys["quantity"], style.count_form.format(sum(i.count for i in bill.items)))
        self._pair("total.total_price", keys["total"], style.money(bill.total), size=1.2)
        for name, key, value in (
            ("total.emoneyprice", keys["emoney"], bill.emoney),
            ("total.creditcardprice", keys["card"], bill.card),
            ("total.cashprice", keys["cash"], bill.cash),
        ):
            if value:
                self._pair(name, key, style.amount(value))
        if bill.cash:
            self._pair("total.changeprice", keys["change"], style.amount(bill.change))
        if rng.random() < 0.03:
            self._pair("total.total_etc", keys["saving"], style.amount(rng.randrange(1, 40) * 500))

    def _pair(self, category: str, key: str, value: str, *, size: float = 1.0, indent: float = 0.0) -> None:
        """A key word at the left and its value at the right: together one annotated line."""
        cell = self.labelled(category, value, "right")
        self.row(replace(cell, text=key, place="left", is_key=True, indent=indent), cell, size=size)

    def _name(self, category: str, name: str) -> list[Cell]:
        """A name on one row or more; one annotated line, or one for each row (the value is then a list)."""
        name = name.upper() if self.style.upper else name
        parts = _wrap(name, self.style.wrap)
        cells = [self.labelled(category, parts[0])]
        for part in parts[1:]:
            split = self.style.wrap_is_list
            cells.append(self.labelled(category, part) if split else replace(cells[0], text=part))
        return [cells[0], *(replace(cell, indent=1.5) for cell in cells[1:])]

    def _continue(self, cells: list[Cell]) -> None:
        for cell in cells:
            self.row(cell)

    def _unit(self, value: int) -> str:
        return ("@ " if self.style.layout != "two_rows" else "@") + self.style.amount(value)


def _wrap(text: str, width: int) -> list[str]:
    """Break at spaces so that no part is longer than `width`, where words allow it."""
    parts: list[str] = []
    for word in text.split():
        if parts and len(parts[-1]) + 1 + len(word) <= width:
            parts[-1] += " " + word
        else:
            parts.append(word)
    return parts
