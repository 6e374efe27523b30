"""PackedStream: packs an iterable of samples into rows; StreamLoader: loads equally many batches on every rank.

Each rank and each of its workers reads, measures and packs its own part of the source:

    source     0  1  2  3  4  5  6  7  8  9 ...
    rank 0     0     2     4     6     8            worker 0: 0 4 8 ...     worker 1: 2 6 ...
    rank 1        1     3     5     7     9         worker 0: 1 5 9 ...     worker 1: 3 7 ...

The number of rows of a part is only known at its end. So a rank that has run out of rows trains on empty ones until all
ranks have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple
from functools import partial
from itertools import islice
from typing import Any, final
from warnings import warn

import torch
from torch import distributed
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from vlmpack.data.digest import content_digest
from vlmpack.errors import ConfigError, SampleError, check_kind
from vlmpack.loading.resumable import (
    END,
    LOAD_ANOTHER,
    Mark,
    Resumable,
    SourcePart,
    check_samples,
    check_seal,
    other_data,
    sealed,
)
from vlmpack.loading.sampler import checked_rank
from vlmpack.loading.stream_packer import RowSettings, SharedPrefix, StreamPacker, token_count
from vlmpack.plan.lengths import checked_capacity


@final
class PackedStream(IterableDataset[list[Any]]):
    """Rows, each a list of samples, for a `StreamLoader`, or for `DataLoader(stream, batch_size=None)` on one rank.

    Every rank, and every worker of its loader, packs its own part of the source: file shards if the source (a streaming
    data set of `datasets`) can be split evenly, otherwise every n-th sample. In the latter case, each process reads the
    other samples, too, unless they can be read by index and there is no `prefix`. So reading should be cheap: leave
    decoding to the collator. The source must yield the same samples in the same order in every process: seed its
    shuffle, and let the stream do the splitting.

    A sample that the source cannot read (a SampleError) counts as one token of a row. So it reaches the collator, which
    raises it, or skips and counts it.

    Args:
        source: the samples; it is iterated anew every epoch.
        settings: settings of the rows.
        length: function that returns the tokens of a sample; for samples that are not tokenized yet, pass
            `VLMCollator.length`.
        costs: function that returns further costs of a sample, by the names of `settings.limits`.
        prefix: function that returns the prefix a sample shares with its neighbors. Neighbors with the same key go to
            one rank and share a row, and a collator with `share_prefixes` computes the prefix once. None: samples share
            nothing.
        ranks: number of processes that train together.
        rank: rank of this process; optional if there is only one.
        repeat: start over at the end of the source, forever, for trainers that count steps instead of epochs.

    Raises:
        ConfigError: the source or the settings have the wrong type (such as a path), or the rank does not exist.
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
        repeat: bool = False,
    ) -> None:
        check_samples(source)
        if isinstance(source, Iterator) and not isinstance(source, Resumable):
            raise ConfigError(
                f"a {type(source).__name__} gives its samples once, and every further pass would have none; give "
                "something that can be iterated over again (a list, an IterableDataset), or pack it call by call: "
                "StreamPacker"
            )
        ranks = checked_capacity(ranks, "ranks")
        if ranks > 1 and getattr(source, "_distributed", None) is not None:
            raise ConfigError(
                "the source was split by split_dataset_by_node, and a stream splits it again: give the whole data set"
            )
        self.source, self.settings = source, settings
        self.ranks, self.rank = ranks, checked_rank(rank, ranks)
        self.repeat = repeat
        self.agrees = False
        """Whether a `StreamLoader` makes all ranks end together."""
        self._packing: dict[str, Any] = {"length": length, "costs": costs, "prefix": prefix}
        self._packer: StreamPacker[Any] = StreamPacker(settings, **self._packing)
        self._loaded: Mapping[str, Any] | None = None
        self._last_part: SourcePart | None = None
        self._last: tuple[int, Any] | None = None
        """Position and sample read last."""
        self._next: Mark | None = None
        """Where the next pass begins, set when the loaded state belongs to a finished pass."""
        self._iteration: object = None

    def __repr__(self) -> str:
        rows = f"a {type(self.source).__name__} in rows of {self.settings.capacity} tokens"
        end = ", for ever" if self.repeat else ""
        done = f"{self._packer.received} samples packed, {self.dropped} dropped"
        return f"PackedStream({rows}, rank {self.rank} of {self.ranks}{end}; {done})"

    @property
    def dropped(self) -> int:
        """Samples of this pass that were too large for a row and dropped."""
        return self._packer.dropped

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield the rows of this rank and worker, from the loaded state on, or from the start.

        Raises:
            ConfigError: another iteration of this stream has begun meanwhile and takes the remaining rows; the stream
                should repeat a source that makes no row; or ranks that compute together would end at different times.
        """
        if not (self.repeat or self.agrees) and self.ranks > 1 and distributed.is_initialized():
            raise ConfigError(
                "ranks have different numbers of rows, and the last one would wait forever: load the stream with "
                "StreamLoader(stream, collate_fn=...), or repeat it and count steps"
            )
        self._iteration = iteration = object()
        while True:
            for row in self._pass():
                yield row
                if self._iteration is not iteration:
                    raise ConfigError("this stream was started again before it ended; give each loader its own stream")
            if not self.repeat or (self._part.parts > 1 and not self._packer.received):
                return
            if self._packer.received == self.dropped:
                fault = f"the source gives no row, and nothing to repeat: its {self.dropped} samples were too long"
                raise ConfigError(f"{fault}; raise the capacity")

    def _pass(self) -> Iterator[list[Any]]:
        """Yield the rows of a pass, or the remaining ones after a state was loaded."""
        if self._loaded is None:
            since, self._next = self._next, None
            samples = self._begin(self._part, since).samples(since)
        else:
            samples = self._resume(self._loaded)
        self._loaded = None
        yield from self._packer.rows()
        for at, sample in samples:
            self._last = at, sample
            self._packer.add(sample, number=at)
            buffered = len(self._packer)
            yield from self._packer.rows()
            if len(self._packer) < buffered or not self._marks:
                self._mark()
        self._ended = True
        yield from self._packer.rest()

    @property
    def _part(self) -> SourcePart:
        """The part of the source that this process packs."""
        worker = get_worker_info()
        at, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        index, parts = at * self.ranks + self.rank, workers * self.ranks
        part = self._last_part
        if part is None or (part.index, part.parts) != (index, parts):
            self._last_part = part = SourcePart(self.source, index, parts, key=self._packing["prefix"] and self._key)
            self._begin(part)
        return part

    def _begin(self, part: SourcePart, since: Mark | None = None) -> SourcePart:
        """Go to the start of a pass. `since` is the position of the source; None: the source is already there."""
        part.mark = Mark(0)
        self._packer = StreamPacker(self.settings, **self._packing)
        self._start, self._marks, self._ended = since or part.marked() or part.mark, list[Mark](), False
        self._last = None
        return part

    def _key(self, sample: Any) -> str | None:
        prefix = None if isinstance(sample, SampleError) else self._packing["prefix"](sample)
        return None if prefix is None else content_digest(prefix.key)

    @property
    def _needed(self) -> int:
        """First sample to read again when continuing here: the oldest in the buffer, or else the last one read."""
        numbers = [*self._packer.buffered] if self._last is None else [*self._packer.buffered, self._last[0]]
        return min(numbers, default=0)

    def _mark(self) -> None:
        """Store the current position as a mark to resume from, and discard earlier marks that are no longer needed."""
        if (mark := self._part.marked()) is not None:
            needed = self._needed
            passed = [mark for mark in self._marks if mark.position <= needed]
            self._marks = [*passed[-1:], *self._marks[len(passed) :], mark]

    # ------------------------------------------------------------------ save and resume

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to continue bit for bit, as plain data.

        The state holds positions in the source and digests of the buffered samples, which are read again to continue,
        and the source's own states, if it has any.
        """
        if self._loaded is not None:
            return dict(self._loaded)
        part, needed = self._part, self._needed
        near = [mark for mark in (self._start, *self._marks) if mark.position <= needed][-1]
        if self._ended and not self._packer.buffered:  # no sample has to be read again
            near = self._next or Mark(0, source=(part.marked() or near).source)
        fields = {
            "part": [part.index, part.parts],
            "size": part.size,
            "read": part.mark.position,
            "last": None if self._last is None else [self._last[0], content_digest(self._last[1])],
            "ended": self._ended,
            "marks": [list(astuple(mark)) for mark in (self._start, near)],
            "packer": self._packer.state_dict(),
        }
        return sealed(fields, of="PackedStream")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state at the next iteration.

        Raises:
            ConfigError: the state belongs to other ranks, workers or settings, or to a source of another size, or it
                was changed. Samples themselves are compared when they are read again.
        """
        check_seal(state, of="PackedStream")
        part, (index, parts) = self._part, state["part"]
        if (index, parts) != (part.index, part.parts):
            raise ConfigError(
                f"the state is of part {index} of a source in {parts} (one for each rank and worker), and this is part "
                f"{part.index} of {part.parts}; continue each rank by its own state, with as many ranks and workers"
            )
        self._packer.check_state(state["packer"])
        if part.size != state["size"]:
            raise other_data(f"it has {part.size} samples, and before it had {state['size']}")
        self._loaded = state

    def _resume(self, state: Mapping[str, Any]) -> Iterator[Any]:
        """Restore the buffer, and return an iterator over the samples that follow."""
        start, near = (Mark(*mark) for mark in state["marks"])
        if state["ended"] and not state["packer"]["samples"]:
            self._begin(self._part, start).mark = Mark(state["read"])
            self._packer.load_state_dict(state["packer"], {})
            self._ended, self._next = True, near if near.source is not None else None
            return iter(())
        try:
            samples = self._read_again(state, near)
        except ConfigError as error:
            if start.source is None or near.position == start.position:
                raise
            warn(
                f"the source does not continue where its state was taken, for example after a shuffle buffer, which "
                f"the state does not include: the pass is read again from its start ({error})",
                stacklevel=2,
            )
            samples = self._read_again(state, start)
        self._start, self._marks, self._ended = start, [near], state["ended"]
        if state["ended"] and next(samples, END) is not END:
            raise other_data(f"it continues after {state['read']} samples, but it ended there before")
        return samples

    def _read_again(self, state: Mapping[str, Any], since: Mark) -> Iterator[Any]:
        """Read the buffered samples and the last one again, starting at a mark.

        Raises:
            ConfigError: the source yields other samples than before.
        """
        part = self._begin(self._part)
        last = [] if state["last"] is None else [state["last"]]
        wanted = {at for at, _ in (*state["packer"]["samples"], *last)}
        samples = part.samples(since, wanted=wanted, read=state["read"])
        found = dict(islice(samples, len(wanted)))
        self._packer.load_state_dict(state["packer"], found)
        for at, digest in last:
            self._last = at, found.get(at)
            if content_digest(found.get(at)) != digest:
                raise other_data(f"its sample {at} is not the same as before")
        return samples


# ---------------------------------------------------------------------- equally many batches on every rank


@final
class StreamLoader(DataLoader[Any]):
    """A DataLoader for a stream: yields equally many batches on every rank, and has a state to continue from.

    A rank that has run out of rows gets batches of empty rows until all ranks have ended, so that no rank hangs in a
    collective. To agree on this, ranks exchange one number per row (through gloo), unless the stream repeats.

    Args:
        stream: the rows of this rank.
        collate_fn: makes a batch of a row. With several ranks, it must also accept an empty row, as `VLMCollator` does.
        settings: further DataLoader settings, such as `num_workers` and `pin_memory`.

    Raises:
        ConfigError: `stream` is not a PackedStream.
    """

    def __init__(self, stream: PackedStream, *, collate_fn: Callable[[list[Any]], Any] = list, **settings: Any) -> None:
        check_kind("stream", stream, PackedStream, "PackedStream(samples, RowSettings(capacity=4096))")
        self.stream, self._collate = stream, collate_fn
        stream.agrees = True
        collate: Any = partial(_collated, collate_fn)
        super().__init__(_Worker(stream), batch_size=None, collate_fn=collate, **settings)
        self._parts = max(1, self.num_workers)
        self._states: list[Any] = [None] * self._parts
        self._turn = 0
        self._goes_on = False
        """Whether the next iteration begins from stored states: after loading a state, and after an epoch."""
        self._ended = False

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Yield this rank's batches, from the loaded state on, or those of the next epoch.

        Raises:
            ConfigError: a stream that repeats has no sample for this rank.
        """
        if not self._goes_on:
            self._states, self._turn, self._ended = [None] * self._parts, 0, False
        worker: Any = self.dataset
        worker.start = self.state_dict()
        self._goes_on = self._ended = False
        batches = self._own_batches()
        together = not self.stream.repeat and self.stream.ranks > 1 and distributed.is_initialized()
        yield from self._in_step(batches) if together else batches
        self._turn, self._ended, self._goes_on = 0, True, True

    def _own_batches(self) -> Iterator[Any]:
        """Yield the batches of this rank's rows. Workers take turns, even those that have run out of rows."""
        ended: set[int] = set()
        for at, (batch, state, has_ended) in enumerate(super().__iter__()):
            part = at % self._parts
            self._states[part], self._turn = state, (part + 1) % self._parts
            if has_ended:
                ended.add(part)
            elif batch is not None:
                yield batch
            if len(ended) == self._parts:
                break
        if self.stream.repeat:
            raise ConfigError(f"the source has no sample for rank {self.stream.rank} of {self.stream.ranks} to repeat")

    def _in_step(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield equally many batches on every rank, filling up with empty ones."""
        group: Any = distributed.new_group(backend="gloo")
        try:
            while True:
                batch = next(batches, END)
                have_rows = torch.tensor(batch is not END, dtype=torch.int64)
                distributed.all_reduce(have_rows, distributed.ReduceOp.MAX, group)
                if not have_rows:
                    return
                yield self._collate([]) if batch is END else batch
        finally:
            if distributed.is_initialized():
                distributed.destroy_process_group(group)

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to continue after the last batch, as plain data."""
        return {"states": list(self._states), "turn": self._turn, "ended": self._ended}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state at the next iteration.

        Raises:
            ConfigError: this is not a state of a loader, or it has another number of workers (each worker packs a part
                of the source). Workers refuse the state of another stream.
        """
        if not isinstance(state, Mapping) or state.keys() != self.state_dict().keys():
            raise ConfigError(f"this is not the state of a StreamLoader; {LOAD_ANOTHER}")
        if (workers := len(state["states"])) != self._parts:
            raise ConfigError(
                f"the state is of a stream in {workers} workers, but now there are {self._parts}. Each packs a part of "
                "the source: continue with as many as before"
            )
        self._states, self._turn, self._ended = list(state["states"]), state["turn"], state["ended"]
        self._goes_on, self._iterator = True, None  # restart persistent workers


class _Worker(IterableDataset[Any]):
    """Yields (row, state of the stream after it, False) in a worker, and after the end (None, state, True) forever."""

    def __init__(self, stream: PackedStream) -> None:
        self.stream = stream
        self.start: dict[str, Any] | None = None
        """State of the loader; None: the worker persists, and the stream goes on to its next pass."""

    def __iter__(self) -> Iterator[tuple[list[Any] | None, Any, bool]]:
        start, self.start = self.start, None
        if start is not None:
            worker = get_worker_info()
            part = worker.id if worker else 0
            state = start["states"][part]
            if state is not None:
                self.stream.load_state_dict(state)
                if start["ended"]:
                    list(self.stream)  # no rows are left; this moves on to the next pass
            if part < start["turn"]:
                yield None, state, False  # this worker had its turn before the state was saved
        for row in self.stream:
            yield row, self.stream.state_dict(), False
        while True:
            yield None, self.stream.state_dict(), True


def _collated(collate: Callable[[list[Any]], Any], item: tuple[list[Any] | None, Any, bool]) -> tuple[Any, Any, bool]:
    row, state, ended = item
    return None if row is None else collate(row), state, ended
