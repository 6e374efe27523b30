"""Distillation from a teacher's K likeliest ids of each target, which travel with the tokens (`TEACHER`).

p is the teacher's distribution, q the model's. With a tail, all ids beyond the K count as one more entry; without, the
K entries of p, and of q, are divided by their sum.

    divergence of a target    Σ p (log p - log q) over the entries

A target whose K ids are all `NO_ENTRY` has no teacher: its loss is cross-entropy. So samples with and without a teacher
share a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch

from vlmpack.errors import ConfigError, LayoutError
from vlmpack.layout.batch import MOST_MASS, NO_ENTRY, NO_LOGPROBS, TEACHER, check_is_tensor, whole_numbers
from vlmpack.layout.device import require
from vlmpack.layout.row import IGNORE, PackedRow, without_successor


@final
@dataclass(frozen=True, kw_only=True)
class Distillation:
    """The loss of a target that has a teacher's log-probabilities."""

    weight: float = 1.0
    """Share of the divergence from the teacher; the rest of the loss is cross-entropy."""
    tail: bool = True
    """Count all other ids together as one more entry. False: divide the K probabilities by their sum."""

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1:
            raise ConfigError(f"distillation weight is {self.weight!r}; it is a share, from 0 to 1")

    def losses(self, topk_L: torch.Tensor, teacher_LK: torch.Tensor, cross_entropies_L: torch.Tensor) -> torch.Tensor:
        """Return the loss of each target, float32 [L]; see `topk_divergence`."""
        divergences_L = topk_divergence(topk_L, teacher_LK, tail=self.tail)
        return divergences_L if self.weight == 1 else cross_entropies_L.lerp(divergences_L, self.weight)


def topk_divergence(topk_logprobs: torch.Tensor, teacher_logprobs: torch.Tensor, *, tail: bool = True) -> torch.Tensor:
    """Return the forward KL divergence of the model from its teacher, float32 [L] in nats.

    Args:
        topk_logprobs: [L, K + 1], the model's log-probabilities of the teacher's ids, and of all other ids together
            (`StepResult.topk_logprobs`).
        teacher_logprobs: [L, K], the teacher's.
        tail: see `Distillation`.
    """
    p_LK, log_q = teacher_logprobs.float().exp(), topk_logprobs
    if tail:
        p = torch.cat([p_LK, (1 - p_LK.sum(-1, keepdim=True)).clamp(min=0)], -1)
    else:
        p, log_q = p_LK / p_LK.sum(-1, keepdim=True), log_q[:, :-1].log_softmax(-1)
    return (torch.xlogy(p, p) - p * log_q).sum(-1)


@final
class Teacher:
    """A teacher's entries for the targets of a row.

    Raises:
        LayoutError: the columns are no K entries for each token; or those of a target are no log-probabilities, ids
            outside the vocabulary or the same id twice. Names the sample (on an accelerator, asynchronous assertions).
    """

    def __init__(self, row: PackedRow, index_L: torch.Tensor, *, vocab_size: int) -> None:
        """`index_L`: int64 [L], the positions of the row that predict its targets."""
        ids_K1T, logprobs_K1T = (row.extras.get(name) for name in TEACHER)
        if ids_K1T is None:
            raise LayoutError(f"the row has {TEACHER[1]} but no {TEACHER[0]}: give the ids that they belong to")
        ids_K1T = whole_numbers(ids_K1T, TEACHER[0])
        if ids_K1T.shape[1:] != row.input_ids.shape or not 0 < len(ids_K1T) < vocab_size:
            seen = list(ids_K1T.shape)
            raise LayoutError(f"{TEACHER[0]} is {seen}; give K ids of each token, [K, 1, T], K below {vocab_size}")
        self._row, self._index = row, index_L
        ids_TK = ids_K1T[:, 0].T
        has_entries_T1 = (ids_TK != NO_ENTRY).any(1, keepdim=True)
        anything_K = torch.arange(len(ids_K1T), device=ids_TK.device)  # scored, and not used
        self._ids_TK = ids_TK.where(has_entries_T1, anything_K)
        ends = without_successor(row.segments, 1, index_L.device)
        if row.shift_labels is not None:
            message = "the last token of a sample has a target, for which the row has no entries of the teacher"
            require((row.shift_labels[0].index_select(0, ends) == IGNORE).all(), message, LayoutError)
        self.has_entries = self._of(has_entries_T1, index_L)[:, 0]
        """bool [L]: whether each target has a teacher."""
        self.logprobs: torch.Tensor | None = None
        """float32 [L, K]: the teacher's log-probabilities; None: the row has only ids."""
        ids_LK = self.ids(index_L)
        is_id_LK = (ids_LK >= 0) & (ids_LK < vocab_size)
        self._check(is_id_LK.all(1), ids_LK, f"{TEACHER[0]} holds ids outside the vocabulary of {vocab_size}")
        self._check((ids_LK.sort(1).values.diff(dim=1) != 0).all(1), ids_LK, f"{TEACHER[0]} holds an id twice")
        if logprobs_K1T is None:
            return
        check_is_tensor(logprobs_K1T, TEACHER[1])
        if logprobs_K1T.shape != ids_K1T.shape or not logprobs_K1T.is_floating_point():
            seen = f"{logprobs_K1T.dtype} {list(logprobs_K1T.shape)}"
            raise LayoutError(f"{TEACHER[1]} is {seen}; it is floats {list(ids_K1T.shape)}, as {TEACHER[0]}")
        even = -math.log(1 + len(ids_K1T))
        logprobs_TK = logprobs_K1T[:, 0].T.float().where(has_entries_T1, even)
        self.logprobs = self._of(logprobs_TK, index_L)
        sums_L = self.logprobs.exp().sum(1)
        self._check((sums_L > 0) & (sums_L < MOST_MASS), self.logprobs, NO_LOGPROBS)

    def ids(self, index_l: torch.Tensor) -> torch.Tensor:
        """Return int64 [l, K]: the teacher's ids for the targets that these positions of the row predict."""
        return self._of(self._ids_TK, index_l)

    @staticmethod
    def _of(column_TK: torch.Tensor, index_l: torch.Tensor) -> torch.Tensor:
        return column_TK.index_select(0, index_l + 1)

    def _check(self, is_right_L: torch.Tensor, seen_LK: torch.Tensor, fault: str) -> None:
        def where(target: int) -> str:
            at, segments = int(self._index[target]) + 1, self._row.segments
            sample, names = int(segments.seq_idx()[at]), self._row.known_metadata.sample_ids
            named = repr(names[sample]) if names else sample
            return f"sample {named}, token {at - segments.stride[sample]}, {seen_LK[target].tolist()}"

        require(is_right_L, fault, LayoutError, where=where)
