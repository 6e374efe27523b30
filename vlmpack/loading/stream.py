"""PackedStream: an iterable of samples as a stream of rows, the same on any number of ranks and workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final, get_args

from torch.utils.data import IterableDataset, get_worker_info

from vlmpack.errors import ConfigError, check_choice, check_kind
from vlmpack.loading.resumable import (
    END,
    SEAL,
    MapStyle,
    Place,
    Resumable,
    SampleDigests,
    check_samples,
    check_seal,
    digest_of,
    sample_at,
    whole_source,
)
from vlmpack.loading.sampler import Remainder, checked_rank
from vlmpack.loading.stream_packer import Row, RowSettings, Sample, SharedPrefix, StreamPacker, token_count
from vlmpack.plan.lengths import checked_capacity
from vlmpack.plan.planner import middle


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


@final
class PackedStream(IterableDataset[list[Any]]):
    """Rows, each a list of samples, for `DataLoader(stream, batch_size=None, collate_fn=collator)`.

    Every rank and every worker reads the whole source and packs it alike; each yields its share of the rows. So rows do
    not depend on the number of workers, all ranks have as many, and processes exchange no messages. The source must
    therefore yield the same samples in the same order in every process (seed its shuffle), and should be cheap to read:
    leave decoding to the collator.

    A sample that the source cannot read (a SampleError) takes up one token of a row, so that it comes to the collator,
    which raises or skips and counts it.

    Args:
        source: the samples; iterated anew every epoch.
        settings: of the rows.
        length: tokens of a sample; of one that is not tokenized yet, `VLMCollator.length` counts them.
        costs: what else a sample needs, by the names of `settings.limits`.
        prefix: what a sample begins with, and its neighbors of the same key too: they share a row, and a collator that
            shares prefixes computes it once. None: samples share nothing.
        ranks: processes that train together.
        rank: this one, which may be left out if there is no other.
        remainder: what becomes of the last rows where they do not suffice for all ranks: "split" cuts rows of many
            samples in two (and drops them where there are too few samples), "empty" gives rows of no samples to the
            other ranks, "drop" leaves them out and counts their samples.
        repeat: start over when the source ends, for ever: for trainers that count steps instead of epochs.

    Raises:
        ConfigError: a source or settings of another kind (a path), or a rank or remainder that does not exist.
    """

    def __init__(
        self,
        source: Iterable[Any],
        settings: RowSettings,
        *,
        length: Callable[[Any], int] = token_count,
        costs: Callable[[Any], Mapping[str, int]] | None = None,
        prefix: Callable[[Any], SharedPrefix | None] | None = None,
        ranks: int = 1,
        rank: int | None = None,
        remainder: Remainder = "split",
        repeat: bool = False,
    ) -> None:
        check_samples(source)
        if isinstance(source, Iterator) and not isinstance(source, Resumable):
            raise ConfigError(
                f"a {type(source).__name__} gives its samples once, and every further pass would have none; give "
                "something that can be iterated over again (a list, an IterableDataset), or pack it call by call: "
                "StreamPacker"
            )
        check_kind("settings", settings, RowSettings, "RowSettings(capacity=4096)")
        ranks = checked_capacity(ranks, "ranks")
        check_choice("remainder", remainder, get_args(Remainder))
        self.source, self.settings = source, settings
        self.ranks, self.rank = ranks, checked_rank(rank, ranks)
        self.remainder: Remainder = remainder
        self.repeat = repeat
        self._length, self._costs, self._prefix = length, costs, prefix
        self._resumed = False
        self._place = Place(source) if isinstance(source, Resumable) else None
        self._reader: object = None
        self._digests = SampleDigests()
        self._start()

    def _start(self, rounds: int = 0) -> None:
        """Before the first sample of a pass, after so many rounds of rows."""
        self._packer: StreamPacker[Any] = self._new_packer()
        self._rows: list[list[Any]] = []
        self._rounds = rounds
        self._ended = False
        self._uneven = 0
        self._last: Any = END
        self._last_digest: str | None = None
        """Of the last sample read before the state that was loaded."""
        self._expected: dict[int, str] = {}
        """Digests, by number, of samples that are read again on the way to where the state was."""

    def _new_packer(self) -> StreamPacker[Any]:
        return StreamPacker(self.settings, length=self._length, costs=self._costs, prefix=self._prefix)

    def __repr__(self) -> str:
        rows = f"a {type(self.source).__name__} in rows of {self.settings.capacity} tokens"
        end = "for ever" if self.repeat else f"remainder {self.remainder!r}"
        done = f"{self._packer.received} samples read, {self.dropped} dropped, {self.left_out} left out"
        return f"PackedStream({rows}, rank {self.rank} of {self.ranks}, {end}; {done})"

    @property
    def dropped(self) -> int:
        """Samples of this pass that were too long for a row and left out."""
        return self._packer.dropped

    @property
    def left_out(self) -> int:
        """Samples of this pass whose rows were not full enough at the end, or did not suffice for all ranks."""
        return self._packer.left_out + self._uneven

    def __iter__(self) -> Iterator[list[Any]]:
        """This rank's and worker's rows, from where `load_state_dict` put it, or from the start.

        Raises:
            ConfigError: another iteration of this stream began meanwhile, and has the rows that would come; or the
                stream is to repeat a source that makes no row.
        """
        if not self._resumed:
            if self._place is not None and not self._ended:
                self._place.load_state_dict(None)  # in a pass that was given up
            self._start()
        self._resumed = False
        self._reader = reader = object()
        worker = get_worker_info()
        num_workers, worker_id = (worker.num_workers, worker.id) if worker else (1, 0)
        for row in self._passes():
            self._rounds += 1
            if (self._rounds - 1) % num_workers == worker_id:
                yield row
            if self._reader is not reader:
                raise ConfigError("this stream was begun anew before it ended; give each loader a stream of its own")

    def _passes(self) -> Iterator[list[Any]]:
        """This rank's rows of the current pass, and of those that follow if the stream repeats.

        Rounds are counted on, so that workers take turns as before.
        """
        yield from self._rows_of_rank()
        while self.repeat:
            self._start(before := self._rounds)
            yield from self._rows_of_rank()
            if self._rounds == before:
                raise ConfigError(
                    f"the source makes no row, so there is nothing to repeat: of {self._packer.received} samples "
                    f"{self.dropped} were too long and {self.left_out} left out; remainder= decides about rows that "
                    "are too few for all ranks"
                )

    def _rows_of_rank(self) -> Iterator[list[Any]]:
        """This rank's row of each round of rows.

        The last whole round is held back until another is complete: at the end its rows may have to be split.
        """
        samples = self._samples()
        while not self._ended:
            while len(self._rows) >= 2 * self.ranks:
                yield self._next_row()
            sample = next(samples, END)
            if sample is END:
                self._end()
            else:
                self._last = sample
                self._packer.add(sample)
                self._rows += self._packer.rows()
        while self._rows:
            yield self._next_row()

    def _next_row(self) -> list[Any]:
        """Take out the next round of rows; this rank's is returned."""
        row, self._rows = self._rows[self.rank], self._rows[self.ranks :]
        return row

    def _end(self) -> None:
        rows = [*self._rows, *self._packer.flush()]
        self._rows = even_out(rows, self.ranks, self.remainder, lambda sample: self._packer.needs(sample)[0])
        self._uneven = sum(map(len, rows)) - sum(map(len, self._rows))
        self._ended = True

    def _samples(self) -> Iterator[Any]:
        """The source from where it was left: by its own means, by number, or read again up to there."""
        if self._ended:
            return iter(())
        start = self._packer.received
        if self._place is not None:
            return self._place.samples(is_new_pass=not start)
        if (source := self._by_number) is not None:
            return (sample_at(source, at) for at in range(start, len(source)))
        return self._after(start)

    def _after(self, start: int) -> Iterator[Any]:
        """The samples from a number on; those before are read again, and compared where the state has their digests."""
        samples = whole_source(self.source)
        for at in range(start):
            sample = next(samples, END)
            if sample is END:
                raise _other_data(f"it ends after {at} samples, and {start} were read before")
            self._compare(at, sample)
        yield from samples

    def _compare(self, at: int, sample: Any) -> None:
        if at in self._expected and digest_of(sample) != self._expected[at]:
            raise _other_data(f"its sample {at} is another one than before")

    # ------------------------------------------------------------------ to continue elsewhere

    def state_dict(self) -> dict[str, Any]:
        """Return all there is to continue bit for bit: buffered samples, rows not yielded yet, the source's place.

        `StatefulDataLoader` collects the states of all workers.
        """
        source = self._by_number
        size = None if source is None else len(source)
        fields = {
            "packer": self._packer.state_dict(),
            "rows": [list(row) for row in self._rows],
            "rounds": self._rounds,
            "ended": self._ended,
            "uneven": self._uneven,
            "ranks": self.ranks,
            "remainder": self.remainder,
            "source": None if self._place is None else self._place.state_dict(),
            "data": [size, self._last_digest if self._last is END else digest_of(self._last)],
        }
        return {**fields, SEAL: self._seal(fields)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there when next iterated.

        Raises:
            ConfigError: the state is of another number of ranks, another remainder, or other settings; of another
                source, where that shows; or it was changed. A source that can only be iterated over is compared as it
                is read.
        """
        check_seal(state, self._seal, of="PackedStream")
        ranks, remainder = state["ranks"], state["remainder"]
        if (ranks, remainder) != (self.ranks, self.remainder):
            raise ConfigError(
                f"the state is of {ranks!r:.40} ranks with remainder {remainder!r:.40}, this stream is of "
                f"{self.ranks} with {self.remainder!r}; deal as before"
            )
        packer = self._new_packer()
        packer.load_state_dict(state["packer"])
        if (self._place is None) != (state["source"] is None):
            kind = "with" if self._place is None else "without"
            raise ConfigError(f"the state is of a source {kind} a state of its own; {USE_SAME_DATA}")
        size, last = state["data"]
        expected = {at: digest_of(sample) for at, sample in state["packer"]["buffered"]}
        if last is not None and packer.received:
            expected[packer.received - 1] = last
        self._expected = expected
        if (source := self._by_number) is not None:
            if (size is not None and size != len(source)) or packer.received > len(source):
                before = packer.received if size is None else size
                raise _other_data(f"it has {len(source)} samples, and before it had {before}")
            for at in expected:
                self._compare(at, sample_at(source, at))
        self._start(state["rounds"])
        self._packer, self._expected, self._last_digest = packer, expected, last
        self._rows = [list(row) for row in state["rows"]]
        self._ended, self._uneven = state["ended"], state["uneven"]
        if self._place is not None:
            self._place.load_state_dict(state["source"])
        self._resumed = True

    def _seal(self, fields: Mapping[str, Any]) -> str:
        samples = self._digests.of([sample for row in fields["rows"] for sample in row])
        sizes = [len(row) for row in fields["rows"]]
        return digest_of([fields["packer"][SEAL], sizes, samples, *(fields[name] for name in COUNTED)])

    @property
    def _by_number(self) -> MapStyle | None:
        """The source, if its samples have numbers and it has no state of its own."""
        has_numbers = isinstance(self.source, MapStyle) and not isinstance(self.source, IterableDataset)
        return self.source if has_numbers and self._place is None else None  # pyright: ignore[reportReturnType]


COUNTED = ("rounds", "ended", "uneven", "ranks", "remainder", "source", "data")
"""Fields of a state besides its rows and its packer."""
USE_SAME_DATA = "give the data set of the run that is continued"


def _other_data(fault: str) -> ConfigError:
    return ConfigError(f"the state is of another source: {fault}; {USE_SAME_DATA}, read anew with the same samples")
