"""Groups found from hashes of what samples begin with: never more than is shared, and all of it at turns and media."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmpack.layout.prefix_tree import compressed_trie
from vlmpack.plan import PrefixGroups, plan_bins
from vlmpack.plan.prefix_groups import PrefixMarks, groups_of_marks


def marks(symbols: Sequence[int], *, turns: Sequence[int] = (), media: Sequence[tuple[int, int]] = ()) -> PrefixMarks:
    """Marks of a sample; media as (end, patches)."""
    ends, patches = np.array(media, np.int64).reshape(-1, 2).T
    return PrefixMarks.of(np.array(symbols, np.int64), np.array(turns, np.int64), ends, patches)


def num_alike(samples: Sequence[Sequence[int]]) -> int:
    """Symbols that all samples begin with, compared one by one."""
    columns = zip(*samples, strict=False)
    return next((at for at, column in enumerate(columns) if len(set(column)) > 1), min(map(len, samples)))


def members(groups: PrefixGroups, group: int) -> list[int]:
    """Samples in a group and in all that lie in it."""
    inside = {group}
    for child, parent in enumerate(groups.parents.tolist()):
        if parent in inside:
            inside.add(child)
    return [at for at, innermost in enumerate(groups.of_samples.tolist()) if innermost in inside]


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


@st.composite
def samples_that_branch(draw) -> list[list[int]]:
    """Samples made of pieces of a few texts, which many of them begin with."""
    pieces = [text(seed, draw(st.integers(1, 90))) for seed in range(4)]
    chosen = draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=12))
    return [[symbol for piece in row for symbol in pieces[piece]] for row in chosen]


@given(samples=samples_that_branch(), min_shared=st.sampled_from([1, 16, 64]))
def test_groups_share_what_they_say_and_stand_apart(samples, min_shared):
    groups = groups_of_marks([marks(sample) for sample in samples], min_shared=min_shared)
    for group, (parent, tokens) in enumerate(zip(groups.parents.tolist(), groups.tokens.tolist(), strict=True)):
        inside = members(groups, group)
        assert len(inside) > 1
        assert tokens <= num_alike([samples[at] for at in inside])
        assert tokens - (groups.tokens[parent] if parent >= 0 else 0) >= min_shared
    groups.check_samples(np.array([len(sample) for sample in samples]))


@given(samples=samples_that_branch())
def test_a_prefix_of_two_samples_is_found_to_within_a_mark(samples):
    groups = groups_of_marks([marks(sample) for sample in samples], min_shared=16)
    outermost = [int(groups.roots[group]) if group >= 0 else -1 for group in groups.of_samples.tolist()]
    for a, first in enumerate(samples):
        for b, second in enumerate(samples[:a]):
            if num_alike([first, second]) >= 32:
                assert outermost[a] == outermost[b] >= 0


def test_prompts_in_a_system_prompt_are_groups_in_a_group():
    system, prompts = text(0, 100), [text(1, 150), text(2, 150)]
    samples = [system + prompts[at // 2] + text(9 + at, 20) for at in range(4)]
    groups = groups_of_marks([marks(sample, turns=[100, 250]) for sample in samples], min_shared=64)
    assert groups.parents.tolist() == [-1, 0, 0]
    assert groups.tokens.tolist() == [100, 250, 250]
    assert groups.of_samples.tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize("media", [(), [(5, 16), (9, 4)]])
def test_marks_are_read_back_from_bytes(media):
    sample = marks(text(0, 40), turns=[7], media=media)
    read = PrefixMarks.from_bytes(sample.to_bytes())
    assert all(map(np.array_equal, sample, read))


@pytest.mark.parametrize("seed", range(6))
def test_the_tree_of_a_row_computes_no_more_than_was_planned(seed):
    """System prompts, prompts and answers of any length; the tree as `share` finds it, from all symbols."""
    drawn = np.random.default_rng(seed)
    system, samples = text(seed, int(drawn.integers(20, 200))), []
    for _ in range(8):
        prompt = [*system[: drawn.integers(2) * 999], *drawn.integers(0, 999, drawn.integers(20, 300)).tolist()]
        answers = (drawn.integers(0, 999, drawn.integers(1, 150)).tolist() for _ in range(drawn.integers(1, 9)))
        samples += [(prompt + answer, len(prompt)) for answer in answers]
    groups = groups_of_marks([marks(sample, turns=[end]) for sample, end in samples], min_shared=64)
    plan = plan_bins([len(sample) for sample, _ in samples], 2048, groups=groups, seed=seed)
    for row, planned in zip(plan.bins, plan.tree_tokens.tolist(), strict=True):
        trie = compressed_trie([np.array(samples[at][0]) for at in row], [0] * len(row), 64)
        assert 0.6 * planned < sum(trie.lengths) <= planned
