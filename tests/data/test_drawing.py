"""Every word's box holds that word and nothing is printed outside the boxes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from vlmpack.data.content import make_bill, make_style
from vlmpack.data.drawing import Picture, Quad, draw, quad_of
from vlmpack.data.rows import rows_of


def picture_of(seed: int, scale: float = 0.5) -> Picture:
    rng = random.Random(seed)
    return draw(rows_of(make_bill(rng), make_style(rng), rng), rng, np.random.PCG64(seed), scale)


def box_of(quad: Quad) -> tuple[slice, slice]:
    return slice(quad["y1"], quad["y3"] + 1), slice(quad["x1"], quad["x3"] + 1)


def brightness(picture: Picture) -> np.ndarray:
    return np.asarray(picture.image.convert("L")).astype(int)


@pytest.fixture(scope="module")
def pictures() -> list[Picture]:
    return [picture_of(seed) for seed in range(25)]


def test_quads_go_clockwise_from_the_top_left() -> None:
    assert quad_of((1, 2, 5, 7)) == {"x1": 1, "y1": 2, "x2": 5, "y2": 2, "x3": 5, "y3": 7, "x4": 1, "y4": 7}


def test_every_box_lies_inside_the_paper(pictures: list[Picture]) -> None:
    for picture in pictures:
        width, height = picture.image.size
        paper = picture.roi or quad_of((0, 0, width - 1, height - 1))
        quads = [word.quad for word in picture.words] + [quad for _, quad in picture.rules]
        assert len(quads) > 20
        for quad in quads:
            assert paper["x1"] <= quad["x1"] < quad["x3"] <= paper["x3"]
            assert paper["y1"] <= quad["y1"] < quad["y3"] <= paper["y3"]


def test_every_legible_word_is_dark_on_light(pictures: list[Picture]) -> None:
    for picture in pictures:
        levels = brightness(picture)
        for word in picture.words:
            if not word.cell.illegible:
                box = levels[box_of(word.quad)]
                assert box.min() < 150, word.text
                assert box.max() > 190, word.text


def test_there_is_no_ink_outside_the_boxes(pictures: list[Picture]) -> None:
    for picture in pictures:
        levels = brightness(picture)
        for quad in [word.quad for word in picture.words] + [quad for _, quad in picture.rules]:
            levels[box_of(quad)] = 230
        paper = levels[box_of(picture.roi)] if picture.roi else levels
        assert paper.min() > 180


def test_words_do_not_overlap(pictures: list[Picture]) -> None:
    for picture in pictures:
        taken = np.zeros(picture.image.size[::-1], dtype=int)
        for word in picture.words:
            taken[box_of(word.quad)] += 1
        assert taken.max() == 1


def test_a_row_reads_from_left_to_right_with_its_amounts_in_line(pictures: list[Picture]) -> None:
    for picture in pictures:
        ends = [
            max(word.quad["x3"] for word in picture.words if word.row == row)
            for row in {word.row for word in picture.words if word.cell.place == "right"}
        ]
        assert max(ends) - min(ends) <= 3


def test_an_illegible_word_is_blurred() -> None:
    words = [(picture, word) for picture in map(picture_of, range(30)) for word in picture.words]
    blurred = [brightness(picture)[box_of(word.quad)] for picture, word in words if word.cell.illegible]
    assert len(blurred) > 5
    sharp = [brightness(picture)[box_of(word.quad)] for picture, word in words[:50] if not word.cell.illegible]
    assert np.median([box.min() for box in blurred]) > np.median([box.min() for box in sharp]) + 40


def test_the_smallest_scale_still_shows_letters() -> None:
    picture = picture_of(1, scale=0.25)
    heights = [word.quad["y3"] - word.quad["y1"] for word in picture.words if word.text[0].isupper()]
    assert min(heights) >= 5
