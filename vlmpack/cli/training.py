"""Train a model twice with Hugging Face Trainer, padded and packed, and measure both the same way.

Both trainings have the same samples in the same order, the same seeds, and the same initial weights.
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

from vlmpack.cli.demo import DemoOptions
from vlmpack.cli.inputs import open_samples, reading
from vlmpack.collate.collator import BatchLayout, VLMCollator
from vlmpack.data.open import OpenDataset
from vlmpack.data.processor import load_processor
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
"""Tensors of a batch with one entry per token."""
NOT_OF_SAMPLES = ("attention_mask", METADATA_KEY)


@final
@dataclass(frozen=True, kw_only=True)
class Run:
    """Measurements of one training."""

    layout: BatchLayout
    """"padded" or "packed"."""
    lengths: tuple[tuple[int, ...], ...]
    """Real tokens of each sample, by step."""
    physical: tuple[int, ...]
    """Tokens that went through the model, by step."""
    seconds: tuple[float, ...]
    """Time of forward, backward and optimizer in each step."""
    losses: tuple[float, ...]
    """Loss (nats per target) of each step."""
    peak_bytes: int
    """Peak memory of a forward and backward pass of the largest batch."""

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
        """Fill ratio: real tokens divided by physical tokens."""
        return self.real_tokens / self.physical_tokens

    @property
    def step_seconds(self) -> float:
        """Median time of a step, without the first step, which warms up."""
        return median(self.seconds[1:] or self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Mean real tokens of a step, divided by the median time; both without the first step."""
        return mean(map(sum, self.lengths[1:] or self.lengths)) / self.step_seconds


@final
class Trainings:
    """What both trainings start from.

    Args:
        options: settings of the trainings, with a dtype.

    Raises:
        ConfigError: the processor or the samples cannot be read, or there are too few.
    """

    def __init__(self, options: DemoOptions) -> None:
        self._options = options
        self._dtype: torch.dtype = getattr(torch, str(options.dtype))
        num = options.steps * options.batch_size
        self.samples: OpenDataset = open_samples(options.data, num=num, seed=options.seed, small=options.model is None)
        """As many conversations as a training needs."""
        self.title = f"{options.model or 'a small random model with 4 layers of width 128'}, {options.dtype}"

    @cached_property
    def processor(self) -> Any:
        """The model's processor."""
        with reading("--model", self._options.model or ""):
            return load_processor(self._options.model) if self._options.model else tiny_processor()

    def make_model(self) -> Any:
        """Make the model, with the same initial weights in each call.

        Raises:
            ConfigError: it cannot be read. FamilyError: it cannot be packed exactly.
        """
        name, dtype, seed = self._options.model, self._dtype, self._options.seed
        if name is None:
            model: Any = tiny_model(processor=self.processor, **TINY_SIZES, seed=seed, dtype=dtype, lively=False)
        else:
            with reading("--model", name):
                model = AutoModelForImageTextToText.from_pretrained(name, dtype=dtype, attn_implementation="sdpa")
        # A cache would only cost the padded run memory; the packed run never uses one.
        family_of(model).text_config(model.config).use_cache = False
        return model.to(self._options.device).train()

    def train(self, layout: BatchLayout, model: nn.Module, *, scratch: str, report: Callable[[int], None]) -> Run:
        """Train a model in place.

        Args:
            layout: layout of the batches; "packed" also enables packing on the model.
            model: from `make_model`.
            scratch: a folder for Trainer.
            report: called after each step with the number of steps done.
        """
        options = self._options
        if layout == "packed":
            enable_packing(model)
        collate = VLMCollator(self.processor, layout=layout, pixel_dtype=self._dtype)
        meter = Meter(collate, options.device, keep_metadata=layout == "packed", report=report)
        hook = model.register_forward_hook(lambda module, args, output: meter.losses.append(output.loss.detach()))
        arguments = TrainingArguments(
            scratch, max_steps=options.steps, per_device_train_batch_size=options.batch_size,
            learning_rate=TINY_RATE if options.model is None else PRETRAINED_RATE, lr_scheduler_type="constant",
            seed=options.seed, use_cpu=options.device == "cpu", dataloader_pin_memory=options.device != "cpu",
            dataloader_drop_last=True, remove_unused_columns=False, save_strategy="no", logging_strategy="no",
            report_to="none", disable_tqdm=True,
        )  # fmt: skip
        arguments._n_gpu = min(arguments.n_gpu, 1)  # no DataParallel on several GPUs: it would split batches
        trainer = Trainer(model, arguments, meter, self.samples, callbacks=[meter])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        hook.remove()
        del trainer  # frees the optimizer's memory
        steps = len(meter.seconds)
        return Run(
            layout=layout,
            lengths=tuple(metadata.lengths for metadata in meter.metadata[:steps]),
            physical=tuple(meter.physical[:steps]),
            seconds=tuple(meter.seconds),
            losses=tuple(float(loss) for loss in meter.losses),
            peak_bytes=_peak_of_step(model, meter.largest, options.device),
        )


@final
class Meter(TrainerCallback):
    """Records the size of every batch, and the time of every step from its batch to the end of its optimizer.

    Args:
        collator: makes the batches.
        device: device of the model.
        keep_metadata: keep the host metadata in the batch; an unmodified model does not accept it.
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
        area = len(metadata.lengths) * max(metadata.lengths)  # if padded
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
    """Compare the gradients of a packed row with those of its samples alone in the unmodified model.

    Converts the model to float32 and disables packing; the weights stay the same.
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
