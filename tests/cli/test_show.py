"""`vlmpack show` from end to end: rows of a data set that is planned now, and of a packed folder."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from vlmpack.cli import app
from vlmpack.cli.inputs import InputOptions, open_inputs
from vlmpack.cli.show import Ribbon, Rows, print_rows
from vlmpack.errors import LayoutError
from vlmpack.layout import Segments, SlotRule
from vlmpack.store import StoreSettings, write_rows


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    """Tokenised samples of 6, 4, 3 and 7 tokens, one of them with a name."""
    path = tmp_path / "tokens.jsonl"
    rows = [{"input_ids": [5] * n, "labels": [5] * n} for n in (6, 4, 3, 7)]
    rows[1]["id"] = "second"  # pyright: ignore[reportArgumentType]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def show(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["show", *arguments], env={"COLUMNS": "90", "TERM": "dumb"})


def said(*arguments: str) -> list[str]:
    result = show(*arguments)
    assert result.exit_code == 0, result.output
    return [line.rstrip() for line in result.stdout.splitlines()]


def test_the_first_row_of_a_planned_data_set(tokens: str) -> None:
    assert said(tokens, "--processor", "tiny", "--capacity", "10") == [
        f"{tokens}: 4 samples in 2 rows of 10 tokens, 100.00% full",
        "",
        "row 0 of 0 to 1: 10 of 10 tokens, 100.00% full",
        " 0 aaaaaabbbb",
        "",
        "a 0: 6   b second: 4",
        "",
        "10 tokens = 10 text + 0 padding (dots), 2 samples. A character is a token.",
    ]


def test_rows_are_counted_from_the_end_too(tokens: str) -> None:
    lines = said(tokens, "--processor", "tiny", "--capacity", "10", "--row", "-1", "--row", "0")
    assert [line for line in lines if line.startswith((" 0 ", "row"))] == [
        "row 1 of 0 to 1: 10 of 10 tokens, 100.00% full",
        " 0 aaabbbbbbb",
        "row 0 of 0 to 1: 10 of 10 tokens, 100.00% full",
        " 0 aaaaaabbbb",
    ]


def test_what_is_in_no_row_is_counted(tokens: str) -> None:
    with Path(tokens).open("a") as file:
        file.write("no JSON\n")
    first = said(tokens, "--processor", "tiny", "--capacity", "6")[0]
    assert first.endswith("3 samples in 3 rows of 6 tokens, 72.22% full; 1 cannot be used; 1 exceed a row")


def test_images_are_capitals() -> None:
    lines = said("synthetic", "--processor", "tiny", "--num", "2", "--capacity", "3000", "--tokens-per-cell", "20")
    ribbon = [line for line in lines if re.fullmatch(r" *[\d,]+ [a-zA-Z.]+", line)]
    assert {"a", "A", "b", "B"} <= set("".join(ribbon))


def test_a_packed_folder_is_shown_as_it_was_packed(tokens: str, tmp_path: Path) -> None:
    """In slots of four tokens, without the processor."""
    pytest.importorskip("pyarrow", reason="waits for pyarrow (extra [data])")
    inputs = open_inputs(InputOptions(dataset=tokens, processor="tiny"), slots=SlotRule(multiple=4))
    write_rows(inputs.dataset, tmp_path / "packed", inputs.collator, StoreSettings(capacity=12))
    folder = str(tmp_path / "packed")
    assert said(folder)[:6] == [
        f"{folder}: 4 samples in 2 rows of 12 tokens, 83.33% full",
        "",
        "row 0 of 0 to 1: 12 of 12 tokens, 83.33% full",
        " 0 aaaaaa..bbbb",
        "",
        "a 0: 6   b second: 4",
    ]
    assert " 0 aaa.bbbbbbb." in said(folder, "--row", "1")
    assert show(folder, "--row", "0", "--row", "2").stdout == ""
    planned = show(folder, "--num", "3", "--row", "0", "--capacity", "12000").stderr
    assert "is packed already, so --capacity, --num would be ignored; leave it out" in " ".join(planned.split())


@pytest.mark.parametrize("verb", [["analyze"], ["pack", "out", "--capacity", "9"]])
def test_a_packed_folder_is_no_data_set(verb: list[str], tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    refused = CliRunner().invoke(app, [verb[0], str(tmp_path), *verb[1:], "--processor", "tiny"])
    assert refused.exit_code == 2
    assert refused.stderr == (
        f"vlmpack: {tmp_path} is packed already: `vlmpack pack` wrote it. `vlmpack show {tmp_path}` shows its rows; "
        "give the data set that it was made of\n"
    )


def test_what_is_not_there_is_said_to_be_missing_with_a_processor_and_without(tmp_path: Path) -> None:
    lost = str(tmp_path / "lost")
    assert f"there is no file or folder {lost} here" in show(lost).stderr
    assert f"'{lost}' is no file or folder here and no hub id" in show(lost, "--processor", "tiny").stderr


def test_a_row_for_which_there_are_too_few_samples_is_refused_before_they_are_measured(
    tokens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlmpack.store.measure.measure_lengths", None)
    refused = show(tokens, "--processor", "tiny", "--row", "4")
    assert refused.stderr == "vlmpack: --row 4: there are at most 4 rows, 0 to 3\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--processor", "tiny", "--capacity", "10", "--row", "2"], "--row 2: there are 2 rows, 0 to 1"),
        (["--processor", "tiny", "--capacity", "2"], "all 4 samples exceed a row of 2 tokens; raise --capacity"),
        ([], "is no folder written by `vlmpack pack`, so it is read as a data set: that needs --processor"),
    ],
)
def test_what_cannot_be_shown_is_refused(tokens: str, arguments: list[str], expected: str) -> None:
    refused = show(tokens, *arguments)
    assert refused.exit_code == 2
    assert expected in refused.stderr


# ---------------------------------------------------------------------- ribbons


def shown(segments: Segments, types: list[int] | None = None, ids: list[int | str] | None = None, *, width: int = 40,
          tokens_per_cell: int | None = None) -> str:  # fmt: skip
    """What a terminal without colours shows, without the spaces at the ends of lines."""
    file = io.StringIO()
    given = None if types is None else np.array(types)
    ribbon = Ribbon.of(segments, given, ids, width=width, tokens_per_cell=tokens_per_cell)
    Console(file=file, width=width, color_system=None).print(ribbon.draw())
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
    ribbon = Ribbon.of(segments, width=40)
    coloured = Console(file=io.StringIO(), width=40, force_terminal=True, color_system="truecolor", no_color=False)
    with coloured.capture() as capture:
        coloured.print(ribbon.draw())
    text = capture.get()
    assert "\x1b[30;48;2;158;202;233maaa\x1b[0m" in text
    assert "\x1b[30;48;2;255;207;156mbbbbb\x1b[0m" in text


def test_types_or_ids_of_another_row_are_refused() -> None:
    segments = Segments.from_lengths([3, 5])
    with pytest.raises(LayoutError, match="a row of 2 samples in 8 tokens was given 2 sample ids and 7 token types"):
        Ribbon.of(segments, np.zeros(7))
    with pytest.raises(LayoutError, match="was given 1 sample ids and 8 token types"):
        Ribbon.of(segments, None, [1])


def test_a_heading_says_how_much_of_the_capacity_a_row_fills() -> None:
    rows = Rows(summary="", count=1, capacity=100, slots=SlotRule(), samples=lambda row: [])
    ribbon = Ribbon.of(Segments.from_lengths([30, 20]))
    assert rows.heading(0, ribbon) == "row 0 of 0 to 0: 50 of 100 tokens, 50.00% full"


def test_the_summary_is_one_line_in_a_pipe() -> None:
    page, summary = io.StringIO(), "word " * 40 + "end"
    rows = Rows(summary=summary, count=1, capacity=100, slots=SlotRule(), samples=lambda row: [])
    print_rows(rows, [], Console(file=page, width=80))
    assert page.getvalue() == summary + "\n"
