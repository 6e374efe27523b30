"""One row from the inside, and its mask: every token where it is, every pair counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.patches import Polygon, Rectangle

from vlmpack.errors import LayoutError
from vlmpack.layout import PackedRow, Segments, SlotRule
from vlmpack.plots import plot_mask, plot_row, save

LENGTHS = (6, 9, 4)
SEGMENTS = Segments.from_lengths(LENGTHS)
TYPES = torch.tensor([[0, 1, 1, 0, 0, 0] + [0] * 9 + [0, 1, 1, 0]])
LABELS = torch.full((1, 19), -100)
LABELS[0, [3, 4, 10, 17]] = 1
ROW = PackedRow(
    input_ids=torch.ones(1, 19, dtype=torch.long), segments=SEGMENTS, shift_labels=LABELS, mm_token_type_ids=TYPES
)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS]).expand(4, 1, -1)


def bars(axes):
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


def test_a_bar_has_its_images_and_the_tokens_that_are_learnt() -> None:
    figure = plot_row(ROW, title="mine")
    (axes,) = figure.axes
    assert [(bar.get_x(), bar.get_width()) for bar in bars(axes) if bar.get_hatch()] == [(1, 2), (16, 2)]
    learnt = [(bar.get_x(), bar.get_width()) for bar in bars(axes) if bar.get_y() > 0.5]
    assert learnt == [(4, 2), (11, 1), (18, 1)]  # a target is the token after that which predicts it
    assert axes.get_title(loc="right") == "3 samples  =  19 tokens, 4 learnt"
    assert [text.get_text() for text in axes.texts] == ["0", "1", "2"]
    assert figure.get_suptitle() == "mine"


def test_positions_and_errors_are_drawn_token_by_token() -> None:
    errors = {"packed": torch.zeros(19), "leaking": torch.arange(19.0)}
    _, positions, differences = plot_row(ROW, positions=POSITIONS, errors=errors).axes
    lines = {line.get_label(): line for line in positions.lines}
    for name in ("time", "height", "width"):
        assert list(lines[name].get_ydata()) == POSITIONS[0, 0].tolist()
    drawn = {line.get_label(): np.asarray(line.get_ydata()) for line in differences.lines}
    assert drawn["packed"].max() == drawn["leaking"].min() > 0  # none: the lowest line of the axis
    assert drawn["leaking"][1:].tolist() == list(range(1, 19))
    edges = [line.get_xdata()[0] for line in positions.lines if line.get_linestyle() == ":"]
    assert edges == [6, 15]


def test_a_window_is_seen_from_near() -> None:
    bar, positions = plot_row(ROW, positions=POSITIONS, window=(6, 15)).axes
    left, right = bar.get_xlim()
    assert 5.9 < left < 6 < 15 < right < 15.1
    assert positions.get_ylim()[1] < 9


def test_padding_is_in_the_legend_of_a_row_with_gaps() -> None:
    def labels(row: PackedRow) -> list[str]:
        return [text.get_text() for text in plot_row(row).legends[0].get_texts()]

    assert labels(ROW) == ["text", "image", "learnt"]
    gaps = Segments.from_lengths(LENGTHS, SlotRule(multiple=12))
    wide = PackedRow(input_ids=torch.ones(1, 36, dtype=torch.long), segments=gaps)
    assert labels(wide) == ["text", "image", "learnt", "padding"]


def test_what_does_not_fit_the_row_is_refused() -> None:
    with pytest.raises(LayoutError, match="leaking has 3 values, and the row 19 tokens"):
        plot_row(ROW, errors={"leaking": torch.zeros(3)})
    with pytest.raises(LayoutError, match=r"positions .time. has 5 values"):
        plot_row(ROW, positions=torch.zeros(3, 5))
    for window in ((3, 3), (0, 20), (-1, 4)):
        with pytest.raises(LayoutError, match="window is"):
            plot_row(ROW, window=window)


@pytest.mark.parametrize("rule", [SlotRule(), SlotRule(multiple=8)])
def test_the_triangles_of_a_mask_are_its_pairs(rule: SlotRule, tmp_path) -> None:
    segments = Segments.from_lengths(LENGTHS, rule)
    figure = plot_mask(segments)
    (axes,) = figure.axes
    causal, *triangles = [patch.get_xy() for patch in axes.patches if isinstance(patch, Polygon)]
    assert [corners[2][0] - corners[0][0] for corners in triangles] == list(LENGTHS)
    assert [corners[0][0] for corners in triangles] == list(segments.stride[:-1])
    assert causal[2][0] == segments.total
    whole = segments.total * (segments.total + 1) // 2
    assert axes.get_title(loc="right") == f"{sum(n * (n + 1) // 2 for n in LENGTHS)} pairs of {whole}"
    assert save(figure, tmp_path / "mask.png", dpi=40).stat().st_size > 1000


def test_a_row_of_one_sample_has_no_leak() -> None:
    (axes,) = plot_mask(replace(SEGMENTS, lengths=(19,), slots=(19,), num_samples=1)).axes
    assert [text.get_text() for text in axes.texts] == ["0"]
