"""Parallel tells which ranks share a row."""

from __future__ import annotations

from vlmpack.context_parallel import Parallel


def test_ranks_with_rows_of_their_own_say_so() -> None:
    assert repr(Parallel()) == "Parallel(each rank has rows of its own)"


def test_ranks_that_share_a_row_say_how_many_they_are() -> None:
    parallel = Parallel()
    parallel.collectives.size, parallel.collectives.rank = 4, 1
    assert repr(parallel) == "Parallel(4 ranks share a row, this is rank 1)"
