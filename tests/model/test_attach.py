"""enable_packing keeps the model the object it was. (What disable_packing leaves: test_contract_disable.)"""

import inspect
import pickle
import types

import pytest
import torch
from cases import one_of_each
from torch import nn

from vlmpack.context_parallel import Parallel
from vlmpack.errors import ConfigError, FamilyError
from vlmpack.families import family_of
from vlmpack.layout import SlotRule, pack
from vlmpack.model import PackedStep, StepConfig, disable_packing, enable_packing, is_packing
from vlmpack.testing import mixed_samples, padded, tiny_model
from vlmpack.testing.samples import random_sample


def test_of_several_models_none_is_picked():
    policy, reference = tiny_model("qwen3_vl"), tiny_model("qwen2_5_vl")
    with pytest.raises(ConfigError, match=r"a ModuleDict holds several models \(Qwen3VL\w+, Qwen2_5_VL\w+\): enable"):
        enable_packing(nn.ModuleDict({"policy": policy, "reference": reference}))
    assert not is_packing(policy)


def test_the_forward_names_what_a_row_brings_so_that_trainer_does_not_remove_it():
    parameters = inspect.signature(enable_packing(tiny_model("qwen3_vl")).forward).parameters
    assert {"cu_seqlens_q", "cu_seqlens_q_padded", "moe_padding_mask", "use_cache", "vlmpack"} <= set(parameters)
    own = inspect.signature(type(tiny_model("qwen3_vl")).forward).parameters
    assert [name for name in parameters if name in own] == [name for name in own if name != "self"]
    assert [name for name in parameters if "label" in name] == ["labels"]  # Trainer takes all of them for labels


def test_settings_are_a_step_config():
    with pytest.raises(ConfigError, match=r"config has to be a StepConfig, such as StepConfig\(.*\), got a dict"):
        enable_packing(tiny_model("qwen3_vl"), {"attention": "auto"})
    with pytest.raises(ConfigError, match=r"parallel has to be a Parallel, such as Parallel\(\), got a bool"):
        enable_packing(tiny_model("qwen3"), parallel=True)


def test_the_class_keeps_its_name_and_signature():
    model = tiny_model("qwen3_vl")
    own = type(model)
    enable_packing(model)
    assert isinstance(model, own)
    assert (type(model).__name__, type(model).__module__) == (own.__name__, own.__module__)
    assert bool(model.accepts_loss_kwargs) is True
    assert own.accepts_loss_kwargs is False


def test_a_step_with_other_settings_keeps_how_ranks_work_together():
    model = enable_packing(tiny_model("qwen3_vl"), parallel=Parallel())
    images = []
    model.model.visual.register_forward_hook(lambda *_: images.append("blank"))
    text = [random_sample(model.config, "text")]
    PackedStep(model, StepConfig(head_chunk=16))(padded(text))
    assert images == ["blank"]  # ranks with images would wait for a rank that calls no tower


def test_a_step_that_is_told_of_ranks_keeps_the_settings():
    model = enable_packing(tiny_model("qwen3_vl"), StepConfig(slots=SlotRule(multiple=8)))
    result = PackedStep(model, parallel=Parallel())(padded(mixed_samples(model.config)))
    assert all(slot % 8 == 0 for slot in result.segments.slots)
    assert result.segments.has_padding


def test_a_class_of_the_users_own_is_found_by_what_it_comes_from():
    model = tiny_model("qwen3_vl")
    own = type("Mine", (type(model),), {})
    model.__class__ = own
    batch = padded(mixed_samples(model.config)).to_hf()
    assert torch.equal(enable_packing(model)(**batch).loss, enable_packing(tiny_model("qwen3_vl"))(**batch).loss)
    assert type(disable_packing(model)) is own


def test_a_forward_or_a_loss_of_ones_own_is_refused():
    """Packed rows would go past both, and learn something else without a word."""
    model = tiny_model("qwen3_vl")
    model.__class__ = type("Mine", (type(model),), {"forward": lambda self, **inputs: None})
    with pytest.raises(ConfigError, match=r"Mine overrides the forward of Qwen3VLForConditionalGeneration"):
        enable_packing(model)
    assert not is_packing(model)
    model = enable_packing(tiny_model("qwen3_vl"))
    model.loss_function = lambda **_: torch.zeros(())
    with pytest.raises(ConfigError, match=r"loss_function of its own.*`del model._loss_function`"):
        model(**padded(mixed_samples(model.config)).to_hf())
    del model._loss_function
    assert torch.isfinite(model(**padded(mixed_samples(model.config)).to_hf()).loss)


