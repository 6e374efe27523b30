"""The language-model head at labeled positions: log-probabilities of targets and of candidates, and entropies.

A row of T tokens with L labeled ones costs L rows of logits, and only one chunk of them is in memory at a time: with
more than one chunk, each chunk's logits are recomputed in the backward pass. K candidates are further ids of a
position, whose log-probabilities cost no further logits. N = 1 + K ids of a position: its target, then its candidates.
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
    rest: bool = False
    """Also compute the log-probability of all ids together that are not among the candidates."""

    def __post_init__(self) -> None:
        if not isinstance(self.temperature, int | float) or not 0 < self.temperature < inf:
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
    hidden: torch.Tensor,
    index: torch.Tensor,
    targets: torch.Tensor,
    head: Head,
    *,
    chunk: int,
    scoring: Scoring,
    candidates: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Return the log-probability of each target, float32 [L]; then, on request, of the candidates, and the entropy.

    Args:
        hidden: [1, t, D], final hidden states.
        index: int64 [L], the position that predicts each target.
        targets: int64 [L], target ids.
        head: maps hidden states to logits.
        chunk: rows of logits in memory at a time.
        scoring: temperature, and whether to compute entropies and the rest.
        candidates: int64 [L, K], further ids of each position. Their log-probabilities are float32 [L, K], or with
            `scoring.rest` [L, K + 1].
    """
    ids_LN = targets[:, None] if candidates is None else torch.cat([targets[:, None], candidates], 1)
    widths = [1, ids_LN.shape[1] - 1 + scoring.rest, int(scoring.entropy)]
    if index.numel() == 0:
        # No targets, but keep every parameter in the graph: other ranks may block on its gradient.
        nothing = hidden.float().sum() * 0 + _own(head(hidden[:, :1])).float().sum() * 0
        scores = nothing.expand(0, sum(widths))
    else:
        scores = scores_by_chunk(hidden[0].index_select(0, index), ids_LN, head, chunk=chunk, scoring=scoring)
    logprobs, of_candidates, entropy = scores.split(widths, -1)
    parts = [logprobs[:, 0], *([of_candidates] if widths[1] else []), *([entropy[:, 0]] if scoring.entropy else [])]
    return [each.clone() for each in parts]  # FSDP2 warns about views


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


def target_logprobs(hidden_LD: torch.Tensor, targets: torch.Tensor, head: Head, *, chunk: int) -> torch.Tensor:
    """Return the log-probability of each target, float32, in the shape of the targets.

    Args:
        hidden_LD: final hidden states at labeled positions.
        targets: int64 ids, none of them -100: [L], or [L, K] for several of each position.
        head: maps hidden states [l, D] to logits [l, V].
        chunk: rows of logits in memory at a time.
    """
    ids_LN = targets if targets.ndim == 2 else targets[:, None]
    return scores_by_chunk(hidden_LD, ids_LN, head, chunk=chunk, scoring=Scoring()).view(targets.shape)


def entropies(logits_LV: torch.Tensor) -> torch.Tensor:
    """Return float32 [L]: the entropy (nats) of each row's softmax, logsumexp(x) - Σ softmax(x) x."""
    return logits_LV.logsumexp(-1) - (logits_LV.softmax(-1) * logits_LV).sum(-1)


def scores_by_chunk(
    hidden_LD: torch.Tensor, ids_LN: torch.Tensor, head: Head, *, chunk: int, scoring: Scoring
) -> torch.Tensor:
    """Return the log-probabilities of N ids of each position, then on request that of the rest (all ids but the last N
    - 1) and the entropy: float32 [L, N to N + 2], a chunk of logits at a time."""
    pieces = list(zip(hidden_LD.split(chunk), ids_LN.split(chunk), strict=True))
    if len(pieces) == 1:
        return _scores(*pieces[0], head, scoring)
    # checkpoint() restores the random state, because an adapter on the head may have dropout.
    return torch.cat([checkpoint(_scores, *piece, head, scoring, use_reentrant=False) for piece in pieces])


