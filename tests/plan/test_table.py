"""LengthTable: what is known of every sample before training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from plan.naive import checked

from vlmpack.errors import ConfigError, SampleError
from vlmpack.plan import LengthTable, Plan, plan_bins
from vlmpack.plan.length_table import COLUMNS, Summary, summary

ROWS = (
    {"sample_ids": 0, "text_tokens": 12, "image_tokens": 0, "video_tokens": 0, "images": 0, "videos": 0}
    | {"patches": 0, "targets": 5},
    {"sample_ids": 2, "text_tokens": 20, "image_tokens": 256, "video_tokens": 0, "images": 2, "videos": 0}
    | {"patches": 1024, "targets": 9},
    {"sample_ids": 3, "text_tokens": 7, "image_tokens": 0, "video_tokens": 64, "images": 0, "videos": 1}
    | {"patches": 256, "targets": 3},
)
REFUSED = SampleError("none of its 4 tokens is trained on", "no_targets", index=1, sample_id="r-17")


@pytest.fixture
def table() -> LengthTable:
    return LengthTable.from_rows(ROWS, [REFUSED])


def test_its_limits_go_into_a_plan(table: LengthTable) -> None:
    budgets = table.budgets(patches=1100, images=2)
    plan = checked(plan_bins(table, 400, budgets=budgets))
    assert [budget.name for budget in budgets] == ["patches", "images"]
    assert sorted(plan.bins) == [(0, 2), (3,)]


@pytest.mark.parametrize("seed", [None, 0])
def test_its_plan_is_of_the_places_in_the_data_set(table: LengthTable, seed: int | None, tmp_path: Path) -> None:
    plan = checked(plan_bins(table, 300, seed=seed))
    assert plan.lengths.tolist() == table.by_place(table.tokens).tolist() == [12, 0, 276, 71]
    assert sorted(map(sorted, plan.bins)) == [[0, 2], [3]]
    assert plan.dropped.tolist() == [1]
    assert plan.lower_bound == 2
    plan.save(tmp_path / "plan")
    assert Plan.load(tmp_path / "plan") == plan


def test_its_plan_names_samples_that_are_too_long_by_their_places(table: LengthTable) -> None:
    with pytest.raises(SampleError, match=r"^sample 2: .* 1 of 4 samples do not: 2 \(276 tokens, 1024 patches\)"):
        plan_bins(table, 100, budgets=table.budgets(patches=2000))
    assert plan_bins(table, 100, overlength="drop").dropped.tolist() == [1, 2]
    assert sorted(plan_bins(table, 100, overlength="own_row").bins) == [(0, 3), (2,)]


def test_a_length_is_text_and_images_and_videos(table: LengthTable) -> None:
    assert table.tokens.tolist() == [12, 276, 71]
    assert repr(table) == "LengthTable(3 samples, 359 tokens, 2 images, 1 videos, longest 276 tokens, 1 refused)"
    empty = LengthTable.from_rows([], [REFUSED])
    assert (len(empty), empty.measured, empty.tokens.tolist()) == (0, 1, [])


def test_what_was_saved_is_read_back_and_a_plan_is_not_taken_for_a_table(table: LengthTable, tmp_path: Path) -> None:
    table.save(tmp_path / "table")
    assert LengthTable.load(tmp_path / "table") == table
    plan_bins([1, 2], 4).save(tmp_path / "plan")
    with pytest.raises(ConfigError, match=r"plan is no vlmpack.lengths .*its manifest has \('vlmpack.plan', 3\)"):
        LengthTable.load(tmp_path / "plan")


def test_columns_of_different_lengths_are_refused() -> None:
    columns = {name: np.zeros(3, np.int64) for name in COLUMNS}
    with pytest.raises(ConfigError, match=r"targets has shape \[2\], but there are 3 sample_ids"):
        LengthTable(**{**columns, "targets": np.zeros(2, np.int64)})


def test_a_summary() -> None:
    assert summary(np.arange(101)) == Summary(mean=50.0, median=50.0, p95=95.0, p99=99.0, max=100, total=5050)
    assert summary(np.zeros(0, np.int64)) == Summary(mean=0.0, median=0.0, p95=0.0, p99=0.0, max=0, total=0)
