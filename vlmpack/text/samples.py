"""Token ids of samples and the labels beside them, read once into one array: lists, vectors, tensors, data-set columns.

    values   [7 7 7 8 8 9 9 9 9]      tokens of all samples, one after the other
    starts   [0, 3, 5]
    lengths  [3, 2, 4]

A sample is a span of `values`, so cutting samples short or in pieces copies nothing.

Columns beside the ids of one sample mask padding and prompts:

    input_ids          5    6    7    8    0
    attention_mask     1    1    1    1    0       the last token is padding
    loss_mask          0    0    1    1    0       or completion_mask, assistant_masks (TRL's)
    labels          -100 -100    7    8            what both come to
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from struct import error as StructError
from struct import pack
from typing import Any, Literal, final, get_args

import numpy as np

from vlmpack.errors import ConfigError, SampleError, check_choice
from vlmpack.plan.lengths import LARGEST, checked_lengths

Oversize = Literal["error", "drop", "truncate", "split"]

IGNORE = -100
"""The label that cross-entropy leaves out: `vlmpack.layout.IGNORE`, which would bring in torch."""

LEARNT = ("labels", "loss_mask", "completion_mask", "assistant_masks")
"""Columns that mark what is learnt, not shifted; masks hold 0 and 1. A sample has one, or all of it is learnt."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """N samples."""

    values: np.ndarray
    """int32 [R]: token ids."""
    targets: np.ndarray
    """int32 [R]: what is to be learnt at each token, not shifted; -100: nothing."""
    starts: np.ndarray
    """int64 [N]: where each sample starts in both."""
    lengths: np.ndarray
    """int64 [N]: its tokens."""

    @classmethod
    def read(cls, token_ids: Any, *, labels: Any = None, loss_mask: Any = None) -> Samples:
        """Read samples.

        Args:
            token_ids: N lists, tuples, vectors or tensors of whole numbers; a matrix; a column of a `datasets.Dataset`;
                an arrow array of lists.
            labels: the same for labels, not shifted, -100 where nothing is to be learnt; None: the token ids.
            loss_mask: the same for 0 and 1: which tokens are to be learnt; None: all. Not beside labels.

        Raises:
            SampleError: a sample that is no vector of whole numbers, holds negative ids, or has labels of another
                length; names it.
            ConfigError: another number of labels, labels and a mask, or nothing that holds samples.
        """
        if labels is not None and loss_mask is not None:
            raise ConfigError("labels mark what is to be learnt, and so does loss_mask; give one of them")
        values, lengths = _read(token_ids, "token ids")
        targets = values
        if labels is not None:
            targets = _read_per_token(labels, lengths, "labels", also=IGNORE)
        elif loss_mask is not None:
            mask = _read_per_token(loss_mask, lengths, "loss masks", highest=1)
            targets = np.where(mask != 0, values, np.int32(IGNORE))
        return cls(values=values, targets=targets, starts=np.cumsum(lengths) - lengths, lengths=lengths)

    @classmethod
    def read_batch(cls, batch: Sequence[Any]) -> Samples:
        """Read a batch: token ids, or dictionaries that hold them as `input_ids`, with columns beside them.

        Raises:
            SampleError: a sample that is no vector of token ids, or whose columns do not fit together; names it.
            ConfigError: some samples mark what is to be learnt, and others do not, or do so by another column.
        """
        token_ids, columns, names = [], [], []
        for index, sample in enumerate(batch):
            ids = token_ids_of(sample, index)
            if isinstance(sample, Mapping):
                name = learnt_column(sample, index)
                column = None if name is None else sample[name]
                if sample.get("attention_mask") is not None:
                    ids, column = _without_padding(ids, column, name or "", sample["attention_mask"], index)
                if name is not None:
                    names.append(name)
                    columns.append(column)
            token_ids.append(ids)
        if not names:
            return cls.read(token_ids)
        _check_alike(names, len(batch))
        return cls.read(token_ids, **{"labels" if names[0] == "labels" else "loss_mask": columns})

    def __len__(self) -> int:
        return len(self.lengths)

    def fitted(self, capacity: int, oversize: Oversize) -> Samples:
        """Cut samples to at most `capacity` tokens, at the end or into pieces, by `oversize`.

        Raises:
            SampleError: a sample that is to be cut into pieces is empty; names it.
            ConfigError: there is no such way to deal with long samples.
        """
        check_choice("oversize", oversize, get_args(Oversize))
        if oversize == "truncate":
            return replace(self, lengths=np.minimum(self.lengths, capacity))
        if oversize == "split" and len(self):
            from vlmpack.layout.segments import ranges

            checked_lengths(self.lengths)  # now, while a sample's place is its number
            pieces = -(-self.lengths // capacity)
            before = ranges(0, pieces) * capacity
            rest = np.repeat(self.lengths, pieces) - before
            return replace(self, starts=np.repeat(self.starts, pieces) + before, lengths=np.minimum(rest, capacity))
        return self

    def check_lengths(self, planned: np.ndarray) -> None:
        """Raise unless these are the samples of that plan.

        Args:
            planned: int64 [N]: lengths that were packed.

        Raises:
            ConfigError: there are more or fewer.
            SampleError: one has another length; names it.
        """
        if len(planned) != len(self):
            raise ConfigError(
                f"{len(planned)} lengths were packed, but there are token ids of {len(self)} samples; give those of "
                "all samples, in the same order"
            )
        if (differs := planned != self.lengths).any():
            at = int(differs.argmax())
            fault = f"has {self.lengths[at]} token ids, but was packed with a length of {planned[at]}; pack the lengths"
            raise _bad(f"{fault} of these token ids", at, "length_mismatch")


# ---------------------------------------------------------------------- one sample


def token_ids_of(sample: Any, index: int) -> Any:
    """The token ids of a sample of a batch: those under `input_ids` in a dictionary, else the sample itself.

    Raises:
        SampleError: a dictionary without them.
    """
    if not isinstance(sample, Mapping):
        return sample
    if "input_ids" not in sample:
        raise _bad(f"has no input_ids, but {', '.join(map(str, sample))}", index)
    return sample["input_ids"]


def vector(values: Any, what: str, index: int) -> np.ndarray:
    """Convert one sample's numbers to a vector of whole numbers; a list becomes int32.

    Raises:
        SampleError: not one-dimensional, or not whole numbers below 2^31.
    """
    try:
        listed = isinstance(values, (list, tuple))
        numbers = np.frombuffer(pack(f"{len(values)}i", *values), np.int32) if listed else np.asarray(values)
    except (TypeError, OverflowError, ValueError, RuntimeError, StructError) as error:
        raise _bad(f"the {what} are not a vector of whole numbers: {error}", index) from error
    if numbers.ndim != 1 or numbers.dtype.kind not in "iub":
        remedy = ": give the column, as in dataset['input_ids']" if isinstance(values, Mapping) else ""
        form = f"{type(values).__name__} with {numbers.ndim} dimensions of {numbers.dtype}"
        raise _bad(f"the {what} must be a vector of whole numbers, got {form}{remedy}", index)
    return numbers.astype(np.int64) if numbers.dtype.kind == "u" else numbers


def learnt_column(sample: Mapping[str, Any], index: int) -> str | None:
    """The name of the column that marks what of a sample is learnt; None: it has none.

    Raises:
        SampleError: there are several.
    """
    names = [name for name in LEARNT if name in sample and sample[name] is not None]
    if len(names) > 1:
        raise _bad(f"has {' and '.join(names)}, and each marks what is to be learnt; keep one of them", index)
    return names[0] if names else None


def real_tokens(mask: np.ndarray, index: int) -> int:
    """Count the tokens of a sample or row that are no padding, by its `attention_mask`.

    Raises:
        SampleError: the mask holds other numbers than 0 and 1, or there is padding before a token.
    """
    real = int(np.count_nonzero(mask))
    if not (mask[:real] == 1).all():
        meaning = "1 on tokens and 0 on padding; which tokens belong together is the business of seq_lengths"
        _check_zeros_and_ones(mask, "attention_mask", meaning, index)
        raise _bad("has an attention_mask whose ones are not one run at the start; pad on the right", index)
    return real


def masked_labels(input_ids: np.ndarray, mask: np.ndarray, name: str, index: int) -> np.ndarray:
    """The ids where the mask is 1, and -100 where it is 0.

    Raises:
        SampleError: the mask holds other numbers.
    """
    _check_zeros_and_ones(mask, name, "1 on tokens that are learnt and 0 on others", index)
    return np.where(mask, input_ids, np.int32(IGNORE))


def _without_padding(ids: Any, column: Any, name: str, mask: Any, index: int) -> tuple[np.ndarray, np.ndarray | None]:
    """(ids, the column that marks what is learnt), both without padding."""
    ids, mask = vector(ids, "input_ids", index), vector(mask, "attention_mask", index)
    columns = {"attention_mask": mask}
    if column is not None:
        column = columns[name] = vector(column, name, index)
    for what, values in columns.items():
        if len(values) != len(ids):
            fault = f"has {len(ids)} input_ids, but {len(values)} of {what}; give one for each token"
            raise _bad(fault, index, "length_mismatch")
    real = real_tokens(mask, index)
    return ids[:real], None if column is None else column[:real]


def _check_alike(names: Sequence[str], samples: int) -> None:
    counts = Counter(names)
    columns = ", ".join(f"{count} of {samples} samples have {name}" for name, count in counts.items())
    if len(counts) > 1:
        raise ConfigError(f"{columns}; mark by one of them what is to be learnt, in all samples of a batch")
    if len(names) < samples:
        raise ConfigError(f"{columns}; give {names[0]} for all, or for none")


def _check_zeros_and_ones(mask: np.ndarray, name: str, meaning: str, index: int) -> None:
    if not 0 <= mask.min(initial=0) <= mask.max(initial=0) <= 1:
        raise _bad(f"has {mask[(mask != 0) & (mask != 1)][0]} in {name}, which is {meaning}", index)


# ---------------------------------------------------------------------- all samples


def _read_per_token(
    column: Any, lengths: np.ndarray, what: str, *, highest: int = LARGEST, also: int | None = None
) -> np.ndarray:
    """Read one number for each token id."""
    values, counts = _read(column, what, highest=highest, also=also)
    if len(counts) != len(lengths):
        raise ConfigError(f"there are {what} of {len(counts)} samples, but token ids of {len(lengths)}")
    if (differs := counts != lengths).any():
        at = int(differs.argmax())
        raise _bad(f"has {lengths[at]} token ids, but {counts[at]} of {what}", at, "length_mismatch")
    return values


def _read(samples: Any, what: str, *, highest: int = LARGEST, also: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(values int32 [R], lengths int64 [N]); values lie between 0 and `highest`, or are `also`."""
    lists = _arrow_lists(samples)
    if lists is not None:
        values, lengths = _read_arrow(lists, what)
    else:
        vectors = [vector(sample, what, index) for index, sample in enumerate(_each(samples, what))]
        lengths = np.fromiter(map(len, vectors), np.int64, len(vectors))
        values = np.concatenate(vectors) if vectors else np.zeros(0, np.int32)
    if len(values) and not 0 <= values.min() <= values.max() <= highest:
        _check_values(values, lengths, what, highest, also)
    return values.astype(np.int32, copy=False), lengths


