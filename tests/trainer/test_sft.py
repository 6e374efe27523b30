"""PackedSFTTrainer against TRL's own, padded: the same losses, metrics and weights over ten steps."""

from __future__ import annotations

import pytest
from chats import picture
from peft import LoraConfig
from training import distance
from trl_runs import arguments, finish, processor_of, saved, trl

from vlmpack.model import find_model
from vlmpack.trainer import check_trainer
from vlmpack.trainer.trl import PackedSFTTrainer

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*SwigPy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type.*Conv3d:UserWarning"),
]


def turns(number):
    """(question, answer) about a receipt, of unlike lengths."""
    return "What is the total of this receipt? " * (1 + number % 3), f"The total is {75 + number},000. " * (
        1 + number % 4
    )


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def messages(number):
    question, answer = turns(number)
    return {"messages": [user(question), assistant(answer)]}


def prompt_and_completion(number):
    question, answer = turns(number)
    return {"prompt": [user(question)], "completion": [assistant(answer)]}


def text(number):
    question, answer = turns(number)
    return {"text": f"<|vision_start|><|image_pad|><|vision_end|>{question}{answer}"}


def samples(form, *, count=8, images=True):
    """A data set in one of TRL's formats, each sample with one picture or two."""
    from datasets import Dataset

    rows = []
    for n in range(count):
        pictures = [picture(64 + 32 * (n % 3), 64, seed=n)] * (1 + (n % 3 == 2 and form is not text))
        rows.append({**form(n), **({"images": pictures} if images else {})})
    return Dataset.from_list(rows)


def sft(trainer, model, tmp_path, form=messages, *, dataset=None, peft_config=None, extras=None, **settings):
    """A run of ten steps, which are two epochs and a half."""
    defaults = {"per_device_train_batch_size": 2, "max_steps": 10, "learning_rate": 0.05}
    return trainer(
        model,
        args=arguments("SFTConfig", tmp_path, **{**defaults, **settings}),
        train_dataset=samples(form) if dataset is None else dataset,
        processing_class=processor_of(find_model(model).config.model_type),
        peft_config=peft_config,
        **(extras or {}),
    )


def compared(tmp_path, form=messages, *, family="qwen3_vl", dataset=None, steps=10, **settings):
    """Both trainers' runs, compared; the packed one is returned."""
    found = []
    for trainer in (trl.SFTTrainer, PackedSFTTrainer):
        run = sft(trainer, saved(tmp_path, family), tmp_path, form, dataset=dataset, max_steps=steps, **settings)
        if trainer is PackedSFTTrainer:
            check_trainer(run)
        found.append((run, *finish(run)))
    (padded, truth, reference), (packed, ours, weights) = found
    assert len(truth.losses) == steps
    assert ours.losses == pytest.approx(truth.losses, rel=1e-4)
    assert distance(truth.gradients[0], ours.gradients[0]) < 1e-5
    assert max(float(gradient.abs().max()) for gradient in truth.gradients[0].values()) > 1e-3
    assert distance(reference, weights) < 1e-4
    same_metrics(padded.state.log_history, packed.state.log_history)
    return packed


def same_metrics(truth, ours):
    """All that TRL logs of every step."""
    for expected, logged in zip(truth[:-1], ours[:-1], strict=True):
        assert {"entropy", "mean_token_accuracy", "num_tokens"} <= expected.keys()
        assert {name: logged[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("form", [messages, prompt_and_completion, text])
def test_formats_of_data(form, tmp_path):
    run = compared(tmp_path, form, remove_unused_columns=form is not text)  # TRL removes "text" of samples with images
    assert run.state.log_history[0]["packing/computed"] <= 1
    assert min(entry["packing/computed"] for entry in run.state.log_history[:-1]) < 0.9  # padding was skipped


@pytest.mark.parametrize(
    ("form", "settings"),
    [
        (prompt_and_completion, {"completion_only_loss": False}),
        (prompt_and_completion, {"completion_only_loss": True}),
        (messages, {"assistant_only_loss": True}),
        (messages, {"gradient_accumulation_steps": 2}),
        (messages, {"loss_type": "dft"}),
        (messages, {"max_grad_norm": 0.5, "optim": "adamw_torch", "learning_rate": 1e-4}),
        (messages, {"gradient_checkpointing": True}),
        (messages, {"pad_to_multiple_of": 16}),
        (prompt_and_completion, {"max_length": 60}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_settings(form, settings, tmp_path):
    compared(tmp_path, form, steps=4, **settings)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5", "qwen3_vl_moe"])
def test_families(family, tmp_path):
    settings = {"router_aux_loss_coef": 0.1} if family.endswith("moe") else {}
    run = compared(tmp_path, family=family, steps=3, **settings)
    assert ("aux_loss" in run.state.log_history[0]) == family.endswith("moe")


def test_adapters_that_trl_adds(tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights="gaussian")
    compared(tmp_path, steps=4, peft_config=config)


def test_text_alone(tmp_path):
    compared(tmp_path, steps=4, dataset=samples(prompt_and_completion, images=False))
