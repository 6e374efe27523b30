"""How a packed call reaches a back-end, and what is left of the model's own attention."""

import copy
import pickle

import pytest
import torch
from samples import mixed_samples, padded
from transformers import AttentionInterface, AutoModelForImageTextToText
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from vlmpack.families import FAMILIES
from vlmpack.families.tiny import tiny_model
from vlmpack.layout import SlotRule
from vlmpack.step import PackedStep, StepConfig, attention, disable_packing, enable_packing


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_under_autocast_every_back_end_is_asked_for_autocasts_dtype(family, monkeypatch):
    """Rotary positions leave q and k in float32 there, for which no flash kernel would ever be chosen."""
    model = enable_packing(tiny_model(family), StepConfig(slots=SlotRule(multiple=4)))
    calls, choose = [], attention.choose

    def spy(call, name):
        calls.append(call.dtype)
        return choose(call, name)

    monkeypatch.setattr(attention, "choose", spy)
    batch = padded(mixed_samples(model.config)).to_hf()
    with torch.autocast("cpu", torch.bfloat16):
        model(**batch)
    assert len(calls) == 4  # two blocks of each tower
    assert set(calls) == {torch.bfloat16}
    calls.clear()
    model(**batch)
    assert set(calls) == {torch.float32}


def test_an_attention_of_the_users_own_needs_no_mask_function(monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, "mine", sdpa_attention_forward)
    model = tiny_model("qwen3_vl")
    batch = padded(mixed_samples(model.config))
    expected = PackedStep(model)(batch).loss
    disable_packing(model).set_attn_implementation("mine")
    assert torch.equal(PackedStep(model)(batch).loss, expected)
    disable_packing(model)
    assert model.config.text_config._attn_implementation == "mine"


@pytest.mark.skipif(attention._NAME is str, reason="waits for torch 2.12: see `attention._NAME`")
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_a_new_model_can_be_made_of_a_copy_of_the_configuration(family, copied):
    """transformers refuses to make a model whose implementation has "flash" in its name and is no package's."""
    model = enable_packing(tiny_model(family))
    new = type(model).__mro__[1](copied(model.config))
    assert {part.config._attn_implementation for part in (new.model.language_model, new.model.visual)} == {"sdpa"}
    assert attention.is_installed(model.model.language_model, model.model.visual)


@pytest.mark.parametrize("backend", ["sdpa_segments", "eager_mask"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_nothing_but_padding_gives_every_parameter_the_gradient_that_other_ranks_wait_for(family, backend):
    model = tiny_model(family, layers=2)
    batch = padded(mixed_samples(model.config, kinds=("text",))).to_hf()
    settings = StepConfig(attention=backend, keep_empty=True, slots=SlotRule(pad_to=40))
    enable_packing(model, settings)(**batch).loss.backward()
    learnt = {name for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    nothing = torch.zeros(2, 5, dtype=torch.long)
    output = model(input_ids=nothing, attention_mask=nothing, labels=nothing - 100)
    output.loss.backward()
    assert output.loss == 0
    assert any("self_attn" in name for name in learnt)
    assert learnt == {name for name, p in model.named_parameters() if p.grad is not None and not p.grad.any()}


def test_where_copies_of_a_configuration_keep_our_name_a_new_model_is_told_its_attention(monkeypatch):
    monkeypatch.setattr(attention, "_NAME", str)  # as with torch before 2.12
    config = copy.deepcopy(enable_packing(tiny_model("qwen3_vl")).config)
    assert config.vision_config._attn_implementation == "vlmpack_flash|sdpa"
    new = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").config
    assert {part._attn_implementation for part in (new, new.text_config, new.vision_config)} == {"sdpa"}
