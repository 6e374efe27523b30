"""Ways past the packed forward stay loud for gated delta layers too: samples that would run together are an error."""

import copy
import operator
import types

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from cases import slow
from equality import VISION
from parts import gated_delta_layers
from peft import LoraConfig, get_peft_model

from vlmpack.errors import ConfigError
from vlmpack.layout import SlotRule, pack
from vlmpack.model import PackedStep, disable_packing, enable_packing, is_packing
from vlmpack.testing import mixed_samples, padded, tiny_model

SMALL = {"layers": 2, "vision_depth": 1, "hidden": 48}
CHANGED = r"a \w+ no longer computes rows by their boundaries: its class or its forward was changed"
every_family = pytest.mark.parametrize("family", ["qwen3_5_moe", *slow("qwen2_5_vl", "gemma3", "lfm2_vl", "gpt_oss")])
every_delta_family = pytest.mark.parametrize("family", ["qwen3_5_moe", *slow("qwen3_next")])


def fresh(family):
    return tiny_model(family, seed=3, **SMALL)


def row_of(model, kinds=None):
    kinds = kinds or (("image", "text", "images") if model.config.model_type in VISION else ("text",) * 3)
    return pack(
        padded(mixed_samples(model.config, seed=4, kinds=kinds, side=(1, 2))), rule=SlotRule(multiple=4)
    ).to_hf()


def delta_layer(model):
    (layer,) = gated_delta_layers(model)
    return layer


def replaced(layer):
    """As kernels and `use_kernels` do."""
    layer.forward = types.MethodType(type(layer).__mro__[1].forward, layer)
    return lambda: delattr(layer, "forward")


def hooked(layer):
    """As accelerate does to spread or offload a model."""
    add_hook_to_module(layer, ModelHook())
    return lambda: remove_hook_from_module(layer)


def exchanged(layer):
    ours, layer.__class__ = type(layer), type(layer).__mro__[1]
    return lambda: setattr(layer, "__class__", ours)


@pytest.mark.parametrize("change", [replaced, hooked, exchanged])
@every_delta_family
def test_a_layer_that_was_changed_after_enabling_is_noticed(family, change):
    model = enable_packing(fresh(family))
    row = row_of(model)
    loss = model(**row).loss
    undo = change(delta_layer(model))
    with pytest.raises(ConfigError, match=rf"{CHANGED} after enable_packing \(use_kernels, a device_map"):
        model(**row)
    undo()
    if change is hooked:  # accelerate leaves the forward that it found on the object
        vars(delta_layer(model)).pop("forward", None)
    assert torch.equal(model(**row).loss, loss)


EXCHANGED = {
    "attention": lambda text, tower, new: setattr(text.layers[1], "self_attn", new.layers[1].self_attn),
    "a layer": lambda text, tower, new: operator.setitem(text.layers, 0, new.layers[0]),
    "past setattr": lambda text, tower, new: text.layers[1]._modules.update(self_attn=new.layers[1].self_attn),
    "all layers": lambda text, tower, new: setattr(text, "layers", new.layers),
    "a layer more": lambda text, tower, new: text.layers.append(new.layers[0]),
    "the dictionary": lambda text, tower, new: setattr(text.layers[0], "_modules", dict(new.layers[0]._modules)),
    "a configuration": lambda text, tower, new: setattr(text.layers[0].self_attn, "config", new.config),
    "one of another kind": lambda text, tower, new: setattr(text.layers[0].self_attn, "config", None),
    "in the tower": lambda text, tower, new: setattr(tower.blocks[0].attn, "config", tower.config._vlmpack_plain),
}


@pytest.mark.parametrize("is_copy", [False, True])
@pytest.mark.parametrize("change", EXCHANGED.values(), ids=EXCHANGED)
def test_attention_that_was_exchanged_between_two_steps_is_noticed(change, is_copy):
    model, plain = enable_packing(fresh("qwen3_vl")), fresh("qwen3_vl")
    row = row_of(model)
    loss = model(**row).loss
    model = copy.deepcopy(model) if is_copy else model
    assert torch.equal(model(**row).loss, loss)
    change(model.model.language_model, model.model.visual, plain.model.language_model)
    with pytest.raises(ConfigError, match="an attention layer was exchanged after enable_packing"):
        model(**row)


@pytest.mark.parametrize("change", [replaced, hooked])
@every_delta_family
def test_a_layer_that_was_changed_before_is_refused_and_nothing_is_half_done(family, change):
    model = fresh(family)
    layer = delta_layer(model)
    layer.__class__ = type(layer.__class__.__name__, (layer.__class__,), {})  # so that `replaced` finds a base
    classes = [type(module) for module in model.modules()]
    change(layer)
    with pytest.raises(
        ConfigError, match=r"was replaced on the object itself, so samples would leak.*without use_kernels"
    ):
        enable_packing(model)
    assert not is_packing(model)
    assert [type(module) for module in model.modules()] == classes


@every_family
def test_an_offloaded_model_is_refused(family):
    model = cpu_offload(fresh(family), execution_device=torch.device("cpu"))
    with pytest.raises(
        ConfigError, match=r"forward of this .* was replaced on the object itself.*without a device_map"
    ):
        enable_packing(model)
    assert not is_packing(model)


@every_delta_family
def test_a_layer_whose_class_changed_leaves_disabling_undone_as_a_whole(family):
    model = enable_packing(fresh(family))
    row, layer = row_of(model), delta_layer(model)
    loss = model(**row).loss
    ours = type(layer)
    layer.__class__ = type(f"FSDP{ours.__name__}", (ours,), {})  # as fully_shard does
    with pytest.raises(ConfigError, match="call disable_packing before sharding"):
        disable_packing(model)
    assert torch.equal(model(**row).loss, loss)
    layer.__class__ = ours
    assert not is_packing(disable_packing(model))


@pytest.mark.parametrize("known", ["metadata", "boundaries"])
@every_family
def test_a_backbone_that_is_called_directly_is_noticed(family, known):
    model = enable_packing(fresh(family))
    row = {name: x for name, x in row_of(model).items() if name not in ("labels", "moe_padding_mask")}
    row.pop("cu_seqlens_q" if known == "metadata" else "vlmpack")
    with pytest.raises(ConfigError, match=r"without passing through the packed forward.*its backbone called directly"):
        model.model(**row)


@every_delta_family
def test_a_gated_delta_layer_that_comes_first_notices_by_itself(family):
    """Layers with attention come later, and would find the samples mixed already."""
    model = enable_packing(fresh(family))
    hidden = torch.zeros(1, 8, SMALL["hidden"])
    with pytest.raises(ConfigError, match="without passing through the packed forward"):
        delta_layer(model)(hidden, cu_seqlens_q=torch.tensor([0, 4, 8]))


@every_delta_family
def test_layers_that_peft_copied_are_asked_in_its_place(family):
    """`modules_to_save` trains a copy of whole gated delta layers, of the class that they had."""
    config = LoraConfig(r=2, target_modules=r".*self_attn\.q_proj", modules_to_save=["linear_attn"])
    reference, model = (get_peft_model(fresh(family), config) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    row = row_of(model.get_base_model())
    expected = PackedStep(enable_packing(fresh(family)))(row).loss
    assert torch.isclose(PackedStep(model)(row).loss, expected, rtol=1e-6)
    disable_packing(model)
    wrapped = get_peft_model(enable_packing(fresh(family)), config)
    with pytest.raises(ConfigError, match=CHANGED):
        PackedStep(wrapped)(row)
