"""How a packed call reaches a back-end, and what is left of the model's own attention."""

import copy
import functools
import pickle
import sys

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from vlmpack.errors import BackendError, ConfigError
from vlmpack.layout import SlotRule
from vlmpack.model import PackedStep, StepConfig, disable_packing, enable_packing
from vlmpack.model.mechanisms import attention
from vlmpack.testing import alone, mixed_samples, padded, tiny_model


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_under_autocast_every_back_end_is_asked_for_autocasts_dtype(family, monkeypatch):
    """Rotary positions leave q and k in float32 there, for which no flash kernel would ever be chosen."""
    model = enable_packing(tiny_model(family), StepConfig(slots=SlotRule(multiple=4)))
    calls, choose = [], attention.choose

    def spy(call, name, **more):
        calls.append(call.dtype)
        return choose(call, name, **more)

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


@pytest.mark.parametrize(
    "made",
    [
        lambda model: type(model)(model.config),
        lambda model: type(model)._from_config(model.config),
        lambda model: type(model)(copy.deepcopy(model.config)),
        lambda model: type(model)(pickle.loads(pickle.dumps(model.config))),
        lambda model: type(model.model)(model.config),
        lambda model: type(model.model.language_model)(model.model.language_model.config),
        lambda model: type(model.model.visual)(copy.deepcopy(model.model.visual.config)),
    ],
    ids=["class", "from_config", "copy", "pickle", "backbone", "text model", "tower"],
)
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_a_second_model_of_the_configuration_of_an_enabled_one_is_a_plain_model(family, made):
    """A reference model, an average of weights: as if packing had never been enabled on the first."""
    model, plain = enable_packing(tiny_model(family)), tiny_model(family)
    new, expected = made(model), made(plain)
    assert [type(module) for module in new.modules()] == [type(module) for module in expected.modules()]
    names = [
        [vars(module)["config"]._attn_implementation for module in each.modules() if "config" in vars(module)]
        for each in (new, expected)
    ]
    assert names[0] == names[1]
    assert set(names[0]) == {"sdpa"}
    assert getattr(new, "accepts_loss_kwargs", None) == getattr(expected, "accepts_loss_kwargs", None)


@pytest.mark.parametrize("part", ["text layer", "tower"])
def test_the_configuration_of_a_layer_is_used_as_if_packing_were_not_enabled(part):
    model, plain = enable_packing(tiny_model("qwen3_vl")), tiny_model("qwen3_vl").config
    inner = model.model.visual if part == "tower" else model.model.language_model.layers[0].self_attn
    mine, expected = inner.config, plain.vision_config if part == "tower" else plain.text_config
    assert mine == expected
    assert expected == mine
    assert mine.to_dict() == expected.to_dict()
    assert repr(mine) == repr(expected)
    assert isinstance(mine, type(expected))
    made = type(mine)(**mine.to_dict())
    assert type(made) is type(expected)
    assert made.to_dict() == type(expected)(**expected.to_dict()).to_dict()


def test_a_text_model_is_not_made_of_the_configuration_of_a_layer():
    """It would store the layer's name in the configuration that both share, and build no masks."""
    model = enable_packing(tiny_model("qwen3_vl"))
    text = model.model.language_model
    batch = padded(mixed_samples(model.config)).to_hf()
    loss = model(**batch).loss
    with pytest.raises(ConfigError, match=r"Qwen3VLTextConfig is that of a layer with packing enabled.*copy\.copy"):
        type(text)(text.layers[0].self_attn.config)
    assert torch.equal(model(**batch).loss, loss)
    assert type(text)(copy.copy(text.layers[0].self_attn.config)).config._attn_implementation == "sdpa"


# ---------------------------------------------------------------------- what packed attention does not compute


def implementation(name, part="text_config"):
    return lambda model: model.set_attn_implementation({part: name})


OTHER_ATTENTION = {
    "not causal by configuration": (
        lambda model: setattr(model.config.text_config, "is_causal", False),
        r"is_causal is False in the model's Qwen2VLTextConfig",
    ),
    "not causal by the whole configuration": (
        lambda model: setattr(model.config, "is_causal", False),
        r"is_causal is False in the model's Qwen2VLConfig",
    ),
    "not causal by a layer": (
        lambda model: setattr(model.model.language_model.layers[1].self_attn, "is_causal", False),
        r"is_causal is False on a Qwen2VLAttention, but packed attention is causal.*Set it to True",
    ),
    "a function of one's own": (
        implementation("softcapped"),
        r"'softcapped' of a Qwen2VLAttention is a function of your own \(.*softcapped\).*\"sdpa\"",
    ),
    "a function of one's own in the tower": (
        implementation("softcapped", "vision_config"), r"'softcapped' of a VisionAttention is a function of your own",
    ),
    "a wrapper that took the name of what it wraps": (
        implementation("wrapped"), r"'wrapped' of a Qwen2VLAttention is a function of your own",
    ),
    "an object that is called": (
        implementation("called"), r"'called' of a Qwen2VLAttention is a function of your own \(.*SoftCapped\)",
    ),
    "a function of transformers with a setting": (
        implementation("with a setting"), r"'with a setting' of a Qwen2VLAttention is a function of your own",
    ),
}  # fmt: skip


