"""From an image's size in pixels to its grid: the processor's own rule."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from vlmpack.families import FAMILIES, grid_from_size


@settings(deadline=None, max_examples=500)
@given(
    height=st.integers(1, 3000),
    width=st.integers(1, 3000),
    patch_size=st.sampled_from([14, 16]),
    merge=st.integers(1, 3),
    min_units=st.integers(1, 40),
    more_units=st.integers(1, 2000),
)
def test_any_size_gives_the_grid_of_the_processor(
    height: int, width: int, patch_size: int, merge: int, min_units: int, more_units: int
) -> None:
    unit = patch_size * merge
    limits = {"min_pixels": min_units * unit**2, "max_pixels": (min_units + more_units) * unit**2}
    sides = {"patch_size": patch_size, "merge": merge}
    if max(height, width) / min(height, width) > 200:
        with pytest.raises(ValueError, match=rf"{height} x {width} pixels is \d+ times"):
            grid_from_size(height, width, **sides, **limits)
        return
    rows, columns = smart_resize(height, width, unit, **limits)
    grid = grid_from_size(height, width, **sides, **limits)
    assert grid == (1, rows // patch_size, columns // patch_size)
    assert rows % unit == columns % unit == 0


def test_patches_of_a_size_are_the_processors() -> None:
    limits = {"min_pixels": 32 * 32, "max_pixels": 64 * 32 * 32}
    grid = grid_from_size(700, 311, patch_size=16, merge=2, **limits)
    assert prod(grid) == Qwen2VLImageProcessorPil(patch_size=16, **limits).get_number_of_image_patches(700, 311)
    assert 32 < prod(grid) // 4 <= 64


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_tokens_are_patches_over_the_merged_area(name: str) -> None:
    family = FAMILIES[name]
    assert family.tokens_per_image((1, 4, 6), 2) == 6
    assert family.tokens_per_image((3, 6, 9), 3) == 18


def test_an_empty_image_has_no_grid() -> None:
    with pytest.raises(ValueError, match="0 x 5 pixels has no grid"):
        grid_from_size(0, 5, patch_size=14, merge=2, min_pixels=1, max_pixels=100)
