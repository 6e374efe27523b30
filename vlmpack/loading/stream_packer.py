"""StreamPacker: samples in, one after the other; rows of samples out.

Neighbors that share a prefix are buffered as one item, and share a row:

samples    a1 a2 a3 b1 c1 c2            letters: keys of their prefixes
arriving   a1 a2 a3                     until b1 comes
items               [a1 a2 a3]   [b1]   c1 c2 are arriving
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, final

import numpy as np

from vlmpack.errors import ConfigError, SampleError, check_choice, check_kind
from vlmpack.loading.resumable import check_seal, digest_of, other_data, sealed
from vlmpack.plan.lengths import OVERSIZE, Oversize, checked_capacity
from vlmpack.plan.packing_buffer import ROWS_BUFFERED, PackingBuffer, whole_needs
from vlmpack.plan.planner import cut_group


@final
@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """Settings of rows made from a stream of samples."""

    capacity: int
    """Tokens that a row may hold."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """Further limits of a row, by name: vision patches, images."""
    buffer_tokens: int | None = None
    """Rows are made while at least this many tokens are buffered; None: four rows' worth."""
    min_fill: float = 0.0
    """Share of the capacity, 0 to 1, below which a row is held back once for more samples."""
    drop_last: bool = False
    """At the end, leave out rows below `min_fill`."""
    oversize: Oversize = "error"
    """A sample that exceeds a row by itself: refuse it, leave it out and count it, or give it a row of its own."""

    def __post_init__(self) -> None:
        checked_capacity(self.capacity)
        check_kind("limits", self.limits, Mapping, '{"images": 8}')
        for name, limit in self.limits.items():
            checked_capacity(limit, f"the limit of {name!r}")
        if self.buffer_tokens is not None and not self.buffer_tokens >= 0:
            raise ConfigError(f"buffer_tokens must be at least 0, got {self.buffer_tokens}")
        if not 0 <= self.min_fill <= 1:
            raise ConfigError(f"min_fill must lie between 0 and 1, got {self.min_fill}")
        check_choice("oversize", self.oversize, OVERSIZE)

    @property
    def enough_buffered(self) -> int:
        """Tokens that have to be buffered before a row is made."""
        return ROWS_BUFFERED * self.capacity if self.buffer_tokens is None else self.buffer_tokens

    @property
    def least_tokens(self) -> float:
        """Tokens of a row that is full enough."""
        return self.min_fill * self.capacity


Sample = TypeVar("Sample")
Row = list[Sample]
LENGTH = "length=collator.length of the VLMCollator that will make the rows, or a function of your own"
"""The remedy where samples have no length."""


def token_count(sample: Mapping[str, Any]) -> int:
    """Tokens of a sample dict: its `length`, or else the number of its `input_ids`, which are [n] or [1, n].

    Raises:
        ConfigError: it has neither, or is no dict.
        SampleError: its `input_ids` have another shape.
    """
    if isinstance(sample, Mapping):
        if "length" in sample:
            return sample["length"]
        if "input_ids" in sample:
            return _number_of(sample["input_ids"])
        fault = f"has no 'length' and no 'input_ids', only {list(sample)}"
    else:
        fault = f"is a {type(sample).__name__}, and not a dict"
    raise ConfigError(f"a sample {fault}; count its tokens by `length`: {LENGTH}")


def _number_of(ids: Any) -> int:
    """n of token ids of shape [n] or [1, n]."""
    shape = _shape(ids)
    if len(shape) == 1 or (len(shape) == 2 and shape[0] == 1):
        return shape[-1]
    form = f"shape {list(shape)}" if shape else f"no shape, they are {ids!r:.40}"
    raise SampleError(
        f"input_ids have {form}; one sample's are [n] (or [1, n]). Give each sample by itself, or a function `length`",
        reason="bad_shape",
    )


def _shape(ids: Any) -> tuple[int, ...]:
    """The shape of an array, a tensor or a list, of which only the first items are read: lists are slow to convert."""
    if isinstance(ids, list | tuple):
        return (len(ids), *(_shape(ids[0]) if ids else ()))
    return tuple(np.shape(ids))


# ---------------------------------------------------------------------- groups that arrive

Needs = tuple[int, ...]
"""Tokens, and what else is limited."""


@final
@dataclass(frozen=True, kw_only=True)
class SharedPrefix:
    """The beginning of a sample, which its neighbors of the same key have too."""

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


