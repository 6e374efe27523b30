"""Labels: what assistants say, their end included, and nothing else."""

from dataclasses import replace

import numpy as np
import pytest
from chats import learnt, processor_of
from hypothesis import given
from hypothesis import strategies as st

from vlmpack.collate.encoded import assistant_spans, mask_media
from vlmpack.collate.processor_metadata import read_processor

PROCESSOR = processor_of()
METADATA = read_processor(PROCESSOR)


def ids_of(text):
    return np.array(PROCESSOR.tokenizer(text)["input_ids"], np.int64)


def turns(*pairs):
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in pairs)


def said(text):
    """What the assistant spans of this text hold, each as text."""
    ids = ids_of(text)
    return [PROCESSOR.tokenizer.decode(ids[start:stop]) for start, stop in assistant_spans(ids, METADATA)]


@pytest.mark.parametrize("role", ["assistants", "assistant_2", "user", "Assistant", "tool", ""])
def test_other_roles_are_not_taken_for_the_assistant(role):
    assert said(turns((role, "x"))) == []


def test_a_mention_of_the_assistant_is_not_a_turn():
    assert said(turns(("user", "assistant\nassistant\n"))) == []


def test_a_turn_cut_short_runs_to_the_end():
    assert said("<|im_start|>assistant\nhalf an ans") == ["half an ans"]
    assert said("<|im_start|>assistant\n") == [""]
    assert said("<|im_start|>assistant") == []


def test_a_header_s_newline_that_bpe_merged_with_the_answer_s_own_is_still_a_header():
    merged = 9  # stands for one token of two newlines, as Qwen's vocabulary has it
    metadata = replace(METADATA, newline_ids=METADATA.newline_ids | {merged})
    ids = np.array([METADATA.turn_start_id, *METADATA.assistant_ids, merged, 50, METADATA.turn_end_id])
    (span,) = assistant_spans(ids, metadata)
    assert ids[slice(*span)].tolist() == [50, METADATA.turn_end_id]
    assert assistant_spans(ids, METADATA) == []


WORDS = st.text(st.characters(codec="ascii", exclude_characters="<|>"), max_size=12)
CHATS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), WORDS), min_size=1, max_size=6)


@given(chat=CHATS)
def test_token_spans_say_what_the_turns_said(chat):
    # An answer that begins with a newline may lose it to the header, if the vocabulary merges the two.
    chat = [(role, text.lstrip("\r\n")) for role, text in chat]
    assert said(turns(*chat)) == [f"{text}<|im_end|>" for role, text in chat if role == "assistant"]


def test_labels_are_never_on_media_even_if_given():
    ids = ids_of("a<|vision_start|><|image_pad|><|vision_end|>b<|video_pad|>")
    given = ids.copy()
    masked = mask_media(given, ids, METADATA)
    assert learnt(PROCESSOR, masked) == "b"
    assert given.tolist() == ids.tolist()


def test_a_tokenizer_without_chatml_has_no_turns():
    assert assistant_spans(ids_of(turns(("assistant", "x"))), replace(METADATA, turn_start_id=None)) == []
