"""A row as letters: who is where, what is an image, what is padding; with and without colours."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from vlmpack.cli.show_ribbon import draw, make_ribbon
from vlmpack.errors import LayoutError
from vlmpack.layout import Segments, SlotRule


def shown(segments: Segments, types: list[int] | None = None, ids: list[int | str] | None = None, *, width: int = 40,
          tokens_per_cell: int | None = None) -> str:  # fmt: skip
    """What a terminal without colours shows, without the spaces at the ends of lines."""
    file = io.StringIO()
    given = None if types is None else np.array(types)
    ribbon = make_ribbon(segments, given, ids, width=width, tokens_per_cell=tokens_per_cell)
    Console(file=file, width=width, color_system=None).print(draw(ribbon, width=width))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def test_a_row_of_three_samples_with_an_image_gaps_and_a_tail() -> None:
    """Slots of 4, 16 tokens: the second sample has three image tokens."""
    segments = Segments.from_lengths([3, 5, 2], SlotRule(multiple=4, pad_to=20))
    types = [0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert shown(segments, types, [17, "receipt-4", 2], width=60) == (
        " 0 aaa.bBBBb...cc......\n"
        "\n"
        "a 17: 3   b receipt-4: 5 (3 image)   c 2: 2\n"
        "\n"
        "20 tokens = 7 text + 3 image (capitals) + 10 padding (dots),\n"
        "3 samples. A character is a token."
    )


def test_lines_begin_with_their_place_in_the_row() -> None:
    segments = Segments.from_lengths([700, 500])
    assert shown(segments, width=26, tokens_per_cell=25).splitlines()[:4] == [
        "    0 aaaaaaaaaaaaaaaaaaaa",
        "  500 aaaaaaaabbbbbbbbbbbb",
        "1,000 bbbbbbbb",
        "",
    ]


def test_a_cell_shows_what_most_of_its_tokens_are_and_the_first_of_two_alike() -> None:
    segments = Segments.from_lengths([5, 5, 2])
    types = [0] * 8 + [1, 1, 0, 0]
    assert shown(segments, types, tokens_per_cell=4).splitlines()[0] == " 0 abB"


def test_a_sample_that_fills_no_cell_is_in_the_legend_in_brackets() -> None:
    said = shown(Segments.from_lengths([10, 1, 9]), tokens_per_cell=5, width=120)
    assert said.splitlines()[0] == " 0 aacc"
    assert "(b) 1: 1" in said
    assert "A character is 5 tokens; samples in brackets fill none." in said


def test_letters_start_again_after_z() -> None:
    said = shown(Segments.from_lengths([1] * 28), width=60)
    assert said.splitlines()[0] == " 0 abcdefghijklmnopqrstuvwxyzab"


@pytest.mark.parametrize("width", [20, 80, 200])
@pytest.mark.parametrize("total", [1, 8, 300, 12_000, 131_072])
def test_a_row_of_any_size_takes_few_lines_of_the_terminals_width(total: int, width: int) -> None:
    lines = shown(Segments.from_lengths([total]), width=width).splitlines()
    lines = lines[: lines.index("")]
    assert 1 <= len(lines) <= 8
    assert max(map(len, lines)) <= width


def test_repeated_boundaries_are_no_samples() -> None:
    segments = Segments.from_lengths([3, 2], SlotRule(max_segments=4))
    assert "(dots), 2 samples" in shown(segments, width=80)


def test_colours_say_no_more_than_letters() -> None:
    segments = Segments.from_lengths([3, 5, 2], SlotRule(multiple=4))
    ribbon = make_ribbon(segments, width=40)
    coloured = Console(file=io.StringIO(), width=40, force_terminal=True, color_system="truecolor", no_color=False)
    with coloured.capture() as capture:
        coloured.print(draw(ribbon, width=40))
    text = capture.get()
    assert "\x1b[30;48;2;158;202;233maaa\x1b[0m" in text
    assert "\x1b[30;48;2;255;207;156mbbbbb\x1b[0m" in text


def test_types_or_ids_of_another_row_are_refused() -> None:
    segments = Segments.from_lengths([3, 5])
    with pytest.raises(LayoutError, match="a row of 2 samples in 8 tokens was given 2 sample ids and 7 token types"):
        make_ribbon(segments, np.zeros(7))
    with pytest.raises(LayoutError, match="was given 1 sample ids and 8 token types"):
        make_ribbon(segments, None, [1])
