"""Groups of samples in a stream: neighbours that share a prefix are buffered as one item, and share a row.

samples    a1 a2 a3 b1 c1 c2            letters: keys of their prefixes
arriving   a1 a2 a3                     until b1 comes
items               [a1 a2 a3]   [b1]   c1 c2 are arriving
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

from vlmpack.errors import SampleError
from vlmpack.plan.packing_buffer import whole_needs
from vlmpack.plan.planner import cut_group

Needs = tuple[int, ...]
"""Tokens, and what else is limited."""


@final
@dataclass(frozen=True, kw_only=True)
class SharedPrefix:
    """The beginning of a sample, which its neighbours of the same key have too."""

    key: Hashable
    """Equal for samples with this prefix, such as the number of a prompt; other keys are other prefixes."""
    tokens: int
    """Tokens of it."""
    costs: Mapping[str, int] = field(default_factory=dict)
    """Its further needs, by the names of the limits; others count in full for every sample."""

    def needs(self, limits: Mapping[str, int]) -> Needs:
        """Return (tokens, and what else is limited) of the prefix.

        Raises:
            SampleError: one of them is no whole number.
        """
        return whole_needs((self.tokens, *(self.costs.get(name, 0) for name in limits)))


class Member(NamedTuple):
    """A sample of the group that is arriving."""

    number: int
    """In the stream."""
    needs: Needs
    """Of the whole sample."""


class Item(NamedTuple):
    """Samples that go into a row together."""

    numbers: tuple[int, ...]
    """In the stream, rising."""
    needs: Needs
    """Of all of them, their prefix counted once."""


@final
class ArrivingGroup:
    """Samples of one key, until another key comes.

    Args:
        limits: of a row, tokens first.
        most: tokens after which what has arrived of a group is handed over, however many samples may follow.
    """

    def __init__(self, limits: Needs, most: int) -> None:
        self._limits, self._most = limits, most
        self.key: Hashable = None
        self.prefix: Needs = ()
        self.members: list[Member] = []

    def __copy__(self) -> ArrivingGroup:
        group = ArrivingGroup(self._limits, self._most)
        group.key, group.prefix, group.members = self.key, self.prefix, list(self.members)
        return group

    @property
    def tokens(self) -> int:
        """Tokens of the samples that have arrived, their prefix counted once."""
        return sum_of(self.members, self.prefix)[0] if self.members else 0

    def ends_before(self, key: Hashable) -> bool:
        """Return whether the group is complete where a sample of this key comes; None: it has no prefix."""
        return bool(self.members) and (key != self.key or self.tokens >= self._most)

    def add(self, member: Member, key: Hashable, prefix: Needs) -> None:
        """Take a sample of the group in.

        Raises:
            SampleError: its prefix is another one than that of the group, or longer than the sample.
        """
        first = prefix if not self.members else self.prefix
        short = any(need < shared for need, shared in zip(member.needs, prefix, strict=True))
        if prefix != first or short or min(prefix) < 0:
            raise SampleError(
                f"needs {list(member.needs)} (tokens first), and the prefix of its key {key!r:.60} {list(prefix)}; "
                f"that of its group is {list(first)}. Prefixes of one key are equal, and no longer than their samples",
                index=member.number,
                reason="bad_group",
            )
        self.key, self.prefix = key, prefix
        self.members.append(member)

    def take(self) -> list[Item]:
        """Hand over all that has arrived: one item, or several that fit a row each, the prefix repeated in each."""
        members, self.members = self.members, []
        if not members:
            return []
        pieces = cut_group([member.needs for member in members], self.prefix, self._limits)
        parts = [[members[at] for at in piece] for piece in pieces]
        return [Item(tuple(m.number for m in part), sum_of(part, self.prefix)) for part in parts]


def sum_of(members: Sequence[Member], prefix: Needs) -> Needs:
    """Return what samples need together, their prefix counted once."""
    columns = zip(*(member.needs for member in members), strict=True)
    return tuple(sum(column) - (len(members) - 1) * shared for column, shared in zip(columns, prefix, strict=True))
