"""StreamPacker: add samples one by one, and get rows of samples.

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

from vlmpack.data.digest import check_seal, content_digest, sealed
from vlmpack.errors import ConfigError, SampleError, check_kind
from vlmpack.plan.lengths import Overlength, check_overlength, checked_capacity
from vlmpack.plan.packing_buffer import ROWS_BUFFERED, PackingBuffer, whole_needs
from vlmpack.plan.plan import cut_group


@final
@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """Settings for packing a stream of samples into rows."""

    capacity: int
    """Maximum tokens of a row."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """Further limits of a row, by name, such as vision patches or images."""
    buffer_tokens: int | None = None
    """Make rows only while at least this many tokens are buffered; None: four rows' worth."""
    min_fill: float = 0.0
    """Fraction of the capacity, 0 to 1; a row below it is held back once to wait for more samples."""
    overlength: Overlength = "error"
    """What to do with a sample that is too large for a row: "error", "drop", or "own_row"."""

    def __post_init__(self) -> None:
        checked_capacity(self.capacity)
        check_kind("limits", self.limits, Mapping, '{"images": 8}')
        for name, limit in self.limits.items():
            checked_capacity(limit, f"the limit of {name!r}")
        if self.buffer_tokens is not None and not self.buffer_tokens >= 0:
            raise ConfigError(f"buffer_tokens must be at least 0, got {self.buffer_tokens}")
        if not 0 <= self.min_fill <= 1:
            raise ConfigError(f"min_fill must lie between 0 and 1, got {self.min_fill}")
        check_overlength(self.overlength)

    @property
    def enough_buffered(self) -> int:
        """Tokens that must be buffered before a row is made."""
        return ROWS_BUFFERED * self.capacity if self.buffer_tokens is None else self.buffer_tokens


Sample = TypeVar("Sample")
Row = list[Sample]
LENGTH = "length=collator.length of the VLMCollator that will make the rows, or a function of your own"
"""What to do if samples have no length."""


def token_count(sample: Mapping[str, Any]) -> int:
    """Return the tokens of a sample dict: its `length`, or else the number of its `input_ids`, shaped [n] or [1, n].

    Raises:
        ConfigError: the sample has neither, or is not a dict.
        SampleError: its `input_ids` have another shape.
    """
    if not isinstance(sample, Mapping):
        raise ConfigError(
            f"a sample is a {type(sample).__name__}, and not a dict; count its tokens by `length`: {LENGTH}"
        )
    if "length" in sample:
        return sample["length"]
    if "input_ids" not in sample:
        fault = f"a sample has no 'length' and no 'input_ids', only {list(sample)}"
        raise ConfigError(f"{fault}; count its tokens by `length`: {LENGTH}")
    ids = sample["input_ids"]
    is_list = isinstance(ids, list | tuple)  # of which only the first item is converted, because that is slow
    shape = (len(ids), *(np.shape(ids[0]) if ids else ())) if is_list else np.shape(ids)
    if len(shape) == 1 or (len(shape) == 2 and shape[0] == 1):
        return shape[-1]
    form = f"shape {list(shape)}" if shape else f"no shape, they are {ids!r:.40}"
    fault = f"input_ids have {form}; one sample's are [n] (or [1, n])"
    raise SampleError(f"{fault}. Give each sample by itself, or a function `length`", reason="bad_shape")


# ---------------------------------------------------------------------- groups of samples that share a prefix

Needs = tuple[int, ...]
"""(tokens, *costs), costs in the order of the further limits."""


@final
@dataclass(frozen=True, kw_only=True)
class SharedPrefix:
    """The prefix that a sample shares with neighbors of the same key."""

    key: Hashable
    """Equal for all samples with this prefix (such as the number of a prompt), and different for other prefixes. None:
    the sample shares nothing."""
    tokens: int
    """Tokens of the prefix."""
    costs: Mapping[str, int] = field(default_factory=dict)
    """Further costs of the prefix, by the names of the limits; costs not listed count in full for every sample."""

    def needs(self, limits: Mapping[str, int]) -> Needs:
        """Return (tokens, *costs) of the prefix.

        Raises:
            SampleError: one of them is not a whole number.
        """
        return whole_needs((self.tokens, *(self.costs.get(name, 0) for name in limits)))


