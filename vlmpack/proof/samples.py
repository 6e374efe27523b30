"""The samples of a probe: images, texts, two images, a video; random, and made without a processor.

There are more than four, of which two have one length and one is longer than 128 tokens: kernels and layouts choose
other ways by number and by length. Every kind has its first token labelled, which nothing predicts: a row that forgets
to mask it learns it from the sample before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any, final

import torch

from vlmpack.families import Family
from vlmpack.layout import IGNORE, Grid, HostMetadata, Media, PaddedBatch


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ProbeSample:
    """One sample, as a processor would give it. L tokens."""

    kind: str
    """What it holds, for people."""
    input_ids: torch.Tensor
    """[L] int64."""
    labels: torch.Tensor
    """[L] int64, not shifted; the first token is labelled too."""
    media: Media
    """Pixels and grids."""
    image_grids: tuple[Grid, ...] = ()
    """The grids of its images, on the host."""
    video_grids: tuple[Grid, ...] = ()
    """The grids of its videos, on the host."""
    seconds: tuple[float, ...] = ()
    """Seconds between two grids of each video (Qwen2.5-VL)."""

    @property
    def targets(self) -> torch.Tensor:
        """[L - 1]: what each token but the last predicts."""
        return self.labels[1:]

    @property
    def num_targets(self) -> int:
        """Targets that count."""
        return int((self.targets != IGNORE).sum())

    def inputs(self, family: Family, config: Any) -> dict[str, torch.Tensor]:
        """Arguments of a Hugging Face model for this sample alone."""
        ids = self.input_ids[None]
        types = {"mm_token_type_ids": family.media_types(ids, config)} if family.has_vision else {}
        return {"input_ids": ids, **types, **self.media.to_hf()}


@final
@dataclass(frozen=True, kw_only=True)
class Words:
    """A range of token ids without special meaning to a model."""

    low: int
    """The first."""
    high: int
    """One more than the last."""

    @classmethod
    def of(cls, family: Family, config: Any) -> Words:
        """The longest run of ids without a special one."""
        text = family.text_config(config)
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        whole, part = config.to_dict(), text.to_dict()
        given = [whole.get(name) for name in names]
        given += [part.get(name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")]
        special = {i for value in given if value is not None for i in (value if isinstance(value, list) else [value])}
        edges = sorted({-1, *special, text.vocab_size})
        start, stop = max(pairwise(edges), key=lambda edge: edge[1] - edge[0])
        return cls(low=start + 1, high=stop)

    def draw(self, count: int, rng: torch.Generator) -> torch.Tensor:
        """[count] int64."""
        return torch.randint(self.low, self.high, (count,), generator=rng)

    def exchanged(self, ids: torch.Tensor) -> torch.Tensor:
        """Every word exchanged for another one; ids that are no words stay."""
        is_word = (ids >= self.low) & (ids < self.high)
        return torch.where(is_word, self.low + (ids - self.low + 7) % (self.high - self.low), ids)


def perturbed(sample: ProbeSample, words: Words) -> ProbeSample:
    """Another sample of the same shape: every word and every pixel is different."""
    media = sample.media
    changed = {
        name: None if pixels is None else 1.0 - pixels
        for name, pixels in (("pixel_values", media.pixel_values), ("pixel_values_videos", media.pixel_values_videos))
    }
    return replace(sample, input_ids=words.exchanged(sample.input_ids), media=replace(media, **changed))


LONG = 70
"""Words before and after the middle of the long text: more than 128 tokens."""


def with_company(samples: Sequence[ProbeSample], family: Family, config: Any) -> list[ProbeSample]:
    """The samples of every kind, another one of the first one's length beside it, and a long text in their middle."""
    first, second, *others = samples
    twin = replace(perturbed(first, Words.of(family, config)), kind=f"another {first.kind}")
    long = make_sample(family, config, kind="long text", words=LONG, seed=5)
    return [first, twin, second, long, *others]


# ---------------------------------------------------------------------- making them


def synthetic_samples(family: Family, config: Any) -> list[ProbeSample]:
    """An image, text, two images, a video; of a text model three texts. The same every time."""
    if not family.has_vision:
        return [make_sample(family, config, kind="text", words=n, seed=n) for n in (5, 11, 8)]
    side = family.merge(config)

    def grid(rows: int, columns: int, frames: int = 1) -> Grid:
        return (frames, rows * side, columns * side)

    return [
        make_sample(family, config, kind="image", words=5, images=[grid(2, 3)], seed=1),
        make_sample(family, config, kind="text", words=5, seed=2),
        make_sample(family, config, kind="two images", words=4, images=[grid(5, 2), grid(1, 3)], seed=3),
        make_sample(family, config, kind="video", words=3, videos=[grid(2, 1, frames=2)], seed=4),
    ]


