"""SeqPacker's API on top of vlmpack's plans and rows: a SeqPacker script runs with only its imports changed.

    from vlmpack.interop.seqpacker import pack_sequences      # was: from seqpacker import pack_sequences
    from vlmpack.interop.seqpacker import pack_dataset        # was: from seqpacker.hf_utils import pack_dataset
    from vlmpack.interop.seqpacker import packed_collate_fn   # was: from seqpacker.torch_utils import packed_collate_fn

Two samples [7 7 7] and [8 8] in a row of 7:

    input_ids      7    7 7    8 8    0    0
    labels      -100    7 7 -100 8 -100 -100     not shifted, because models shift them; each sample's first is masked
    position_ids   0    1 2    0 1    0    0
    attention_mask null                          a 2D mask would let samples of a row attend to each other

SeqPacker's own labels are shifted, and a model shifts them again. For a custom loss that does not shift, use
`PackedBatch.shift_labels`. Planning needs only numpy; torch and datasets are imported where they are needed.
G rows of width W, T tokens of a joined row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

import numpy as np

from vlmpack import __version__ as __version__
from vlmpack.errors import ConfigError, check_choice, check_extra
from vlmpack.interop.row_collator import (
    IGNORE,
    PositionRows,
    bad_row,
    positions_of,
    read_row,
    vector,
)
from vlmpack.interop.row_collator import RowCollator as RowCollator
from vlmpack.plan.lengths import Overlength, check_seed, checked_capacity
from vlmpack.plan.packing_buffer import LOOK_AHEAD, ROWS_BUFFERED, PackingBuffer
from vlmpack.plan.plan import STRATEGIES, Plan, plan_bins

if TYPE_CHECKING:
    import torch
    from datasets import Dataset


FULL_NAMES = {
    "nextfit": "nf", "firstfit": "ff", "bestfit": "bf", "worstfit": "wf", "firstfitdecreasing": "ffd",
    "bestfitdecreasing": "bfd", "firstfitshuffle": "ffs", "harmonic": "hk",
}  # fmt: skip
"""SeqPacker's long names in lower case -> its short names."""

BEST_FIT = ("obfd", "obfdp", "bfd", "bf", "ffd", "mffd", "ff", "ffs", "wf")
ALIASES = {**dict.fromkeys(BEST_FIT, "best_fit_decreasing"), "hk": "rolling_fill", "nf": "rolling_fill"}
"""SeqPacker's short name -> our strategy. If we lack a variant, it maps to one of ours that needs no more bins."""


def _short_name(strategy: object) -> str:
    name = str(strategy).lower()
    return FULL_NAMES.get(name, name)


# ---------------------------------------------------------------------- plans


@final
@dataclass(frozen=True, kw_only=True)
class Pack:
    """The samples of one row."""

    sequence_ids: list[int]
    """Indices of the samples in the list of lengths."""
    lengths: list[int]
    """Tokens of each sample."""

    @property
    def used(self) -> int:
        """Tokens of all samples in the row."""
        return sum(self.lengths)

    def __len__(self) -> int:
        """Return the number of samples in the row."""
        return len(self.sequence_ids)


@final
@dataclass(frozen=True, kw_only=True)
class PackMetrics:
    """Fill statistics of rows. Utilization is the tokens of a row over its capacity, 0 to 1."""

    num_sequences: int
    """Samples in rows."""
    num_packs: int
    """Number of rows."""
    total_tokens: int
    """Tokens of all samples in rows."""
    padding_tokens: int
    """Unused tokens of row capacity."""
    efficiency: float
    """Tokens over the capacity of all rows, 0 to 1."""
    avg_utilisation: float
    """Mean utilization of rows."""
    utilisation_std: float
    """Standard deviation of row utilization (population, not sample)."""
    min_utilisation: float
    """Utilization of the emptiest row."""
    max_utilisation: float
    """Utilization of the fullest row."""
    avg_sequences_per_pack: float
    """Mean number of samples per row."""
    packing_time_ms: float
    """Planning time in milliseconds."""

    @property
    def padding_ratio(self) -> float:
        """Padding over the capacity of all rows, 0 to 1."""
        total = self.total_tokens + self.padding_tokens
        return self.padding_tokens / total if total else 0.0

    @property
    def throughput(self) -> float:
        """Samples packed per second (SeqPacker's stub says per millisecond, but its code counts seconds)."""
        return self.num_sequences / (self.packing_time_ms / 1000) if self.packing_time_ms else float("inf")


