"""Rows as columns of numbers, against plain loops over tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.naive import naive_rows

from vlmpack.errors import ConfigError
from vlmpack.plan import PrefixGroups, plan_bins
from vlmpack.text.columns import RowFormat, Rows, fill_rows
from vlmpack.text.samples import Samples
from vlmpack.text.seqpacker import Packer

COLUMNS = ("input_ids", "labels", "position_ids")


def rows_of(filled: Rows) -> dict[str, list[list[int]]]:
    cuts = filled.bounds[1:-1]
    names = (*COLUMNS, "attention_mask")
    columns = (filled.input_ids, filled.labels, filled.position_ids, filled.mask)
    return {name: [row.tolist() for row in np.split(column, cuts)] for name, column in zip(names, columns, strict=True)}


@given(
    lengths=st.lists(st.integers(1, 11), min_size=1, max_size=13),
    padded=st.booleans(),
    label_padding_value=st.sampled_from([-100, -7]),
    seed=st.integers(0, 9),
)
@settings(max_examples=40, deadline=None)
def test_rows_are_those_of_plain_loops(lengths, padded, label_padding_value, seed) -> None:
    rng = np.random.default_rng(seed)
    token_ids = [rng.integers(0, 97, n).tolist() for n in lengths]
    labels = [np.where(rng.random(n) < 0.5, ids, -100).tolist() for n, ids in zip(lengths, token_ids, strict=True)]
    plan = Packer(11, "ffs", seed).plan(lengths)
    form = RowFormat(padding_value=3, label_padding_value=label_padding_value, pad_to_capacity=padded)
    filled = fill_rows(Samples.read(token_ids, labels=labels), plan, form)
    expected = naive_rows(
        plan.bins,
        token_ids,
        labels,
        11 if padded else None,
        padding_value=3,
        label_padding_value=label_padding_value,
    )
    assert rows_of(filled) == expected


def test_a_row_by_hand() -> None:
    samples = Samples.read([[7, 7, 7], [8, 8]])
    filled = fill_rows(samples, plan_bins([3, 2], 7), RowFormat())
    assert rows_of(filled) == {
        "input_ids": [[7, 7, 7, 8, 8, 0, 0]],
        "labels": [[-100, 7, 7, -100, 8, -100, -100]],
        "position_ids": [[0, 1, 2, 0, 1, 0, 0]],
        "attention_mask": [[1, 1, 1, 1, 1, 0, 0]],
    }
    assert filled.used.tolist() == [5]


def test_some_rows_are_those_of_all_rows() -> None:
    samples = Samples.read([[i] * n for i, n in enumerate([5, 3, 4, 2, 6, 1])])
    plan = plan_bins(samples.lengths, 7)
    assert len(plan) == 3
    whole, part = (rows_of(fill_rows(samples, plan, RowFormat(), rows=rows)) for rows in (None, range(1, 3)))
    assert {name: rows[1:3] for name, rows in whole.items()} == part


def test_a_row_above_the_capacity_cannot_be_padded_to_it() -> None:
    samples = Samples.read([[1] * 9, [2]])
    plan = plan_bins([9, 1], 7, oversize="own_row")
    with pytest.raises(ConfigError, match=r"holds 9 tokens .* cannot be padded to the capacity of 7"):
        fill_rows(samples, plan, RowFormat())
    assert sorted(fill_rows(samples, plan, RowFormat(pad_to_capacity=False)).used.tolist()) == [1, 9]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"padding_value": "x"}, "padding_value must be a whole number from 0 .*, got 'x'"),
        (
            {"padding_value": 1.5},
            r"padding_value must be a whole number .*, got 1\.5; give the tokenizer's pad_token_id",
        ),
        ({"padding_value": True}, "padding_value must .*, got True"),
        ({"label_padding_value": None}, "label_padding_value must be a whole number from -.*, got None; choose -100"),
    ],
)
def test_padding_is_a_whole_number(settings, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RowFormat(**settings)


def test_a_number_of_numpys_is_the_same_padding() -> None:
    form = RowFormat(padding_value=np.int64(3), label_padding_value=np.int32(-1))
    assert repr(form) == repr(RowFormat(padding_value=3, label_padding_value=-1))  # of which data sets are named


@pytest.mark.parametrize("settings", [{"padding_value": -1}, {"padding_value": 2**31}, {"label_padding_value": 2**31}])
def test_padding_that_no_column_can_hold_is_refused(settings) -> None:
    with pytest.raises(ConfigError, match="padding_value must be a whole number from"):
        RowFormat(**settings)


def test_rows_that_share_prefixes_have_no_columns() -> None:
    groups = PrefixGroups.of_keys(["a", "a"], [2, 2])
    with pytest.raises(ConfigError, match=r"share prefixes, and columns of text .*: plan without groups="):
        fill_rows(Samples.read([[1] * 3, [1] * 4]), plan_bins([3, 4], 7, groups=groups), RowFormat())
