"""The family of a model; and for model types that cannot be packed exactly, the part that would leak."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from typing import Any, cast

from torch import nn

from vlmpack.errors import FamilyError
from vlmpack.families.family import TRANSFORMERS, Family
from vlmpack.families.gemma import GEMMA
from vlmpack.families.grids import GRIDS
from vlmpack.families.llama import LLAMA
from vlmpack.families.omni import OMNI
from vlmpack.families.qwen import QWEN
from vlmpack.families.text import TEXT
from vlmpack.families.tiled import TILED

DESCRIBED = (*QWEN, *OMNI, *GRIDS, *TILED, *GEMMA, *LLAMA, *TEXT)
"""All descriptors, also those for a newer transformers."""
FAMILIES: dict[str, Family] = {
    family.model_type: family for family in DESCRIBED if family.oldest_transformers <= TRANSFORMERS
}
"""The families that vlmpack supports with the installed transformers, by `config.model_type`."""

_TALKER = (
    "its talker and its vocoder are trained on other objectives, of which a row has no targets; pack model.thinker, or "
    "load the {0}, which reads the same checkpoint"
)

_CROSS = "its cross-attention layers take one mask over all images of a call, so samples would see each other's images"
_ENCODER = "its encoder attends in both directions over a whole call, with padding masks alone between samples"
_QFORMER = "its Q-Former reads images and instructions of a call as one batch, which a row has no place for"
_MAMBA = "its Mamba layers carry state along the row, and nothing restarts it at a boundary"
_DIFFUSION = "its objective is no next-token loss: noise is drawn for whole blocks of a call"
_LONGROPE = "its rotary frequencies (longrope) change with the longest sample of a call"
_MAMBAS = ("nemotron_h_omni", "nemotron_h", "bamba", "jamba", "falcon_h1", "granitemoehybrid", "zamba2")

_REFUSED = {
    "qwen2_5_omni": _TALKER.format("Qwen2_5OmniThinkerForConditionalGeneration"),
    "qwen3_omni_moe": _TALKER.format("Qwen3OmniMoeThinkerForConditionalGeneration"),
    **dict.fromkeys(("mllama", "idefics"), _CROSS),
    **dict.fromkeys(("florence2", "t5gemma2", "udop", "pix2struct", "vision-encoder-decoder"), _ENCODER),
    **dict.fromkeys(("blip-2", "instructblip", "instructblipvideo"), _QFORMER),
    **dict.fromkeys(_MAMBAS, _MAMBA),
    **dict.fromkeys(("diffusion_gemma", "pi0"), _DIFFUSION),
    "phi4_multimodal": _LONGROPE,
}
"""Model types that vlmpack refuses, with the reason."""

_ROPE_BY_LENGTH = ("dynamic", "longrope")
"""Rope types whose frequencies depend on the largest position of the whole call (`dynamic_rope_update`)."""


def is_classifier(model: nn.Module) -> bool:
    """Return whether a model has one of transformers' classification heads (reward models)."""
    return any(cls.__name__ in CLASSIFIERS for cls in type(model).__mro__)


def is_backbone(model: nn.Module) -> bool:
    """Return whether a model is one without a head, as `AutoModel` loads it (embedding models)."""
    return _backbone_class(model) is not None


def has_lm_head(model: nn.Module) -> bool:
    """Return whether a model has the language-model head of its family, and so a loss over tokens."""
    return not (is_classifier(model) or is_backbone(model))


def _backbone_class(model: nn.Module) -> str | None:
    """Return the name of the model's class without a head, as `AutoModel` has it; None: the model has a head."""
    from transformers import MODEL_MAPPING

    known: Any = MODEL_MAPPING.get(cast(Any, type(getattr(model, "config", None))), None)
    name = "" if known is None else known.__name__
    return name if name.endswith("Model") and _is_a(model, name) else None


def _is_a(model: nn.Module, class_name: str) -> bool:
    return any(cls.__name__ == class_name for cls in type(model).__mro__)


CLASSIFIERS = ("GenericForSequenceClassification", "GenericForTokenClassification")
"""Names of transformers' generic classifiers, which are not imported here. All families share their forward pass: it
calls the backbone, and scores hidden states."""


