"""A descriptor is compared with the model's own code: masks of its layers, what it does after its head, positions."""

import copy
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parts import parts_of
from transformers.models.mistral import modeling_mistral

from vlmpack.attention.patterns import LayerMask, Pattern
from vlmpack.errors import FamilyError
from vlmpack.families.family import plain_logits
from vlmpack.families.registry import FAMILIES
from vlmpack.families.text import capped_logits, divided_logits, multiplied_logits
from vlmpack.layout import pack
from vlmpack.model import PackedStep, disable_packing, enable_packing
from vlmpack.model.mechanisms.attention import layer_masks, with_chunk
from vlmpack.model.mechanisms.upstream import SAMPLE, check_logits
from vlmpack.testing import mixed_samples, padded, tiny_model

WINDOWS = {"gemma2": [5, None, 5], "mistral": [5, 5, 5], "qwen3": [None, None, None], "qwen3_5": [None]}


@pytest.mark.parametrize(("name", "windows"), WINDOWS.items())
def test_the_window_of_every_attention_layer_is_measured_and_compared(name: str, windows: list[int | None]) -> None:
    model = tiny_model(name, layers=3)
    before = dict(vars(model.config.get_text_config()))
    found = layer_masks(parts_of(model))
    assert dict(vars(model.config.get_text_config())) == before
    assert list(found.values()) == [LayerMask(window=window) for window in windows]
    for layer, mask in found.items():
        pattern = Pattern(window=mask.window)
        assert with_chunk(found, pattern, layer) is pattern
        for wrong in {4, 6, 4096, None} - {mask.window}:
            with pytest.raises(FamilyError, match=rf"layer {layer} calls attention with sliding_window={wrong}, but"):
                with_chunk(found, Pattern(window=wrong), layer)
    with pytest.raises(FamilyError, match="layer 7 gets no mask"):
        with_chunk(found, Pattern(), 7)


