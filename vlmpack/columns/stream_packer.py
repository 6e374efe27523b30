"""StreamPacker: lengths one by one, rows as they are complete."""

from __future__ import annotations

from typing import final

from vlmpack.columns.packer import FULL_NAMES
from vlmpack.columns.result import Pack
from vlmpack.errors import ConfigError
from vlmpack.plan import ROWS_WAITING, WAITING, WaitingRoom, checked_capacity, small_letters

NEXT_FIT, ROLLING = "nf", "hk"


@final
class StreamPacker:
    """Take lengths in one by one and give rows out; the rows are those of `pack_sequences` with the same strategy.

    Args:
        capacity: tokens that a row may hold.
        strategy: `"nf"` fills one row after the other in the order given. `"hk"` stands for `rolling_fill`, not for
            Harmonic-K: 64 samples or four rows' worth of tokens wait, and each row is the oldest of them and those
            that fill it up. It holds as little at a time as Harmonic-K does, and its rows are fuller.
        k: Harmonic-K's number of size classes. There are none here: it is checked, and changes nothing.

    Raises:
        ConfigError: a capacity or k below 1, or another strategy.
    """

    def __init__(self, capacity: int, strategy: str = "nf", k: int | None = None) -> None:
        name = small_letters(strategy).replace("_", "")
        self._strategy = FULL_NAMES.get(name, name)
        if self._strategy not in (NEXT_FIT, ROLLING):
            raise ConfigError(
                f"a stream cannot be packed by {strategy!r}, which needs all lengths at once; choose 'nf' or 'hk', or "
                "use Packer"
            )
        if k is not None:
            checked_capacity(k, "k")
        self._capacity = checked_capacity(capacity)
        self._room = WaitingRoom(capacity)
        self._lengths: dict[int, int] = {}
        self._added = 0
        self._finished = False

    @property
    def sequences_added(self) -> int:
        """Samples taken in so far."""
        return self._added

    def add(self, length: int) -> list[Pack]:
        """Take one sample in.

        Returns:
            The rows that are now complete, often none.

        Raises:
            SampleError: a length that is not whole, below 1 or above the capacity; names the sample. It is not taken
                in, and the packer goes on.
            ConfigError: the stream was finished.
        """
        self._check_open()
        self._check_fits(length)
        overflows = self._strategy == NEXT_FIT and self._room.tokens + length > self._capacity
        complete = [self._next_row()] if overflows else []
        self._room.add(self._added, length)
        self._lengths[self._added] = int(length)
        self._added += 1
        while self._strategy == ROLLING and self._enough:
            complete.append(self._next_row())
        return complete

    def finish(self) -> list[Pack]:
        """Give out what is left; after this nothing can be added.

        Raises:
            ConfigError: the stream was finished before.
        """
        self._check_open()
        self._finished = True
        rest = []
        while len(self._room):
            rest.append(self._next_row())
        return rest

    @property
    def _enough(self) -> bool:
        return len(self._room) >= WAITING and self._room.tokens >= ROWS_WAITING * self._capacity

    def _next_row(self) -> Pack:
        """The oldest sample and those that fill its row; by next fit all that wait fit in it."""
        row = self._room.take()
        return Pack(sequence_ids=row, lengths=[self._lengths.pop(sample) for sample in row])

    def _check_fits(self, length: int) -> None:
        """A room takes a sample or says why not: ask an empty one, before a row is given out."""
        WaitingRoom(self._capacity).add(self._added, length)

    def _check_open(self) -> None:
        if self._finished:
            raise ConfigError("this StreamPacker is finished; make a new one for the next stream")

    def __repr__(self) -> str:
        state = "finished" if self._finished else f"{len(self._room)} waiting"
        return f"StreamPacker(strategy={self._strategy!r}, added={self._added}, {state})"
