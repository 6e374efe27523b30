"""Settings and wrappers of a run: checkpointing, bfloat16, torch.compile, adapters, saving and resuming."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from training import checkpointing, collator, descend, distance, gradients, receipts, train, weights
from transformers import AutoModelForImageTextToText

from vlmpack.errors import ConfigError
from vlmpack.model import disable_packing, enable_packing, is_packing
from vlmpack.testing import tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type.*Conv3d:UserWarning"),
]


def same_steps(expected, run):
    assert run.losses == pytest.approx(expected.losses, rel=1e-6)
    assert len(run.gradients) == len(expected.gradients) > 0
    for ours, theirs in zip(run.gradients, expected.gradients, strict=True):
        assert distance(theirs, ours) < 1e-5


# ---------------------------------------------------------------------- gradient checkpointing


def checkpointed(model, *, reentrant):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    return model


def rows(model):
    """Two packed rows that have nothing in common, not even their width."""
    return [collator("packed")(receipts(model, seed=seed)[: 2 + seed]) for seed in (1, 2)]


def alone_gradients(model, row):
    model.zero_grad()
    model(**row).loss.backward()
    return gradients(model)


@pytest.mark.parametrize("reentrant", [True, False])
def test_two_forwards_before_one_backward(reentrant):
    model = checkpointed(enable_packing(tiny_model()), reentrant=reentrant)
    first, second = rows(model)
    plain = enable_packing(tiny_model())
    expected = [alone_gradients(plain, row) for row in (first, second)]

    model.zero_grad()
    (model(**first).loss + model(**second).loss).backward()

    both = {name: expected[0][name] + expected[1][name] for name in expected[0]}
    assert distance(both, gradients(model)) < 1e-5


# ---------------------------------------------------------------------- bfloat16 and torch.compile


# ---------------------------------------------------------------------- saving and resuming


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl_moe", "qwen3_5"])
def test_a_saved_model_is_plain_and_the_same(family, tmp_path):
    model = enable_packing(tiny_model(family))
    row = collator("packed")(receipts(model))
    train(model, receipts(model), tmp_path, save_strategy="steps", save_steps=2)
    saved = tmp_path / "checkpoint-2"
    reloaded = AutoModelForImageTextToText.from_pretrained(saved).train()

    assert "vlmpack" not in "".join(path.read_text() for path in saved.glob("*.json"))
    config = json.loads((saved / "config.json").read_text())
    assert config["architectures"] == [type(tiny_model(family)).__name__]
    assert type(reloaded) is type(tiny_model(family))
    assert not is_packing(reloaded)
    assert all(torch.equal(a, b) for a, b in zip(reloaded.parameters(), model.parameters(), strict=True))
    assert torch.equal(enable_packing(reloaded)(**row).loss, model(**row).loss)


# ---------------------------------------------------------------------- adapters

LANGUAGE = r".*language_model.*\.(q_proj|v_proj|down_proj|in_proj_qkv|in_proj_a)"
VISION = r".*visual.*\.(qkv|proj)"


def lora(model, targets=f"({LANGUAGE})|({VISION})", **settings):
    """Adapters that change the output from the start: untrained ones are zero, and would hide being left out."""
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **settings)
    # PEFT draws weights from the global generator; the seed of tiny_model leaves it alone.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return get_peft_model(model, config)


def has_gradient(run, part):
    return any(part in name for name in run.gradients[0])


TASK = {"task_type": "CAUSAL_LM"}


@pytest.mark.parametrize(
    ("family", "settings", "order"),
    [
        ("qwen2_5_vl", {}, "enable, then adapt"),
        ("qwen3_vl_moe", TASK, "adapt, then enable"),
        ("qwen3_5", TASK, "enable, then adapt"),
        pytest.param("qwen3_vl", {"use_dora": True}, "adapt, then enable", marks=pytest.mark.slow),
        pytest.param("qwen3_vl", {"use_rslora": True}, "adapt, then enable", marks=pytest.mark.slow),
    ],
)
def test_adapters_are_trained_as_by_samples_alone_and_survive_saving_and_merging(family, settings, order, tmp_path):
    reference = lora(tiny_model(family), **settings)
    if order == "enable, then adapt":
        model = lora(enable_packing(tiny_model(family)), **settings)
    else:
        model = enable_packing(lora(tiny_model(family), **settings))
    samples = receipts(model.get_base_model())

    expected = descend(reference, samples, size=4, steps=2)
    run = train(model, samples, tmp_path, gradient_accumulation_steps=2)

    same_steps(expected, run)
    assert has_gradient(run, "visual")
    assert has_gradient(run, "language_model")
    assert all("lora_" in name for name in run.gradients[0])

    row = collator("packed")(samples)
    loss = model(**row).loss.item()
    model.save_pretrained(tmp_path / "adapter")
    assert "vlmpack" not in (tmp_path / "adapter" / "adapter_config.json").read_text()
    reloaded = PeftModel.from_pretrained(tiny_model(family), tmp_path / "adapter")
    assert not is_packing(reloaded)
    for again in (reloaded, model.merge_and_unload()):
        assert enable_packing(again)(**row).loss.item() == pytest.approx(loss, rel=1e-5)
    assert weights(disable_packing(again)).keys() == weights(tiny_model(family)).keys()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")  # the frozen tower's
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_frozen_tower_under_checkpointing(reentrant, tmp_path):
    reference, model = lora(tiny_model(), LANGUAGE), enable_packing(lora(tiny_model(), LANGUAGE))
    samples = receipts(model.get_base_model())
    expected = descend(reference, samples, size=2, steps=2)
    run = train(model, samples, tmp_path, **checkpointing(use_reentrant=reentrant))
    same_steps(expected, run)
    assert not has_gradient(run, "visual")


@pytest.mark.parametrize("first", ["adapter", "packing"])
def test_an_adapter_that_is_activated_by_tokens_is_refused(first):
    settings = LoraConfig(task_type="CAUSAL_LM", target_modules=LANGUAGE, alora_invocation_tokens=[5, 6])
    with pytest.raises(ConfigError, match=r"'default' is activated by tokens .* one sample alone would have it"):
        if first == "adapter":
            enable_packing(get_peft_model(tiny_model(), settings))
        else:
            model = get_peft_model(enable_packing(tiny_model()), settings)
            model(**collator("packed")(receipts(model)[:2]))
