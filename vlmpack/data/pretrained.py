"""A processor from the hub or a folder, and into a folder, with or without torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlmpack.data.processor import without_video
from vlmpack.errors import FamilyError


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
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    classes = {
        "qwen2_vl": transformers.Qwen2VLProcessor,
        "qwen2_5_vl": transformers.Qwen2_5_VLProcessor,
        "qwen3_vl": transformers.Qwen3VLProcessor,
        "qwen3_vl_moe": transformers.Qwen3VLProcessor,
    }
    model_type = transformers.AutoConfig.from_pretrained(source).model_type
    if model_type not in classes:
        raise FamilyError(f"no processor is known for {source}, a {model_type}; there are {', '.join(classes)}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    return without_video(
        classes[model_type],
        image_processor=Qwen2VLImageProcessorPil.from_pretrained(source),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )


def save_processor(processor: Any, folder: str | Path) -> None:
    """Write what `load_processor` reads: tokenizer, image processor and chat template (the video part is left out)."""
    processor.image_processor.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    Path(folder, "chat_template.jinja").write_text(processor.chat_template, encoding="utf-8")
