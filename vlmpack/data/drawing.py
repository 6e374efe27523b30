"""Rows of text to a picture of a receipt, with the exact place of every word.

    ┌──────────────── image ────────────────┐
    │   ┌─────────── paper (roi) ───────┐   │   desk around it at times; without a desk `roi` is {}
    │   │          KOPI PAGI            │   │
    │   │ 1 x  Es Teh   @ 8,000   8,000 │   │   left cells, inner column, right column
    │   │ ----------------------------- │   │   repeating_symbol
    │   └───────────────────────────────┘   │
    └───────────────────────────────────────┘

The paper is as wide as its widest row needs, so that no word can leave it. Pillow's own font is used: no font files.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from vlmpack.data.rows import Cell, Row, RuleRow, TextRow

EM = 38
"""Pixels of normal text at scale 1: with it a typical receipt is about as large as CORD's 864 x 1296."""
SMALLEST_EM = 8
"""Below this Pillow's font cannot be read any more."""
WORD_GAP = 0.33
"""Ems between two words: wider than the font's own space, so that small print stays readable."""
PORTRAIT = 1.2
"""A receipt is at least this much higher than wide."""

Quad = dict[str, int]


@dataclass(frozen=True, kw_only=True)
class PlacedWord:
    """One word on the picture."""

    text: str
    cell: Cell
    row: int
    quad: Quad
    """Corners in pixels, clockwise from the top left: x1, y1, ..., x4, y4."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A drawn receipt and where everything is on it."""

    image: Image.Image
    words: list[PlacedWord]
    rules: list[tuple[str, Quad]]
    roi: Quad | None
    """The paper's corners; None where the paper is the whole picture."""


def draw(rows: list[Row], rng: random.Random, grain: np.random.PCG64, scale: float = 1.0) -> Picture:
    """Print the rows.

    Args:
        rows: what is printed, top to bottom.
        rng: draws the look (size, paper, light, desk).
        grain: its raw bits become the noise of each pixel.
        scale: size of the text against `EM`; the picture's area goes with its square.
    """
    em = max(SMALLEST_EM, round(EM * scale * math.exp(rng.uniform(-0.28, 0.28))))
    sheet = _Sheet(rows, em, margin=round(em * rng.uniform(0.8, 2.0)))
    desk = round(em * rng.uniform(0.5, 2.5)) if rng.random() < 0.35 else 0
    width, height = sheet.width + 2 * desk, sheet.height + 2 * desk
    image = Image.new("RGB", (width, height), _desk_colour(rng))
    paper = (desk, desk, desk + sheet.width - 1, desk + sheet.height - 1)
    ImageDraw.Draw(image).rectangle(paper, fill=_paper_colour(rng))
    ink = rng.randrange(20, 75)
    words, rules = sheet.print_on(image, offset=desk, ink=(ink, ink, ink + 8))
    image = _light(image, rng, grain)
    return Picture(image=image, words=words, rules=rules, roi=quad_of(paper) if desk else None)


def quad_of(box: tuple[int, int, int, int]) -> Quad:
    """The corners of a box (left, top, right, bottom) as CORD writes them."""
    left, top, right, bottom = box
    corners = ((left, top), (right, top), (right, bottom), (left, bottom))
    return {f"{axis}{n}": at for n, point in enumerate(corners, start=1) for axis, at in zip("xy", point, strict=True)}


@lru_cache(maxsize=64)
def _font(size: int) -> ImageFont.FreeTypeFont:
    """Pillow's built-in font. The basic layout engine gives the same picture with and without libraqm."""
    font = ImageFont.load_default(size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise RuntimeError("this Pillow has no FreeType to draw receipts with; reinstall pillow from its wheel")
    return font.font_variant(layout_engine=ImageFont.Layout.BASIC)


class _Sheet:
    """The paper: measures the rows, then prints them."""

    def __init__(self, rows: list[Row], em: int, margin: int) -> None:
        self.rows = rows
        self.em = em
        self.margin = margin
        self.gap = 0.35 * em
        self.right_width = max(self._width(row, "right") for row in rows)
        self.width = math.ceil(max(self._needed(row) for row in rows)) + 2 * margin
        printed = sum(self._height(row) for row in rows) + 2 * margin
        self.height = max(printed, math.ceil(PORTRAIT * self.width))

    def print_on(
        self, image: Image.Image, offset: int, ink: tuple[int, int, int]
    ) -> tuple[list[PlacedWord], list[tuple[str, Quad]]]:
        pen = ImageDraw.Draw(image)
        words: list[PlacedWord] = []
        rules: list[tuple[str, Quad]] = []
        top = offset + self.margin
        for at, row in enumerate(self.rows):
            if isinstance(row, RuleRow):
                text = row.symbol * int((self.width - 2 * self.margin) / _font(self.em).getlength(row.symbol))
                rules.append((text, self._write(pen, text, (offset + self.margin, top), self.em, ink)))
            else:
                placed = self._print_row(pen, row, at, (offset, top), ink)
                _blur(image, [word.quad for word in placed if word.cell.illegible], self.em)
                words += placed
            top += self._height(row)
        return words, rules

    def _print_row(
        self, pen: ImageDraw.ImageDraw, row: TextRow, at: int, origin: tuple[int, int], ink: tuple[int, int, int]
    ) -> list[PlacedWord]:
        """Print each cell's words one by one, so that each has a box of its own."""
        size = self._size(row)
        starts = self._starts(row)
        placed = []
        for cell in row.cells:
            starts[cell.place] += cell.indent * size
            for text in cell.text.split():
                where = (round(origin[0] + starts[cell.place]), origin[1])
                placed.append(PlacedWord(text=text, cell=cell, row=at, quad=self._write(pen, text, where, size, ink)))
                starts[cell.place] += _font(size).getlength(text) + WORD_GAP * size
            starts[cell.place] += self.gap
        return placed

    def _starts(self, row: TextRow) -> dict[str, float]:
        """Where each place of the row begins, in pixels from the paper's left edge."""
        right = self.width - self.margin
        return {
            "left": float(self.margin),
            "inner": right - self.right_width - self.gap - self._width(row, "inner"),
            "right": right - self._width(row, "right") + WORD_GAP * self._size(row),
            "centre": (self.width - self._width(row, "centre")) / 2,
        }

    def _write(
        self, pen: ImageDraw.ImageDraw, text: str, where: tuple[int, int], size: int, ink: tuple[int, int, int]
    ) -> Quad:
        pen.text(where, text, font=_font(size), fill=ink)
        left, top, right, bottom = pen.textbbox(where, text, font=_font(size))
        return quad_of((math.floor(left), math.floor(top), math.ceil(right), math.ceil(bottom)))

    def _needed(self, row: Row) -> float:
        """Width of everything in the row, columns and the gaps between them included."""
        if isinstance(row, RuleRow):
            return 0.0
        inner = self._width(row, "inner")
        right = self.right_width if inner else self._width(row, "right")
        parts = (self._width(row, "left"), inner, right, self._width(row, "centre"))
        return sum(part + 2 * self.gap for part in parts if part)

    def _width(self, row: Row, place: str) -> float:
        if isinstance(row, RuleRow):
            return 0.0
        size = self._size(row)
        cells = [cell for cell in row.cells if cell.place == place]
        texts = [text for cell in cells for text in cell.text.split()]
        letters = sum(_font(size).getlength(text) for text in texts)
        spaces = WORD_GAP * len(texts) + sum(cell.indent for cell in cells)
        return letters + spaces * size + self.gap * max(len(cells) - 1, 0)

    def _height(self, row: Row) -> int:
        return round(1.35 * (self._size(row) if isinstance(row, TextRow) else self.em))

    def _size(self, row: TextRow) -> int:
        return max(SMALLEST_EM, round(self.em * row.size))


def _blur(image: Image.Image, quads: list[Quad], em: int) -> None:
    for quad in quads:
        box = (quad["x1"], quad["y1"], quad["x3"] + 1, quad["y3"] + 1)
        image.paste(image.crop(box).filter(ImageFilter.GaussianBlur(em / 4)), box[:2])


def _light(image: Image.Image, rng: random.Random, grain: np.random.PCG64) -> Image.Image:
    """A slope of light over the picture and grain of +-3 levels, in integers: the same on every platform."""
    width, height = image.size
    across = np.linspace(0, rng.randrange(-14, 15), width).astype(np.int16)
    down = np.linspace(0, rng.randrange(-18, 19), height).astype(np.int16)
    bits = grain.random_raw(-(-width * height // 8)).astype("<u8").view(np.uint8)[: width * height]
    noise = (bits.reshape(height, width) % 7).astype(np.int16) - 3
    level = noise + across[None, :] + down[:, None]
    pixels = np.asarray(image).astype(np.int16) + level[:, :, None]
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _paper_colour(rng: random.Random) -> tuple[int, int, int]:
    light = rng.randrange(228, 250)
    return light, light - rng.randrange(0, 5), light - rng.randrange(4, 20)


def _desk_colour(rng: random.Random) -> tuple[int, int, int]:
    return rng.choice(((92, 70, 52), (60, 62, 66), (140, 112, 84), (36, 40, 48), (118, 120, 118)))
