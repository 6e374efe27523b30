"""pixels: the patches of a batch joined in memory that is used again, against new memory and against a plain copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.utils.data import DataLoader

from vlmpack.bench.figure import Figure, Target
from vlmpack.bench.settings import BenchSettings
from vlmpack.bench.timing import alternate, one_thread
from vlmpack.collate.buffers import PixelBuffers

CASE = "pixels"
OVER_A_COPY = Target(limit=1.3, better="lower")
FROM_A_WORKER = Target(limit=4.0, better="higher")
BATCHES = 6
"""Batches that are taken from a worker for one measurement; one more is prefetched in the meantime."""


@final
@dataclass(frozen=True, kw_only=True)
class PixelShapes:
    """Images to join."""

    images: int = 8
    """Images in a batch."""
    patches: int = 3500
    """Patches of each."""
    values: int = 1536
    """Values of a patch: those of Qwen3-VL."""


def measure_pixels(settings: BenchSettings, shapes: PixelShapes) -> list[Figure]:
    """Join the same images in this process, then in a DataLoader's worker that hands each batch over."""
    parts = [torch.randn(shapes.patches, shapes.values) for _ in range(shapes.images)]
    return [*_here(settings, parts), *_from_a_worker(settings, parts)]


def _here(settings: BenchSettings, parts: list[torch.Tensor]) -> Iterator[Figure]:
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
            },
            seconds=settings.seconds / 2,
        )
    yield Figure.timed(CASE, f"one copy of {warm.nbytes / 2**20:.0f} MiB", timings, "copy", settings)
    for name in ways:
        target = OVER_A_COPY if name == "used again" else None
        title = f"joined, {'memory ' if name != 'bfloat16' else ''}{name} / one copy"
        yield Figure.compared(CASE, title, timings, (name, "copy"), settings, target=target)


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
    """A collate function that does nothing else."""

    parts: list[torch.Tensor]
    buffers: PixelBuffers

    def __call__(self, _: list[int]) -> dict[str, torch.Tensor]:
        torch.set_num_threads(1)
        return {"pixel_values": self.buffers.join(self.parts, torch.float32)}
