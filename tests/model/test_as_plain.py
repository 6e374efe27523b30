"""An enabled model behaves as the plain one in everything that is not packing: flags, configurations, generation."""

import pytest
import torch
from cases import pairs, slow
from equality import VISION
from transformers import modeling_utils

from vlmpack.errors import ConfigError
from vlmpack.families import family_named
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import pack
from vlmpack.model import enable_packing, is_packing
from vlmpack.testing import mixed_samples, padded, tiny_model

SMALL = {"layers": 2, "vision_depth": 1, "hidden": 48}
EAGER = {**SMALL, "attn_implementation": "eager"}
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
pytestmark = pytest.mark.filterwarnings("ignore:nothing is packed in this training step")
few = pytest.mark.parametrize(
    "family", ["qwen3_vl_moe", "lfm2_vl", *slow("qwen2_5_vl", "qwen3_5_moe", "gemma3", "gpt_oss")]
)


def pair(family, **sizes):
    """(plain, enabled): two models of the same weights."""
    plain, enabled = (tiny_model(family, seed=3, **{**SMALL, **sizes}) for _ in range(2))
    return plain, enable_packing(enabled)


def batch_of(model, side="right", *, labels=False):
    kinds = ("image", "text") if model.config.model_type in VISION else ("text", "text")
    batch = padded(mixed_samples(model.config, seed=4, kinds=kinds, side=(1, 2)), side, metadata=False).to_hf()
    return batch if labels else {name: x for name, x in batch.items() if name != "labels"}


def text_config(model):
    return family_named(model.config.model_type).text_config(model.config)


def on_samples(x, batch):
    """[B, S, ...] where the batch has no padding."""
    return x[batch["attention_mask"].bool()]