def liger_patched(model, *, fused_linear_cross_entropy):
    """As `apply_liger_kernel_to_...(model=model)` does: methods are bound to the model's own norms and MLPs, and with
    its fused loss another forward to the model."""

    def bound(module, name):
        own = type(module).forward
        module.forward = types.MethodType(lambda self, *args, **kwargs: own(self, *args, **kwargs), module)
        module._get_name = lambda: name

    for layer in model.model.language_model.layers:
        bound(layer.mlp, "LigerSwiGLUMLP")
        bound(layer.input_layernorm, "LigerRMSNorm")
        bound(layer.post_attention_layernorm, "LigerRMSNorm")
    if fused_linear_cross_entropy:
        model.forward = types.MethodType(lambda self, **inputs: self.model(**inputs), model)
    return model


@pytest.mark.parametrize("first", ["Liger", "packing"])
def test_ligers_kernels_without_its_fused_loss_are_the_remedy_in_either_order(first):
    batch = padded(mixed_samples(tiny_model("qwen3_vl").config)).to_hf()
    expected = enable_packing(tiny_model("qwen3_vl"))(**batch).loss
    if first == "Liger":
        with pytest.raises(ConfigError, match=r"Liger: apply_liger_kernel_to_...\(model=model, fused_linear_cross_ent"):
            enable_packing(liger_patched(tiny_model("qwen3_vl"), fused_linear_cross_entropy=True))
        model = enable_packing(liger_patched(tiny_model("qwen3_vl"), fused_linear_cross_entropy=False))
    else:
        model = liger_patched(enable_packing(tiny_model("qwen3_vl")), fused_linear_cross_entropy=True)
        row = pack(padded(mixed_samples(model.config))).to_hf()
        del row["labels"]
        with pytest.raises(ConfigError, match=r"without passing through the packed forward.*Liger's fused cross-ent"):
            model(**row)
        model = liger_patched(enable_packing(tiny_model("qwen3_vl")), fused_linear_cross_entropy=False)
    assert torch.equal(model(**batch).loss, expected)


@pytest.mark.parametrize("first", ["Liger", "packing"])
def test_a_forward_that_replaces_the_classs_is_refused(first, monkeypatch):
    """As `apply_liger_kernel_to_...()` does without `model=`: the fused loss would be bypassed without a word."""
    model = tiny_model("qwen3_vl")
    if first == "packing":
        enable_packing(model)
    batch = padded(mixed_samples(model.config)).to_hf()
    monkeypatch.setattr(family_of(model).upstream_class(model), "forward", lambda self, **inputs: None)
    seen = r"class Qwen3VLForConditionalGeneration was replaced by that of .*test_attach.*Liger: apply_"
    with pytest.raises(ConfigError, match=seen):
        enable_packing(model)(**batch)
    monkeypatch.undo()
    assert torch.isfinite(enable_packing(model)(**batch).loss)


def test_a_wrapped_model_is_found():
    wrapped = nn.Sequential(tiny_model("qwen3_vl"))
    enable_packing(wrapped)
    assert is_packing(wrapped[0])
    with pytest.raises(
        FamilyError, match=r"no ...ForConditionalGeneration or ...ForCausalLM found in a Linear; give the model that"
    ):
        enable_packing(nn.Linear(2, 2))
    with pytest.raises(FamilyError, match=r"a str is no model; load it first"):
        enable_packing("Qwen/Qwen3-VL-2B-Instruct")


@pytest.mark.parametrize("family", one_of_each())
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_a_row_that_reaches_a_model_without_packing_is_refused(family):
    """It would be one sample to it, without a word."""
    model = tiny_model(family)
    if family == "qwen3_5_moe":
        model.gradient_checkpointing_enable()
    row = pickle.loads(pickle.dumps(pack(padded(mixed_samples(model.config))).to_hf()))
    row = {name: value.to("cpu") for name, value in row.items()}
    with pytest.raises(ConfigError, match=r"a packed row reached a model without.* enable_packing\(model\)"):
        model(**row)
    assert torch.isfinite(enable_packing(model)(**row).loss)
