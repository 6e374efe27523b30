"""Two samples for a probe: text, an image, text; random, and made without a processor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, final

import torch

from vlmpack.families import Family
from vlmpack.layout import IGNORE, BatchFacts, Grid, Media, PackedRow, PaddedBatch, Segments, pack

FIRST_WORD, LAST_WORD = 6, 130
"""Ids of ordinary words in a small model; those below are special tokens."""


@final
@dataclass(frozen=True, kw_only=True)
class ProbeSample:
    """One sample with one image."""

    input_ids: torch.Tensor
    """[L] int64."""
    labels: torch.Tensor
    """[L] int64, not shifted. The very first token is labelled too: nothing may predict it."""
    pixels: torch.Tensor
    """[P, C] float32."""
    grid: Grid
    """The image's patches."""

    def inputs(self) -> dict[str, torch.Tensor]:
        """Arguments of a Hugging Face model for this sample alone."""
        return {
            "input_ids": self.input_ids[None],
            "pixel_values": self.pixels,
            "image_grid_thw": torch.tensor([self.grid]),
        }


def make_sample(family: Family, config: Any, *, words: int, grid: Grid, seed: int) -> ProbeSample:
    """`words` words, an image of `grid`, `words` words again, the last of them labelled."""
    rng = torch.Generator().manual_seed(seed)
    image = [
        config.vision_start_token_id,
        *[config.image_token_id] * family.media_tokens([grid], config),
        config.vision_end_token_id,
    ]
    before, after = (torch.randint(FIRST_WORD, LAST_WORD + 1, (words,), generator=rng) for _ in range(2))
    input_ids = torch.cat([before, torch.tensor(image), after])
    labels = torch.full_like(input_ids, IGNORE)
    labels[0], labels[-words:] = input_ids[0], after
    vision = config.vision_config
    channels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return ProbeSample(
        input_ids=input_ids, labels=labels, pixels=torch.randn(prod(grid), channels, generator=rng), grid=grid
    )


def perturbed(sample: ProbeSample) -> ProbeSample:
    """Another sample of the same shape: every word and every pixel is different."""
    words = sample.input_ids >= FIRST_WORD
    other = FIRST_WORD + (sample.input_ids - FIRST_WORD + 7) % (LAST_WORD - FIRST_WORD + 1)
    return replace(sample, input_ids=torch.where(words, other, sample.input_ids), pixels=1.0 - sample.pixels)


def row_of(samples: list[ProbeSample]) -> PackedRow:
    """The samples in one packed row."""
    return pack(padded(samples))


def padded(samples: list[ProbeSample]) -> PaddedBatch:
    """The samples as a right-padded batch."""

    def stack(name: str, fill: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([vars(s)[name] for s in samples], batch_first=True, padding_value=fill)

    lengths = tuple(len(s.input_ids) for s in samples)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    grids = tuple(s.grid for s in samples)
    return PaddedBatch(
        input_ids=stack("input_ids", 0),
        attention_mask=mask,
        labels=stack("labels", IGNORE),
        media=Media(pixel_values=torch.cat([s.pixels for s in samples]), image_grid_thw=torch.tensor(grids)),
        facts=BatchFacts(lengths=lengths, image_grids=grids, images_per_sample=(1,) * len(samples)),
    )


def segments_of(samples: list[ProbeSample]) -> Segments:
    """Their boundaries in a row."""
    return Segments.from_lengths([len(s.input_ids) for s in samples])