@pytest.mark.parametrize("said", ["argument", "configuration"])
@few
def test_hidden_states_come_as_they_do_without_packing(family, said):
    plain, enabled = pair(family)
    batch = batch_of(plain, "left")
    flags = {"output_hidden_states": True} if said == "argument" else {}
    for model in (plain, enabled):
        text_config(model).output_hidden_states = said == "configuration"
    ours, theirs = enabled(**batch, **flags).hidden_states, plain(**batch, **flags).hidden_states
    assert len(ours) == len(theirs) == SMALL["layers"] + 1
    for x, y in zip(ours, theirs, strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(on_samples(x, batch), on_samples(y, batch), **CLOSE)
        assert not x[batch["attention_mask"] == 0].any()


def test_hidden_states_of_a_row_are_those_of_its_tokens_and_have_gradients():
    plain, enabled = pair("qwen3_vl")
    batch = batch_of(plain)
    row = pack(padded(mixed_samples(plain.config, seed=4, kinds=("image", "text"), side=(1, 2)))).to_hf()
    ours = enabled(**row, output_hidden_states=True).hidden_states[1]
    theirs = plain(**batch, output_hidden_states=True).hidden_states[1]
    torch.testing.assert_close(ours[0], on_samples(theirs, batch), **CLOSE)
    gradients = []
    for states, model in ((ours[0], enabled), (on_samples(theirs, batch), plain)):
        states.square().sum().backward()
        gradients.append(model.get_input_embeddings().weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("said", ["argument", "configuration"])
@few
def test_attention_weights_come_from_the_plain_computation(family, said):
    plain, enabled = pair(family, **EAGER)
    batch = batch_of(plain)
    flags = {"output_attentions": True} if said == "argument" else {}
    for model in (plain, enabled):
        text_config(model).output_attentions = said == "configuration"
    ours, theirs = enabled(**batch, **flags), plain(**batch, **flags)
    assert torch.equal(ours.logits, theirs.logits)
    assert len(ours.attentions) == len(theirs.attentions) > 0
    assert all(map(torch.equal, ours.attentions, theirs.attentions))


def test_attention_weights_that_the_configuration_asks_for_are_not_left_out_of_a_row():
    _, enabled = pair("qwen3_vl", **EAGER)
    text_config(enabled).output_attentions = True
    row = pack(padded(mixed_samples(enabled.config))).to_hf()
    with pytest.raises(ConfigError, match=r"output_attentions, which the configuration asks for, cannot be had"):
        enabled(**row)


@pytest.mark.parametrize("labels", [False, True])
@few
def test_a_tuple_begins_as_it_does_without_packing(family, labels):
    plain, enabled = pair(family)
    batch = batch_of(plain, labels=labels)
    flags = {"output_router_logits": True} if FAMILIES[family].has("experts") else {}
    ours, theirs = (model(**batch, **flags, return_dict=False) for model in (enabled, plain))
    count = next(i for i, x in enumerate(theirs) if not isinstance(x, torch.Tensor))  # the cache, which no row has
    assert count > labels
    for x, y in zip(ours[:count], theirs[:count], strict=True):
        assert x.shape == y.shape
        both = [on_samples(z, batch) if z.ndim == 3 else z for z in (x, y)]
        torch.testing.assert_close(*both, **CLOSE)


@pairs(
    family=["qwen3_5_moe", "qwen3"], side=["right", "left"], columns=[3, 1, torch.tensor([2, 0]), torch.tensor([-1])]
)
def test_logits_to_keep_are_packed_and_stay_those_columns(family, side, columns):
    plain, enabled = pair(family)
    batch = batch_of(plain, side)
    tokens = []
    mlp = family_named(family).language_model(enabled).layers[0].mlp
    mlp.register_forward_pre_hook(lambda _, args: tokens.append(args[0].shape[:2].numel()))
    ours, theirs = (model(**batch, logits_to_keep=columns).logits for model in (enabled, plain))
    assert tokens == [int(batch["attention_mask"].sum())]
    assert ours.shape == theirs.shape
    real = batch["attention_mask"][:, columns if isinstance(columns, torch.Tensor) else slice(-columns, None)].bool()
    torch.testing.assert_close(ours[real], theirs[real], **CLOSE)
    assert not ours[~real].any()


@few
def test_attention_may_be_exchanged_at_any_time(family):
    plain, enabled = pair(family)
    batch = batch_of(plain, "left")
    for each in ("eager", "sdpa") if plain._supports_sdpa else ("eager",):
        for model in (plain, enabled):
            model.set_attn_implementation(each)
        for model in (plain, enabled):
            assert {part._attn_implementation for part in (model.config, text_config(model))} == {each}
        torch.testing.assert_close(*(on_samples(model(**batch).logits, batch) for model in (enabled, plain)), **CLOSE)
        generated = [m.eval().generate(**batch, max_new_tokens=3, do_sample=False) for m in (plain, enabled)]
        assert torch.equal(*generated)


def test_each_tower_may_have_an_attention_of_its_own(monkeypatch):
    plain, enabled = pair("qwen2_5_vl")
    warnings = []  # transformers warns where it does not find the tower of a configuration
    monkeypatch.setattr(modeling_utils.logger, "warning", warnings.append)
    for model in (plain, enabled):
        model.set_attn_implementation({"vision_config": "eager"})
    for model in (plain, enabled):
        configs = (model.config, model.config.text_config, model.config.vision_config)
        assert [config._attn_implementation for config in configs] == ["sdpa", "sdpa", "eager"]
    assert warnings == []


def test_a_saved_model_is_loaded_plain_by_the_class_of_an_enabled_one(tmp_path):
    plain, enabled = pair("qwen3_vl")
    enabled.save_pretrained(tmp_path)
    loaded = type(enabled).from_pretrained(tmp_path)
    assert type(loaded) is type(plain)
    assert not is_packing(loaded)
    batch = batch_of(plain)
    assert torch.equal(loaded.train()(**batch).logits, plain(**batch).logits)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.bfloat16().float(),
        lambda model: model.resize_token_embeddings(200, mean_resizing=False),
        lambda model: model.tie_weights(),
        lambda model: (model.gradient_checkpointing_enable(), model.gradient_checkpointing_disable()),
    ],
    ids=["conversions", "more tokens", "tied weights", "checkpointing on and off"],
)
def test_what_is_done_to_a_model_later_is_done_to_an_enabled_one(change):
    plain, enabled = pair("qwen3_vl")
    batch = batch_of(plain)
    for model in (plain, enabled):
        torch.manual_seed(0)
        change(model)
    torch.testing.assert_close(*(on_samples(model(**batch).logits, batch) for model in (enabled, plain)), **CLOSE)
