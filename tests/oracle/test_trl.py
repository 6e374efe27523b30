"""TRL's trainers on packed rows: the losses, metrics and weights of TRL's own trainers on the plain model, padded."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracle.plain import CASES, Case, picture
from vlmpack.collate import SharePrefixes
from vlmpack.testing import tiny_processor

trl = pytest.importorskip("trl", reason="needs TRL: pip install trl")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of TRL and PEFT, about others
    pytest.mark.filterwarnings("ignore:.*SwigPy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type.*Conv3d:UserWarning"),  # TRL counts FLOPs
]
QWEN, GATED_DELTA = CASES[1], CASES[3]
STEPS, RATE = 3, 0.01
SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "learning_rate": RATE,
    "optim": "sgd",  # so that weights show gradients
    "max_grad_norm": 0.0,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": [],
    "disable_tqdm": True,
}


@lru_cache
def processor_of(case: Case) -> Any:
    """Padded on the left, as TRL wants it."""
    processor = tiny_processor(case.family, max_pixels=16 * 32 * 32)
    processor.tokenizer.padding_side = "left"
    return processor


def questions() -> list[dict[str, Any]]:
    """Of unequal lengths, about pictures of unequal sizes."""
    return [
        {
            "prompt": [{"role": "user", "content": "What is the total of this receipt? " * (1 + n % 3)}],
            "images": [picture(30 + n, 64 + 32 * (n % 2), 64)],
        }
        for n in range(6)
    ]


def check_alike(packed: Any, padded: Any, before: dict[str, torch.Tensor]) -> None:
    """Compare what both trainers logged, and where their weights are."""
    logs = [
        [{k: v for k, v in entry.items() if k != "step_time"} for entry in one.state.log_history[:-1]]
        for one in (packed, padded)
    ]
    assert len(logs[1]) == STEPS
    for seen, expected in zip(*logs, strict=True):
        assert {name: seen[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
    trained = dict(packed.model.named_parameters())
    for name, expected in padded.model.named_parameters():
        moved = float((expected - before[name]).detach().abs().max())
        assert float((trained[name] - expected).detach().abs().max()) <= 1e-3 * moved + 1e-7, name
    assert any(float((expected - before[n]).detach().abs().max()) > 1e-3 for n, expected in trained.items())


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("case", [QWEN, GATED_DELTA], ids=str)
def test_supervised_fine_tuning(case: Case, tmp_path: Path) -> None:
    from datasets import Dataset

    from vlmpack.trainer.trl import PackedSFTTrainer

    chats = Dataset.from_list(
        [
            {**row, "completion": [{"role": "assistant", "content": "75,000. " * (1 + n)}]}
            for n, row in enumerate(questions())
        ]
    )
    before, runs = weights(case.model()), []
    for trainer in (PackedSFTTrainer, trl.SFTTrainer):
        args = trl.SFTConfig(str(tmp_path), per_device_train_batch_size=3, **SETTINGS)
        runs.append(trainer(case.model(), args=args, train_dataset=chats, processing_class=processor_of(case)))
        runs[-1].train()
    check_alike(*runs, before)
    assert runs[0].state.log_history[0]["packing/computed"] < 0.9, "the padded batch has padding, the row has none"


def test_grpo(tmp_path: Path) -> None:
    """Four answers to a question: the prompt and its image go through the model once."""
    from datasets import Dataset

    from vlmpack.trainer.trl import PackedGRPOTrainer

    model = QWEN.model()
    media = [model.config.image_token_id, model.config.video_token_id]
    ends = [[[processor_of(QWEN).tokenizer.eos_token_id], 5.5]]  # answers of unequal lengths
    before, runs = weights(model), []
    for trainer, settings in (
        (PackedGRPOTrainer, {"share_prefixes": SharePrefixes(min_shared=16)}),
        (trl.GRPOTrainer, {}),
    ):
        args = trl.GRPOConfig(
            str(tmp_path),
            num_generations=4,
            per_device_train_batch_size=8,
            max_completion_length=7,
            beta=0.0,
            generation_kwargs={"suppress_tokens": media, "sequence_bias": ends},
            **SETTINGS,
        )
        runs.append(
            trainer(
                model=QWEN.model(),
                reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 11) for ids in completion_ids],
                args=args,
                train_dataset=Dataset.from_list(questions()),
                processing_class=processor_of(QWEN),
                **settings,
            )
        )
        runs[-1].train()
    check_alike(*runs, before)
    assert runs[0].state.log_history[0]["packing/computed"] < 0.6
