"""Videos written with the placeholder of images: their tokens, and their frames among images; rows written out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vlmpack.errors import LayoutError
from vlmpack.families.media import frames_as_images, kinds_between
from vlmpack.layout import Grid, Media, MediaTable, Medium, Segments

TEXT, IMAGE, START, END = 0, 7, 8, 9
CONFIG = SimpleNamespace(image_token_id=IMAGE, video_start_token_id=START, video_end_token_id=END)
"""Ids of the row below."""
IDS = [TEXT, START, IMAGE, IMAGE, TEXT, IMAGE, IMAGE, END, IMAGE, TEXT]
KINDS = [0, 0, 2, 2, 0, 2, 2, 0, 1, 0]


def test_placeholders_between_the_ends_of_a_video_are_its() -> None:
    assert kinds_between(torch.tensor([IDS]), CONFIG).tolist() == [KINDS]
    assert kinds_between(torch.tensor(IDS), CONFIG).tolist() == KINDS


def test_a_video_that_is_cut_off_ends_with_its_sample() -> None:
    ids = torch.tensor([[START, IMAGE, TEXT, IMAGE, TEXT, END, IMAGE, START, TEXT]])
    segments = Segments(lengths=(2, 3, 2), slots=(3, 3, 3), total=9, num_samples=3)
    assert kinds_between(ids, CONFIG, segments=segments).tolist() == [[0, 2, 0, 1, 0, 0, 1, 0, 0]]
    assert kinds_between(ids, CONFIG).tolist() == [[0, 2, 0, 2, 0, 0, 1, 0, 0]]


def test_a_callers_column_tells_images_and_videos_apart_where_ids_of_ends_are_others() -> None:
    other = SimpleNamespace(**vars(CONFIG) | {"video_start_token_id": 99})
    assert kinds_between(torch.tensor([IDS]), other).max() == 1
    column = torch.tensor([KINDS], dtype=torch.uint8)
    assert kinds_between(torch.tensor([IDS]), other, column=column).tolist() == [KINDS]
    wrong = torch.tensor([[2] * len(IDS)])  # but never what is media
    assert kinds_between(torch.tensor([IDS]), other, column=wrong)[0].tolist() == [2 * (i == IMAGE) for i in IDS]


ONE, TWO, VIDEO = (1, 1, 1), (1, 1, 2), (2, 1, 2)
FRAMES = Medium(kind=2, sample=1, grid=VIDEO, runs=((1, 2), (3, 4)))


def image(grid: Grid, sample: int, start: int) -> Medium:
    return Medium(kind=1, sample=sample, grid=grid, runs=((start, start + 1),))


def test_frames_stand_among_images_in_the_order_of_samples() -> None:
    """Samples of an image of 1 patch, of a video of two frames of 2 patches, and of images of 2 and 1."""
    table = MediaTable(media=(image(ONE, 0, 0), image(TWO, 2, 0), image(ONE, 2, 2), FRAMES))
    given = Media(
        pixel_values=torch.tensor([[0.0], [5.0], [6.0], [7.0]]),
        pixel_values_videos=torch.tensor([[1.0], [2.0], [3.0], [4.0]]),
    )
    media, grids = frames_as_images(given, table, Segments.from_lengths([2, 5, 4]), None, "glm4v")
    assert media.pixel_values is not None
    assert media.image_grid_thw is not None
    assert media.pixel_values[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert grids == (ONE, TWO, TWO, TWO, ONE)
    assert media.image_grid_thw.tolist() == [list(grid) for grid in grids]
    assert media.pixel_values_videos is None
    assert media.video_grid_thw is None


def test_a_sample_of_both_is_refused() -> None:
    table = MediaTable(media=(image(ONE, 1, 6), FRAMES))
    with pytest.raises(LayoutError, match="sample 1 has images and videos, which glm4v"):
        frames_as_images(Media(), table, Segments.from_lengths([2, 8]), None, "glm4v")
