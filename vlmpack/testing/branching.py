"""Samples that share prefixes: pieces, joined along the paths of a tree.

    pieces    0: an image and text   1: text   2: a long text   3: two images   4: one token   5: piece 0, other pixels
    samples   0 | 0 1 | 0 1 | 0 2 3 | 0 2 4 | 5 3

`joined` joins several samples into one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from vlmpack.errors import ConfigError
from vlmpack.families.registry import family_named
from vlmpack.families.tiles import Join
from vlmpack.layout.row import IGNORE
from vlmpack.testing.samples import Sample, build_sample, perturbed, sample_like

Span = tuple[int, int]


@final
@dataclass(frozen=True, kw_only=True)
class Branches:
    """Pieces of samples, and the paths along which they are joined."""

    pieces: tuple[Sample, ...]
    """The pieces. Each one is a complete sample."""
    names: tuple[str, ...]
    """Readable names of the pieces."""
    paths: tuple[tuple[int, ...], ...]
    """For each sample, the indices of its pieces, in order."""
    masked: tuple[int, ...] = ()
    """Indices of samples whose first piece is not trained on."""

    @property
    def samples(self) -> list[Sample]:
        """Build every sample."""
        samples = [joined([self.pieces[at] for at in path]) for path in self.paths]
        for at in self.masked:
            samples[at]["labels"][: len(self.pieces[self.paths[at][0]]["input_ids"])] = IGNORE
        return samples

    def exchanged(self, piece: int, config: Any) -> Branches:
        """Exchange one piece's pixels, and its words after the first medium, in all samples that contain it.

        Words before the first medium stay, so samples share as many tokens as before.
        """
        pieces = [_other_words(each, config) if at == piece else each for at, each in enumerate(self.pieces)]
        return replace(self, pieces=(*pieces,))

    def span(self, sample: int, piece: int) -> Span | None:
        """Return (start, stop) of a piece's tokens in a sample; None: the sample does not contain the piece."""
        path = self.paths[sample]
        if piece not in path:
            return None
        at = path.index(piece)
        lengths = [len(self.pieces[each]["input_ids"]) for each in path]
        return sum(lengths[:at]), sum(lengths[: at + 1])


def branches_of(samples: Sequence[Sample], config: Any) -> Branches:
    """Build samples that share prefixes from the samples of a probe.

    The tree has three levels, an inner node where a sample ends, a branch of one token, two equal samples, and a
    stranger: a sample whose first piece is the prefix with other pixels (in text models, with other words).

    Args:
        samples: at least five samples: the first with an image if the model takes images, the third a text, the fourth
            a long text; the second is not used.
        config: the model's configuration.

    Raises:
        ConfigError: there are fewer than five samples.
    """
    family = family_named(config.model_type)
    if len(samples) < 5:
        raise ConfigError(
            f"branches_of takes five samples, the third and the fourth of them texts, and got {len(samples)}: those of "
            "mixed_samples and of synthetic_samples become enough by with_adversarial_lengths(samples, config)"
        )
    first, _, text, long, last = samples[:5]
    if any(join.counts_images for join in family.media.values()):  # an image is written differently beside others
        last = _without_images(last, config)
    pixels = {name: 2.0 - first[name] for name in ("pixel_values", "pixel_values_videos") if name in first}
    stranger = sample_like(first, {**first, **pixels}) if pixels else _other_words(_other_words(first, config), config)
    return Branches(
        pieces=(first, text, long, last, build_sample(config, stretches=[1], seed=6), stranger),
        names=("the prefix", "a branch", "an inner node", "a leaf", "one token", "a stranger"),
        paths=((0,), (0, 1), (0, 1), (0, 2, 3), (0, 2, 4), (5, 3)),
        masked=(2,),
    )


def _without_images(sample: Sample, config: Any) -> Sample:
    """Replace a sample that has media with a text of the same length."""
    length, media = len(sample["input_ids"]), family_named(config.model_type).media
    return build_sample(config, stretches=[length], seed=length) if sample.keys() & media.keys() else sample


def joined(pieces: Sequence[Sample]) -> Sample:
    """Join pieces into one sample, one after the other, with their media in the same order."""
    names, family = dict.fromkeys(name for piece in pieces for name in piece), pieces[0].family
    joins = {} if family is None else family.media
    laid: dict[str, torch.Tensor] = {}
    for name in names:
        join, parts = joins.get(name, Join()), [piece[name] for piece in pieces if name in piece]
        laid[name] = torch.stack(parts).sum(0) if join.counts_images else join(parts)
    for name in () if family is None else family.token_columns:
        laid[name] = laid[name].cummax(0).values  # only the first piece's prefix remains a prefix
    return sample_like(pieces[0], laid)


def _other_words(piece: Sample, config: Any) -> Sample:
    """Exchange pixels, and words after the first medium (all words if there is no medium).

    Labels follow the new words, because the label of a shared token can only be its id.
    """
    other = perturbed(piece, config)
    types = family_named(config.model_type).media_types(piece["input_ids"], config)
    is_behind = (types > 0).cumsum(0) > 0 if types.any() else torch.ones_like(types, dtype=torch.bool)
    ids = torch.where(is_behind, other["input_ids"], piece["input_ids"])
    labels = torch.where(other["labels"] == IGNORE, IGNORE, ids)
    return sample_like(other, {**other, "input_ids": ids, "labels": labels})