@dataclass
class _Group:
    """Samples that share a prefix: those of one key that are arriving, until another key comes; or those of an item."""

    key: Hashable = None
    prefix: Needs = ()
    members: dict[int, Needs] = field(default_factory=dict)
    """Needs of the whole samples, by their numbers in the stream."""

    def needs(self, numbers: Sequence[int]) -> Needs:
        """Of some of them, their prefix counted once."""
        columns = zip(*(self.members[number] for number in numbers), strict=True)
        repeats = len(numbers) - 1
        return tuple(sum(column) - repeats * shared for column, shared in zip(columns, self.prefix, strict=True))

    @property
    def tokens(self) -> int:
        return self.needs([*self.members])[0] if self.members else 0

    def add(self, number: int, needs: Needs, key: Hashable, prefix: Needs) -> None:
        """Take a sample in.

        Raises:
            SampleError: its prefix is another one than that of the group, or longer than the sample.
        """
        first = self.prefix if self.members else prefix
        short = any(need < shared for need, shared in zip(needs, prefix, strict=True))
        if prefix != first or short or min(prefix) < 0:
            raise SampleError(
                f"needs {list(needs)} (tokens first), and the prefix of its key {key!r:.60} {list(prefix)}; that of "
                f"its group is {list(first)}. Prefixes of one key are equal, and no longer than their samples",
                index=number,
                reason="bad_group",
            )
        self.key, self.prefix = key, prefix
        self.members[number] = needs


# ---------------------------------------------------------------------- the packer


