"""An evaluation set in rows, shared out to ranks so that each computes as many.

    rows    [4 1] [0 5] [2] [3]      places in the data set, row after row
    rank 0  [4 1] [2]                two ranks
    rank 1  [0 5] [3]

Where there are not enough rows for all, a rank computes one again and forgets it: sharded models talk in every forward
pass, so nobody may stop early. No sample is counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from vlmpack.collate import OVERLENGTH, VLMCollator, sample_id_of
from vlmpack.errors import ConfigError, SampleError
from vlmpack.loading import MapStyle, check_samples
from vlmpack.plan import EMPTY, LengthTable, Plan, Refused, balance_rows, plan_bins
from vlmpack.store import measure_lengths

Collator = Callable[[Sequence[Any]], Mapping[str, Any]]
"""A list of samples → a padded batch or a packed row, as a dictionary with host metadata."""


@final
@dataclass(frozen=True, kw_only=True)
class RankRows:
    """The rows that one rank computes."""

    rows: tuple[tuple[int, ...], ...]
    """Places in the data set of the samples of each row."""
    counted: int
    """How many of the rows count, from the first on; the rest are counted by another rank."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class HeldOut:
    """An evaluation set in rows."""

    rows: tuple[tuple[int, ...], ...]
    """Places in the data set of the samples of each row."""
    tokens: np.ndarray
    """int64 [G]: tokens of each row."""
    refused: tuple[Refused, ...]
    """Samples that are in no row, and why."""

    @classmethod
    def planned(cls, plan: Plan, dataset: MapStyle) -> HeldOut:
        """The rows of a plan of the whole data set.

        Raises:
            ConfigError: the plan is of another number of samples.
        """
        if len(plan.lengths) != len(dataset):
            raise ConfigError(
                f"the plan is of {len(plan.lengths)} samples, but the data set has {len(dataset)}; plan this one, or "
                "give capacity= alone"
            )
        refused = tuple(_left_out(plan, at) for at in plan.dropped.tolist())
        return cls(rows=plan.bins, tokens=plan.tokens, refused=refused)

    @classmethod
    def measured(cls, table: LengthTable, capacity: int) -> HeldOut:
        """Rows of everything that can be used; what exceeds a row has one of its own, as it would without packing.

        Raises:
            ConfigError: nothing can be used.
        """
        if not len(table):
            raise ConfigError(f"no sample of the evaluation set can be used: {table.reasons or 'it is empty'}")
        plan = plan_bins(table, capacity, oversize="own_row")
        return cls(rows=plan.bins, tokens=plan.tokens, refused=table.refused)

    def share(self, rank: int, ranks: int) -> RankRows:
        """The rows that this one of `ranks` ranks computes."""
        mine = balance_rows(self.tokens.astype(np.float64), ranks=ranks).rows[:, rank].reshape(-1).tolist()
        counted = [at for at in mine if at != EMPTY]
        again = counted[:1] or [0]
        rows = counted + again * (len(mine) - len(counted))
        return RankRows(rows=tuple(self.rows[at] for at in rows), counted=len(counted))


def hold_out(
    dataset: MapStyle, collator: Collator, *, plan: Plan | None, capacity: int | None, workers: int = 0
) -> HeldOut:
    """Put an evaluation set in rows: those of the plan, or of what the collator measures in it.

    Raises:
        ConfigError: neither plan nor capacity is given, or both; or the collator cannot measure.
        SampleError: a sample cannot be used, and the collator is told to raise.
    """
    check_samples(dataset)
    if (plan is None) == (capacity is None):
        raise ConfigError("give capacity=, the tokens of a row, or plan=, the rows themselves")
    if plan is not None:
        return HeldOut.planned(plan, dataset)
    assert capacity is not None
    if not isinstance(collator, VLMCollator):
        raise ConfigError(
            f"a {type(collator).__name__} cannot tell lengths ahead, as VLMCollator can; give "
            "plan=plan_bins(lengths, capacity, oversize='own_row')"
        )
    table = measure_lengths(dataset, collator, workers=workers)
    if collator.on_bad == "raise":
        _raise_first([one for one in table.refused if not collator.leaves_out(one.reason)])
    return HeldOut.measured(table, capacity)


def _left_out(plan: Plan, at: int) -> Refused:
    if plan.lengths[at]:
        detail = f"the plan left it out: it exceeds a row of {plan.capacity} tokens"
        return Refused(index=at, sample_id=None, reason=OVERLENGTH, detail=detail)
    detail = "it was refused when its length was measured: LengthTable.refused says why"
    return Refused(index=at, sample_id=None, reason="refused_before", detail=detail)


def _raise_first(refused: Sequence[Refused]) -> None:
    for one in refused:
        raise SampleError(one.detail, index=one.index, reason=one.reason, sample_id=one.sample_id)


@final
class Placed(Dataset[Any]):
    """A data set of (place, sample): collators get samples that go by their places, errors those that have names."""

    def __init__(self, dataset: MapStyle) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, place: int) -> tuple[int, Any]:
        return place, self.dataset[place]


@final
class CollatePlaced:
    """A collator of such samples, which can be told which of them it left out: their ids are their places."""

    def __init__(self, collator: Collator) -> None:
        self._collator = collator

    def __call__(self, placed: Sequence[tuple[int, Any]]) -> Mapping[str, Any]:
        """The batch.

        Raises:
            SampleError: a sample cannot be used, by its place in the data set and the id that it has there. Here, and
                not where the batch arrives: of an error of a worker only the text does.
        """
        try:
            return self._collator([{**s, "id": at} if isinstance(s, Mapping) else s for at, s in placed])
        except SampleError as error:
            if error.index is None or error.index not in range(len(placed)):
                raise
            place, sample = placed[error.index]
            raise SampleError(error.detail, index=place, reason=error.reason, sample_id=sample_id_of(sample)) from error


@final
class HeldOutLoader(DataLoader[Any]):
    """The batches of one rank's share. It draws nobody's random numbers, so that training goes on as without it."""

    def __init__(
        self, dataset: MapStyle, collator: Collator, held_out: HeldOut, share: RankRows, **settings: Any
    ) -> None:
        rows = [list(row) for row in share.rows]
        collate = CollatePlaced(collator)
        settings |= {"batch_sampler": rows, "collate_fn": collate, "generator": torch.Generator()}
        super().__init__(Placed(dataset), **settings)
        self.held_out, self.share = held_out, share
        self.names_samples = isinstance(collator, VLMCollator)
        """Whether a batch that names no sample holds none."""
