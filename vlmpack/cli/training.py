"""Train a model twice with Hugging Face Trainer, padded and packed, and measure both the same way.

Same receipts in the same order, same seeds, same initial weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean, median
from typing import Any, final

import torch
from torch import nn
from transformers import AutoModelForImageTextToText, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from vlmpack.cli.inputs import SYNTHETIC, open_samples, reading
from vlmpack.collate.collator import BatchLayout, VLMCollator
from vlmpack.data.cord import load_cord
from vlmpack.data.open import OpenDataset
from vlmpack.data.processor import load_processor
from vlmpack.errors import ConfigError
from vlmpack.families.registry import family_of
from vlmpack.layout.batch import METADATA_KEY, HostMetadata
from vlmpack.machine import peak_bytes
from vlmpack.model.enable import disable_packing, enable_packing
from vlmpack.testing.comparison import GradientCosine, run_alone, run_packed, smallest_cosine
from vlmpack.testing.models import tiny_model
from vlmpack.testing.processors import tiny_processor
from vlmpack.testing.samples import Sample

TINY_RATE, PRETRAINED_RATE = 1e-3, 1e-5
"""Learning rates of AdamW."""
TINY_SIZES: dict[str, Any] = {"hidden": 128, "layers": 4, "vision_hidden": 64, "vision_heads": 4}
TOKENS = ("input_ids", "labels", "mm_token_type_ids")
"""Tensors of a batch with one entry a token."""
NOT_OF_SAMPLES = ("attention_mask", METADATA_KEY)


@final
@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of both trainings, and what they start from."""

    model: str | None
    """Hub id or folder; None: a small random one."""
    data: str
    """"synthetic", or a source of CORD."""
    device: str
    """"cpu" or "cuda"."""
    dtype: str
    """"float32" or "bfloat16"."""
    steps: int
    """Optimizer steps of each training."""
    batch_size: int
    """Samples in a step."""
    seed: int
    """Of weights, receipts and their order."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """Element type of weights and pixels."""
        return getattr(torch, self.dtype)

    @property
    def title(self) -> str:
        """Model and element type in a few words."""
        return f"{self.model or 'a small model of 4 layers of width 128 with random weights'}, {self.dtype}"

    @cached_property
    def processor(self) -> Any:
        """Processor of the model.

        Raises:
            ConfigError: it cannot be read.
        """
        with reading("--model", self.model or ""):
            return load_processor(self.model) if self.model else tiny_processor()

    @cached_property
    def receipts(self) -> OpenDataset:
        """Conversations, as many as both trainings need.

        Raises:
            ConfigError: they cannot be read, are too few, or are no receipts.
        """
        if self.data != SYNTHETIC and "ground_truth" not in load_cord(self.data).rows.row(0):
            raise ConfigError(
                f"--data {self.data}: the demo trains on receipts alone, with the columns image and ground_truth of "
                "CORD: give synthetic, a hub id, a folder or a parquet file; `vlmpack train` trains on other data"
            )
        num = self.steps * self.batch_size
        return open_samples(self.data, num=num, seed=self.seed, small=self.model is None)

    def make_model(self) -> Any:
        """Make the model with its initial weights, the same at every call.

        Raises:
            ConfigError: it cannot be read. FamilyError: it cannot be packed exactly.
        """
        dtype = self.torch_dtype
        if self.model is None:
            model: Any = tiny_model(processor=self.processor, **TINY_SIZES, seed=self.seed, dtype=dtype, lively=False)
        else:
            with reading("--model", self.model):
                model = AutoModelForImageTextToText.from_pretrained(self.model, dtype=dtype, attn_implementation="sdpa")
        # A cache would cost the padded run memory without use; the packed one never makes any.
        family_of(model).text_config(model.config).use_cache = False
        return model.to(self.device).train()

    def arguments(self, scratch: str) -> TrainingArguments:
        """Make the arguments of Trainer, which writes into the folder `scratch`."""
        arguments = TrainingArguments(
            scratch, max_steps=self.steps, per_device_train_batch_size=self.batch_size,
            learning_rate=TINY_RATE if self.model is None else PRETRAINED_RATE, lr_scheduler_type="constant",
            seed=self.seed, use_cpu=self.device == "cpu", dataloader_pin_memory=self.device != "cpu",
            dataloader_drop_last=True, remove_unused_columns=False, save_strategy="no", logging_strategy="no",
            report_to="none", disable_tqdm=True,
        )  # fmt: skip
        # On several GPUs Trainer would wrap the model in DataParallel, which cuts batches apart.
        arguments._n_gpu = min(arguments.n_gpu, 1)
        return arguments


# ---------------------------------------------------------------------- one training


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
    """Forward, backward and optimizer of each step."""
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
        """Fill ratio: real tokens over physical ones."""
        return self.real_tokens / self.physical_tokens

    @property
    def step_seconds(self) -> float:
        """Median step, without the first one, which warms everything up."""
        return median(self.seconds[1:] or self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Mean real tokens of a step over the seconds of the median one, both without the first step.

        Two runs on the same samples are as far apart in this as in `step_seconds`.
        """
        return mean(map(sum, self.lengths[1:] or self.lengths)) / self.step_seconds


