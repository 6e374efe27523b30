"""A synthetic receipt is a CORD v2 record: schema, quirks, sizes, sums; it depends on seed, split and index alone."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest

from vlmpack.errors import ConfigError
from vlmpack.testing import SyntheticReceipts
from vlmpack.testing.receipts import FIELDS

NUM = 300
Records = list[dict[str, Any]]


def draw_receipt(index: int, **settings: Any) -> dict[str, Any]:
    return SyntheticReceipts(num=index + 1, **settings)[index]


def parse_of(record: dict[str, Any]) -> dict[str, Any]:
    return json.loads(record["ground_truth"])["gt_parse"]


@pytest.fixture(scope="module")
def records() -> Records:
    return list(map(SyntheticReceipts(num=NUM, scale=0.25).__getitem__, range(NUM)))


@pytest.fixture(scope="module")
def truths(records: Records) -> Records:
    return [json.loads(record["ground_truth"]) for record in records]


@pytest.fixture(scope="module")
def parses(truths: Records) -> Records:
    return [truth["gt_parse"] for truth in truths]


def leaves_of(value: Any) -> list[Any]:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return [value] if children is None else [leaf for child in children for leaf in leaves_of(child)]


def digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(record["image"].tobytes() + record["ground_truth"].encode()).hexdigest()


# ---------------------------------------------------------------------- the schema of CORD


def test_a_record_has_the_columns_and_the_entries_of_cord(records: Records, truths: Records) -> None:
    for at, (record, truth) in enumerate(zip(records, truths, strict=True)):
        assert set(record) == {"image", "ground_truth"}
        assert (record["image"].mode, type(record["ground_truth"])) == ("RGB", str)
        assert list(truth) == ["gt_parse", "meta"]
        width, height = record["image"].size
        size = {"width": width, "height": height}
        assert truth["meta"] == {"version": "2.0.0", "split": "train", "image_id": at, "image_size": size}


def test_values_are_strings_of_the_classes_of_cord(parses: Records) -> None:
    assert {type(leaf) for parse in parses for leaf in leaves_of(parse)} == {str}
    items = [item for parse in parses for menu in [parse.get("menu", [])] for item in as_list(menu)]
    subs = [sub for item in items for sub in as_list(item.get("sub", []))]
    assert {name for sub in subs for name in sub} == {"nm", "unitprice", "cnt", "price"}
    assert {name for item in items for name in item} == {*FIELDS["menu"]}
    assert {name for parse in parses for name in parse["total"]} == {*FIELDS["total"]}


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


# ---------------------------------------------------------------------- what trips readers of the real data


def test_menus_and_values_have_the_forms_of_the_real_ones(parses: Records) -> None:
    def rate(text: str) -> float:
        return sum(text in json.dumps(parse) for parse in parses) / len(parses)

    menus = [parse.get("menu") for parse in parses]
    assert 0.1 < sum(isinstance(menu, dict) for menu in menus) / NUM < 0.3
    assert not [menu for menu in menus if isinstance(menu, list) and len(menu) == 1], "a menu of one item is a dict"
    assert 0.05 < rate('"nm": [') < 0.3
    assert 0.1 < rate('"sub": ') < 0.4
    assert rate('"sub": [') > 0.02
    without = [at for at, menu in enumerate(menus) if menu is None]
    assert 0 < len(without) < 0.05 * NUM
    items = [item for menu in menus if isinstance(menu, list) for item in menu]
    assert all(any(name not in item for item in items) for name in ("cnt", "nm", "price"))
    assert 0.2 < sum("subtotal_price" not in parse.get("sub_total", {}) for parse in parses) / NUM < 0.5
    assert all(rate(form) > 0.01 for form in ("1 x", "1x", "x1", "Rp", "@", ",000", ".000"))


def test_the_scale_changes_the_picture_and_not_the_words() -> None:
    areas = [record["image"].width * record["image"].height for record in map(draw_receipt, range(20))]
    assert 0.5 < np.median(areas) / (864 * 1296) < 1.5, "at scale 1 as large as those of CORD"
    small, large = draw_receipt(3, scale=0.5), draw_receipt(3, scale=1.0)
    size = large["image"].width * large["image"].height
    assert size == pytest.approx(4 * small["image"].width * small["image"].height, rel=0.1)
    assert parse_of(small) == parse_of(large)


# ---------------------------------------------------------------------- the same everywhere


def test_a_receipt_depends_on_seed_split_and_index_alone() -> None:
    receipts = SyntheticReceipts(num=7, seed=3, scale=0.25)
    forwards = [digest(receipts[at]) for at in range(7)]
    assert len(SyntheticReceipts(split="validation")) == 100
    assert json.loads(draw_receipt(0, split="validation", scale=0.25)["ground_truth"])["meta"]["split"] == "dev"
    assert forwards == [digest(receipts[at]) for at in reversed(range(7))][::-1]
    assert len(set(forwards)) == 7
    assert digest(receipts[np.int64(-1)]) == forwards[-1]  # pyright: ignore[reportArgumentType]
    assert digest(SyntheticReceipts(num=5, scale=0.25)[2]) == digest(SyntheticReceipts(scale=0.25)[2])
    others = [(0, "train"), (1, "train"), (0, "validation"), (0, "test")]
    parses = [json.dumps(parse_of(draw_receipt(0, seed=seed, split=split, scale=0.25))) for seed, split in others]
    assert len(set(parses)) == len(others)


def test_the_words_of_the_second_receipt_are_these() -> None:
    """Pinned: whoever changes the generator changes every published number, and should know it."""
    assert parse_of(draw_receipt(1, scale=0.25)) == {
        "menu": {"nm": "FISH & CHIPS KOMPLIT", "unitprice": "@8,000", "cnt": "2 x", "price": "16,000"},
        "sub_total": {"service_price": "800", "othersvc_price": "2,000", "tax_price": "1,680"},
        "total": {"total_price": "20,480", "cashprice": "30,000", "changeprice": "9,520"},
    }


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"split": "dev"}, "no split 'dev' of the synthetic receipts; use one of train, validation, test"),
        ({"num": -1}, "num is -1; give a number"),
        ({"scale": 0.1}, "scale is 0.1; give one from 0.25"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SyntheticReceipts(**wrong)
