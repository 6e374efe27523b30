"""How a packed call reaches a back-end, and what is left of the model's own attention."""

import pytest
import torch
from samples import mixed_samples, padded
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

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
