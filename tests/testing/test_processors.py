"""tiny_processor: the shipped classes around a small vocabulary, the same in every process."""

import pickle

import numpy as np
import pytest
from chats import FAMILIES, picture, processor_of

from vlmpack.errors import ConfigError
from vlmpack.testing import processors, tiny_processor
from vlmpack.testing.processors import CHAT_TEMPLATE, SPECIAL_TOKENS

CLIP = ("qwen2_vl", "qwen2_5_vl")
"""Families whose vision tower has CLIP's patches and colours."""
MESSAGES = [
    {"role": "system", "content": "You read receipts."},
    {"role": "user", "content": [{"type": "image"}, {"type": "video"}, {"type": "text", "text": "Total?"}]},
]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_classes_are_those_that_transformers_loads(family):
    """For a checkpoint of this family, from its `config.model_type`."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    processor = processor_of(family)
    assert type(processor).__name__ == PROCESSOR_MAPPING_NAMES[family]
    assert type(processor.tokenizer).__name__ == TOKENIZER_MAPPING_NAMES[family]


@pytest.mark.parametrize(("family", "patch"), [(family, 14 if family in CLIP else 16) for family in FAMILIES])
def test_images_are_cut_into_the_family_s_patches(family, patch):
    out = processor_of(family)(text="<|image_pad|>", images=[picture(8 * patch, 6 * patch)], return_tensors="pt")
    assert out["image_grid_thw"].tolist() == [[1, 6, 8]]
    assert tuple(out["pixel_values"].shape) == (48, 3 * 2 * patch * patch)
    assert out["input_ids"].shape == (1, 12)


def test_images_stay_within_the_bounds_given_and_default_to_4_to_256_tokens():
    def tokens(processor, image):
        return processor(text="<|image_pad|>", images=[image])["mm_token_type_ids"][0].count(1)

    assert tokens(processor_of(), picture(1, 1)) == 4
    assert 225 <= tokens(processor_of(), picture(1000, 1000)) <= 256
    assert tokens(tiny_processor(max_pixels=9 * 32 * 32), picture(1000, 1000)) == 9
    assert tokens(tiny_processor(min_pixels=16 * 32 * 32), picture(1, 1)) == 16


def test_every_special_token_of_qwen_is_one_token():
    tokenizer = processor_of().tokenizer
    assert len(SPECIAL_TOKENS) == 14
    for token in SPECIAL_TOKENS:
        assert len(tokenizer(f"a{token}b")["input_ids"]) == 3, token
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.padding_side == "right"


def test_the_template_writes_chatml_for_strings_and_parts():
    text = processor_of().apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou read receipts.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|><|vision_start|><|video_pad|><|vision_end|>"
        "Total?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_vocabulary_and_template_can_be_chosen():
    processor = tiny_processor(vocab_size=300, chat_template="{{ messages[0]['content'] }}")
    assert len(processor.tokenizer) == 300 + len(SPECIAL_TOKENS)
    assert processor.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert processor_of().chat_template == CHAT_TEMPLATE


def test_it_survives_the_way_to_a_spawned_worker():
    processor = processor_of()
    again = pickle.loads(pickle.dumps(processor))
    image = picture()
    text = "a <|image_pad|> b"
    here, there = (p(text=text, images=[image], return_tensors="np") for p in (processor, again))
    assert np.array_equal(here["input_ids"], there["input_ids"])
    assert np.array_equal(here["pixel_values"], there["pixel_values"])


@pytest.mark.parametrize("family", ["blip", "glm4v", "ernie4_5_vl_moe", "qwen3"])
def test_a_family_without_a_processor_is_refused_by_name(family, monkeypatch):
    """GLM's and ERNIE's are built by these tests only."""
    monkeypatch.setattr(processors, "BUILDERS", {})
    with pytest.raises(ConfigError, match=f"no processor for family '{family}'; use one of qwen2_vl, qwen2_5_vl, qwen"):
        tiny_processor(family)


def test_a_vocabulary_without_room_for_bytes_is_refused():
    with pytest.raises(ConfigError, match="vocab_size=255 has no room for the 256 bytes; use at least 256"):
        tiny_processor(vocab_size=255)
