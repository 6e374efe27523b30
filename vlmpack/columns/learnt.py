"""What the columns of a sample say is not to be learnt: padding, and prompts.

input_ids          5    6    7    8    0
attention_mask     1    1    1    1    0       the last token is padding
loss_mask          0    0    1    1    0       or completion_mask, assistant_masks (TRL's)
labels          -100 -100    7    8            what both come to
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vlmpack.columns.samples import IGNORE, Samples, token_ids_of, vector
from vlmpack.errors import ConfigError, SampleError

MASKS = ("loss_mask", "completion_mask", "assistant_masks")
"""Columns of 0 and 1, not shifted: which tokens are learnt."""

LEARNT = ("labels", *MASKS)
"""Columns that say what is learnt; a sample has one of them, or none: all of it is learnt."""


def learnt_column(sample: Mapping[str, Any], index: int) -> str | None:
    """The column that says what of a sample is learnt; None: it has none.

    Raises:
        SampleError: several columns say so.
    """
    found = [name for name in LEARNT if name in sample and sample[name] is not None]
    if len(found) > 1:
        raise SampleError(
            f"has {' and '.join(found)}, and each says what is to be learnt; keep one of them",
            index=index,
            reason="bad_tokens",
        )
    return found[0] if found else None


def real_tokens(mask: np.ndarray, index: int) -> int:
    """How many tokens of a sample or row are no padding, by its `attention_mask`.

    Raises:
        SampleError: the mask holds other numbers than 0 and 1, or there is padding before a token.
    """
    real = int(np.count_nonzero(mask))
    if not (mask[:real] == 1).all():
        meaning = "1 on tokens and 0 on padding; which tokens belong together is told by seq_lengths"
        _check_zeros_and_ones(mask, "attention_mask", meaning, index)
        raise SampleError(
            "has an attention_mask whose ones are not one run at the start; pad on the right",
            index=index,
            reason="bad_tokens",
        )
    return real


def masked_labels(input_ids: np.ndarray, mask: np.ndarray, name: str, index: int) -> np.ndarray:
    """The ids where the mask is 1, and -100 where it is 0.

    Raises:
        SampleError: the mask holds other numbers.
    """
    _check_zeros_and_ones(mask, name, "1 on tokens that are learnt and 0 on others", index)
    return np.where(mask, input_ids, np.int32(IGNORE))


def read_batch(batch: Sequence[Any]) -> Samples:
    """The samples of a batch: token ids, or dictionaries that hold them as `input_ids`, with columns beside them.

    Raises:
        SampleError: a sample that is no vector of token ids, or whose columns do not fit together; names it.
        ConfigError: some samples say what is to be learnt, and others do not, or do so by another column.
    """
    token_ids, given, names = [], [], []
    for index, sample in enumerate(batch):
        ids = token_ids_of(sample, index)
        if isinstance(sample, Mapping):
            name = learnt_column(sample, index)
            column = None if name is None else sample[name]
            if sample.get("attention_mask") is not None:
                ids, column = _without_padding(ids, column, name or "", sample["attention_mask"], index)
            if name is not None:
                names.append(name)
                given.append(column)
        token_ids.append(ids)
    if not names:
        return Samples.read(token_ids)
    _check_alike(names, len(batch))
    return Samples.read(token_ids, **{"labels" if names[0] == "labels" else "loss_mask": given})


def _without_padding(ids: Any, column: Any, name: str, mask: Any, index: int) -> tuple[np.ndarray, np.ndarray | None]:
    """(ids, what is said of them) without padding."""
    ids, mask = vector(ids, "input_ids", index), vector(mask, "attention_mask", index)
    beside = {"attention_mask": mask}
    if column is not None:
        column = beside[name] = vector(column, name, index)
    for what, values in beside.items():
        if len(values) != len(ids):
            raise SampleError(
                f"has {len(ids)} input_ids, but {len(values)} of {what}; give one for each token",
                index=index,
                reason="length_mismatch",
            )
    real = real_tokens(mask, index)
    return ids[:real], None if column is None else column[:real]


def _check_alike(names: Sequence[str], samples: int) -> None:
    counts = Counter(names)
    if counts[names[0]] == samples:
        return
    if len(counts) > 1:
        seen = ", ".join(f"{count} of {samples} samples have {name}" for name, count in counts.items())
        raise ConfigError(f"{seen}; say by one of them what is to be learnt, in all samples of a batch")
    raise ConfigError(f"{len(names)} of {samples} samples have {names[0]}; give {names[0]} for all, or for none")


def _check_zeros_and_ones(mask: np.ndarray, name: str, meaning: str, index: int) -> None:
    if not 0 <= mask.min(initial=0) <= mask.max(initial=0) <= 1:
        other = mask[(mask != 0) & (mask != 1)][0]
        raise SampleError(f"has {other} in {name}, which is {meaning}", index=index, reason="bad_tokens")
