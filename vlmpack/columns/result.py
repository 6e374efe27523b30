"""What a packer hands back, under SeqPacker's names: a plan, seen as packs and figures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

from vlmpack.plan import Plan


@final
@dataclass(frozen=True, kw_only=True)
class Pack:
    """The samples of one row."""

    sequence_ids: list[int]
    """Their places in the list of lengths that was packed."""
    lengths: list[int]
    """Tokens of each."""

    @property
    def used(self) -> int:
        """Tokens of the row that samples fill."""
        return sum(self.lengths)

    def __len__(self) -> int:
        """Samples of the row."""
        return len(self.sequence_ids)


@final
@dataclass(frozen=True, kw_only=True)
class PackMetrics:
    """How well rows are filled. Utilisation is the tokens of a row over its capacity, 0 to 1."""

    num_sequences: int
    """Samples in rows."""
    num_packs: int
    """Rows."""
    total_tokens: int
    """Tokens of all samples in rows."""
    padding_tokens: int
    """Tokens of row that no sample fills."""
    efficiency: float
    """Tokens over the room of all rows, 0 to 1."""
    avg_utilisation: float
    """Mean over rows."""
    utilisation_std: float
    """Standard deviation over rows (of the rows there are, not an estimate)."""
    min_utilisation: float
    """Of the emptiest row."""
    max_utilisation: float
    """Of the fullest row."""
    avg_sequences_per_pack: float
    """Samples of a row, on average."""
    packing_time_ms: float
    """Milliseconds that planning took."""

    @property
    def padding_ratio(self) -> float:
        """Padding over the room of all rows, 0 to 1."""
        room = self.total_tokens + self.padding_tokens
        return self.padding_tokens / room if room else 0.0

    @property
    def throughput(self) -> float:
        """Samples packed per second (SeqPacker's stub says per millisecond; its code counts seconds)."""
        return self.num_sequences / (self.packing_time_ms / 1000) if self.packing_time_ms else float("inf")

    @classmethod
    def of_plan(cls, plan: Plan, time_ms: float) -> PackMetrics:
        """The figures of a plan that took `time_ms` milliseconds to make."""
        tokens = plan.tokens
        used = tokens / plan.capacity if len(plan) else np.zeros(1)
        return cls(
            num_sequences=len(plan.sample_ids),
            num_packs=len(plan),
            total_tokens=int(tokens.sum()),
            padding_tokens=plan.waste,
            efficiency=plan.fill,
            avg_utilisation=float(used.mean()),
            utilisation_std=float(used.std()),
            min_utilisation=float(used.min()),
            max_utilisation=float(used.max()),
            avg_sequences_per_pack=len(plan.sample_ids) / len(plan) if len(plan) else 0.0,
            packing_time_ms=time_ms,
        )


@final
@dataclass(frozen=True, kw_only=True)
class PackResult:
    """A plan as SeqPacker tells it. Every view is made once, so that asking for it again costs nothing."""

    plan: Plan
    """The rows: what the rest of vlmpack takes (`PackedBatchSampler`, `Plan.save`)."""
    time_ms: float = 0.0
    """Milliseconds that planning took."""

    @cached_property
    def packs(self) -> list[Pack]:
        """One for each row."""
        lengths = self.plan.lengths
        return [Pack(sequence_ids=row.tolist(), lengths=lengths[row].tolist()) for row in self.plan]

    @cached_property
    def bins(self) -> list[list[int]]:
        """The samples of each row."""
        return [list(row) for row in self.plan.bins]

    @cached_property
    def metrics(self) -> PackMetrics:
        """How well rows are filled."""
        return PackMetrics.of_plan(self.plan, self.time_ms)

    @property
    def num_bins(self) -> int:
        """Rows."""
        return len(self.plan)

    @property
    def efficiency(self) -> float:
        """Tokens over the room of all rows, 0 to 1."""
        return self.plan.fill

    def __len__(self) -> int:
        """Rows."""
        return len(self.plan)

    def __repr__(self) -> str:
        return f"PackResult(bins={len(self)}, efficiency={self.efficiency:.2%}, time={self.time_ms:.2f}ms)"
