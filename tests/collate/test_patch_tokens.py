"""Processors whose image token is not what stands for the parts of an image: Llama 4's.

Its own image processor needs torchvision; a stand-in cuts tiles in its place, and the processor itself writes the text.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chats import says, text, user
from PIL import Image
from transformers import BaseImageProcessor, BatchFeature, PreTrainedTokenizerFast

from vlmpack.collate import VLMCollator
from vlmpack.families.registry import FAMILIES
from vlmpack.testing import tiny_processor

pytestmark = pytest.mark.skipif("llama4" not in FAMILIES, reason="this transformers has another Llama 4")

PATCH, SIDE = 7, 28
TOKENS = (SIDE // PATCH) ** 2 // 4
SPECIAL = ("<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>")
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ':' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|image|>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ '<|endoftext|>' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


class Tiles(BaseImageProcessor):
    """Two tiles of a wide image, and the whole; of any other the whole alone."""

    def preprocess(self, images: Any, **_: Any) -> BatchFeature:
        flat = [image for of_sample in images for image in (of_sample if isinstance(of_sample, list) else [of_sample])]
        ratios = [(1, 2) if image.width > image.height else (1, 1) for image in flat]
        counts = [3 if ratio == (1, 2) else 1 for ratio in ratios]
        seeds = [torch.Generator().manual_seed(image.width) for image in flat]
        tiles = [torch.randn(n, 3, SIDE, SIDE, generator=seed) for n, seed in zip(counts, seeds, strict=True)]
        return BatchFeature({"pixel_values": torch.cat(tiles), "aspect_ratios": ratios})


def llama4_processor() -> Any:
    from transformers.models.llama4.processing_llama4 import Llama4Processor

    tokenizer: PreTrainedTokenizerFast = tiny_processor("qwen3_vl").tokenizer
    tokenizer.add_tokens(list(SPECIAL), special_tokens=True)
    return Llama4Processor(image_processor=Tiles(), tokenizer=tokenizer, patch_size=PATCH, chat_template=TEMPLATE)


def conversation(*sizes: tuple[int, int]) -> dict[str, Any]:
    images = [{"type": "image", "image": Image.new("RGB", size)} for size in sizes]
    question = user([*images, text("What is it?")])
    return {"messages": [question, says([text("An image.")])]}


def test_runs_of_patches_are_counted_and_samples_are_those_of_the_processor() -> None:
    processor = llama4_processor()
    collator = VLMCollator(processor)
    patch = processor.tokenizer.convert_tokens_to_ids("<|patch|>")
    chats = [conversation((60, 30)), conversation(), conversation((20, 30), (50, 20))]
    batch = collator.collate(chats)
    placeholders = (batch.input_ids == patch).sum(1).tolist()
    assert placeholders == [3 * TOKENS, 0, 4 * TOKENS]
    assert not ((batch.labels != -100) & (batch.input_ids == patch)).any()
    text = processor.apply_chat_template(chats[0]["messages"], tokenize=False)
    whole = processor(text=[text], images=[[chats[0]["messages"][0]["content"][0]["image"]]], return_tensors="pt")
    real = batch.attention_mask[0].bool()
    assert batch.input_ids[0][real].tolist() == whole["input_ids"][0].tolist()
    assert torch.equal(batch.media.pixel_values[:3], whole["pixel_values"])
    assert len(batch.media.pixel_values) == 3 + 4
