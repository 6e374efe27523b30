"""SeqPacker's surface: plans, streams, data sets and tensors under its names.

    from vlmpack.text.seqpacker import pack_sequences       # was: from seqpacker import pack_sequences
    from vlmpack.text.seqpacker import pack_dataset         # was: from seqpacker.hf_utils import pack_dataset
    from vlmpack.text.seqpacker import packed_collate_fn    # was: from seqpacker.torch_utils import packed_collate_fn

Planning needs numpy alone; what needs torch or datasets imports it when it is called. G rows of width W.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

import numpy as np

from vlmpack import __version__ as __version__
from vlmpack.errors import ConfigError
from vlmpack.plan.lengths import check_seed, checked_capacity
from vlmpack.plan.packing_buffer import LOOK_AHEAD, ROWS_BUFFERED, PackingBuffer
from vlmpack.plan.plan import Plan
from vlmpack.plan.planner import ALIASES, plan_bins, strategy_name
from vlmpack.text.columns import Mask, RowFormat, fill_rows, make_dataset
from vlmpack.text.packed_batch import PackedBatch
from vlmpack.text.samples import IGNORE, Oversize, Samples

if TYPE_CHECKING:
    import torch
    from datasets import Dataset

FULL_NAMES = {
    "nextfit": "nf",
    "firstfit": "ff",
    "bestfit": "bf",
    "worstfit": "wf",
    "firstfitdecreasing": "ffd",
    "bestfitdecreasing": "bfd",
    "firstfitshuffle": "ffs",
    "harmonic": "hk",
}
"""SeqPacker's long names, in small letters -> its short ones."""

SHUFFLED, SHUFFLE_SEED = "ffs", 42
"""The one strategy of SeqPacker that a seed reaches, and the seed that it takes where none is given."""

NEXT_FIT, ROLLING = "nf", "hk"
"""The strategies of a stream."""


# ---------------------------------------------------------------------- plans


@final
@dataclass(frozen=True, kw_only=True)
class Pack:
    """The samples of one row."""

    sequence_ids: list[int]
    """Their places in the list of lengths that was packed."""
    lengths: list[int]
    """Tokens of each."""

    @property
    def used(self) -> int:
        """Tokens of the row that samples fill."""
        return sum(self.lengths)

    def __len__(self) -> int:
        """Samples of the row."""
        return len(self.sequence_ids)


@final
@dataclass(frozen=True, kw_only=True)
class PackMetrics:
    """Fill ratios of rows. Utilisation is the tokens of a row over its capacity, 0 to 1."""

    num_sequences: int
    """Samples in rows."""
    num_packs: int
    """Rows."""
    total_tokens: int
    """Tokens of all samples in rows."""
    padding_tokens: int
    """Tokens of row that no sample fills."""
    efficiency: float
    """Fill ratio: tokens over the room of all rows, 0 to 1."""
    avg_utilisation: float
    """Mean over rows."""
    utilisation_std: float
    """Standard deviation over rows (of the rows there are, not an estimate)."""
    min_utilisation: float
    """Of the emptiest row."""
    max_utilisation: float
    """Of the fullest row."""
    avg_sequences_per_pack: float
    """Samples of a row, on average."""
    packing_time_ms: float
    """Milliseconds that planning took."""

    @property
    def padding_ratio(self) -> float:
        """Padding over the room of all rows, 0 to 1."""
        room = self.total_tokens + self.padding_tokens
        return self.padding_tokens / room if room else 0.0

    @property
    def throughput(self) -> float:
        """Samples packed per second (SeqPacker's stub claims per millisecond; its code counts seconds)."""
        return self.num_sequences / (self.packing_time_ms / 1000) if self.packing_time_ms else float("inf")


