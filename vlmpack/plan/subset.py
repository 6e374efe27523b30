"""The subset of some lengths that fills a given room best, by subset sums in the bits of one python int."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index as as_int


def best_subset(lengths: Iterable[int], room: int) -> list[int]:
    """Choose lengths whose sum is as near to `room` as any subset's, and never above.

    Bit t of `reachable` says that some subset of the lengths so far sums to t. One more length is one shift and one OR
    over all sums at once. Earlier lengths are preferred: the search stops at the first one that fills the room
    exactly, and on the way back a length is used only where those before it do not suffice. Of equal lengths no more
    are looked at than fit into the room together: further ones make no sum possible.

    Args:
        lengths: each at least 1, in tokens; read no further than needed.
        room: in tokens, at least 0.

    Returns:
        Indices into `lengths`, rising.
    """
    room = as_int(room)  # numpy's ints have 64 bits, and cannot hold sums
    if not room:
        return []
    within = (2 << room) - 1
    full = 1 << room
    reachable = 1
    steps: list[tuple[int, int, int]] = []
    """(index, length, sums before) of lengths that made a sum possible."""
    useful: dict[int, int] = {}
    for index, size in enumerate(lengths):
        length = as_int(size)
        if (more := useful.get(length)) is None:
            more = room // length
        if not more:
            continue
        useful[length] = more - 1
        before, reachable = reachable, reachable | (reachable << length) & within
        if reachable != before:
            steps.append((index, length, before))
        if reachable & full:
            break
    left = reachable.bit_length() - 1
    chosen = []
    for index, length, before in reversed(steps):
        if not left:
            break
        if not before >> left & 1:
            chosen.append(index)
            left -= length
    return chosen[::-1]