def test_layers_whose_place_has_another_mask_than_their_number_are_refused() -> None:
    model = tiny_model("gemma3_text", layers=2)
    model.model.layers = model.model.layers[::-1]
    with pytest.raises(FamilyError, match=r"layer 1 calls attention .*=None, .*its layers were reordered"):
        PackedStep(model)({"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.ones(1, 3)})


@pytest.mark.parametrize("window", [1, 2, 131072])
def test_windows_of_any_length_are_known(window: int) -> None:
    model = tiny_model("mistral", layers=1)
    model.config.sliding_window = window
    assert layer_masks(parts_of(model)) == {0: LayerMask(window=window)}


OTHER_MASKS: dict[str, Callable[[Any, Any], Any]] = {
    "chunks, and the first token": lambda query, key: (key <= query) & ((key // 4 == query // 4) | (key == 0)),
    "a window, and the first tokens": lambda query, key: (key <= query) & ((query - key < 3) | (key < 4)),
    "every other token": lambda query, key: (key <= query) & ((query - key) % 2 == 0),
    "the token after it": lambda query, key: key <= query + 1,
    "not itself": lambda query, key: key < query,
    "a window on both sides": lambda query, key: (query - key).abs() < 3,
}


@pytest.mark.parametrize("mask", OTHER_MASKS.values(), ids=OTHER_MASKS)
def test_masks_of_another_kind_are_refused(mask: Callable[[Any, Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    at = torch.arange(SAMPLE.total)
    dense = mask(at[:, None], at)[None, None]
    monkeypatch.setattr(modeling_mistral, "create_sliding_window_causal_mask", lambda config, **inputs: dense)
    with pytest.raises(FamilyError, match="layer 0 attends to other tokens than those before them"):
        enable_packing(tiny_model("mistral", layers=1))


@pytest.mark.parametrize("name", [name for name in ("llama4_text", "gemma3_text") if name in FAMILIES])
def test_a_mask_is_measured_on_the_host_wherever_the_model_lies(name: str) -> None:
    """Masks of chunks hold a tensor of the padding, which is on the device of the embeddings."""
    model = tiny_model(name)
    assert layer_masks(parts_of(copy.deepcopy(model).to("meta"))) == layer_masks(parts_of(model))


def test_a_layer_that_calls_attention_with_another_window_than_its_mask_is_an_error_at_the_first_row() -> None:
    model = enable_packing(tiny_model("gemma2", layers=2))
    row = pack(padded(mixed_samples(model.config, seed=5, kinds=("text",))))
    PackedStep(model)(row)
    model.model.layers[0].self_attn.sliding_window = 4
    with pytest.raises(FamilyError, match=r"layer 0 calls attention with sliding_window=4, but .* has 5"):
        PackedStep(model)(row)


RULES = {
    "gemma2": capped_logits,
    "cohere2": multiplied_logits,
    "granite": divided_logits,
    "qwen3_5_moe": plain_logits,
    "gpt_oss": plain_logits,
}


@pytest.mark.parametrize(("name", "rule"), RULES.items())
def test_what_a_model_does_to_its_logits_is_in_its_descriptor(name: str, rule: Any) -> None:
    parts = parts_of(tiny_model(name, layers=1))
    modules = [*parts.core.modules()]
    assert parts.family.logits is rule
    check_logits(parts)
    settings = {"final_logit_softcapping": 3.0, "logit_scale": 0.25, "logits_scaling": 3.0}
    for key, value in settings.items():
        setattr(parts.core.config.get_text_config(), key, value)
    for wrong in {*RULES.values()} - {rule}:
        with pytest.raises(FamilyError, match="makes a logit of"):
            check_logits(replace(parts, family=replace(parts.family, logits=wrong)))
    assert [*parts.core.modules()] == modules


def test_a_model_that_changes_hidden_states_before_its_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def halved(self: Any, input_ids: torch.Tensor, **inputs: Any) -> Any:
        hidden = self.model(input_ids, **inputs).last_hidden_state
        return SimpleNamespace(logits=self.lm_head(hidden / 2))

    parts = parts_of(tiny_model("llama", layers=1))
    monkeypatch.setattr(type(parts.core), "forward", halved)
    with pytest.raises(FamilyError, match="changes hidden states before its head"):
        check_logits(parts)


def test_a_model_that_transformers_itself_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it was with Llama 4 and images in 5.24.0."""

    def failing(self: Any, input_ids: torch.Tensor, **inputs: Any) -> Any:
        return self.model(input_ids, **inputs).image_outputs.pooler_output

    parts = parts_of(tiny_model("llama", layers=1))
    monkeypatch.setattr(type(parts.core), "forward", failing)
    with pytest.raises(FamilyError, match=r"a LlamaForCausalLM fails by itself .*'pooler_output'.*another version"):
        check_logits(parts)


@pytest.mark.parametrize(
    ("family", "setting", "value", "seen"),
    [
        ("gemma2", "sliding_window", 3, "sliding_window=5, but .* has 3"),
        ("gemma3_text", "use_bidirectional_attention", True, "attends to other tokens"),
    ],
)
def test_masks_that_are_changed_after_packing_was_enabled_are_seen(
    family: str, setting: str, value: Any, seen: str
) -> None:
    """Gemma's layers pass the window that they were made with, which does not show it."""
    model = enable_packing(tiny_model(family))
    step, batch = PackedStep(model), padded(mixed_samples(model.config))
    step(batch)
    setattr(model.config, setting, value)
    with pytest.raises(FamilyError, match=seen):
        step(batch)


def test_a_mask_function_that_is_replaced_after_packing_was_enabled_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enable_packing(tiny_model("mistral"))
    step, batch = PackedStep(model), padded(mixed_samples(model.config))
    step(batch)
    everything = torch.ones(1, 1, SAMPLE.total, SAMPLE.total, dtype=torch.bool)
    monkeypatch.setattr(modeling_mistral, "create_sliding_window_causal_mask", lambda config, **inputs: everything)
    with pytest.raises(FamilyError, match="attends to other tokens"):
        step(batch)


def test_chunks_that_are_changed_after_packing_was_enabled_are_those_of_the_model() -> None:
    model = enable_packing(tiny_model("llama4_text"))
    step, batch = PackedStep(model), padded(mixed_samples(model.config))
    before = step(batch).loss
    model.config.attention_chunk_size = 3
    after = step(batch).loss
    assert after != before
    assert after.item() == pytest.approx(disable_packing(model)(**batch.to_hf()).loss.item(), rel=1e-5)
