"""pack_result_to_tensors and packed_collate_fn: the tensors of SeqPacker's batch."""

from __future__ import annotations

import pickle

import pytest
import torch
from text.naive import seqpacker_columns
from torch.utils.data import DataLoader

from vlmpack.errors import ConfigError, SampleError
from vlmpack.text import pack_dataset, pack_result_to_tensors, pack_sequences, packed_collate_fn

IDS = [[10, 20, 30], [40, 50], [60, 70, 80, 90], [100]]
LENGTHS = [3, 2, 4, 1]


def batch_of(capacity: int = 6, **settings):
    return pack_result_to_tensors(pack_sequences(LENGTHS, capacity), IDS, **settings)


def test_tensors_are_the_columns_of_the_data_set() -> None:
    batch, rows = batch_of(padding_value=1), pack_dataset(IDS, 6, padding_value=1)
    for name in ("input_ids", "labels", "position_ids"):
        assert vars(batch)[name].tolist() == rows[name][:]
        assert vars(batch)[name].dtype == torch.int64


def test_boundaries_are_those_of_varlen_kernels() -> None:
    batch = batch_of()
    assert [boundaries.tolist() for boundaries in batch.cu_seqlens] == [[0, 3, 4], [0, 2, 6]]
    assert {boundaries.dtype for boundaries in batch.cu_seqlens} == {torch.int32}
    assert batch.max_seqlen == 4
    assert [pack.sequence_ids for pack in batch.packs] == [[0, 3], [1, 2]]


def test_the_mask_lets_a_token_see_its_own_sample_up_to_itself() -> None:
    sees = batch_of().attention_mask == 0
    assert sees.shape == (2, 1, 6, 6)
    drawn = ["".join(".x"[int(cell)] for cell in row) for row in sees[0, 0]]
    assert drawn == [
        "x.....",
        "xx....",
        "xxx...",
        "...x..",
        "....x.",  # padding sees itself: a row of nothing would be NaN
        ".....x",
    ]


def test_shift_labels_are_what_seqpacker_calls_labels() -> None:
    bins = pack_sequences(LENGTHS, 6).bins
    assert batch_of().shift_labels.tolist() == seqpacker_columns(bins, IDS, 6)["labels"]


def test_a_label_padding_value_of_your_own_is_not_learnt() -> None:
    batch = batch_of(label_padding_value=-1)
    assert (batch.labels == -1).sum() == (batch_of().labels == -100).sum()
    assert torch.equal(batch.to_hf()["labels"], batch_of().to_hf()["labels"])


def test_a_label_that_equals_the_padding_value_is_learnt() -> None:
    samples = [{"input_ids": [5, 0, 7, 0], "labels": [-100, 0, 7, -100]}, {"input_ids": [3, 4], "labels": [3, 4]}]
    batch = packed_collate_fn(7, label_padding_value=0)(samples)
    assert batch.labels.tolist() == [[0, 0, 7, 0, 0, 4, 0]]
    assert batch.to_hf()["labels"].tolist() == [[-100, 0, 7, -100, -100, 4]]
    assert packed_collate_fn(7)(samples).learnt is None  # -100 is no label of a token, so nothing has to be kept


def test_a_batch_of_which_all_samples_were_dropped_has_no_row() -> None:
    batch = packed_collate_fn(2, oversize="drop")([[1, 2, 3]])
    assert batch.input_ids.shape == (0, 2)
    with pytest.raises(ConfigError, match=r"no sample: each exceeds the capacity of 2 tokens.*raise the capacity"):
        batch.to_hf()


def test_one_row_for_the_model_has_all_samples_and_no_padding() -> None:
    row = batch_of().to_row()
    assert row.segments.lengths == (3, 1, 2, 4)
    assert row.input_ids.tolist() == [[10, 20, 30, 100, 40, 50, 60, 70, 80, 90]]
    assert row.shift_labels is not None
    assert row.shift_labels.tolist() == [[20, 30, -100, -100, 50, -100, 70, 80, 90, -100]]
    assert row.metadata is not None
    assert (row.metadata.num_targets, row.metadata.sample_ids) == (6, (0, 3, 1, 2))


