"""Train a model twice, padded and packed, and measure both the same way.

Both trainings have the same samples in the same order, and the same initial weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, final

import torch
from torch import nn

from vlmpack.cli.demo import DemoOptions
from vlmpack.cli.inputs import open_samples
from vlmpack.cli.models import named_processor, open_model
from vlmpack.collate.collator import BatchLayout, VLMCollator
from vlmpack.data.open import OpenDataset
from vlmpack.families.registry import family_of
from vlmpack.layout.batch import METADATA_KEY
from vlmpack.machine import peak_bytes
from vlmpack.model.enable import disable_packing, enable_packing
from vlmpack.testing.comparison import GradientCosine, run_alone, run_packed, smallest_cosine
from vlmpack.testing.models import tiny_model
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

    def measures(self) -> dict[str, float]:
        """Return what is compared. Times are without the first step, which warms up."""
        real, physical = sum(map(sum, self.lengths)), sum(self.physical)
        seconds = median(self.seconds[1:] or self.seconds)
        return {
            "real tokens": real,
            "physical tokens": physical,
            "fill ratio, %": 100 * real / physical,
            "step time, ms": 1000 * seconds,
            "real tokens/s": mean(map(sum, self.lengths[1:] or self.lengths)) / seconds,
            "peak memory, MiB": self.peak_bytes / 2**20,
        }


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
        self.processor: Any = named_processor(options.model or "tiny")
        num = options.steps * options.batch_size
        self.samples: OpenDataset = open_samples(options.data, num=num, seed=options.seed, small=options.model is None)
        """As many conversations as a training needs."""
        size, measure = options.batch_size, VLMCollator(self.processor).measure
        lengths = [measure(sample).num_tokens for sample in self.samples]
        self.lengths = tuple(tuple(lengths[at : at + size]) for at in range(0, num, size))
        """Real tokens of each sample, by step."""
        self.title = f"{options.model or 'a small random model with 4 layers of width 128'}, {options.dtype}"

    def make_model(self) -> Any:
        """Make the model, with the same initial weights in each call.

        Raises:
            ConfigError: it cannot be read. FamilyError: it cannot be packed exactly.
        """
        name, seed = self._options.model, self._options.seed
        if name is None:
            sizes: dict[str, Any] = {**TINY_SIZES, "dtype": self._dtype, "lively": False}
            model: Any = tiny_model(processor=self.processor, seed=seed, **sizes)
        else:
            model = open_model(name, self.processor, self._dtype)
        # A cache would only cost the padded run memory; the packed run never uses one.
        family_of(model).text_config(model.config).use_cache = False
        return model.to(self._options.device).train()

    def train(self, layout: BatchLayout, model: nn.Module, *, report: Callable[[int], None]) -> Run:
        """Train a model in place, as HF Trainer does by default.

        Args:
            layout: layout of the batches; "packed" also enables packing on the model.
            model: from `make_model`.
            report: called after each step with the number of steps done.
        """
        if layout == "packed":
            enable_packing(model)
        collator = VLMCollator(self.processor, layout=layout, pixel_dtype=self._dtype)
        rate = TINY_RATE if self._options.model is None else PRETRAINED_RATE
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0)
        physical, seconds, losses = [], [], []
        for step in range(self._options.steps):
            batch = self._batch(collator, step)
            start = self._now()
            loss = model(**batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(self._now() - start)
            physical.append(batch["input_ids"].numel())
            losses.append(float(loss))
            report(step + 1)
        del optimizer  # frees its memory
        largest = max(range(len(losses)), key=lambda step: max(self.lengths[step]))  # if padded
        return Run(
            layout=layout,
            lengths=self.lengths,
            physical=tuple(physical),
            seconds=tuple(seconds),
            losses=tuple(losses),
            peak_bytes=self._peak_of_step(model, self._batch(collator, largest)),
        )

    def _batch(self, collator: VLMCollator, step: int) -> dict[str, Any]:
        """Make the batch of a step, on the device."""
        size = self._options.batch_size
        batch = collator([self.samples[at] for at in range(step * size, (step + 1) * size)])
        if collator.layout == "padded":
            del batch[METADATA_KEY]  # an unmodified model does not accept it
        device = self._options.device
        return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}

    def _now(self) -> float:
        if self._options.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _peak_of_step(self, model: nn.Module, batch: Mapping[str, Any]) -> int:
        tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
        held = [*model.parameters(), *tensors]
        peak = peak_bytes(lambda: model(**batch).loss.backward(), held=held, device=self._options.device)
        model.zero_grad(set_to_none=True)
        return peak


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