@final
@dataclass(frozen=True, kw_only=True)
class PackResult:
    """A plan under SeqPacker's names. Every view is made once."""

    plan: Plan
    """The rows: what the rest of vlmpack takes (`PackedBatchSampler`, `Plan.save`)."""
    time_ms: float = 0.0
    """Milliseconds that planning took."""

    @cached_property
    def packs(self) -> list[Pack]:
        """One for each row."""
        lengths = self.plan.lengths
        return [Pack(sequence_ids=row.tolist(), lengths=lengths[row].tolist()) for row in self.plan]

    @cached_property
    def bins(self) -> list[list[int]]:
        """The samples of each row."""
        return [list(row) for row in self.plan.bins]

    @cached_property
    def metrics(self) -> PackMetrics:
        """Compute the fill ratios of the rows."""
        tokens, samples, rows = self.plan.tokens, len(self.plan.sample_ids), len(self.plan)
        used = tokens / self.plan.capacity if rows else np.zeros(1)
        return PackMetrics(
            num_sequences=samples,
            num_packs=rows,
            total_tokens=int(tokens.sum()),
            padding_tokens=self.plan.waste,
            efficiency=self.plan.fill,
            avg_utilisation=float(used.mean()),
            utilisation_std=float(used.std()),
            min_utilisation=float(used.min()),
            max_utilisation=float(used.max()),
            avg_sequences_per_pack=samples / rows if rows else 0.0,
            packing_time_ms=self.time_ms,
        )

    @property
    def num_bins(self) -> int:
        """Rows."""
        return len(self.plan)

    @property
    def efficiency(self) -> float:
        """Fill ratio: tokens over the room of all rows, 0 to 1."""
        return self.plan.fill

    def __len__(self) -> int:
        """Rows."""
        return len(self.plan)

    def __repr__(self) -> str:
        return f"PackResult(bins={len(self)}, efficiency={self.efficiency:.2%}, time={self.time_ms:.2f}ms)"


