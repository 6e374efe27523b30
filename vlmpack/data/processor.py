"""Load and save a model's processor, with or without torchvision."""

from __future__ import annotations

import copy
import inspect
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vlmpack.errors import ConfigError, FamilyError
from vlmpack.families.registry import FAMILIES, by_processor

WITH_PROCESSOR = {name: family for name, family in FAMILIES.items() if family.has_vision}
"""Families whose models have a processor; text models only have a tokenizer."""
QWEN = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor")
"""Processor classes without settings of their own: they only need their parts."""
OMNI = ("Qwen2_5OmniProcessor", "Qwen3OmniMoeProcessor")
"""Processor classes with audio."""
WITH_VIDEO_PART = ("MiniCPMV4_6Processor", "SmolVLMProcessor")
"""Processor classes that read settings of their video processor even if there are no videos."""
FRAMES_AS_TILES = ("InternVLProcessor", "SmolVLMProcessor")
"""Processor classes that write a video as one image, with a tile for each frame."""
WHOLE = {"qwen2_5_omni": "qwen2_5_omni_thinker", "qwen3_omni_moe": "qwen3_omni_moe_thinker"}
"""Models of which only one part is trained -> that part's model type. The model's checkpoint holds the processor."""
SETTINGS = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
"""Files of a processor's settings."""


def load_processor(source: str | os.PathLike[str]) -> Any:
    """Load the processor of a hub model or a local folder, for text, images, videos and (for Qwen-Omni) audio.

    Without torchvision, `AutoProcessor` cannot load a processor with a video part. This function loads the video part
    only if the processor also needs it for images, or if torchvision is installed and the family is not one of Qwen's.
    Images are processed with Pillow if transformers offers that, so that the output is the same on every machine. The
    video part's settings are kept for `save_processor`.

    Args:
        source: a hub id; or a folder with a model's configuration, tokenizer and image processor; or a folder with the
            files written by a processor's `save_pretrained`, if they name its class.

    Raises:
        FamilyError: the model belongs to no supported family with a processor, or its processor needs torchvision.
        ConfigError: a processor was saved without its model and without its class name.
        OSError: nothing is there (transformers' own error).
    """
    try:
        processor = _load_parts(_class_of(source), source)
    except (ImportError, ValueError) as error:  # transformers raises these, naming what is missing
        if "torchvision" not in str(error).lower():
            raise
        raise FamilyError(f"the processor of {source} needs torchvision, even for images; install it") from error
    processor.video_settings = _video_settings(source)
    return processor


