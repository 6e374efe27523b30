"""A model's family, or the reason why it cannot be packed."""

import re
from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import EIGHT, families
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from vlmpack.errors import FamilyError
from vlmpack.families import family_named, family_of, registry
from vlmpack.families.registry import FAMILIES, check_parts
from vlmpack.testing import tiny_model

CLASSES = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
"""What the classes of transformers for text models, and for models with vision, make of each `model_type`."""
EXPECTED = {name: CLASSES[name] for name in FAMILIES}


def refusal(model: Any) -> str:
    with pytest.raises(FamilyError) as caught:
        family_of(model)
    return str(caught.value)


def of_type(model_type: str) -> Any:
    return SimpleNamespace(config=SimpleNamespace(model_type=model_type))


@pytest.mark.parametrize("name", families())
def test_a_model_is_of_its_family(name: str) -> None:
    model = tiny_model(name)
    family = family_of(model)
    assert family is FAMILIES[name]
    assert family.model_class == EXPECTED[name] == type(model).__name__
    assert family.model_type == name
    assert family == family_named(name)


@pytest.mark.parametrize(
    ("model_type", "leaks"),
    [
        ("qwen2_5_omni", "pack model.thinker"),
        ("mllama", "cross-attention layers take one mask over all images"),
        ("idefics", "cross-attention layers take one mask over all images"),
        ("florence2", "encoder attends in both directions"),
        ("instructblip", "Q-Former reads images and instructions"),
        ("diffusion_gemma", "objective is no next-token loss"),
        ("nemotron_h_omni", "Mamba layers carry state along the row"),
        ("phi4_multimodal", "longrope"),
        ("qwen3_omni_moe", "load the Qwen3OmniMoeThinkerForConditionalGeneration"),
    ],
)
def test_a_family_that_would_leak_is_refused_with_what_leaks(model_type: str, leaks: str) -> None:
    text = refusal(of_type(model_type))
    assert text.startswith(model_type)
    assert leaks in text
    assert "supported: qwen2_vl, qwen2_5_vl, qwen3_vl" in text


@pytest.mark.parametrize("model_type", ["gemma", "olmoe", "qwen3_vl_text", "qwen2_moe", ""])
def test_an_unknown_family_is_refused_with_those_that_are_known(model_type: str) -> None:
    text = refusal(of_type(model_type))
    assert "unknown family" in text
    assert "supported: qwen2_vl, qwen2_5_vl, qwen3_vl" in text


@pytest.mark.parametrize("thing", [torch.nn.Linear(2, 3), None, SimpleNamespace(config={"model_type": "qwen3_vl"})])
def test_what_is_no_hugging_face_model_is_refused(thing: Any) -> None:
    text = refusal(thing)
    assert type(thing).__name__ in text
    assert "no config.model_type" in text
    assert "unwrapped" in text


def test_a_compiled_model_is_refused() -> None:
    compiled = torch.compile(tiny_model("qwen3_vl"), backend="eager")
    assert re.search("OptimizedModule .*enable packing before compiling", refusal(compiled))


@pytest.mark.parametrize("name", EIGHT)
def test_frequencies_that_change_with_the_longest_sample_are_refused(name: str) -> None:
    model = tiny_model(name)
    text_config = family_of(model).text_config(model.config)
    for static in ("yarn", "linear", "default"):
        text_config.rope_parameters = {**text_config.rope_parameters, "rope_type": static}
        family_of(model)
    for kind in ("dynamic", "longrope"):
        text_config.rope_parameters = {**text_config.rope_parameters, "rope_type": kind}
        assert f"rope_type is '{kind}'" in refusal(model)


def test_frequencies_of_each_kind_of_layer_are_looked_at() -> None:
    model = tiny_model("gemma3_text")
    model.config.rope_parameters["full_attention"] = {"rope_type": "dynamic", "factor": 2.0}
    assert "rope_type is 'dynamic'" in refusal(model)


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("qwen3_5", {"mechanisms": {}}, "its layers have linear_attn, parts of gated_delta, which would leak"),
        ("qwen3_vl", {"vision_path": "model.vision"}, "it has no part 'model.vision'"),
        ("qwen3_vl", {"media": ("pixel_values", "audio_values")}, "its backbone takes no audio_values"),
    ],
)
def test_a_model_that_is_not_as_described_is_refused(name: str, change: dict[str, Any], problem: str) -> None:
    with pytest.raises(FamilyError, match=rf"is not as {name} is described: {problem}"):
        check_parts(replace(FAMILIES[name], **change), tiny_model(name))


def test_a_family_of_a_newer_transformers_is_refused_with_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = replace(FAMILIES["llama"], model_type="llama_next", oldest_transformers=(99, 1))
    monkeypatch.setattr(registry, "DESCRIBED", (*registry.DESCRIBED, newer))
    with pytest.raises(FamilyError, match=rf"transformers {version('transformers')} is installed, .* from 99\.1 on"):
        family_named("llama_next")
