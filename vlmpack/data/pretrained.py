"""A processor from the hub or a folder, and into a folder, with or without torchvision."""

from __future__ import annotations

from typing import Any

from vlmpack.data.processor import PATCH_SIZES, processor_class, save_processor, without_video
from vlmpack.errors import FamilyError

__all__ = ["load_processor", "save_processor"]


def load_processor(source: str) -> Any:
    """The Qwen processor of a hub model or a local folder, for text and images.

    `AutoProcessor` cannot load one without torchvision, because every Qwen processor has a video part. This one has
    none, and its images go through Pillow, so that it gives the same on every machine.

    Args:
        source: a hub id, or a folder with a model's configuration, tokenizer and image processor.

    Raises:
        FamilyError: the model is not of a family whose processor is known here.
        OSError: nothing is there, as transformers says it.
    """
    from transformers import AutoConfig, AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model_type = AutoConfig.from_pretrained(source).model_type
    if model_type not in PATCH_SIZES:
        raise FamilyError(f"no processor is known for {source}, a {model_type}; there are {', '.join(PATCH_SIZES)}")
    tokenizer = AutoTokenizer.from_pretrained(source)
    return without_video(
        processor_class(model_type),
        image_processor=Qwen2VLImageProcessorPil.from_pretrained(source),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )
