"""pack, collate, pixels and lengths: what a DataLoader's worker does.

pack      ids, labels, positions and mask of a padded batch, against copying the same bytes
collate   receipts from images and text to a packed row, against the padded batch of the same receipts
pixels    patches of a batch joined in memory that is used again, against new memory and against a plain copy
lengths   lengths of samples from their images' headers, against running the processor on them
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

import torch
from PIL import Image
from torch.utils.data import DataLoader

from benchmarks.measuring import BenchSettings, Figure, Target, alternate, one_thread
from vlmpack.collate import PixelBuffers, VLMCollator
from vlmpack.data import to_conversation
from vlmpack.layout import IGNORE, Grid, HostMetadata, PaddedBatch, lengths_from_mask, pack
from vlmpack.lengths import measure_lengths
from vlmpack.testing import SyntheticReceipts, tiny_processor

TOKEN_AREA = 32**2
"""Pixels of one image token of Qwen3-VL."""


@final
@dataclass(frozen=True, kw_only=True)
class PackShapes:
    """Batches to pack."""

    batches: tuple[tuple[int, int], ...] = ((8, 4096), (16, 4096), (64, 2048))
    """(samples B, width S in tokens) of each batch."""
    ratio: float = 5.0
    """Longest over shortest sample; the lengths between are evenly spread."""


def measure_pack(settings: BenchSettings, shapes: PackShapes) -> Iterator[Figure]:
    """Time `pack` against `copy_` into warm memory, with lengths on the host as a collator gives them, and without.

    What is copied: `input_ids`, `labels` and `attention_mask` [B, S] and `position_ids` [4, B, S], all int64.
    """
    for samples, width in shapes.batches:
        batch = long_batch(samples, width, ratio=shapes.ratio, seed=settings.seed).to(settings.device)
        lengths = lengths_from_mask(batch.attention_mask).lengths
        with_lengths = replace(batch, metadata=HostMetadata(lengths=lengths, num_targets=sum(lengths) - len(lengths)))
        sources = list(batch.to_hf().values())
        targets = [torch.empty_like(source) for source in sources]
        ways = {
            "pack": lambda batch=batch: pack(batch),
            "with lengths": lambda batch=with_lengths: pack(batch),
            "copy": lambda sources=sources, targets=targets: [
                a.copy_(b) for a, b in zip(targets, sources, strict=True)
            ],
        }
        with one_thread():
            timings = alternate(ways, seconds=settings.seconds / len(shapes.batches), device=settings.device)
        yield Figure.timed("pack", f"pack {samples} x {width}", timings, "pack", settings)
        for way, limit in (("pack", 3.0), ("with lengths", 2.0)):
            name, target = f"{way} / copy {samples} x {width}", Target(limit=limit, better="lower")
            yield Figure.compared("pack", name, timings, (way, "copy"), settings, target=target)


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


@final
@dataclass(frozen=True, kw_only=True)
class CollateShapes:
    """Receipts to collate."""

    samples: int = 8
    max_image_tokens: int = 256
    """Largest image, in tokens."""


def measure_collate(settings: BenchSettings, shapes: CollateShapes) -> Iterator[Figure]:
    """Time whole collations (decode, resize, tokenize, check, lay out), and laying out tokenized samples alone."""
    processor = tiny_processor("qwen3_vl", max_pixels=shapes.max_image_tokens * TOKEN_AREA)
    records = SyntheticReceipts(num=shapes.samples, seed=settings.seed)
    receipts = [to_conversation(records[i]) for i in range(shapes.samples)]
    padded, packed = VLMCollator(processor, layout="padded"), VLMCollator(processor, layout="packed")
    tokenized = []
    for receipt in receipts:
        row = packed([receipt])
        tokens = {name: row[name][0] for name in ("input_ids", "labels")}
        tokenized.append({**tokens, "pixel_values": row["pixel_values"], "image_grid_thw": row["image_grid_thw"]})
    for name, features in (("receipts", receipts), ("tokenized receipts", tokenized)):
        ways = {"packed": lambda f=features: packed(f), "padded": lambda f=features: padded(f)}
        with one_thread():
            timings = alternate(ways, seconds=settings.seconds / 2)
        yield Figure.timed("collate", f"packed, {shapes.samples} {name}", timings, "packed", settings)
        of, target = ("packed", "padded"), Target(limit=1.1, better="lower")
        yield Figure.compared("collate", f"packed / padded, {name}", timings, of, settings, target=target)


# ---------------------------------------------------------------------- pixels


@final
@dataclass(frozen=True, kw_only=True)
class PixelShapes:
    """Images to join."""

    images: int = 8
    grid: Grid = (1, 50, 70)
    """Patches of each."""
    patch_size: int = 16
    """Pixels a side of a patch: those of Qwen3-VL, 1536 values a patch."""
    words: int = 400
    """Tokens of text beside each image, for a whole collation."""
    batches: int = 6
    """Batches that are taken from a worker for one measurement."""


def measure_pixels(settings: BenchSettings, shapes: PixelShapes) -> Iterator[Figure]:
    """Join the same images in this process and collate their samples; then a DataLoader's worker hands batches over."""
    collator, samples = _samples_of_patches(settings, shapes)
    parts = [sample["pixel_values"] for sample in samples]
    again, new, low = PixelBuffers(), PixelBuffers(0), PixelBuffers()
    warm = torch.cat(parts)
    source = warm.clone()
    ways = {
        "copy": lambda: warm.copy_(source),
        "joined and checked, memory used again": lambda: again.join(parts, torch.float32),
        "joined and checked, memory new": lambda: new.join(parts, torch.float32),
        "joined and checked, bfloat16": lambda: low.join(parts, torch.bfloat16),
        "whole samples collated": lambda: collator(samples),
    }
    with one_thread():
        timings = alternate(ways, seconds=settings.seconds / 2)
    yield Figure.timed("pixels", f"one copy of {warm.nbytes / 2**20:.0f} MiB", timings, "copy", settings)
    for name in [*ways][1:]:
        bounded = name.endswith(("again", "collated"))
        target = Target(limit=1.3, better="lower") if bounded else None
        yield Figure.compared("pixels", f"{name} / one copy", timings, (name, "copy"), settings, target=target)
    with _worker(parts, PixelBuffers()) as with_buffers, _worker(parts, PixelBuffers(0)) as without:
        take = {
            "again": lambda: list(islice(with_buffers, shapes.batches)),
            "new": lambda: list(islice(without, shapes.batches)),
        }
        timings = alternate(take, seconds=settings.seconds / 2)
    spread = timings.ratio("new", "again", "wall")  # most of the work is another process's
    name, target = "from a worker, new memory / memory used again", Target(limit=4.0, better="higher")
    yield Figure.measured("pixels", name, spread, "x", target=target)


