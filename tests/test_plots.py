"""Figures: what is drawn is what was given, and every token of a row once, in the place that the layout gives it."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.patches import Polygon, Rectangle
from PIL import Image

from vlmpack.errors import ConfigError, LayoutError
from vlmpack.layout import PackedRow, PaddedBatch, PrefixTree, Segments, SlotRule, pack
from vlmpack.plan import balance_rows, plan_bins
from vlmpack.plots import (
    packed_pieces,
    padded_pieces,
    plot_balance,
    plot_fill,
    plot_lengths,
    plot_mask,
    plot_row,
    plot_rows,
    plot_tree,
)

SIZES = np.random.default_rng(0).integers(10, 400, 300)


def heights(axes):
    return [bar.get_height() for bar in axes.patches if isinstance(bar, Rectangle)]


def test_a_histogram_counts_every_sample_once_and_marks_what_lies_beyond_with_a_plus():
    lengths = np.array([*range(100, 300), 90_000])
    total, image = plot_lengths({"tokens": lengths, "image": lengths // 2}, title="mine").axes
    for axes in (total, image):
        assert sum(heights(axes)) == 201
        assert 10 < len(heights(axes)) <= 40
    assert [axes.get_title(loc="left") for axes in (total, image)] == ["tokens", "image"]
    assert total.get_title(loc="right") == "mean 646   median 200   p99 298   max 90,000"
    assert "+" in [text.get_text() for text in total.texts]
    assert sum(heights(plot_lengths({"tokens": np.array([7])}).axes[0])) == 1


def test_every_row_is_in_one_bar_and_the_mean_is_marked():
    plans = {"in order": plan_bins(SIZES, 1000, strategy="rolling_fill"), "exact": plan_bins(SIZES, 1000)}
    for axes, (name, plan) in zip(plot_fill(plans).axes, plans.items(), strict=True):
        bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
        assert sum(heights(axes)) == len(plan)
        assert all(bar.get_x() + 2 >= axes.get_xlim()[0] for bar in bars if bar.get_height())
        assert axes.lines[0].get_xdata()[0] == pytest.approx(100 * plan.fill)
        assert axes.get_title(loc="left") == name
        expected = f"{len(plan)} rows of 1,000 tokens, on average {100 * plan.fill:.1f}% full"
        assert axes.get_title(loc="right") == expected
    with pytest.raises(ConfigError, match="needs plans"):
        plot_fill({})


def test_the_dearest_rank_of_each_step_is_the_upper_edge_and_a_last_step_with_empty_places_is_left_out():
    costs = np.random.default_rng(0).random(44)
    schedule = balance_rows(costs, ranks=4, window=1)
    (axes,) = plot_balance({"as given": schedule}).axes
    load = costs.reshape(11, 4)
    np.testing.assert_allclose(axes.lines[0].get_ydata(), load.max(1) / load.mean(1))
    assert axes.get_title(loc="right") == f"{schedule.imbalance - 1:.2%} of the time lost"
    (axes,) = plot_balance({"x": balance_rows(np.ones(10), ranks=4)}).axes
    assert len(axes.lines[0].get_xdata()) == 2


def test_the_picture_of_the_readme_is_drawn_from_receipts(tmp_path):
    script = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "draw_packed_rows.py"))
    with Image.open(script["draw_packed_rows"](tmp_path / "new" / "rows.png", samples=2)) as image:
        assert (image.format, image.width > 1000) == ("PNG", True)


def test_drawing_needs_no_display_and_leaves_pyplot_alone():
    code = (
        "import sys, vlmpack.plots; assert 'matplotlib' in sys.modules; assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------------- rows


def batch_of(lengths, *, left=False, image=(1, 3)) -> PaddedBatch:
    """Samples whose tokens `image[0]` to `image[1]` are an image's."""
    width = max(lengths)
    mask, types = torch.zeros(2, len(lengths), width, dtype=torch.long).unbind(0)
    for row, length in enumerate(lengths):
        start = width - length if left else 0
        mask[row, start : start + length] = 1
        types[row, start + min(image[0], length) : start + min(image[1], length)] = 1
    return PaddedBatch(input_ids=mask.clone(), attention_mask=mask, mm_token_type_ids=types)


def bars(axes):
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


def hatched(axes):
    return [(bar.get_x(), bar.get_width()) for bar in bars(axes) if bar.get_hatch()]


def titles(figure):
    return [(axes.get_title(loc="left"), axes.get_title(loc="right")) for axes in figure.axes]


# ---------------------------------------------------------------------- a batch and its row


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 17), min_size=1, max_size=5),
    multiple=st.integers(1, 5),
    width=st.integers(1, 23),
    left=st.booleans(),
)
def test_every_token_is_drawn_once_in_its_place(lengths, multiple, width, left):
    batch = batch_of(lengths, left=left, image=(2, 5))
    row = pack(batch, rule=SlotRule(multiple=multiple))
    for pieces, line_width, total in (
        (padded_pieces(batch), max(lengths), len(lengths) * max(lengths)),
        (packed_pieces(row, width=width), width, row.segments.total),
    ):
        cells = [(piece.line, column) for piece in pieces for column in range(piece.start, piece.stop)]
        assert sorted(cells) == [divmod(i, line_width) for i in range(total)]
        by_sample = [sum(p.stop - p.start for p in pieces if p.sample == i) for i in range(len(lengths))]
        assert by_sample == lengths
        images = sum(p.stop - p.start for p in pieces if p.is_image)
        assert images == sum(min(max(n - 2, 0), 3) for n in lengths)


