"""The subset of some lengths that fills a given room best, by subset sums in the bits of one python int."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index as as_int


def best_subset(lengths: Sequence[int], room: int) -> list[int]:
    """Choose lengths whose sum is as near to `room` as any subset's, and never above.

    Bit t of `reachable` says that some subset of the lengths so far sums to t. One more length is one shift and one OR
    over all sums at once. Earlier lengths are preferred: the search stops at the first one that fills the room
    exactly, and on the way back a length is used only where those before it do not suffice.

    Args:
        lengths: each at least 1, in tokens.
        room: in tokens, at least 0.

    Returns:
        Indices into `lengths`, rising.
    """
    room, sizes = as_int(room), [*map(as_int, lengths)]  # numpy's ints have 64 bits, and cannot hold sums
    within = (2 << room) - 1
    full = 1 << room
    reachable = 1
    before = []
    for length in sizes:
        before.append(reachable)
        reachable |= (reachable << length) & within
        if reachable & full:
            break
    left = reachable.bit_length() - 1
    chosen = []
    for index in range(len(before) - 1, -1, -1):
        if not left:
            break
        if not before[index] >> left & 1:
            chosen.append(index)
            left -= sizes[index]
    return chosen[::-1]
