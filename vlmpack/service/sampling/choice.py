"""Choose a token, greedily or with a seed, and tell whether rounding could have changed the choice.

The chosen token has the largest `logit + temperature * noise` (Gumbel-max: Gumbel, 1954; Maddison et al., 2014), so it
follows the distribution softmax(logit / temperature). The noise of a token is a hash of the sequence's seed, the number
of tokens sampled so far, and the token's id. So it does not depend on anything that runs at the same time.

The last digits of a sequence's logits depend on the other sequences in the batch. If every logit is off by at most `e`,
the choice is certain if the winner leads by more than `2 e` and survives top-k and top-p whatever the errors are.
Otherwise `Choice.is_sure` is False, and the caller has to decide.

    z        5.1    5.0999   4.2   1.3           top_k = 1, e = 0.001: either of the first two may be the largest
    surely in    -      -      -     -
    perhaps in   yes    yes    -     -           a winner that is not surely in is not sure

B sequences, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from vlmpack.service.wire.messages import SamplingParams


@final
@dataclass(frozen=True, kw_only=True)
class Draw:
    """A token to choose."""

    params: SamplingParams
    """Sampling settings of the sequence."""
    seed: int
    """Seed of the sequence."""
    place: int
    """Number of tokens sampled before."""
    top: int = 0
    """Number of most likely tokens to return as well."""


@final
@dataclass(frozen=True, kw_only=True)
class Choice:
    """A chosen token."""

    token: int
    """Id of the token."""
    logprob: float
    """Log-probability under the full distribution."""
    is_sure: bool
    """Whether all logits within the rounding error give the same token."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens and their log-probabilities."""


@torch.no_grad()
def choose(
    logits_BV: torch.Tensor, draws: Sequence[Draw], *, rounding: float, forbidden: Sequence[int] = ()
) -> list[Choice]:
    """Choose one token for each sequence.

    Args:
        logits_BV: logits of the model.
        draws: what to choose for each sequence.
        rounding: largest error of a logit, as a fraction of the largest absolute logit; 0: the logits are exact.
        forbidden: ids that are never chosen.

    Returns:
        The choices. A log-probability that is not finite means that the logits are not finite.
    """
    if logits_BV.device.type != "cuda":  # the same numbers on all other devices, and float64
        logits_BV = logits_BV.cpu()
    logits_BV = logits_BV.float()
    error_B = rounding * logits_BV.abs().amax(1).double()
    logprobs_BV = logits_BV.log_softmax(1)
    exact_BV = logits_BV.double()
    exact_BV[:, list(forbidden)] = -torch.inf
    scores_BV = exact_BV + _noise(draws, logits_BV.shape[1], logits_BV.device)
    scores_BV[:, list(forbidden)] = -torch.inf  # noise times a huge temperature is infinite too
    sure_B = torch.ones_like(error_B, dtype=torch.bool)
    limits: dict[int, torch.Tensor] = {}
    for row, draw in enumerate(draws):
        if draw.params.temperature and (draw.params.top_k > 0 or draw.params.top_p < 1):
            sure_V, perhaps_V = kept(exact_BV[row], draw.params, error=float(error_B[row]))
            scores_BV[row].masked_fill_(~perhaps_V, -torch.inf)
            limits[row] = sure_V
    token_B = scores_BV.argmax(1)  # the first of equal scores
    best = scores_BV.topk(min(2, scores_BV.shape[1]), dim=1).values
    for row, sure_V in limits.items():
        sure_B[row] = sure_V[token_B[row]]
    if rounding:
        sure_B &= best[:, 0] - best[:, -1] > 2 * error_B
    else:
        sure_B.fill_(True)
    logprob_B = logprobs_BV.gather(1, token_B[:, None])[:, 0]
    columns = torch.stack((token_B.double(), logprob_B.double(), sure_B.double())).tolist()  # one host-device sync
    top = max(draw.top for draw in draws)
    likeliest: Sequence[Any] = [((), ())] * len(draws)
    if top:
        values_BK, ids_BK = logprobs_BV.topk(top)
        likeliest = [*zip(ids_BK.tolist(), values_BK.tolist(), strict=True)]
    return [
        Choice(token=int(t), logprob=p, is_sure=bool(s), top=tuple(zip(*best, strict=True))[: draw.top])
        for draw, best, t, p, s in zip(draws, likeliest, *columns, strict=True)
    ]


# ---------------------------------------------------------------------- what top-k and top-p leave


