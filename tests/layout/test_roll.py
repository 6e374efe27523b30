"""A row rolled inside its segments: gaps, tails, repeated boundaries and any depth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layout.naive import naive_roll

from vlmpack.errors import LayoutError
from vlmpack.layout import Segments, SlotRule, roll_left
from vlmpack.layout.batch import IGNORE
from vlmpack.layout.row import shift_labels, unshift_labels

OWN = Path(__file__).parents[1] / "vectors" / "roll.json"
CASES: list[dict[str, Any]] = json.loads(OWN.read_text())["cases"]
ON_ONE_RANK = [case for case in CASES if "in" in case]

lengths_lists = st.lists(st.integers(0, 20), min_size=1, max_size=7)
rules = st.builds(
    lambda multiple, row_multiple, repeated: SlotRule(
        multiple=multiple, row_multiple=row_multiple, max_segments=repeated
    ),
    st.integers(1, 5),
    st.integers(1, 40),
    st.sampled_from([None, 9]),
)


def boundaries(case: dict[str, Any]) -> Segments:
    return Segments.from_boundaries(case.get("real", case["stride"]), case["stride"], total=case.get("total"))


@pytest.mark.parametrize("case", ON_ONE_RANK, ids=lambda case: case.get("name", str(case["stride"])))
def test_a_row_rolls_to_what_the_vectors_say(case):
    segments, row, fill = boundaries(case), torch.tensor([case["in"]]), case.get("fill", 0)
    expected = dict(enumerate(case.get("depths", [case.get("out")]), start=1))
    if "out_twice" in case:
        expected[2] = case["out_twice"]
    for depth, out in expected.items():
        rolled = roll_left(row, segments, depth=depth, fill=fill)
        assert rolled.tolist() == [out]
        assert rolled.dtype == row.dtype


@given(lengths=lengths_lists, rule=rules, depth=st.integers(1, 25))
def test_it_is_what_a_plain_loop_gives_sample_by_sample(lengths, rule, depth):
    segments = Segments.from_lengths(lengths, rule)
    samples = [[100 * i + at for at in range(length)] for i, length in enumerate(lengths)]
    row = torch.full((segments.total,), -7)  # what must never be read
    for sample, (start, stop) in zip(samples, segments.spans, strict=False):
        row[start:stop] = torch.tensor(sample)
    expected = naive_roll(samples, segments.slots[: len(samples)], depth=depth, fill=-1)
    expected += [-1] * (segments.total - len(expected))
    assert roll_left(row, segments, depth=depth, fill=-1).tolist() == expected
    assert row.tolist().count(-7) == segments.total - segments.num_tokens  # the row itself is left as it was


@given(lengths=lengths_lists, rule=rules)
def test_hidden_states_roll_along_their_tokens(lengths, rule):
    segments = Segments.from_lengths(lengths, rule)
    hidden_1TD = torch.randn(1, segments.total, 3)
    along = roll_left(hidden_1TD, segments, depth=2, fill=0, token_dim=1)
    assert torch.equal(along, roll_left(hidden_1TD.mT, segments, depth=2, fill=0).mT)


@given(lengths=lengths_lists, rule=rules)
def test_labels_come_back_but_for_the_first_of_each_segment(lengths, rule):
    segments = Segments.from_lengths(lengths, rule)
    labels = torch.randint(0, 9, (1, segments.total))
    back = unshift_labels(shift_labels(labels, segments), segments)
    kept = (segments.position_in_segment() > 0) & ~segments.padding_mask()
    assert torch.equal(back, torch.where(kept, labels, IGNORE))


def test_a_tensor_of_another_row_is_refused():
    segments = Segments.from_lengths([3, 5])
    with pytest.raises(LayoutError, match=r"the row is 8 tokens wide.*\[1, 4\] has 4 at dimension -1.*halo"):
        roll_left(torch.zeros(1, 4), segments, fill=0)
    with pytest.raises(LayoutError, match="by at least 1 token, got depth=0"):
        roll_left(torch.zeros(1, 8), segments, depth=0, fill=0)