def train(layout: BatchLayout, model: nn.Module, setup: Setup, *, scratch: str, report: Callable[[int], None]) -> Run:
    """Train `model` in place.

    Args:
        layout: of the batches; "packed" also enables packing on the model.
        model: from `setup.make_model`.
        setup: receipts and settings.
        scratch: a folder for Trainer.
        report: called after each step with the number of steps done.
    """
    if layout == "packed":
        enable_packing(model)
    collate = VLMCollator(setup.processor, layout=layout, pixel_dtype=setup.torch_dtype)
    meter = Meter(collate, setup.device, keep_metadata=layout == "packed", report=report)
    hook = model.register_forward_hook(lambda module, args, output: meter.losses.append(output.loss.detach()))
    trainer = Trainer(
        model=model, args=setup.arguments(scratch), train_dataset=setup.receipts, data_collator=meter, callbacks=[meter]
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    hook.remove()
    del trainer  # and with it the optimizer's memory
    steps = len(meter.seconds)
    return Run(
        layout=layout,
        lengths=tuple(metadata.lengths for metadata in meter.metadata[:steps]),
        physical=tuple(meter.physical[:steps]),
        seconds=tuple(meter.seconds),
        losses=tuple(float(loss) for loss in meter.losses),
        peak_bytes=_peak_of_step(model, meter.largest, setup.device),
    )


@final
class Meter(TrainerCallback):
    """Record the size of every batch, and the seconds of every step from its batch to the end of its optimizer.

    Args:
        collator: makes the batches.
        device: of the model.
        keep_metadata: leave the metadata on the host in the batch; an unmodified model does not accept it.
        report: called after each step with the number of steps done.
    """

    def __init__(
        self, collator: VLMCollator, device: str, *, keep_metadata: bool, report: Callable[[int], None]
    ) -> None:
        self.metadata: list[HostMetadata] = []
        self.physical: list[int] = []
        self.largest: dict[str, Any] = {}
        self.seconds: list[float] = []
        self.losses: list[torch.Tensor] = []
        self._collator, self._device, self._keep_metadata, self._report = collator, device, keep_metadata, report
        self._area, self._start = 0, 0.0

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Make one batch."""
        batch = self._collator(features)
        metadata: HostMetadata = batch[METADATA_KEY]
        self.metadata.append(metadata)
        self.physical.append(batch["input_ids"].numel())
        if not self._keep_metadata:
            del batch[METADATA_KEY]
        area = len(metadata.lengths) * max(metadata.lengths)  # when padded
        if area > self._area:
            self._area, self.largest = area, batch
        return batch

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._start = self._now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Stop the clock."""
        self.seconds.append(self._now() - self._start)
        self._report(len(self.seconds))

    def _now(self) -> float:
        if self._device == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def packed_against_alone(
    model: nn.Module, processor: Any, conversations: Sequence[Mapping[str, Any]]
) -> GradientCosine:
    """Compare gradients of one batch's loss: as a packed row, and sample by sample through the unmodified model.

    The model is put into float32 and keeps that; its weights stay the same, and packing is disabled.
    """
    model.float().eval()
    collate = VLMCollator(processor, pixel_dtype=torch.float32)
    pack = VLMCollator(processor, layout="packed", pixel_dtype=torch.float32)
    batches = [collate([conversation]) for conversation in conversations]
    samples = [
        Sample(
            {name: batch[name][0] if name in TOKENS else batch[name] for name in batch if name not in NOT_OF_SAMPLES}
        )
        for batch in batches
    ]
    alone = run_alone(disable_packing(model), samples)
    return smallest_cosine(run_packed(model, pack.collate(conversations), samples).gradients, alone.gradients)


def _peak_of_step(model: nn.Module, batch: Mapping[str, Any], device: str) -> int:
    model.zero_grad(set_to_none=True)
    placed = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    tensors = [value for value in placed.values() if isinstance(value, torch.Tensor)]
    peak = peak_bytes(lambda: model(**placed).loss.backward(), held=[*model.parameters(), *tensors], device=device)
    model.zero_grad(set_to_none=True)
    return peak
