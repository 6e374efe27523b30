"""The batch that step, head and memory are measured on: receipts in their proportions, filled with random ids.

Real receipts differ from one another about 5:1 in length: an image of a size that follows the paper's, a short
question, and a long answer that spells the receipt out, which alone is labelled. Contents do not change what a step
costs, so ids and pixels are random, and the same for the same seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt, prod
from typing import Any, final

import torch

from vlmpack.families.tiny import tiny_model
from vlmpack.layout import IGNORE, BatchFacts, Grid, Media, PaddedBatch

FIRST_WORD = 6
"""Ids below this are special tokens of tiny models."""


@final
@dataclass(frozen=True, kw_only=True)
class ReceiptShapes:
    """Sizes of the model and of the batch. The defaults are the yardstick of the project's targets."""

    hidden: int = 512
    """Width of the text model, in heads of 64."""
    layers: int = 4
    """Layers of the text model."""
    kv_heads: int = 4
    """Key and value heads of the text model."""
    vision_hidden: int = 256
    """Width of the vision tower, in heads of 64."""
    vision_depth: int = 4
    """Blocks of the vision tower."""
    vocab_size: int = 4096
    """Token ids."""
    samples: int = 8
    """B."""
    longest: int = 768
    """Tokens of the longest sample."""
    ratio: float = 5.0
    """Longest over shortest; the lengths between are spread evenly on a logarithmic scale."""
    image_share: float = 0.3
    """Image tokens of a sample's tokens."""
    labelled_share: float = 0.5
    """Labelled tokens of a sample's tokens, at its end."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sample, long and short ones mixed."""
        steps = max(self.samples - 1, 1)
        falling = [round(self.longest * self.ratio ** (-i / steps)) for i in range(self.samples)]
        return tuple(falling[1::2] + falling[::2])


def receipt_model(shapes: ReceiptShapes, *, seed: int = 0, device: str = "cpu") -> Any:
    """A random Qwen3-VL of these sizes, unmodified, on sdpa attention, in train mode."""
    model = tiny_model(
        "qwen3_vl",
        seed=seed,
        hidden=shapes.hidden,
        layers=shapes.layers,
        heads=max(shapes.hidden // 64, shapes.kv_heads),
        kv_heads=shapes.kv_heads,
        intermediate=3 * shapes.hidden,
        vision_hidden=shapes.vision_hidden,
        vision_depth=shapes.vision_depth,
        vision_heads=max(shapes.vision_hidden // 64, 1),
        vocab_size=shapes.vocab_size,
    )
    return model.to(device)


def receipt_batch(config: Any, shapes: ReceiptShapes, *, seed: int = 0) -> PaddedBatch:
    """The samples of `shapes` as one right-padded batch, with what a collator would know of it."""
    rng = torch.Generator().manual_seed(seed)
    merge = config.vision_config.spatial_merge_size
    grids = [_grid(round(n * shapes.image_share), merge) for n in shapes.lengths]
    width = max(shapes.lengths)
    ids = torch.full((shapes.samples, width), config.text_config.pad_token_id or 0)
    types, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORE)
    for row, (length, grid) in enumerate(zip(shapes.lengths, grids, strict=True)):
        image = prod(grid) // merge**2
        ids[row, :length] = torch.randint(FIRST_WORD, shapes.vocab_size, (length,), generator=rng)
        ids[row, 0], ids[row, image + 1] = config.vision_start_token_id, config.vision_end_token_id
        ids[row, 1 : image + 1] = config.image_token_id
        types[row, 1 : image + 1] = 1
        answer = slice(length - max(1, round(length * shapes.labelled_share)), length)
        labels[row, answer] = ids[row, answer]
    return PaddedBatch(
        input_ids=ids,
        attention_mask=(torch.arange(width) < torch.tensor(shapes.lengths)[:, None]).long(),
        labels=labels,
        mm_token_type_ids=types,
        media=_media(config, grids, rng),
        facts=BatchFacts(
            lengths=shapes.lengths,
            image_grids=tuple(grids),
            images_per_sample=(1,) * shapes.samples,
            num_targets=int((labels[:, 1:] != IGNORE).sum()),
        ),
    )


def alone(batch: PaddedBatch) -> list[dict[str, torch.Tensor]]:
    """Each sample of a batch of `receipt_batch` on its own, without padding, as a Hugging Face model takes it."""
    assert batch.facts is not None
    assert batch.media.pixel_values is not None
    assert batch.media.image_grid_thw is not None
    pixels = batch.media.pixel_values.split([prod(grid) for grid in batch.facts.image_grids])
    tokens = {name: tensor for name, tensor in hf_inputs(batch).items() if name in _TOKENS}
    return [
        {
            **{name: tensor[row : row + 1, :length] for name, tensor in tokens.items()},
            "pixel_values": pixels[row],
            "image_grid_thw": batch.media.image_grid_thw[row : row + 1],
        }
        for row, length in enumerate(batch.facts.lengths)
    ]


def on_device(batch: PaddedBatch, device: str) -> PaddedBatch:
    """The batch with all its tensors on `device`."""
    moved = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.to_hf().items()
    }
    return PaddedBatch.from_hf(moved)


_TOKENS = ("input_ids", "attention_mask", "labels", "mm_token_type_ids")


def hf_inputs(batch: PaddedBatch) -> dict[str, torch.Tensor]:
    """The batch as an unmodified Hugging Face model takes it: tensors only."""
    return {name: value for name, value in batch.to_hf().items() if isinstance(value, torch.Tensor)}


def _grid(tokens: int, merge: int) -> Grid:
    """An image of about this many tokens, half as wide as it is high: a receipt."""
    columns = max(1, isqrt(tokens // 2))
    return 1, merge * max(1, round(tokens / columns)), merge * columns


def _media(config: Any, grids: Sequence[Grid], rng: torch.Generator) -> Media:
    vision = config.vision_config
    channels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(sum(map(prod, grids)), channels, generator=rng)
    return Media(pixel_values=pixels, image_grid_thw=torch.tensor(grids))