@final
class StreamPacker(Generic[Sample]):
    """Keep a few samples buffered and make rows of them, each around the oldest and filled exactly.

    Samples stay whole, are never read, and come out once. No randomness: the same samples give the same rows.
    Neighbors that share a prefix share a row, which counts it once; a group too large for a row is cut into several.

    Two ways to use it. Sample by sample: `add`, and `rows` after each; at the end `flush`. Call by call, as for
    rollouts in a trainer: `pack` takes all there is and returns rows that are full enough; the rest stays buffered.

    Args:
        settings: of the rows.
        length: tokens of a sample; of one that is not tokenized yet, `VLMCollator.length` counts them.
        costs: what else a sample needs, by the names of `settings.limits`.
        prefix: what a sample begins with, and its neighbors of the same key too; None: nothing that they share. The
            rows are for a collator that shares prefixes.

    Raises:
        ConfigError: settings of another kind, or limits without a function of costs.
    """

    def __init__(
        self,
        settings: RowSettings,
        *,
        length: Callable[[Sample], int] = token_count,
        costs: Callable[[Sample], Mapping[str, int]] | None = None,
        prefix: Callable[[Sample], SharedPrefix | None] | None = None,
    ) -> None:
        check_kind("settings", settings, RowSettings, "RowSettings(capacity=4096)")
        if settings.limits and costs is None:
            raise ConfigError(f"limits of {', '.join(settings.limits)} need a function `costs` that returns them")
        self.settings = settings
        self.received = 0
        """Samples taken in."""
        self.dropped = 0
        """Samples that were too long for a row and left out."""
        self.left_out = 0
        """Samples of rows that were not full enough at the end and left out."""
        self.buffered: dict[int, Sample] = {}
        """Samples that are in no row yet, by number: what `load_state_dict` needs beside a state."""
        self._length, self._costs, self._prefix = length, costs, prefix
        self._digests: dict[int, str] = {}
        self._fill = PackingBuffer(self.settings.capacity, list(self.settings.limits.values()))
        self._items: dict[int, list[int]] = {}
        """Numbers of the samples of each item, by the first of them, under which it is in the packing buffer."""
        self._arriving = _Group()
        self._alone: list[int] = []
        """Samples that get rows of their own."""
        self._carried = 0
        """Items whose number is below have been held back once."""

    def __len__(self) -> int:
        """Buffered samples, those with a row of their own included."""
        return len(self.buffered)

    def __repr__(self) -> str:
        return (
            f"StreamPacker(rows of {self.settings.capacity} tokens, {self.received} samples, {len(self)} buffered "
            f"({self.tokens} tokens), {self.dropped} dropped, {self.left_out} left out)"
        )

    @property
    def tokens(self) -> int:
        """Buffered tokens of samples that will share a row, prefixes counted once."""
        return self._fill.tokens + self._arriving.tokens

    def add(self, sample: Sample, *, number: int | None = None) -> None:
        """Take a sample in.

        Args:
            sample: it.
            number: under which errors and states name it, rising; None: how many came before.

        Raises:
            SampleError: its length or a cost is no whole number, it has no tokens, its `input_ids` are no row of
                numbers, its prefix is not that of its group, or it exceeds a row by itself and `oversize` is "error";
                names it by its number.
            ConfigError: `costs` does not return everything that is limited.
        """
        number = self.received if number is None else number
        self.received += 1
        needs = self._needs(number, sample)
        over = any(need > limit for need, limit in zip(needs, self._fill.limits, strict=True))
        if over and self.settings.oversize == "drop":
            self.dropped += 1
            return
        if over and self.settings.oversize == "own_row":
            self._alone.append(number)
        else:
            self._join(number, needs, self._prefix_of(number, sample))
        self.buffered[number] = sample

    def _join(self, number: int, needs: Needs, prefix: SharedPrefix | None) -> None:
        """Buffer a sample by itself, or let it wait for the others of its group, up to some rows' worth of them."""
        key, most = prefix and prefix.key, max(self.settings.enough_buffered, ROWS_BUFFERED * self.settings.capacity)
        if key != self._arriving.key or self._arriving.tokens >= most:
            self._close_group()
        if prefix is None or needs[0] < 1:  # of no tokens: the buffer refuses it
            self._buffer([number], needs)
        else:
            self._arriving.add(number, needs, key, prefix.needs(self.settings.limits))

    def _close_group(self) -> None:
        """Buffer what has arrived of a group as an item, or as several that fit a row each and repeat the prefix."""
        group, self._arriving = self._arriving, _Group()
        numbers = list(group.members)
        pieces = cut_group(list(group.members.values()), group.prefix, self._fill.limits) if numbers else []
        for piece in pieces:
            members = [numbers[at] for at in piece]
            self._buffer(members, group.needs(members))

    def _buffer(self, numbers: list[int], needs: Needs) -> None:
        self._fill.add(numbers[0], *needs)
        self._items[numbers[0]] = numbers

    def _prefix_of(self, number: int, sample: Sample) -> SharedPrefix | None:
        """The prefix of a sample; None: it shares nothing, or could not be read."""
        if self._prefix is None or isinstance(sample, SampleError):
            return None
        prefix = self._prefix(sample)
        if prefix is None:
            return None
        check_kind(f"the prefix of sample {number}", prefix, SharedPrefix, 'SharedPrefix(key="prompt 7", tokens=640)')
        if prefix.key is None:
            raise ConfigError(
                f"the prefix of sample {number} has the key None; return None for a sample that shares nothing"
            )
        return prefix

    def rows(self) -> Iterator[Row]:
        """Rows that can be made while enough tokens are buffered."""
        while self._alone:
            yield [self._out(self._alone.pop(0))]
        while len(self._fill) and self._fill.tokens >= self.settings.enough_buffered:
            yield self._take()

    def pack(self, samples: Iterable[Sample]) -> list[Row]:
        """Take all these in and return every row that is full enough.

        A sample whose best row is below `min_fill` is held back until the next call, but not until the one after it.

        Raises:
            SampleError, ConfigError: as `add`, or one sample was given and no list of them; then none of these samples
                was taken in, and the packer is as it was.
        """
        if isinstance(samples, Mapping | str):
            raise ConfigError(f"pack takes a list of samples, got a {type(samples).__name__}; of one give [sample]")
        state, buffered = self.state_dict(), dict(self.buffered)
        try:
            for sample in samples:
                self.add(sample)
        except BaseException:
            self.load_state_dict(state, buffered)
            raise
        self._close_group()
        rows = [[self._out(number)] for number in self._alone]
        self._alone, passed_over = [], []
        while len(self._fill):
            was_held_back = self._fill.oldest < self._carried
            if row := self._take(at_least=0.0 if was_held_back else self.settings.least_tokens):
                rows.append(row)
            else:
                passed_over.append(self._fill.take_oldest())
        for item in passed_over:
            self._fill.add(*item)
        self._carried = self.received
        return rows

    def flush(self) -> list[Row]:
        """Return rows of all buffered samples; with `drop_last`, those below `min_fill` are left out and counted."""
        return list(self.rest())

    def rest(self) -> Iterator[Row]:
        """Yield the rows of `flush` one by one; those that were not asked for stay buffered."""
        self._close_group()
        yield from self.rows()
        while len(self._fill):
            tokens = self._fill.tokens
            row = self._take()
            if self.settings.drop_last and tokens - self._fill.tokens < self.settings.least_tokens:
                self.left_out += len(row)
            else:
                yield row

    def _needs(self, number: int, sample: Sample) -> Needs:
        """(tokens, and what else is limited) of a sample; one that could not be read takes up one token.

        Raises:
            ConfigError: `costs` does not return everything that is limited.
            SampleError: one of them is no whole number, or `input_ids` are no row of numbers.
        """
        limits = self.settings.limits
        if isinstance(sample, SampleError):
            return (1, *(0 for _ in limits))
        costs = {} if self._costs is None else self._costs(sample)
        if missing := [name for name in limits if name not in costs]:
            raise ConfigError(f"{', '.join(missing)} are limited, but `costs` has only {list(costs)} of a sample")
        try:
            return whole_needs((self._length(sample), *(costs[name] for name in limits)))
        except SampleError as error:
            if error.index is not None:
                raise
            raise SampleError(error.detail, index=number, reason=error.reason, sample_id=error.sample_id) from error

    def _take(self, *, at_least: float = 0.0) -> Row:
        """One row, or nothing if it would hold fewer tokens."""
        items = [self._items.pop(first) for first in self._fill.take(at_least=at_least)]
        return [self._out(number) for numbers in items for number in numbers]

    def _out(self, number: int) -> Sample:
        self._digests.pop(number, None)
        return self.buffered.pop(number)

    # ------------------------------------------------------------------ to continue elsewhere

    def state_dict(self) -> dict[str, Any]:
        """Return what it takes to continue bit for bit, beside the samples of `buffered`: plain data.

        These are the numbers and digests of the samples, the items that are buffered, the oldest first, and counts.
        """
        for number, sample in self.buffered.items():
            if number not in self._digests:
                self._digests[number] = digest_of(sample)
        fields = {
            "of": self._identity,
            "samples": [[number, self._digests[number]] for number in self.buffered],
            "items": [list(self._items[first]) for first, *_ in self._fill.buffered],
            "arriving": list(self._arriving.members),
            "alone": list(self._alone),
            "counts": [self.received, self.dropped, self.left_out, self._carried],
        }
        return sealed(fields, of="StreamPacker")

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise unless a state is of such a packer.

        Raises:
            ConfigError: it is of other settings, or was changed.
        """
        check_seal(state, of="StreamPacker")
        if state["of"] != self._identity:
            raise ConfigError(f"the state is of {state['of']!s:.300}, this is {self._identity}; pack as before")

    @property
    def _identity(self) -> str:
        """Return what must be equal to continue."""
        return f"{self.settings!r} {'without' if self._prefix is None else 'with'} prefix="

    def load_state_dict(self, state: Mapping[str, Any], samples: Mapping[int, Sample]) -> None:
        """Continue where `state_dict` was called, with the same settings.

        Args:
            state: of `state_dict`.
            samples: by number, at least those that were in `buffered`.

        Raises:
            ConfigError: the state is of other settings or samples, or it was changed. The packer is then as it was.
        """
        self.check_state(state)
        for number, digest in state["samples"]:
            if number not in samples or digest_of(samples[number]) != digest:
                raise other_data(f"its sample {number} is another one than before")
        again = StreamPacker(self.settings, length=self._length, costs=self._costs, prefix=self._prefix)
        again.buffered = {number: samples[number] for number, _ in state["samples"]}
        again._digests = dict(state["samples"])
        try:
            for numbers in state["items"]:
                again._buffer(list(numbers), again._group_of(numbers).needs(numbers))
            again._arriving = again._group_of(state["arriving"])
        except SampleError as error:
            raise ConfigError(f"the state is of samples that are measured otherwise: {error}") from error
        again._alone = list(state["alone"])
        again.received, again.dropped, again.left_out, again._carried = state["counts"]
        vars(self).update(vars(again))

    def _group_of(self, numbers: Sequence[int]) -> _Group:
        group = _Group()
        for number in numbers:
            needs, prefix = self._needs(number, self.buffered[number]), self._prefix_of(number, self.buffered[number])
            if group.members and (prefix is None or prefix.key != group.key):
                raise SampleError("has another prefix than before", index=number, reason="bad_group")
            shared = tuple(0 for _ in needs) if prefix is None else prefix.needs(self.settings.limits)
            group.add(number, needs, prefix and prefix.key, shared)
        return group
