"""Samples that begin alike: drawn as a tree of pieces, each a stretch of text, images or videos, and audio.

root = Piece(text=5, images=2, children=(Piece(text=3), Piece(text=1, ends=2)))
samples = samples_of(config, root, ...)          # one for each end of a piece, depth first
row = shared(samples)                            # packed, with its prefix tree
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vlmpack.families import family_named
from vlmpack.families.media import media_reader
from vlmpack.layout import PackedRow, pack, share
from vlmpack.layout.batch import IGNORE
from vlmpack.layout.sharing import ReadMedia
from vlmpack.testing import Sample, build_sample, joined, padded, tiny_config
from vlmpack.testing.samples import frames_of


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What all samples below it have in common."""

    text: int = 4
    """Tokens of text behind its media, at least 1."""
    images: int = 0
    """Images before the text, and an audio if there are some, as far as a model takes them."""
    videos: int = 0
    """Videos before the text."""
    children: tuple[Piece, ...] = ()
    """What may follow."""
    ends: int | None = None
    """Samples that end here; None: one if nothing follows."""


def samples_of(config: Any, *roots: Piece, masked: Sequence[int] = (), seed: int = 0) -> list[Sample]:
    """Build one sample for each end of a piece, depth first. Words differ between pieces.

    Args:
        config: of the model.
        roots: the trees.
        masked: tokens at the start of each sample that are not learnt, in turn; (): all text is.
        seed: of words and pixels.
    """
    counter = iter(range(1000 * seed, 1000 * seed + 1000))
    samples = [_joined(config, path) for root in roots for path in _paths(root, (), counter)]
    for i, sample in enumerate(samples if masked else ()):
        sample["labels"][: masked[i % len(masked)]] = IGNORE
    return samples


def shared(samples: Sequence[Sample], *, min_shared: int = 1) -> PackedRow:
    """Pack samples into a row with its prefix tree."""
    row = share(pack(padded(samples)), min_shared=min_shared, read_media=read_media_of(samples))
    assert row.tree is not None, "these samples share nothing"
    return row


def read_media_of(samples: Sequence[Sample]) -> ReadMedia:
    """Find the media of rows of these samples."""
    family = samples[0].family
    assert family is not None
    return media_reader(family, tiny_config(family.model_type))


def rollouts(*branches: int, prefix: int = 12, images: int = 1) -> Piece:
    """A prompt with images and its branches of so many tokens."""
    return Piece(text=prefix, images=images, children=tuple(Piece(text=n) for n in branches))


DEEP = Piece(
    text=6,
    images=1,
    children=(
        Piece(text=5, ends=1, children=(Piece(text=7), Piece(text=1), Piece(text=4, images=1))),
        Piece(text=3, images=2, children=(Piece(text=2, children=(Piece(text=9), Piece(text=2))), Piece(text=6))),
        Piece(text=4, ends=2),
    ),
)
"""Three levels and a fourth: images at several, a sample that ends in an inner node, one-token branches, twins."""
STRANGER = Piece(text=8, images=1)
VIDEOS = Piece(text=3, videos=1, children=(Piece(text=4), Piece(text=2, videos=1)))


def _paths(piece: Piece, before: tuple[_Seeded, ...], counter: Iterator[int]) -> Iterator[tuple[_Seeded, ...]]:
    path = (*before, (piece, next(counter)))
    for _ in range(int(not piece.children) if piece.ends is None else piece.ends):
        yield path
    for child in piece.children:
        yield from _paths(child, path, counter)


_Seeded = tuple[Piece, int]


def _joined(config: Any, path: Sequence[_Seeded]) -> Sample:
    several = sum(piece.images for piece, _ in path) > 1
    sample = joined([_built(config, piece, seed, several) for piece, seed in path])
    types = family_named(config.model_type).media_types(sample["input_ids"], config)
    sample["labels"] = torch.where(types == 0, sample["input_ids"], IGNORE)
    return sample


def _built(config: Any, piece: Piece, seed: int, several: bool) -> Sample:
    family = family_named(config.model_type)
    images, videos = piece.images * family.has_vision, piece.videos * family.has_videos
    audios = min(images, 1) * family.has_audio
    side = family.merge(config)
    return build_sample(
        config,
        stretches=[*[0] * (images + videos + audios), piece.text],
        image_grids=[(1, 2 * side, (2 + (seed + i) % 2) * side) for i in range(images)],
        video_grids=[(2, side, 2 * side)] * videos,
        seconds=[1.5] * videos,
        audio_frames=[frames_of(config)[seed % 2] for _ in range(audios)],
        several=several,
        seed=seed,
    )
