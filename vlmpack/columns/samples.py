"""Token ids as they come in: lists, arrays, tensors, columns of a data set; read once into one array.

    values   [7 7 7 8 8 9 9 9 9]      tokens of all samples, one after the other
    starts   [0, 3, 5]
    lengths  [3, 2, 4]

A sample is a span of `values`, so cutting samples short or in pieces copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from struct import error as StructError
from struct import pack
from typing import Any, Literal, final

import numpy as np

from vlmpack.columns.arrow import arrow_lists, read_arrow
from vlmpack.errors import ConfigError, SampleError
from vlmpack.plan import LARGEST, checked_lengths

Oversize = Literal["error", "drop", "truncate", "split"]
OVERSIZE: tuple[Oversize, ...] = ("error", "drop", "truncate", "split")

IGNORE = -100
"""The label that cross-entropy leaves out: `vlmpack.layout.IGNORE`, which would bring in torch."""


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
            raise ConfigError("labels say what is to be learnt, and so does loss_mask; give one of them")
        values, lengths = _read(token_ids, "token ids")
        targets = values
        if labels is not None:
            targets = _beside(labels, lengths, "labels", besides=IGNORE)
        elif loss_mask is not None:
            learnt = _beside(loss_mask, lengths, "loss masks", highest=1)
            targets = np.where(learnt != 0, values, np.int32(IGNORE))
        return cls(values=values, targets=targets, starts=np.cumsum(lengths) - lengths, lengths=lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def fitted(self, capacity: int, oversize: Oversize) -> Samples:
        """Samples cut to at most `capacity` tokens, if `oversize` says so: at the end, or into pieces.

        Raises:
            SampleError: a sample that is to be cut into pieces is empty; names it.
            ConfigError: there is no such way to deal with long samples.
        """
        if oversize not in OVERSIZE:
            raise ConfigError(f"oversize must be one of {', '.join(OVERSIZE)}, got {oversize!r}")
        if oversize == "truncate":
            return replace(self, lengths=np.minimum(self.lengths, capacity))
        if oversize == "split" and len(self):
            checked_lengths(self.lengths)  # now, while a sample's place is its number
            pieces = -(-self.lengths // capacity)
            place = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
            starts = np.repeat(self.starts, pieces) + place * capacity
            rest = np.repeat(self.lengths, pieces) - place * capacity
            return replace(self, starts=starts, lengths=np.minimum(rest, capacity))
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
            raise SampleError(
                f"has {self.lengths[at]} token ids, but was packed with a length of {planned[at]}; pack the lengths of "
                "these token ids",
                index=at,
                reason="length_mismatch",
            )


def token_ids_of(sample: Any, index: int) -> Any:
    """The token ids of a sample of a batch: those under `input_ids` in a dictionary, else the sample itself.

    Raises:
        SampleError: a dictionary without them.
    """
    if not isinstance(sample, Mapping):
        return sample
    if "input_ids" not in sample:
        raise SampleError(f"has no input_ids, but {', '.join(map(str, sample))}", index=index, reason="bad_tokens")
    return sample["input_ids"]


def vector(values: Any, what: str, index: int) -> np.ndarray:
    """One sample's numbers as a vector of whole numbers; a list becomes int32.

    Raises:
        SampleError: not one-dimensional, or not whole numbers below 2^31.
    """
    try:
        listed = isinstance(values, (list, tuple))
        found = np.frombuffer(pack(f"{len(values)}i", *values), np.int32) if listed else np.asarray(values)
    except (TypeError, OverflowError, ValueError, RuntimeError, StructError) as error:
        message = f"the {what} are not a vector of whole numbers: {error}"
        raise SampleError(message, index=index, reason="bad_tokens") from error
    if found.ndim != 1 or found.dtype.kind not in "iub":
        remedy = ": give the column, as in dataset['input_ids']" if isinstance(values, Mapping) else ""
        raise SampleError(
            f"the {what} must be a vector of whole numbers, got {type(values).__name__} with {found.ndim} dimensions "
            f"of {found.dtype}{remedy}",
            index=index,
            reason="bad_tokens",
        )
    return found.astype(np.int64) if found.dtype.kind == "u" else found


def _beside(
    given: Any, lengths: np.ndarray, what: str, *, highest: int = LARGEST, besides: int | None = None
) -> np.ndarray:
    """What is given for each token, beside the token ids."""
    values, own = _read(given, what, highest=highest, besides=besides)
    if len(own) != len(lengths):
        raise ConfigError(f"there are {what} of {len(own)} samples, but token ids of {len(lengths)}")
    if (differs := own != lengths).any():
        at = int(differs.argmax())
        raise SampleError(f"has {lengths[at]} token ids, but {own[at]} of {what}", index=at, reason="length_mismatch")
    return values


def _read(
    samples: Any, what: str, *, highest: int = LARGEST, besides: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(values int32 [R], lengths int64 [N]); values lie between 0 and `highest`, or are `besides`."""
    lists = arrow_lists(samples)
    if lists is not None:
        values, lengths = read_arrow(lists, what)
    else:
        vectors = [vector(sample, what, index) for index, sample in enumerate(_each(samples, what))]
        lengths = np.fromiter(map(len, vectors), np.int64, len(vectors))
        values = np.concatenate(vectors) if vectors else np.zeros(0, np.int32)
    if len(values) and not 0 <= values.min() <= values.max() <= highest:
        _check_values(values, lengths, what, highest, besides)
    return values.astype(np.int32, copy=False), lengths


def _check_values(values: np.ndarray, lengths: np.ndarray, what: str, highest: int, besides: int | None) -> None:
    bad = (values < 0) | (values > highest)
    if besides is not None:
        bad &= values != besides
    if bad.any():
        at = int(bad.argmax())
        sample = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
        other = "" if besides is None else f", or are {besides}"
        raise SampleError(
            f"the {what} have {values[at]} at place {at - int(lengths[:sample].sum())}; they lie between 0 and "
            f"{highest}{other}",
            index=sample,
            reason="bad_tokens",
        )


def _each(samples: Any, what: str) -> Iterator[Any]:
    if isinstance(samples, (str, bytes, Mapping)) or not isinstance(samples, Iterable):
        raise ConfigError(
            f"the {what} must be one list, vector or tensor for each sample, or a column of a data set; got "
            f"{type(samples).__name__}"
        )
    return iter(samples)
