"""`vlmpack show` of rows whose samples share prefixes: the tree in lines, in a pipe, and as JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from cli.test_prefix_savings import questions as questions  # a fixture
from rich.console import Console
from typer.testing import CliRunner, Result

from vlmpack.cli import app
from vlmpack.cli.tree_drawing import MOST_LINES, TreeDrawing
from vlmpack.layout import PrefixTree, Segments


def show(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["show", *arguments], env={"COLUMNS": "80"})


def tree_of_three() -> tuple[PrefixTree, np.ndarray]:
    """Samples P A, P B C, P B and Q: P of 6 tokens has an image of 4; one sample ends in an inner node."""
    tree = PrefixTree(
        segments=Segments.from_lengths([9, 12, 10, 5]),
        parents=(-1, 0, 0, 2, -1),
        lengths=(6, 3, 4, 2, 5),
        leaves=(1, 3, 2, 4),
        images=(0,),
        videos=(),
    )
    types = np.zeros(36, np.int64)
    for start in (0, 9, 21):
        types[start + 2 : start + 6] = 1
    return tree, types


def drawn(tree: PrefixTree, types: np.ndarray, *, terminal: bool = True, width: int = 60, names=("a", "b", 7, "q")):
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=terminal, color_system=None)
    console.print(TreeDrawing.of(tree, types, names, width=width).draw(console))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_a_node_stands_behind_its_parent() -> None:
    assert drawn(*tree_of_three())[:6] == [
        "tokens  samples               0                   20",
        "     6  ┬ 3 samples           ==####",
        "     3  ├─ a                        aaa",
        "     4  └┬ 2 samples, ends 7        ====",
        "     2    └─ b                          bb",
        "     5  ─ q                   ddddd",
    ]


def test_a_pipe_has_no_drawn_lines() -> None:
    lines = drawn(*tree_of_three(), terminal=False)
    assert lines[1:5] == [
        "     6  3 samples             ==####",
        "     3    a                         aaa",
        "     4    2 samples, ends 7         ====",
        "     2      b                           bb",
    ]
    assert all(line.isascii() for line in lines)


def test_totals_are_those_of_the_tree() -> None:
    tree, types = tree_of_three()
    numbers = TreeDrawing.of(tree, types, "abcd").to_dict()
    assert (numbers["tokens"], numbers["computed"], numbers["levels"]) == (36, 20, 3)
    assert (numbers["attended_pairs"], numbers["plain_pairs"]) == (tree.attended_pairs, 45 + 78 + 55 + 15)
    assert (numbers["parents"], numbers["leaves"]) == ([-1, 0, 0, 2, -1], [1, 3, 2, 4])
    assert (numbers["media"], numbers["images"]) == ([4, 0, 0, 0, 0], [0])
    told = " ".join(" ".join(drawn(tree, types)).split())
    assert "20 tokens are computed for 36 of 4 samples (44.4% less)" in told


@pytest.mark.parametrize("width", [40, 80])
def test_no_line_is_wider_than_the_terminal_whatever_the_row(width: int) -> None:
    branches = MOST_LINES + 9
    tree = PrefixTree(
        segments=Segments.from_lengths([5000 + at for at in range(branches)]),
        parents=(-1, *[0] * branches),
        lengths=(4000, *(1000 + at for at in range(branches))),
        leaves=tuple(range(1, branches + 1)),
        images=(),
        videos=(),
    )
    types = np.zeros(tree.segments.total, np.int64)
    names = [f"a sample with a long name {at}" for at in range(branches)]
    lines = drawn(tree, types, width=width, names=names)
    assert max(map(len, lines)) <= width
    assert "... and 10 more nodes; --json lists them all" in " ".join(lines)


def test_a_data_set_is_planned_and_drawn_as_trees(questions: str) -> None:
    told = show(questions, "--processor", "tiny", "--capacity", "1000", "--min-shared", "64").stdout
    assert told.count("3 samples  ") == 2
    assert "#####" in told
    assert max(map(len, told.splitlines()[1:])) <= 80
    plain = show(questions, "--processor", "tiny", "--capacity", "1000").stdout
    assert "samples  " not in plain and "AAAA" in plain


def test_json_has_the_tree_and_the_samples(questions: str) -> None:
    arguments = [questions, "--processor", "tiny", "--capacity", "1000", "--json"]
    (row,) = json.loads(show(*arguments, "--min-shared", "64").stdout)["rows"]
    assert len(row["samples"]) == 6
    assert sum(sample["tokens"] for sample in row["samples"]) == row["tree"]["tokens"]
    assert row["tree"]["computed"] == sum(row["tree"]["lengths"]) < row["tree"]["tokens"]
    (plain,) = json.loads(show(*arguments).stdout)["rows"]
    assert (plain["tree"], plain["samples"]) == (None, row["samples"])


def test_a_folder_that_was_packed_so_is_drawn_so(questions: str, tmp_path: Path) -> None:
    out = str(tmp_path / "rows")
    packed = ["pack", questions, out, "--processor", "tiny", "--capacity", "1000", "--min-shared", "64"]
    assert CliRunner().invoke(app, packed).exit_code == 0
    told = show(out).stdout
    assert told.count("3 samples  ") == 2
