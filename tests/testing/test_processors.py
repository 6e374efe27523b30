"""tiny_processor: the shipped classes around a small vocabulary, the same in every process."""

import pytest
from chats import picture, processor_of

from vlmpack.errors import ConfigError
from vlmpack.testing import tiny_processor
from vlmpack.testing.processors import CHAT_TEMPLATE, SPECIAL_TOKENS


def test_images_stay_within_the_bounds_given_and_default_to_4_to_256_tokens():
    def tokens(processor, image):
        return processor(text="<|image_pad|>", images=[image])["mm_token_type_ids"][0].count(1)

    assert tokens(processor_of(), picture(1, 1)) == 4
    assert 225 <= tokens(processor_of(), picture(1000, 1000)) <= 256
    assert tokens(tiny_processor(max_pixels=9 * 32 * 32), picture(1000, 1000)) == 9
    assert tokens(tiny_processor(min_pixels=16 * 32 * 32), picture(1, 1)) == 16


def test_vocabulary_and_template_can_be_chosen():
    processor = tiny_processor(vocab_size=300, chat_template="{{ messages[0]['content'] }}")
    assert len(processor.tokenizer) == 300 + len(SPECIAL_TOKENS)
    assert processor.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert processor_of().chat_template == CHAT_TEMPLATE


@pytest.mark.parametrize("family", ["blip", "glm4v", "ernie4_5_vl_moe", "qwen3"])
def test_a_family_without_a_processor_is_refused_by_name(family):
    """GLM's and ERNIE's are built by these tests only."""
    with pytest.raises(ConfigError, match=f"no processor for family '{family}'; use one of qwen2_vl, qwen2_5_vl, qwen"):
        tiny_processor(family)


def test_a_vocabulary_without_room_for_bytes_is_refused():
    with pytest.raises(ConfigError, match="vocab_size=255 has no room for the 256 bytes; use at least 256"):
        tiny_processor(vocab_size=255)
