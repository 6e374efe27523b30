"""Zeros between segments: a convolution over the whole row computes each segment as if it were alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

from vlmpack.layout import Segments, SlotRule, Spaced

NAN = float("nan")
CHANNELS = 7

rows = st.builds(
    lambda lengths, multiple, tail: Segments.from_lengths(lengths, SlotRule(multiple=multiple, row_multiple=tail)),
    st.lists(st.integers(0, 11), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(1, 9),
)
reaches = st.integers(0, 4)


def poisoned_row(segments: Segments) -> torch.Tensor:
    """[1, T, D], NaN on padding."""
    row = torch.randn(1, segments.total, CHANNELS, dtype=torch.float64)
    return row.masked_fill(segments.padding_mask()[:, None], NAN)


def of_segments(row: torch.Tensor, segments: Segments) -> list[torch.Tensor]:
    """[L, D] of each segment that has tokens."""
    return [row[0, start:stop] for start, stop in segments.spans if stop > start]


def convolved(x_1TD: torch.Tensor, width: int) -> torch.Tensor:
    """A causal convolution, zeros before the first token."""
    weight = torch.linspace(1, 2, CHANNELS * width, dtype=torch.float64).view(CHANNELS, 1, width)
    return F.conv1d(F.pad(x_1TD.transpose(1, 2), (width - 1, 0)), weight, groups=CHANNELS).transpose(1, 2)


def test_the_drawing_in_the_docstring():
    spaced = Spaced(segments=Segments.from_lengths([3, 5, 2], SlotRule(multiple=4)), reach=3)
    letters = torch.tensor([[1, 1, 1, 9, 2, 2, 2, 2, 2, 9, 9, 9, 3, 3, 9, 9]])[..., None]
    (row,) = spaced.split(letters)
    assert row[0, :, 0].tolist() == [1, 1, 1, 0, 0, 0, 2, 2, 2, 2, 2, 0, 0, 0, 3, 3]
    assert spaced.edges == (0, 6, 14, 16)
    assert spaced.cu_seqlens().tolist() == [0, 6, 14, 16]
    assert spaced.cu_seqlens().dtype == torch.int32
    assert spaced.tokens == 16


@given(segments=rows, reach=reaches)
def test_join_undoes_split_and_puts_zeros_on_padding(segments, reach):
    row = poisoned_row(segments)
    spaced = Spaced(segments=segments, reach=reach)
    again = spaced.join(spaced.split(row))
    assert torch.equal(again, row.masked_fill(segments.padding_mask()[:, None], 0))


@given(segments=rows, reach=reaches)
def test_it_is_what_a_plain_loop_lays_out(segments, reach):
    row = poisoned_row(segments)
    spaced = Spaced(segments=segments, reach=reach)
    laid, edges = [], []
    for i, segment in enumerate(of_segments(row, segments)):
        if i:
            laid.extend([torch.zeros(CHANNELS, dtype=row.dtype)] * reach)
        edges.append(len(laid))
        laid.extend(segment)
    edges.append(len(laid))
    (laid_out,) = spaced.split(row)
    assert torch.equal(laid_out[0], torch.stack(laid) if laid else row[0, :0])
    assert list(spaced.edges) == edges
    assert spaced.tokens == len(laid)
    assert all(stop > start for start, stop in pairwise(edges))


@given(segments=rows, width=st.integers(1, 5))
def test_a_convolution_over_all_of_it_is_that_of_each_segment_alone(segments, width):
    row = poisoned_row(segments)
    spaced = Spaced(segments=segments, reach=width - 1)
    assume(spaced.tokens)
    out = spaced.join([convolved(part, width) for part in spaced.split(row)])
    for packed, segment in zip(of_segments(out, segments), of_segments(row, segments), strict=True):
        torch.testing.assert_close(packed, convolved(segment[None], width)[0])


def test_one_zero_too_few_lets_the_convolution_reach_over():
    segments = Segments.from_lengths([5, 4])
    row = poisoned_row(segments)
    short = Spaced(segments=segments, reach=2)
    out = short.join([convolved(part, 4) for part in short.split(row)])
    assert (out[:, 5] - convolved(row[:, 5:], 4)[:, 0]).abs().max() > 0.01


@given(segments=rows, reach=reaches)
def test_gradients_reach_real_tokens_once_and_padding_never(segments, reach):
    row = poisoned_row(segments).requires_grad_()
    spaced = Spaced(segments=segments, reach=reach)
    spaced.join([2 * part for part in spaced.split(row)]).sum().backward()
    assert row.grad is not None
    assert torch.equal(row.grad[0, :, 0], 2.0 * ~segments.padding_mask())


@given(segments=rows, reach=reaches, size=st.integers(1, 9))
def test_chunks_name_every_stretch_that_no_edge_cuts(segments, reach, size):
    spaced = Spaced(segments=segments, reach=reach)
    truth = [
        [i, at // size] for i, (start, stop) in enumerate(pairwise(spaced.edges)) for at in range(0, stop - start, size)
    ]
    found = spaced.chunks(size)
    assert found.dtype == torch.int32
    assert found.shape == (len(truth), 2)
    assert found.tolist() == truth


@pytest.mark.parametrize("lengths", [[7], [0, 7], [7, 0, 0]])
def test_a_sample_alone_is_handed_over_as_it_is(lengths):
    spaced = Spaced(segments=Segments.from_lengths(lengths), reach=3)
    row = torch.randn(1, 7, CHANNELS)
    (part,) = spaced.split(row)
    assert part.data_ptr() == row.data_ptr()
    assert spaced.tokens == 7
    assert spaced.edges == (0, 7)
