"""pack, collate and pixels: what a DataLoader's worker does.

pack      ids, labels, positions and mask of a padded batch, against copying the same bytes; once with the mask
          alone, and once with lengths on the host, as `VLMCollator` gives them
collate   receipts from images and text to a packed row, against the padded batch of the same receipts
pixels    patches of a batch joined in a buffer that is used again, against new memory and against a plain copy
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, final

import torch
from torch.utils.data import DataLoader

from benchmarks.figures import BenchSettings, Figure, Target
from benchmarks.timing import alternate, one_thread
from vlmpack.collate import PixelBuffers, VLMCollator
from vlmpack.data import to_conversation
from vlmpack.layout import IGNORE, Grid, HostMetadata, PaddedBatch, lengths_from_mask, pack
from vlmpack.testing import SyntheticReceipts, tiny_processor

PACK = "pack"
FROM_MASK = Target(limit=3.0, better="lower")
FROM_FACTS = Target(limit=2.0, better="lower")


@final
@dataclass(frozen=True, kw_only=True)
class PackShapes:
    """Batches to pack."""

    batches: tuple[tuple[int, int], ...] = ((8, 4096), (16, 4096), (64, 2048))
    """(samples B, width S in tokens) of each batch."""
    ratio: float = 5.0
    """Longest over shortest sample; the lengths between are evenly spread."""


def measure_pack(settings: BenchSettings, shapes: PackShapes) -> list[Figure]:
    """Time `pack` against `copy_` into warm memory; it reads and checks the mask in either case.

    What is copied: `input_ids`, `labels` and `attention_mask` [B, S] and `position_ids` [4, B, S], all int64.
    """
    figures = []
    for samples, width in shapes.batches:
        batch = long_batch(samples, width, ratio=shapes.ratio, seed=settings.seed)
        batch = batch.to(settings.device)
        lengths = lengths_from_mask(batch.attention_mask).lengths
        with_lengths = replace(batch, metadata=HostMetadata(lengths=lengths, num_targets=sum(lengths) - len(lengths)))
        sources = list(batch.to_hf().values())
        targets = [torch.empty_like(source) for source in sources]

        def copy(sources: list[torch.Tensor] = sources, targets: list[torch.Tensor] = targets) -> None:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)

        with one_thread():
            timings = alternate(
                {
                    "pack": lambda batch=batch: pack(batch),
                    "with lengths": lambda batch=with_lengths: pack(batch),
                    "copy": copy,
                },
                seconds=settings.seconds / len(shapes.batches),
                device=settings.device,
            )
        name = f"{samples} x {width}"
        figures += [
            Figure.timed(PACK, f"pack {name}", timings, "pack", settings),
            Figure.compared(PACK, f"pack / copy {name}", timings, ("pack", "copy"), settings, target=FROM_MASK),
            Figure.compared(
                PACK, f"with lengths / copy {name}", timings, ("with lengths", "copy"), settings, target=FROM_FACTS
            ),
        ]
    return figures


def long_batch(samples: int, width: int, *, ratio: float = 5.0, seed: int = 0) -> PaddedBatch:
    """A right-padded batch of text whose lengths reach from `width / ratio` to `width`, in random order."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.linspace(width / ratio, width, samples).long()[torch.randperm(samples, generator=rng)]
    ids = torch.randint(1, 1000, (samples, width), generator=rng)
    mask = torch.arange(width) < lengths[:, None]
    return PaddedBatch(
        input_ids=ids,
        attention_mask=mask.long(),
        labels=ids.masked_fill(~mask, IGNORE),
        position_ids=torch.arange(width).expand(4, samples, width).contiguous(),
    )


COLLATE = "collate"
COLLATE_TARGET = Target(limit=1.1, better="lower")
TOKEN_AREA = 32**2
"""Pixels of one image token of Qwen3-VL."""


@final
@dataclass(frozen=True, kw_only=True)
class CollateShapes:
    """Receipts to collate."""

    samples: int = 8
    """Receipts in a batch."""
    max_image_tokens: int = 256
    """Largest image, in tokens."""


def measure_collate(settings: BenchSettings, shapes: CollateShapes) -> list[Figure]:
    """Time whole collations (decode, resize, tokenise, check, lay out), and laying out alone.

    For the second, the receipts were tokenised and their images cut into patches before.
    """
    processor = tiny_processor("qwen3_vl", max_pixels=shapes.max_image_tokens * TOKEN_AREA)
    records = SyntheticReceipts(num=shapes.samples, seed=settings.seed)
    receipts = [to_conversation(records[i]) for i in range(shapes.samples)]
    padded, packed = VLMCollator(processor, layout="padded"), VLMCollator(processor, layout="packed")
    figures = []
    for name, features in (("receipts", receipts), ("tokenised receipts", tokenised(packed, receipts))):
        with one_thread():
            timings = alternate(
                {"packed": lambda f=features: packed(f), "padded": lambda f=features: padded(f)},
                seconds=settings.seconds / 2,
            )
        figures += [
            Figure.timed(COLLATE, f"packed, {shapes.samples} {name}", timings, "packed", settings),
            Figure.compared(
                COLLATE, f"packed / padded, {name}", timings, ("packed", "padded"), settings, target=COLLATE_TARGET
            ),
        ]
    return figures


def tokenised(collator: VLMCollator, receipts: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """Each receipt after the processor: ids, labels, pixels and grid, without a batch dimension."""
    return [_without_batch_dimension(collator([receipt])) for receipt in receipts]


def _without_batch_dimension(row: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    tokens = {name: row[name][0] for name in ("input_ids", "labels")}
    return {**tokens, "pixel_values": row["pixel_values"], "image_grid_thw": row["image_grid_thw"]}


PIXELS = "pixels"
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
    return [*_in_this_process(settings, parts, lambda: collator(samples)), *_from_a_worker(settings, parts)]


def _in_this_process(
    settings: BenchSettings, parts: list[torch.Tensor], collate: Callable[[], object]
) -> Iterator[Figure]:
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
    yield Figure.timed(PIXELS, f"one copy of {warm.nbytes / 2**20:.0f} MiB", timings, "copy", settings)
    titles = {
        "used again": "joined and looked at, memory used again / one copy",
        "new": "joined and looked at, memory new / one copy",
        "bfloat16": "joined and looked at, bfloat16 / one copy",
        "collated": "whole samples collated / one copy of their pixels",
    }
    for name, title in titles.items():
        target = OVER_A_COPY if name in ("used again", "collated") else None
        yield Figure.compared(PIXELS, title, timings, (name, "copy"), settings, target=target)


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
    yield Figure.measured(PIXELS, "from a worker, new memory / memory used again", spread, "x", target=FROM_A_WORKER)
    seconds = timings.of("used again", "wall").scaled(1 / BATCHES)
    yield Figure.measured(PIXELS, "from a worker, one batch", seconds, "s")


@contextmanager
def _loader(parts: list[torch.Tensor], buffers: PixelBuffers) -> Iterator[Iterator[Any]]:
    """Batches without end, joined by one forked worker."""
    joining = _Join(parts=parts, buffers=buffers)
    loader = DataLoader(
        range(2**31 - 1),  # pyright: ignore[reportArgumentType]: more batches than are ever taken
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
