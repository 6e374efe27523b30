"""Trainers on packed rows take the steps that a plain loop takes over the samples alone.

The plain loop is written out below: gradients of the samples one by one, divided by all targets of the step, clipped,
and torch's AdamW. Losses, gradient norms and weights after each step are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from tests.oracle.packed import collator_of
from tests.oracle.plain import CASES, Case, conversations, encoded, in_one_batch, run_alone
from vlmpack import PackedTrainer, enable_packing, plan_bins
from vlmpack.lengths import measure_lengths
from vlmpack.trainer import loss_metrics

QWEN, EXPERTS, GATED_DELTA, GEMMA = CASES[1], CASES[2], CASES[3], CASES[5]
RATE, EPSILON, STEPS = 3e-3, 1e-4, 3
"""EPSILON keeps AdamW from magnifying the rounding of gradients that are all but 0."""
LARGEST = RATE / 100
"""Difference of any weight after three steps, each of which moves it by up to RATE."""


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": RATE,
        "adam_epsilon": EPSILON,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "remove_unused_columns": False,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(str(folder), **{**defaults, **settings})


class PlainLoop:
    """Steps of AdamW over samples alone, all of them in each step."""

    def __init__(self, case: Case, talks: Sequence[Any]) -> None:
        self.model = case.model()
        self.losses: list[float] = []
        self.norms: list[float] = []
        samples = [encoded(case, talk) for talk in talks]
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, eps=EPSILON, weight_decay=0.0)
        for _ in range(STEPS):
            self.losses.append(run_alone(self.model, samples).loss)
            self.norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)))
            optimizer.step()


@lru_cache
def plain_loop(case: Case) -> PlainLoop:
    return PlainLoop(case, conversations(case))


def check(trainer: Trainer, case: Case) -> None:
    """Compare a trained Trainer, whose every step was over all samples, with the plain loop."""
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    plain = plain_loop(case)
    assert [entry["loss"] for entry in logged] == pytest.approx(plain.losses, rel=1e-5)
    assert [entry["grad_norm"] for entry in logged] == pytest.approx(plain.norms, rel=1e-4)
    assert plain.losses[-1] < plain.losses[0] - 0.1, "the steps were so small that any would pass"
    trained = dict(trainer.model.named_parameters())
    for name, expected in plain.model.named_parameters():
        assert float((trained[name] - expected).detach().abs().max()) <= LARGEST, name


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("case", [QWEN], ids=str)
def test_hf_trainer_with_the_collator(case: Case, layout: str, tmp_path: Path) -> None:
    model = enable_packing(case.model())
    trainer = Trainer(model, arguments(tmp_path), collator_of(case, layout), conversations(case))
    trainer.train()
    check(trainer, case)


@pytest.mark.parametrize("case", [EXPERTS, GATED_DELTA, GEMMA], ids=str)
@pytest.mark.slow
def test_hf_trainer_with_other_families(case: Case, tmp_path: Path) -> None:
    trainer = Trainer(enable_packing(case.model()), arguments(tmp_path), collator_of(case), conversations(case))
    trainer.train()
    check(trainer, case)


def test_hf_trainer_with_a_collator_of_your_own(tmp_path: Path) -> None:
    """Its padded batches are packed inside the forward."""
    model = enable_packing(QWEN.model())
    samples = [encoded(QWEN, talk) for talk in conversations(QWEN)]
    pad = QWEN.tokenizer.pad_token_id
    trainer = Trainer(model, arguments(tmp_path), lambda features: in_one_batch(features, pad=pad), samples)
    trainer.train()
    check(trainer, QWEN)


def test_accumulated_batches_weigh_every_target_alike(tmp_path: Path) -> None:
    """Two batches of two samples are a step, which transformers' own trainer averages as two averages."""
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    trainer = Trainer(
        enable_packing(QWEN.model()), arguments(tmp_path, **settings), collator_of(QWEN), conversations(QWEN)
    )
    trainer.train()
    check(trainer, QWEN)


def test_packed_trainer_on_planned_rows(tmp_path: Path) -> None:
    """An epoch of planned rows is one step here, so that their order does not matter."""
    plan = plan_bins(measure_lengths(conversations(QWEN), collator_of(QWEN)), capacity=110)
    settings = {"gradient_accumulation_steps": len(plan)}
    trainer = PackedTrainer(
        enable_packing(QWEN.model()),
        arguments(tmp_path, **settings),
        collator_of(QWEN),
        conversations(QWEN),
        plan=plan,
    )
    trainer.train()
    assert len(plan) == 2
    check(trainer, QWEN)


def test_the_loss_of_an_evaluation_set_is_the_mean_over_its_targets(tmp_path: Path) -> None:
    """Whatever the batches: of three samples and of one."""
    model = enable_packing(QWEN.model())
    args = arguments(tmp_path, per_device_eval_batch_size=3)
    trainer = Trainer(
        model,
        args,
        collator_of(QWEN),
        eval_dataset=conversations(QWEN),
        compute_metrics=loss_metrics(model),
    )
    assert trainer.evaluate()["eval_token_loss"] == pytest.approx(plain_loop(QWEN).losses[0], rel=2e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT, about transformers
def test_adapters_of_peft_are_trained_alike(tmp_path: Path) -> None:
    """LoRA on the text model: the same losses as the plain loop over the same adapted model."""
    from peft import LoraConfig, get_peft_model

    def adapted() -> Any:
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
        return get_peft_model(QWEN.model(), config)

    trainer = Trainer(enable_packing(adapted()), arguments(tmp_path), collator_of(QWEN), conversations(QWEN))
    trainer.train()
    model, samples = adapted(), [encoded(QWEN, talk) for talk in conversations(QWEN)]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, eps=EPSILON)
    losses = []
    for _ in range(STEPS):
        total = sum(int((sample["labels"][:, 1:] != -100).sum()) for sample in samples)
        parts = [
            model(**sample, use_cache=False).loss * int((sample["labels"][:, 1:] != -100).sum()) / total
            for sample in samples
        ]
        sum(parts).backward()
        losses.append(float(sum(part.detach() for part in parts)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        optimizer.step()
        optimizer.zero_grad()
    logged = [entry["loss"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert logged == pytest.approx(losses, rel=1e-5)
    assert losses[-1] < losses[0]
