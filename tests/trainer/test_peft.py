"""LoRA through PEFT: packing enabled before or after, adapters on language and vision layers, a frozen tower."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from training import checkpointing, collator, descend, distance, receipts, train, weights

from vlmpack.errors import ConfigError
from vlmpack.model import disable_packing, enable_packing, is_packing
from vlmpack.testing import tiny_model

LANGUAGE = r".*language_model.*\.(q_proj|v_proj|down_proj|in_proj_qkv|in_proj_a)"
VISION = r".*visual.*\.(qkv|proj)"
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type.*Conv3d:UserWarning"),
]


def lora(model, targets=f"({LANGUAGE})|({VISION})", **settings):
    """Adapters that change the output from the start: untrained ones are zero, and would hide being left out."""
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **settings)
    # PEFT draws weights from the global generator; the seed of tiny_model leaves it alone.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return get_peft_model(model, config)


def has_gradient(run, part):
    return any(part in name for name in run.gradients[0])


@pytest.mark.parametrize(
    ("family", "task", "order"),
    [
        ("qwen2_5_vl", None, "enable, then adapt"),
        ("qwen3_vl_moe", "CAUSAL_LM", "adapt, then enable"),
        ("qwen3_5", "CAUSAL_LM", "enable, then adapt"),
    ],
)
def test_training_equals_samples_alone(family, task, order, tmp_path):
    reference = lora(tiny_model(family), task_type=task)
    if order == "enable, then adapt":
        model = lora(enable_packing(tiny_model(family)), task_type=task)
    else:
        model = enable_packing(lora(tiny_model(family), task_type=task))
    samples = receipts(model.get_base_model())

    expected = descend(reference, samples, size=4, steps=2)
    run = train(model, samples, tmp_path, gradient_accumulation_steps=2)

    assert run.losses == pytest.approx(expected.losses, rel=1e-6)
    assert has_gradient(run, "visual")
    assert has_gradient(run, "language_model")
    assert all("lora_" in name for name in run.gradients[0])
    for ours, theirs in zip(run.gradients, expected.gradients, strict=True):
        assert distance(theirs, ours) < 1e-5


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")  # the frozen tower's
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_frozen_tower_under_checkpointing(reentrant, tmp_path):
    reference, model = lora(tiny_model(), LANGUAGE), enable_packing(lora(tiny_model(), LANGUAGE))
    samples = receipts(model.get_base_model())
    expected = descend(reference, samples, size=2, steps=2)
    run = train(model, samples, tmp_path, **checkpointing(use_reentrant=reentrant))
    assert run.losses == pytest.approx(expected.losses, rel=1e-6)
    assert not has_gradient(run, "visual")
    for ours, theirs in zip(run.gradients, expected.gradients, strict=True):
        assert distance(theirs, ours) < 1e-5


def test_a_saved_adapter_fits_the_untouched_model(tmp_path):
    model = enable_packing(lora(tiny_model()))
    samples = receipts(model.get_base_model())
    train(model, samples, tmp_path / "run")
    model.save_pretrained(tmp_path / "adapter")
    row = collator("packed")(samples)

    assert "vlmpack" not in (tmp_path / "adapter" / "adapter_config.json").read_text()
    reloaded = PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter")
    assert not is_packing(reloaded)
    assert enable_packing(reloaded)(**row).loss.item() == model(**row).loss.item()


def test_merging_and_disabling_leave_a_plain_model():
    model = enable_packing(lora(tiny_model()))
    row = collator("packed")(receipts(model.get_base_model()))
    loss = model(**row).loss.item()
    merged = model.merge_and_unload()
    assert merged(**row).loss.item() == pytest.approx(loss, rel=1e-5)
    assert not is_packing(disable_packing(merged))
    assert weights(merged).keys() == weights(tiny_model()).keys()


@pytest.mark.parametrize("first", ["adapter", "packing"])
def test_an_adapter_that_is_activated_by_tokens_is_refused(first):
    settings = LoraConfig(task_type="CAUSAL_LM", target_modules=LANGUAGE, alora_invocation_tokens=[5, 6])
    with pytest.raises(ConfigError, match=r"'default' is activated by tokens .* one sample alone would have it"):
        if first == "adapter":
            enable_packing(get_peft_model(tiny_model(), settings))
        else:
            model = get_peft_model(enable_packing(tiny_model()), settings)
            model(**collator("packed")(receipts(model)[:2]))


# ---------------------------------------------------------------------- ten steps of each recipe, saved and merged


def kept(model, folder):
    """Save the adapter, and return (its model loaded again, the merged model)."""
    model.save_pretrained(folder / "adapter")
    return PeftModel.from_pretrained(tiny_model(), folder / "adapter"), model.merge_and_unload()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [{}, {"use_dora": True}, {"use_rslora": True}], ids=["lora", "dora", "rslora"])
def test_ten_steps_equal_the_padded_run_and_survive_saving_and_merging(kind, tmp_path):
    reference, model = lora(tiny_model(), LANGUAGE, **kind), enable_packing(lora(tiny_model(), LANGUAGE, **kind))
    samples = receipts(model.get_base_model())[:4]
    batch = {"per_device_train_batch_size": 4, "max_steps": 10}
    padded, packed = (
        train(each, samples, tmp_path, layout, **batch) for each, layout in ((reference, "padded"), (model, "packed"))
    )
    assert len(padded.losses) == 10
    assert packed.losses == pytest.approx(padded.losses, rel=1e-5)
    assert distance(weights(reference), weights(model)) < 1e-4
    row, loss = collator("packed")(samples), None
    loss = model(**row).loss.item()
    for again in kept(model, tmp_path):
        assert enable_packing(again)(**row).loss.item() == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_ten_steps_over_quantised_layers(tmp_path):
    """QLoRA: 4-bit weights under the adapters, packed and padded."""
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install bitsandbytes")
    from transformers import AutoModelForImageTextToText, BitsAndBytesConfig

    tiny_model(hidden=64).save_pretrained(tmp_path / "plain")
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=["model.visual", "lm_head"],
    )

    def quantised():
        return AutoModelForImageTextToText.from_pretrained(tmp_path / "plain", quantization_config=settings)

    reference, model = lora(quantised(), LANGUAGE), enable_packing(lora(quantised(), LANGUAGE))
    quantised_parts = {name for name, module in model.named_modules() if type(module).__name__ == "Linear4bit"}
    assert any("language_model" in name for name in quantised_parts)
    assert not any("visual" in name for name in quantised_parts)
    samples = receipts(model.get_base_model())[:4]
    batch = {"per_device_train_batch_size": 4, "max_steps": 10}
    padded, packed = (
        train(each, samples, tmp_path, layout, **batch) for each, layout in ((reference, "padded"), (model, "packed"))
    )
    assert len(padded.losses) == 10
    assert padded.losses[-1] < padded.losses[0]
    assert packed.losses == pytest.approx(padded.losses, rel=1e-6)
    assert distance(padded.gradients[0], packed.gradients[0]) < 1e-5
    assert distance(adapters(reference), adapters(model)) < 1e-5
    row = collator("packed")(samples)
    model.save_pretrained(tmp_path / "adapter")
    again = enable_packing(PeftModel.from_pretrained(quantised(), tmp_path / "adapter")).train()
    assert again(**row).loss.item() == pytest.approx(model(**row).loss.item(), rel=1e-6)


def adapters(model):
    """The weights that are trained; those of quantised layers are bytes."""
    return {name: weight for name, weight in weights(model).items() if "lora_" in name}
