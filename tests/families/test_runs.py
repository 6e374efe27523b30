"""Runs of placeholders and the grids that they stand for: in order, of one size, each inside one sample.

Grids are in patches, two of which make a token along each side: (1, 4, 4) is 4 tokens, (1, 4, 8) is 8.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families.grids import with_grids

from vlmpack.errors import LayoutError
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import HostMetadata, Segments, SlotRule, pack
from vlmpack.probing.host_syncs import recorded_syncs
from vlmpack.testing import build_sample, padded, tiny_config

FOUR, EIGHT = (1, 4, 4), (1, 4, 8)
X, IMAGE, VIDEO = [0, 0], [1], [2]


def refusal(
    types: list[int], lengths: list[int], name: str = "qwen3_vl", *, gaps: Segments | None = None, **metadata: Any
) -> str | None:
    """What is raised on the host; None: nothing is. A device comes to the same, without waiting and without a name."""
    family, config = FAMILIES[name], tiny_config(name, patch_size=1)
    segments = gaps or Segments.from_lengths(lengths)
    row = torch.tensor([types])
    known = HostMetadata(lengths=segments.lengths, **metadata)
    found = None
    try:
        family.check_runs(row, segments, known, config=config)
    except LayoutError as error:
        found = str(error)
    with recorded_syncs(torch.device("cpu")) as waits:
        try:
            family.check_runs(row, segments, known, config=config)
        except (LayoutError, RuntimeError) as error:  # RuntimeError: the asynchronous assertion
            assert found, error
        else:
            assert found is None
    assert waits == []
    return found


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("rule", [SlotRule(), SlotRule(multiple=16, pad_to=256, max_segments=9)], ids=["tight", "gaps"])
@with_grids
def test_what_processors_make_passes(name, rule, side):
    config = tiny_config(name, patch_size=1)
    samples = [
        build_sample(config, stretches=[2, 1, 1, 1], image_grids=[FOUR, EIGHT], video_grids=[(3, 4, 4)], seconds=[1.0]),
        build_sample(config, stretches=[4]),
        build_sample(config, stretches=[0, 0, 0], image_grids=[EIGHT], video_grids=[(2, 4, 8)], seconds=[1.0]),
    ]
    row = pack(padded(samples, side), rule=rule)
    counted = {"images_per_sample": (2, 0, 1), "videos_per_sample": (1, 0, 1)}
    grids = {"image_grids": row.metadata.image_grids, "video_grids": row.metadata.video_grids}
    for metadata in (grids, {**grids, **counted}):
        assert refusal(row.mm_token_type_ids[0].tolist(), [], name, gaps=row.segments, **metadata) is None


def test_images_in_another_order_than_their_samples():
    types = X + IMAGE * 4 + X + X + IMAGE * 8 + X
    assert refusal(types, [8, 12], image_grids=[FOUR, EIGHT]) is None
    message = refusal(types, [8, 12], image_grids=[EIGHT, FOUR])
    assert message.startswith(
        "sample 0: a run of 4 image placeholders begins at place 2 of the row, but image 0, which"
    )
    assert "is next, makes 8 tokens; images and videos come in the order of their samples" in message


def test_tokens_of_an_image_in_another_sample():
    types = X + IMAGE * 6 + X + X + IMAGE * 2 + X
    assert "a run of 6 image placeholders" in refusal(types, [10, 6], image_grids=[FOUR, FOUR])


@with_grids
def test_images_without_anything_between(name):
    """transformers takes them for one image."""
    assert "a run of 8 image placeholders" in refusal(X + IMAGE * 8 + X, [12], name, image_grids=[FOUR, FOUR])
    assert refusal([1] * 8, [4, 4], name, image_grids=[FOUR, FOUR]) is None  # of two samples


@pytest.mark.parametrize(
    ("name", "types", "other"),
    [("qwen2_5_vl", VIDEO * 8, VIDEO * 4 + X + VIDEO * 4), ("qwen3_vl", VIDEO * 4 + X + VIDEO * 4, VIDEO * 8)],
)
def test_frames_of_a_video_are_one_run_or_a_run_each(name, types, other):
    assert refusal(types, [len(types)], name, video_grids=[(2, 4, 4)]) is None
    assert "video placeholders begins at place 0" in refusal(other, [len(other)], name, video_grids=[(2, 4, 4)])


@with_grids
def test_a_boundary_inside_an_image(name):
    types = X + IMAGE * 4 + X + IMAGE * 8
    assert "image 1 of the row is cut in two where sample 1 starts, at place 10 of the row: move that boundary" in (
        refusal(types, [10, 6], name, image_grids=[FOUR, EIGHT])
    )
    assert refusal(types, [8, 8], name, image_grids=[FOUR, EIGHT]) is None


def test_a_boundary_between_frames_of_a_video():
    types = X + VIDEO * 4 + X + VIDEO * 4
    assert "video 0 of the row is cut in two where sample 1 starts" in refusal(types, [6, 6], video_grids=[(2, 4, 4)])
    assert refusal(types, [6, 6], video_grids=[FOUR, FOUR]) is None


def test_images_counted_in_another_sample():
    types = IMAGE * 4 + X + IMAGE * 4 + X
    metadata = {"image_grids": [FOUR, FOUR], "images_per_sample": (1, 1)}
    assert refusal(types, [6, 6], **metadata) is None
    message = "image 1 of the row lies in sample 0, but the host metadata says that it belongs to sample 1"
    assert message in refusal(types, [11, 1], **metadata)
    assert "counts [1, 0] images of the samples, but there are 2 grids" in refusal(
        types, [6, 6], image_grids=[FOUR, FOUR], images_per_sample=[1, 0]
    )


def test_without_counts_by_sample_the_first_sample_that_does_not_fit_is_named():
    types, lengths = IMAGE * 4 + X + IMAGE * 4 + X, [6, 6]
    assert refusal(types, lengths, image_grids=[FOUR]).startswith("sample 1 has a run of 4, but no image is left: ")
    assert refusal(types, lengths, image_grids=[EIGHT, FOUR]).startswith(
        "sample 0 has a run of 4, but its next image makes 8: the image grids make 12 tokens"
    )
    assert refusal(types, lengths, image_grids=[FOUR, FOUR, FOUR]).startswith("the image grids make 12 tokens")


@pytest.mark.parametrize("name", ["qwen2_5_vl", *[name for name in ("qwen2_5_omni_thinker",) if name in FAMILIES]])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5])
def test_seconds_that_are_no_times(name, value):
    types, grids = VIDEO * 4 + X + VIDEO * 4, {"video_grids": [FOUR, FOUR]}
    assert refusal(types, [6, 4], name, **grids, seconds_per_grid=(0.0, 0.5)) is None
    message = refusal(types, [6, 4], name, **grids, seconds_per_grid=(0.5, value))
    assert message.startswith(f"video 1: seconds_per_grid is {value}; it must be a finite time, not negative")
    counted = refusal(types, [6, 4], name, **grids, seconds_per_grid=(0.5, value), videos_per_sample=(1, 1))
    assert counted.startswith(f"sample 1: video 1: seconds_per_grid is {value}")


def test_placeholders_on_padding():
    gaps = Segments.from_boundaries([0, 4, 8], [0, 8, 12])
    assert "place 4 of the row is padding, but has image" in refusal(
        [0] * 4 + [1] * 4 + [0] * 4, [], gaps=gaps, image_grids=[FOUR]
    )


def test_another_number_of_placeholders():
    assert "grids make 8 tokens, but the row has another number of image placeholders, 4;" in refusal(
        X + IMAGE * 4, [6], image_grids=[EIGHT]
    )
    assert "the video grids make 0 tokens" in refusal(X + VIDEO * 4, [6])
    assert "the image grids make 4 tokens" in refusal(X, [2], image_grids=[FOUR])


def test_random_rows_are_refused_on_a_host_and_on_a_device_alike():
    """`refusal` compares the two."""
    generator = torch.Generator().manual_seed(0)
    accepted = 0
    for _ in range(400):
        types, lengths, images, videos = [], [], [], []
        for _ in range(int(torch.randint(1, 4, (), generator=generator))):
            before = len(types)
            for part in torch.randint(0, 5, (4,), generator=generator).tolist():
                types += (X, IMAGE * 4 + X, VIDEO * 4 + X, IMAGE * 4, X + X)[part]
                images += [FOUR] * (part in (1, 3))
                videos += [FOUR] * (part == 2)
            lengths.append(len(types) - before)
        if lengths[0] > 1 and torch.rand((), generator=generator) < 0.3:
            lengths = [lengths[0] - 1, *lengths[1:], 1]
        accepted += refusal(types, lengths, image_grids=images, video_grids=videos) is None
    assert 50 < accepted < 350
