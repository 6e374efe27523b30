"""Samples that begin alike: drawn as a tree of pieces, each a stretch of text, images or videos.

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
from vlmpack.layout import IGNORE, PackedRow, pack, share
from vlmpack.testing import VISION, Sample, build_sample, padded


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What all samples below it have in common."""

    text: int = 4
    """Tokens of text behind its media, at least 1."""
    images: int = 0
    """Images before the text; a text model has none."""
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
    samples = [_joined(config, path) for root in roots for path in _paths(config, root, (), counter)]
    for i, sample in enumerate(samples if masked else ()):
        sample["labels"][: masked[i % len(masked)]] = IGNORE
    return samples


def shared(samples: Sequence[Sample], *, min_shared: int = 1) -> PackedRow:
    """Pack samples into a row with its prefix tree."""
    row = share(pack(padded(samples)), min_shared=min_shared)
    assert row.tree is not None, "these samples share nothing"
    return row


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


def _paths(
    config: Any, piece: Piece, before: tuple[Sample, ...], counter: Iterator[int]
) -> Iterator[tuple[Sample, ...]]:
    path = (*before, _built(config, piece, next(counter)))
    for _ in range(int(not piece.children) if piece.ends is None else piece.ends):
        yield path
    for child in piece.children:
        yield from _paths(config, child, path, counter)


def _built(config: Any, piece: Piece, seed: int) -> Sample:
    has_vision = config.model_type in VISION
    images, videos = (piece.images, piece.videos) if has_vision else (0, 0)
    side = family_named(config.model_type).merge(config)
    image_grids = [(1, 2 * side, (2 + (seed + i) % 2) * side) for i in range(images)]
    video_grids = [(2, side, 2 * side)] * videos
    return build_sample(
        config,
        stretches=[*[0] * (images + videos), piece.text],
        image_grids=image_grids,
        video_grids=video_grids,
        seconds=[1.5] * videos,
        seed=seed,
    )


def _joined(config: Any, path: Sequence[Sample]) -> Sample:
    sample = {
        name: torch.cat([piece[name] for piece in path if name in piece]) for name in {n for p in path for n in p}
    }
    types = family_named(config.model_type).media_types(sample["input_ids"], config)
    sample["labels"] = torch.where(types == 0, sample["input_ids"], IGNORE)
    return sample
