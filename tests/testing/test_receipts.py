"""A synthetic receipt is a CORD v2 record: schema, quirks, sizes; and it depends on seed, split and index alone."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from vlmpack.data.cord import json2token
from vlmpack.errors import ConfigError
from vlmpack.testing import SyntheticReceipts
from vlmpack.testing.receipts import FIELDS, SPLITS, Printer, Sheet, quad_of

NUM = 300


def draw_receipt(index: int, **settings: Any) -> dict[str, Any]:
    return SyntheticReceipts(num=index + 1, **settings)[index]


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    return list(map(SyntheticReceipts(num=NUM, scale=0.25).__getitem__, range(NUM)))


@pytest.fixture(scope="module")
def truths(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [json.loads(record["ground_truth"]) for record in records]


@pytest.fixture(scope="module")
def parses(truths: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [truth["gt_parse"] for truth in truths]


def _leaves(value: Any) -> list[Any]:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return [value] if children is None else [leaf for child in children for leaf in _leaves(child)]


def _is_quad(quad: dict[str, int]) -> bool:
    return set(quad) == {f"{axis}{n}" for axis in "xy" for n in range(1, 5)} and {type(v) for v in quad.values()} == {
        int
    }


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(record["image"].tobytes() + record["ground_truth"].encode()).hexdigest()


class TestSchema:
    def test_a_record_has_the_two_columns_of_cord(self, records: list[dict[str, Any]]) -> None:
        for record in records:
            assert set(record) == {"image", "ground_truth"}
            assert record["image"].mode == "RGB"
            assert isinstance(record["ground_truth"], str)

    def test_the_ground_truth_has_the_entries_of_cord(self, truths: list[dict[str, Any]]) -> None:
        for truth in truths:
            assert list(truth) == ["gt_parse", "meta", "valid_line", "roi", "repeating_symbol", "dontcare"]

    def test_meta_names_version_split_id_and_the_size_of_the_image(
        self, records: list[dict[str, Any]], truths: list[dict[str, Any]]
    ) -> None:
        for at, (record, truth) in enumerate(zip(records, truths, strict=True)):
            width, height = record["image"].size
            size = {"width": width, "height": height}
            assert truth["meta"] == {"version": "2.0.0", "split": "train", "image_id": at, "image_size": size}

    def test_lines_and_words_are_annotated(self, truths: list[dict[str, Any]]) -> None:
        lines = [line for truth in truths for line in truth["valid_line"]]
        words = [word for line in lines for word in line["words"]]
        assert len(words) > 10 * NUM
        for line in lines:
            assert set(line) == {"words", "category", "group_id", "sub_group_id"}
        for word in words:
            assert set(word) == {"quad", "is_key", "row_id", "text"}
            assert word["is_key"] in (0, 1)
            assert word["text"]
            assert " " not in word["text"]
            assert _is_quad(word["quad"])

    def test_categories_are_those_of_the_cord_readme(self, truths: list[dict[str, Any]]) -> None:
        named = {f"{top}.{name}" for top, names in FIELDS.items() for name in names} - {"menu.sub"}
        named |= {f"menu.sub_{name}" for name in ("nm", "unitprice", "cnt", "price")}
        seen = {line["category"] for truth in truths for line in truth["valid_line"]}
        assert seen <= named
        assert len(seen) >= 22

    def test_every_value_is_a_string(self, parses: list[dict[str, Any]]) -> None:
        leaves = _leaves(parses)
        assert len(leaves) > 5 * NUM
        assert {type(leaf) for leaf in leaves} == {str}

    def test_parse_and_lines_agree(self, truths: list[dict[str, Any]]) -> None:
        for truth in truths:
            values = [
                " ".join(word["text"] for word in line["words"] if not word["is_key"]) for line in truth["valid_line"]
            ]
            assert sorted(values) == sorted(_leaves(truth["gt_parse"]))

    def test_dividing_lines_are_repeating_symbols(self, truths: list[dict[str, Any]]) -> None:
        symbols = [symbol for truth in truths for group in truth["repeating_symbol"] for symbol in group]
        assert len(symbols) >= 3 * NUM
        for symbol in symbols:
            assert set(symbol) == {"quad", "text"}
            assert len(set(symbol["text"])) == 1
            assert len(symbol["text"]) > 5

    def test_roi_is_empty_or_the_corners_of_the_paper(self, truths: list[dict[str, Any]]) -> None:
        corners = [truth["roi"] for truth in truths if truth["roi"]]
        assert 0.2 * NUM < len(corners) < 0.5 * NUM
        assert all(map(_is_quad, corners))

    def test_the_name_of_the_split_inside_is_dev(self) -> None:
        seen = {
            split: json.loads(draw_receipt(0, split=split, scale=0.25)["ground_truth"])["meta"]["split"]
            for split in SPLITS
        }
        assert seen == {"train": "train", "validation": "dev", "test": "test"}


class TestQuirks:
    """What trips readers of the real data, at a rate that a few hundred records show."""

    def _rate(self, parses: list[dict[str, Any]], text: str) -> float:
        return sum(text in json.dumps(parse) for parse in parses) / len(parses)

    def test_a_menu_of_one_item_is_a_dict(self, parses: list[dict[str, Any]]) -> None:
        single = [parse["menu"] for parse in parses if isinstance(parse.get("menu"), dict)]
        assert 0.1 < len(single) / NUM < 0.3
        assert not [parse for parse in parses if isinstance(parse.get("menu"), list) and len(parse["menu"]) == 1]

    def test_a_value_may_be_a_list(self, parses: list[dict[str, Any]]) -> None:
        assert 0.05 < self._rate(parses, '"nm": [') < 0.3

    def test_items_have_extras(self, parses: list[dict[str, Any]]) -> None:
        assert 0.1 < self._rate(parses, '"sub": ') < 0.4
        assert self._rate(parses, '"sub": [') > 0.02

    def test_a_record_may_have_no_menu(self, parses: list[dict[str, Any]], truths: list[dict[str, Any]]) -> None:
        without = [at for at, parse in enumerate(parses) if "menu" not in parse]
        assert 0 < len(without) < 0.05 * NUM
        assert all(truths[at]["dontcare"] for at in without)

    def test_fields_are_missing(self, parses: list[dict[str, Any]]) -> None:
        items = [item for parse in parses if isinstance(parse.get("menu"), list) for item in parse["menu"]]
        assert any("cnt" not in item for item in items)
        assert any("nm" not in item for item in items)
        assert any("price" not in item for item in items)
        without = sum("subtotal_price" not in parse.get("sub_total", {}) for parse in parses)
        assert 0.2 < without / NUM < 0.5

    def test_numbers_are_written_in_many_ways(self, parses: list[dict[str, Any]]) -> None:
        for form in ("1 x", "1x", "x1", "Rp", "@", ",000", ".000"):
            assert self._rate(parses, form) > 0.01, form

    def test_what_nobody_can_read_is_not_annotated(self, truths: list[dict[str, Any]]) -> None:
        illegible = [quad for truth in truths for row in truth["dontcare"] for quad in row]
        assert illegible
        assert all(map(_is_quad, illegible))
        for truth in truths:
            read = [word["quad"] for line in truth["valid_line"] for word in line["words"]]
            assert not [quad for row in truth["dontcare"] for quad in row if quad in read]


class TestVariety:
    def _spread(self, values: list[int]) -> float:
        short, long = np.percentile(values, [5, 95])
        return long / short

    def test_long_texts_are_five_times_short_ones(self, parses: list[dict[str, Any]]) -> None:
        assert 4 < self._spread([len(json2token(parse)) for parse in parses]) < 7

    def test_large_images_have_five_times_the_pixels_of_small_ones(self, records: list[dict[str, Any]]) -> None:
        assert 4 < self._spread([record["image"].width * record["image"].height for record in records]) < 7

    def test_all_are_portraits_of_many_shapes(self, records: list[dict[str, Any]]) -> None:
        shapes = [record["image"].height / record["image"].width for record in records]
        assert min(shapes) > 1
        assert self._spread(shapes) > 1.8

    def test_at_scale_one_they_are_as_large_as_those_of_cord(self) -> None:
        areas = [record["image"].width * record["image"].height for record in map(draw_receipt, range(20))]
        assert 0.5 < np.median(areas) / (864 * 1296) < 1.5

    def test_the_area_follows_the_square_of_the_scale(self) -> None:
        small, large = draw_receipt(3, scale=0.5)["image"], draw_receipt(3, scale=1.0)["image"]
        assert large.width * large.height == pytest.approx(4 * small.width * small.height, rel=0.1)

    def test_the_scale_changes_the_picture_and_not_the_words(self) -> None:
        small, large = (json.loads(draw_receipt(3, scale=scale)["ground_truth"]) for scale in (0.25, 1.0))
        assert small["gt_parse"] == large["gt_parse"]


@pytest.fixture(scope="module")
def sheets() -> list[Sheet]:
    rngs = [random.Random(seed) for seed in range(25)]
    return [Sheet(Printer(rng).rows, rng, 0.5) for rng in rngs]


class TestDrawing:
    """Every word's box holds that word, and nothing is printed outside the boxes."""

    def _box(self, quad: dict[str, int]) -> tuple[slice, slice]:
        return slice(quad["y1"], quad["y3"] + 1), slice(quad["x1"], quad["x3"] + 1)

    def _levels(self, sheet: Sheet) -> np.ndarray:
        return np.asarray(sheet.image.convert("L")).astype(int)

    def _darkest(self, sheet: Sheet) -> float:
        levels = self._levels(sheet)
        return float(np.median([levels[self._box(word["quad"])].min() for _, word in sheet.words]))

    def test_quads_go_clockwise_from_the_top_left(self) -> None:
        assert quad_of(1, 2, 5, 7) == {"x1": 1, "y1": 2, "x2": 5, "y2": 2, "x3": 5, "y3": 7, "x4": 1, "y4": 7}

    def test_every_box_lies_inside_the_paper(self, sheets: list[Sheet]) -> None:
        for sheet in sheets:
            paper = sheet.roi or quad_of(0, 0, sheet.image.width - 1, sheet.image.height - 1)
            quads = [word["quad"] for _, word in sheet.words]
            assert len(quads) > 8
            for quad in quads:
                assert paper["x1"] <= quad["x1"] < quad["x3"] <= paper["x3"]
                assert paper["y1"] <= quad["y1"] < quad["y3"] <= paper["y3"]

    def test_every_legible_word_is_dark_on_light(self, sheets: list[Sheet]) -> None:
        for sheet in sheets:
            levels = self._levels(sheet)
            for cell, word in sheet.words:
                box = levels[self._box(word["quad"])]
                assert cell.illegible or (box.min() < 150 and box.max() > 190), word["text"]

    def test_there_is_no_ink_outside_the_boxes(self, sheets: list[Sheet]) -> None:
        for sheet in sheets:
            levels = self._levels(sheet)
            for _, word in sheet.words:
                levels[self._box(word["quad"])] = 230
            assert (levels[self._box(sheet.roi)] if sheet.roi else levels).min() > 180

    def test_words_do_not_overlap(self, sheets: list[Sheet]) -> None:
        for sheet in sheets:
            covered = np.zeros(sheet.image.size[::-1], dtype=int)
            for _, word in sheet.words:
                covered[self._box(word["quad"])] += 1
            assert covered.max() == 1

    def test_amounts_end_in_one_column(self, sheets: list[Sheet]) -> None:
        for sheet in sheets:
            ends = {word["row_id"]: word["quad"]["x3"] for cell, word in sheet.words if cell.right}
            assert max(ends.values()) - min(ends.values()) <= 3

    def test_an_illegible_word_is_blurred(self) -> None:
        rng = random.Random(0)
        rows = Printer(rng).rows
        sharp = Sheet(rows, random.Random(1), 0.5)
        blurred = Sheet([[cell._replace(illegible=True) for cell in cells] for cells in rows], random.Random(1), 0.5)
        darkest = [
            [self._levels(sheet)[self._box(word["quad"])].min() for _, word in sheet.words]
            for sheet in (sharp, blurred)
        ]
        assert np.median(darkest[1]) > np.median(darkest[0]) + 40

    def test_the_smallest_scale_still_shows_letters(self) -> None:
        rng = random.Random(1)
        sheet = Sheet(Printer(rng).rows, rng, 0.25)
        heights = [word["quad"]["y3"] - word["quad"]["y1"] for _, word in sheet.words if word["text"][0].isupper()]
        assert min(heights) >= 5


