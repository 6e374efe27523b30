"""Trainers of preferences against TRL's own, padded: the same losses, metrics, gradients and weights."""

from __future__ import annotations

import pytest
import torch
from chats import picture
from peft import LoraConfig
from training import apart, distance
from trl_runs import BEYOND_QWEN, SHARED, arguments, finish, placeholders, processor_of, prompts, reward, saved, trl

from vlmpack.errors import ConfigError
from vlmpack.model import enable_packing, is_packing
from vlmpack.trainer import check_trainer
from vlmpack.trainer.trl import PackedDPOTrainer, PackedKTOTrainer, PackedRLOOTrainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*SwigPy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type.*Conv3d:UserWarning"),
    pytest.mark.filterwarnings("ignore:nothing is packed in this training step:UserWarning"),  # of the padded runs
]


def preferences():
    """Four questions about pictures of unlike size, each with a better and a worse answer."""
    from datasets import Dataset

    samples = []
    for n in range(4):
        question = [{"role": "user", "content": "What is the total? " * (1 + n % 2)}]
        better = [{"role": "assistant", "content": "The total is 75,000. " * (1 + n % 3)}]
        worse = [{"role": "assistant", "content": "It is nothing."}]
        pictures = [picture(64 + 32 * n, 64, seed=n)]
        samples.append({"prompt": question, "images": pictures, "chosen": better, "rejected": worse})
    return Dataset.from_list(samples)


def ratings():
    """The same answers, each by itself."""
    from datasets import Dataset

    pairs = [(pair, name) for pair in preferences() for name in ("chosen", "rejected")]
    rated = [
        {"prompt": pair["prompt"], "images": pair["images"], "completion": pair[name], "label": name == "chosen"}
        for pair, name in pairs
    ]
    return Dataset.from_list(rated)


def dpo(trainer, model, tmp_path, *, dataset=None, peft_config=None, **settings):
    defaults = {"per_device_train_batch_size": 2, "max_steps": 10, "beta": 0.5, "learning_rate": 0.005}
    kind = "KTOConfig" if trainer.__name__.endswith("KTOTrainer") else "DPOConfig"
    return trainer(
        model,
        args=arguments(kind, tmp_path, **{**defaults, **settings}),
        train_dataset=preferences() if dataset is None else dataset,
        processing_class=processor_of(model.config.model_type),
        peft_config=peft_config,
        **(SHARED if trainer.__name__.startswith("Packed") else {}),
    )


def compared(tmp_path, *, family="qwen3_vl", trainers=(trl.DPOTrainer, PackedDPOTrainer), run=dpo, **settings):
    """Both trainers' runs, compared; the packed one is returned."""
    finished, runs = [], []
    for trainer in trainers:
        runs.append(run(trainer, saved(tmp_path, family), tmp_path, **settings))
        finished.append(finish(runs[-1]))
    check_trainer(runs[1])
    (padded, reference), (packed, weights) = finished
    assert len(padded.losses) == settings.get("max_steps", 10)
    assert packed.losses == pytest.approx(padded.losses, rel=1e-4, abs=1e-5)
    assert max(float(gradient.abs().max()) for truth in padded.gradients for gradient in truth.values()) > 1e-3
    assert apart(padded.gradients[0], packed.gradients[0]) < 1e-5
    assert apart(reference, weights) < 1e-4
    same_metrics(*(run.state.log_history for run in runs))
    assert runs[1].state.log_history[0]["packing/computed"] < 0.9
    return runs[1]


def same_metrics(truth, ours):
    """All that TRL logs of every step: rewards, margins, log-probabilities, logits, entropy, accuracy."""
    for expected, metrics in zip(truth[:-1], ours[:-1], strict=True):
        assert "entropy" in expected or "kl" in expected
        expected = {name: value for name, value in expected.items() if name != "step_time"}
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_ten_steps_are_those_of_the_padded_trainer(tmp_path):
    run = compared(tmp_path)
    assert is_packing(run.ref_model)
    assert run.state.log_history[0]["packing/computed"] < 0.65  # the prompt of each pair once


@pytest.mark.parametrize("loss_type", ["ipo", "sft", "aot", "bco_pair"])
def test_losses(loss_type, tmp_path):
    compared(tmp_path, max_steps=2, loss_type=loss_type)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_weighting": True},
        {"ld_alpha": 0.5},
        {"gradient_accumulation_steps": 2},
        {"sync_ref_model": True, "ref_model_sync_steps": 1},
        {"gradient_checkpointing": True},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_of_the_loss(settings, tmp_path):
    compared(tmp_path, max_steps=3, **settings)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5", "qwen3_vl_moe"])
def test_families(family, tmp_path):
    settings = {"router_aux_loss_coef": 0.1} if family.endswith("moe") else {}
    compared(tmp_path, family=family, max_steps=2, **settings)


@pytest.mark.parametrize("family", BEYOND_QWEN)
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # processors of GLM
def test_families_beyond_qwen(family, tmp_path):
    run = compared(tmp_path, family=family)
    assert max(entry["packing/computed"] for entry in run.state.log_history[:-1]) < 0.6


def test_an_adapter_whose_reference_is_the_policy_without_it(tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights="gaussian", lora_alpha=64)
    run = compared(tmp_path, max_steps=3, peft_config=config, learning_rate=0.1)
    assert run.ref_model is None


def test_texts_whose_reference_is_computed_ahead(tmp_path):
    compared(tmp_path, max_steps=3, dataset=preferences().remove_columns("images"), precompute_ref_log_probs=True)


def test_ten_steps_of_ratings(tmp_path):
    trainers = (trl.KTOTrainer, PackedKTOTrainer)
    compared(tmp_path, trainers=trainers, dataset=ratings(), per_device_train_batch_size=4)


def rloo(trainer, model, tmp_path, **settings):
    sampling = {"suppress_tokens": placeholders(model)}
    groups = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 7, "max_steps": 10}
    return trainer(
        model,
        reward_funcs=reward,
        args=arguments("RLOOConfig", tmp_path, generation_kwargs=sampling, **groups, **settings),
        train_dataset=prompts(),
        processing_class=processor_of(),
        **(SHARED if trainer is PackedRLOOTrainer else {}),
    )


def test_ten_steps_of_leave_one_out(tmp_path):
    torch.manual_seed(0)
    compared(tmp_path, trainers=(trl.RLOOTrainer, PackedRLOOTrainer), run=rloo, beta=0.1)


def test_the_check_of_settings_names_the_packed_trainer(tmp_path):
    plain = dpo(trl.DPOTrainer, enable_packing(saved(tmp_path)), tmp_path)
    with pytest.raises(ConfigError, match=r"TRL's DPOTrainer computes the loss itself.*import PackedDPOTrainer"):
        check_trainer(plain)


def test_an_enabled_model_in_trls_own_trainer_has_its_losses(tmp_path):
    """With all its padding: nothing is packed there, and nothing is wrong."""
    plain, reference = finish(dpo(trl.DPOTrainer, saved(tmp_path), tmp_path, max_steps=3))
    ours, weights = finish(dpo(trl.DPOTrainer, enable_packing(saved(tmp_path)), tmp_path, max_steps=3))
    assert ours.losses == plain.losses
    assert distance(reference, weights) == 0
