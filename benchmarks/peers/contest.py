"""Samples for other projects and for us, and a contest: equal results first, then times.

Samples are tokenised, with labels, some with images; the same seed draws the same samples.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from math import prod
from types import ModuleType
from typing import Any, final

import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.figures import Target
from vlmpack.errors import ConfigError, VlmpackError
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
    """The samples of all peers."""

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
        tensors = tuple(_labelled(sample) for sample in ids)
        return cls(
            shapes=shapes,
            lists=tuple({name: column.tolist() for name, column in sample.items()} for sample in tensors),
            tensors=tensors,
            images=tuple(_with_image(sample, processor, config, shapes.grid, rng) for sample in ids),
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


TWICE = Target(limit=2.0, better="higher")
"""A peer's time over ours, at least."""


@final
@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample as it lies in a batch: what a model would learn from it."""

    input_ids: tuple[int, ...]
    """n token ids."""
    targets: tuple[int, ...]
    """n: the token to be predicted at each place; -100: none."""
    positions: tuple[tuple[int, ...], ...] | None = None
    """1 or 3 rows of n; None: the batch has none."""

    def without_last_token(self) -> Sample:
        """Drop the last token, as a peer does that cuts off the token without a target."""
        rows = self.positions
        return Sample(
            input_ids=self.input_ids[:-1],
            targets=self.targets[:-1],
            positions=None if rows is None else tuple(row[:-1] for row in rows),
        )


Samples = Sequence[Sample]


@final
@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to do the work."""

    call: Callable[[], Any]
    """Does the work; it is timed."""
    read: Callable[[Any], object]
    """Converts the result to a form that can be compared: mostly the samples in their order. Not timed."""


@final
@dataclass(frozen=True, kw_only=True)
class Contest:
    """A peer's way, and ours of the same work."""

    peer: Way
    """The peer's."""
    vlmpack: Mapping[str, Way]
    """Ours, by name."""
    work: str = ""
    """The input, and what the peer leaves out, in a few words."""
    target: Target | None = TWICE
    """Of the peer's time over ours."""


@final
@dataclass(frozen=True, kw_only=True)
class Peer:
    """A function of another project."""

    name: str
    """For people."""
    distribution: str
    """The package that brings it."""
    module: str
    """The module of the function."""
    names: tuple[str, ...]
    """Functions that are used of that module."""
    contests: Callable[[ModuleType, PeerWork], Sequence[Contest]]
    """Makes its contests."""

    def load(self) -> ModuleType:
        """Its module.

        Raises:
            ConfigError: it cannot be imported, with the reason.
        """
        try:
            module = importlib.import_module(self.module)
        except Exception as error:  # a package may fail in any way where its kernels or its Python are missing
            message = str(error).partition("\n")[0]
            raise ConfigError(f"{self.module} cannot be imported ({type(error).__name__}: {message})") from error
        if missing := [name for name in self.names if name not in vars(module)]:
            raise ConfigError(f"{self.module} has no {', '.join(missing)} in {self.distribution} {self.version}")
        return module

    @property
    def version(self) -> str:
        """Of the package that is installed."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return "of unknown version"


def peer(
    name: str, distribution: str, module: str, *names: str
) -> Callable[[Callable[[ModuleType, PeerWork], Iterable[Contest]]], Peer]:
    """Make a `Peer` of a function that yields its contests."""

    def peer_of(contests: Callable[[ModuleType, PeerWork], Iterable[Contest]]) -> Peer:
        return Peer(
            name=name,
            distribution=distribution,
            module=module,
            names=names,
            contests=lambda loaded, work: tuple(contests(loaded, work)),
        )

    return peer_of


def check_equal(contest: Contest) -> None:
    """Times of ways that give different things mean nothing.

    Raises:
        VlmpackError: one of our ways gives another result than the peer's; names the first difference.
    """
    expected = contest.peer.read(contest.peer.call())
    for name, way in contest.vlmpack.items():
        result = way.read(way.call())
        if result != expected:
            raise VlmpackError(f"its result is not that of {name}: {_difference(result, expected)}")


def _difference(results: object, expected: object) -> str:
    if not (isinstance(results, list) and isinstance(expected, list)):
        return f"{expected!r:.60}, and not {results!r:.60}"
    if len(results) != len(expected):
        return f"{len(expected)} samples, and not {len(results)}"
    at, our_sample, peer_sample = next(
        (i, a, b) for i, (a, b) in enumerate(zip(results, expected, strict=True)) if a != b
    )
    values = zip(astuple(our_sample), astuple(peer_sample), strict=True)
    names = [field.name for field, (a, b) in zip(fields(Sample), values, strict=True) if a != b]
    return f"sample {at} has other {' and '.join(names)}"


# ---------------------------------------------------------------------- reading batches


def read_row(batch: Mapping[str, Any], boundaries: Sequence[int], *, shifted: bool = False) -> list[Sample]:
    """The samples of a row: `input_ids`, `labels` [1, T] or [T], and perhaps `position_ids` [..., 1, T] or [..., T].

    Args:
        batch: the row.
        boundaries: where samples start and end, from 0; what lies behind the last is padding.
        shifted: whether `labels` are targets already.
    """
    ids, labels = (batch[name].reshape(-1) for name in ("input_ids", "labels"))
    positions = batch.get("position_ids")
    rows = None if positions is None else positions.reshape(-1, ids.shape[0])
    return [
        Sample(
            input_ids=_numbers(ids[start:stop]),
            targets=_numbers(labels[start:stop]) if shifted else (*_numbers(labels[start + 1 : stop]), IGNORE),
            positions=None if rows is None else tuple(_numbers(row[start:stop]) for row in rows),
        )
        for start, stop in pairwise(map(int, boundaries))
    ]


def read_padded(batch: Mapping[str, Any]) -> list[Sample]:
    """The samples of a right-padded batch: `input_ids`, `labels` and `attention_mask` [B, S]."""
    rows = zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True)
    return [
        Sample(input_ids=_numbers(ids[mask != 0]), targets=(*_numbers(labels[mask != 0][1:]), IGNORE))
        for ids, labels, mask in rows
    ]


def _numbers(values: torch.Tensor) -> tuple[int, ...]:
    return tuple(values.tolist())
