"""Groups of samples that share prefixes: every row counts each prefix once, and nothing is lost or too full."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plan.naive import checked, fewest_rows, naive_pairs, naive_tokens

from vlmpack.errors import ConfigError, SampleError
from vlmpack.plan import Budget, LengthTable, Plan, PrefixGroups, attended_pairs, plan_bins
from vlmpack.plan.plan import STRATEGIES, split_groups

CAPACITY = 23


@st.composite
def grouped_lengths(draw, *, most: int = 24) -> tuple[list[int], PrefixGroups]:
    """(lengths, groups): up to three levels of groups, samples in inner ones, alone, and equal to their prefix."""
    parents, tokens = [], []
    for group in range(draw(st.integers(0, 5))):
        parents.append(draw(st.integers(-1, group - 1)))
        tokens.append((tokens[parents[-1]] if parents[-1] >= 0 else 0) + draw(st.integers(1, 6)))
    of_samples = draw(st.lists(st.integers(-1, len(parents) - 1), min_size=1, max_size=most))
    prefixes = [tokens[group] if group >= 0 else 1 for group in of_samples]
    lengths = [max(prefix, min(prefix + draw(st.integers(0, 12)), CAPACITY)) for prefix in prefixes]
    return lengths, PrefixGroups(of_samples=of_samples, parents=parents, tokens=tokens)  # pyright: ignore


def flat(of_samples: list[int], tokens: list[int], **columns: Any) -> PrefixGroups:
    """Groups that do not nest."""
    parents = np.full(len(tokens), -1)
    return PrefixGroups(of_samples=np.array(of_samples), parents=parents, tokens=np.array(tokens), **columns)


# ---------------------------------------------------------------------- any samples


@given(samples=grouped_lengths(), strategy=st.sampled_from([*STRATEGIES]), seed=st.none() | st.integers(0, 5))
def test_each_sample_is_in_one_row_and_no_row_computes_more_than_it_may(samples, strategy, seed):
    lengths, groups = samples
    plan = checked(plan_bins(lengths, CAPACITY, strategy=strategy, groups=groups, overlength="drop", seed=seed))
    planned = [sample for row in plan.bins for sample in row]
    too_long = [sample for sample, n in enumerate(lengths) if n > CAPACITY]
    assert sorted([*planned, *too_long]) == list(range(len(lengths)))
    counted = [len(naive_tokens(row, lengths, groups)) for row in plan.bins]
    assert plan.tree_tokens.tolist() == counted
    assert max(counted, default=0) <= CAPACITY
    assert plan.attended_pairs.tolist() == [naive_pairs(row, lengths, groups) for row in plan.bins]
    assert attended_pairs(np.array(lengths)).tolist() == [n * (n + 1) // 2 for n in lengths]
    assert plan.tokens.tolist() == [sum(lengths[sample] for sample in row) for row in plan.bins]


@given(samples=grouped_lengths(most=7))
def test_rows_are_never_fewer_than_the_bound_nor_many_more_than_the_fewest(samples):
    lengths, groups = samples
    fitting = np.flatnonzero(np.asarray(lengths) <= CAPACITY)
    if not len(fitting):
        return
    lengths, groups = [lengths[at] for at in fitting], replace(groups, of_samples=groups.of_samples[fitting])
    plan, fewest = plan_bins(lengths, CAPACITY, groups=groups), fewest_rows(lengths, CAPACITY, groups)
    assert plan.lower_bound <= fewest <= len(plan) <= 2 * fewest


# ---------------------------------------------------------------------- shapes


def test_a_group_that_is_too_large_is_cut_and_each_piece_repeats_the_prefix():
    plan = plan_bins([9, 7, 6, 5], 10, groups=flat([0, 0, 0, 0], [4]))
    assert plan.bins == ((0, 3), (1, 2))
    assert plan.tree_tokens.tolist() == [10, 9]


@given(samples=grouped_lengths(), seed=st.none() | st.integers(0, 5))
def test_whole_groups_are_those_that_do_not_fit_and_splitting_them_again_gives_rows_that_fit(samples, seed):
    lengths, groups = samples
    plan = checked(plan_bins(lengths, CAPACITY, groups=groups, whole_groups=True, seed=seed))
    again = checked(split_groups(plan))
    assert plan.whole_groups
    assert not again.whole_groups
    assert sorted(plan.sample_ids) == sorted(again.sample_ids) == list(range(len(lengths)))
    assert max(again.tree_tokens) <= CAPACITY
    for row, tokens in zip(plan, plan.tree_tokens, strict=True):
        prefixes = [_path(groups, int(groups.of_samples[sample])) for sample in row]
        shared = max((groups.tokens[group] for group in set.intersection(*prefixes)), default=0)
        assert tokens <= CAPACITY or shared > CAPACITY / 4


def _path(groups: PrefixGroups, group: int) -> set[int]:
    return set() if group < 0 else {group} | _path(groups, int(groups.parents[group]))


def test_prompts_behind_a_short_system_prompt_are_whole_groups():
    groups = PrefixGroups(of_samples=np.array([1, 2] * 3), parents=np.array([-1, 0, 0]), tokens=np.array([2, 9, 9]))
    plan = plan_bins([11] * 6, 12, groups=groups, whole_groups=True)
    assert plan.bins == ((0, 2, 4), (1, 3, 5))
    assert plan.tree_tokens.tolist() == [15, 15]
    assert split_groups(plan).tree_tokens.tolist() == [11] * 6


def test_a_million_samples_of_one_system_prompt_fill_their_rows():
    lengths = 100 + np.random.default_rng(0).integers(1, 400, 20_000)
    plan = plan_bins(lengths, 4096, groups=flat([0] * len(lengths), [100]))
    assert plan.fill > 0.999
    assert len(plan) < 0.8 * len(plan_bins(lengths, 4096))


def test_a_plan_with_groups_is_read_back(tmp_path: Path):
    budget = Budget(name="patches", costs=np.array([4, 4, 8]), limit=8, shared=np.array([4]))
    plan = plan_bins([5, 6, 3], 10, budgets=[budget], groups=flat([0, 0, -1], [4]))
    plan.save(tmp_path / "plan")
    loaded = Plan.load(tmp_path / "plan")
    assert loaded == plan
    assert loaded.tree_tokens.tolist() == plan.tree_tokens.tolist() == [7, 3]
    assert (loaded.manifest["tokens"], loaded.manifest["tree_tokens"], loaded.manifest["longest_tree"]) == (14, 10, 7)
    assert plan_bins([5, 6, 3], 10, groups=flat([0, 0, -1], [3])) != plan_bins(
        [5, 6, 3], 10, groups=flat([0, 0, -1], [4])
    )


# ---------------------------------------------------------------------- tables


def table_of(groups: PrefixGroups | None = None) -> LengthTable:
    zeros = np.zeros(3, np.int64)
    columns = {"images": np.array([1, 1, 2]), "patches": np.array([16, 16, 32]), "image_tokens": np.array([4, 4, 8])}
    rest = {"video_tokens": zeros, "videos": zeros, "targets": zeros}
    ids, text = np.array([0, 2, 3]), np.array([2, 3, 4])
    return LengthTable(sample_ids=ids, text_tokens=text, **columns, **rest, groups=groups)


SHARING = flat([0, 0, -1], [5], patches=np.array([16]), images=np.array([1]))


def test_a_plan_of_a_table_with_groups_counts_places_in_the_data_set(tmp_path: Path):
    table = table_of(SHARING)
    table.save(tmp_path / "table")
    assert LengthTable.load(tmp_path / "table") == table != table_of()
    budgets = table.budgets(patches=48, images=3)
    plan = checked(plan_bins(table, 22, budgets=budgets, groups=table.groups))
    assert plan.bins == ((0, 2, 3),)
    assert plan.tree_tokens.tolist() == [6 + 2 + 12]
    assert len(plan_bins(table, 22, budgets=budgets)) == 2  # images counted twice


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"of_samples": [0, 1], "parents": [-1], "tokens": [4]}, r"of_samples\[1\] is 1: it has to be -1"),
        ({"of_samples": [0], "parents": [0], "tokens": [4]}, r"parents\[0\] is 0: .* parents stand before"),
        ({"of_samples": [0], "parents": [-1], "tokens": [0]}, "the prefix of group 0 has 0 tokens: a group adds 1"),
        (
            {"of_samples": [1], "parents": [-1, 0], "tokens": [4, 4]},
            "group 1 has 4 tokens: a group adds 1 or more to its parent",
        ),
        ({"of_samples": [0], "parents": [-1], "tokens": [4, 5]}, "tokens has 2 entries for 1 groups"),
        ({"of_samples": [0], "parents": [-1], "tokens": [4], "patches": [-1]}, "group 0 has -1 patches"),
    ],
)
def test_groups_that_contradict_themselves_are_refused(columns, message):
    with pytest.raises(ConfigError, match=message):
        PrefixGroups(**{name: np.array(values) for name, values in columns.items()})


def test_groups_of_other_samples_are_refused():
    with pytest.raises(ConfigError, match="groups of 2 samples, but there are 3 lengths"):
        plan_bins([5, 6, 7], 10, groups=flat([0, 0], [4]))
    with pytest.raises(SampleError, match="sample 1: has 3 tokens, and the prefix of its group 0 has 4"):
        plan_bins([5, 3], 10, groups=flat([0, 0], [4]))
    with pytest.raises(ConfigError, match="budget 'patches' has shared costs of 2 groups, and there are 1"):
        budget = Budget(name="patches", costs=np.array([1, 1]), limit=4, shared=np.array([1, 1]))
        plan_bins([5, 6], 10, groups=flat([0, 0], [4]), budgets=[budget])
    with pytest.raises(SampleError, match="sample 0: has 16 patches, and the prefix of its group 0 has 17"):
        table_of(flat([0, 0, -1], [5], patches=np.array([17])))


def test_keys_become_groups():
    groups = PrefixGroups.of_keys(["a", None, "b", "a"], [4, 0, 7, 4])
    assert groups == flat([0, -1, 1, 0], [4, 7])
    assert repr(groups) == "PrefixGroups(2 groups, 3 of 4 samples in them)"
    with pytest.raises(SampleError, match="sample 3: shares 5 tokens, and the first sample of its group 'a' 4"):
        PrefixGroups.of_keys(["a", None, "b", "a"], [4, 0, 7, 5])
    with pytest.raises(ConfigError, match="2 keys, but 1 shared_tokens"):
        PrefixGroups.of_keys(["a", "a"], [4])


def test_keys_of_an_array_or_tensor_are_their_values_and_what_cannot_be_compared_is_refused():
    shared, expected = [4, 4, 7], flat([0, 0, 1], [4, 7])
    assert PrefixGroups.of_keys(torch.tensor([3, 3, 5]), shared) == expected
    assert PrefixGroups.of_keys(np.array(["a", "a", "b"]), shared) == expected
    for keys in ([[1], [1], [2]], list(torch.tensor([3, 3, 5]))):
        with pytest.raises(ConfigError, match=r"cannot be the key of a group: give numbers, texts, tuples or None"):
            PrefixGroups.of_keys(keys, shared)