class TestDeterminism:
    def test_an_index_may_be_numpy_s(self) -> None:
        receipts = SyntheticReceipts(num=2, scale=0.25)
        assert _digest(receipts[np.int64(-1)]) == _digest(receipts[1])  # pyright: ignore[reportArgumentType]

    def test_the_order_of_access_does_not_matter(self) -> None:
        receipts = SyntheticReceipts(num=7, seed=3, scale=0.25)
        forwards = [_digest(receipts[at]) for at in range(7)]
        backwards = [_digest(receipts[at]) for at in reversed(range(7))]
        assert forwards == backwards[::-1]
        assert len(set(forwards)) == 7

    def test_the_number_of_receipts_does_not_matter(self) -> None:
        assert _digest(SyntheticReceipts(num=5, scale=0.25)[2]) == _digest(SyntheticReceipts(scale=0.25)[2])

    def test_seeds_and_splits_give_other_receipts(self) -> None:
        others = [(0, "train"), (1, "train"), (0, "validation"), (0, "test")]
        parses = [
            json.dumps(json.loads(draw_receipt(0, seed=seed, split=split, scale=0.25)["ground_truth"])["gt_parse"])
            for seed, split in others
        ]
        assert len(set(parses)) == len(others)

    @pytest.mark.full
    def test_another_process_with_another_hash_seed_draws_the_same(self) -> None:
        code = (
            "import hashlib\nfrom vlmpack.testing import SyntheticReceipts\n"
            "for r in SyntheticReceipts(num=3, scale=0.25):\n"
            "    print(hashlib.sha256(r['image'].tobytes() + r['ground_truth'].encode()).hexdigest())"
        )
        environment = {**os.environ, "PYTHONHASHSEED": "12345"}
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        assert run.stdout.split() == [_digest(draw_receipt(at, scale=0.25)) for at in range(3)]

    def test_the_global_random_state_is_left_alone(self) -> None:
        before = random.getstate(), np.random.get_state()[1].tolist()
        draw_receipt(0, scale=0.25)
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before

    def test_the_words_of_the_second_receipt_are_these(self) -> None:
        """Pinned: whoever changes the generator changes every published number, and should know it."""
        assert json.loads(draw_receipt(1, scale=0.25)["ground_truth"])["gt_parse"] == PINNED


