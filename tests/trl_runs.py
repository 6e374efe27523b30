"""Runs of TRL's trainers over small conversations about pictures, which never meet a hub.

As a script: what each of two gloo ranks runs for test_two_ranks.py, both trainers of GRPO under DDP. Rank 0 writes
losses and weights to FOLDER/TRAINER.pt.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from chats import CHATTING, picture
from datasets import Dataset
from fixtures.processors import tiny_model, tiny_processor
from training import Gradients, Run, apart, distance, logged, weights

from vlmpack.collate import SharePrefixes
from vlmpack.families import family_of
from vlmpack.model.plain import find_model
from vlmpack.trainer import check_trainer

trl = pytest.importorskip("trl", reason="needs TRL: pip install trl")
import vlmpack.trainer.trl  # noqa: E402

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


def placeholders(core: Any) -> list[int]:
    """Tokens of images and of videos, where there are any."""
    config = core.config
    return [config.image_token_id, *([config.video_token_id] if family_of(core).has_videos else [])]


# ---------------------------------------------------------------------- data


def turns(number: int) -> tuple[str, str]:
    """(question, answer) about a receipt, of unlike lengths."""
    answer = f"The total is {75 + number},000. " * (1 + number % 4)
    return "What is the total of this receipt? " * (1 + number % 3), answer


def said(role: str, content: Any) -> list[dict[str, Any]]:
    """One message."""
    return [{"role": role, "content": content}]


def messages(number: int) -> dict[str, Any]:
    """A conversation."""
    question, answer = turns(number)
    return {"messages": said("user", question) + said("assistant", answer)}


def prompt_and_completion(number: int) -> dict[str, Any]:
    """The same in two columns."""
    question, answer = turns(number)
    return {"prompt": said("user", question), "completion": said("assistant", answer)}


def text(number: int) -> dict[str, Any]:
    """The same as one text."""
    return {"text": "<|vision_start|><|image_pad|><|vision_end|>" + "".join(turns(number))}


def samples(form: Any = messages, *, images: bool = True) -> Any:
    """Eight samples in one of TRL's formats, each with one picture or two."""
    rows = []
    for n in range(8):
        pictures = [picture(64 + 32 * (n % 3), 64, seed=n)] * (1 + (n % 3 == 2 and form is not text))
        rows.append({**form(n), **({"images": pictures} if images else {})})
    return Dataset.from_list(rows)


def preferences() -> Any:
    """Four questions about pictures of unlike size, each with a better and a worse answer."""
    return Dataset.from_list(
        [
            {
                "prompt": said("user", "What is the total? " * (1 + n % 2)),
                "images": [picture(64 + 32 * n, 64, seed=n)],
                "chosen": said("assistant", "The total is 75,000. " * (1 + n % 3)),
                "rejected": said("assistant", "It is nothing."),
            }
            for n in range(4)
        ]
    )


def ratings() -> Any:
    """The same answers, each by itself."""
    pairs = [(pair, name) for pair in preferences() for name in ("chosen", "rejected")]
    return Dataset.from_list(
        [
            {"prompt": pair["prompt"], "images": pair["images"], "completion": pair[name], "label": name == "chosen"}
            for pair, name in pairs
        ]
    )


# ---------------------------------------------------------------------- a trainer of TRL and ours


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A trainer of TRL: its settings, its data, and how far packed rows may be from its padded batches."""

    settings: dict[str, Any]
    data: Callable[[], Any]
    losses: float
    """Relative limit."""
    weights: float
    metrics: tuple[float, float]
    """Relative and absolute limit."""
    compare: Callable[..., float] = apart
    moved: float = 1e-3
    """The guard: the largest gradient is no smaller."""
    draws: bool = False


GROUPS = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 7}
PREFERENCES = {"per_device_train_batch_size": 2, "beta": 0.5, "learning_rate": 0.005}
KINDS = {
    "SFT": Kind(
        settings={"per_device_train_batch_size": 2, "learning_rate": 0.05},
        data=samples,
        losses=1e-4,
        weights=5e-4,
        metrics=(1e-3, 1e-5),
        compare=distance,
        moved=1e-4,
    ),
    "DPO": Kind(settings=PREFERENCES, data=preferences, losses=1e-4, weights=1e-4, metrics=(1e-3, 1e-4)),
    "KTO": Kind(
        settings={**PREFERENCES, "per_device_train_batch_size": 4},
        data=ratings,
        losses=1e-4,
        weights=1e-4,
        metrics=(1e-3, 1e-4),
    ),
    "RLOO": Kind(settings=GROUPS, data=prompts, losses=1e-4, weights=1e-4, metrics=(1e-3, 1e-4), draws=True),
    "Distillation": Kind(
        settings={"per_device_train_batch_size": 3, "max_completion_length": 7, "learning_rate": 0.05},
        data=prompts,
        losses=1e-5,
        weights=1e-5,
        metrics=(1e-4, 1e-5),
        draws=True,
    ),
    "GRPO": Kind(settings=GROUPS, data=prompts, losses=1e-5, weights=1e-5, metrics=(1e-4, 1e-5), draws=True),
}
FIRST_LOSS = {"SFT": 1e-4, "DPO": 1e-4, "KTO": 1e-4, "RLOO": 1e-4, "Distillation": 1e-5, "GRPO": 1e-6, "vespo": 4e-6}
"""Relative limits; vespo's powers of ratios round more."""
SHARED = {"share_prefixes": SharePrefixes(min_shared=4)}  # prompts of these runs are short