@final
@dataclass(frozen=True, kw_only=True)
class PackResult:
    """A plan under SeqPacker's names. Each property that builds lists is computed once."""

    plan: Plan
    """The rows, as the rest of vlmpack takes them (`PackedBatchSampler`, `Plan.save`)."""
    time_ms: float = 0.0
    """Planning time in milliseconds."""

    @cached_property
    def packs(self) -> list[Pack]:
        """One `Pack` per row."""
        lengths = self.plan.lengths
        return [Pack(sequence_ids=row.tolist(), lengths=lengths[row].tolist()) for row in self.plan]

    @cached_property
    def bins(self) -> list[list[int]]:
        """The samples of each row."""
        return [list(row) for row in self.plan.bins]

    @cached_property
    def metrics(self) -> PackMetrics:
        """Fill statistics of the rows."""
        plan, samples = self.plan, len(self.plan.sample_ids)
        used = plan.tokens / plan.capacity if len(plan) else np.zeros(1)
        return PackMetrics(
            num_sequences=samples, num_packs=len(plan), total_tokens=int(plan.tokens.sum()), padding_tokens=plan.waste,
            efficiency=plan.fill, avg_utilisation=float(used.mean()), utilisation_std=float(used.std()),
            min_utilisation=float(used.min()), max_utilisation=float(used.max()),
            avg_sequences_per_pack=samples / max(len(plan), 1), packing_time_ms=self.time_ms,
        )  # fmt: skip

    @property
    def num_bins(self) -> int:
        """Number of rows."""
        return len(self.plan)

    @property
    def efficiency(self) -> float:
        """Tokens over the capacity of all rows, 0 to 1."""
        return self.plan.fill

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.plan)

    def __repr__(self) -> str:
        return f"PackResult(bins={len(self)}, efficiency={self.efficiency:.2%}, time={self.time_ms:.2f}ms)"