def kept(logits_V: torch.Tensor, params: SamplingParams, *, error: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tokens top-k followed by top-p surely keeps, and which it perhaps keeps: bool [V] each.

    Top-k keeps the k most likely tokens. Of these, top-p keeps the smallest set of most likely tokens whose probability
    is at least `top_p`. Of equally likely tokens, the lower ids come first.

    Args:
        logits_V: float64.
        params: settings with a nonzero temperature.
        error: largest error of a logit; 0: both results are equal.
    """
    sorted_V, order_V = logits_V.sort(descending=True, stable=True)
    sorted_V, error = (sorted_V - sorted_V[0]) / params.temperature, error / params.temperature
    sure, perhaps = _top_k(sorted_V, params.top_k, error)
    sure_V, perhaps_V = _top_p(sorted_V, params.top_p, error, sure=sure, perhaps=perhaps)
    back = order_V.argsort()
    return sure_V[back], perhaps_V[back]


def _top_k(sorted_V: torch.Tensor, k: int, error: float) -> tuple[int, int]:
    """Count the leading tokens that are surely in the top k, and those that perhaps are."""
    size = len(sorted_V)
    if not 0 < k < size:
        return size, size
    if not error:
        return k, k
    sure = int((sorted_V > sorted_V[k] + 2 * error).sum())
    return sure, int((sorted_V >= sorted_V[k - 1] - 2 * error).sum())


_SUMS = 1e-9
"""Generous bound of the error of sums of probabilities in float64."""


def _top_p(
    sorted_V: torch.Tensor, p: float, error: float, *, sure: int, perhaps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tokens surely have less than probability `p` above them, and which perhaps do.

    Each weight exp(z) is off by a factor of at most exp(error), and only tokens within 2 * error of each other can
    swap.
    """
    places_V = torch.arange(len(sorted_V), device=sorted_V.device)
    if p >= 1:
        return places_V < sure, places_V < perhaps
    weight_V = sorted_V.exp()
    sums_V = torch.cat((weight_V.new_zeros(1), weight_V.cumsum(0)))
    if not error:
        above_V = sums_V[:-1] / sums_V[sure]
        inside_V = (above_V < p) & (places_V < sure)
        return inside_V, inside_V
    rising_V = -sorted_V
    # Number of tokens with z >= z_i - 2 error, and with z > z_i + 2 error.
    reach_V = torch.searchsorted(rising_V, rising_V + 2 * error, right=True).clamp(max=perhaps)
    clear_V = torch.searchsorted(rising_V, rising_V - 2 * error, right=False).clamp(max=sure)
    factor = math.exp(min(error, 300.0))  # finite, because 0 * inf is NaN
    most_V = (sums_V[reach_V] - weight_V).clamp(min=0) * factor
    below_V = (weight_V + (sums_V[sure] - sums_V[reach_V]).clamp(min=0)) / factor
    least_V = sums_V[clear_V] / factor
    others_V = (sums_V[perhaps] - sums_V[clear_V]) * factor
    sure_V = (most_V / (most_V + below_V) < p - _SUMS) & (places_V < sure)
    return sure_V, (least_V / (least_V + others_V) < p + _SUMS) & (places_V < perhaps)


# ---------------------------------------------------------------------- noise


def _signed(x: int) -> int:
    """Return the int64 number with the same bits."""
    x %= 2**64
    return x - 2**64 if x >= 2**63 else x


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FACTORS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))
_SHIFTS = (30, 27, 31)
_BITS = 52
"""Bits of a uniform number. With more bits, the largest number would round to 1."""


def _noise(draws: Sequence[Draw], size: int, device: torch.device) -> torch.Tensor:
    """Return Gumbel noise times temperature, float64 [B, V]; 0 for greedy sequences."""
    seed_B = torch.tensor([_signed(draw.seed + _GOLDEN) for draw in draws], device=device)
    place_B = torch.tensor([draw.place + 1 for draw in draws], device=device)
    key_B1 = _hashed(_hashed(seed_B) + place_B * _GOLDEN)[:, None]
    hashed_BV = _hashed(key_B1 + torch.arange(1, size + 1, device=device) * _GOLDEN)
    uniform_BV = (_logical_shift(hashed_BV, 64 - _BITS).double() + 0.5) * 2.0**-_BITS
    heat_B = torch.tensor([draw.params.temperature for draw in draws], dtype=torch.float64, device=device)
    return -(-uniform_BV.log()).log() * heat_B[:, None]


def _hashed(x: torch.Tensor) -> torch.Tensor:
    """Return the SplitMix64 finalizer (Steele, Lea and Flood, 2014) of int64 numbers. Products wrap around."""
    for shift, factor in zip(_SHIFTS[:2], _FACTORS, strict=True):
        x = (x ^ _logical_shift(x, shift)) * factor
    return x ^ _logical_shift(x, _SHIFTS[2])


def _logical_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right and fill with zeros, whatever the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
