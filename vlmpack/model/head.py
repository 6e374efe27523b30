"""The language-model head on labelled positions: the log-probability of each target, and entropies, a chunk at a time.

A row of T tokens with L labelled ones costs L rows of logits, of which one chunk is alive at a time: each chunk's
logits are computed again in the backward pass when there is more than one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import final

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from vlmpack.errors import ConfigError, LayoutError
from vlmpack.layout.device import require
from vlmpack.layout.row import IGNORE

Head = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states [l, D] to logits [l, V]."""


@final
@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Scores that the head gives each target."""

    temperature: float = 1.0
    """Divisor of the logits, in log-probabilities, losses and entropies, as samples were drawn with it."""
    entropy: bool = False
    """Also compute the entropy of the prediction."""

    def __post_init__(self) -> None:
        if not 0 < self.temperature < inf:
            raise ConfigError(
                f"temperature is {self.temperature!r}; it is a positive number, and 1 leaves logits alone"
            )


def target_positions(shift_labels: torch.Tensor, num_targets: int | None) -> torch.Tensor:
    """int64 [L]: where the row has a target.

    Args:
        shift_labels: [1, T].
        num_targets: L as counted on the host. Without it an accelerator is read: a host–device sync.

    Raises:
        LayoutError: the count is wrong (an accelerator asserts the same, without a sync).
    """
    labelled = shift_labels[0] != IGNORE
    if num_targets is None:
        return labelled.nonzero()[:, 0]
    require(labelled.sum() == num_targets, _MISCOUNTED.format(num_targets), LayoutError)
    return torch.nonzero_static(labelled, size=num_targets)[:, 0]


_MISCOUNTED = (
    "the host counted {} targets but the row has another number; labels were changed after collating: "
    "set num_targets=None in the batch's metadata, or change labels before the collator"
)


def score_targets(
    hidden: torch.Tensor, index: torch.Tensor, targets: torch.Tensor, head: Head, *, chunk: int, scoring: Scoring
) -> list[torch.Tensor]:
    """Return the log-probability of each target, float32 [L], and the entropy of its prediction where it is asked for.

    Args:
        hidden: [1, t, D], final hidden states.
        index: int64 [L], the position that predicts each target.
        targets: int64 [L], their ids.
        head: hidden states to logits.
        chunk: rows of logits alive at a time.
        scoring: temperature and entropy.
    """
    if index.numel() == 0:
        # Nothing to learn, but every parameter keeps its place in the graph: other ranks may block on its gradient.
        nothing = hidden.float().sum() * 0 + head(hidden[:, :1]).float().sum() * 0
        return [nothing.expand(0)] * (2 if scoring.entropy else 1)
    hidden_LD = hidden[0].index_select(0, index)
    if scoring == Scoring():
        return [target_logprobs(hidden_LD, targets, head, chunk=chunk)]

    def scores(hidden_lD: torch.Tensor, targets_l: torch.Tensor, head: Head) -> torch.Tensor:
        logits_lV = head(hidden_lD).float() / scoring.temperature
        if not scoring.entropy:
            return -F.cross_entropy(logits_lV, targets_l, reduction="none")[:, None]
        # Without `cross_entropy`: Liger's, in its place, overwrites the logits.
        target_l = logits_lV.gather(-1, targets_l[:, None])[:, 0]
        return torch.stack([target_l - logits_lV.logsumexp(-1), entropies(logits_lV)], -1)

    return list(_by_chunks(scores, hidden_LD, targets, head, chunk).unbind(-1))


def target_logprobs(hidden_LD: torch.Tensor, targets_L: torch.Tensor, head: Head, *, chunk: int) -> torch.Tensor:
    """float32 [L]: log-probability of each target.

    Args:
        hidden_LD: final hidden states at labelled positions.
        targets_L: int64 ids, none of them -100.
        head: hidden states to logits, [l, D] to [l, V].
        chunk: rows of logits alive at a time.
    """
    return _by_chunks(_logprobs, hidden_LD, targets_L, head, chunk)


def entropies(logits_LV: torch.Tensor) -> torch.Tensor:
    """float32 [L]: entropy (nats) of each row's softmax, logsumexp(x) - Σ softmax(x) x."""
    return logits_LV.logsumexp(-1) - (logits_LV.softmax(-1) * logits_LV).sum(-1)


def _logprobs(hidden_LD: torch.Tensor, targets_L: torch.Tensor, head: Head) -> torch.Tensor:
    """Cross-entropy is taken in float32, as Hugging Face models take theirs."""
    return -F.cross_entropy(head(hidden_LD).float(), targets_L, reduction="none")


def _by_chunks(
    score: Callable[[torch.Tensor, torch.Tensor, Head], torch.Tensor],
    hidden_LD: torch.Tensor,
    targets_L: torch.Tensor,
    head: Head,
    chunk: int,
) -> torch.Tensor:
    """Score [L] targets, a chunk of logits at a time."""
    pieces = list(zip(hidden_LD.split(chunk), targets_L.split(chunk), strict=True))
    if len(pieces) == 1:
        return score(*pieces[0], head)
    # Random states are kept: an adapter on the head may have dropout.
    return torch.cat([checkpoint(score, hidden, targets, head, use_reentrant=False) for hidden, targets in pieces])
