"""PackedStream: an iterable of samples as a stream of rows, the same on any number of ranks and workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final

from torch.utils.data import IterableDataset, get_worker_info

from vlmpack.errors import ConfigError, check_kind
from vlmpack.loading.resumable import END, MapStyle, Place, Resumable, check_samples, sample_at, whole_source
from vlmpack.loading.sampler import REMAINDERS, Remainder, checked_rank
from vlmpack.loading.state import (
    LOAD_ANOTHER,
    SEAL,
    SampleDigests,
    check_seal,
    checked_fields,
    digest_of,
    listed,
    whole,
)
from vlmpack.loading.stream_packer import Row, RowSettings, Sample, StreamPacker, token_count
from vlmpack.plan import checked_capacity, middle


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

    Every rank and every worker reads the whole source and packs it alike; each gives out its share of the rows. So the
    rows are the same for any number of workers, all ranks have as many, and nobody has to talk. The source must
    therefore give everybody the same samples in the same order (seed its shuffle), and should be cheap to read: leave
    decoding to the collator.

    A sample that the source cannot read (a SampleError) takes up one token of a row, so that it comes to the collator,
    which raises or skips and counts it.

    Args:
        source: the samples; iterated anew every epoch.
        settings: of the rows.
        length: tokens of a sample; of one that is not tokenised yet, `VLMCollator.length` tells them.
        costs: what else a sample needs, by the names of `settings.limits`.
        ranks: processes that train together.
        rank: this one, which may be left out if there is no other.
        remainder: what becomes of the last rows where they do not suffice for all ranks: "split" cuts rows of many
            samples in two (and drops them where there are too few samples), "empty" gives rows of no samples to the
            others, "drop" leaves them out and counts their samples.
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
        if remainder not in REMAINDERS:
            raise ConfigError(f"remainder must be one of {', '.join(REMAINDERS)}, got {remainder!r}")
        self.source, self.settings = source, settings
        self.ranks, self.rank = ranks, checked_rank(rank, ranks)
        self.remainder: Remainder = remainder
        self.repeat = repeat
        self._length, self._costs = length, costs
        self._resumed = False
        self._place = Place(source) if isinstance(source, Resumable) else None
        self._reader: object = None
        self._digests = SampleDigests()
        self._start()

    def _start(self, rounds: int = 0) -> None:
        """Before the first sample of a pass, after so many rounds of rows."""
        self._packer: StreamPacker[Any] = StreamPacker(self.settings, length=self._length, costs=self._costs)
        self._rows: list[list[Any]] = []
        self._rounds = rounds
        self._ended = False
        self._uneven = 0
        self._last: Any = END
        self._last_digest: str | None = None
        """Of the last sample read before the state that was loaded."""
        self._expected: dict[int, str] = {}
        """Digests, by number, of samples that are read again on the way to where the state was."""

    def __repr__(self) -> str:
        rows = f"a {type(self.source).__name__} in rows of {self.settings.capacity} tokens"
        end = "for ever" if self.repeat else f"remainder {self.remainder!r}"
        done = f"{self._packer.seen} samples read, {self.dropped} dropped, {self.left_out} left out"
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
            ConfigError: somebody else began to iterate the same stream meanwhile, and has the rows that would come; or
                it is to repeat a source that makes no row.
        """
        if not self._resumed:
            if self._place is not None and not self._ended:
                self._place.load_state_dict(None)  # in a pass that was given up
            self._start()
        self._resumed = False
        self._reader = reader = object()
        worker = get_worker_info()
        workers, me = (worker.num_workers, worker.id) if worker else (1, 0)
        for mine in self._passes():
            self._rounds += 1
            if (self._rounds - 1) % workers == me:
                yield mine
            if self._reader is not reader:
                raise ConfigError("this stream was begun anew before it ended; give each loader a stream of its own")

    def _passes(self) -> Iterator[list[Any]]:
        """This rank's rows of the current pass, and of those that follow if the stream repeats.

        Rounds are counted on, so that workers take turns as before.
        """
        yield from self._mine()
        while self.repeat:
            self._start(before := self._rounds)
            yield from self._mine()
            if self._rounds == before:
                raise ConfigError(
                    f"the source makes no row, so there is nothing to repeat: of {self._packer.seen} samples "
                    f"{self.dropped} were too long and {self.left_out} left out; remainder= says what becomes of too "
                    "few for all ranks"
                )

    def _mine(self) -> Iterator[list[Any]]:
        """This rank's row of each round of rows.

        The last whole round is held back until another is complete: at the end its rows may have to be split.
        """
        samples = self._samples()
        while not self._ended:
            while len(self._rows) >= 2 * self.ranks:
                yield self._next_round()[self.rank]
            sample = next(samples, END)
            if sample is END:
                self._end()
            else:
                self._last = sample
                self._packer.add(sample)
                self._rows += self._packer.rows()
        while self._rows:
            yield self._next_round()[self.rank]

    def _next_round(self) -> list[list[Any]]:
        first, self._rows = self._rows[: self.ranks], self._rows[self.ranks :]
        return first

    def _end(self) -> None:
        rows = [*self._rows, *self._packer.flush()]
        self._rows = even_out(rows, self.ranks, self.remainder, lambda sample: self._packer.needs(sample)[0])
        self._uneven = sum(map(len, rows)) - sum(map(len, self._rows))
        self._ended = True

    def _samples(self) -> Iterator[Any]:
        """The source from where it was left: by its own means, by number, or read again up to there."""
        if self._ended:
            return iter(())
        start = self._packer.seen
        if self._place is not None:
            return self._place.samples(is_new_pass=not start)
        if isinstance(self.source, MapStyle) and not isinstance(self.source, IterableDataset):
            source = self.source
            return (sample_at(source, at) for at in range(start, len(source)))
        return self._after(start)

    def _after(self, start: int) -> Iterator[Any]:
        """The samples from a number on; those before are read again, and compared where the state tells of them."""
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
        """All there is to continue bit for bit: samples that wait, rows not given out yet, and where the source is.

        `StatefulDataLoader` asks every worker for its own.
        """
        fields = {
            "packer": self._packer.state_dict(),
            "rows": [list(row) for row in self._rows],
            "rounds": self._rounds,
            "ended": self._ended,
            "uneven": self._uneven,
            "ranks": self.ranks,
            "remainder": self.remainder,
            "source": None if self._place is None else self._place.state_dict(),
            "data": [self._size(), self._last_digest if self._last is END else digest_of(self._last)],
        }
        return {**fields, SEAL: self._seal(fields)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there when next iterated.

        Raises:
            ConfigError: the state is of another number of ranks, another remainder, or other settings; of another
                source, where that can be seen; or its fields contradict each other or their seal. A source that can
                only be iterated over is compared when it is.
        """
        fields = checked_fields(state, FIELDS, optional=("data", SEAL), of="PackedStream")
        theirs, ours = (fields["ranks"], fields["remainder"]), (self.ranks, self.remainder)
        if theirs != ours:
            raise ConfigError(
                f"the state is of {theirs[0]!r:.40} ranks with remainder {theirs[1]!r:.40}, this stream is of "
                f"{ours[0]} with {ours[1]!r}; deal as before"
            )
        packer = StreamPacker(self.settings, length=self._length, costs=self._costs)
        packer.load_state_dict(fields["packer"])
        rows = _checked_rows(fields, packer)
        if (self._place is None) != (fields["source"] is None):
            kind = "with" if self._place is None else "without"
            raise ConfigError(f"the state is of a source {kind} a state of its own; {SAME}")
        if SEAL in fields:
            check_seal(fields, self._seal(fields))
        size, last = _checked_data(fields)
        expected = {at: digest_of(sample) for at, sample in fields["packer"]["buffered"]}
        if last is not None and packer.seen:
            expected[packer.seen - 1] = last
        self._check_source(size, packer.seen, expected, ended=fields["ended"])
        self._start()
        self._packer, self._rows, self._expected, self._last_digest = packer, rows, expected, last
        self._rounds, self._ended, self._uneven = fields["rounds"], fields["ended"], fields["uneven"]
        if self._place is not None:
            self._place.load_state_dict(fields["source"])
        self._resumed = True

    def _seal(self, fields: Mapping[str, Any]) -> str:
        counts = [value for name, value in fields.items() if name not in ("packer", "rows", SEAL)]
        sizes = [len(row) for row in fields["rows"]]
        samples = self._digests.of([sample for row in fields["rows"] for sample in row])
        return digest_of([fields["packer"].get(SEAL), sizes, samples, sorted(map(digest_of, counts))])

    @property
    def _by_number(self) -> MapStyle | None:
        """The source, if its samples have numbers and it keeps no place of its own."""
        has_numbers = isinstance(self.source, MapStyle) and not isinstance(self.source, IterableDataset)
        return self.source if has_numbers and self._place is None else None  # pyright: ignore[reportReturnType]

    def _size(self) -> int | None:
        """Samples of the source; None: it does not tell."""
        return None if (source := self._by_number) is None else len(source)

    def _check_source(self, size: int | None, seen: int, expected: Mapping[int, str], *, ended: bool) -> None:
        """Refuse a source by number unless it is as long as before and has the samples that the state tells of."""
        if (source := self._by_number) is None:
            return
        if (size is not None and size != len(source)) or seen > len(source) or (ended and seen < len(source)):
            raise _other_data(f"it has {len(source)} samples, and before it had {seen if size is None else size}")
        self._expected = dict(expected)
        for at in expected:
            self._compare(at, sample_at(source, at))


FIELDS = ("packer", "rows", "rounds", "ended", "uneven", "ranks", "remainder", "source")
"""Of a state."""
SAME = "give the data set of the run that is continued"


def _other_data(seen: str) -> ConfigError:
    return ConfigError(
        f"the state is of another source: {seen}; {SAME}, whose samples are the same whenever they are read"
    )


def _checked_rows(fields: Mapping[str, Any], packer: StreamPacker) -> list[list[Any]]:
    """The rows that were not given out yet; a ConfigError unless they and the counts agree."""
    rows, ended = listed(fields, "rows"), fields["ended"]
    whole(fields, "rounds")
    in_rows = sum(len(listed({"rows": row}, "rows")) for row in rows)
    most = packer.seen - packer.dropped - packer.left_out - len(packer)
    if not isinstance(ended, bool) or in_rows + whole(fields, "uneven") > most or (ended and len(packer)):
        raise ConfigError(
            f"the state has {in_rows} samples in rows and {fields['uneven']} left out, of {most} that may be, with "
            f"ended={ended!r:.40} and {len(packer)} buffered; {LOAD_ANOTHER}"
        )
    return [list(row) for row in rows]


def _checked_data(fields: Mapping[str, Any]) -> tuple[int | None, str | None]:
    """(samples of the source, digest of the last one read), each None where it is not known."""
    data = listed(fields, "data") if "data" in fields else [None, None]
    if len(data) != 2 or not isinstance(data[1], str | None):
        raise ConfigError(f"the state has data={data!r:.40}, and that is a size and a digest; {LOAD_ANOTHER}")
    return None if data[0] is None else whole({"data": data[0]}, "data"), data[1]
