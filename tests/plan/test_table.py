"""LengthTable: what is known of every sample before training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vlmpack.errors import ConfigError, LayoutError, SampleError
from vlmpack.plan import LengthTable, Plan, plan_bins
from vlmpack.plan.length_table import COLUMNS, Refused

ROWS = (
    {"sample_ids": 0, "text_tokens": 12, "image_tokens": 0, "video_tokens": 0, "images": 0, "videos": 0}
    | {"patches": 0, "targets": 5},
    {"sample_ids": 2, "text_tokens": 20, "image_tokens": 256, "video_tokens": 0, "images": 2, "videos": 0}
    | {"patches": 1024, "targets": 9},
    {"sample_ids": 3, "text_tokens": 7, "image_tokens": 0, "video_tokens": 64, "images": 0, "videos": 1}
    | {"patches": 256, "targets": 3},
)
REFUSED = Refused(index=1, sample_id="r-17", reason="no_targets", detail="none of its 4 tokens is learnt")


@pytest.fixture
def table() -> LengthTable:
    return LengthTable.from_rows(ROWS, [REFUSED])


def test_a_length_is_text_and_images_and_videos(table: LengthTable) -> None:
    assert table.tokens.tolist() == [12, 276, 71]


def test_every_sample_that_was_looked_at_is_a_length_or_is_listed(table: LengthTable) -> None:
    assert (len(table), table.measured, table.reasons) == (3, 4, {"no_targets": 1})


def test_its_limits_go_into_a_plan(table: LengthTable) -> None:
    budgets = table.budgets(patches=1100, images=2)
    plan = plan_bins(table, 400, budgets=budgets).check()
    assert [budget.name for budget in budgets] == ["patches", "images"]
    assert sorted(plan.bins) == [(0, 2), (3,)]


@pytest.mark.parametrize("seed", [None, 0])
def test_its_plan_is_of_the_places_in_the_data_set(table: LengthTable, seed: int | None, tmp_path: Path) -> None:
    plan = plan_bins(table, 300, seed=seed).check()
    assert plan.lengths.tolist() == table.by_place(table.tokens).tolist() == [12, 0, 276, 71]
    assert sorted(map(sorted, plan.bins)) == [[0, 2], [3]]
    assert plan.dropped.tolist() == [1]
    assert plan.lower_bound == 2
    plan.save(tmp_path / "plan")
    assert Plan.load(tmp_path / "plan") == plan


def test_its_plan_names_samples_that_are_too_long_by_their_places(table: LengthTable) -> None:
    with pytest.raises(SampleError, match=r"^sample 2: .* 1 of 4 samples do not: 2 \(276 tokens, 1024 patches\)"):
        plan_bins(table, 100, budgets=table.budgets(patches=2000))
    assert plan_bins(table, 100, oversize="drop").dropped.tolist() == [1, 2]
    assert sorted(plan_bins(table, 100, oversize="own_row").bins) == [(0, 3), (2,)]


def test_its_plan_is_that_of_its_tokens_if_none_was_refused() -> None:
    table = LengthTable.from_rows([row | {"sample_ids": at} for at, row in enumerate(ROWS)])
    assert plan_bins(table, 300, seed=3) == plan_bins(table.tokens, 300, seed=3)


def test_no_limit_is_no_budget(table: LengthTable) -> None:
    assert table.budgets() == ()


def test_a_table_without_samples_is_a_table() -> None:
    empty = LengthTable.from_rows([], [REFUSED])
    assert (len(empty), empty.measured, empty.tokens.tolist()) == (0, 1, [])


def test_what_was_saved_is_read_back(table: LengthTable, tmp_path: Path) -> None:
    table.save(tmp_path / "table")
    assert LengthTable.load(tmp_path / "table") == table


def test_the_same_table_gives_the_same_bytes(table: LengthTable, tmp_path: Path) -> None:
    for name in ("a", "b"):
        table.save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("column", COLUMNS)
def test_tables_that_differ_are_not_equal(table: LengthTable, column: str) -> None:
    rows = [dict(row) for row in ROWS]
    rows[2][column] += 1
    assert LengthTable.from_rows(rows, [REFUSED]) != table
    assert LengthTable.from_rows(ROWS) != table


def test_a_plan_is_not_taken_for_a_table(tmp_path: Path) -> None:
    plan_bins([1, 2], 4).save(tmp_path / "plan")
    with pytest.raises(ConfigError, match=r"plan is no vlmpack.lengths .*its manifest has \('vlmpack.plan', 2\)"):
        LengthTable.load(tmp_path / "plan")


def test_a_damaged_table_says_so(table: LengthTable, tmp_path: Path) -> None:
    table.save(tmp_path / "table")
    damaged = (tmp_path / "table").read_bytes().replace(b'"reason"', b'"raeson"')
    (tmp_path / "table").write_bytes(damaged)
    with pytest.raises(LayoutError, match="is damaged"):
        LengthTable.load(tmp_path / "table")


def test_columns_of_different_lengths_are_refused() -> None:
    columns = {name: np.zeros(3, np.int64) for name in COLUMNS}
    with pytest.raises(ConfigError, match=r"targets has shape \[2\], but there are 3 sample_ids"):
        LengthTable(**{**columns, "targets": np.zeros(2, np.int64)})


def test_it_shows_its_totals(table: LengthTable) -> None:
    expected = "LengthTable(3 samples, 359 tokens, 2 images, 1 videos, longest 276 tokens, 1 refused)"
    assert repr(table) == expected
