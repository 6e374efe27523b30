"""Markers of media whose column is not there: read as words, with one warning."""

import warnings

import pytest
from chats import chat, picture, processor_of

from vlmpack.collate import VLMCollator
from vlmpack.errors import SampleError

ANSWER = {"role": "assistant", "content": "5"}
LOST = {
    "messages": {"messages": [{"role": "user", "content": "<image>Total?"}, ANSWER]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "<image>Total?"}]}, ANSWER]},
    "LLaVA": {"conversations": [{"from": "human", "value": "<image>\nTotal?"}, {"from": "gpt", "value": "5"}]},
    "prompt": {"prompt": "<image>Total?", "completion": "5"},
    "video": {"messages": [{"role": "user", "content": "<video>Total?"}, ANSWER]},
    "the other column": {"messages": [{"role": "user", "content": "<video>Total?"}, ANSWER], "image": picture()},
}


def said_of(feature, processor=None, **settings):
    collator = VLMCollator(processor or processor_of(), **settings)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            collator.collate([feature])
            collator.measure(feature)
    return [str(warning.message) for warning in said]


@pytest.mark.parametrize("shape", LOST)
def test_a_marker_without_a_column_is_a_word_and_is_warned_of_once(shape):
    (text,) = said_of(LOST[shape])
    kind = "video" if shape in ("video", "the other column") else "image"
    assert text.startswith(f"a user's text holds '<{kind}>', but its sample has no column {kind} or {kind}s")
    assert "markers='places' refuses such samples" in text


@pytest.mark.parametrize("shape", LOST)
def test_places_refuses_it_and_text_takes_it_at_its_word(shape):
    assert said_of(LOST[shape], markers="text") == []
    with pytest.raises(SampleError, match=r"the user's text holds|placeholder\(s\) without a source"):
        said_of(LOST[shape], markers="places")


def test_other_texts_are_not_warned_of():
    beside = [{"type": "image", "image": picture()}, {"type": "text", "text": "Is this an <image>?"}]
    assert said_of({"messages": [{"role": "user", "content": beside}, ANSWER]}) == []
    assert said_of(chat("Total?", "The tag is <image>")) == []
    assert said_of({"prompt": "<image>?", "completion": "5", "images": [picture()]}) == []


def test_to_a_model_that_reads_text_it_is_text():
    assert said_of(LOST["prompt"], processor=processor_of().tokenizer) == []