def test_a_picture_says_how_full_rows_are_hatches_images_and_names_each_sample_once():
    batch = batch_of([10, 4], image=(5, 8))
    figure = plot_rows(batch)
    assert titles(figure) == [
        ("Padded batch: 70% full", "2 rows of 10  =  20 tokens computed"),
        ("Packed row: 100% full", "1 row, drawn in lines of 10  =  14 tokens computed"),
    ]
    for axes in figure.axes:
        assert hatched(axes) == [(5, 3)]
        assert sorted(text.get_text() for text in axes.texts) == ["0", "1"]
    gaps = plot_rows(batch, pack(batch, rule=SlotRule(multiple=8)), title="Slots of 8")
    assert titles(gaps)[1] == ("Packed row: 58% full", "1 row, drawn in lines of 10  =  24 tokens computed")
    assert gaps.get_suptitle() == "Slots of 8"


# ---------------------------------------------------------------------- one row

LENGTHS = (6, 9, 4)
SEGMENTS = Segments.from_lengths(LENGTHS)
LABELS = torch.full((1, 19), -100)
LABELS[0, [3, 4, 10, 17]] = 1
ROW = PackedRow(
    input_ids=torch.ones(1, 19, dtype=torch.long),
    segments=SEGMENTS,
    shift_labels=LABELS,
    mm_token_type_ids=torch.tensor([[0, 1, 1, 0, 0, 0] + [0] * 9 + [0, 1, 1, 0]]),
)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS]).expand(4, 1, -1)


def test_a_bar_has_its_images_and_the_tokens_that_are_trained_on():
    (axes,) = plot_row(ROW).axes
    assert hatched(axes) == [(1, 2), (16, 2)]
    trained = [(bar.get_x(), bar.get_width()) for bar in bars(axes) if bar.get_y() > 0.5]
    assert trained == [(4, 2), (11, 1), (18, 1)]  # a target is the token after that which predicts it
    assert axes.get_title(loc="right") == "3 samples  =  19 tokens, 4 trained on"
    assert [text.get_text() for text in axes.texts] == ["0", "1", "2"]


def test_positions_and_errors_are_drawn_token_by_token():
    errors = {"packed": torch.zeros(19), "leaking": torch.arange(19.0)}
    _, positions, differences = plot_row(ROW, positions=POSITIONS, errors=errors).axes
    lines = {line.get_label(): line for line in positions.lines}
    for name in ("time", "height", "width"):
        assert list(lines[name].get_ydata()) == POSITIONS[0, 0].tolist()
    values = {line.get_label(): np.asarray(line.get_ydata()) for line in differences.lines}
    assert values["packed"].max() == values["leaking"].min() > 0  # none: the lowest line of the axis
    assert values["leaking"][1:].tolist() == list(range(1, 19))
    edges = [line.get_xdata()[0] for line in positions.lines if line.get_linestyle() == ":"]
    assert edges == [6, 15]


def test_what_does_not_fit_the_row_is_refused():
    with pytest.raises(LayoutError, match="the row has no tree: its samples share nothing"):
        plot_tree(ROW)
    with pytest.raises(LayoutError, match="leaking has 3 values, and the row 19 tokens"):
        plot_row(ROW, errors={"leaking": torch.zeros(3)})
    with pytest.raises(LayoutError, match=r"positions .time. has 5 values"):
        plot_row(ROW, positions=torch.zeros(3, 5))
    for window in ((3, 3), (0, 20), (-1, 4)):
        with pytest.raises(LayoutError, match="window is"):
            plot_row(ROW, window=window)


@pytest.mark.parametrize("rule", [SlotRule(), SlotRule(multiple=8)])
def test_the_triangles_of_a_mask_are_its_pairs(rule):
    segments = Segments.from_lengths(LENGTHS, rule)
    (axes,) = plot_mask(segments).axes
    causal, *triangles = [patch.get_xy() for patch in axes.patches if isinstance(patch, Polygon)]
    assert [corners[2][0] - corners[0][0] for corners in triangles] == list(LENGTHS)
    assert [corners[0][0] for corners in triangles] == list(segments.stride[:-1])
    assert causal[2][0] == segments.total
    whole = segments.total * (segments.total + 1) // 2
    assert axes.get_title(loc="right") == f"{sum(n * (n + 1) // 2 for n in LENGTHS)} pairs of {whole}"


# ---------------------------------------------------------------------- a tree

TREE = PrefixTree(
    segments=Segments.from_lengths((9, 12, 10, 5)),
    parents=(-1, 0, 0, 2, -1),
    lengths=(6, 3, 4, 2, 5),
    leaves=(1, 3, 2, 4),
)
"""Samples P A, P B C, P B and Q; P has an image of 4 tokens."""


def test_a_node_stands_behind_its_parent_and_in_the_middle_of_its_branches():
    types = torch.zeros(1, 36, dtype=torch.long)
    for start in (0, 9, 21):
        types[0, start + 2 : start + 6] = 1
    row = PackedRow(input_ids=types, segments=TREE.segments, mm_token_type_ids=types, tree=TREE)
    (axes,) = plot_tree(row).axes
    ends = {(bar.get_y() + bar.get_height() / 2, bar.get_x() + bar.get_width()) for bar in bars(axes)}
    assert ends == {(0.5, 2), (0.5, 6), (0.0, 9), (1.0, 10), (1.0, 12), (2.0, 5)}
    assert hatched(axes) == [(2, 4)]
    assert axes.get_title(loc="left") == "Prefix tree: 44% shared"
    assert axes.get_title(loc="right") == "4 samples of 36 tokens  =  20 tokens computed"
    assert sorted(text.get_text() for text in axes.texts) == ["0", "1", "2", "2 ×", "3", "3 ×"]