@final
@dataclass(frozen=True)
class Packer:
    """Plans rows of one capacity with one strategy.

    Raises:
        ConfigError: the capacity is below 1, the strategy is unknown, or the seed is not a whole number.
    """

    capacity: int
    """Maximum tokens of a row."""
    strategy: str = "obfd"
    """SeqPacker's name, short or long, or one of `vlmpack.plan.STRATEGIES`."""
    seed: int | None = None
    """Seed of the shuffle. Of SeqPacker's names, only `ffs` uses it (None: 42); ours always do (None: no shuffle)."""

    def __post_init__(self) -> None:
        checked_capacity(self.capacity)
        check_choice("strategy", _short_name(self.strategy), (*ALIASES, *STRATEGIES))
        check_seed(self.seed)

    def pack(self, lengths: Sequence[int] | np.ndarray) -> PackResult:
        """Choose which samples share a row.

        Args:
            lengths: N whole numbers from 1 to the capacity: the tokens of each sample.

        Raises:
            SampleError: a length is not whole, below 1, or above the capacity; names the sample.
            ConfigError: there are no samples.
        """
        start = perf_counter()
        plan = self.plan(lengths)
        return PackResult(plan=plan, time_ms=1000 * (perf_counter() - start))

    def pack_flat(self, lengths: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (samples int64 [N] in row order, cuts int64 [G - 1]) for `numpy.split(*packer.pack_flat(lengths))`."""
        plan = self.plan(lengths)
        return plan.sample_ids, plan.bounds[1:-1]

    def plan(self, lengths: Sequence[int] | np.ndarray, overlength: Overlength = "error") -> Plan:
        """Return the same rows as a Plan; samples above the capacity are refused, or left out and listed."""
        name, seed = _short_name(self.strategy), self.seed
        if name in ALIASES:  # SeqPacker shuffles with one strategy only
            seed = None if name != "ffs" else 42 if seed is None else seed
        return plan_bins(lengths, self.capacity, strategy=ALIASES.get(name, name), overlength=overlength, seed=seed)

    @staticmethod
    def strategies() -> list[tuple[str, str]]:
        """Return (SeqPacker's short name, the strategy of `vlmpack.plan.STRATEGIES` that it maps to) pairs."""
        return list(ALIASES.items())


def pack_sequences(
    lengths: Sequence[int] | np.ndarray, capacity: int, strategy: str = "obfd", seed: int | None = None
) -> PackResult:
    """Choose which samples share a row: `Packer(capacity, strategy, seed).pack(lengths)`, with the same errors."""
    return Packer(capacity, strategy, seed).pack(lengths)


@final
class StreamPacker:
    """Plan rows of lengths that arrive one by one. Rows are the same as from `pack_sequences`.

    Args:
        capacity: maximum tokens of a row.
        strategy: `"nf"` or `"hk"`, which both map to `rolling_fill` instead of next fit and Harmonic-K: each row is the
            oldest sample of a packing buffer (64 samples, and at least four rows' worth of tokens) and the samples that
            fill it up. It buffers as little as Harmonic-K, and rows are fuller.
        k: number of size classes of Harmonic-K. It is validated, but has no effect.

    Raises:
        ConfigError: the capacity or `k` is below 1, or the strategy is another one.
    """

    def __init__(self, capacity: int, strategy: str = "nf", k: int | None = None) -> None:
        if _short_name(str(strategy).replace("_", "")) not in ("nf", "hk"):
            raise ConfigError(
                f"a stream cannot be packed by {strategy!r}, which needs all lengths at once; choose 'nf' or 'hk', or "
                "use Packer"
            )
        if k is not None:
            checked_capacity(k, "k")
        self._capacity, self._buffer = capacity, PackingBuffer(capacity)
        self._lengths: dict[int, int] = {}
        self._finished = False
        self.sequences_added = 0
        """Number of samples added so far."""

    def add(self, length: int) -> list[Pack]:
        """Add one sample, and return the rows that are now complete, often none.

        Raises:
            SampleError: the length is not whole, below 1 or above the capacity; names the sample. The sample is not
                added, and the packer can go on.
            ConfigError: the stream is finished.
        """
        if self._finished:
            raise ConfigError("this StreamPacker is finished; make a new one for the next stream")
        complete = []
        self._buffer.add(self.sequences_added, length)
        self._lengths[self.sequences_added] = int(length)
        self.sequences_added += 1
        enough = ROWS_BUFFERED * self._capacity
        while len(self._buffer) >= LOOK_AHEAD and self._buffer.tokens >= enough:
            complete.append(self._next_row())
        return complete

    def finish(self) -> list[Pack]:
        """Return the remaining rows; afterwards nothing can be added."""
        self._finished, rest = True, []
        while len(self._buffer):
            rest.append(self._next_row())
        return rest

    def _next_row(self) -> Pack:
        """Take the oldest sample and the samples that fill its row."""
        row = self._buffer.take()
        return Pack(sequence_ids=row, lengths=[self._lengths.pop(sample) for sample in row])


# ---------------------------------------------------------------------- data sets


def pack_dataset(
    token_ids: Any,
    capacity: int,
    *,
    strategy: str = "obfd",
    seed: int | None = None,
    labels: Any = None,
    overlength: Overlength = "error",
    **columns: Any,
) -> Dataset:
    """Pack samples into rows, as a data set with the columns shown at the top of this file.

    A plain model whose layers are all attention trains on it under HF Trainer as it is, with sdpa and eager attention.
    For a model with packing enabled, use `RowCollator()`.

    Args:
        token_ids: one list, vector or tensor per sample, or a column of a `datasets.Dataset`.
        capacity: maximum tokens of a row.
        strategy: SeqPacker's name or ours, see `Packer`.
        seed: seed of the shuffle, see `Packer`.
        labels: labels of each token, in the form of `token_ids`, not shifted, -100 where nothing is trained on; None:
            the token ids.
        overlength: what to do with samples above the capacity: refuse them, or leave them out.
        columns: `padding_value` and other settings of `pack_dataset_from_result`.

    Raises:
        SampleError: a sample is not a vector of token ids, is empty or too long, or has labels of another length; names
            the sample.
        ConfigError: a setting is unknown, or `datasets` is not installed.
    """
    packer, samples = Packer(capacity, strategy, seed), _read(token_ids, labels)
    ids, labels = zip(*samples, strict=True) if samples else ([], [])
    lengths = np.asarray([*map(len, ids)], np.int64)
    empty = partial(Plan.from_assignment, lengths, lengths=lengths, capacity=capacity)
    plan = packer.plan(lengths, overlength) if samples else empty()
    return pack_dataset_from_result(plan, ids, labels=labels, **columns)


def pack_dataset_from_result(
    result: PackResult | Plan,
    token_ids: Any,
    *,
    padding_value: int = 0,
    label_padding_value: int = IGNORE,
    labels: Any = None,
    pad_to_capacity: bool = True,
    seq_lengths: bool = False,
) -> Dataset:
    """Return the rows of a result, or of any `Plan`, as a data set.

    Args:
        result: the rows.
        token_ids: token ids of all packed samples, as in `pack_dataset`.
        padding_value: value of `input_ids` on padding.
        label_padding_value: value of `labels` where nothing is trained on, below 0.
        labels: as in `pack_dataset`.
        pad_to_capacity: pad rows to the capacity; False: rows are as long as their tokens.
        seq_lengths: add TRL's column `seq_lengths`, the lengths of the samples of each row.

    Raises:
        SampleError: a sample is not a vector of token ids, or has labels of another length; names the sample.
        ConfigError: the samples are not the packed ones, or a setting is invalid.
    """
    check_extra("data", "datasets", needed_by="a packed data set")
    import pyarrow as pa
    from datasets import Dataset

    rows = _rows(result, _read(token_ids, labels), padding_value, label_padding_value, to_capacity=pad_to_capacity)
    names = ("input_ids", "attention_mask", "labels", "position_ids", *(("seq_lengths",) if seq_lengths else ()))
    columns = {name: pa.array([row.get(name) for row in rows], pa.list_(pa.int32())) for name in names}
    return Dataset(pa.table(columns))


_Sample = tuple[np.ndarray, np.ndarray]
"""Token ids and labels of one sample, int64 [n] each."""


def _rows(
    result: PackResult | Plan, samples: Sequence[_Sample], padding: int, label_padding: int, *, to_capacity: bool = True
) -> list[dict[str, np.ndarray]]:
    """Return the columns of each row, including the lengths of its samples."""
    plan, rows = result.plan if isinstance(result, PackResult) else result, []
    if plan.lengths.tolist() != [len(ids) for ids, _ in samples]:
        raise ConfigError("these are not the samples that were packed; give the token ids of all, in the same order")
    if label_padding >= 0:
        raise ConfigError(f"label_padding_value is {label_padding}, which may be a label; choose -100")
    for members in plan.bins:
        lengths = [len(samples[sample][0]) for sample in members]
        rest = plan.capacity - sum(lengths) if to_capacity else 0
        if rest < 0:  # a plan with overlength="own_row" or shared prefixes
            raise ConfigError(f"a row holds {sum(lengths)} tokens, above its capacity; choose pad_to_capacity=False")
        ids, labels = (np.concatenate([samples[sample][at] for sample in members]) for at in (0, 1))
        labels[np.cumsum([0, *lengths[:-1]])] = IGNORE
        labels[labels == IGNORE] = label_padding
        padded = {
            "input_ids": (ids, padding),
            "labels": (labels, label_padding),
            "position_ids": (positions_of(lengths), 0),
        }
        columns = {name: np.pad(column, (0, rest), constant_values=fill) for name, (column, fill) in padded.items()}
        rows.append({**columns, "seq_lengths": np.asarray(lengths)})
    return rows


def _read(token_ids: Any, labels: Any) -> list[_Sample]:
    ids = _vectors(token_ids, "token ids")
    targets = ids if labels is None else _vectors(labels, "labels")
    if len(targets) != len(ids):
        raise ConfigError(f"there are labels of {len(targets)} samples, but token ids of {len(ids)}")
    for index, (own, marks) in enumerate(zip(ids, targets, strict=True)):
        if len(own) != len(marks):
            raise bad_row(f"has {len(own)} token ids, but {len(marks)} labels", index)
    return list(zip(ids, targets, strict=True))


def _vectors(samples: Any, what: str) -> list[np.ndarray]:
    """Return one vector per sample from lists, vectors, tensors, a column of a data set or an arrow array."""
    if isinstance(samples, (str, Mapping)) or not isinstance(samples, Iterable):
        raise ConfigError(
            f"the {what} must be one list, vector or tensor for each sample, got {type(samples).__name__}"
        )
    listed: Any = getattr(samples, "to_pylist", lambda: samples)()
    return [vector(sample, what, index) for index, sample in enumerate(listed)]


# ---------------------------------------------------------------------- tensors


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """G rows of one width W as tensors.

    `model(**batch.to_hf())` trains on them exactly if packing is enabled, or if all layers of the model are attention.
    """

    input_ids: torch.Tensor
    """[G, W] int64."""
    position_ids: torch.Tensor
    """[G, W] int64: 0, 1, 2, ... in every sample; 0 on padding."""
    labels: torch.Tensor
    """[G, W] int64, not shifted, because models shift them. The first label of each sample is masked."""
    cu_seqlens: list[torch.Tensor]
    """Cumulative tokens of each row, int32 [number of its samples + 1]."""
    max_seqlen: int
    """Tokens of the longest sample."""
    packs: tuple[Pack, ...]
    """The samples of each row, on the host."""
    label_padding_value: int = IGNORE
    """Value of labels where nothing is trained on."""

    @property
    def attention_mask(self) -> torch.Tensor:
        """Block-diagonal causal mask, float32 [G, 1, W, W]: 0 where a token attends, else the smallest float.

        With this mask, an unmodified model keeps samples apart on eager and sdpa. It is computed anew on each access
        and takes 4 G W² bytes; `to_hf()` needs no mask.
        """
        import torch

        place = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        first = place - self.position_ids  # index of each token's sample start; padding gets its own index
        sees = (first[:, :, None] == first[:, None, :]) & (place[:, None] >= place)
        nothing = torch.finfo(torch.float32).min
        return torch.zeros(sees.shape, device=place.device).masked_fill_(~sees, nothing)[:, None]

    @property
    def shift_labels(self) -> torch.Tensor:
        """[G, W] int64: target of each token, for a loss that does not shift. SeqPacker calls this `labels`."""
        shifted = self.labels.roll(-1, dims=-1)
        shifted[:, -1] = self.label_padding_value
        return shifted

    def to_hf(self, *, position_rows: PositionRows = 1) -> dict[str, Any]:
        """Join all samples to one row without padding, as model inputs on the host, like `RowCollator`.

        Raises:
            ConfigError: there are no samples.
        """
        if not self.packs:
            raise ConfigError(
                f"the batch holds no sample: each exceeds the capacity of {self.input_ids.shape[1]} tokens; skip "
                "batches without packs, or raise the capacity"
            )
        labels = self.labels.masked_fill(self.labels == self.label_padding_value, IGNORE)
        rows = zip(self.input_ids.cpu(), labels.cpu(), self.packs, strict=True)
        columns = ({"input_ids": ids, "labels": own, "seq_lengths": pack.lengths} for ids, own, pack in rows)
        return RowCollator(position_rows=position_rows)(list(columns))


def pack_result_to_tensors(
    result: PackResult | Plan,
    token_ids: Any,
    *,
    padding_value: int = 0,
    label_padding_value: int = IGNORE,
    device: torch.device | str | None = None,
    labels: Any = None,
) -> PackedBatch:
    """Return the rows of a result, or of any `Plan`, as tensors padded to the capacity, on `device`.

    Takes the same arguments as `pack_dataset`.

    Raises:
        SampleError: a sample is not a vector of token ids, or has labels of another length; names the sample.
        ConfigError: the samples are not the packed ones.
    """
    plan = result.plan if isinstance(result, PackResult) else result
    return _tensors(plan, _read(token_ids, labels), padding_value, label_padding_value, device)


def packed_collate_fn(
    capacity: int,
    strategy: str = "obfd",
    *,
    seed: int | None = None,
    padding_value: int = 0,
    label_padding_value: int = IGNORE,
    overlength: Overlength = "error",
) -> Callable[[Sequence[Any]], PackedBatch]:
    """Make a collate function for a DataLoader that packs the samples of a batch into rows.

    Takes the same settings as `pack_dataset`. The function can be pickled, so workers may be spawned. A batch holds
    token ids (lists, vectors or tensors), or dictionaries with `input_ids`. Dictionaries may also hold an
    `attention_mask`, 0 on padding (on the right), and one of `labels`, `loss_mask`, `completion_mask` and
    `assistant_masks`, not shifted, which marks what is trained on. Without these, all tokens are trained on.

    Raises:
        ConfigError: a setting is unknown; later, a batch has no samples.
        SampleError: later, a sample is not a vector of token ids, is empty or too long, or has columns that do not fit
            together; names the sample.
    """
    fill = (padding_value, label_padding_value)
    return partial(_pack_batch, packer=Packer(capacity, strategy, seed), fill=fill, overlength=overlength)


def _pack_batch(batch: Sequence[Any], *, packer: Packer, fill: tuple[int, int], overlength: Overlength) -> PackedBatch:
    samples = [read_row(sample, index, ("attention_mask",), "one_sample")[:2] for index, sample in enumerate(batch)]
    return _tensors(packer.plan([len(ids) for ids, _ in samples], overlength), samples, *fill)


def _tensors(
    plan: Plan, samples: Sequence[_Sample], padding_value: int, label_padding_value: int, device: Any = None
) -> PackedBatch:
    import torch

    rows = _rows(plan, samples, padding_value, label_padding_value)
    packs = tuple(PackResult(plan=plan).packs)
    columns = {
        name: torch.from_numpy(np.asarray([row[name] for row in rows], np.int64).reshape(-1, plan.capacity)).to(device)
        for name in ("input_ids", "position_ids", "labels")
    }
    return PackedBatch(
        **columns,
        cu_seqlens=[torch.tensor([0, *np.cumsum(pack.lengths)], dtype=torch.int32, device=device) for pack in packs],
        max_seqlen=max((length for pack in packs for length in pack.lengths), default=0),
        packs=packs,
        label_padding_value=label_padding_value,
    )