@dataclass
class _Group:
    """Samples that share a prefix, either still arriving or already an item."""

    key: Hashable = None
    prefix: Needs = ()
    members: dict[int, Needs] = field(default_factory=dict)
    """(tokens, *costs) of each whole sample, by its number in the stream."""

    def needs(self, numbers: Sequence[int]) -> Needs:
        """Return (tokens, *costs) of some members together, with the prefix counted once."""
        columns = zip(*(self.members[number] for number in numbers), strict=True)
        repeats = len(numbers) - 1
        return tuple(sum(column) - repeats * shared for column, shared in zip(columns, self.prefix, strict=True))

    @property
    def tokens(self) -> int:
        return self.needs([*self.members])[0] if self.members else 0

    def add(self, number: int, needs: Needs, key: Hashable, prefix: Needs) -> None:
        """Add a sample.

        Raises:
            SampleError: its prefix differs from the group's, or is longer than the sample.
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
    """Buffer a few samples and make rows of them, each filled exactly around the oldest sample.

    Samples stay whole and opaque, and come out once. Packing is deterministic: the same samples give the same
    rows. Neighbors that share a prefix share a row, which counts the prefix once; a group that is too large for a row
    is split into several.

    There are two ways to use it. Sample by sample: call `add`, and `rows` after each; at the end `flush`. Call by call,
    for example for rollouts in a trainer: `pack` takes a list of samples and returns the rows that are full enough; the
    rest stays buffered.

    Args:
        settings: settings of the rows.
        length: function that returns the tokens of a sample; for samples that are not tokenized yet, pass
            `VLMCollator.length`.
        costs: function that returns further costs of a sample, by the names of `settings.limits`.
        prefix: function that returns the prefix a sample shares with its neighbors, for rows that are collated with
            `share_prefixes`. None: samples share nothing.

    Raises:
        ConfigError: `settings` has the wrong type, or there are limits but no `costs`.
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
        """Samples added so far."""
        self.dropped = 0
        """Samples that were too large for a row and dropped."""
        self.buffered: dict[int, Sample] = {}
        """Samples that are in no row yet, by number; `load_state_dict` needs them beside a state."""
        self._length, self._costs, self._prefix = length, costs, prefix
        self._digests: dict[int, str] = {}
        self._fill = PackingBuffer(self.settings.capacity, list(self.settings.limits.values()))
        self._items: dict[int, list[int]] = {}
        """Sample numbers of each item, by the number of its first sample, which is its id in the packing buffer."""
        self._arriving = _Group()
        self._alone: list[int] = []
        """Samples that get their own rows."""
        self._carried = 0
        """Items with a number below this have been held back once."""

    def __len__(self) -> int:
        """Return the number of buffered samples, including those that get their own row."""
        return len(self.buffered)

    def __repr__(self) -> str:
        return (
            f"StreamPacker(rows of {self.settings.capacity} tokens, {self.received} samples, {len(self)} buffered "
            f"({self.tokens} tokens), {self.dropped} dropped)"
        )

    @property
    def tokens(self) -> int:
        """Buffered tokens of samples that will share a row, with prefixes counted once."""
        return self._fill.tokens + self._arriving.tokens

    def add(self, sample: Sample, *, number: int | None = None) -> None:
        """Add a sample.

        Args:
            sample: the sample.
            number: number that errors and states use for it, rising; None: the number of samples added before.

        Raises:
            SampleError: its length or a cost is not a whole number, it has no tokens, its `input_ids` have another
                shape than [n] or [1, n], its prefix differs from its group's, or it is too large for a row and
                `overlength` is "error"; gives its number.
            ConfigError: `costs` does not return all limited costs.
        """
        number = self.received if number is None else number
        self.received += 1
        needs = self._needs(number, sample)
        over = any(need > limit for need, limit in zip(needs, self._fill.limits, strict=True))
        if over and self.settings.overlength == "drop":
            self.dropped += 1
            return
        if over and self.settings.overlength == "own_row":
            self._alone.append(number)
        else:
            self._join(number, needs, self._prefix_of(number, sample))
        self.buffered[number] = sample

    def _join(self, number: int, needs: Needs, prefix: SharedPrefix | None) -> None:
        """Buffer a sample alone, or let it wait for the rest of its group, up to some rows' worth of tokens."""
        key, most = prefix and prefix.key, max(self.settings.enough_buffered, ROWS_BUFFERED * self.settings.capacity)
        if key != self._arriving.key or self._arriving.tokens >= most:
            self._close_group()
        if prefix is None or needs[0] < 1:  # the buffer refuses a sample without tokens
            self._buffer([number], needs)
        else:
            self._arriving.add(number, needs, key, prefix.needs(self.settings.limits))

    def _close_group(self) -> None:
        """Buffer the arriving group as one item, or as several pieces that each fit a row and repeat the prefix."""
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
        """Return the prefix of a sample; None: it shares nothing, or could not be read."""
        if self._prefix is None or isinstance(sample, SampleError):
            return None
        prefix = self._prefix(sample)
        if prefix is None:
            return None
        check_kind(f"the prefix of sample {number}", prefix, SharedPrefix, 'SharedPrefix(key="prompt 7", tokens=640)')
        return None if prefix.key is None else prefix

    def rows(self) -> Iterator[Row]:
        """Yield rows while enough tokens are buffered."""
        while self._alone:
            yield [self._out(self._alone.pop(0))]
        while len(self._fill) and self._fill.tokens >= self.settings.enough_buffered:
            yield self._take()

    def pack(self, samples: Iterable[Sample]) -> list[Row]:
        """Add samples, and return all rows that are full enough.

        A sample whose best row is below `min_fill` is held back until the next call, but no longer.

        Raises:
            SampleError, ConfigError: as in `add`, or a single sample was given instead of a list. None of the samples
                is added then, and the packer is unchanged.
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
            least = 0.0 if was_held_back else self.settings.min_fill * self.settings.capacity
            if row := self._take(at_least=least):
                rows.append(row)
            else:
                passed_over.append(self._fill.take_oldest())
        for item in passed_over:
            self._fill.add(*item)
        self._carried = self.received
        return rows

    def flush(self) -> list[Row]:
        """Return rows of all buffered samples."""
        return list(self.rest())

    def rest(self) -> Iterator[Row]:
        """Yield the rows of `flush` one by one; samples stay buffered until their row is requested."""
        self._close_group()
        yield from self.rows()
        while len(self._fill):
            yield self._take()

    def _needs(self, number: int, sample: Sample) -> Needs:
        """Return (tokens, *costs) of a sample; a sample that could not be read counts as one token.

        Raises:
            ConfigError: `costs` does not return all limited costs.
            SampleError: one of them is not a whole number, or `input_ids` have another shape than [n] or [1, n].
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
            raise error.of_sample(number) from error

    def _take(self, *, at_least: float = 0.0) -> Row:
        """Take one row; return an empty one if it would hold fewer than `at_least` tokens."""
        items = [self._items.pop(first) for first in self._fill.take(at_least=at_least)]
        return [self._out(number) for numbers in items for number in numbers]

    def _out(self, number: int) -> Sample:
        self._digests.pop(number, None)
        return self.buffered.pop(number)

    # ------------------------------------------------------------------ save and resume

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to continue bit for bit, except the samples in `buffered`, as plain data.

        The state holds the numbers and digests of the samples, the buffered items, oldest first, and counts.
        """
        for number, sample in self.buffered.items():
            if number not in self._digests:
                self._digests[number] = content_digest(sample)
        fields = {
            "of": self._identity,
            "samples": [[number, self._digests[number]] for number in self.buffered],
            "items": [list(self._items[first]) for first, *_ in self._fill.buffered],
            "arriving": list(self._arriving.members),
            "alone": list(self._alone),
            "counts": [self.received, self.dropped, self._carried],
        }
        return sealed(fields, of="StreamPacker")

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check that a state belongs to a packer with these settings.

        Raises:
            ConfigError: the state belongs to other settings, or was changed.
        """
        check_seal(state, of="StreamPacker")
        if state["of"] != self._identity:
            raise ConfigError(f"the state is of {state['of']!s:.300}, this is {self._identity}; pack as before")

    @property
    def _identity(self) -> str:
        """Settings that must be equal to continue."""
        return f"{self.settings!r} {'without' if self._prefix is None else 'with'} prefix="

    def load_state_dict(self, state: Mapping[str, Any], samples: Mapping[int, Sample]) -> None:
        """Continue where `state_dict` was called, with the same settings.

        Args:
            state: result of `state_dict`.
            samples: samples by number, at least those that were in `buffered`.

        Raises:
            ConfigError: the state belongs to other settings or samples, or was changed. The packer is unchanged then.
        """
        self.check_state(state)
        for number, digest in state["samples"]:
            if number not in samples or content_digest(samples[number]) != digest:
                raise other_data(f"its sample {number} is not the same as before")
        again = StreamPacker(self.settings, length=self._length, costs=self._costs, prefix=self._prefix)
        again.buffered = {number: samples[number] for number, _ in state["samples"]}
        again._digests = dict(state["samples"])
        try:
            for numbers in state["items"]:
                again._join_again(numbers)
                again._close_group()
            again._join_again(state["arriving"])
        except SampleError as error:
            raise ConfigError(f"the state is of samples that are measured in another way: {error}") from error
        if [*again._items.values()] != state["items"]:
            raise ConfigError("the state is of samples that are measured in another way: they no longer share prefixes")
        again._alone = list(state["alone"])
        again.received, again.dropped, again._carried = state["counts"]
        vars(self).update(vars(again))

    def _join_again(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            sample = self.buffered[number]
            self._join(number, self._needs(number, sample), self._prefix_of(number, sample))


def other_data(fault: str) -> ConfigError:
    """Return the error for a state that belongs to another source."""
    remedy = "give the data set of the run to continue, with the same samples"
    return ConfigError(f"the state is of another source: {fault}; {remedy}")
