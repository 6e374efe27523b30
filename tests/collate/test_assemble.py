"""Assembling: the packed row is exactly the packed padded batch, pixels included."""

from dataclasses import fields, replace

import numpy as np
import torch
from chats import processor_of
from hypothesis import given
from hypothesis import strategies as st

from vlmpack.collate.assemble import to_packed, to_padded
from vlmpack.collate.encoded import Encoded, Visual
from vlmpack.collate.processor_metadata import read_processor
from vlmpack.layout import PackedRow, SlotRule, pack

METADATA = read_processor(processor_of())
IMAGE, VIDEO = METADATA.image_token_id, METADATA.video_token_id
START, END = METADATA.vision_start_id, METADATA.vision_end_id
WIDTH = 7
"""Values a patch, in these tests only."""


def sample(seed, words, images=(), videos=(), sample_id=None):
    """Words, then one run of placeholders an image and a video; `images` and `videos` are (rows, columns) in tokens."""
    rng = np.random.default_rng(seed)
    ids, types = rng.integers(5, 300, words).tolist(), [0] * words
    visuals = {1: [], 2: []}
    for kind, token, sizes in ((1, IMAGE, images), (2, VIDEO, videos)):
        for rows, columns in sizes:
            count = rows * columns
            ids += [START, *[token] * count, END]
            types += [0, *[kind] * count, 0]
            pixels = torch.from_numpy(rng.standard_normal((4 * count, WIDTH), np.float32))
            visuals[kind].append(
                Visual(pixels=pixels, grid=(1, 2 * rows, 2 * columns), seconds=0.5 if kind == 2 else None)
            )
    labels = np.where((np.array(types) == 0) & (rng.random(len(ids)) < 0.6), ids, -100)
    return Encoded(
        input_ids=np.array(ids, np.int64),
        labels=labels,
        types=np.array(types, np.int64),
        images=tuple(visuals[1]),
        videos=tuple(visuals[2]),
        teacher={"topk_ids": rng.integers(0, 300, (len(ids), 2)), "topk_logprobs": -rng.random((len(ids), 2))},
        sample_id=seed if sample_id is None else sample_id,
    )


SIZES = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), max_size=3)
SAMPLES = st.lists(st.builds(sample, st.integers(0, 99), st.integers(1, 11), SIZES, SIZES), min_size=1, max_size=6)
RULES = st.builds(
    SlotRule, multiple=st.integers(1, 9), row_multiple=st.sampled_from([1, 16]), max_segments=st.sampled_from([None, 7])
)


def assert_rows_equal(row: PackedRow, truth: PackedRow):
    compared = 0
    for holder, other in ((row, truth), (row.media, truth.media)):
        for field in fields(holder):
            value, expected = getattr(holder, field.name), getattr(other, field.name)
            if isinstance(expected, torch.Tensor):
                assert value.dtype == expected.dtype, field.name
                assert torch.equal(value, expected), field.name
                compared += 1
            elif field.name not in ("media", "extras"):
                assert value == expected, field.name
    assert compared >= 3
    assert all(torch.equal(row.extras[name], column) for name, column in truth.extras.items())
    assert {*row.extras} == {"topk_ids", "topk_logprobs"}


def test_samples_with_and_without_a_teacher_share_a_row():
    samples = [replace(sample(2, 4, [], []), teacher={}), sample(1, 5, [], [])]
    ids = to_packed(samples, rule=SlotRule(), pad_token_id=3).extras["topk_ids"][:, 0].T.tolist()
    assert ids == [[-1, -1]] * 4 + samples[1].teacher["topk_ids"].tolist()


@given(samples=SAMPLES, rule=RULES)
def test_packed_is_pack_of_padded(samples, rule):
    row = to_packed(samples, rule=rule, pad_token_id=3)
    assert_rows_equal(row, pack(to_padded(samples, pad_token_id=3), rule=rule, pad_token_id=3))


def test_a_video_that_does_not_tell_its_pace_gets_the_model_s_own_default():
    told, untold = sample(1, 2, [], [(1, 1)]), sample(2, 2, [], [(1, 1)])
    (video,) = untold.videos
    untold = replace(untold, videos=(replace(video, seconds=None),))
    assert to_padded([told, untold], pad_token_id=0).media.second_per_grid_ts.tolist() == [0.5, 1.0]
    assert to_padded([untold], pad_token_id=0).media.second_per_grid_ts is None


def test_pixels_of_two_precisions_keep_the_finer_one():
    fine, coarse = sample(1, 3, [(1, 2)]), sample(2, 3, [(1, 1)])
    half = replace(coarse, images=(replace(coarse.images[0], pixels=coarse.images[0].pixels.half()),))
    for order in ([fine, half], [half, fine]):
        pixels = to_padded(order, pad_token_id=0).media.pixel_values
        assert pixels.dtype == torch.float32
        assert torch.equal(pixels, torch.cat([s.images[0].pixels.float() for s in order]))
