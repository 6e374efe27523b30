"""The language-model head at labeled positions: target log-probabilities and entropies, a chunk at a time.

A row of T tokens with L labeled ones costs L rows of logits, and only one chunk of them is in memory at a time: with
more than one chunk, each chunk's logits are recomputed in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import final

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from vlmpack.context_parallel.collectives import Collectives
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
        nothing = hidden.float().sum() * 0 + _own(head(hidden[:, :1])).float().sum() * 0
        return [nothing.expand(0)] * (2 if scoring.entropy else 1)
    scores = scores_by_chunk(hidden[0].index_select(0, index), targets, head, chunk=chunk, scoring=scoring)
    return [each.clone() for each in scores.unbind(-1)] if scoring.entropy else [scores]  # FSDP2 warns about views


def in_one_call(
    head: nn.Module, score: Callable[[Head, torch.Tensor], list[torch.Tensor]], hidden: torch.Tensor
) -> list[torch.Tensor]:
    """Return `score(head, hidden)` from one call of a head that FSDP2 shards by itself.

    FSDP2 exchanges the weights and gradients of a module at each call. With a call for each chunk, ranks with other
    numbers of targets would wait for each other forever.
    """
    own = vars(head).get("forward")
    head.forward = partial(score, head.forward)
    try:
        return head(hidden)
    finally:
        del head.forward
        if own is not None:
            head.forward = own


def target_logprobs(hidden_LD: torch.Tensor, targets_L: torch.Tensor, head: Head, *, chunk: int) -> torch.Tensor:
    """Return float32 [L]: the log-probability of each target.

    Args:
        hidden_LD: final hidden states at labeled positions.
        targets_L: int64 ids, none of them -100.
        head: maps hidden states [l, D] to logits [l, V].
        chunk: rows of logits in memory at a time.
    """
    return scores_by_chunk(hidden_LD, targets_L, head, chunk=chunk, scoring=Scoring())


def entropies(logits_LV: torch.Tensor) -> torch.Tensor:
    """Return float32 [L]: the entropy (nats) of each row's softmax, logsumexp(x) - Σ softmax(x) x."""
    return logits_LV.logsumexp(-1) - (logits_LV.softmax(-1) * logits_LV).sum(-1)


def scores_by_chunk(
    hidden_LD: torch.Tensor, targets_L: torch.Tensor, head: Head, *, chunk: int, scoring: Scoring
) -> torch.Tensor:
    """Return the log-probability of each target, [L], or with its entropy, [L, 2], a chunk of logits at a time."""
    pieces = list(zip(hidden_LD.split(chunk), targets_L.split(chunk), strict=True))
    if len(pieces) == 1:
        return _scores(*pieces[0], head, scoring)
    # checkpoint() restores the random state, because an adapter on the head may have dropout.
    return torch.cat([checkpoint(_scores, *piece, head, scoring, use_reentrant=False) for piece in pieces])


def _scores(hidden_lD: torch.Tensor, targets_l: torch.Tensor, head: Head, scoring: Scoring) -> torch.Tensor:
    """Score one chunk, in float32, as Hugging Face models compute their cross-entropy."""
    logits_lV = head(hidden_lD)
    if isinstance(logits_lV, DTensor) and not (len(logits_lV.placements) == 1 and logits_lV.placements[0].is_shard(1)):
        logits_lV = logits_lV.full_tensor()
    own_lv = _own(logits_lV).float()
    own_lv = own_lv if scoring.temperature == 1 else own_lv / scoring.temperature
    if isinstance(logits_lV, DTensor):
        return _scores_of_shards(own_lv, targets_l, logits_lV, scoring)
    if not scoring.entropy:
        return -F.cross_entropy(own_lv, targets_l, reduction="none")
    # Not `cross_entropy`: Liger's replacement overwrites the logits.
    target_l = own_lv.gather(-1, targets_l[:, None])[:, 0]
    return torch.stack([target_l - own_lv.logsumexp(-1), entropies(own_lv)], -1)


# ---------------------------------------------------------------------- logits divided over the vocabulary
#
# Vocabulary-parallel cross-entropy (Shoeybi et al., 2019, Megatron-LM, section 3). Each of R ranks has the logits of
# v = V / R ids. Of each target, ranks exchange their largest logit, then their sum of exponentials, the target's logit
# (0 where another rank has it) and for the entropy Σ exp(x) x: three or four numbers in place of V.


def _own(logits_lV: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the logits, [l, v], or all of them if they are not divided."""
    return logits_lV.to_local() if isinstance(logits_lV, DTensor) else logits_lV


def _scores_of_shards(
    own_lv: torch.Tensor, targets_l: torch.Tensor, logits_lV: DTensor, scoring: Scoring
) -> torch.Tensor:
    ranks, width = Collectives(logits_lV.device_mesh.get_group()), own_lv.shape[-1]
    greatest_l = own_lv.detach().amax(-1)
    ranks.all_reduce_(greatest_l, "vocabulary", dist.ReduceOp.MAX)
    own_lv = own_lv - greatest_l[:, None]
    exp_lv = own_lv.exp()
    place_l = targets_l - ranks.rank * -(-logits_lV.shape[-1] // ranks.size)  # the last rank may have fewer ids
    target_l = own_lv.gather(-1, place_l.clamp(0, width - 1)[:, None])[:, 0]
    terms = [exp_lv.sum(-1), target_l.where((place_l >= 0) & (place_l < width), 0)]
    terms += [(exp_lv * own_lv).sum(-1)] if scoring.entropy else []
    total_l, target_l, *weighted_l = ranks.all_reduce(torch.stack(terms), "vocabulary")
    logprob_l = target_l - total_l.log()
    return torch.stack([logprob_l, total_l.log() - weighted_l[0] / total_l], -1) if scoring.entropy else logprob_l