@final
@dataclass(frozen=True)
class Packer:
    """Plans rows of one capacity, by one strategy.

    Raises:
        ConfigError: a capacity below 1, a strategy that does not exist, a seed that is no whole number.
    """

    capacity: int
    """Tokens that a row may hold."""
    strategy: str = "obfd"
    """SeqPacker's name, short or long, or one of `vlmpack.plan.STRATEGIES`."""
    seed: int | None = None
    """Of the shuffle. SeqPacker's names use it in `ffs` alone (None: 42), ours always (None: no shuffle)."""

    def __post_init__(self) -> None:
        checked_capacity(self.capacity)
        strategy_name(self._short_name)
        check_seed(self.seed)

    def pack(self, lengths: Sequence[int] | np.ndarray) -> PackResult:
        """Choose which samples share a row.

        Args:
            lengths: N whole numbers from 1 to the capacity, tokens of each sample.

        Raises:
            SampleError: a length that is not whole, below 1, or above the capacity; names the sample.
            ConfigError: no samples.
        """
        start = perf_counter()
        plan = self.plan(lengths)
        return PackResult(plan=plan, time_ms=1000 * (perf_counter() - start))

    def pack_flat(self, lengths: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(samples int64 [N] in row order, cuts int64 [G - 1]): `numpy.split(*packer.pack_flat(lengths))`."""
        plan = self.plan(lengths)
        return plan.sample_ids, plan.bounds[1:-1]

    def plan(self, lengths: Sequence[int] | np.ndarray, *, drop_oversize: bool = False) -> Plan:
        """Plan the same rows; with `drop_oversize`, samples above the capacity are left out and listed."""
        seed = self.seed
        if self._short_name == SHUFFLED:
            seed = SHUFFLE_SEED if seed is None else seed
        elif self._short_name in ALIASES:
            seed = None
        oversize = "drop" if drop_oversize else "error"
        return plan_bins(lengths, self.capacity, strategy=self._short_name, oversize=oversize, seed=seed)

    @staticmethod
    def strategies() -> list[tuple[str, str]]:
        """(SeqPacker's short name, the strategy of `vlmpack.plan.STRATEGIES` that serves it)."""
        return list(ALIASES.items())

    @property
    def _short_name(self) -> str:
        return FULL_NAMES.get(str(self.strategy).lower(), self.strategy)


def pack_sequences(
    lengths: Sequence[int] | np.ndarray, capacity: int, strategy: str = "obfd", seed: int | None = None
) -> PackResult:
    """Choose which samples share a row: `Packer(capacity, strategy, seed).pack(lengths)`, with its errors."""
    return Packer(capacity, strategy, seed).pack(lengths)


@final
class StreamPacker:
    """Plan rows of lengths that come one by one; the rows are those of `pack_sequences` with the same strategy.

    Args:
        capacity: tokens that a row may hold.
        strategy: `"nf"` fills one row after the other in the order given. `"hk"` stands for `rolling_fill`, not for
            Harmonic-K: of a packing buffer of 64 samples or four rows' worth of tokens, each row is the oldest and
            those that fill it up. It holds as little at a time as Harmonic-K does, and its rows are fuller.
        k: Harmonic-K's number of size classes. There are none here: it is checked, and changes nothing.

    Raises:
        ConfigError: a capacity or k below 1, or another strategy.
    """

    def __init__(self, capacity: int, strategy: str = "nf", k: int | None = None) -> None:
        name = str(strategy).lower().replace("_", "")
        self._strategy = FULL_NAMES.get(name, name)
        if self._strategy not in (NEXT_FIT, ROLLING):
            raise ConfigError(
                f"a stream cannot be packed by {strategy!r}, which needs all lengths at once; choose 'nf' or 'hk', or "
                "use Packer"
            )
        if k is not None:
            checked_capacity(k, "k")
        self._capacity = checked_capacity(capacity)
        self._buffer = PackingBuffer(capacity)
        self._lengths: dict[int, int] = {}
        self._finished = False
        self.sequences_added = 0
        """Samples taken in so far."""

    def add(self, length: int) -> list[Pack]:
        """Take one sample in and return the rows that are now complete, often none.

        Raises:
            SampleError: a length that is not whole, below 1 or above the capacity; names the sample. It is not taken
                in, and the packer goes on.
            ConfigError: the stream was finished.
        """
        self._check_open()
        PackingBuffer(self._capacity).add(self.sequences_added, length)  # refused before a row is given out
        overflows = self._strategy == NEXT_FIT and self._buffer.tokens + length > self._capacity
        complete = [self._next_row()] if overflows else []
        self._buffer.add(self.sequences_added, length)
        self._lengths[self.sequences_added] = int(length)
        self.sequences_added += 1
        enough = ROWS_BUFFERED * self._capacity
        while self._strategy == ROLLING and len(self._buffer) >= LOOK_AHEAD and self._buffer.tokens >= enough:
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
        while len(self._buffer):
            rest.append(self._next_row())
        return rest

    def _next_row(self) -> Pack:
        """The oldest sample and those that fill its row; by next fit the whole buffer."""
        row = self._buffer.take()
        return Pack(sequence_ids=row, lengths=[self._lengths.pop(sample) for sample in row])

    def _check_open(self) -> None:
        if self._finished:
            raise ConfigError("this StreamPacker is finished; make a new one for the next stream")

    def __repr__(self) -> str:
        state = "finished" if self._finished else f"{len(self._buffer)} buffered"
        return f"StreamPacker(strategy={self._strategy!r}, added={self.sequences_added}, {state})"


# ---------------------------------------------------------------------- data sets


def pack_dataset(
    token_ids: Any,
    capacity: int,
    *,
    strategy: str = "obfd",
    seed: int | None = None,
    padding_value: int = 0,
    label_padding_value: int = IGNORE,
    labels: Any = None,
    loss_mask: Any = None,
    oversize: Oversize = "error",
    pad_to_capacity: bool = True,
    attention_mask: Mask = "null",
    seq_lengths: bool = False,
) -> Dataset:
    """Pack samples into rows, as a data set; the room's README describes its columns.

    The first six parameters are SeqPacker's.

    Args:
        token_ids: one list, vector or tensor for each sample, or a column of a `datasets.Dataset`.
        capacity: tokens that a row may hold.
        strategy: SeqPacker's name or ours, see `Packer`.
        seed: of the shuffle, see `Packer`.
        padding_value: of `input_ids` on padding.
        label_padding_value: of `labels` where nothing is to be learnt.
        labels: like `token_ids`: labels of each token, not shifted, -100 where nothing is to be learnt; None: the ids.
        loss_mask: like `token_ids`: 1 for tokens to be learnt, 0 for others; None: all. Not beside labels.
        oversize: samples above the capacity: refuse them, leave them out, keep their first tokens, or cut them into
            samples of at most that length.
        pad_to_capacity: False: rows are as long as their tokens.
        attention_mask: `"null"`: nothing, so that models find samples by `position_ids`; `"padding"`: SeqPacker's
            ones and zeros, with which unmodified models mix samples.
        seq_lengths: add TRL's column of that name, the length of every sample of a row.

    Raises:
        SampleError: a sample that is no vector of token ids, is empty, too long, or has other labels; names it.
        ConfigError: a setting that does not exist, or `datasets` is not installed.
    """
    packer = Packer(capacity, strategy, seed)
    samples = Samples.read(token_ids, labels=labels, loss_mask=loss_mask).fitted(capacity, oversize)
    form = _form(padding_value, label_padding_value, pad_to_capacity)
    plan = packer.plan(samples.lengths, drop_oversize=oversize == "drop") if len(samples) else None
    return make_dataset(samples, plan, form, attention_mask, seq_lengths)


def pack_dataset_from_result(
    result: PackResult | Plan,
    token_ids: Any,
    *,
    padding_value: int = 0,
    label_padding_value: int = IGNORE,
    labels: Any = None,
    loss_mask: Any = None,
    pad_to_capacity: bool = True,
    attention_mask: Mask = "null",
    seq_lengths: bool = False,
) -> Dataset:
    """The rows of a result, or of any `Plan`, as a data set; see `pack_dataset`.

    Raises:
        SampleError: a sample has another length than was packed; names it.
        ConfigError: there are more or fewer samples, or a setting does not exist.
    """
    samples, plan = _planned(result, token_ids, labels, loss_mask)
    form = _form(padding_value, label_padding_value, pad_to_capacity)
    return make_dataset(samples, plan, form, attention_mask, seq_lengths)


def _form(padding: int, label_padding: int, pad_to_capacity: bool = True) -> RowFormat:
    return RowFormat(padding_value=padding, label_padding_value=label_padding, pad_to_capacity=pad_to_capacity)


def _planned(result: PackResult | Plan, token_ids: Any, labels: Any, loss_mask: Any) -> tuple[Samples, Plan]:
    plan = result.plan if isinstance(result, PackResult) else result
    samples = Samples.read(token_ids, labels=labels, loss_mask=loss_mask)
    samples.check_lengths(plan.lengths)
    return samples, plan


# ---------------------------------------------------------------------- tensors


def pack_result_to_tensors(
    result: PackResult | Plan,
    token_ids: Any,
    *,
    padding_value: int = 0,
    label_padding_value: int = IGNORE,
    device: torch.device | str | None = None,
    labels: Any = None,
    loss_mask: Any = None,
) -> PackedBatch:
    """The rows of a result, or of any `Plan`, as tensors padded to the capacity, on `device`; see `pack_dataset`.

    Raises:
        SampleError: a sample has another length than was packed, or is no vector of token ids; names it.
        ConfigError: there are more or fewer samples.
    """
    form = _form(padding_value, label_padding_value)
    return _tensors(*_planned(result, token_ids, labels, loss_mask), form, device)


def packed_collate_fn(
    capacity: int,
    *,
    strategy: str = "obfd",
    seed: int | None = None,
    padding_value: int = 0,
    label_padding_value: int = IGNORE,
    oversize: Oversize = "error",
) -> Callable[[Sequence[Any]], PackedBatch]:
    """Make a collate function for a DataLoader: it packs the samples of a batch into rows.

    Its settings are those of `pack_dataset`; it can be pickled, so workers may be spawned. A batch holds token ids
    (lists, vectors or tensors), or dictionaries with `input_ids`. Dictionaries may also hold an `attention_mask`, 0 on
    padding (on the right), and one of `labels`, `loss_mask`, `completion_mask` and `assistant_masks`, not shifted,
    which marks what is learnt; without them all of it is.

    Raises:
        ConfigError: a setting that does not exist; later, no samples, or labels or a mask for some of them only.
        SampleError: later, a sample that is no vector of token ids, is empty, too long, or has columns that do not fit
            together; names it.
    """
    form = _form(padding_value, label_padding_value)
    return partial(_pack_batch, packer=Packer(capacity, strategy, seed), form=form, oversize=oversize)


def _pack_batch(batch: Sequence[Any], *, packer: Packer, form: RowFormat, oversize: Oversize) -> PackedBatch:
    samples = Samples.read_batch(batch).fitted(packer.capacity, oversize)
    return _tensors(samples, packer.plan(samples.lengths, drop_oversize=oversize == "drop"), form)


def _tensors(samples: Samples, plan: Plan, form: RowFormat, device: torch.device | str | None = None) -> PackedBatch:
    import torch

    value = form.label_padding_value
    may_be_label = value >= 0  # then only a mask beside the labels can tell padding from a token of that id
    form = replace(form, label_padding_value=IGNORE) if may_be_label else form
    filled = fill_rows(samples, plan, form, dtype=np.int64)
    packs = tuple(PackResult(plan=plan).packs)

    def tensor(column: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(column).view(len(plan), plan.capacity).to(device)

    labels = tensor(filled.labels)
    learnt = labels != IGNORE if may_be_label else None
    return PackedBatch(
        input_ids=tensor(filled.input_ids),
        position_ids=tensor(filled.position_ids),
        labels=labels if learnt is None else labels.masked_fill(~learnt, value),
        cu_seqlens=[torch.tensor([0, *np.cumsum(pack.lengths)], dtype=torch.int32, device=device) for pack in packs],
        max_seqlen=int(plan.lengths[plan.sample_ids].max(initial=0)),
        packs=packs,
        label_padding_value=value,
        learnt=learnt,
    )
