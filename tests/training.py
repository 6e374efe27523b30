"""HF Trainer runs over random samples: what the trainer tests share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from vlmpack.layout import pack
from vlmpack.model import is_packing
from vlmpack.testing import Sample, alone, mixed_samples, padded
from vlmpack.trainer import loss_metrics

LAYOUTS = ("padded", "packed")
KINDS = ("image", "text", "images", "image", "text", "images", "image")


class Samples(Dataset):
    """A map-style dataset of samples."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = list(samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]


class Stream(IterableDataset):
    """The same as a stream."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = list(samples)

    def __iter__(self):
        return iter(self.samples)


def collator(layout: str, **more: Any):
    """What `VLMCollator(layout=...)` gives, for samples that need no processor; `more` goes into every batch."""

    def collate(features: Sequence[Sample]) -> dict[str, Any]:
        batch = padded(features)
        return {**(pack(batch) if layout == "packed" else batch).to_hf(), **more}

    return collate


def weights_of(input_ids: torch.Tensor) -> torch.Tensor:
    """A weight of each label, by its token."""
    return 0.5 + input_ids % 4 / 2


def channel_of(sample: Sample) -> str:
    """The data set of a sample, by its length."""
    return "long" if len(sample["input_ids"]) > 30 else "short"


def weighing(layout: str):
    """The same as `collator` with weights of labels and the samples' channels."""

    def collate(features: Sequence[Sample]) -> dict[str, Any]:
        batch = padded(features)
        metadata = replace(batch.metadata, channels=tuple(map(channel_of, features)))
        batch = replace(batch, loss_weights=weights_of(batch.input_ids), metadata=metadata)
        return (pack(batch) if layout == "packed" else batch).to_hf()

    return collate


def loss_alone(model: Any, samples: Sequence[Sample], loss: str) -> torch.Tensor:
    """The weighted loss as it is written down, of every sample alone through an untouched model."""
    total, items = torch.zeros(()), 0.0
    for sample in samples:
        logits = model(**{**alone(sample), "labels": None}).logits[0].float()
        losses = F.cross_entropy(logits[:-1], sample["labels"][1:], reduction="none")
        count = int((sample["labels"][1:] != -100).sum())
        factor = {"token": 1, "sample": 1 / max(count, 1), "square": max(count, 1) ** -0.5}[loss]
        total, items = total + factor * (weights_of(sample["input_ids"])[1:] * losses).sum(), items + factor * count
    return total / items


def receipts(model: Any, *, seed: int = 3, kinds: Sequence[Any] = KINDS) -> list[Sample]:
    """Seven samples of unlike length: an odd number, so that the last batch is a small one."""
    return mixed_samples(model.config, seed=seed, kinds=kinds)


def lengths_of(samples: Sequence[Sample]) -> list[int]:
    """Tokens of each sample."""
    return [len(sample["input_ids"]) for sample in samples]


def arguments(folder: Any, **settings: Any) -> TrainingArguments:
    """Plain SGD without clipping or decay, so that weights show gradients; everything else is Trainer's default."""
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
    }
    return TrainingArguments(**{**defaults, **settings})


def checkpointing(**kwargs: Any) -> dict[str, Any]:
    """Settings that switch gradient checkpointing on: transformers 5.23 has renamed it."""
    new = "activation_checkpointing" in TrainingArguments.__dataclass_fields__
    name = "activation_checkpointing" if new else "gradient_checkpointing"
    return {name: True, f"{name}_kwargs": kwargs or None}


class Gradients(TrainerCallback):
    """Keeps a copy of every parameter's gradient, as the optimiser gets it, of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.steps.append(gradients(model))


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a training run came to, step by step."""

    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]


def trainer(model: Any, samples: Sequence[Sample], folder: Any, layout: str = "packed", **settings: Any) -> Trainer:
    """A Trainer over samples, in their order; that of an enabled model evaluates exactly."""
    settings = {"train_sampling_strategy": "sequential", **settings}
    return Trainer(
        model=model,
        args=arguments(folder, **settings),
        train_dataset=Samples(samples),
        eval_dataset=Samples(samples),
        data_collator=collator(layout),
        compute_metrics=loss_metrics(model) if is_packing(model) else None,
    )


def train(model: Any, samples: Sequence[Sample], folder: Any, layout: str = "packed", **settings: Any) -> Run:
    """Train; losses are those that Trainer logs."""
    run, seen = trainer(model, samples, folder, layout, **settings), Gradients()
    run.add_callback(seen)
    run.train()
    return Run(losses=logged(run), gradients=seen.steps)


def logged(run: Trainer) -> list[float]:
    """The loss of every step."""
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """A copy of every gradient; parameters without one are left out."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def weights(model: Any) -> dict[str, torch.Tensor]:
    """A copy of every parameter."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference between two sets of tensors, each relative to the largest entry of its own tensor."""
    assert a and a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max() / a[name].abs().max().clamp(min=1e-6)) for name in a)


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The same of two sets of gradients, a bias relative to the gradient of its weight too: the two sum the same terms,
    which in a bias may cancel."""
    assert a and a.keys() == b.keys()

    def largest(name: str) -> float:
        weight = a.get(f"{name.removesuffix('bias')}weight", a[name])
        return max(float(x.abs().max()) for x in (a[name], weight if name.endswith(".bias") else a[name]))

    return max(float((a[name] - b[name]).abs().max()) / max(largest(name), 1e-6) for name in a)


def loss_sums(model: Any, samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """(cross-entropy sums, target counts), both [B]: every sample on its own through an untouched model."""
    sums, counts = [], []
    for sample in samples:
        logits = model(**{**alone(sample), "labels": None}).logits[0].float()
        sums.append(F.cross_entropy(logits[:-1], sample["labels"][1:], reduction="sum"))
        counts.append(int((sample["labels"][1:] != -100).sum()))
    return torch.stack(sums), torch.tensor(counts)


def losses_alone(model: Any, samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same without a graph."""
    with torch.no_grad():
        return loss_sums(model, samples)


def descend(model: Any, samples: Sequence[Sample], *, size: int, steps: int, rate: float = 0.1) -> Run:
    """The reference: plain SGD on `size` samples a step, every sample alone through an untouched model."""
    losses, seen = [], []
    for step in range(steps):
        sums, counts = loss_sums(model, samples[step * size : (step + 1) * size])
        loss = sums.sum() / counts.sum()
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        seen.append(gradients(model))
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= rate * p.grad
    return Run(losses=losses, gradients=seen)
