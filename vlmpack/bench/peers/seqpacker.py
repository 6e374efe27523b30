"""SeqPacker: its collate function, and its plan."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from vlmpack.bench.cases.plan import LENGTH_SETS
from vlmpack.bench.peers.contest import Contest, Peer, Sample, Way, read_row
from vlmpack.bench.peers.work import PeerWork
from vlmpack.plan import plan_bins
from vlmpack.text import packed_collate_fn


def _collate(torch_utils: ModuleType, work: PeerWork) -> Sequence[Contest]:
    """It takes no labels: every token is learnt. Both lay the longest sample first, where they please among equals."""
    samples = [sample["input_ids"] for sample in work.lists]
    theirs, ours = torch_utils.packed_collate_fn(work.tokens), packed_collate_fn(work.tokens)
    return [
        Contest(
            theirs=Way(call=lambda: theirs(samples), read=lambda row: _read(row, row.labels)),
            ours={
                "packed_collate_fn": Way(
                    call=lambda: ours(samples), read=lambda found: _read(found, found.shift_labels)
                )
            },
            work="ids only",
        )
    ]


def _read(found: Any, targets: Any) -> list[Sample]:
    """One row of both projects' `PackedBatch`, its samples in an order of their own."""
    (boundaries,) = found.cu_seqlens
    row = {"input_ids": found.input_ids, "labels": targets, "position_ids": found.position_ids}
    return sorted(read_row(row, boundaries, shifted=True), key=lambda sample: sample.input_ids)


def _plan(package: ModuleType, work: PeerWork) -> Sequence[Contest]:
    """Equal is the number of rows: among rows as full as each other, choices differ."""
    capacity = work.shapes.capacity
    lengths = LENGTH_SETS["CORD"].lengths(work.shapes.planned, work.seed).clip(max=capacity)
    return [
        Contest(
            theirs=Way(
                call=lambda: package.pack_sequences(lengths, capacity).bins,
                read=lambda bins: _rows_of_all(bins, len(lengths)),
            ),
            ours={
                "plan_bins": Way(
                    call=lambda: plan_bins(lengths, capacity, strategy="best_fit_decreasing").bins,
                    read=lambda rows: _rows_of_all(rows, len(lengths)),
                )
            },
            work=f"{work.shapes.planned:,} lengths",
            target=None,
        )
    ]


def _rows_of_all(rows: Sequence[Sequence[int]], samples: int) -> tuple[int, bool]:
    """(how many rows, whether every sample is in one of them)."""
    return len(rows), sorted(sample for row in rows for sample in row) == list(range(samples))


COLLATE = Peer(
    name="SeqPacker, packed_collate_fn",
    distribution="seqpacker",
    module="seqpacker.torch_utils",
    names=("packed_collate_fn",),
    contests=_collate,
)
PLAN = Peer(
    name="SeqPacker, pack_sequences",
    distribution="seqpacker",
    module="seqpacker",
    names=("pack_sequences",),
    contests=_plan,
)
