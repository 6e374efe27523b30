"""Samples that are too long: refused by name, or cut at the limit, where no medium and no end of an answer is torn."""

import re
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from chats import FAMILIES, chat, picture, processor_of, says, text, user
from fixtures.processors import tiny_processor
from hypothesis import given
from hypothesis import strategies as st

from vlmpack.collate import VLMCollator
from vlmpack.collate.encode import Encoder
from vlmpack.collate.encoded import Encoded, check_sample, fit
from vlmpack.collate.processor_metadata import read_processor
from vlmpack.data.images import ImageLimits
from vlmpack.errors import SampleError
from vlmpack.layout import SlotRule

HOLE = {"type": "image"}


def encoded(feature, family="qwen3_vl", train_on="assistant"):
    processor = processor_of(family)
    rules = {"limits": ImageLimits(), "train_on": train_on, "max_length": 1, "truncates_start": True}
    encoder = Encoder(processor=processor, metadata=read_processor(processor), **rules)
    return encoder.encode(feature), encoder.metadata


def dialogue(*, frames=0):
    """An image, an answer, two images, an answer; with `frames`, a video in the last question."""
    video = {"type": "video", "video": [picture(64, 64)] * frames, "resized_height": 64, "resized_width": 64}
    two = text("two")
    messages = [
        user([HOLE, text("one")]),
        says("first"),
        user([HOLE, two, HOLE, *[video] * bool(frames), text("three")]),
        says("second"),
    ]
    return {"messages": messages, "images": [picture(64, 64), picture(96, 64), picture(64, 128)]}


@lru_cache
def encoded_dialogue(family, frames):
    return encoded(dialogue(frames=frames), family, train_on="all")


def refusal(action):
    with pytest.raises(SampleError) as caught:
        action()
    return caught.value.reason, str(caught.value)


@pytest.mark.parametrize("policy", ["error", "drop"])
def test_the_refusal_names_tokens_limit_and_remedy(policy):
    sample, metadata = encoded(chat("?", "x", picture(96, 64)))
    limit = sample.num_tokens - 1
    reason, message = refusal(lambda: fit(sample, metadata, max_length=limit, overlength=policy))
    assert reason == "overlength"
    seen = f"it has {sample.num_tokens} tokens (6 of them for 1 image(s) and 0 video(s)) but max_length={limit}; raise"
    assert message.startswith(seen)


END, START = "truncate", "truncate_start"
MEDIUM = re.compile(
    r"<\|vision_start\|>(<\|image_pad\|>)+<\|vision_end\|>|<\|vision_start\|>"
    r"((<\d\.\d seconds><\|vision_start\|>)?(<\|video_pad\|>)+(<\|vision_end\|>)?)+<\|vision_end\|>"
)
"""An image, and a video with its times, as text."""


def cut(sample, metadata, policy, limit):
    """The shorter sample, and which tokens of the whole one it has to have."""
    shorter = fit(sample, metadata, max_length=limit, overlength=policy)
    assert shorter.num_cut == sample.num_tokens - shorter.num_tokens
    return shorter, slice(None, shorter.num_tokens) if policy == END else slice(shorter.num_cut, None)


def test_the_token_that_begins_a_text_stays_in_front_of_its_last_tokens():
    metadata = replace(read_processor(tiny_processor()), bos_token_id=3)
    ids = np.array([3, *range(10, 30)])
    sample = Encoded(input_ids=ids, labels=ids.copy(), types=np.zeros_like(ids))
    shorter = fit(sample, metadata, max_length=5, overlength=START)
    assert shorter.input_ids.tolist() == [3, 26, 27, 28, 29] and shorter.num_cut == 16
    assert shorter.labels.tolist() == [-100, 26, 27, 28, 29]


@pytest.mark.parametrize("policy", [END, START])
def test_a_part_without_a_target_is_refused_with_the_remedy(policy):
    question, answer = ({"role": role, "content": "x" * 60} for role in ("user", "assistant"))
    messages = [question, answer] if policy == END else [question, answer, question]
    sample, metadata = encoded({"messages": messages})
    reason, message = refusal(lambda: cut(sample, metadata, policy, 9))
    assert reason == "truncated_away"
    assert f" of {sample.num_tokens}, none is a target; raise max_length" in message