def _check_values(values: np.ndarray, lengths: np.ndarray, what: str, highest: int, also: int | None) -> None:
    bad = ((values < 0) | (values > highest)) & (values != (0 if also is None else also))
    if bad.any():
        at = int(bad.argmax())
        sample = _sample_of(at, lengths)
        special = "" if also is None else f", or are {also}"
        place = at - int(lengths[:sample].sum())
        raise _bad(f"the {what} have {values[at]} at place {place}; they lie between 0 and {highest}{special}", sample)


def _each(samples: Any, what: str) -> Iterator[Any]:
    if isinstance(samples, (str, bytes, Mapping)) or not isinstance(samples, Iterable):
        raise ConfigError(
            f"the {what} must be one list, vector or tensor for each sample, or a column of a data set; got "
            f"{type(samples).__name__}"
        )
    return iter(samples)


def _arrow_lists(samples: Any) -> Any:
    """`samples` as a pyarrow ChunkedArray of lists: columns of a `datasets.Dataset`, and arrow arrays; else None.

    A data set that transforms its rows as they are read has to be read row by row: None.
    """
    if "pyarrow" not in sys.modules:
        return None  # whoever has such an object has imported its package
    import pyarrow as pa

    if isinstance(samples, (pa.Array, pa.ChunkedArray)):
        return pa.chunked_array([samples]) if isinstance(samples, pa.Array) else samples
    if "datasets" not in sys.modules:
        return None
    from datasets.arrow_dataset import Column

    if not isinstance(samples, Column) or isinstance(samples.source, Column):
        return None
    source, name = samples.source, samples.column_name
    if source.format["type"] == "custom":
        return None
    table: Any = source.select_columns([name]).with_format("arrow")[:]
    return table.column(name)


def _read_arrow(lists: Any, what: str) -> tuple[np.ndarray, np.ndarray]:
    """(values [R] of the column's own integer type, lengths int64 [N]); no python number is made of any token.

    Raises:
        SampleError: a row is null or holds nulls; names it. The column does not hold whole numbers; names the first.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = lists.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not (pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)):
        raise _bad(f"the {what} must be lists of whole numbers, but the column holds {kind}", 0)
    if lists.null_count:
        raise _bad(f"the {what} are null", int(np.argmax(lists.is_null().to_numpy())))
    flat = pa.chunked_array([chunk.flatten() for chunk in lists.chunks], type=kind.value_type)
    lengths = pc.list_value_length(lists).to_numpy().astype(np.int64)  # pyright: ignore[reportAttributeAccessIssue]
    if flat.null_count:
        raise _bad(f"the {what} hold a null", _sample_of(np.argmax(flat.is_null().to_numpy()), lengths))
    return flat.to_numpy(), lengths


def _sample_of(token: int | np.intp, lengths: np.ndarray) -> int:
    return int(np.searchsorted(np.cumsum(lengths), token, side="right"))


def _bad(fault: str, index: int, reason: str = "bad_tokens") -> SampleError:
    return SampleError(fault, index=index, reason=reason)
