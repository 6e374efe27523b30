"""pack_dataset and pack_dataset_from_result: the columns of the data set, and what can be said about them."""

from __future__ import annotations

import datasets
import numpy as np
import pytest
import torch
from text.naive import naive_rows
from transformers import default_data_collator

from vlmpack.errors import ConfigError, SampleError
from vlmpack.plan import plan_bins
from vlmpack.text import columns, pack_dataset, pack_dataset_from_result, pack_sequences

IDS = [[10, 20, 30], [40, 50], [60, 70, 80, 90], [100]]
FOUR = ["input_ids", "attention_mask", "labels", "position_ids"]


def test_the_columns_are_seqpackers() -> None:
    rows = pack_dataset(IDS, 6, padding_value=1)
    assert isinstance(rows, datasets.Dataset)
    assert rows.column_names == FOUR
    assert rows[:] == {
        "input_ids": [[10, 20, 30, 100, 1, 1], [40, 50, 60, 70, 80, 90]],
        "attention_mask": [None, None],
        "labels": [[-100, 20, 30, -100, -100, -100], [-100, 50, -100, 70, 80, 90]],
        "position_ids": [[0, 1, 2, 0, 0, 0], [0, 1, 0, 1, 2, 3]],
    }


def test_the_null_mask_does_not_reach_a_model() -> None:
    rows = pack_dataset(IDS, 6)
    batch = default_data_collator([rows[0], rows[1]])
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == dict.fromkeys(
        ["input_ids", "labels", "position_ids"], (2, 6)
    )


def test_seqpackers_mask_can_be_had() -> None:
    rows = pack_dataset(IDS, 6, attention_mask="padding")
    assert rows["attention_mask"][:] == [[1, 1, 1, 1, 0, 0], [1] * 6]


def test_rows_need_not_be_padded() -> None:
    rows = pack_dataset(IDS, 6, pad_to_capacity=False)
    assert [len(ids) for ids in rows["input_ids"]] == [4, 6]


def test_trls_column_of_lengths_can_be_had() -> None:
    assert pack_dataset(IDS, 6, seq_lengths=True)["seq_lengths"][:] == [[3, 1], [2, 4]]


def test_masked_tokens_are_not_learnt() -> None:
    masks = [[0, 0, 1], [0, 1], [1, 1, 0, 1], [1]]
    by_mask = pack_dataset(IDS, 6, loss_mask=masks)["labels"][:]
    by_labels = pack_dataset(IDS, 6, labels=[[-100, -100, 30], [-100, 50], [60, 70, -100, 90], [100]])["labels"][:]
    assert by_mask == by_labels == [[-100, -100, 30, -100, -100, -100], [-100, 50, -100, 70, -100, 90]]


@pytest.mark.parametrize(
    ("oversize", "tokens"),
    [
        ("drop", [[10, 20, 30], [40, 50, 100]]),
        ("truncate", [[10, 20, 30], [40, 50, 100], [60, 70, 80]]),
        ("split", [[10, 20, 30], [40, 50, 90], [60, 70, 80], [100]]),
    ],
)
def test_long_samples_can_be_left_out_or_cut(oversize, tokens) -> None:
    assert pack_dataset(IDS, 3, oversize=oversize, pad_to_capacity=False)["input_ids"][:] == tokens


def test_a_long_sample_is_named() -> None:
    with pytest.raises(SampleError, match="sample 2: does not fit a row of 3 tokens"):
        pack_dataset(IDS, 3)


@pytest.mark.parametrize("oversize", ["error", "drop", "truncate", "split"])
def test_an_empty_sample_is_named(oversize) -> None:
    with pytest.raises(SampleError, match="sample 1: has length 0"):
        pack_dataset([[1] * (9 if oversize == "split" else 3), [], [2]], 3, oversize=oversize)


@pytest.mark.parametrize("ids", [[], [[1] * 9]])
def test_no_samples_are_a_data_set_without_rows(ids) -> None:
    rows = pack_dataset(ids, 6, oversize="drop")
    assert (len(rows), rows.column_names, rows.features) == (0, FOUR, pack_dataset(IDS, 6).features)


def test_the_rows_of_a_result_and_of_any_plan_are_the_same_rows() -> None:
    whole = pack_dataset(IDS, 6, strategy="nf")
    lengths = [len(ids) for ids in IDS]
    by_result = pack_dataset_from_result(pack_sequences(lengths, 6, "nf"), IDS)
    by_plan = pack_dataset_from_result(plan_bins(lengths, 6, strategy="next_fit"), IDS)
    assert whole[:] == by_result[:] == by_plan[:]


@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ([3, 2, 4], ConfigError, "3 lengths were packed, but there are token ids of 4 samples"),
        ([3, 2, 5, 1], SampleError, "sample 2: has 4 token ids, but was packed with a length of 5"),
    ],
)
def test_a_result_of_other_samples_is_refused(lengths, error, message) -> None:
    with pytest.raises(error, match=message):
        pack_dataset_from_result(pack_sequences(lengths, 6), IDS)


@pytest.mark.parametrize("settings", [{"attention_mask": "ones"}, {"oversize": "own_row"}, {"capacity": 0}])
def test_a_setting_that_does_not_exist_is_refused(settings) -> None:
    with pytest.raises(ConfigError):
        pack_dataset(IDS, **{"capacity": 6, **settings})


def test_blocks_of_rows_join_without_a_seam(monkeypatch) -> None:
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 99, n).tolist() for n in rng.integers(1, 30, 200)]
    whole = pack_dataset(ids, 31, seq_lengths=True, attention_mask="padding")
    monkeypatch.setattr(columns, "BLOCK", 100)
    parts = pack_dataset(ids, 31, seq_lengths=True, attention_mask="padding")
    assert parts.data.column("labels").num_chunks > 3 > whole.data.column("labels").num_chunks
    assert parts[:] == whole[:]


@pytest.mark.parametrize("form", ["lists", "arrays", "tensors", "column"])
def test_rows_do_not_depend_on_how_tokens_come_in(form) -> None:
    given = {
        "lists": IDS,
        "arrays": [np.asarray(ids) for ids in IDS],
        "tensors": [torch.tensor(ids) for ids in IDS],
        "column": datasets.Dataset.from_dict({"input_ids": IDS})["input_ids"],
    }[form]
    bins = pack_sequences([3, 2, 4, 1], 6).bins
    expected = naive_rows(bins, IDS, IDS, 6)
    assert pack_dataset(given, 6, attention_mask="padding")[:] == expected


def test_the_same_rows_have_the_same_fingerprint_and_others_another() -> None:
    def name(ids=IDS, **settings) -> str:
        return pack_dataset(ids, 6, **settings)._fingerprint

    others = [
        name([*IDS[:3], [101]]),
        name(padding_value=1),
        name(attention_mask="padding"),
        name(seq_lengths=True),
        name(strategy="nf"),
        name(loss_mask=[[0] * len(ids) for ids in IDS]),
    ]
    assert name() == name()
    assert len({name(), *others}) == 7


def test_rows_survive_the_disk(tmp_path) -> None:
    rows = pack_dataset(IDS, 6)
    rows.save_to_disk(tmp_path / "rows")
    assert datasets.load_from_disk(tmp_path / "rows")[:] == rows[:]
