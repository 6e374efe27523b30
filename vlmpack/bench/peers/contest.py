"""One peer against us: the same samples in, and the same samples out, or nothing is timed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from types import ModuleType
from typing import Any, final

import torch

from vlmpack.bench.figure import Target
from vlmpack.bench.peers.work import PeerWork
from vlmpack.errors import ConfigError, VlmpackError
from vlmpack.layout import IGNORE

TWICE = Target(limit=2.0, better="higher")
"""How many times as long as ours a peer's way must take."""


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
        """What is left of it where a peer cuts off the token that has nothing to predict."""
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
    """What is timed."""
    read: Callable[[Any], object]
    """What it gives, in a form that can be compared: mostly the samples in their order. Not timed."""


@final
@dataclass(frozen=True, kw_only=True)
class Contest:
    """A peer's way, and ours of the same work."""

    theirs: Way
    """The peer's."""
    ours: Mapping[str, Way]
    """Ours, by name."""
    work: str = ""
    """What is worked on, and what the peer leaves out, in a few words."""
    target: Target | None = TWICE
    """What the peer's time over ours must reach."""


@final
@dataclass(frozen=True, kw_only=True)
class Peer:
    """A function of another project."""

    name: str
    """For people."""
    distribution: str
    """The package that brings it."""
    module: str
    """Where it lives."""
    names: tuple[str, ...]
    """What is used of that module."""
    contests: Callable[[ModuleType, PeerWork], Sequence[Contest]]
    """What it is measured at."""

    def load(self) -> ModuleType:
        """Its module.

        Raises:
            ConfigError: it cannot be had here; says why.
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


def check_equal(contest: Contest) -> None:
    """Times of ways that give different things mean nothing.

    Raises:
        VlmpackError: one of our ways gives something else than the peer's; says where.
    """
    theirs = contest.theirs.read(contest.theirs.call())
    for name, way in contest.ours.items():
        found = way.read(way.call())
        if found != theirs:
            raise VlmpackError(f"its result is not that of {name}: {_difference(found, theirs)}")


def _difference(ours: object, theirs: object) -> str:
    if not (isinstance(ours, list) and isinstance(theirs, list)):
        return f"{theirs!r:.60}, and not {ours!r:.60}"
    if len(ours) != len(theirs):
        return f"{len(theirs)} samples, and not {len(ours)}"
    at, one, other = next((i, a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    names = [name for name in ("input_ids", "targets", "positions") if one.__dict__[name] != other.__dict__[name]]
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
