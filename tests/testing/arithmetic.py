"""Do the amounts printed on a receipt agree? Read from the strings of a `gt_parse`, so that labels can be verified.

    price        = unitprice * cnt                                   each item, each extra
    itemsubtotal = price + discountprice                             discounts are printed as negative amounts
    subtotal     = sum of item prices (after discount), extras, voids
    total        = subtotal + service + othersvc + tax + etc - |discount|      etc: rounding
    change       = cash + card + emoney - total
    menutype_cnt = number of items;  menuqty_cnt = sum of cnt

An equation is skipped when one of its amounts is missing or cannot be read: who says nothing contradicts nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_WORDS = re.compile(r"rp\.?|idr|[@:a-z\s]", re.IGNORECASE)
_NUMBER = re.compile(r"(\d{1,3}(?:([.,])\d{3}(?:\2\d{3})*)?|\d+)(?:[.,]\d{2})?")


def amount(text: object) -> int | None:
    """The whole number printed as ``75,000``, ``Rp. 75.000``, ``@75,000.00``, ``-500``, ``(500)``, ``1 x`` or ``x2``.

    Both ``,`` and ``.`` separate thousands; two digits after the last one are cents and are dropped.
    None: not a number.
    """
    if not isinstance(text, str):
        return None
    bare = _WORDS.sub("", text)
    negative = bare.startswith("-") or bare.endswith("-") or (bare.startswith("(") and bare.endswith(")"))
    match = _NUMBER.fullmatch(bare.strip("-()"))
    if match is None:
        return None
    value = int(re.sub(r"[.,]", "", match.group(1)))
    return -value if negative else value


def contradictions(parse: Mapping[str, Any]) -> list[str]:
    """Every equation above that the printed amounts break, as a sentence; an empty list when all agree.

    Args:
        parse: a `gt_parse`, from a synthetic receipt or a real one.
    """
    items, voids = _as_list(parse.get("menu")), _as_list(parse.get("void_menu"))
    found = [sentence for item in items for sentence in _item_contradictions(item)]
    subtotal = _subtotal(parse, items, voids)
    total = amount(_group(parse, "total").get("total_price"))
    printed = amount(_group(parse, "sub_total").get("subtotal_price"))
    found += _unequal("subtotal_price", printed, "the items' sum", _sum_of_items(items, voids))
    found += _unequal("total_price", total, "subtotal and charges", _with_charges(subtotal, _group(parse, "sub_total")))
    found += _payment_contradictions(_group(parse, "total"), total)
    return found + _count_contradictions(_group(parse, "total"), items)


def _item_contradictions(item: Mapping[str, Any]) -> list[str]:
    found = []
    for entry in (item, *_as_list(item.get("sub"))):
        unit, count = amount(entry.get("unitprice")), amount(entry.get("cnt"))
        product = unit * count if unit is not None and count is not None else None
        found += _unequal(f"price of {entry.get('nm')!r}", amount(entry.get("price")), "unitprice * cnt", product)
    price, discount = amount(item.get("price")), amount(item.get("discountprice"))
    reduced = price + discount if price is not None and discount is not None else None
    return found + _unequal(
        f"itemsubtotal of {item.get('nm')!r}", amount(item.get("itemsubtotal")), "price + discountprice", reduced
    )


def _payment_contradictions(group: Mapping[str, Any], total: int | None) -> list[str]:
    paid = _sum_of_all(group, ("cashprice", "creditcardprice", "emoneyprice"))
    due = paid - total if paid is not None and total is not None else None
    return _unequal("changeprice", amount(group.get("changeprice")), "paid - total_price", due)


def _count_contradictions(group: Mapping[str, Any], items: list[Mapping[str, Any]]) -> list[str]:
    kinds, pieces = amount(group.get("menutype_cnt")), amount(group.get("menuqty_cnt"))
    found = _unequal("menutype_cnt", kinds, "the number of items", len(items) or None)
    counts = [amount(item.get("cnt")) for item in items]
    return found + _unequal("menuqty_cnt", pieces, "the sum of cnt", _sum_or_none(counts))


def _subtotal(parse: Mapping[str, Any], items: list[Mapping[str, Any]], voids: list[Mapping[str, Any]]) -> int | None:
    printed = _group(parse, "sub_total").get("subtotal_price")
    return _sum_of_items(items, voids) if printed is None else amount(printed)


def _sum_of_items(items: list[Mapping[str, Any]], voids: list[Mapping[str, Any]]) -> int | None:
    """None without items, or when an item, a printed extra or a void has no readable price."""
    prices = [_net(item) for item in items]
    prices += [amount(sub["price"]) for item in items for sub in _as_list(item.get("sub")) if "price" in sub]
    return _sum_or_none(prices + [amount(void.get("price")) for void in voids] if items else [])


def _net(item: Mapping[str, Any]) -> int | None:
    price = amount(item.get("price"))
    if "itemsubtotal" in item or "discountprice" not in item or price is None:
        return amount(item.get("itemsubtotal")) if "itemsubtotal" in item else price
    discount = amount(item["discountprice"])
    return None if discount is None else price + discount


def _with_charges(subtotal: int | None, group: Mapping[str, Any]) -> int | None:
    charges = [amount(group[name]) for name in ("service_price", "othersvc_price", "tax_price", "etc") if name in group]
    discount = amount(group.get("discount_price", "0"))
    return _sum_or_none([subtotal, *charges, None if discount is None else -abs(discount)])


def _sum_of_all(group: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return _sum_or_none([amount(group[name]) for name in names if name in group])


def _sum_or_none(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if values and len(known) == len(values) else None


def _unequal(name: str, printed: int | None, formula: str, expected: int | None) -> list[str]:
    if printed is None or expected is None or printed == expected:
        return []
    return [f"{name} is {printed}, but {formula} gives {expected}"]


def _as_list(value: Any) -> list[Mapping[str, Any]]:
    """One dict or several: CORD writes a menu of one item as a dict."""
    values = value if isinstance(value, list) else [value]
    return [entry for entry in values if isinstance(entry, Mapping)]


def _group(parse: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = parse.get(name)
    return value if isinstance(value, Mapping) else {}
