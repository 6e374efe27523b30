"""What the host can see to be wrong is refused, with the media item, what was seen and the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vlmpack.errors import LayoutError
from vlmpack.families.media import media_items, truncates_seconds
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import Segments
from vlmpack.testing import tiny_config
from vlmpack.testing.samples import TEXT_ONLY, VISION


def refused(name: str = "qwen3_vl", *, types: torch.Tensor | None = None, width: int = 8, **media: Any) -> str:
    types = torch.zeros(1, width, dtype=torch.int64) if types is None else types
    with pytest.raises(LayoutError) as caught:
        FAMILIES[name].positions(types, Segments.from_lengths([width]), config=tiny_config(name), **media)
    return str(caught.value)


def test_the_table_lists_offsets_and_one_advance_for_each_item() -> None:
    table = media_items([(2, 2, 4), (1, 6, 2)], 2, "image").table()
    assert table.tolist() == [
        [0, 0, 1, 1, 0, 0, 0],  # time
        [0, 0, 0, 0, 0, 1, 2],  # height
        [0, 1, 0, 1, 0, 0, 0],  # width
        [0, 0, 0, 2, 0, 0, 3],  # advance: max(1, 2) after the first item, whatever its two frames; max(3, 1)
    ]


@pytest.mark.parametrize("name", VISION)
def test_more_media_than_the_row_has_room_for(name: str) -> None:
    text = refused(name, width=8, image_grids=[(1, 4, 4), (1, 4, 6)])
    assert "2 images and 0 videos" in text
    assert "10 tokens, but the row has only 8" in text
    assert "truncated" in text


@pytest.mark.parametrize("name", TEXT_ONLY)
@pytest.mark.parametrize("media", ["image_grids", "video_grids"])
def test_a_text_model_takes_no_media(name: str, media: str) -> None:
    assert f"{name} is a text model, but the batch has 2 images or videos" in refused(name, **{media: [(1, 2, 2)] * 2})


def test_video_frames_count_too() -> None:
    assert "stand for 12 tokens, but the row has only 8" in refused(video_grids=[(3, 4, 4)])


def test_a_grid_that_the_merge_size_does_not_divide() -> None:
    text = refused(image_grids=[(1, 4, 4), (1, 3, 4)])
    assert "image 1" in text
    assert "(1, 3, 4)" in text
    assert "merge size 2" in text
    assert "before merging" in text


@pytest.mark.parametrize("grid", [(1, 0, 4), (0, 4, 4), (1, 4)])
def test_a_grid_that_cannot_be(grid: Any) -> None:
    text = refused(video_grids=[(1, 4, 4), grid])
    assert "video 1" in text
    assert str(grid) in text
    assert "(frames, rows, columns)" in text


def test_media_without_token_types() -> None:
    with pytest.raises(LayoutError, match=r"1 images .* no mm_token_type_ids.*keep what the processor returns"):
        FAMILIES["qwen3_vl"].positions(
            None, Segments.from_lengths([8]), config=tiny_config("qwen3_vl"), image_grids=[(1, 4, 4)]
        )


@pytest.mark.parametrize("shape", [(1, 7), (2, 8), (8,)])
def test_token_types_of_another_shape(shape: tuple[int, ...]) -> None:
    text = refused(types=torch.zeros(shape, dtype=torch.int64))
    assert str(list(shape)) in text
    assert "[1, 8]" in text


def test_seconds_for_another_number_of_videos() -> None:
    text = refused("qwen2_5_vl", video_grids=[(1, 2, 2)], seconds_per_grid=[1.0, 2.0])
    assert "1 videos but seconds_per_grid has 2 values" in text
    assert "second_per_grid_ts" in text


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_seconds_that_cannot_be(seconds: float) -> None:
    text = refused("qwen2_5_vl", video_grids=[(1, 2, 2), (1, 2, 2)], seconds_per_grid=[1.0, seconds])
    assert f"video 1: seconds_per_grid is {seconds}" in text
    assert "finite" in text


def test_a_family_that_needs_no_seconds_does_not_mind_them() -> None:
    config = tiny_config("qwen3_vl")
    types = torch.full((1, 2), 2)
    found = FAMILIES["qwen3_vl"].positions(
        types, Segments.from_lengths([2]), config=config, video_grids=[(2, 2, 2)], seconds_per_grid=[9.0]
    )
    assert found[:, 0].tolist() == [[0, 1]] * 4


def test_the_installed_transformers_is_tried_once() -> None:
    assert truncates_seconds() in (True, False)
    assert truncates_seconds.cache_info().currsize == 1
