"""The printed amounts of every synthetic receipt agree, and the check that says so can fail."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
from testing.arithmetic import amount, contradictions

from vlmpack.testing import SyntheticReceipts

LUNCH: dict[str, Any] = {
    "menu": [
        {"nm": "NASI GORENG", "unitprice": "@25,000", "cnt": "2 x", "price": "50,000"},
        {"nm": "SOTO", "cnt": "1 x", "price": "30,000", "discountprice": "-3,000", "itemsubtotal": "27,000"},
        {"nm": "ES TEH", "cnt": "1 x", "price": "8,000", "sub": {"nm": "Boba", "cnt": "2", "price": "10,000"}},
    ],
    "void_menu": {"nm": "ES TEH", "price": "-8,000"},
    "sub_total": {
        "subtotal_price": "87,000",
        "discount_price": "-7,000",
        "service_price": "4,000",
        "othersvc_price": "1,000",
        "tax_price": "8,440",
        "etc": "-40",
    },
    "total": {
        "total_price": "Rp 93,400",
        "emoneyprice": "10,000",
        "cashprice": "100,000",
        "changeprice": "16,600",
        "menutype_cnt": "3",
        "menuqty_cnt": "4",
    },
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("75,000", 75_000),
        ("75.000", 75_000),
        ("1.591.600", 1_591_600),
        ("75000", 75_000),
        ("75,000.00", 75_000),
        ("75.000,00", 75_000),
        ("Rp. 75.000", 75_000),
        ("@ 7,500", 7_500),
        ("-500", -500),
        ("(500)", -500),
        ("500-", -500),
        ("1 x", 1),
        ("x2", 2),
        ("3.00", 3),
        ("0", 0),
        ("", None),
        ("free", None),
        ("1,2,3", None),
        ("1.000,000", None),
        (["1", "2"], None),
        (None, None),
    ],
)
def test_amounts_are_read_as_printed(text: object, value: int | None) -> None:
    assert amount(text) == value


def test_an_honest_receipt_has_no_contradiction() -> None:
    assert contradictions(LUNCH) == []


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (("menu", 0, "unitprice"), "@24,000", "price of 'NASI GORENG' is 50000, but unitprice * cnt gives 48000"),
        (
            ("menu", 1, "itemsubtotal"),
            "26,000",
            "itemsubtotal of 'SOTO' is 26000, but price + discountprice gives 27000",
        ),
        (("menu", 2, "sub", "price"), "9,000", "subtotal_price is 87000, but the items' sum gives 86000"),
        (("void_menu", "price"), "-9,000", "subtotal_price is 87000, but the items' sum gives 86000"),
        (("sub_total", "tax_price"), "8,441", "total_price is 93400, but subtotal and charges gives 93401"),
        (("sub_total", "discount_price"), "7,001", "total_price is 93400, but subtotal and charges gives 93399"),
        (("total", "changeprice"), "16,000", "changeprice is 16000, but paid - total_price gives 16600"),
        (("total", "menutype_cnt"), "2", "menutype_cnt is 2, but the number of items gives 3"),
        (("total", "menuqty_cnt"), "5", "menuqty_cnt is 5, but the sum of cnt gives 4"),
    ],
)
def test_each_equation_is_checked(path: tuple[str | int, ...], value: str, sentence: str) -> None:
    wrong = deepcopy(LUNCH)
    place: Any = wrong
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert sentence in contradictions(wrong)


def test_without_a_printed_subtotal_the_total_is_checked_against_the_items() -> None:
    wrong = deepcopy(LUNCH)
    del wrong["sub_total"]["subtotal_price"]
    assert contradictions(wrong) == []
    wrong["total"]["total_price"] = "93,500"
    assert "total_price is 93500, but subtotal and charges gives 93400" in contradictions(wrong)


@pytest.mark.parametrize("parse", [{}, {"menu": []}, {"menu": "?"}, {"menu": {"nm": ["A", "B"], "price": ["1", "2"]}}])
def test_what_is_missing_or_strange_contradicts_nothing(parse: dict[str, Any]) -> None:
    assert contradictions(parse) == []


def test_every_synthetic_receipt_adds_up() -> None:
    receipts = SyntheticReceipts(num=100, seed=11, scale=0.25)
    parses = [json.loads(receipts[at]["ground_truth"])["gt_parse"] for at in range(100)]
    assert [(at, contradictions(parse)) for at, parse in enumerate(parses) if contradictions(parse)] == []


def test_most_synthetic_receipts_would_be_caught_lying() -> None:
    receipts = SyntheticReceipts(num=50, seed=11, scale=0.25)
    caught = 0
    for at in range(50):
        parse = json.loads(receipts[at]["ground_truth"])["gt_parse"]
        parse["total"]["total_price"] = "1"
        caught += bool(contradictions(parse))
    assert caught > 42
