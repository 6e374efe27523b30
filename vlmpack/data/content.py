"""What one receipt says, before anything is printed: a bill whose amounts agree, and a shop's way of printing.

Amounts are integers in rupiah. Everything random is drawn from one `random.Random`, whose streams are the same on every
platform and Python version.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from vlmpack.data import catalogue as words


@dataclass(frozen=True, kw_only=True)
class SubItem:
    """An extra below an item. A unit price of 0 is printed without any price."""

    name: str
    unit: int
    count: int

    @property
    def price(self) -> int:
        return self.unit * self.count


@dataclass(frozen=True, kw_only=True)
class Item:
    """One thing bought: `price = unit * count`, `net = price - discount`, extras on top of it."""

    name: str
    unit: int
    count: int
    number: str | None = None
    discount: int = 0
    note: str | None = None
    taxed: bool = False
    extras: tuple[SubItem, ...] = ()

    @property
    def price(self) -> int:
        return self.unit * self.count

    @property
    def net(self) -> int:
        return self.price - self.discount

    @property
    def charged(self) -> int:
        return self.net + sum(extra.price for extra in self.extras)


@dataclass(frozen=True, kw_only=True)
class Bill:
    """All amounts of a receipt, in rupiah."""

    items: tuple[Item, ...]
    voids: tuple[Item, ...] = ()
    """Items taken back: printed with a negative price, subtracted from the subtotal."""
    discount: int = 0
    service: int = 0
    other: int = 0
    tax: int = 0
    rounding: int = 0
    """Added to reach a round total; zero or negative."""
    cash: int = 0
    card: int = 0
    emoney: int = 0

    @property
    def subtotal(self) -> int:
        return sum(item.charged for item in self.items) - sum(void.price for void in self.voids)

    @property
    def total(self) -> int:
        return self.subtotal - self.discount + self.service + self.other + self.tax + self.rounding

    @property
    def change(self) -> int:
        return self.cash + self.card + self.emoney - self.total


@dataclass(frozen=True, kw_only=True)
class Style:
    """How one shop prints: everything that is the same for all rows of a receipt."""

    separator: str
    """Between thousands: ``,`` or ``.`` or nothing."""
    currency: str
    """Before a total: ``Rp`` or nothing."""
    decimals: bool
    """Whether ``.00`` (or ``,00``) follows each amount."""
    count_form: str
    """A template such as ``"{} x"``."""
    layout: str
    """``count_first``, ``count_middle`` or ``two_rows``."""
    prints_count: bool
    prints_unit: bool
    prints_numbers: bool
    upper: bool
    """Whether names are printed in capitals."""
    wrap: int
    """Characters of a name after which it goes on in the next row."""
    wrap_is_list: bool
    """Whether the annotator made two labels of a wrapped name (its value is then a list) or one."""
    rule: str
    """The symbol of a dividing line."""
    keys: dict[str, str] = field(default_factory=dict)
    """The printed name of each amount, such as ``{"tax": "PB1 10%"}``."""

    def amount(self, value: int) -> str:
        digits = f"{abs(value):,}".replace(",", self.separator)
        cents = ("," if self.separator == "." else ".") + "00" if self.decimals else ""
        return ("-" if value < 0 else "") + digits + cents

    def money(self, value: int) -> str:
        return f"{self.currency} {self.amount(value)}".strip()


def make_bill(rng: random.Random) -> Bill:
    """Draw a bill whose amounts agree with each other."""
    items = tuple(_make_item(rng) for _ in range(_item_count(rng)))
    voids = _make_voids(items, rng)
    bill = Bill(items=items, voids=voids)
    discount = _round(bill.subtotal * rng.choice((5, 10, 20)) // 100, 500) if rng.random() < 0.12 else 0
    base = bill.subtotal - discount
    service = base * 5 // 100 if rng.random() < 0.15 else 0
    other = rng.choice((1000, 2000, 5000)) if rng.random() < 0.03 else 0
    tax = (base + service) * 10 // 100 if rng.random() < 0.42 else 0
    bill = Bill(items=items, voids=voids, discount=discount, service=service, other=other, tax=tax)
    rounding = -(bill.total % 100) if rng.random() < 0.6 else 0
    bill = Bill(**{**vars(bill), "rounding": rounding})
    return Bill(**{**vars(bill), **_payment(bill.total, rng)})


def make_style(rng: random.Random) -> Style:
    """Draw a shop's way of printing."""
    layout = rng.choices(("count_first", "count_middle", "two_rows"), weights=(4, 2, 4))[0]
    separator = rng.choices((",", ".", ""), weights=(6, 3, 1))[0]
    return Style(
        separator=separator,
        currency=rng.choices(("", "Rp", "Rp."), weights=(7, 2, 1))[0],
        decimals=separator != "" and rng.random() < 0.06,
        count_form=rng.choices(("{}", "{} x", "{}x", "x{}", "{}.00"), weights=(40, 25, 18, 7, 4))[0],
        layout=layout,
        prints_count=rng.random() < 0.9,
        prints_unit=layout == "two_rows" or rng.random() < 0.2,
        prints_numbers=rng.random() < 0.05,
        upper=rng.random() < 0.6,
        wrap=rng.choice((14, 18, 22, 26)),
        wrap_is_list=rng.random() < 0.3,
        rule=rng.choices(("-", "=", ".", "*"), weights=(6, 3, 1, 1))[0],
        keys=_make_keys(rng),
    )