def family_of(model: Any) -> Family:
    """Return the family of a Hugging Face model with a language-model or classification head, or without a head.

    The family is found by `config.model_type`. Pass the model itself, not a PEFT, DDP or compiled wrapper around it.

    Raises:
        FamilyError: the family is unknown or would leak (the message names the part), the model is of another class or
            inside a wrapper, or its rotary frequencies change with the length of the input.
    """
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    if not isinstance(model_type, str):
        raise FamilyError(
            f"{type(model).__name__} has no config.model_type, so its family is not known; hand over the Hugging Face "
            f"model itself, unwrapped ({_supported()})"
        )
    family = family_named(model_type)
    if (name := _backbone_class(model)) is not None:
        family = family.headless(name)
    elif not is_classifier(model) and not _is_a(model, family.model_class):
        raise FamilyError(
            f"the model is a {type(model).__name__} but {model_type} is packed as a {family.model_class}; unwrap it "
            "(peft: model.get_base_model(), ddp: model.module, torch.compile: enable packing before compiling), or "
            "load it with its head (AutoModelForImageTextToText)"
        )
    rope = getattr(family.text_config(config), "rope_parameters", None) or {}
    kinds = [settings.get("rope_type") for settings in (rope, *rope.values()) if isinstance(settings, dict)]
    if kind := next((kind for kind in kinds if kind in _ROPE_BY_LENGTH), None):
        raise FamilyError(
            f"{model_type}: rope_type is {kind!r} in its text configuration, whose frequencies change with the longest "
            "sample of a call, so that a long sample would change the others of its row; use 'yarn', 'linear' or "
            "'default'"
        )
    return family


def family_named(model_type: str) -> Family:
    """Return the family with this `config.model_type`.

    Raises:
        FamilyError: the family is unknown, would leak (the message names the part), or needs a newer transformers.
    """
    if model_type in _REFUSED:
        raise FamilyError(f"{model_type} cannot be packed exactly yet: {_REFUSED[model_type]} ({_supported()})")
    described = {family.model_type: family for family in DESCRIBED}
    if model_type not in described:
        raise FamilyError(f"{model_type}: unknown family ({_supported()})")
    if model_type not in FAMILIES:
        oldest = ".".join(map(str, described[model_type].oldest_transformers))
        raise FamilyError(
            f"{model_type}: transformers {version('transformers')} is installed, but vlmpack supports this family from "
            f"{oldest} on, with which it was tested; upgrade transformers"
        )
    return FAMILIES[model_type]


@cache
def by_processor() -> dict[str, Family]:
    """Return the first family with each class of processor, by the name of the class."""
    return {family.processor: family for family in reversed(FAMILIES.values()) if family.has_vision}


def family_of_processor(processor: Any) -> Family:
    """Return the first family with this class of processor.

    Families with the same class write images and videos in the same way.

    Raises:
        FamilyError: no family has this class of processor.
    """
    for cls in type(processor).__mro__:
        if cls.__name__ in by_processor():
            return by_processor()[cls.__name__]
    raise FamilyError(
        f"no supported family has a {type(processor).__name__}, only {', '.join(sorted(by_processor()))}; pass the "
        "model's own processor (AutoProcessor), not its image processor, or the tokenizer of a text model"
    )


def check_parts(family: Family, model: Any) -> None:
    """Compare a family's descriptor with a model.

    Raises:
        FamilyError: the model lacks a part that the descriptor names, or its layers have a part that the descriptor
            does not name.
    """
    if problems := list(_differences(family, model)):
        raise FamilyError(
            f"this {type(model).__name__} is not as {family.model_type} is described: {'; '.join(problems)}. Use a "
            "transformers of the supported range, and an unmodified model"
        )


def _differences(family: Family, model: Any) -> Iterator[str]:
    audio_path = None if family.audio is None else family.audio.path
    head_path = family.head_path if has_lm_head(model) else None
    for path in (family.backbone_path, family.text_path, family.vision_path, audio_path, head_path):
        if path is not None and not _has(model, path):
            yield f"it has no part {path!r}"
            return
    tower = family.vision_tower(model)
    if tower is not None and not _has(tower, family.blocks_path):
        yield f"its vision part has no part {family.blocks_path!r}"
    backbone = model if family.backbone_path is None else family.backbone(model)
    parameters = inspect.signature(type(backbone).forward).parameters
    taken = [*family.media, *(name for name in (family.token_types, family.expert_types) if name is not None)]
    if missing := [name for name in taken if name not in parameters]:
        yield f"its backbone takes no {', '.join(missing)}"
    layers = list(family.language_model(model).get_submodule("layers").children())
    for other in FAMILIES.values():
        for mechanism, parts in other.mechanisms.items():
            names = [name for part, name in parts.items() if part != "router" and name not in _IN_EVERY_LAYER]
            if not family.has(mechanism) and any(_has(layer, name) for layer in layers for name in names):
                yield f"its layers have {', '.join(names)}, parts of {mechanism}, which would leak"
                return


_IN_EVERY_LAYER = ("self_attn", "mlp", "feed_forward")


def _has(module: nn.Module, path: str) -> bool:
    try:
        module.get_submodule(path)
    except AttributeError:
        return False
    return True


def _supported() -> str:
    return "supported: " + ", ".join(FAMILIES)
