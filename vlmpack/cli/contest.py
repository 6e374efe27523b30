"""The same training twice, through Hugging Face Trainer: padded and unmodified, then packed.

Same records in the same order, same seeds, same initial weights; what is measured is measured the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any, final

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from vlmpack.collate import BatchLayout, VLMCollator
from vlmpack.data import to_conversation
from vlmpack.layout import METADATA_KEY, HostMetadata
from vlmpack.machine import peak_bytes
from vlmpack.model import enable_packing


@final
@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How both trainings run."""

    steps: int
    """Optimiser steps."""
    batch_size: int
    """Samples in a step."""
    learning_rate: float
    """Of AdamW, constant."""
    seed: int
    """Of the order of the records."""
    device: torch.device
    """Where the model is trained."""
    scratch: Path
    """A folder for what Trainer wants to write."""


@final
@dataclass(frozen=True, kw_only=True)
class Run:
    """One training, measured."""

    layout: BatchLayout
    """"padded" or "packed"."""
    lengths: tuple[tuple[int, ...], ...]
    """Real tokens of each sample, by step."""
    physical: tuple[int, ...]
    """Tokens that went through the model, by step."""
    seconds: tuple[float, ...]
    """Forward, backward and optimiser of each step."""
    losses: tuple[float, ...]
    """Loss (nats per target) of each step."""
    peak_bytes: int
    """Most memory during a forward and backward pass of the batch with the most padding and tokens."""

    @property
    def real_tokens(self) -> int:
        """Tokens of samples, over all steps."""
        return sum(map(sum, self.lengths))

    @property
    def physical_tokens(self) -> int:
        """Tokens that went through the model, over all steps."""
        return sum(self.physical)

    @property
    def fill(self) -> float:
        """Part of the physical tokens that is real."""
        return self.real_tokens / self.physical_tokens

    @property
    def step_seconds(self) -> float:
        """Median step, the first one (which warms everything up) left out."""
        return median(self.seconds[1:] or self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Real tokens of a step on average over the seconds of the median one, the first step left out of both.

        Two runs on the same samples are as far apart in this as in `step_seconds`.
        """
        return mean(map(sum, self.lengths[1:] or self.lengths)) / self.step_seconds


@final
@dataclass(frozen=True, kw_only=True)
class Conversations(torch.utils.data.Dataset[dict[str, Any]]):
    """Receipts as conversations, a map-style dataset for Trainer."""

    records: Any
    """What `load_cord` gives."""

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return to_conversation(self.records[index], index=index)


def run(
    layout: BatchLayout,
    model: nn.Module,
    records: torch.utils.data.Dataset[dict[str, Any]],
    collator: VLMCollator,
    settings: TrainingSettings,
    tick: Callable[[float], None],
) -> Run:
    """Train `model` (in place) on `records`.

    Args:
        layout: of the batches that `collator` gives; "packed" also enables packing on the model.
        model: the freshly made model.
        records: conversations.
        collator: makes batches of this layout.
        settings: steps and so on.
        tick: called after each step with its loss.
    """
    if layout == "packed":
        enable_packing(model)
    recorder = Recorder(collator=collator, keep_metadata=layout == "packed")
    losses: list[torch.Tensor] = []
    hook = model.register_forward_hook(lambda module, given, output: losses.append(output.loss.detach()))
    watch = Stopwatch(settings.device, after_step=lambda: tick(float(losses[-1])))
    trainer = Trainer(
        model=model, args=_arguments(settings), train_dataset=records, data_collator=recorder, callbacks=[watch]
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    hook.remove()
    del trainer  # and with it the optimiser's memory
    steps = len(watch.seconds)
    return Run(
        layout=layout,
        lengths=tuple(metadata.lengths for metadata in recorder.metadata[:steps]),
        physical=tuple(recorder.physical[:steps]),
        seconds=tuple(watch.seconds),
        losses=tuple(float(loss) for loss in losses),
        peak_bytes=_peak_bytes(model, recorder.largest, settings.device),
    )


def _peak_bytes(model: nn.Module, batch: dict[str, Any], device: torch.device) -> int:
    model.zero_grad(set_to_none=True)
    placed = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    tensors = [value for value in placed.values() if isinstance(value, torch.Tensor)]

    def step() -> None:
        model(**placed).loss.backward()

    peak = peak_bytes(step, held=[*model.parameters(), *tensors], device=str(device))
    model.zero_grad(set_to_none=True)
    return peak


def _arguments(settings: TrainingSettings) -> TrainingArguments:
    arguments = TrainingArguments(
        output_dir=str(settings.scratch),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant",
        seed=settings.seed,
        data_seed=settings.seed,
        use_cpu=settings.device.type == "cpu",
        dataloader_pin_memory=settings.device.type != "cpu",
        dataloader_drop_last=True,
        remove_unused_columns=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    # On several GPUs Trainer would wrap the model in DataParallel, which cuts batches apart.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


@final
@dataclass(kw_only=True)
class Recorder:
    """A collator that remembers the size of every batch it made."""

    collator: VLMCollator
    """Makes the batches."""
    keep_metadata: bool
    """Whether the model understands the host's metadata; an unmodified one must not see them."""
    metadata: list[HostMetadata] = field(default_factory=list)
    """Of each batch."""
    physical: list[int] = field(default_factory=list)
    """Tokens of each batch, padding included."""
    largest: dict[str, Any] = field(default_factory=dict)
    """The batch that is, or would be, the largest when padded."""
    _area: int = 0

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One batch."""
        batch = self.collator(features)
        metadata: HostMetadata = batch[METADATA_KEY]
        self.metadata.append(metadata)
        self.physical.append(batch["input_ids"].numel())
        if not self.keep_metadata:
            del batch[METADATA_KEY]
        if len(metadata.lengths) * max(metadata.lengths) > self._area:
            self._area, self.largest = len(metadata.lengths) * max(metadata.lengths), batch
        return batch


@final
class Stopwatch(TrainerCallback):
    """Seconds of each step, from when its batch is there to when its optimiser is done."""

    def __init__(self, device: torch.device, *, after_step: Callable[[], None]) -> None:
        self.seconds: list[float] = []
        self._device = device
        self._after_step = after_step
        self._started = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start."""
        self._started = self._now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Stop."""
        self.seconds.append(self._now() - self._started)
        self._after_step()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
