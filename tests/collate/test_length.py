"""Samples that are too long: refused by name, or cut where nothing is torn."""

from functools import lru_cache

import pytest
from chats import FAMILIES, chat, learnt, picture, processor_of
from hypothesis import given
from hypothesis import strategies as st

from vlmpack.collate.encode import Encoder
from vlmpack.collate.encoded import boundaries, check_sample, fit, run_lengths, truncate
from vlmpack.collate.processor_metadata import read_processor
from vlmpack.data.images import ImageLimits
from vlmpack.errors import Refusal

HOLE = {"type": "image"}


def encoded(feature, family="qwen3_vl", train_on="assistant"):
    processor = processor_of(family)
    encoder = Encoder(processor=processor, metadata=read_processor(processor), limits=ImageLimits(), train_on=train_on)
    return encoder.encode(feature), encoder.metadata


def dialogue(*, frames=0):
    """An image, an answer, two images, an answer; with `frames`, a video in the last question."""
    video = (
        [{"type": "video", "video": [picture(64, 64)] * frames, "resized_height": 64, "resized_width": 64}]
        if frames
        else []
    )
    messages = [
        {"role": "user", "content": [HOLE, {"type": "text", "text": "one"}]},
        {"role": "assistant", "content": "first"},
        {
            "role": "user",
            "content": [HOLE, {"type": "text", "text": "two"}, HOLE, *video, {"type": "text", "text": "three"}],
        },
        {"role": "assistant", "content": "second"},
    ]
    return {"messages": messages, "images": [picture(64, 64), picture(96, 64), picture(64, 128)]}


@lru_cache
def encoded_dialogue(family, frames):
    return encoded(dialogue(frames=frames), family, train_on="all")


def refusal(action):
    with pytest.raises(Refusal) as caught:
        action()
    return caught.value.reason, str(caught.value)


def test_a_sample_that_fits_is_left_alone():
    sample, metadata = encoded(dialogue())
    for limit in (None, sample.num_tokens, sample.num_tokens + 1):
        assert fit(sample, metadata, max_length=limit, overlength="error") is sample
        assert fit(sample, metadata, max_length=limit, overlength="truncate") is sample


@pytest.mark.parametrize("policy", ["error", "drop"])
def test_the_refusal_names_tokens_limit_and_remedy(policy):
    sample, metadata = encoded(chat("?", "x", picture(96, 64)))
    limit = sample.num_tokens - 1
    reason, message = refusal(lambda: fit(sample, metadata, max_length=limit, overlength=policy))
    assert reason == "overlength"
    assert message == (
        f"it has {sample.num_tokens} tokens (6 of them for 1 image(s) and 0 video(s)) but max_length={limit}; raise "
        "max_length, lower the processor's max_pixels, or choose overlength='drop' or overlength='truncate'"
    )


def test_it_is_cut_after_the_last_message_that_fits():
    sample, metadata = encoded(dialogue())
    shorter = truncate(sample, metadata, max_length=sample.num_tokens - 1)
    text = processor_of().tokenizer.decode(shorter.input_ids)
    assert text.endswith("three<|im_end|>\n")
    assert learnt(processor_of(), shorter.labels) == "first<|im_end|>"
    assert len(shorter.images) == 3


def test_nothing_is_cut_between_words():
    sample, metadata = encoded(chat("many words here", "and many words there"))
    assert refusal(lambda: truncate(sample, metadata, max_length=sample.num_tokens - 1))[0] == "truncated_away"


def test_a_beginning_without_an_answer_is_refused_with_the_remedy():
    sample, metadata = encoded(dialogue())
    first_answer = int((sample.labels != -100).nonzero()[0][0])
    reason, message = refusal(lambda: truncate(sample, metadata, max_length=first_answer))
    assert reason == "truncated_away"
    assert f"of {sample.num_tokens}, the last message or image boundary" in message
    assert f"max_length={first_answer}" in message


@pytest.mark.parametrize("frames", [0, 4])
@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_whatever_is_cut_stays_a_good_sample_and_is_as_long_as_it_can_be(family, frames, data):
    sample, metadata = encoded_dialogue(family, frames)
    limit = data.draw(st.integers(4, sample.num_tokens))
    shorter = fit(sample, metadata, max_length=limit, overlength="truncate")
    check_sample(shorter, metadata)  # every image and video whole, and with its pixels
    assert shorter.num_tokens <= limit
    assert shorter.input_ids.tolist() == sample.input_ids[: shorter.num_tokens].tolist()
    assert not [cut for cut in boundaries(sample, metadata) if shorter.num_tokens < cut <= limit]


@pytest.mark.parametrize("family", FAMILIES)
def test_boundaries_lie_beside_images_and_after_messages_and_never_inside_a_video(family):
    sample, metadata = encoded(dialogue(frames=4), family)
    ids = sample.input_ids
    cuts = boundaries(sample, metadata)
    assert len(cuts) == 2 * 3 + 4
    videos = (ids == metadata.video_token_id).nonzero()[0]
    assert not [cut for cut in cuts if videos[0] < cut <= videos[-1]]
    assert len(run_lengths(ids, metadata.video_token_id)) == (2 if metadata.frame_timestamps else 1)
