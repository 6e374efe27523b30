"""A processor from the hub or a folder, and into a folder, with or without torchvision."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vlmpack.data.processor import PATCH_SIZES, processor_class, save_processor, without_video
from vlmpack.errors import ConfigError, FamilyError

__all__ = ["is_saved_alone", "load_processor", "save_processor"]

CONFIG = "config.json"
IMAGE_PROCESSOR = "preprocessor_config.json"
ALL_PARTS = "processor_config.json"
TOKENIZER = "tokenizer_config.json"


def load_processor(source: str | os.PathLike[str]) -> Any:
    """The Qwen processor of a hub model or a local folder, for text and images.

    `AutoProcessor` cannot load one without torchvision, because every Qwen processor has a video part. This one has
    none, and its images go through Pillow, so that it gives the same on every machine.

    Args:
        source: a hub id, or a folder with a model's configuration, tokenizer and image processor; or with what
            `save_pretrained` of a processor wrote, where that tells the processor's class.

    Raises:
        FamilyError: the model is not of a family whose processor is known here.
        ConfigError: a processor that was saved without its model, and may be of several families.
        OSError: nothing is there, as transformers says it.
    """
    from transformers import AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    of_class = _class_saved_in(Path(source)) if is_saved_alone(source) else _class_for_model(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    return without_video(
        of_class,
        image_processor=Qwen2VLImageProcessorPil.from_pretrained(source),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )


def is_saved_alone(source: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a processor, and no model's configuration that tells its family."""
    folder = Path(source)
    parts = (IMAGE_PROCESSOR, ALL_PARTS)
    return not (folder / CONFIG).is_file() and any((folder / name).is_file() for name in parts)


def _class_for_model(source: str | os.PathLike[str]) -> type:
    from transformers import AutoConfig

    model_type = AutoConfig.from_pretrained(source).model_type
    if model_type not in PATCH_SIZES:
        raise FamilyError(f"no processor is known for {source}, a {model_type}; there are {', '.join(PATCH_SIZES)}")
    return processor_class(model_type)


def _class_saved_in(folder: Path) -> type:
    """The class that the folder's files name; or the only one there is for the patches of its images."""
    settings = [_read(folder / name) for name in (ALL_PARTS, IMAGE_PROCESSOR, TOKENIZER)]
    known = {processor_class(family).__name__: processor_class(family) for family in PATCH_SIZES}
    named = next((one["processor_class"] for one in settings if "processor_class" in one), None)
    if named is not None:
        if named not in known:
            raise FamilyError(f"no {named} is known here, as {folder} holds one; there are {', '.join(known)}")
        return known[named]
    patch = settings[1].get("patch_size")
    fitting = {processor_class(family) for family, size in PATCH_SIZES.items() if size == patch}
    if len(fitting) == 1:
        return fitting.pop()
    names = " or ".join(sorted(one.__name__ for one in fitting)) or "any processor that is known here"
    raise ConfigError(f"{folder} may hold {names}: nothing in it tells; copy the config.json of its model into it")


def _read(path: Path) -> dict[str, Any]:
    """The settings in a file; none where it is not there."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); save the processor again") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} holds a {type(settings).__name__}, and no settings; save the processor again")
    return settings