def _scores(hidden_lD: torch.Tensor, ids_lN: torch.Tensor, head: Head, scoring: Scoring) -> torch.Tensor:
    """Score one chunk, in float32, as Hugging Face models compute their cross-entropy."""
    logits_lV = head(hidden_lD)
    if isinstance(logits_lV, DTensor) and not (len(logits_lV.placements) == 1 and logits_lV.placements[0].is_shard(1)):
        logits_lV = logits_lV.full_tensor()
    own_lv = _own(logits_lV).float()
    own_lv = own_lv if scoring.temperature == 1 else own_lv / scoring.temperature
    if isinstance(logits_lV, DTensor):
        return _scores_of_shards(own_lv, ids_lN, logits_lV, scoring)
    if ids_lN.shape[1] == 1 and not scoring.entropy:
        return -F.cross_entropy(own_lv, ids_lN[:, 0], reduction="none")[:, None]
    # Not `cross_entropy`: Liger's replacement overwrites the logits.
    total_l1 = own_lv.logsumexp(-1, keepdim=True)
    scores = [own_lv.gather(-1, ids_lN) - total_l1]
    if scoring.rest:
        scores.append(own_lv.scatter(-1, ids_lN[:, 1:], -inf).logsumexp(-1, keepdim=True) - total_l1)
    return torch.cat([*scores, entropies(own_lv)[:, None]] if scoring.entropy else scores, -1)


# ---------------------------------------------------------------------- logits divided over the vocabulary
#
# Vocabulary-parallel cross-entropy (Shoeybi et al., 2019, Megatron-LM, section 3). Each of R ranks has the logits of
# v = V / R ids. Of each position, ranks exchange their largest logit, then their sum of exponentials, the logits of the
# N ids (0 where another rank has one), for the rest the sum without candidates, and for the entropy Σ exp(x) x.


def _own(logits_lV: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the logits, [l, v], or all of them if they are not divided."""
    return logits_lV.to_local() if isinstance(logits_lV, DTensor) else logits_lV


def _scores_of_shards(own_lv: torch.Tensor, ids_lN: torch.Tensor, logits_lV: DTensor, scoring: Scoring) -> torch.Tensor:
    ranks, width = Collectives(logits_lV.device_mesh.get_group()), own_lv.shape[-1]
    greatest_l = own_lv.detach().amax(-1)
    ranks.all_reduce_(greatest_l, "vocabulary", dist.ReduceOp.MAX)
    own_lv = own_lv - greatest_l[:, None]
    exp_lv = own_lv.exp()
    place_lN = ids_lN - ranks.rank * -(-logits_lV.shape[-1] // ranks.size)  # the last rank may have fewer ids
    is_own_lN = (place_lN >= 0) & (place_lN < width)
    terms = [exp_lv.sum(-1, keepdim=True), own_lv.gather(-1, place_lN.clamp(0, width - 1)).where(is_own_lN, 0)]
    if scoring.rest:  # the ids of other ranks go to a further column, which is dropped
        place_lK = place_lN.where(is_own_lN, width)[:, 1:]
        terms.append(F.pad(exp_lv, (0, 1)).scatter(-1, place_lK, 0)[:, :width].sum(-1, keepdim=True))
    terms += [(exp_lv * own_lv).sum(-1, keepdim=True)] if scoring.entropy else []
    total_l1, logits_lN, *others = ranks.all_reduce(torch.cat(terms, -1), "vocabulary").split(
        [each.shape[1] for each in terms], -1
    )
    scores = [logits_lN - total_l1.log()]
    scores += [others[0].log() - total_l1.log()] if scoring.rest else []
    scores += [total_l1.log() - others[-1] / total_l1] if scoring.entropy else []
    return torch.cat(scores, -1)
