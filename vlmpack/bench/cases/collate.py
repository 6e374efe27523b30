"""collate: receipts from images and text to a packed row, against the padded batch of the same receipts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from vlmpack.bench.figure import Figure, Target
from vlmpack.bench.settings import BenchSettings
from vlmpack.bench.timing import alternate, one_thread
from vlmpack.collate import VLMCollator
from vlmpack.data import to_conversation
from vlmpack.testing import SyntheticReceipts, tiny_processor

CASE = "collate"
TARGET = Target(limit=1.1, better="lower")
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
            Figure.timed(CASE, f"packed, {shapes.samples} {name}", timings, "packed", settings),
            Figure.compared(CASE, f"packed / padded, {name}", timings, ("packed", "padded"), settings, target=TARGET),
        ]
    return figures


def tokenised(collator: VLMCollator, receipts: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """Each receipt after the processor: ids, labels, pixels and grid, without a batch dimension."""
    return [_without_batch_dimension(collator([receipt])) for receipt in receipts]


def _without_batch_dimension(row: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    tokens = {name: row[name][0] for name in ("input_ids", "labels")}
    return {**tokens, "pixel_values": row["pixel_values"], "image_grid_thw": row["image_grid_thw"]}