def _make_keys(rng: random.Random) -> dict[str, str]:
    choices = {
        "subtotal": words.SUBTOTAL_KEYS,
        "total": words.TOTAL_KEYS,
        "tax": words.TAX_KEYS,
        "service": words.SERVICE_KEYS,
        "other": words.OTHER_KEYS,
        "discount": words.DISCOUNT_KEYS,
        "rounding": words.ROUNDING_KEYS,
        "cash": words.CASH_KEYS,
        "change": words.CHANGE_KEYS,
        "card": words.CARD_KEYS,
        "emoney": words.EMONEY_KEYS,
        "types": words.TYPE_KEYS,
        "quantity": words.QUANTITY_KEYS,
        "saving": words.SAVING_KEYS,
    }
    return {name: rng.choice(keys) for name, keys in choices.items()}


def _item_count(rng: random.Random) -> int:
    """1 to 16 items; most receipts are short, and a few are long."""
    return rng.choices(range(1, 17), weights=(20, 18, 14, 11, 9, 7, 5, 4, 3, 3, 2, 2, 1, 1, 1, 1))[0]


def _make_item(rng: random.Random) -> Item:
    drink = rng.random() < 0.4
    stems, kinds = (words.DRINKS, words.DRINK_KINDS) if drink else (words.DISHES, words.DISH_KINDS)
    unit = rng.randrange(8, 70) * 500 if drink else rng.randrange(20, 260) * 500
    count = rng.choices((1, 2, 3, 4, 5, 10), weights=(66, 20, 7, 4, 2, 1))[0]
    return Item(
        name=f"{rng.choice(stems)} {rng.choice(kinds)}".strip(),
        unit=unit,
        count=count,
        number=f"{rng.randrange(1000, 9999)}",
        discount=_round(unit * count // 10, 500) if rng.random() < 0.04 else 0,
        note=rng.choice(words.NOTES) if rng.random() < 0.01 else None,
        taxed=rng.random() < 0.03,
        extras=tuple(_make_extra(rng) for _ in range(rng.choices((0, 1, 2, 3), weights=(94, 3, 2, 1))[0])),
    )


def _make_extra(rng: random.Random) -> SubItem:
    name, unit = rng.choice(words.EXTRAS), rng.choice((0, 0, 2000, 3500, 5000))
    return SubItem(name=name, unit=unit, count=rng.choice((1, 1, 1, 2)))


def _make_voids(items: tuple[Item, ...], rng: random.Random) -> tuple[Item, ...]:
    """At times one piece of a full-price item is taken back, so that the subtotal stays positive."""
    full_price = [item for item in items if not item.discount]
    if rng.random() >= 0.03 or len(items) < 3 or not full_price:
        return ()
    item = rng.choice(full_price)
    return (Item(name=item.name, unit=item.unit, count=1),)


def _payment(total: int, rng: random.Random) -> dict[str, int]:
    kind = rng.choices(("cash", "card", "emoney", "both", "none"), weights=(64, 15, 3, 2, 16))[0]
    if kind == "card":
        return {"card": total}
    if kind == "emoney":
        return {"emoney": total}
    voucher = min(10_000, total // 2) if kind == "both" else 0
    note = rng.choice((1000, 10_000, 50_000, 100_000))
    return {} if kind == "none" else {"emoney": voucher, "cash": -(-(total - voucher) // note) * note}


def _round(value: int, step: int) -> int:
    return value // step * step
