"""RowCollator: rows of a packed data set, or samples, as one row without padding."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from vlmpack.errors import ConfigError, SampleError
from vlmpack.layout import METADATA_KEY, PackedRow
from vlmpack.text import RowCollator, pack_dataset

IDS = [[10, 20, 30], [40, 50], [60, 70, 80, 90]]


def rows(**settings):
    return list(pack_dataset(IDS, 6, **settings))


def test_padding_is_left_out_and_boundaries_are_kept() -> None:
    batch = RowCollator()(rows())
    assert batch["input_ids"].tolist() == [[10, 20, 30, 40, 50, 60, 70, 80, 90]]
    assert PackedRow.from_hf(batch).segments.lengths == (3, 2, 4)
    assert batch["labels"].shape == batch["position_ids"].shape == (1, 9)
    assert (batch["labels"] == -100).sum() == 3
    assert batch["position_ids"][batch["labels"] == -100].tolist() == [0, 0, 0]
    assert batch["use_cache"] is False
    assert batch[METADATA_KEY].num_targets == 6


@pytest.mark.parametrize("settings", [{"attention_mask": "padding"}, {"seq_lengths": True}, {"pad_to_capacity": False}])
def test_any_column_that_tells_samples_apart_gives_the_same_row(settings) -> None:
    expected, batch = RowCollator()(rows()), RowCollator()(rows(**settings))
    for name in ("input_ids", "labels", "position_ids", "cu_seqlens_q"):
        assert torch.equal(batch[name], expected[name])


@pytest.mark.parametrize("form", ["numpy", "torch", None])
def test_rows_may_be_lists_arrays_or_tensors(form) -> None:
    data = pack_dataset(IDS, 6).with_format(form)
    assert torch.equal(RowCollator()(list(data))["input_ids"], RowCollator()(rows())["input_ids"])


def test_samples_that_are_not_packed_yet_become_one_row() -> None:
    samples = [{"input_ids": IDS[0], "labels": [-100, -100, 30]}, {"input_ids": IDS[1]}, np.asarray(IDS[2])]
    batch = RowCollator(bare_row="one_sample")(samples)
    assert batch["cu_seqlens_q"].tolist() == [0, 3, 5, 9]
    assert batch["labels"].tolist() == [[-100, -100, 30, -100, 50, -100, 70, 80, 90]]


def test_a_tokenizers_padding_is_left_out() -> None:
    batch = RowCollator(bare_row="one_sample")([{"input_ids": [7, 8, 0, 0], "attention_mask": [1, 1, 0, 0]}])
    assert batch["input_ids"].tolist() == [[7, 8]]


@pytest.mark.parametrize("name", ["loss_mask", "completion_mask", "assistant_masks"])
def test_a_mask_says_what_is_learnt(name) -> None:
    sample = {"input_ids": [1, 2, 3, 4, 0], name: [0, 0, 1, 0, 1], "attention_mask": [1, 1, 1, 1, 0]}
    batch = RowCollator(bare_row="one_sample")([sample, {"input_ids": [5, 6], name: None}])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6]]
    assert batch["labels"].tolist() == [[-100, -100, 3, -100, -100, 6]]


def test_a_mask_of_a_packed_row_says_what_is_learnt() -> None:
    row = {"input_ids": [1, 2, 3, 4, 5, 0], "seq_lengths": [3, 2], "completion_mask": [0, 1, 0, 1, 1, 0]}
    batch = RowCollator()([row])
    assert batch["labels"].tolist() == [[-100, 2, -100, -100, 5]]


def test_columns_that_agree_are_one_row() -> None:
    told = {
        "labels": [-100, 2, 3, -100, 5, -100, -100],
        "position_ids": [0, 1, 2, 0, 1, 0, 0],
        "attention_mask": [1, 1, 1, 1, 1, 0, 0],
        "seq_lengths": [3, 2],
    }
    columns = [{}, {"attention_mask"}, {"position_ids"}, {"labels"}, {"attention_mask", "labels"}, {"seq_lengths"}]
    for left_out in columns:
        row = {"input_ids": [1, 2, 3, 4, 5, 0, 0], **{name: told[name] for name in told if name not in left_out}}
        assert RowCollator()([row])["cu_seqlens_q"].tolist() == [0, 3, 5]


def test_positions_of_padding_may_be_whatever_a_mask_says_is_padding() -> None:
    row = {"input_ids": [1, 2, 0, 0], "position_ids": [0, 1, 2, 3], "attention_mask": [1, 1, 0, 0], "seq_lengths": [2]}
    assert RowCollator()([row])["cu_seqlens_q"].tolist() == [0, 2]


SIX = [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"seq_lengths": [4], "labels": SIX}, r"2 tokens to be learnt behind the last of seq_lengths \[4\]"),
        ({"seq_lengths": [4]}, r"2 tokens to be learnt behind"),
        ({"seq_lengths": [4], "loss_mask": [0, 0, 0, 0, 0, 1]}, "1 tokens to be learnt behind"),
        ({"seq_lengths": [], "labels": [-100] * 6}, "no tokens"),
        (
            {"seq_lengths": [2, 4], "attention_mask": [1, 1, 1, 0, 0, 0]},
            r"\[2, 4\] of 6 tokens, .*_mask of 3",
        ),
        ({"seq_lengths": [2], "attention_mask": [1, 1, 1, 0, 0, 0]}, r"\[2\] of 2 tokens, but an attention_mask of 3"),
        ({"seq_lengths": [2, 4], "position_ids": [0, 1, 2, 0, 1, 2]}, r"\[2, 4\], but position_ids .* \[3, 3\] tokens"),
        ({"seq_lengths": [3], "position_ids": [0, 1, 2, 0, 1, 2]}, r"\[3\], but position_ids of samples of \[3, 3\]"),
        ({"seq_lengths": [6], "position_ids": [0, 1, 2, 0, 1, 2]}, r"\[6\], but position_ids of samples of \[3, 3\]"),
        (
            {"seq_lengths": [3, 3], "position_ids": [0, 1, 2, 3, 4, 5]},
            r"\[3, 3\], but position_ids .* \[6\] tokens",
        ),
        ({"seq_lengths": [3, 3], "position_ids": [0, 1, 2, 0, 1, 9]}, "position_ids that neither count on nor restart"),
        ({"attention_mask": [1, 1, 2, 2, 0, 0]}, "has 2 in attention_mask, which is 1 on tokens and 0 on padding"),
        ({"attention_mask": [1, 1, 1, 1, -1, 0]}, "has -1 in attention_mask"),
        ({"loss_mask": [0, 1, 2, 1, 1, 1]}, "has 2 in loss_mask, which is 1 on tokens that are learnt and 0"),
        (
            {"labels": SIX, "completion_mask": [1] * 6},
            "labels and completion_mask, and each marks what is to be learnt",
        ),
        ({"completion_mask": [1] * 6, "assistant_masks": [1] * 6}, "completion_mask and assistant_masks, and each"),
        ({"loss_mask": [1] * 5}, "6 input_ids, but 5 of loss_mask"),
    ],
)
def test_columns_that_contradict_each_other_are_refused(columns, message: str) -> None:
    with pytest.raises(SampleError, match=f"sample 1: .*{message}"):
        RowCollator(bare_row="one_sample")([{"input_ids": [1, 2]}, {"input_ids": SIX, **columns}])


@pytest.mark.parametrize(
    ("lengths", "positions", "told"),
    [
        ([3, 1, 1], [0, 1, 0, 0, 0, 0, 1], "[2, 1, 1, 1, 2]"),
        ([3, 2], [0, 1, 0, 0, 1, 2, 0], "[2, 1, 3, 1]"),
        ([2, 3], [0, 1, 2, 0, 1, 0, 0], "[3, 2, 1, 1]"),
    ],
)
def test_a_boundary_too_many_does_not_make_up_for_one_that_is_missing(lengths, positions, told: str) -> None:
    row = {"input_ids": [11, 12, 13, 14, 15, 16, 17], "position_ids": positions, "seq_lengths": lengths}
    with pytest.raises(SampleError, match=re.escape(f"seq_lengths {lengths}, but position_ids of samples of {told}")):
        RowCollator()([row])


@pytest.mark.parametrize("padding", [[0, 0], [1, 1], [9, 5]])
def test_positions_of_padding_may_be_any_that_do_not_count_on(padding) -> None:
    row = {"input_ids": [1, 2, 3, 0, 0], "position_ids": [0, 1, 2, *padding], "seq_lengths": [3]}
    assert RowCollator()([row])["cu_seqlens_q"].tolist() == [0, 3]


def test_a_sample_of_one_token_at_the_end_is_taken_for_padding_unless_told() -> None:
    ids = [[1, 2, 3], [4]]
    assert RowCollator()(list(pack_dataset(ids, 6)))["input_ids"].tolist() == [[1, 2, 3]]
    for settings in ({"attention_mask": "padding"}, {"seq_lengths": True}):
        assert RowCollator()(list(pack_dataset(ids, 6, **settings)))["cu_seqlens_q"].tolist() == [0, 3, 4]


@pytest.mark.parametrize(("position_rows", "shape"), [(1, (1, 9)), (4, (4, 1, 9))])
def test_positions_have_as_many_rows_as_the_model_takes(position_rows, shape) -> None:
    assert RowCollator(position_rows=position_rows)(rows())["position_ids"].shape == shape


def test_positions_can_be_left_to_the_model() -> None:
    assert "position_ids" not in RowCollator(position_rows=0)(rows())


def test_a_row_that_lost_its_boundaries_on_the_way_is_refused() -> None:
    kept = {name: rows()[0][name] for name in ("input_ids", "labels")}
    with pytest.raises(SampleError, match=r"sample 0: .*cannot be told apart. If a trainer removed them, set remove_"):
        RowCollator()([kept])


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"position_rows": 3}, "text models take 1, Qwen-VL models 4"), ({"bare_row": "sample"}, "refuse, one_sample")],
)
def test_a_setting_that_does_not_exist_is_refused(settings, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RowCollator(**settings)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [1, 2], "labels": [1]}, "2 input_ids, but 1 of labels"),
        ({"input_ids": [1, 2], "position_ids": [1, 2]}, "position_ids that neither count on nor restart at 0"),
        ({"input_ids": [1, 2, 3], "position_ids": [0, 1, 5]}, "position_ids that neither count on nor restart at 0"),
        ({"input_ids": [1, 2], "attention_mask": [0, 1]}, "pad on the right"),
        ({"input_ids": [1, 2], "seq_lengths": [2, 1]}, r"seq_lengths \[2, 1\], but 2 input_ids"),
        ({"input_ids": [1, 2], "seq_lengths": [2, 0]}, r"seq_lengths \[2, 0\], but 2 input_ids"),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, "no tokens"),
        ({"input_ids": []}, "no tokens"),
        ({"tokens": [1]}, "no input_ids"),
        ({"input_ids": "text"}, "input_ids"),
    ],
)
def test_a_bad_row_is_named(row, message: str) -> None:
    with pytest.raises(SampleError, match=f"sample 1: .*{message}"):
        RowCollator(bare_row="one_sample")([{"input_ids": [1, 2]}, row])


def test_a_rank_without_rows_has_one_token_and_no_target() -> None:
    batch = RowCollator()([])
    assert batch["input_ids"].tolist() == [[0]]
    assert batch["labels"].tolist() == [[-100]]
    assert batch["vlmpack"].num_targets == 0