def test_tensors_go_where_they_are_sent() -> None:
    batch = batch_of(device="meta")
    assert {batch.input_ids.device.type, batch.labels.device.type, batch.cu_seqlens[0].device.type} == {"meta"}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_packs_each_batch(workers) -> None:
    collate = packed_collate_fn(capacity=6, strategy="obfd")
    loader = DataLoader(
        IDS,
        batch_size=3,
        collate_fn=collate,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    assert [batch.input_ids.shape for batch in loader] == [(2, 6), (1, 6)]


def test_the_collate_function_can_be_pickled_for_spawned_workers() -> None:
    collate = pickle.loads(pickle.dumps(packed_collate_fn(6)))
    assert torch.equal(collate(IDS).input_ids, batch_of().input_ids)


def test_samples_may_be_dictionaries_with_labels_of_their_own() -> None:
    masked = [{"input_ids": torch.tensor(ids), "labels": [-100] * (len(ids) - 1) + ids[-1:]} for ids in IDS]
    labels = packed_collate_fn(6)(masked).labels
    assert labels.tolist() == [[-100, -100, 30, -100, -100, -100], [-100, 50, -100, -100, -100, 90]]
    with pytest.raises(ConfigError, match="3 of 4 samples have labels"):
        packed_collate_fn(6)([*masked[:3], {"input_ids": [1]}])


@pytest.mark.parametrize("name", ["loss_mask", "completion_mask", "assistant_masks"])
def test_a_mask_says_what_is_learnt(name) -> None:
    samples = [
        {"input_ids": [1, 2, 3], name: [0, 0, 1]},
        {"input_ids": torch.tensor([4, 5]), name: torch.tensor([True] * 2)},
    ]
    assert packed_collate_fn(6)(samples).labels.tolist() == [[-100, -100, 3, -100, 5, -100]]


def test_padding_of_a_tokenizer_is_left_out() -> None:
    samples = [
        {"input_ids": [1, 2, 0, 0], "attention_mask": [1, 1, 0, 0], "labels": [1, 2, 0, 0]},
        {"input_ids": [3, 4], "attention_mask": None, "labels": [3, -100]},
    ]
    batch = packed_collate_fn(8)(samples)
    assert batch.cu_seqlens[0].tolist() == [0, 2, 4]
    assert batch.to_hf()["input_ids"].tolist() == [[1, 2, 3, 4]]
    assert batch.to_hf()["labels"].tolist() == [[-100, 2, -100, -100]]
    bare = packed_collate_fn(8)([{"input_ids": [1, 2, 0, 0], "attention_mask": [1, 1, 0, 0], "labels": None}])
    assert bare.labels.tolist() == [[-100, 2, *[-100] * 6]]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"labels": [1, 2], "loss_mask": [1, 1]}, "sample 1: has labels and loss_mask, and each marks what is to be"),
        ({"attention_mask": [1, 2]}, "sample 1: has 2 in attention_mask"),
        ({"attention_mask": [0, 1]}, "sample 1: .* pad on the right"),
        ({"attention_mask": [1]}, "sample 1: has 2 input_ids, but 1 of attention_mask"),
        ({"attention_mask": [1, 1], "loss_mask": [1]}, "sample 1: has 2 input_ids, but 1 of loss_mask"),
        ({"loss_mask": [1, 2]}, "1 of 2 samples have loss_mask; give loss_mask for all, or for none"),
    ],
)
def test_columns_that_contradict_each_other_are_refused(columns, message: str) -> None:
    with pytest.raises((SampleError, ConfigError), match=message):
        packed_collate_fn(6)([{"input_ids": [1, 2]}, {"input_ids": [1, 2], **columns}])


def test_all_samples_of_a_batch_say_it_by_the_same_column() -> None:
    samples = [{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [1, 2], "loss_mask": [1, 1]}]
    with pytest.raises(ConfigError, match="1 of 2 samples have labels, 1 of 2 samples have loss_mask; mark by one of"):
        packed_collate_fn(6)(samples)


@pytest.mark.parametrize(("oversize", "tokens"), [("drop", 6), ("truncate", 9), ("split", 10)])
def test_long_samples_are_left_out_or_cut(oversize, tokens) -> None:
    batch = packed_collate_fn(3, oversize=oversize)(IDS)
    assert sum(pack.used for pack in batch.packs) == tokens
    assert batch.input_ids.shape[1] == 3


@pytest.mark.parametrize("batch", [[[1] * 7], [[]], [["a"]], [{"tokens": [1]}]])
def test_a_bad_sample_is_named(batch) -> None:
    with pytest.raises(SampleError, match="sample 1"):
        packed_collate_fn(6)([[1], *batch])
