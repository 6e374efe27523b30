"""StreamPacker: samples in, one after the other; rows of samples out.

Neighbors that share a prefix are buffered as one item, and share a row:

samples    a1 a2 a3 b1 c1 c2            letters: keys of their prefixes
arriving   a1 a2 a3                     until b1 comes
items               [a1 a2 a3]   [b1]   c1 c2 are arriving
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar, final

import numpy as np

from vlmpack.errors import ConfigError, SampleError, check_choice, check_kind
from vlmpack.loading.resumable import SEAL, SampleDigests, check_seal, digest_of
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

    @property
    def needs(self) -> Needs:
        """Of all of them, their prefix counted once."""
        columns = zip(*self.members.values(), strict=True)
        repeats = len(self.members) - 1
        return tuple(sum(column) - repeats * shared for column, shared in zip(columns, self.prefix, strict=True))

    @property
    def tokens(self) -> int:
        return self.needs[0] if self.members else 0

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
        self._length, self._costs, self._prefix = length, costs, prefix
        self._room = PackingBuffer(settings.capacity, list(settings.limits.values()))
        self._samples: dict[int, Sample] = {}
        self._items: dict[int, tuple[int, ...]] = {}
        """Numbers of the samples of each item of several, by the first of them, under which it is buffered."""
        self._arriving = _Group()
        self._alone: list[Row] = []
        self._carried = 0
        self._digests = SampleDigests()

    def __len__(self) -> int:
        """Buffered samples, those with a row of their own included."""
        return len(self._samples) + len(self._alone)

    def __repr__(self) -> str:
        return (
            f"StreamPacker(rows of {self.settings.capacity} tokens, {self.received} samples, {len(self)} buffered "
            f"({self.tokens} tokens), {self.dropped} dropped, {self.left_out} left out)"
        )

    @property
    def tokens(self) -> int:
        """Buffered tokens of samples that will share a row, prefixes counted once."""
        return self._room.tokens + self._arriving.tokens

    def add(self, sample: Sample) -> None:
        """Take a sample in.

        Raises:
            SampleError: its length or a cost is no whole number, it has no tokens, its `input_ids` are no row of
                numbers, its prefix is not that of its group, or it exceeds a row by itself and `oversize` is "error";
                names it by its number in the stream.
            ConfigError: `costs` does not return everything that is limited.
        """
        at, self.received = self.received, self.received + 1
        needs = self._named_needs(at, sample)
        over = any(need > limit for need, limit in zip(needs, self._room.limits, strict=True))
        if over and self.settings.oversize == "drop":
            self.dropped += 1
        elif over and self.settings.oversize == "own_row":
            self._alone.append([sample])
        else:
            self._join(at, needs, self._prefix_of(at, sample))
            self._samples[at] = sample

    def _join(self, at: int, needs: Needs, prefix: SharedPrefix | None) -> None:
        """Buffer a sample by itself, or let it wait for the others of its group, up to some rows' worth of them."""
        key, most = prefix and prefix.key, max(self.settings.enough_buffered, ROWS_BUFFERED * self.settings.capacity)
        if key != self._arriving.key or self._arriving.tokens >= most:
            self._close_group()
        if prefix is None or needs[0] < 1:  # of no tokens: the buffer refuses it
            self._room.add(at, *needs)
        else:
            self._arriving.add(at, needs, key, prefix.needs(self.settings.limits))

    def _close_group(self) -> None:
        """Buffer what has arrived of a group as an item, or as several that fit a row each and repeat the prefix."""
        group, self._arriving = self._arriving, _Group()
        if not group.members:
            return
        numbers = list(group.members)
        for piece in cut_group(list(group.members.values()), group.prefix, self._room.limits):
            item = replace(group, members={numbers[at]: group.members[numbers[at]] for at in piece})
            first = next(iter(item.members))
            self._room.add(first, *item.needs)
            if len(piece) > 1:
                self._items[first] = tuple(item.members)

    def _prefix_of(self, at: int, sample: Sample) -> SharedPrefix | None:
        """The prefix of a sample; None: it shares nothing, or could not be read."""
        if self._prefix is None or isinstance(sample, SampleError):
            return None
        prefix = self._prefix(sample)
        if prefix is None:
            return None
        check_kind(f"the prefix of sample {at}", prefix, SharedPrefix, 'SharedPrefix(key="prompt 7", tokens=640)')
        if prefix.key is None:
            raise ConfigError(
                f"the prefix of sample {at} has the key None; return None for a sample that shares nothing"
            )
        return prefix

    def rows(self) -> Iterator[Row]:
        """Rows that can be made while enough tokens are buffered."""
        alone, self._alone = self._alone, []
        yield from alone
        while len(self._room) and self._room.tokens >= self.settings.enough_buffered:
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
        before, buffered, groups = (
            self._fields(),
            self._room.buffered,
            (dict(self._items), replace(self._arriving, members=dict(self._arriving.members))),
        )
        try:
            for sample in samples:
                self.add(sample)
        except BaseException:
            self._set(before, buffered, *groups)
            raise
        self._close_group()
        rows, self._alone = self._alone, []
        passed_over = []
        while len(self._room):
            was_held_back = self._room.oldest < self._carried
            if row := self._take(at_least=0.0 if was_held_back else self.settings.least_tokens):
                rows.append(row)
            else:
                passed_over.append(self._room.take_oldest())
        for sample in passed_over:
            self._room.add(*sample)
        self._carried = self.received
        return rows

    def flush(self) -> list[Row]:
        """Return rows of all buffered samples; with `drop_last`, those below `min_fill` are left out and counted."""
        self._close_group()
        rows = [*self.rows()]
        while len(self._room):
            tokens = self._room.tokens
            row = self._take()
            if self.settings.drop_last and tokens - self._room.tokens < self.settings.least_tokens:
                self.left_out += len(row)
            else:
                rows.append(row)
        return rows

    def needs(self, sample: Sample) -> tuple[int, ...]:
        """(tokens, and what else is limited) of a sample; one that could not be read takes up one token.

        Raises:
            ConfigError: `costs` does not return everything that is limited.
            SampleError: one of them is no whole number, or `input_ids` are no row of numbers.
        """
        if isinstance(sample, SampleError):
            return (1, *(0 for _ in self.settings.limits))
        costs = {} if self._costs is None else self._costs(sample)
        if missing := [name for name in self.settings.limits if name not in costs]:
            raise ConfigError(f"{', '.join(missing)} are limited, but `costs` has only {list(costs)} of a sample")
        return whole_needs((self._length(sample), *(costs[name] for name in self.settings.limits)))

    def _named_needs(self, at: int, sample: Sample) -> tuple[int, ...]:
        """`needs`, refused under the sample's number in the stream where the error has no name of its own."""
        try:
            return self.needs(sample)
        except SampleError as error:
            if error.index is not None:
                raise
            raise SampleError(error.detail, index=at, reason=error.reason, sample_id=error.sample_id) from error

    def _take(self, *, at_least: float = 0.0) -> Row:
        """One row, or nothing if it would hold fewer tokens."""
        items = [self._items.pop(first, (first,)) for first in self._room.take(at_least=at_least)]
        return [self._samples.pop(at) for numbers in items for at in numbers]

    # ------------------------------------------------------------------ to continue elsewhere

    def state_dict(self) -> dict[str, Any]:
        """Return all there is to continue bit for bit: the buffered samples, the oldest first, and the counts.

        They are in a list: `StatefulDataLoader` does not keep the order of a dictionary.
        """
        fields = self._fields()
        return {**fields, SEAL: self._seal(fields)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was called, with the same settings.

        Raises:
            ConfigError: the state is of other settings, a buffered sample has another length here, or it was changed.
                The packer is then as it was.
        """
        check_seal(state, self._seal, of="StreamPacker")
        if state["of"] != repr(self.settings):
            raise ConfigError(f"the state is of {state['of']!s:.300}, these are {self.settings!r}; pack as before")
        if (GROUPS in state) != (self._prefix is not None):
            has, gives = ("no ", "one was") if self._prefix is not None else ("", "none was")
            raise ConfigError(f"the state is of a packer with {has}prefix=, and {gives} given here; pack as before")
        try:
            self._set(state, *self._restored(state))
        except SampleError as error:
            raise ConfigError(f"the state is of samples that are measured otherwise: {error}") from error

    def _restored(self, fields: Mapping[str, Any]) -> tuple[list[tuple[int, ...]], dict[int, tuple[int, ...]], _Group]:
        """Return what the buffer holds, the items of several samples, and the group that is arriving, of a state."""
        samples = dict(fields["buffered"])
        needs = {at: self._named_needs(at, sample) for at, sample in samples.items()}
        entries = {at: (at, *each) for at, each in needs.items()}

        def group_of(numbers: Sequence[int]) -> _Group:
            group = _Group()
            for at in numbers:
                prefix = self._prefix_of(at, samples[at])
                if prefix is None or (group.members and prefix.key != group.key):
                    raise SampleError("has another prefix than before", index=at, reason="bad_group")
                group.add(at, needs[at], prefix.key, prefix.needs(self.settings.limits))
                del entries[at]
            return group

        groups = fields.get(GROUPS) or {"items": [], "arriving": []}
        items = {numbers[0]: tuple(numbers) for numbers in groups["items"]}
        for first, numbers in items.items():
            entries[first] = (first, *group_of(numbers).needs)
        arriving = group_of(groups["arriving"])
        return [entries[at] for at in sorted(entries)], items, arriving

    def _fields(self) -> dict[str, Any]:
        items = [list(numbers) for numbers in self._items.values()]
        groups = {"items": items, "arriving": list(self._arriving.members)}
        return {
            "buffered": [[at, sample] for at, sample in self._samples.items()],
            "alone": [list(row) for row in self._alone],
            "seen": self.received,
            "dropped": self.dropped,
            "left_out": self.left_out,
            "carried": self._carried,
            "of": repr(self.settings),
            **({} if self._prefix is None else {GROUPS: groups}),
        }

    def _seal(self, fields: Mapping[str, Any]) -> str:
        buffered, alone = fields["buffered"], fields["alone"]
        digests = self._digests.of([sample for _, sample in buffered] + [sample for row in alone for sample in row])
        sizes = [[at for at, _ in buffered], [len(row) for row in alone]]
        return digest_of([sizes, digests, [fields[name] for name in COUNTS], fields["of"], fields.get(GROUPS)])

    def _set(
        self,
        fields: Mapping[str, Any],
        buffered: Iterable[tuple[int, ...]],
        items: dict[int, tuple[int, ...]],
        arriving: _Group,
    ) -> None:
        """Take over checked fields, (number, *needs) of the buffered items, and groups."""
        room = PackingBuffer(self.settings.capacity, list(self.settings.limits.values()))
        for sample in buffered:
            room.add(*sample)
        self._room, self._samples = room, dict(fields["buffered"])
        self._items, self._arriving = items, arriving
        self._alone = [list(row) for row in fields["alone"]]
        self.received, self.dropped, self.left_out, self._carried = (int(fields[name]) for name in COUNTS)


COUNTS = ("seen", "dropped", "left_out", "carried")
GROUPS = "groups"
"""Of the state of a packer with `prefix`: numbers of the samples of each item, and of the group that is arriving."""
