"""The figures themselves: what they say, and that they can be written."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from vlmpack.layout import PaddedBatch, SlotRule, pack
from vlmpack.plots import plot_lengths, plot_losses, plot_rows, save


@pytest.fixture
def batch() -> PaddedBatch:
    mask = torch.tensor([[1] * 10, [1] * 4 + [0] * 6])
    types = torch.tensor([[0, 1, 1, 1, 0, 0, 0, 0, 0, 0], [0] * 10])
    return PaddedBatch(input_ids=mask.clone(), attention_mask=mask, mm_token_type_ids=types)


def titles(figure: Figure) -> list[tuple[str, str]]:
    return [(axes.get_title(loc="left"), axes.get_title(loc="right")) for axes in figure.axes]


def test_the_titles_say_how_full_and_how_many_tokens(batch):
    assert titles(plot_rows(batch)) == [
        ("Padded batch: 70% full", "2 rows of 10  =  20 tokens computed"),
        ("Packed row: 100% full", "1 row, drawn in lines of 10  =  14 tokens computed"),
    ]


def test_a_row_with_gaps_is_drawn_as_it_is(batch):
    figure = plot_rows(batch, pack(batch, rule=SlotRule(multiple=8)), title="Slots of 8")
    assert titles(figure)[1] == ("Packed row: 58% full", "1 row, drawn in lines of 10  =  24 tokens computed")
    assert figure.get_suptitle() == "Slots of 8"


def test_image_tokens_are_hatched_and_nothing_else_is(batch):
    padded, packed = plot_rows(batch).axes
    for axes in (padded, packed):
        bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
        hatched = [(bar.get_x(), bar.get_width()) for bar in bars if bar.get_hatch()]
        assert hatched == [(1, 3)]
        assert len(bars) > 1


def test_each_sample_is_named_once_in_each_panel(batch):
    for axes in plot_rows(batch).axes:
        assert sorted(text.get_text() for text in axes.texts) == ["0", "1"]


def test_curves_that_agree_both_stay_visible():
    axes, _ = plot_losses({"padded": [3.0, 2.0, 1.0], "packed": [3.0, 2.0, 1.0]}).axes
    broad, thin = axes.lines
    assert broad.get_linewidth() > 2 * thin.get_linewidth()
    assert thin.get_zorder() >= broad.get_zorder()
    assert list(thin.get_xdata()) == [1, 2, 3]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["padded", "packed"]


def test_how_far_curves_are_apart_is_drawn_on_a_log_axis():
    _, axes = plot_losses({"padded": [3.0, 2.0, 1.0], "packed": [3.0, 2.0 + 2e-6, 1.0 - 1e-8]}).axes
    (line,) = axes.lines
    drawn = np.asarray(line.get_ydata())
    assert np.isnan(drawn[0])  # equal to the last bit
    np.testing.assert_allclose(drawn[1:], [2e-6, 1e-8], rtol=1e-6)
    assert axes.get_yscale() == "log"
    low, high = axes.get_ylim()
    assert low <= 1e-8 < 2e-6 <= high
    assert axes.get_title(loc="right") == "at most 2.0e-06"


def test_curves_that_are_equal_to_the_last_bit_say_so():
    _, axes = plot_losses({"padded": [3.0, 2.0], "packed": [3.0, 2.0]}).axes
    assert axes.get_title(loc="right") == "none: equal to the last bit"


def test_one_curve_has_no_differences():
    (axes,) = plot_losses({"packed": [3.0, 2.0, 1.0]}).axes
    assert len(axes.lines) == 1


def test_a_histogram_counts_every_sample_once():
    lengths = np.array([*range(100, 300), 90_000])
    total, image = plot_lengths({"tokens": lengths, "image": lengths // 2}, title="mine").axes
    for axes in (total, image):
        heights = [bar.get_height() for bar in axes.patches if isinstance(bar, Rectangle)]
        assert sum(heights) == 201
        assert 10 < len(heights) <= 40
    assert [axes.get_title(loc="left") for axes in (total, image)] == ["tokens", "image"]
    assert total.get_title(loc="right") == "mean 646   median 200   p99 298   max 90,000"


def test_percentiles_and_the_capacities_that_fall_into_the_picture_are_marked():
    lengths = np.arange(100, 301)
    total, image = plot_lengths({"tokens": lengths, "image": lengths}, capacities=[250, 12_000]).axes
    names, common = (
        [text.get_text().strip() for text in axes.texts if text.get_text() != "+"] for axes in (total, image)
    )
    assert names == ["median", "p95", "p99", "row of 250"]
    assert [np.asarray(line.get_xdata())[0] for line in total.lines] == [200, 290, 298, 250]
    assert common == ["median", "p95", "p99"]


def test_what_lies_beyond_the_last_bin_is_marked_with_a_plus():
    axes = plot_lengths({"tokens": np.array([*range(100, 300), 90_000])}).axes[0]
    assert "+" in [text.get_text() for text in axes.texts]


def test_one_sample_has_a_histogram():
    axes = plot_lengths({"tokens": np.array([7])}).axes[0]
    assert [bar.get_height() for bar in axes.patches if isinstance(bar, Rectangle)] == [1]


def test_saving_makes_the_folder_and_a_png(batch, tmp_path):
    path = save(plot_rows(batch), tmp_path / "new" / "rows.png", dpi=50)
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.width == 475


def test_the_picture_of_the_readme_is_drawn_from_receipts(tmp_path):
    script = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "draw_packed_rows.py"))
    with Image.open(script["draw_packed_rows"](tmp_path / "rows.png", samples=2)) as image:
        assert image.width > 1000


@pytest.mark.full
def test_drawing_needs_no_display_and_leaves_pyplot_alone():
    code = (
        "import sys, vlmpack.plots; assert 'matplotlib' in sys.modules; assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
