"""pixels: patches of a batch joined in memory that is used again, against new memory and against a plain copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, final

import torch
from torch.utils.data import DataLoader

from vlmpack.bench.figure import Figure, Target
from vlmpack.bench.settings import BenchSettings
from vlmpack.bench.timing import alternate, one_thread
from vlmpack.collate import PixelBuffers, VLMCollator
from vlmpack.data import tiny_processor
from vlmpack.layout import Grid

CASE = "pixels"
OVER_A_COPY = Target(limit=1.3, better="lower")
FROM_A_WORKER = Target(limit=4.0, better="higher")
WORD = 64
"""Some token of text."""
BATCHES = 6
"""Batches that are taken from a worker for one measurement; one more is prefetched in the meantime."""


@final
@dataclass(frozen=True, kw_only=True)
class PixelShapes:
    """Images to join."""

    images: int = 8
    """Images in a batch."""
    grid: Grid = (1, 50, 70)
    """Patches of each."""
    patch_size: int = 16
    """Pixels a side of a patch: those of Qwen3-VL, 1536 values a patch."""
    words: int = 400
    """Tokens of text beside each image, for a whole collation."""


def measure_pixels(settings: BenchSettings, shapes: PixelShapes) -> list[Figure]:
    """Join the same images in this process and collate their samples; then a DataLoader's worker hands batches over."""
    collator, samples = _collator_and_samples(settings, shapes)
    parts = [sample["pixel_values"] for sample in samples]
    return [*_here(settings, parts, lambda: collator(samples)), *_from_a_worker(settings, parts)]


def _here(settings: BenchSettings, parts: list[torch.Tensor], collate: Callable[[], object]) -> Iterator[Figure]:
    ways = {"used again": PixelBuffers(), "new": PixelBuffers(0), "bfloat16": PixelBuffers()}
    warm = torch.cat(parts)
    source = warm.clone()
    with one_thread():
        timings = alternate(
            {
                "copy": lambda: warm.copy_(source),
                "used again": lambda: ways["used again"].join(parts, torch.float32),
                "new": lambda: ways["new"].join(parts, torch.float32),
                "bfloat16": lambda: ways["bfloat16"].join(parts, torch.bfloat16),
                "collated": collate,
            },
            seconds=settings.seconds / 2,
        )
    yield Figure.timed(CASE, f"one copy of {warm.nbytes / 2**20:.0f} MiB", timings, "copy", settings)
    titles = {
        "used again": "joined and looked at, memory used again / one copy",
        "new": "joined and looked at, memory new / one copy",
        "bfloat16": "joined and looked at, bfloat16 / one copy",
        "collated": "whole samples collated / one copy of their pixels",
    }
    for name, title in titles.items():
        target = OVER_A_COPY if name in ("used again", "collated") else None
        yield Figure.compared(CASE, title, timings, (name, "copy"), settings, target=target)


def _collator_and_samples(
    settings: BenchSettings, shapes: PixelShapes
) -> tuple[VLMCollator, list[dict[str, torch.Tensor]]]:
    """Tokenised samples of one image, which is patches already, and some text, all of which is learnt."""
    torch.manual_seed(settings.seed)
    processor = tiny_processor("qwen3_vl")
    processor.image_processor.patch_size = shapes.patch_size
    collator = VLMCollator(processor, layout="packed", train_on="all")
    metadata = collator.metadata
    image = [metadata.image_token_id] * (prod(shapes.grid) // metadata.merge_size**2)
    ids = torch.tensor([metadata.vision_start_id, *image, metadata.vision_end_id, *[WORD] * shapes.words])
    samples = [
        {
            "input_ids": ids,
            "pixel_values": torch.randn(prod(shapes.grid), metadata.patch_dim),
            "image_grid_thw": torch.tensor([shapes.grid]),
        }
        for _ in range(shapes.images)
    ]
    return collator, samples


def _from_a_worker(settings: BenchSettings, parts: list[torch.Tensor]) -> Iterator[Figure]:
    """Always by the wall clock: most of the work is another process's."""
    with _loader(parts, PixelBuffers()) as again, _loader(parts, PixelBuffers(0)) as new:
        timings = alternate(
            {"used again": lambda: _take(again), "new": lambda: _take(new)}, seconds=settings.seconds / 2
        )
    spread = timings.ratio("new", "used again", "wall")
    yield Figure.measured(CASE, "from a worker, new memory / memory used again", spread, "x", target=FROM_A_WORKER)
    seconds = timings.of("used again", "wall").scaled(1 / BATCHES)
    yield Figure.measured(CASE, "from a worker, one batch", seconds, "s")


@contextmanager
def _loader(parts: list[torch.Tensor], buffers: PixelBuffers) -> Iterator[Iterator[Any]]:
    """Batches without end, joined by one forked worker."""
    joining = _Join(parts=parts, buffers=buffers)
    loader = DataLoader(
        range(2**31 - 1),  # pyright: ignore[reportArgumentType]: as many batches as anybody asks for
        collate_fn=joining,
        num_workers=1,
        prefetch_factor=1,
        multiprocessing_context="fork",
    )
    batches = iter(loader)
    try:
        yield batches
    finally:
        del batches, loader


def _take(batches: Iterator[Any]) -> None:
    for _ in range(BATCHES):
        next(batches)


@final
@dataclass(frozen=True, kw_only=True)
class _Join:
    """A collate function that only joins."""

    parts: list[torch.Tensor]
    buffers: PixelBuffers

    def __call__(self, _: list[int]) -> dict[str, torch.Tensor]:
        torch.set_num_threads(1)
        return {"pixel_values": self.buffers.join(self.parts, torch.float32)}
