"""Videos written with the placeholder of images: their tokens; rows written out."""

from types import SimpleNamespace

import torch

from vlmpack.families.frames import kinds_between
from vlmpack.layout import Segments

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