def _video_settings(source: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a video processor's settings for saving. {}: there are none, or it shares the image settings."""
    from transformers.models.auto.video_processing_auto import get_video_processor_config

    settings = get_video_processor_config(source)
    return settings if "video_processor_type" in settings else {}


def _load_parts(of_class: Any, source: str | os.PathLike[str]) -> Any:
    """Load a processor with its Pillow image processor and its settings.

    Loads the video processor if a family other than Qwen's has videos, torchvision is installed and the source has its
    settings, or if the processor needs one anyway. Skips an audio part that is not used.
    """
    from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer, AutoVideoProcessor
    from transformers.models.auto.video_processing_auto import get_video_processor_config
    from transformers.utils.import_utils import is_torchvision_available

    if "Placeholder" in of_class.__name__:  # transformers' substitute for classes whose modules cannot be imported
        raise ImportError("its module needs torchvision")
    settings, _ = of_class.get_processor_dict(source)
    parts = of_class.get_attributes()
    names = [*inspect.signature(of_class.__init__).parameters]
    kept = {name: value for name, value in settings.items() if name in names and name not in (*parts, "chat_template")}
    if of_class.__name__ in OMNI:
        kept["feature_extractor"] = AutoFeatureExtractor.from_pretrained(source)
    class_name = of_class.__name__
    has_videos = by_processor()[class_name].has_videos or class_name in FRAMES_AS_TILES
    reads_videos = has_videos and class_name not in QWEN and is_torchvision_available()
    if class_name in WITH_VIDEO_PART or (reads_videos and get_video_processor_config(source)):
        kept["video_processor"] = AutoVideoProcessor.from_pretrained(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    return without_parts(
        of_class,
        absent=[part for part in parts if part not in ("tokenizer", "image_processor", *kept)],
        image_processor=AutoImageProcessor.from_pretrained(source, backend="pil"),
        tokenizer=tokenizer,
        chat_template=settings.get("chat_template") or tokenizer.chat_template,
        **kept,
    )


def without_parts(processor_class: Any, *, absent: Sequence[str], **parts: Any) -> Any:
    """Make a processor of a transformers class without the parts of these names.

    The constructor in transformers checks the type of every part. Without torchvision, this check fails for a part that
    is None, and so does saving. Only this object gets another check and another `save_pretrained`. Its class stays
    unchanged, so that DataLoader workers can unpickle it.
    """
    if not absent:
        return processor_class(**parts)
    processor = processor_class.__new__(processor_class)
    processor.check_argument_for_proper_class = lambda *_: None
    processor_class.__init__(processor, **dict.fromkeys(absent), **parts)
    del processor.check_argument_for_proper_class
    processor.save_pretrained = partial(save_processor, processor)
    return processor


def save_processor(processor: Any, folder: str | os.PathLike[str], **settings: Any) -> None:
    """Save a processor as transformers does, to a folder that `load_processor` can read, whichever parts it has.

    This includes the settings of a video processor that was not loaded. Without them, another class would load.

    Args:
        processor: the processor.
        folder: the folder; it is created if necessary.
        settings: further arguments of `ProcessorMixin.save_pretrained`, such as `push_to_hub`.
    """
    from transformers import ProcessorMixin

    plain = _without_ours(processor)
    parts = [name for name in processor.get_attributes() if getattr(processor, name) is not None]
    if "video_processor" not in parts:
        plain.video_processor = getattr(processor, "video_settings", None) or None
    plain.get_attributes = lambda: parts  # transformers saves every part of this list
    ProcessorMixin.save_pretrained(plain, os.fspath(folder), **settings)


def settings_of(processor: Any) -> dict[str, Any]:
    """Return a processor's settings as in `ProcessorMixin.to_dict`, without those of its parts."""
    parts = processor.get_attributes()
    return {name: value for name, value in _without_ours(processor).to_dict().items() if name not in parts}


def _without_ours(processor: Any) -> Any:
    """Copy a processor without the attributes that are set here."""
    plain = copy.copy(processor)
    for name in ("save_pretrained", "video_settings"):
        plain.__dict__.pop(name, None)
    return plain


def is_saved_alone(source: str | os.PathLike[str]) -> bool:
    """Return whether a folder holds a processor but no model configuration, which would name its family."""
    is_with_model = (Path(source) / "config.json").is_file()
    return not is_with_model and any((Path(source) / name).is_file() for name in SETTINGS[:2])


def _class_of(source: str | os.PathLike[str]) -> Any:
    """Return the class that the processor's own files name, as AutoProcessor does, or else that of the model's family.

    The two may differ: Pixtral's model is a LLaVA, but its processor is not.
    """
    from transformers import AutoConfig
    from transformers.utils.hub import cached_file

    family = None
    if not is_saved_alone(source):
        model_type = AutoConfig.from_pretrained(source).model_type
        family = WITH_PROCESSOR.get(WHOLE.get(model_type, model_type))
        if family is None:
            there = ", ".join(WITH_PROCESSOR)
            raise FamilyError(f"no processor is known for {source}, a {model_type}; there are {there}")
    files = (cached_file(source, name, _raise_exceptions_for_missing_entries=False) for name in SETTINGS)
    names = [name for file in files if file and (name := _read(Path(file)).get("processor_class"))]
    family = next((by_processor()[name] for name in names if name in by_processor()), family)
    if family is not None:
        return family.processor_class
    if names:
        raise FamilyError(
            f"{source} holds a {names[0]}, which no supported family has; there are {', '.join(by_processor())}"
        )
    raise ConfigError(f"no file in {source} names the processor's class; copy the config.json of its model into it")


def _read(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); save the processor again") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} holds a {type(settings).__name__}, and no settings; save the processor again")
    return settings