def _samples_of_patches(
    settings: BenchSettings, shapes: PixelShapes
) -> tuple[VLMCollator, list[dict[str, torch.Tensor]]]:
    """Tokenized samples of one image, which is patches already, and some text, all of it labelled."""
    torch.manual_seed(settings.seed)
    processor = tiny_processor("qwen3_vl")
    processor.image_processor.patch_size = shapes.patch_size
    collator = VLMCollator(processor, layout="packed", train_on="all")
    metadata = collator.metadata
    image = [metadata.image_token_id] * (prod(shapes.grid) // metadata.merge_size**2)
    ids = torch.tensor([metadata.vision_start_id, *image, metadata.vision_end_id, *[64] * shapes.words])
    return collator, [
        {
            "input_ids": ids,
            "pixel_values": torch.randn(prod(shapes.grid), metadata.patch_dim),
            "image_grid_thw": torch.tensor([shapes.grid]),
        }
        for _ in range(shapes.images)
    ]


@contextmanager
def _worker(parts: list[torch.Tensor], buffers: PixelBuffers) -> Iterator[Iterator[Any]]:
    """Batches without end, joined by one forked worker."""

    def joined(_: list[int]) -> dict[str, torch.Tensor]:
        torch.set_num_threads(1)
        return {"pixel_values": buffers.join(parts, torch.float32)}

    loader = DataLoader(
        range(2**31 - 1),  # pyright: ignore[reportArgumentType]: more batches than are ever taken
        collate_fn=joined,
        num_workers=1,
        prefetch_factor=1,
        multiprocessing_context="fork",
    )
    batches = iter(loader)
    try:
        yield batches
    finally:
        del batches, loader


# ---------------------------------------------------------------------- lengths


@final
@dataclass(frozen=True, kw_only=True)
class LengthShapes:
    """Receipts to measure, each with one image and a text of its own."""

    images: int = 10_000
    files: int = 32
    """JPEG files that they share."""
    size: tuple[int, int] = (1000, 1400)
    """Pixels of each image."""
    max_image_tokens: int = 1280
    """Largest image that the processor leaves, in tokens."""
    part: int = 1000
    """Samples that are measured in one round against the processor; each round takes the next ones."""
    processed: int = 12
    """Samples that the processor is run on in one round."""


def measure_headers(settings: BenchSettings, shapes: LengthShapes) -> Iterator[Figure]:
    """Time measuring and processing in turn."""
    collator = VLMCollator(tiny_processor("qwen3_vl", max_pixels=shapes.max_image_tokens * TOKEN_AREA))
    with TemporaryDirectory() as folder, one_thread():
        receipts = draw_receipts(Path(folder), shapes, settings.seed)
        part, few = min(shapes.part, len(receipts)), min(shapes.processed, len(receipts))
        measured, processed = cycle(receipts), cycle(receipts)
        ways = {
            "headers": lambda: measure_lengths(list(islice(measured, part)), collator),
            "processor": lambda: [run_processor(collator.processor, one) for one in islice(processed, few)],
        }
        timings = alternate(ways, seconds=settings.seconds)
        name, target = "images a second, headers / processor", Target(limit=20.0, better="higher")
        of = ("processor", "headers")
        yield Figure.compared("lengths", name, timings, of, settings, scale=part / few, target=target)
        yield Figure.rate("lengths", "headers", timings, "headers", part, "images/s", settings.clock)
        yield Figure.rate("lengths", "processor", timings, "processor", few, "images/s", settings.clock)


def draw_receipts(folder: Path, shapes: LengthShapes, seed: int) -> list[dict[str, Any]]:
    """Conversations about receipts of one size in JPEG files."""
    records = SyntheticReceipts(num=shapes.files, seed=seed)
    files, texts = [], []
    for at in range(shapes.files):
        path = folder / f"{at}.jpg"
        records[at]["image"].resize(shapes.size).save(path, quality=90)
        files.append(str(path))
        texts.append(records[at]["ground_truth"][:700])
    return [
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "image": files[place % len(files)]},
                        {"type": "text", "text": f"Receipt {place}: what is it?"},
                    ],
                },
                {"role": "assistant", "content": texts[place % len(files)]},
            ]
        }
        for place in range(shapes.images)
    ]


def run_processor(processor: Any, sample: dict[str, Any]) -> Any:
    """A sample's ids and patches by the processor itself, from its file."""
    text = processor.apply_chat_template(sample["messages"], tokenize=False)
    with Image.open(sample["messages"][0]["content"][0]["image"]) as image:
        return processor(text=[text], images=[image.convert("RGB")], return_tensors="pt")
