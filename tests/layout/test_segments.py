"""Segments: real lengths, slots, and the boundaries that kernels get."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layout.naive import naive_pack

from vlmpack.errors import LayoutError
from vlmpack.layout import Segments, SlotRule

CASES = json.loads((Path(__file__).parents[1] / "vectors" / "pack.json").read_text())["cases"]

lengths_lists = st.lists(st.integers(0, 40), min_size=1, max_size=9)


@pytest.mark.parametrize("case", [c for c in CASES if "multiple" in c], ids=lambda c: f"{c['lengths']}x{c['multiple']}")
def test_boundaries_are_those_of_the_vectors(case):
    segments = Segments.from_lengths(case["lengths"], SlotRule(multiple=case["multiple"]))
    assert list(segments.real) == case["real"]
    assert list(segments.stride) == case["stride"]


@given(lengths=lengths_lists, multiple=st.integers(1, 9), spare=st.integers(0, 300))
def test_every_tensor_is_what_a_plain_loop_gives(lengths, multiple, spare):
    needed = sum(-(-n // multiple) * multiple for n in lengths)
    segments = Segments.from_lengths(lengths, SlotRule(multiple=multiple, pad_to=max(needed + spare, 1)))
    samples = [list(range(n)) for n in lengths]
    row = naive_pack(samples, samples, multiple=multiple, width=segments.total)
    assert segments.cu_seqlens().tolist() == row.real
    assert segments.cu_seqlens_padded().tolist() == row.stride
    assert segments.padding_mask().tolist() == row.padding
    assert segments.seq_idx().tolist() == row.seq_idx
    assert segments.position_in_segment().tolist() == row.positions
    assert segments.num_tokens == sum(lengths)


@given(lengths=lengths_lists, multiple=st.integers(1, 300), spare=st.integers(0, 700))
def test_without_gaps_segments_cover_the_row_and_never_mix_padding_with_tokens(lengths, multiple, spare):
    needed = sum(-(-n // multiple) * multiple for n in lengths)
    segments = Segments.from_lengths(lengths, SlotRule(multiple=multiple, pad_to=max(needed + spare, 1)))
    compact = segments.without_gaps()
    assert compact.real == compact.stride
    assert compact.real[-1] == compact.total
    assert (compact.sample_lengths, compact.num_tokens) == (tuple(lengths), sum(lengths))
    assert compact.attended_pairs == segments.attended_pairs
    assert compact.padding_mask().tolist() == [False] * sum(lengths) + [True] * (compact.total - sum(lengths))
    assert all(piece <= 128 for piece in compact.lengths[len(lengths) :])
    gaps = segments.slots != segments.lengths
    assert compact.total == (max(sum(lengths), 1) if gaps else segments.total)


@pytest.mark.parametrize(
    ("made_by", "model", "width"),
    [
        (SlotRule(multiple=8), SlotRule(row_multiple=16), 16),  # of 24: a width that the model divides
        (SlotRule(multiple=8), SlotRule(row_multiple=5), 10),
        (SlotRule(multiple=8), SlotRule(row_multiple=32), 24),  # never wider than it was
        (SlotRule(multiple=8, pad_to=64), SlotRule(), 10),
        (SlotRule(multiple=8, pad_to=64), SlotRule(pad_to=64), 64),
        (SlotRule(pad_to=64), SlotRule(), 64),
        (SlotRule(row_multiple=16), SlotRule(), 16),
    ],
)
def test_what_is_left_of_padding_is_what_the_model_needs(made_by, model, width):
    assert Segments.from_lengths([3, 5, 2], made_by).without_gaps(model).total == width


@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=6), multiple=st.sampled_from([1, 8, 256]))
def test_fixed_sizes_give_tensors_of_one_shape(lengths, multiple):
    rule = SlotRule(multiple=multiple, pad_to=4096, max_segments=6)
    segments = Segments.from_lengths(lengths, rule)
    reference = Segments.from_lengths([1] * 6, rule)
    for name in ("cu_seqlens", "cu_seqlens_padded", "seq_idx", "padding_mask"):
        ours, theirs = (getattr(s, name)() for s in (segments, reference))
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), name
    compact = segments.without_gaps(rule)
    assert len(compact.lengths) == len(Segments.from_lengths([1], rule).without_gaps(rule).lengths)
    assert (compact.total, compact.longest) == (4096, 4096)
    assert Segments.from_lengths(lengths).longest == max(lengths)
    assert segments.num_samples == len(lengths)
    assert set(segments.real[len(lengths) :]) == {segments.num_tokens}


def test_boundaries_are_int32_and_made_once_a_device():
    segments = Segments.from_lengths([3, 5])
    assert segments.cu_seqlens().dtype == segments.cu_seqlens_padded().dtype == torch.int32
    assert segments.cu_seqlens() is segments.cu_seqlens("cpu")


def test_derived_tensors_stay_with_their_segments_and_do_not_travel():
    segments = Segments.from_lengths([3, 5])
    segments.cu_seqlens()
    arrived = pickle.loads(pickle.dumps(segments))
    assert arrived == segments
    assert not arrived._kept
    assert replace(segments, lengths=(2, 5)).cu_seqlens().tolist() == [0, 2, 7]


@given(lengths=lengths_lists, multiple=st.integers(1, 9))
def test_boundaries_read_back_are_the_same_segments(lengths, multiple):
    segments = Segments.from_lengths(lengths, SlotRule(multiple=multiple))
    again = Segments.from_boundaries(
        segments.real, segments.stride, total=segments.total, num_samples=segments.num_samples
    )
    assert again == segments


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Segments.from_lengths([]), "at least one sample"),
        (lambda: Segments.from_lengths([3, -1]), "row 1: a length cannot be negative, got -1"),
        (lambda: Segments.from_lengths([3.0]), r"lengths are whole numbers of tokens, got \(?\[?3.0"),
        (lambda: Segments.from_lengths([3, 5], SlotRule(pad_to=7)), "take 8 tokens of row but pad_to=7; raise pad_to"),
        (lambda: Segments.from_lengths([1, 1], SlotRule(max_segments=1)), "2 samples but max_segments=1; raise"),
        (lambda: SlotRule(multiple=0), "SlotRule.multiple must be a whole number of at least 1, got 0"),
        (lambda: SlotRule(pad_to=10, row_multiple=4), "not a multiple of row_multiple=4; use pad_to=12"),
        (lambda: Segments.from_boundaries([1, 3]), r"cu_seqlens_q must start at 0 .* got \[1, 3\]"),
        (lambda: Segments.from_boundaries([0, 4, 3]), "never decrease, but segment 1 runs from 4 to 3"),
        (lambda: Segments.from_boundaries([0, 3], [0, 4, 8]), "has 2 boundaries but cu_seqlens_q_padded has 3"),
        (lambda: Segments.from_boundaries([0, 5], [0, 4]), "segment 0: 5 real tokens do not fit its slot of 4"),
        (lambda: Segments.from_boundaries([0, 5], total=4), "end at 5 but the row is only 4 tokens wide"),
    ],
)
def test_boundaries_that_cannot_be_are_refused_by_name(make, message):
    with pytest.raises(LayoutError, match=message):
        make()