def run_of(
    name: str,
    trainer: Any,
    model: Any,
    folder: Path,
    *,
    dataset: Any = None,
    processor: Any = None,
    extras: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> Any:
    """Make a trainer; one that draws samples draws one to seven tokens, without placeholders of media."""
    kind, core = KINDS[name], find_model(model)
    processor = processor or processor_of(core.config.model_type)
    more = dict(extras)
    if kind.draws:
        ends = [[[processor.tokenizer.eos_token_id], 5.5]]
        settings = {"generation_kwargs": {"suppress_tokens": placeholders(core), "sequence_bias": ends}, **settings}
        if name == "Distillation":
            more["teacher_model"] = tiny_model(
                core.config.model_type, processor=processor, hidden=64, heads=2, layers=2
            )
        else:
            more["reward_funcs"] = reward
    if trainer.__name__.startswith("Packed") and name != "SFT":
        more = {**SHARED, **more}
    return trainer(
        model,
        args=arguments(f"{name}Config", folder, **{**kind.settings, **settings}),
        train_dataset=kind.data() if dataset is None else dataset,
        processing_class=processor,
        **more,
    )


def compared(
    name: str,
    folder: Path,
    family: str = "qwen3_vl",
    *,
    steps: int = 3,
    padded: Any = None,
    adapted: Callable[[Any], Any] = lambda model: model,
    enabled: Callable[[Any], Any] = lambda model: model,
    **settings: Any,
) -> Any:
    """Take the same steps with TRL's trainer and with ours, and compare them; return ours."""
    kind, runs, found = KINDS[name], [], []
    ours = getattr(vlmpack.trainer.trl, f"Packed{name}Trainer")
    for trainer in (padded or getattr(trl, f"{name}Trainer"), ours):  # one after the other: it seeds the generator
        model = adapted(saved(folder, family))
        model = enabled(model) if trainer is ours else model
        runs.append(run_of(name, trainer, model, folder, max_steps=steps, **settings))
        if trainer is ours:
            check_trainer(runs[-1])
        found.append(finish(runs[-1]))
    (truth, reference), (packed, weights) = found
    assert len(truth.losses) == len(packed.gradients) == len(truth.gradients) == steps
    first = FIRST_LOSS[name if settings.get("loss_type") != "vespo" else "vespo"]
    assert packed.losses[0] == pytest.approx(truth.losses[0], rel=first, abs=1e-6)
    assert packed.losses == pytest.approx(truth.losses, rel=kind.losses, abs=1e-5)  # of weights apart by rounding
    assert max(float(gradient.abs().max()) for each in truth.gradients for gradient in each.values()) > kind.moved
    errors = [apart(*gradients) for gradients in zip(truth.gradients, packed.gradients, strict=True)]
    assert errors[0] < 1e-5
    assert name != "GRPO" or max(errors) < 2e-4  # vespo's weights are exponentials of sums of ratios, and magnify it
    assert kind.compare(reference, weights) < kind.weights
    logs = [run.state.log_history[:-1] for run in runs]
    for expected, seen in zip(*logs, strict=True):
        assert "entropy" in expected or "kl" in expected
        expected = {metric: value for metric, value in expected.items() if metric != "step_time"}
        relative, absolute = kind.metrics
        assert {metric: seen[metric] for metric in expected} == pytest.approx(expected, rel=relative, abs=absolute)
    assert min(entry["packing/computed"] for entry in logs[1]) < 0.9  # padding was skipped
    return runs[1]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    own = folder / os.environ["RANK"]  # each rank has a policy of its own on disk, of equal weights
    own.mkdir()
    settings = {"beta": 0.2, "num_iterations": 2, "gradient_accumulation_steps": 2, "max_steps": 2}
    for trainer in (trl.GRPOTrainer, vlmpack.trainer.trl.PackedGRPOTrainer):
        run = run_of("GRPO", trainer, saved(own), own, ddp_backend="gloo", **settings)
        found, weights = finish(run)
        assert run.model_wrapped is not run.model
        if torch.distributed.get_rank() == 0:
            torch.save((found.losses, weights), folder / f"{trainer.__name__}.pt")
    torch.distributed.barrier()  # no rank leaves while another still communicates
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # threads of gloo and of DDP sometimes abort a process that takes itself apart
