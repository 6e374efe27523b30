"""Runs of placeholders and the grids that they stand for: in order, of one size, each inside one sample.

Grids are in patches, two of which make a token along each side: (1, 4, 4) is 4 tokens, (1, 4, 8) is 8.
"""

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from families.grids import with_grids
from host_syncs import recorded_syncs

from vlmpack.errors import LayoutError
from vlmpack.families.media import media_of_row
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import HostMetadata, Media, PackedRow, Segments, SlotRule, pack
from vlmpack.layout.device import nothing_on_host
from vlmpack.layout.media import Grid, MediaTable
from vlmpack.testing import build_sample, padded, tiny_config
from vlmpack.testing.samples import word_ids

FOUR, EIGHT = (1, 4, 4), (1, 4, 8)
X, IMAGE, VIDEO = [0, 0], [1], [2]
Grids = Sequence[Grid]


def row_of(
    types: list[int],
    lengths: list[int],
    name: str = "qwen3_vl",
    *,
    gaps: Segments | None = None,
    images: Grids = (),
    videos: Grids = (),
    seconds: Any = None,
) -> PackedRow:
    """A row of these types of tokens, with grids and without metadata; `gaps`: its segments, in place of lengths."""
    config, column = config_of(name), torch.tensor([types])
    video = config.image_token_id if name == "glm4v" else config.video_token_id
    by_type = [word_ids(config)[0], config.image_token_id, video]
    media = Media(
        image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor(videos) if videos else None,
        second_per_grid_ts=None if seconds is None else torch.tensor(seconds),
    )
    segments = gaps or Segments.from_lengths(lengths)
    return PackedRow(input_ids=torch.tensor(by_type)[column], segments=segments, mm_token_type_ids=column, media=media)


@cache
def config_of(name: str) -> Any:
    return tiny_config(name, patch_size=1)


def refusal(types: list[int], lengths: list[int], name: str = "qwen3_vl", **row: Any) -> str | None:
    """What is raised; None: nothing is."""
    try:
        media_of_row(FAMILIES[name], row_of(types, lengths, name, **row), config_of(name))
    except LayoutError as error:
        return str(error)
    return None


def told(row: PackedRow, table: MediaTable, place: Any = nullcontext) -> str | None:
    """The same of a row whose metadata has this table; `place`: where its tensors are."""
    row = replace(row, metadata=HostMetadata(lengths=row.segments.lengths, media=table))
    with place():
        try:
            assert media_of_row(FAMILIES["qwen3_vl"], row, config_of("qwen3_vl")) == table
        except (LayoutError, RuntimeError) as error:  # RuntimeError: the asynchronous assertion
            return str(error)
    return None


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("rule", [SlotRule(), SlotRule(multiple=16, pad_to=256, max_segments=9)], ids=["tight", "gaps"])
@with_grids
def test_what_processors_make_passes(name, rule, side):
    config, family = tiny_config(name, patch_size=1), FAMILIES[name]
    samples = [
        build_sample(config, stretches=[2, 1, 1, 1], image_grids=[FOUR, EIGHT], video_grids=[(3, 4, 4)], seconds=[1.0]),
        build_sample(config, stretches=[4]),
        build_sample(config, stretches=[0, 0, 0], image_grids=[EIGHT], video_grids=[(2, 4, 8)], seconds=[1.0]),
    ]
    row = pack(padded(samples, side), rule=rule)
    table = media_of_row(family, replace(row, metadata=None), config)
    assert [medium.sample for medium in table.media] == [0, 0, 2, 0, 2]
    assert np.array_equal(table.types(row.segments), row.mm_token_type_ids[0].numpy())
    assert table == row.metadata.media
    with nothing_on_host(), recorded_syncs(torch.device("cpu")) as waits:
        assert media_of_row(family, row, config) == table
    assert waits == []


@with_grids
def test_images_without_anything_between(name):
    """transformers takes them for one image."""
    assert "a run of 8 image placeholders" in refusal(X + IMAGE * 8 + X, [12], name, images=[FOUR, FOUR])
    assert refusal([1] * 8, [4, 4], name, images=[FOUR, FOUR]) is None  # of two samples


@pytest.mark.parametrize(
    ("name", "types", "other"),
    [("qwen2_5_vl", VIDEO * 8, VIDEO * 4 + X + VIDEO * 4), ("qwen3_vl", VIDEO * 4 + X + VIDEO * 4, VIDEO * 8)],
)
def test_frames_of_a_video_are_one_run_or_a_run_each(name, types, other):
    assert refusal(types, [len(types)], name, videos=[(2, 4, 4)]) is None
    assert "video placeholders begins at place 0" in refusal(other, [len(other)], name, videos=[(2, 4, 4)])


