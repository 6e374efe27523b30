"""PackedStream: packs an iterable of samples into rows; StreamLoader: loads equally many batches on every rank.

Each rank and each of its workers reads, measures and packs its own part of the source:

    source     0  1  2  3  4  5  6  7  8  9 ...
    rank 0     0     2     4     6     8            worker 0: 0 4 8 ...     worker 1: 2 6 ...
    rank 1        1     3     5     7     9         worker 0: 1 5 9 ...     worker 1: 3 7 ...

The number of rows of a part is only known at its end. So a rank that has run out of rows trains on empty ones until all
ranks have ended.

Rows are numbered over all ranks, and row g is the next one of part g modulo the number of parts, whoever packs it. So
other ranks and workers continue with the same rows:

    row                          0  1  2  3  4  5  6
    part                         0  1  0  1  0  1  0
    rank, begun on 2             0  1
    rank, continued on 3               0  1  2  0  1      each packs both parts, and leaves rows to the others
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import islice
from math import gcd
from typing import Any, final
from warnings import warn

import torch
from torch import distributed
from torch.utils.data import DataLoader, IterableDataset, _utils, get_worker_info

from vlmpack.data.digest import check_seal, content_digest, sealed
from vlmpack.data.readers import MapStyle, check_samples, sample_at
from vlmpack.errors import ConfigError, SampleError, check_kind
from vlmpack.loading.sampler import checked_rank
from vlmpack.loading.stream_packer import RowSettings, SharedPrefix, StreamPacker, other_data, token_count
from vlmpack.plan.lengths import checked_capacity

END = object()
"""Marks the end of the samples."""


@final
class PackedStream(IterableDataset[list[Any]]):
    """Rows, each a list of samples, for a `StreamLoader`, or for `DataLoader(stream, batch_size=None)` on one rank.

    Every rank, and every worker of its loader, packs its own part of the source: file shards if the source is a
    streaming data set of `datasets` that can be split evenly and has no `skip`, `take` or `interleave_datasets`;
    otherwise every n-th sample. In the latter case, each process reads the other samples, too, unless they can be read
    by index and there is no `prefix`. So reading should be cheap: leave decoding to the collator. The source must yield
    the same samples in the same order in every process: seed its shuffle, and let the stream do the splitting.

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
        if isinstance(source, Iterator):
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
        if getattr(source, "_starting_state_dict", None) is not None:
            raise ConfigError(
                "a state was loaded into the source, and a stream reads whole data sets: open the source again, and "
                "load the state of the StreamLoader instead"
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
        self._iteration: object = None
        self._fixed: tuple[int, int] | None = None
        self.dealt: list[PackedStream] = []
        """The parts that this process packs for a run that other ranks or workers began."""

    def __repr__(self) -> str:
        rows = f"a {type(self.source).__name__} in rows of {self.settings.capacity} tokens"
        end = ", for ever" if self.repeat else ""
        done = f"{self._packer.received} samples packed, {self.dropped} dropped"
        return f"PackedStream({rows}, rank {self.rank} of {self.ranks}{end}; {done})"

    @property
    def dropped(self) -> int:
        """Samples of this pass that were too large for a row and dropped."""
        return self._packer.dropped + sum(part.dropped for part in self.dealt)

    def of_part(self, index: int, parts: int) -> PackedStream:
        """Return a stream of this part of the source, whichever process packs it."""
        part = copy(self)
        part._fixed, part._last_part, part._loaded, part.dealt = (index, parts), None, None, []
        part._begin(part._part)
        return part

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
        loaded, self._loaded = self._loaded, None
        samples = self._begin(self._part).samples() if loaded is None else self._resume(loaded)
        yield from self._packer.rows()
        for at, sample in samples:
            self._last = at, sample
            self._packer.add(sample, number=at)
            buffered = len(self._packer)
            yield from self._packer.rows()
            if len(self._packer) < buffered or len(self._marks) == 1:
                self._mark()
        self._ended = True
        yield from self._packer.rest()

    @property
    def _part(self) -> SourcePart:
        """The part of the source that this process packs."""
        worker = get_worker_info()
        at, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        index, parts = self._fixed or (at * self.ranks + self.rank, workers * self.ranks)
        part = self._last_part
        if part is None or (part.index, part.parts) != (index, parts):
            key = self._packing["prefix"] and self._key
            self._last_part = part = SourcePart(self.source, index, parts, key=key)
            self._begin(part)
        return part

    def _begin(self, part: SourcePart) -> SourcePart:
        """Go to the start of a pass."""
        part.mark = Mark(0)
        self._packer = StreamPacker(self.settings, **self._packing)
        self._marks, self._ended, self._last = [part.mark], False, None
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
            self._marks = [passed[-1], *self._marks[len(passed) :], mark]

    # ------------------------------------------------------------------ save and resume

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to continue bit for bit, as plain data.

        The state holds positions in the source, those of a data set of `datasets` in its own form, and digests of the
        buffered samples, which are read again to continue.
        """
        if self._loaded is not None:
            return dict(self._loaded)
        part, needed = self._part, self._needed
        near = [mark for mark in self._marks if mark.position <= needed][-1]
        fields = {
            "part": [part.index, part.parts],
            "size": part.size,
            "read": part.mark.position,
            "last": None if self._last is None else [self._last[0], content_digest(self._last[1])],
            "ended": self._ended,
            "mark": list(astuple(near)),
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
                f"{part.index} of {part.parts}; a StreamLoader continues on other ranks and workers"
            )
        self._packer.check_state(state["packer"])
        if part.size != state["size"]:
            raise other_data(f"it has {part.size} samples, and before it had {state['size']}")
        self._loaded = state

    def _resume(self, state: Mapping[str, Any]) -> Iterator[Any]:
        """Restore the buffer, and return an iterator over the samples that follow."""
        if state["ended"] and not state["packer"]["samples"]:  # no sample has to be read again
            self._begin(self._part).mark = Mark(state["read"])
            self._packer.load_state_dict(state["packer"], {})
            self._ended = True
            return iter(())
        near = Mark(*state["mark"])
        try:
            samples = self._read_again(state, near)
        except ConfigError as error:
            if near.source is None:
                raise
            warn(
                "the source does not continue where its state was taken, for example because its `map` has a state "
                f"that is not included: the pass is read again from its start ({error})",
                stacklevel=2,
            )
            samples = self._read_again(state, Mark(0))
        self._marks, self._ended = [near], state["ended"]
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


# ---------------------------------------------------------------------- a part of a source


@dataclass(frozen=True)
class Mark:
    """A position in a source from which reading can continue."""

    position: int
    """Number of samples of the source before it."""
    groups: int = 0
    """Number of groups (neighbors with one key) that began before it; a sample without a key is its own group."""
    key: str | None = None
    """Key of the last sample before it."""
    source: dict[str, Any] | None = None
    """State of the source, if it is a streaming data set of `datasets`."""


@final
class SourcePart:
    """The samples that one of several processes packs. Together, the parts contain every sample exactly once.

    If the source is a streaming data set of `datasets` whose number of shards is divisible by the number of parts, each
    process opens only its own file shards, unless the source counts samples (skip, take, interleave). Otherwise samples
    are distributed in turn, and neighbors with one key stay together. Each process then reads all samples, unless they
    can be read by index and there are no keys.

    Args:
        source: all samples, the same in every process.
        index: index of the part.
        parts: number of parts.
        key: function that returns the key of a sample's group; None: samples are distributed one by one.
    """

    def __init__(self, source: Any, index: int, parts: int, key: Callable[[Any], str | None] | None) -> None:
        self.index, self.parts, self._source = index, parts, source
        hub: Any = sys.modules.get("datasets")
        self._is_of_datasets = hub is not None and isinstance(source, hub.IterableDataset)
        steps = list(_steps(source)) if self._is_of_datasets else []
        self._has_position = self._is_of_datasets and "BufferShuffledExamplesIterable" not in map(_name, steps)
        self._split = (0, 1)
        """(index, number) of the split of a data set of `datasets` that this part reads from."""
        if self._is_of_datasets and source.num_shards % parts == 0 and not any(map(_counts_samples, steps)):
            self._split, (index, parts) = (index, parts), (0, 1)
        self._index, self._parts = index, parts
        self._key = None if parts == 1 else key
        is_indexed = isinstance(source, MapStyle) and not isinstance(source, IterableDataset)
        self.size = len(source) if is_indexed else None  # pyright: ignore
        """Number of samples of a source that can be read by index; None: it cannot."""
        self.mark = Mark(0)
        """Position after the last sample read, without the state of the source."""
        self._reader: Any = None
        """The split of a data set of `datasets` that is read."""

    def marked(self) -> Mark | None:
        """Return the position where reading can continue; None: the source can only be read from its start."""
        if self._has_position:
            return replace(self.mark, source=self._reader.state_dict())
        return self.mark if self.size is not None or not self.mark.position else None

    def samples(self, since: Mark | None = None, *, wanted: Collection[int] = (), read: int = 0) -> Iterator[Any]:
        """Yield (position, sample) of this part until the end of the pass.

        Args:
            since: position to continue from; None: a new pass.
            wanted: positions below `read` whose samples are read again.
            read: number of samples of the source read before; those not in `wanted` are skipped.

        Raises:
            ConfigError: the source ends before `read`.
        """
        if self.size is not None and self._key is None:
            first = read + (self._index - read) % self._parts
            for at in (*sorted(wanted), *range(first, self.size, self._parts)):
                self.mark = Mark(max(at + 1, read))
                yield at, sample_at(self._source, at)
            return
        self.mark = since or Mark(0)
        for sample in self._from(since):
            at = self.mark.position
            if self._is_mine(sample) and (at >= read or at in wanted):
                yield at, sample
        if self.mark.position < read:
            raise other_data(f"it ends after {self.mark.position} samples, and {read} were read before")

    def _from(self, since: Mark | None) -> Iterator[Any]:
        """Return all samples of the source from a mark on."""
        if self._is_of_datasets:
            from datasets.distributed import split_dataset_by_node

            # A new object for each pass, even of the whole: a position that is loaded into one stays there.
            self._reader = split_dataset_by_node(self._source, *self._split)
            self._reader.set_epoch(self._source.epoch)
            if since is not None and since.source is not None:
                self._reader.load_state_dict(since.source)
            return _whole(self._reader)
        if self.size is not None:
            return (sample_at(self._source, at) for at in range(self.mark.position, self.size))
        return _alone(self._source) if hasattr(self._source, "state_dict") else _whole(self._source)

    def _is_mine(self, sample: Any) -> bool:
        """Count a sample that was read, and return whether it belongs to this part."""
        key = None if self._key is None else self._key(sample)
        groups = self.mark.groups + (key is None or key != self.mark.key)
        self.mark = Mark(self.mark.position + 1, groups, key)
        return (groups - 1) % self._parts == self._index


def _steps(source: Any) -> Iterator[Any]:
    """Yield the steps that a streaming data set of `datasets` is made of. `datasets` has no public list of them."""
    steps = [source._ex_iterable]
    while steps:
        yield (step := steps.pop())
        steps += [*getattr(step, "ex_iterables", ()), *filter(None, [getattr(step, "ex_iterable", None)])]


def _name(step: Any) -> str:
    return type(step).__name__


def _counts_samples(step: Any) -> bool:
    """Whether a step (skip, take, interleave) would choose other samples in each file shard than in all of them."""
    keeps_all = "all_exhausted_without_replacement"
    is_cut = _name(step) in ("SkipExamplesIterable", "TakeExamplesIterable")
    return is_cut or getattr(step, "stopping_strategy", keeps_all) != keeps_all


_readers: dict[int, object] = {}
"""Who reads a source with a state, by the source's `id`."""


def _alone(source: Iterable[Any]) -> Iterator[Any]:
    """Yield all samples of a source whose position is in the object, so that two who read it would share them out.

    Raises:
        ConfigError: somebody else has begun to read it.
    """
    reader = _readers[id(source)] = object()
    try:
        for sample in _whole(source):
            yield sample
            if _readers.get(id(source)) is not reader:
                fault = (
                    f"another stream has begun to read this {type(source).__name__}, whose position is in the object"
                )
                raise ConfigError(f"{fault}; give each its own, and continue with as many ranks and workers as before")
    finally:
        if _readers.get(id(source)) is reader:
            del _readers[id(source)]


def _whole(source: Iterable[Any]) -> Iterator[Any]:
    """Yield all samples of a source.

    In a worker process, data sets yield only their share, but a `SourcePart` needs all samples. So `get_worker_info`
    hides the worker from the source while it is read.
    """
    with _no_worker():
        samples = iter(source)
    while True:
        with _no_worker():
            sample = next(samples, END)
        if sample is END:
            return
        yield sample


@contextmanager
def _no_worker() -> Iterator[None]:
    """Make `get_worker_info` return None, in this process only. PyTorch has no public way to do this."""
    before = _utils.worker._worker_info
    _utils.worker._worker_info = None
    try:
        yield
    finally:
        _utils.worker._worker_info = before


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
        self._workers = max(1, self.num_workers)
        self._parts = self._workers * stream.ranks
        self._states = [dict[int, Any]() for _ in range(self._workers)]
        """For each worker, the states of its parts, see `_Worker`."""
        self._first = self._turns = 0
        """The number of the first row of the pass on these ranks, and how often workers have had their turn since."""
        self._goes_on = self._ended = False
        """Whether the next iteration continues an epoch whose state was loaded, and whether the last one has ended."""

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Yield this rank's batches, from the loaded state on, or those of the next epoch.

        Raises:
            ConfigError: a stream that repeats has no sample for this rank.
        """
        if not self._goes_on:
            self._states, self._first, self._turns, self._ended = [{} for _ in self._states], 0, 0, False
        worker: Any = self.dataset
        worker.start = {"parts": self._parts, "first": self._first, "states": [*self._states]}
        self._goes_on = False
        batches = self._own_batches()
        together = not self.stream.repeat and self.stream.ranks > 1 and distributed.is_initialized()
        yield from self._in_step(batches) if together else batches
        self._turns, self._ended = 0, True

    def _own_batches(self) -> Iterator[Any]:
        """Yield the batches of this rank's rows. Workers take turns, even those that have run out of rows."""
        ended = set[int]()
        for at, (batch, state, has_ended) in enumerate(super().__iter__()):
            worker = at % self._workers
            self._states[worker], self._turns = state, at + 1
            if has_ended:
                ended.add(worker)
            elif batch is not None:
                yield batch
            if len(ended) == self._workers:
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
        """Return everything needed to continue this rank after its last batch, as plain data."""
        process = {"rank": self.stream.rank, "ranks": self.stream.ranks, "workers": self._workers}
        rows = {"parts": self._parts, "next": self._first + self._turns * self.stream.ranks, "ended": self._ended}
        states = {str(part): state for part, state in _most_advanced(self._states).items()}
        return sealed({**process, **rows, "states": states}, of="StreamLoader")

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from a state at the next iteration.

        With other ranks or workers, rows go on as before, one after another to the ranks that there are now. A process
        then packs parts of several, and if there are more processes than parts, several pack the same one.

        Args:
            state: the state of this rank; or those of all ranks, of any number of them.

        Raises:
            ConfigError: this is not a state of a loader; there are other ranks or workers now, and a state of a rank is
                missing, or a part of the source has ended. Workers refuse the state of another stream.
        """
        states: list[Any] = [*state] if isinstance(state, Sequence) and state else [state]
        for each in states:
            check_seal(each, of="StreamLoader")
        own = self.stream.rank, self.stream.ranks, self._workers
        of_rank = [each for each in states if (each["rank"], each["ranks"], each["workers"]) == own]
        states = of_rank[:1] or states
        before, known = states[0], _most_advanced([each["states"] for each in states])
        if not of_rank:
            self._check_others(states, known)
        self._parts, self._first, self._turns, self._ended = before["parts"], before["next"], 0, before["ended"]
        for at in range(self._workers):
            parts = _hosted(*_place(self.stream, at, self._workers), self._parts, self._first)
            self._states[at] = {part: known[part] for part in parts if part in known}
        self._goes_on, self._iterator = not self._ended, None  # restart persistent workers

    def _check_others(self, states: Sequence[Mapping[str, Any]], known: Mapping[int, Any]) -> None:
        """Check that this loader can continue with the states of other ranks."""
        before = states[0]
        ranks, workers = before["ranks"], before["workers"]
        is_whole = sorted(each["rank"] for each in states) == list(range(ranks))
        shared = [name for name in before if name not in ("rank", "states", "seal")]
        if not is_whole or any(each[name] != before[name] for each in states for name in shared):
            raise ConfigError(
                f"the state is of rank {before['rank']} of {ranks} with {workers} workers each, and this is rank "
                f"{self.stream.rank} of {self.stream.ranks} with {self._workers}: give the states of all ranks, taken "
                "after the same step, load_state_dict([state_of_rank_0, ...])"
            )
        gone = [part for part, (following, _) in known.items() if following is None]
        if gone and not before["ended"]:
            raise ConfigError(
                f"part {gone[0]} of the source in {before['parts']} has no rows left: continue with {ranks} ranks and "
                f"{workers} workers to the end of the epoch"
            )


def _most_advanced(states: Iterable[Mapping[Any, Any]]) -> dict[int, Any]:
    """Return the most advanced state of each part, whose numbers are texts after a way through JSON."""
    known: dict[int, Any] = {}
    for part, (following, state) in (item for of_parts in states for item in of_parts.items()):
        if int(part) not in known or (known[int(part)][0] or 0) < (following or 0):
            known[int(part)] = following, state
    return known


def _place(stream: PackedStream, worker: int, workers: int) -> tuple[int, int]:
    """Return (number, count) of the processes of all ranks for a worker."""
    return stream.rank + worker * stream.ranks, workers * stream.ranks


def _hosted(process: int, processes: int, parts: int, first: int) -> list[int]:
    """Return the parts of which this process yields rows: those of rows first + process + n x processes."""
    return sorted((first + process + turn * processes) % parts for turn in range(parts // gcd(parts, processes)))


class _Worker(IterableDataset[Any]):
    """Yields (row, states of its parts after it, False) in a worker, and after the end (None, states, True) forever.

    The states are a dictionary from part to (number of the part's next row, None if it has none; state of its stream).
    """

    def __init__(self, stream: PackedStream) -> None:
        self.stream = stream
        self.start: dict[str, Any] | None = None
        """Where to begin; None: the worker persists, and begins the next pass."""
        self._count = 0

    def __iter__(self) -> Iterator[tuple[list[Any] | None, Any, bool]]:
        start, self.start = self.start, None
        worker = get_worker_info()
        at, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        process, processes = _place(self.stream, at, workers)
        first, states = 0, dict[int, Any]()
        if start is not None:
            self._count, first, states = start["parts"], start["first"], dict(start["states"][at])
        parts = _hosted(process, processes, self._count, first)
        is_own = (self._count, parts) == (processes, [process])
        streams = {part: self.stream if is_own else self.stream.of_part(part, self._count) for part in parts}
        self.stream.dealt = [] if is_own else list(streams.values())
        for part, (known, state) in states.items():
            if known is not None:
                streams[part].load_state_dict(state)
        following = {part: first + (part - first) % self._count for part in parts}
        following |= {part: known for part, (known, _) in states.items()}
        rows = {part: iter(stream) for part, stream in streams.items()}
        number = first + process
        while any(known is not None for known in following.values()):
            row, part = None, number % self._count
            while (known := following[part]) is not None and known <= number:  # the last one is this process's
                row = next(rows[part], None)
                following[part] = None if row is None else known + self._count
            states[part] = following[part], streams[part].state_dict()
            if row is not None:
                yield row, dict(states), False
            number += processes
        while True:
            yield None, dict(states), True


def _collated(collate: Callable[[list[Any]], Any], item: tuple[list[Any] | None, Any, bool]) -> tuple[Any, Any, bool]:
    row, state, ended = item
    return None if row is None else collate(row), state, ended
