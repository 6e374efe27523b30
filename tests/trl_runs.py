"""Runs of TRL's trainers over small conversations about pictures, which never meet a hub."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from chats import CHATTING, picture
from training import Gradients, Run, logged, weights

from vlmpack.collate import SharePrefixes
from vlmpack.families import family_of
from vlmpack.model import enable_packing
from vlmpack.model.plain import find_model
from vlmpack.testing import tiny_model, tiny_processor

trl = pytest.importorskip("trl", reason="needs TRL: pip install trl")

BEYOND_QWEN = [family for family in ("gemma3", "glm4v", "internvl") if family in CHATTING]
"""Families beyond Qwen: image tokens that attend both ways, another tower, tiles."""
SIZES = {"hidden": 32, "heads": 2, "layers": 2, "vision_depth": 1}


@lru_cache
def processor_of(family: str = "qwen3_vl", side: str = "left") -> Any:
    """Padded on the left, as TRL wants it."""
    processor = tiny_processor(family, max_pixels=16 * 32 * 32)
    processor.tokenizer.padding_side = side
    return processor


def saved(folder: Path, family: str = "qwen3_vl") -> Any:
    """A policy that TRL can load again, as the reference."""
    model = tiny_model(family, processor=processor_of(family), **SIZES)
    model.save_pretrained(folder / "policy")
    model.config._name_or_path = str(folder / "policy")
    return model


def prompts() -> Any:
    """Six questions of unlike length, about one picture or two: TRL takes no batch in which some have none."""
    from datasets import Dataset

    pictures = [[picture(64 + 32 * n, 64, seed=n)] for n in range(3)]
    pictures += [[picture(96, 96)], [picture(32, 96), picture(64, 32)], [picture(96, 64, seed=9)]]
    questions = ["What is the total of this receipt? " * (1 + n % 3) for n in range(len(pictures))]
    samples = [
        {"prompt": [{"role": "user", "content": question}], "images": images}
        for question, images in zip(questions, pictures, strict=True)
    ]
    return Dataset.from_list(samples)


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs within every group."""
    return [float(sum(ids) % 11) for ids in completion_ids]


def arguments(kind: str, folder: Path, **settings: Any) -> Any:
    """Plain SGD without clipping or decay, so that weights show gradients."""
    defaults: dict[str, Any] = {
        "output_dir": str(folder / "results"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "max_steps": 3,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
    }
    return getattr(trl, kind)(**{**defaults, **settings})


def finish(run: Any) -> tuple[Run, dict[str, Any]]:
    """Train; (losses and gradients of every step, the weights after the last)."""
    seen = Gradients()
    run.add_callback(seen)
    run.train()
    return Run(losses=logged(run), gradients=seen.steps), weights(run.model)


SHARED = {"share_prefixes": SharePrefixes(min_shared=4)}  # prompts of these runs are short


def placeholders(core: Any) -> list[int]:
    """Tokens of images and of videos, where there are any."""
    config = core.config
    return [config.image_token_id, *([config.video_token_id] if family_of(core).has_videos else [])]


def grpo(
    trainer: Any,
    model: Any,
    folder: Path,
    *,
    dataset: Any = None,
    peft_config: Any = None,
    sharing: dict[str, Any] = SHARED,
    **settings: Any,
) -> Any:
    """A trainer of groups: completions of one to seven tokens, without placeholders of images and videos."""
    core = find_model(model)
    processor = processor_of(core.config.model_type)
    sampling = {
        "suppress_tokens": placeholders(core),
        "sequence_bias": [[[processor.tokenizer.eos_token_id], 5.5]],
    }
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 7,
        "generation_kwargs": sampling,
    }
    if trainer.__name__.startswith("Packed"):
        enable_packing(model)
    return trainer(
        model,
        reward_funcs=reward,
        args=arguments("GRPOConfig", folder, **{**defaults, **settings}),
        train_dataset=prompts() if dataset is None else dataset,
        processing_class=processor,
        peft_config=peft_config,
        **(sharing if trainer.__name__.startswith("Packed") else {}),
    )