@pytest.fixture
def softcapped_attention(monkeypatch):
    def softcapped(*args, **kwargs):
        out, weights = sdpa_attention_forward(*args, **kwargs)
        return out.tanh(), weights

    class SoftCapped:
        def __call__(self, *args, **kwargs):
            return softcapped(*args, **kwargs)

    functions = {
        "softcapped": softcapped,
        "wrapped": functools.wraps(sdpa_attention_forward)(lambda *args, **kwargs: softcapped(*args, **kwargs)),
        "called": SoftCapped(),
        "with a setting": functools.partial(sdpa_attention_forward, softcap=2.0),
    }
    for name, function in functions.items():
        monkeypatch.setitem(AttentionInterface._global_mapping, name, function)
        monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, sdpa_mask)


@pytest.mark.usefixtures("softcapped_attention")
@pytest.mark.parametrize(("change", "message"), OTHER_ATTENTION.values(), ids=OTHER_ATTENTION)
def test_attention_that_no_back_end_computes_is_refused_before_and_after_enabling(change, message):
    batch = padded(mixed_samples(tiny_model("qwen2_vl").config)).to_hf()
    model = tiny_model("qwen2_vl")
    classes = [type(module) for module in model.modules()]
    change(model)
    with pytest.raises(ConfigError, match=message):
        enable_packing(model)
    assert [type(module) for module in model.modules()] == classes, "nothing is half done"
    model = enable_packing(tiny_model("qwen2_vl"))
    change(model)
    with pytest.raises(ConfigError, match=message):
        model(**batch)


@pytest.mark.parametrize("calls", [True, False], ids=["calls the function", "calls none"])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_next"])
def test_a_forward_of_ones_own_on_a_layer_has_to_call_the_attention_function(family, calls):
    """One that only surrounds the layer's own forward is as good as that."""
    model = tiny_model(family)
    batch = padded(mixed_samples(model.config, kinds=("text", "text"))).to_hf()
    expected = PackedStep(model)(batch).loss
    layer = next(module for module in model.modules() if "is_causal" in vars(module) and "layer_idx" in vars(module))
    own = layer.forward
    if calls:
        layer.forward = lambda *args, **kwargs: own(*args, **kwargs)
        assert torch.equal(model(**batch).loss, expected)
        return
    layer.forward = lambda hidden_states, **_: (hidden_states.cumsum(1), None)
    with pytest.raises(ConfigError, match=r"Attention has a custom forward that does not call"):
        model(**batch)


class Cumulated(torch.nn.Module):
    """Attends to nothing, but adds up all tokens before each."""

    def forward(self, hidden_states, **_):
        return hidden_states.cumsum(1), None


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_what_stands_in_the_place_of_attention_has_to_call_it_too(family):
    model = tiny_model(family)
    batch = padded(mixed_samples(model.config)).to_hf()
    model.model.language_model.layers[1].self_attn = Cumulated()
    with pytest.raises(ConfigError, match=r"a Cumulated has a custom forward that does not call"):
        PackedStep(model)(batch)


def test_eager_attention_that_was_patched_is_a_function_of_ones_own(monkeypatch):
    model = tiny_model("qwen3", attn_implementation="eager")
    monkeypatch.setattr(sys.modules[type(model).__module__], "eager_attention_forward", lambda *_, **__: None)
    with pytest.raises(ConfigError, match="'eager' of a Qwen3Attention is a function of your own"):
        enable_packing(model)


@pytest.mark.usefixtures("softcapped_attention")
def test_sparse_attention_calls_a_function_of_ones_own_as_the_plain_model_does():
    model = tiny_model("qwen4_exp", layers=4)
    model.set_attn_implementation({"text_config": "softcapped"})
    samples = mixed_samples(model.config, kinds=("text", "text"))
    with torch.no_grad():
        expected = [model(**alone(sample)).loss for sample in samples]
        found = enable_packing(model)(**padded(samples).to_hf()).sample_losses
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-6)


PATTERNS = ({"softcap": 5.0}, {"s_aux": torch.zeros(4)}, {"sliding_window": 4})


@pytest.mark.parametrize(
    ("tower", "keyword"),
    [
        *(("attn", keyword) for keyword in (*PATTERNS, {"novel": 1})),  # patterns are those of causal attention
        *(("self_attn", keyword) for keyword in ({"is_causal": False}, {"novel": 1})),
    ],
)
def test_an_attention_keyword_that_no_back_end_computes_is_refused(tower, keyword):
    """Whoever adds it: another version of transformers, or a hook."""
    model = enable_packing(tiny_model("qwen3_vl"))

    def added(module, args, kwargs):
        return args, {**kwargs, **keyword}

    layers = [module for name, module in model.named_modules() if name.endswith(f".{tower}")]
    layers[-1].register_forward_pre_hook(added, with_kwargs=True)
    (name,) = keyword
    with pytest.raises(BackendError, match=rf"a Qwen3VL\w*Attention calls attention with {name}=.*leave it out"):
        model(**padded(mixed_samples(model.config)).to_hf())
