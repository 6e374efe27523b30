"""Boundaries inside the vision tower, from host grids alone, are those that transformers computes."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_window_index

from vlmpack.families.family import frame_segments, window_segments
from vlmpack.layout.media import Grid


@st.composite
def merge_and_grids(draw: st.DrawFn) -> tuple[int, list[Grid]]:
    merge = draw(st.integers(1, 3))
    side = st.integers(1, 9).map(lambda n: n * merge)
    return merge, draw(st.lists(st.tuples(st.integers(1, 3), side, side), min_size=1, max_size=4))


@settings(deadline=None)
@given(drawn=merge_and_grids(), patch_size=st.sampled_from([4, 14]), side=st.integers(1, 5), more=st.integers(0, 3))
def test_any_grids_give_the_boundaries_of_transformers(
    drawn: tuple[int, list[Grid]], patch_size: int, side: int, more: int
) -> None:
    merge, grids = drawn
    frames = frame_segments(grids)
    assert frames.total == sum(t * h * w for t, h, w in grids)
    assert list(frames.real) == get_vision_cu_seqlens(torch.tensor(grids)).tolist()
    window_size = side * merge * patch_size + more  # need not be a multiple of a token's side
    windows = window_segments(grids, window=window_size // patch_size, merge=merge)
    _, expected = get_vision_window_index(torch.tensor(grids), merge, window_size, patch_size)
    assert list(windows.real) == expected.tolist()
