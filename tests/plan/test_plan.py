"""Plan: rows that can be read, measured, checked, saved and read back."""

from __future__ import annotations

import errno
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.naive import checked

from vlmpack.errors import ConfigError, LayoutError
from vlmpack.plan import Budget, Plan, plan_bins

LENGTHS = [5, 3, 4, 2, 6]
BINS = np.asarray([0, 0, 1, 0, 1])


def small_plan(**changes) -> Plan:
    """Two full rows: samples 0, 1, 3 and samples 2, 4."""
    fields = {"lengths": np.asarray(LENGTHS), "capacity": 10, **changes}
    return Plan.from_assignment(BINS, **fields)


def with_patches() -> Plan:
    """A plan with everything that can be saved: a budget, dropped samples, a seed."""
    budget = Budget(name="patches", costs=np.asarray([4, 0, 8, 30, 0, 12]), limit=16)
    return plan_bins([5, 3, 4, 2, 6, 7], 10, budgets=[budget], overlength="drop", seed=3)


def test_a_plan_reads_like_a_list_of_rows():
    plan = small_plan()
    assert len(plan) == 2
    assert plan.bins == ((0, 1, 3), (2, 4))
    assert [row.tolist() for row in plan] == [[0, 1, 3], [2, 4]]
    assert plan[-1].tolist() == [2, 4]
    assert plan.sample_ids.tolist() == [0, 1, 3, 2, 4]
    assert plan.bounds.tolist() == [0, 3, 5]
    with pytest.raises(IndexError):
        plan[2]


def test_a_plan_says_how_good_it_is():
    plan = small_plan(capacity=12)
    assert plan.tokens.tolist() == [10, 10]
    assert plan.fill == pytest.approx(20 / 24)
    assert plan.lower_bound == 2
    assert "2 rows of 12 tokens, 83.33% full, 5 samples" in repr(plan)


def test_the_lower_bound_is_that_of_the_budget_that_needs_most():
    budget = Budget(name="images", costs=np.asarray([2, 2, 2, 2, 2]), limit=3)
    assert plan_bins(LENGTHS, 10).lower_bound == 2
    assert plan_bins(LENGTHS, 10, budgets=[budget]).lower_bound == 5


@given(bin_of=st.lists(st.integers(-1, 5), min_size=1, max_size=30), seed=st.integers(0, 3))
def test_rows_in_another_order_are_the_same_rows(bin_of, seed):
    used = sorted({at for at in bin_of if at >= 0})
    dense = np.asarray([used.index(at) if at >= 0 else -1 for at in bin_of])
    plan = checked(Plan.from_assignment(dense, lengths=np.ones(len(bin_of), np.int64), capacity=30))
    rows = np.random.default_rng(seed).permutation(len(plan))
    again = plan.rearranged(rows)
    assert checked(again).bins == tuple(plan.bins[row] for row in rows)


# ---------------------------------------------------------------------- on disk


@pytest.mark.parametrize("plan", [small_plan(), with_patches(), plan_bins([50], 10, overlength="drop")])
def test_a_plan_comes_back_as_it_was(plan, tmp_path):
    plan.save(tmp_path / "rows.plan")
    again = Plan.load(tmp_path / "rows.plan")
    assert again == plan
    assert again.bins == plan.bins
    assert again.manifest == plan.manifest
    assert again.dropped.tolist() == plan.dropped.tolist()
    assert [budget.costs.tolist() for budget in again.budgets] == [budget.costs.tolist() for budget in plan.budgets]


def rewritten(source, target, name: str, change):
    """The same zip with one member changed."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for member in old.namelist():
            data = old.read(member)
            new.writestr(member, change(data) if member == name else data)
    return target


def test_a_plan_that_was_changed_on_disk_is_refused(tmp_path):
    small_plan().save(tmp_path / "rows.plan")

    def swap_samples_of_one_row(data: bytes) -> bytes:
        return data[:-40] + data[-32:-24] + data[-40:-32] + data[-24:]

    changed = rewritten(tmp_path / "rows.plan", tmp_path / "changed", "sample_ids.npy", swap_samples_of_one_row)
    with pytest.raises(LayoutError, match="does not match its digest"):
        Plan.load(changed)


def test_a_file_that_is_no_plan_is_refused(tmp_path):
    (tmp_path / "text").write_text("rows")
    with pytest.raises(ConfigError, match=r"text is no vlmpack.plan"):
        Plan.load(tmp_path / "text")
    with zipfile.ZipFile(tmp_path / "zip", "w") as members:
        members.writestr("other", "x")
    with pytest.raises(ConfigError, match=r"zip is no vlmpack.plan of version 3"):
        Plan.load(tmp_path / "zip")
    small_plan().save(tmp_path / "rows.plan")
    newer = rewritten(
        tmp_path / "rows.plan",
        tmp_path / "newer",
        "manifest.json",
        lambda data: data.replace(b'"version": 3', b'"version": 4'),
    )
    with pytest.raises(ConfigError, match=r"newer is no vlmpack.plan .*its manifest has \('vlmpack.plan', 4\)"):
        Plan.load(newer)


def test_a_write_that_fails_leaves_the_old_plan(tmp_path, monkeypatch):
    small_plan().save(tmp_path / "rows.plan")
    before = (tmp_path / "rows.plan").read_bytes()

    def full_disk(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", full_disk)
    with pytest.raises(ConfigError, match=r"rows.plan cannot be written: .*No space left on device.*Make room"):
        with_patches().save(tmp_path / "rows.plan")
    assert (tmp_path / "rows.plan").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["rows.plan"]


def test_any_damage_is_found_and_no_error_is_raw(tmp_path):
    with_patches().save(tmp_path / "rows.plan")
    whole = (tmp_path / "rows.plan").read_bytes()
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(600):
        data = bytearray(whole)
        data[rng.integers(len(data))] = rng.integers(256)
        (tmp_path / "rows.plan").write_bytes(data[: rng.integers(len(data))] if rng.random() < 0.2 else data)
        try:
            assert Plan.load(tmp_path / "rows.plan") == with_patches()  # a byte that says nothing
            seen.add("same")
        except (ConfigError, LayoutError) as error:
            seen.add(type(error).__name__)
    assert seen == {"same", "ConfigError", "LayoutError"}
