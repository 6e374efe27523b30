"""Samples that begin alike: pieces, joined along the paths of a tree.

    pieces    0: an image and text   1: text   2: a long text   3: two images   4: one token   5: piece 0, other pixels
    samples   0 | 0 1 | 0 1 | 0 2 3 | 0 2 4 | 5 3

`joined` makes one sample of several, `distinct_prefixes` counts what is left to compute where samples share them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, final

import torch

from vlmpack.families import Join, family_named
from vlmpack.layout import IGNORE, IMAGE, VIDEO
from vlmpack.testing.samples import build_sample, grids_of, perturbed
from vlmpack.testing.tiles import Sample, sample_like

Span = tuple[int, int]


@final
@dataclass(frozen=True, kw_only=True)
class Branches:
    """Pieces of samples, and the paths along which they are joined."""

    pieces: tuple[Sample, ...]
    """Each is a sample by itself."""
    names: tuple[str, ...]
    """Of the pieces, for people."""
    paths: tuple[tuple[int, ...], ...]
    """Pieces of each sample, in order."""
    masked: tuple[int, ...] = ()
    """Samples that do not learn their first piece."""

    @property
    def samples(self) -> list[Sample]:
        """Build every sample."""
        samples = [joined([self.pieces[at] for at in path]) for path in self.paths]
        for at in self.masked:
            samples[at]["labels"][: len(self.pieces[self.paths[at][0]]["input_ids"])] = IGNORE
        return samples

    def exchanged(self, piece: int, config: Any) -> Branches:
        """Exchange the pixels of one piece and its words behind the first image, in all samples that have it.

        Samples share as many tokens as before: what they begin with is left as it is.
        """
        pieces = [_other_words(each, config) if at == piece else each for at, each in enumerate(self.pieces)]
        return replace(self, pieces=(*pieces,))

    def span(self, sample: int, piece: int) -> Span | None:
        """The tokens of a sample that are those of a piece; None: it has none of them."""
        path = self.paths[sample]
        if piece not in path:
            return None
        at = path.index(piece)
        lengths = [len(self.pieces[each]["input_ids"]) for each in path]
        return sum(lengths[:at]), sum(lengths[: at + 1])


def branches_of(samples: Sequence[Sample], config: Any) -> Branches:
    """Let samples branch: three levels, an inner node where a sample ends, one-token branches, twins, and a stranger.

    Args:
        samples: five of a probe: one with an image if the model takes any, any, a text, a long text, and any.
        config: of the model.
    """
    family = family_named(config.model_type)
    if not family.has_grids or family.has_audio:  # prefixes with such media are not shared
        samples = [_without_images(each, config) for each in samples]
    first, _, text, long, last = samples[:5]
    pixels = {name: 2.0 - first[name] for name in ("pixel_values", "pixel_values_videos") if name in first}
    stranger = sample_like(first, {**first, **pixels}) if pixels else _other_words(_other_words(first, config), config)
    return Branches(
        pieces=(first, text, long, last, build_sample(config, stretches=[1], seed=6), stranger),
        names=("the prefix", "a branch", "an inner node", "a leaf", "one token", "a stranger"),
        paths=((0,), (0, 1), (0, 1), (0, 2, 3), (0, 2, 4), (5, 3)),
        masked=(2,),
    )


def _without_images(sample: Sample, config: Any) -> Sample:
    """A text of the same length in place of a sample with media."""
    length, media = len(sample["input_ids"]), family_named(config.model_type).media
    return build_sample(config, stretches=[length], seed=length) if sample.keys() & media.keys() else sample


def joined(pieces: Sequence[Sample]) -> Sample:
    """Lay pieces one after the other into one sample, their media in the same order."""
    names, family = dict.fromkeys(name for piece in pieces for name in piece), pieces[0].family
    joins = {} if family is None else family.media
    laid: dict[str, torch.Tensor] = {}
    for name in names:
        join, parts = joins.get(name, Join()), [piece[name] for piece in pieces if name in piece]
        laid[name] = torch.stack(parts).sum(0) if join.counts_images else join(parts)
    for name in () if family is None else family.token_columns:
        laid[name] = laid[name].cummax(0).values  # the prefix of the first one
    return sample_like(pieces[0], laid)


def _other_words(piece: Sample, config: Any) -> Sample:
    """Exchange pixels, and words behind the first of them. Labels follow: a shared token has none but its id."""
    other = perturbed(piece, config)
    types = family_named(config.model_type).media_types(piece["input_ids"], config)
    is_behind = (types > 0).cumsum(0) > 0 if types.any() else torch.ones_like(types, dtype=torch.bool)
    ids = torch.where(is_behind, other["input_ids"], piece["input_ids"])
    labels = torch.where(other["labels"] == IGNORE, IGNORE, ids)
    return sample_like(other, {**other, "input_ids": ids, "labels": labels})


@final
@dataclass(frozen=True, kw_only=True)
class PrefixCount:
    """The least work on samples whose beginnings are computed once."""

    tokens: int
    """Beginnings that differ in their last token."""
    pairs: int
    """Query-key pairs of causal attention."""
    patches: int
    """Patches of distinct media, at distinct places of the tree."""


def distinct_prefixes(samples: Sequence[Sample], config: Any) -> PrefixCount:
    """Count by a trie of single tokens; a placeholder is a token with the content of its image or video."""
    numbers: dict[tuple[int, Hashable], int] = {}
    pairs = patches = 0
    for sample in samples:
        before = 0
        for depth, (symbol, new_patches) in enumerate(_symbols(sample, config), start=1):
            key = before, symbol
            if key not in numbers:
                numbers[key] = len(numbers) + 1
                pairs += depth
                patches += new_patches
            before = numbers[key]
    return PrefixCount(tokens=len(numbers), pairs=pairs, patches=patches)


def _symbols(sample: Sample, config: Any) -> Iterator[tuple[Hashable, int]]:
    """(symbol, patches that begin there) of each token."""
    family = family_named(config.model_type)
    media = {}
    for kind, name, grids in (
        (IMAGE, "pixel_values", grids_of(sample, "image")),
        (VIDEO, "pixel_values_videos", grids_of(sample, "video")),
    ):
        blocks = sample[name].split([prod(grid) for grid in grids]) if grids else ()
        media[kind] = iter(
            [
                ((grid, block.numpy().tobytes()), len(block) if token == 0 else 0)
                for grid, block in zip(grids, blocks, strict=True)
                for token in range(family.media_tokens([grid], config))
            ]
        )
    types = family.media_types(sample["input_ids"], config)
    for token, kind in zip(sample["input_ids"].tolist(), types.tolist(), strict=True):
        content, patches = next(media[kind]) if kind else (None, 0)
        yield (token, content), patches
