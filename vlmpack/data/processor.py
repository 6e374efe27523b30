"""Load and save a model's processor, with or without torchvision."""

from __future__ import annotations

import copy
import inspect
import json
import os
from collections.abc import Mapping, Sequence
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
IMAGE_PROCESSOR = "preprocessor_config.json"
ALL_PARTS = "processor_config.json"
TOKENIZER = "tokenizer_config.json"


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
    from transformers import AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    of_class: Any = _class_saved_in(Path(source)) if is_saved_alone(source) else _class_beside_model(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    if of_class.__name__ in QWEN:
        processor = without_parts(
            of_class,
            absent=("video_processor",),
            image_processor=Qwen2VLImageProcessorPil.from_pretrained(source),
            tokenizer=tokenizer,
            chat_template=_chat_template(of_class.get_processor_dict(source)[0], tokenizer),
        )
    else:
        try:
            processor = _load_parts(of_class, source, tokenizer)
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


def _load_parts(of_class: Any, source: str | os.PathLike[str], tokenizer: Any) -> Any:
    """Load a processor outside Qwen-VL, with its Pillow image processor and its settings.

    Loads the video processor if the family has videos and torchvision is installed, or if the processor needs one
    anyway. Skips an audio part that is not used.
    """
    from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoVideoProcessor
    from transformers.utils.import_utils import is_torchvision_available

    if "Placeholder" in of_class.__name__:  # transformers' substitute for classes whose modules cannot be imported
        raise ImportError("its module needs torchvision")
    settings, _ = of_class.get_processor_dict(source)
    parts = of_class.get_attributes()
    names = [*inspect.signature(of_class.__init__).parameters]
    kept = {name: value for name, value in settings.items() if name in names and name not in (*parts, "chat_template")}
    if of_class.__name__ in OMNI:
        kept["feature_extractor"] = AutoFeatureExtractor.from_pretrained(source)
    reads_videos = by_processor()[of_class.__name__].has_videos or of_class.__name__ in FRAMES_AS_TILES
    if of_class.__name__ in WITH_VIDEO_PART or (reads_videos and is_torchvision_available()):
        kept["video_processor"] = AutoVideoProcessor.from_pretrained(source)
    return without_parts(
        of_class,
        absent=[part for part in parts if part not in ("tokenizer", "image_processor", *kept)],
        image_processor=AutoImageProcessor.from_pretrained(source, backend="pil"),
        tokenizer=tokenizer,
        chat_template=_chat_template(settings, tokenizer),
        **kept,
    )


def _chat_template(settings: Mapping[str, Any], tokenizer: Any) -> Any:
    """Return the processor's own chat template, from whichever file `AutoProcessor` uses, or else the tokenizer's."""
    return settings.get("chat_template") or tokenizer.chat_template


def without_parts(processor_class: Any, *, absent: Sequence[str], **parts: Any) -> Any:
    """Make a processor of a transformers class without the parts of these names.

    The constructor in transformers checks the type of every part. Without torchvision, this check fails for a part that
    is None, and so does saving. Only this object gets another check and another `save_pretrained`. Its class stays
    unchanged, so that DataLoader workers can unpickle it.
    """
    if not absent:
        return processor_class(**parts)
    processor = processor_class.__new__(processor_class)
    processor.check_argument_for_proper_class = _accept
    processor_class.__init__(processor, **dict.fromkeys(absent), **parts)
    del processor.check_argument_for_proper_class
    processor.save_pretrained = partial(_save_pretrained, processor)
    return processor


def save_processor(processor: Any, folder: str | os.PathLike[str]) -> None:
    """Write tokenizer, image processor, chat template and settings to a folder that `load_processor` can read.

    This includes the settings of the video processor. A feature extractor goes into the same file as the image
    processor, because transformers reads both from there.
    """
    processor.image_processor.save_pretrained(folder)
    if type(processor).__name__ in OMNI:
        file = Path(folder, IMAGE_PROCESSOR)
        both = {**processor.feature_extractor.to_dict(), **_read(file)}
        file.write_text(json.dumps(both, indent=2, sort_keys=True), encoding="utf-8")
    _save_videos(processor, Path(folder))
    processor.tokenizer._set_processor_class(type(processor).__name__)  # as in transformers: its file names the class
    processor.tokenizer.save_pretrained(folder)
    _save_chat_template(processor.chat_template, Path(folder))
    if type(processor).__name__ not in QWEN:
        settings = json.dumps(settings_of(processor), indent=2, sort_keys=True)
        Path(folder, ALL_PARTS).write_text(settings, encoding="utf-8")


def _save_chat_template(template: str | Mapping[str, str] | None, folder: Path) -> None:
    """Write a processor's template, or several named ones, to the files where transformers looks for them.

    None: nothing is written here; the tokenizer has already written its own template.
    """
    named = template if isinstance(template, Mapping) else {} if template is None else {"default": template}
    for name, text in named.items():
        file = folder / ("chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja")
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")


def _save_videos(processor: Any, folder: Path) -> None:
    """Write the video processor, or only its settings if it was not loaded. Without them, another class would load."""
    if (part := getattr(processor, "video_processor", None)) is not None:
        part.save_pretrained(folder)
    elif settings := getattr(processor, "video_settings", None):
        file = folder / "video_preprocessor_config.json"
        file.write_text(json.dumps(settings, indent=2, sort_keys=True), encoding="utf-8")


def settings_of(processor: Any) -> dict[str, Any]:
    """Return a processor's settings as in `ProcessorMixin.to_dict`, without those of its parts."""
    plain = copy.copy(processor)
    ours = ("save_pretrained", "video_settings")
    plain.__dict__ = {name: value for name, value in vars(processor).items() if name not in ours}
    parts = processor.get_attributes()
    return {name: value for name, value in plain.to_dict().items() if name not in parts}


def _save_pretrained(processor: Any, save_directory: str | Path, push_to_hub: bool = False, **_: Any) -> None:
    """Call `save_processor` as transformers calls it: a processor's `push_to_hub` saves with this and then uploads."""
    if push_to_hub:
        raise ConfigError("save_pretrained(push_to_hub=True) is not supported here; call push_to_hub of the processor")
    save_processor(processor, save_directory)


def _accept(argument_name: str, argument: Any) -> None:
    return None


def is_saved_alone(source: str | os.PathLike[str]) -> bool:
    """Return whether a folder holds a processor but no model configuration, which would name its family."""
    folder = Path(source)
    parts = (IMAGE_PROCESSOR, ALL_PARTS)
    return not (folder / "config.json").is_file() and any((folder / name).is_file() for name in parts)


def _class_beside_model(source: str | os.PathLike[str]) -> type:
    """Return the class named in the processor's own files, as AutoProcessor does, or else the model family's class.

    The two may differ: Pixtral's model is a LLaVA, but its processor is not.
    """
    from transformers import AutoConfig, ProcessorMixin
    from transformers.image_processing_base import ImageProcessingMixin

    model_type = AutoConfig.from_pretrained(source).model_type
    model_type = WHOLE.get(model_type, model_type)
    if model_type not in WITH_PROCESSOR:
        raise FamilyError(f"no processor is known for {source}, a {model_type}; there are {', '.join(WITH_PROCESSOR)}")
    read = (ProcessorMixin.get_processor_dict, ImageProcessingMixin.get_image_processor_dict)
    named = (settings_in(source)[0].get("processor_class") for settings_in in read)
    families = (by_processor()[name] for name in named if name in by_processor())
    return next(families, WITH_PROCESSOR[model_type]).processor_class


def _class_saved_in(folder: Path) -> type:
    """Return the processor class that the folder's files name."""
    settings = [_read(folder / name) for name in (ALL_PARTS, IMAGE_PROCESSOR, TOKENIZER)]
    name = next((part["processor_class"] for part in settings if "processor_class" in part), None)
    if name is None:
        raise ConfigError(f"no file in {folder} names the processor's class; copy the config.json of its model into it")
    if name not in by_processor():
        raise FamilyError(
            f"{folder} holds a {name}, which no supported family has; there are {', '.join(by_processor())}"
        )
    return by_processor()[name].processor_class


def _read(path: Path) -> dict[str, Any]:
    """Read the settings in a file; {} if it does not exist."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); save the processor again") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} holds a {type(settings).__name__}, and no settings; save the processor again")
    return settings