def make_sample(
    family: Family,
    config: Any,
    *,
    kind: str,
    words: int,
    images: Sequence[Grid] = (),
    videos: Sequence[Grid] = (),
    seed: int,
) -> ProbeSample:
    """`words` words, every image and video, `words` words again, the last of them labelled."""
    rng = torch.Generator().manual_seed(seed)
    vocabulary = Words.of(family, config)
    before, after = vocabulary.draw(words, rng), vocabulary.draw(words, rng)
    ids = torch.cat([before, torch.tensor(_placeholders(family, config, images, videos), dtype=torch.int64), after])
    labels = torch.full_like(ids, IGNORE)
    labels[0], labels[-words:] = ids[0], after
    seconds = (1.5,) * len(videos) if family.model_type == "qwen2_5_vl" else ()
    return ProbeSample(
        kind=kind,
        input_ids=ids,
        labels=labels,
        media=_media(family, config, images, videos, seconds, rng),
        image_grids=tuple(images),
        video_grids=tuple(videos),
        seconds=seconds,
    )


def _placeholders(family: Family, config: Any, images: Sequence[Grid], videos: Sequence[Grid]) -> list[int]:
    runs = [(config.image_token_id, family.media_tokens([grid], config)) for grid in images]
    runs += [(config.video_token_id, tokens) for tokens in (family.video_runs(videos, config) if videos else [])]
    bounded = [[config.vision_start_token_id, *[token] * n, config.vision_end_token_id] for token, n in runs]
    return [token for run in bounded for token in run]


def _media(
    family: Family,
    config: Any,
    images: Sequence[Grid],
    videos: Sequence[Grid],
    seconds: Sequence[float],
    rng: torch.Generator,
) -> Media:
    if not images and not videos:
        return Media()
    channels = family.patch_channels(config)

    def pixels(grids: Sequence[Grid]) -> torch.Tensor | None:
        return torch.randn(sum(map(prod, grids)), channels, generator=rng) if grids else None

    return Media(
        pixel_values=pixels(images),
        image_grid_thw=torch.tensor(images) if images else None,
        pixel_values_videos=pixels(videos),
        video_grid_thw=torch.tensor(videos) if videos else None,
        second_per_grid_ts=torch.tensor(seconds) if seconds else None,
    )


# ---------------------------------------------------------------------- several in one batch


def offsets_of(samples: Sequence[ProbeSample], *, left: bool) -> tuple[int, ...]:
    """The first column of each sample in a batch that is padded on the left, or on the right."""
    lengths = [len(sample.input_ids) for sample in samples]
    return tuple(max(lengths) - n if left else 0 for n in lengths)


def batch_of(samples: Sequence[ProbeSample], *, left: bool = False) -> PaddedBatch:
    """The samples as a padded batch, with what a collator knows of them."""
    lengths = tuple(len(sample.input_ids) for sample in samples)
    return PaddedBatch(
        input_ids=_stack([sample.input_ids for sample in samples], 0, left=left),
        attention_mask=_stack([torch.ones_like(sample.input_ids) for sample in samples], 0, left=left),
        labels=_stack([sample.labels for sample in samples], IGNORE, left=left),
        media=joined_media(samples),
        metadata=HostMetadata(
            lengths=lengths,
            offsets=offsets_of(samples, left=left),
            image_grids=tuple(grid for sample in samples for grid in sample.image_grids),
            video_grids=tuple(grid for sample in samples for grid in sample.video_grids),
            images_per_sample=tuple(len(sample.image_grids) for sample in samples),
            videos_per_sample=tuple(len(sample.video_grids) for sample in samples),
            seconds_per_grid=tuple(s for sample in samples for s in sample.seconds),
            num_targets=sum(sample.num_targets for sample in samples),
        ),
    )


def joined_media(samples: Sequence[ProbeSample]) -> Media:
    """Pixels and grids of all samples, in their order."""
    found = [sample.media.to_hf() for sample in samples]
    names = dict.fromkeys(name for media in found for name in media)
    return Media(**{name: torch.cat([media[name] for media in found if name in media]) for name in names})


def _stack(rows: list[torch.Tensor], fill: int, *, left: bool) -> torch.Tensor:
    side = "left" if left else "right"
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill, padding_side=side)
