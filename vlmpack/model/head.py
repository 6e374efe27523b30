"""The language-model head at labeled positions: target log-probabilities and entropies, a chunk at a time.

A row of T tokens with L labeled ones costs L rows of logits, and only one chunk of them is in memory at a time: with
more than one chunk, each chunk's logits are recomputed in the backward pass.
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
"""Maps hidden states [l, D] to logits [l, V]."""


@final
@dataclass(frozen=True, kw_only=True)
class Scoring:
    """What the head computes for each target."""

    temperature: float = 1.0
    """Divides the logits in log-probabilities, losses and entropies: the temperature that samples were drawn with."""
    entropy: bool = False
    """Also compute the entropy of the prediction."""

    def __post_init__(self) -> None:
        if not 0 < self.temperature < inf:
            raise ConfigError(
                f"temperature is {self.temperature!r}; it is a positive number, and 1 leaves logits alone"
            )


def target_positions(shift_labels: torch.Tensor, num_targets: int | None) -> torch.Tensor:
    """Return int64 [L]: the positions of the row that have a target.

    Args:
        shift_labels: [1, T].
        num_targets: L as counted on the host. None causes a host–device sync on an accelerator.

    Raises:
        LayoutError: the count is wrong (on an accelerator a device-side assertion fails instead, without a sync).
    """
    labeled = shift_labels[0] != IGNORE
    if num_targets is None:
        return labeled.nonzero()[:, 0]
    require(labeled.sum() == num_targets, _MISCOUNTED.format(num_targets), LayoutError)
    return torch.nonzero_static(labeled, size=num_targets)[:, 0]


_MISCOUNTED = (
    "the host counted {} targets but the row has another number; labels were changed after collating: "
    "set num_targets=None in the batch's metadata, or change labels before the collator"
)


def score_targets(
    hidden: torch.Tensor, index: torch.Tensor, targets: torch.Tensor, head: Head, *, chunk: int, scoring: Scoring
) -> list[torch.Tensor]:
    """Return the log-probability of each target, float32 [L], and on request the entropy of its prediction.

    Args:
        hidden: [1, t, D], final hidden states.
        index: int64 [L], the position that predicts each target.
        targets: int64 [L], target ids.
        head: maps hidden states to logits.
        chunk: rows of logits in memory at a time.
        scoring: temperature, and whether to compute entropies.
    """
    if index.numel() == 0:
        # No targets, but keep every parameter in the graph: other ranks may block on its gradient.
        nothing = hidden.float().sum() * 0 + head(hidden[:, :1]).float().sum() * 0
        return [nothing.expand(0)] * (2 if scoring.entropy else 1)
    hidden_LD = hidden[0].index_select(0, index)
    if scoring == Scoring():
        return [target_logprobs(hidden_LD, targets, head, chunk=chunk)]

    def scores(hidden_lD: torch.Tensor, targets_l: torch.Tensor, head: Head) -> torch.Tensor:
        logits_lV = head(hidden_lD).float() / scoring.temperature
        if not scoring.entropy:
            return -F.cross_entropy(logits_lV, targets_l, reduction="none")[:, None]
        # Not `cross_entropy`: Liger's replacement overwrites the logits.
        target_l = logits_lV.gather(-1, targets_l[:, None])[:, 0]
        return torch.stack([target_l - logits_lV.logsumexp(-1), entropies(logits_lV)], -1)

    return list(_by_chunks(scores, hidden_LD, targets, head, chunk).unbind(-1))


def target_logprobs(hidden_LD: torch.Tensor, targets_L: torch.Tensor, head: Head, *, chunk: int) -> torch.Tensor:
    """Return float32 [L]: the log-probability of each target.

    Args:
        hidden_LD: final hidden states at labeled positions.
        targets_L: int64 ids, none of them -100.
        head: maps hidden states [l, D] to logits [l, V].
        chunk: rows of logits in memory at a time.
    """
    return _by_chunks(_logprobs, hidden_LD, targets_L, head, chunk)


def entropies(logits_LV: torch.Tensor) -> torch.Tensor:
    """Return float32 [L]: the entropy (nats) of each row's softmax, logsumexp(x) - Σ softmax(x) x."""
    return logits_LV.logsumexp(-1) - (logits_LV.softmax(-1) * logits_LV).sum(-1)


def _logprobs(hidden_LD: torch.Tensor, targets_L: torch.Tensor, head: Head) -> torch.Tensor:
    """Compute log-probabilities in float32, as Hugging Face models compute their cross-entropy."""
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
    # checkpoint() restores the random state, because an adapter on the head may have dropout.
    return torch.cat([checkpoint(score, hidden, targets, head, use_reentrant=False) for hidden, targets in pieces])
