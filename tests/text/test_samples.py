"""Token ids as they come in."""

from __future__ import annotations

from collections import deque

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch

from vlmpack.errors import ConfigError, SampleError
from vlmpack.text.samples import Samples

IDS = [[7, 7, 7], [8, 8], [9, 9, 9, 9]]


def column(**settings) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"input_ids": IDS}).with_format(**settings)


FORMS = {
    "lists": IDS,
    "tuples": tuple(map(tuple, IDS)),
    "a generator": (ids for ids in IDS),
    "a deque": deque(IDS),
    "int64 arrays": [np.asarray(ids) for ids in IDS],
    "uint64 arrays": [np.asarray(ids, np.uint64) for ids in IDS],
    "tensors": [torch.tensor(ids) for ids in IDS],
    "a mixture": [IDS[0], np.asarray(IDS[1], np.uint16), torch.tensor(IDS[2], dtype=torch.int32)],
    "an object array": np.asarray([np.asarray(ids) for ids in IDS], dtype=object),
    "a column": column()["input_ids"],
    "a column of tensors": column(type="torch")["input_ids"],
    "an arrow array": pa.array(IDS),
    "a slice of an arrow array": pa.array([[1], *IDS, [1]], pa.large_list(pa.int16()))[1:-1],
    "arrow chunks": pa.chunked_array([IDS[:1], IDS[1:]]),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_samples(form: str) -> None:
    samples = Samples.read(FORMS[form])
    assert samples.values.tolist() == [7, 7, 7, 8, 8, 9, 9, 9, 9]
    assert samples.starts.tolist() == [0, 3, 5]
    assert samples.lengths.tolist() == [3, 2, 4]
    assert samples.values.dtype == np.int32


@pytest.mark.parametrize(
    "matrix", [np.ones((2, 3), int), torch.ones(2, 3, dtype=int), pa.array([[1] * 3] * 2, pa.list_(pa.int64(), 3))]
)
def test_a_matrix_holds_a_sample_in_each_row(matrix) -> None:
    assert Samples.read(matrix).lengths.tolist() == [3, 3]


def test_selected_and_shuffled_rows_of_a_data_set_come_in_their_new_order() -> None:
    assert Samples.read(column().select([2, 0])["input_ids"]).values.tolist() == [9, 9, 9, 9, 7, 7, 7]


def test_a_data_set_that_transforms_its_rows_is_read_through_its_transform() -> None:
    doubled = column().with_transform(lambda rows: {"input_ids": [[2 * i for i in ids] for ids in rows["input_ids"]]})
    assert Samples.read(doubled["input_ids"]).values.tolist() == [14, 14, 14, 16, 16, 18, 18, 18, 18]


def test_no_samples_are_no_samples() -> None:
    assert len(Samples.read([])) == 0
    assert len(Samples.read(pa.array([], pa.list_(pa.int32())))) == 0


def test_without_labels_every_token_is_learnt() -> None:
    assert Samples.read(IDS).targets.tolist() == [7, 7, 7, 8, 8, 9, 9, 9, 9]


def test_labels_and_masks_say_what_is_learnt() -> None:
    labels = [[-100, 1, 2], [-100, 3], [-100, -100, 4, 5]]
    assert Samples.read(IDS, labels=labels).targets.tolist() == [-100, 1, 2, -100, 3, -100, -100, 4, 5]
    masks = [[0, 1, 1], [True, False], np.asarray([False, False, True, True])]
    for form in (masks, pa.array([[bool(flag) for flag in mask] for mask in masks])):
        assert Samples.read(IDS, loss_mask=form).targets.tolist() == [-100, 7, 7, 8, -100, -100, -100, 9, 9]


def test_long_samples_are_cut_at_the_end_or_into_pieces() -> None:
    samples = Samples.read([[1, 2, 3, 4, 5], [6], [7, 8, 9]])
    cut = samples.fitted(2, "truncate")
    assert (cut.starts.tolist(), cut.lengths.tolist()) == ([0, 5, 6], [2, 1, 2])
    pieces = samples.fitted(2, "split")
    assert (pieces.starts.tolist(), pieces.lengths.tolist()) == ([0, 2, 4, 5, 6, 8], [2, 2, 1, 1, 2, 1])
    assert pieces.values is samples.values


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([1, 2.5], "sample 1: the token ids are not a vector of whole numbers"),
        ([1, None], "sample 1: the token ids are not a vector"),
        ([[1]], "sample 1: the token ids are not a vector"),
        ([1, 2**31], "sample 1: the token ids are not a vector"),
        (np.asarray([1, 2**31]), "sample 1: the token ids have 2147483648 at place 1"),
        ([1, 2, -1], "sample 1: the token ids have -1 at place 2"),
        (
            np.ones(2),
            "sample 1: the token ids must be a vector of whole numbers, got ndarray with 1 dimensions of float64",
        ),
        (7, "sample 1: the token ids must be a vector of whole numbers, got int with 0 dimensions"),
        ({"input_ids": [1]}, r"give the column, as in dataset\['input_ids'\]"),
    ],
)
def test_a_bad_sample_is_named(bad, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        Samples.read([IDS[0], bad, IDS[1]])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (pa.array([[1], [2, 3], None]), "sample 2: the token ids are null"),
        (pa.chunked_array([[[1]], [[2, None]]]), "sample 1: the token ids hold a null"),
        (pa.array([[1], [2, -3]]), "sample 1: the token ids have -3 at place 1"),
        (pa.array([[1.5]]), "must be lists of whole numbers, but the column holds list<item: double>"),
        (pa.array([1, 2]), "must be lists of whole numbers, but the column holds int64"),
    ],
)
def test_a_bad_row_of_a_column_is_named(bad, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        Samples.read(bad)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"labels": IDS[:2]}, ConfigError, "labels of 2 samples, but token ids of 3"),
        ({"labels": [[7, 7, 7], [8], [9] * 4]}, SampleError, "sample 1: has 2 token ids, but 1 of labels"),
        (
            {"labels": [[7, 7, 7], [8, -1], [9] * 4]},
            SampleError,
            "sample 1: the labels have -1 at place 1; .*, or are -100",
        ),
        ({"loss_mask": [[1, 1, 1], [1, 2], [1] * 4]}, SampleError, "sample 1: the loss masks have 2 at place 1"),
        ({"labels": IDS, "loss_mask": IDS}, ConfigError, "give one of them"),
    ],
)
def test_labels_and_masks_that_do_not_fit_are_refused(given, error, message) -> None:
    with pytest.raises(error, match=message):
        Samples.read(IDS, **given)


@pytest.mark.parametrize("nonsense", [5, "text", {"input_ids": IDS}])
def test_what_holds_no_samples_is_refused(nonsense) -> None:
    with pytest.raises(ConfigError, match="one list, vector or tensor for each sample"):
        Samples.read(nonsense)