@with_grids
def test_a_boundary_inside_an_image(name):
    types = X + IMAGE * 4 + X + IMAGE * 8
    seen = "sample 0 ends at place 10 of the row, in the middle of image 1"
    assert seen in refusal(types, [10, 6], name, images=[FOUR, EIGHT])
    assert refusal(types, [8, 8], name, images=[FOUR, EIGHT]) is None


def test_metadata_of_other_tokens_are_refused():
    types = IMAGE * 4 + X + IMAGE * 4 + X
    row, moved = row_of(types, [6, 6], images=[FOUR, FOUR]), row_of(types, [11, 1], images=[FOUR, FOUR])
    table = media_of_row(FAMILIES["qwen3_vl"], row, config_of("qwen3_vl"))
    message = "sample 0, token 6: the host metadata has images, videos or audio where the row has other tokens"
    assert message in told(moved, table)
    assert "has 1 media but image_grid_thw is [2, 3]" in told(row, MediaTable(media=table.media[:1]))
    assert "has 2 media that image_grid_thw describes, but the batch has no image_grid_thw" in told(
        replace(row, media=Media()), table
    )


@pytest.mark.parametrize("name", ["qwen2_5_vl", *[name for name in ("qwen2_5_omni_thinker",) if name in FAMILIES]])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5])
def test_seconds_that_are_no_times(name, value):
    types, grids = VIDEO * 4 + X + VIDEO * 4, {"videos": [FOUR, FOUR]}
    if name != "qwen2_5_vl":  # its own code finds videos by the token before them
        config = config_of(name)
        row = row_of([0, *VIDEO * 4, 0, *VIDEO * 4], [5, 5], name, **grids, seconds=(0.5, value))
        row.input_ids[0, [0, 5]] = config.vision_start_token_id
        with pytest.raises(LayoutError, match="video 1: seconds_per_grid is"):
            media_of_row(FAMILIES[name], row, config)
        return
    assert refusal(types, [6, 4], name, **grids, seconds=(0.0, 0.5)) is None
    message = refusal(types, [6, 4], name, **grids, seconds=(0.5, value))
    assert message.startswith(f"video 1: seconds_per_grid is {value}; it must be a finite time, not negative")


FOUR_EIGHT = X + IMAGE * 4 + X + X + IMAGE * 8 + X
TWO = IMAGE * 4 + X + IMAGE * 4 + X
FRAMES = X + VIDEO * 4 + X + VIDEO * 4
GAPS = Segments.from_boundaries([0, 4, 8], [0, 8, 12])
CASES: dict[str, tuple[list[int], list[int], dict[str, Any], str | None]] = {
    "images in order": (FOUR_EIGHT, [8, 12], {"images": [FOUR, EIGHT]}, None),
    "images in another order than their samples": (
        *(FOUR_EIGHT, [8, 12], {"images": [EIGHT, FOUR]}),
        "sample 0: a run of 4 image placeholders begins at place 2 of the row, but image 0.* makes a run of 8",
    ),
    "tokens of an image in another sample": (
        *(X + IMAGE * 6 + X + X + IMAGE * 2 + X, [10, 6], {"images": [FOUR, FOUR]}),
        "a run of 6 image placeholders",
    ),
    "a boundary between frames": (FRAMES, [6, 6], {"videos": [(2, 4, 4)]}, "place 6 of .* in the middle of video 0"),
    "a boundary between videos": (FRAMES, [6, 6], {"videos": [FOUR, FOUR]}, None),
    "an image too few": (TWO, [6, 6], {"images": [FOUR]}, "sample 1 has a run of 4 .*, but no image is left"),
    "an image of more tokens": (
        *(TWO, [6, 6], {"images": [EIGHT, FOUR]}),
        "a run of 4 .* image 0, which is next, makes a run of 8; .* 8 image placeholders, and its 2 images make 12",
    ),
    "an image too many": (TWO, [6, 6], {"images": [FOUR] * 3}, "its 3 images make 12 tokens"),
    "placeholders on padding": (
        *(X + X + IMAGE * 4 + X + X, [], {"gaps": GAPS, "images": [FOUR]}),
        "padding of the row has 4 image placeholders, the first at place 4",
    ),
    "fewer placeholders": (
        *(X + IMAGE * 4, [6], {"images": [EIGHT]}),
        "the row has 4 image placeholders, and its 1 images make 8 tokens",
    ),
    "no videos": (X + VIDEO * 4, [6], {}, "its 0 videos make 0 tokens"),
    "no placeholders": (X, [2], {"images": [FOUR]}, "its 1 images make 4 tokens"),
}


@pytest.mark.parametrize(("types", "lengths", "row", "message"), CASES.values(), ids=CASES)
def test_placeholders_have_to_be_those_of_the_grids(types, lengths, row, message):
    found = refusal(types, lengths, **row)
    assert found is None if message is None else re.search(message, found)