class TestDataset:
    def test_by_default_each_split_is_as_large_as_that_of_cord(self) -> None:
        assert {split: len(SyntheticReceipts(split=split)) for split in SPLITS} == {
            "train": 800,
            "validation": 100,
            "test": 100,
        }

    def test_it_counts_from_the_end_and_stops(self) -> None:
        receipts = SyntheticReceipts(num=3, scale=0.25)
        assert _digest(receipts[-1]) == _digest(receipts[2])
        with pytest.raises(IndexError, match="receipt 3 of 3"):
            receipts[3]

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"split": "dev"}, "no split 'dev' of the synthetic receipts; use one of train, validation, test"),
            ({"num": -1}, "num is -1; give a number"),
            ({"scale": 0.1}, "scale is 0.1; give one from 0.25"),
        ],
    )
    def test_wrong_settings_are_refused(self, wrong: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            SyntheticReceipts(**wrong)


PINNED: dict[str, Any] = {
    "menu": {"nm": "FISH & CHIPS KOMPLIT", "unitprice": "@8,000", "cnt": "2 x", "price": "16,000"},
    "sub_total": {"service_price": "800", "othersvc_price": "2,000", "tax_price": "1,680"},
    "total": {"total_price": "20,480", "cashprice": "30,000", "changeprice": "9,520"},
}
