"""The samples that peers are measured on: tokenised, with labels, some with images; the same for the same seed."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, final

import torch
from torch.nn.utils.rnn import pad_sequence

from vlmpack.families import Family, family_named
from vlmpack.layout import IGNORE, Grid
from vlmpack.testing import tiny_config, tiny_processor

FAMILY = "qwen3_vl"
FIRST_WORD = 64
"""Ids below this may be special tokens of tiny processors."""
WORDS = 128
"""The number of ids that are drawn from."""
PATCH_SIZE = 2
"""Pixels a side of a patch: few, as it is ids and what belongs to them that is measured; see `pixels` for the rest."""


@final
@dataclass(frozen=True, kw_only=True)
class PeerShapes:
    """Samples to collate."""

    lengths: tuple[int, ...] = (768, 2154, 680, 1242, 592, 1330, 505, 2264)
    """Tokens of each: receipts."""
    grid: Grid = (1, 16, 24)
    """Of the image of each sample that has one, in patches."""
    planned: int = 100_000
    """Lengths to plan rows from."""
    capacity: int = 4096
    """Tokens of those rows."""


@final
@dataclass(frozen=True, kw_only=True)
class PeerWork:
    """What all peers are given."""

    shapes: PeerShapes
    """Sizes."""
    lists: tuple[dict[str, list[int]], ...]
    """Samples of text: `input_ids` and `labels` as lists, as a data set gives them; the last half is labelled."""
    tensors: tuple[dict[str, torch.Tensor], ...]
    """The same as tensors [n]."""
    images: tuple[dict[str, torch.Tensor], ...]
    """The same with an image each: also `pixel_values` and `image_grid_thw` [1, 3]."""
    processor: Any
    """Of Qwen3-VL."""
    tokenizer: Any
    """Its tokenizer, which is all that a text model has."""
    config: Any
    """Of a Qwen3-VL whose image tokens are those of the processor."""
    seed: int
    """The seed with which everything was drawn."""

    @classmethod
    def of(cls, shapes: PeerShapes, *, seed: int = 0) -> PeerWork:
        """Draw the samples."""
        rng = torch.Generator().manual_seed(seed)
        processor = tiny_processor(FAMILY)
        config = tiny_config(FAMILY)
        processor.image_processor.patch_size = config.vision_config.patch_size = PATCH_SIZE
        config.image_token_id, config.video_token_id = processor.image_token_id, processor.video_token_id
        ids = [torch.randint(FIRST_WORD, FIRST_WORD + WORDS, (n,), generator=rng) for n in shapes.lengths]
        tensors = tuple(_labelled(one) for one in ids)
        return cls(
            shapes=shapes,
            lists=tuple({name: column.tolist() for name, column in sample.items()} for sample in tensors),
            tensors=tensors,
            images=tuple(_with_image(one, processor, config, shapes.grid, rng) for one in ids),
            processor=processor,
            tokenizer=processor.tokenizer,
            config=config,
            seed=seed,
        )

    @property
    def tokens(self) -> int:
        """Of all samples together."""
        return sum(self.shapes.lengths)

    @property
    def family(self) -> Family:
        """Of `config`."""
        return family_named(FAMILY)

    def padded(self) -> dict[str, torch.Tensor]:
        """The samples of text, right-padded: `input_ids`, `labels`, `attention_mask` and `position_ids` [B, S]."""
        fill = {"input_ids": 0, "labels": IGNORE}
        batch = {
            name: pad_sequence([sample[name] for sample in self.tensors], batch_first=True, padding_value=value)
            for name, value in fill.items()
        }
        place = torch.arange(max(self.shapes.lengths)).expand_as(batch["input_ids"]).contiguous()
        mask = place < torch.tensor(self.shapes.lengths)[:, None]
        return {**batch, "attention_mask": mask.long(), "position_ids": place}


def _labelled(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    labels = ids.clone()
    labels[: len(labels) // 2] = IGNORE
    return {"input_ids": ids, "labels": labels}


def _with_image(
    ids: torch.Tensor, processor: Any, config: Any, grid: Grid, rng: torch.Generator
) -> dict[str, torch.Tensor]:
    """An image at the start of the sample, in place of as many of its tokens."""
    family = family_named(FAMILY)
    tokens = family.tokens_per_image(grid, family.merge(config))
    ids = ids.clone()
    ids[0], ids[tokens + 1] = processor.vision_start_token_id, processor.vision_end_token_id
    ids[1 : tokens + 1] = processor.image_token_id
    sample = _labelled(ids)
    sample["labels"][: tokens + 2] = IGNORE
    return {
        **sample,
        "pixel_values": torch.randn(prod(grid), family.patch_channels(config), generator=rng),
        "image_grid_thw": torch.tensor([grid]),
    }
