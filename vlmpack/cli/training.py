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
from vlmpack.families.registry import family_of
from vlmpack.layout.batch import METADATA_KEY
from vlmpack.machine import peak_bytes
from vlmpack.model.enable import disable_packing, enable_packing
from vlmpack.testing.comparison import GradientCosine, smallest_cosine, take_gradients
from vlmpack.testing.models import tiny_model

TINY_RATE, PRETRAINED_RATE = 1e-3, 1e-5
"""Learning rates of AdamW."""
TINY_SIZES: dict[str, Any] = {"hidden": 128, "layers": 4, "vision_hidden": 64, "vision_heads": 4}


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
        num, small = options.steps * options.batch_size, options.model is None
        self._data = open_samples(options.data, num=num, seed=options.seed, small=small)
        measure, steps = VLMCollator(self.processor).measure, range(options.steps)
        self.lengths = tuple(tuple(measure(sample).num_tokens for sample in self.samples(step)) for step in steps)
        """Real tokens of each sample, by step."""

    def samples(self, step: int) -> list[Mapping[str, Any]]:
        """Return the conversations of a step."""
        size = self._options.batch_size
        return [self._data[at] for at in range(step * size, (step + 1) * size)]

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
        device = self._options.device
        rate = TINY_RATE if self._options.model is None else PRETRAINED_RATE
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0)
        physical, seconds, losses = [], [], []
        for step in range(self._options.steps):
            batch = _inputs(collator, self.samples(step), device)
            start = _now(device)
            loss = model(**batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(_now(device) - start)
            physical.append(batch["input_ids"].numel())
            losses.append(float(loss))
            report(step + 1)
        del optimizer  # frees its memory
        largest = max(range(len(losses)), key=lambda step: max(self.lengths[step]))  # if padded
        batch = _inputs(collator, self.samples(largest), device)
        held = [*model.parameters(), *(value for value in batch.values() if isinstance(value, torch.Tensor))]
        peak = peak_bytes(lambda: model(**batch).loss.backward(), held=held, device=device)
        model.zero_grad()
        return Run(
            layout=layout,
            lengths=self.lengths,
            physical=tuple(physical),
            seconds=tuple(seconds),
            losses=tuple(losses),
            peak_bytes=peak,
        )


def _inputs(collator: VLMCollator, samples: Sequence[Mapping[str, Any]], device: Any) -> dict[str, Any]:
    """Return a batch on the device. A padded one has no metadata, which an unmodified model does not accept."""
    batch = collator(samples)
    if collator.layout == "padded":
        del batch[METADATA_KEY]
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def packed_against_alone(
    model: nn.Module, processor: Any, conversations: Sequence[Mapping[str, Any]]
) -> GradientCosine:
    """Compare the gradients of a packed row with those of its samples alone in the unmodified model.

    Converts the model to float32; the weights stay the same.
    """
    disable_packing(model.float().eval())
    device = next(model.parameters()).device
    one, row = (VLMCollator(processor, layout=layout, pixel_dtype=torch.float32) for layout in ("padded", "packed"))
    samples = [_inputs(one, [conversation], device) for conversation in conversations]
    targets = [int((sample["labels"][:, 1:] >= 0).sum()) for sample in samples]
    for sample, count in zip(samples, targets, strict=True):
        (model(**sample).loss * count / sum(targets)).backward()
    alone = take_gradients(model)
    enable_packing(model)(**_inputs(row, conversations, device)).loss.backward()
    return smallest_cosine(take_gradients(model), alone)
