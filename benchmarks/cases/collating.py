"""pack, collate, pixels and lengths: the work of a DataLoader worker.

pack      ids, labels, positions and mask of a padded batch, against copying the same bytes
collate   receipts from images and text to a packed row, against the padded batch of the same receipts
pixels    join the patches of a batch in reused memory, against new memory and against a plain copy
lengths   lengths of samples from image headers, against running the processor
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
from vlmpack.layout import HostMetadata, PaddedBatch, SlotRule, pack
from vlmpack.layout.batch import IGNORE, lengths_from_mask
from vlmpack.layout.media import Grid
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


def measure_pack(settings: BenchSettings, shapes: PackShapes) -> Iterator[Figure]:
    """Time `pack`, with and without a collator's lengths on the host, and with slots, against `copy_` into warm memory.

    The copy has `input_ids`, `labels` and `attention_mask` [B, S] and `position_ids` [4, B, S], all int64.
    """
    for samples, width in shapes.batches:
        batch = long_batch(samples, width, seed=settings.seed).to(settings.device)
        lengths = lengths_from_mask(batch.attention_mask).lengths
        with_lengths = replace(batch, metadata=HostMetadata(lengths=lengths, num_targets=sum(lengths) - len(lengths)))
        sources = list(batch.to_hf().values())
        targets = [torch.empty_like(source) for source in sources]
        ways = {
            "pack": lambda batch=batch: pack(batch),
            "with lengths": lambda batch=with_lengths: pack(batch),
            "slots of 8": lambda batch=batch: pack(batch, rule=SlotRule(multiple=8)),
            "copy": lambda sources=sources, targets=targets: [
                a.copy_(b) for a, b in zip(targets, sources, strict=True)
            ],
        }
        with one_thread():
            timings = alternate(ways, seconds=settings.seconds / len(shapes.batches), device=settings.device)
        yield Figure.timed("pack", f"pack {samples} x {width}", timings, "pack", settings)
        for way, limit in (("pack", 3.0), ("with lengths", 2.0), ("slots of 8", 3.0)):
            name, target = f"{way} / copy {samples} x {width}", Target(limit=limit, better="lower")
            yield Figure.compared("pack", name, timings, (way, "copy"), settings, target=target)


def long_batch(samples: int, width: int, *, seed: int = 0) -> PaddedBatch:
    """Build a right-padded batch of text with lengths from `width / 5` to `width`, evenly spaced, in random order."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.linspace(width / 5, width, samples).long()[torch.randperm(samples, generator=rng)]
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
    """Most tokens of an image."""


def measure_collate(settings: BenchSettings, shapes: CollateShapes) -> Iterator[Figure]:
    """Time complete collation (decode, resize, tokenize, check, lay out), and laying out tokenized samples only."""
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
    """Grid of each image, in patches."""
    patch_size: int = 16
    """Side of a patch in pixels; 16 as in Qwen3-VL, where a patch has 1536 values."""
    words: int = 400
    """Text tokens beside each image, for complete collation."""
    batches: int = 6
    """Number of batches taken from a worker for one measurement."""


def measure_pixels(settings: BenchSettings, shapes: PixelShapes) -> Iterator[Figure]:
    """Time joining and collating images in this process, then getting batches from a DataLoader worker."""
    collator, samples = _samples_of_patches(settings, shapes)
    parts = [sample["pixel_values"] for sample in samples]
    again = PixelBuffers()
    warm = torch.cat(parts)
    source = warm.clone()
    ways = {
        "copy": lambda: warm.copy_(source),
        "joined and checked, memory used again": lambda: again.join(parts, torch.float32),
        "whole samples collated": lambda: collator(samples),
    }
    with one_thread():
        timings = alternate(ways, seconds=settings.seconds / 2)
    yield Figure.timed("pixels", f"one copy of {warm.nbytes / 2**20:.0f} MiB", timings, "copy", settings)
    target = Target(limit=1.3, better="lower")
    for name in [*ways][1:]:
        yield Figure.compared("pixels", f"{name} / one copy", timings, (name, "copy"), settings, target=target)
    with _worker(parts, PixelBuffers()) as with_buffers, _worker(parts, PixelBuffers(0)) as without:
        take = {
            "again": lambda: list(islice(with_buffers, shapes.batches)),
            "new": lambda: list(islice(without, shapes.batches)),
        }
        timings = alternate(take, seconds=settings.seconds / 2)
    spread = timings.ratio("new", "again", "wall")  # wall, because another process does most of the work
    name, target = "from a worker, new memory / memory used again", Target(limit=4.0, better="higher")
    yield Figure.measured("pixels", name, spread, "x", target=target)


def _samples_of_patches(
    settings: BenchSettings, shapes: PixelShapes
) -> tuple[VLMCollator, list[dict[str, torch.Tensor]]]:
    """Build tokenized samples with one image, as patches, and some text, all of it labeled."""
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
    """Yield an endless iterator of batches that one forked worker joins."""

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
    """Receipts to measure, each with one image and its own text."""

    images: int = 10_000
    files: int = 32
    """Number of JPEG files, which the receipts share."""
    size: tuple[int, int] = (1000, 1400)
    """Width and height of each image in pixels."""
    max_image_tokens: int = 1280
    """Most tokens of an image after the processor's resizing."""
    part: int = 1000
    """Samples measured from headers in one round; each round takes the next ones."""
    processed: int = 12
    """Samples run through the processor in one round."""


def measure_headers(settings: BenchSettings, shapes: LengthShapes) -> Iterator[Figure]:
    """Time measuring lengths from headers and running the processor, in turn."""
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
    """Write receipts of one size as JPEG files, and return conversations about them."""
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
    """Compute a sample's ids and patches with the processor, from the image file."""
    text = processor.apply_chat_template(sample["messages"], tokenize=False)
    with Image.open(sample["messages"][0]["content"][0]["image"]) as image:
        return processor(text=[text], images=[image.convert("RGB")], return_tensors="pt")