@pytest.mark.parametrize("policy", [END, START])
@pytest.mark.parametrize("frames", [0, 4])
@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_whatever_is_cut_stays_a_good_sample_and_is_as_long_as_it_can_be(family, frames, policy, data):
    sample, metadata = encoded_dialogue(family, frames)
    limit = data.draw(st.integers(4, sample.num_tokens - 1))
    shorter, kept = cut(sample, metadata, policy, limit)
    check_sample(shorter, metadata)  # every image and video whole, and with its pixels
    assert shorter.input_ids.tolist() == sample.input_ids[kept].tolist()
    assert shorter.labels.tolist() == [-100, *sample.labels[kept][1:].tolist()]
    text, decode = processor_of(family).tokenizer.decode(sample.input_ids), processor_of(family).tokenizer.decode
    for count in range(shorter.num_tokens + 1, limit + 1):  # every longer part would tear a medium
        place = len(decode(sample.input_ids[: count if policy == END else sample.num_tokens - count]))
        assert any(match.start() < place < match.end() for match in MEDIUM.finditer(text))


@pytest.mark.parametrize("policy", [END, START])
def test_an_end_of_several_tokens_is_not_torn(policy):
    processor = tiny_processor("aya_vision")
    messages = [*chat("one?", "one")["messages"], *chat("two?", "two")["messages"]]
    ids = VLMCollator(processor)([{"messages": messages}])["input_ids"][0]
    first, last = (processor.tokenizer.convert_tokens_to_ids(x) for x in ("<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>"))
    counts = []
    for limit in range(len(ids) // 2, len(ids)):
        collator = VLMCollator(processor, max_length=limit, overlength=policy)
        counts.append(collator([{"messages": messages}])["input_ids"].shape[1])
        place = counts[-1] if policy == END else len(ids) - counts[-1] + 1  # after the token that begins the text
        assert ids[place - 1 : place + 1].tolist() != [first, last]
        assert collator.skip_log.truncated == collator.skip_log.used == 1
    assert counts != list(range(len(ids) // 2, len(ids)))


@pytest.mark.parametrize("family", ["qwen3_vl", "glm4v"])
def test_what_was_tokenized_before_is_cut_as_its_messages_are(family):
    """Images that are cut off go with their pixels."""
    processor = tiny_processor(family)
    feature = {"messages": dialogue()["messages"], "images": dialogue()["images"]}
    batch = VLMCollator(processor)([feature])
    tokens = {name: batch[name] for name in ("input_ids", "labels", "pixel_values", "image_grid_thw")}
    for policy, limit in ((END, 30), (END, batch["input_ids"].shape[1] - 20), (START, 40)):
        collator = VLMCollator(processor, max_length=limit, overlength=policy)
        for name, value in collator([feature]).items():
            other = collator([tokens])[name]
            assert other.equal(value) if hasattr(value, "equal") else name == "vlmpack"


# ---------------------------------------------------------------------- what a stream is told

SAMPLE = chat("Which is larger?", "The second", picture(40, 99), picture(120, 70))
LONG = chat("why?", "because " * 40)
BROKEN = {"messages": [user("?")], "id": "broken"}


def packing(**settings):
    return VLMCollator(processor_of(), layout="packed", **settings)


@pytest.mark.parametrize("sample", [SAMPLE, LONG])
@pytest.mark.parametrize("multiple", [1, 7])
@pytest.mark.parametrize("cut", [{}, {"max_length": 35, "overlength": "truncate", "train_on": "all"}])
def test_a_length_is_the_room_that_the_sample_takes_up_in_a_row(sample, multiple: int, cut):
    collator = packing(slots=SlotRule(multiple=multiple), **cut)
    row = collator.collate([sample])
    assert collator.length(sample) == row.segments.total
    assert collator.skip_log.received == 1, "a length is not counted"


@pytest.mark.parametrize(
    ("sample", "settings"), [(BROKEN, {"on_bad": "skip"}), (LONG, {"max_length": 9, "overlength": "drop"})]
)
def test_a_sample_that_is_left_out_takes_up_one_slot_and_is_counted_by_collate(sample, settings):
    collator = packing(slots=SlotRule(multiple=4), **settings)
    assert collator.length(sample) == 4
    assert collator.skip_log.received == 0
    collator.collate([sample])
    assert collator.skip_log.refused == 1
