"""The end of a stream: as many rows for every rank."""

from __future__ import annotations

from collections.abc import Callable

from vlmpack.plan import middle
from vlmpack.stream.packer import Row, Sample
from vlmpack.stream.sampler import Remainder


def even_out(rows: list[Row], ranks: int, remainder: Remainder, length: Callable[[Sample], int]) -> list[Row]:
    """The last rows, their number made a multiple of `ranks`; see `PackedStream` for how."""
    over = len(rows) % ranks
    if not over:
        return rows
    if remainder == "empty":
        return [*rows, *([] for _ in range(ranks - over))]
    if remainder == "drop" or sum(map(len, rows)) < len(rows) + ranks - over:
        return rows[: len(rows) - over]
    for _ in range(ranks - over):
        at = max(range(len(rows)), key=lambda row: len(rows[row]))
        cut = middle([length(sample) for sample in rows[at]])
        rows = [*rows[:at], rows[at][:cut], rows[at][cut:], *rows[at + 1 :]]
    return rows
