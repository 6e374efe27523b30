"""The losses of a training request: inputs, settings, and the loss of each token.

Every loss is a sum over the tokens of all datums, never a mean. lp: log-probability of a target, with its gradient; q:
`logprobs`, the log-probability under the policy that sampled the target; A: `advantages`; w: `weights`, 1 by default; r
= exp(lp - q); s: exp(mean of lp - q over the tokens of a datum that `sequence_ratio_mask` marks), with the gradient of
the token's lp. The bounds of clip are settings of the request, or inputs with one value per token.

    cross_entropy          -w lp                        a token may have K targets, [N, K], each with its weight
    importance_sampling    -w r A
    ppo                    -w min(r A, clip(r, low, high) A)
    cispo                  -w stop_gradient(clip(r, low, high)) lp A
    dro                    -w (lp A - beta / 2 (lp - q)^2)
    gspo                   -w min(s A, clip(s, low, high) A)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch

from vlmpack.errors import RequestError
from vlmpack.service.wire.messages import SparseMatrix

TARGETS = "target_tokens"
"""The input that every loss needs: the id that each token predicts."""

MOST_TARGETS = 256
"""Maximum number of targets of a token."""
LENGTHS = "lengths"
"""Key in the inputs of the number of targets of each datum, int64 [datums]."""

Inputs = Mapping[str, torch.Tensor]
Settings = Mapping[str, float]
TokenLosses = Callable[[torch.Tensor, Inputs, Settings], torch.Tensor]
"""Maps log-probabilities [n] of some datums, inputs [n] by name (with their lengths), and settings to the loss of each
token [n]. Weights are applied afterwards."""


def cross_entropy(lp: torch.Tensor, inputs: Inputs, settings: Settings) -> torch.Tensor:
    """Negative log-likelihood of the targets."""
    return -lp


def importance_sampling(lp: torch.Tensor, inputs: Inputs, settings: Settings) -> torch.Tensor:
    """Policy gradient with importance weights for the policy that sampled the tokens."""
    return -_ratio(lp, inputs) * inputs["advantages"]


def ppo(lp: torch.Tensor, inputs: Inputs, settings: Settings) -> torch.Tensor:
    """Clipped surrogate objective (Schulman et al., 2017, Proximal Policy Optimization, equation 7)."""
    return _clipped_objective(_ratio(lp, inputs), inputs)


def gspo(lp: torch.Tensor, inputs: Inputs, settings: Settings) -> torch.Tensor:
    """Clipped objective of a datum's ratio, with token gradients (Zheng et al., 2025, GSPO, equations 7 and 13)."""
    mask, lengths = (inputs["sequence_ratio_mask"] != 0).to(lp.dtype), inputs[LENGTHS]
    sums, counts = (
        torch.segment_reduce(x, "sum", lengths=lengths) for x in (mask * (lp.detach() - inputs["logprobs"]), mask)
    )
    mean = (sums / counts).repeat_interleave(lengths, output_size=len(lp))
    return _clipped_objective(torch.exp(mean + lp - lp.detach()), inputs)


def cispo(lp: torch.Tensor, inputs: Inputs, settings: Settings) -> torch.Tensor:
    """Clipped importance-sampling weights on every token (MiniMax, 2025, MiniMax-M1, equation 4)."""
    return -_clipped(_ratio(lp, inputs), inputs).detach() * lp * inputs["advantages"]


def dro(lp: torch.Tensor, inputs: Inputs, settings: Settings) -> torch.Tensor:
    """Direct reward optimization with a quadratic penalty (Richemond et al., 2024, Offline Regularised RL)."""
    distance = lp - inputs["logprobs"]
    return -(lp * inputs["advantages"] - settings["beta"] / 2 * distance**2)


def _ratio(lp: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return torch.exp(lp - inputs["logprobs"])


def _clipped(ratio: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return ratio.clamp(inputs["clip_low_threshold"], inputs["clip_high_threshold"])


def _clipped_objective(ratio: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, inputs) * advantages)


@final
@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss with its required inputs and its settings."""

    token_losses: TokenLosses
    """The loss of each token."""
    needs: tuple[str, ...] = ()
    """Inputs that every datum needs, besides the targets."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """Settings and their defaults."""


_RATED = ("logprobs", "advantages")
_CLIP = ("clip_low_threshold", "clip_high_threshold")

LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(token_losses=cross_entropy),
    "importance_sampling": Loss(token_losses=importance_sampling, needs=_RATED),
    "ppo": Loss(token_losses=ppo, needs=_RATED, settings=dict(zip(_CLIP, (0.8, 1.2), strict=True))),
    "cispo": Loss(token_losses=cispo, needs=_RATED, settings=dict(zip(_CLIP, (0.0, 4.0), strict=True))),
    "dro": Loss(token_losses=dro, needs=_RATED, settings={"beta": 0.05}),
    "gspo": Loss(
        token_losses=gspo,
        needs=(*_RATED, "sequence_ratio_mask"),
        settings=dict(zip(_CLIP, (0.9997, 1.0004), strict=True)),
    ),
}
"""The losses, by the name that clients send. GSPO's thresholds are those of its paper."""
REFUSED = {
    "stable_reinforce": "its formula is not published; use importance_sampling, ppo, cispo or gspo",
    "custom": "the client computes it; call forward_backward_custom",
}
"""Losses that the client knows but this service does not have, and what to use instead."""


@final
@dataclass(frozen=True, kw_only=True)
class BoundLoss:
    """A loss with the settings of one request."""

    name: str
    """Name of the loss."""
    settings: tuple[tuple[str, float], ...]
    """Value of every setting."""

    def __call__(self, logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """Return the weighted loss of each token, float32 [n].

        Args:
            logprobs: float32 [n].
            inputs: float32 [n] by name; must include `weights`, and `lengths` int64 [datums].
        """
        return inputs["weights"] * LOSSES[self.name].token_losses(logprobs, inputs, dict(self.settings))


def bind_loss(name: str, config: Mapping[str, float | str]) -> BoundLoss:
    """Check the name and the settings of a loss.

    Raises:
        RequestError: the loss or a setting is unknown, or a setting is not a finite number or out of range.
    """
    if name in REFUSED:
        raise RequestError(f"loss_fn {name}: {REFUSED[name]}")
    if name not in LOSSES:
        raise RequestError(f"loss_fn {name!r:.80} is not known here; use one of {', '.join(LOSSES)}")
    settings: dict[str, Any] = dict(LOSSES[name].settings)
    for key, value in config.items():
        if key not in settings:
            known = f"it has {', '.join(settings)}" if settings else "it has no settings"
            raise RequestError(f"loss_fn_config: {name} has no setting {key!r:.80}; {known}")
        if isinstance(value, str) or not math.isfinite(value):
            raise RequestError(f"loss_fn_config: {key} is {value!r:.80}; it has to be a finite number")
        settings[key] = float(value)
    if _CLIP[0] in settings:
        _check_thresholds("loss_fn_config", *(settings[key] for key in _CLIP))
    if settings.get("beta", 0.0) < 0:
        raise RequestError(f"loss_fn_config: beta is {settings['beta']:g}; it is 0 or a positive number")
    return BoundLoss(name=name, settings=tuple(settings.items()))


def _check_thresholds(place: str, low: float, high: float) -> None:
    if not 0 <= low <= high:
        remedy = "send bounds of the ratio itself, such as 0.8 and 1.2, the lower one at least 0"
        raise RequestError(f"{place}: thresholds are {low:g} and {high:g}; {remedy}")


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class LossInputs:
    """The checked loss inputs of a datum.

    The inputs have one value per token; with soft targets, one value per target with nonzero weight.
    """

    arrays: Mapping[str, np.ndarray]
    """[M] by name: `target_tokens` is int64, everything else float32. `weights` is always present, and so are the
    thresholds if the loss clips."""
    keys: np.ndarray | None = None
    """int64 [M]: token * K + index of the target; None: each token has one target, and M = N."""
    shape: tuple[int, ...] = ()
    """[N] or [N, K], the shape of the returned log-probabilities."""

    def unflatten(self, values: np.ndarray) -> np.ndarray:
        """Scatter values [M] to `shape`, with 0 where the weight is 0."""
        if self.keys is None:
            return values
        found = np.zeros(self.shape, values.dtype)
        found.reshape(-1)[self.keys] = values
        return found


def check_inputs(loss: BoundLoss, inputs: Mapping[str, np.ndarray | SparseMatrix], length: int) -> LossInputs:
    """Check the loss inputs of one datum.

    Args:
        loss: the loss with the settings of the request.
        inputs: inputs as the client sent them.
        length: N, the number of tokens of the datum.

    Raises:
        RequestError: an input is missing or not read by the loss; its shape is not [N] ([N, K] for soft targets); or
            its values are not finite numbers.
    """
    needed, clips = (TARGETS, *LOSSES[loss.name].needs), {key: value for key, value in loss.settings if key in _CLIP}
    allowed = (*needed, "weights", *clips)
    if unread := sorted(set(inputs) - set(allowed)):
        known = ", ".join(allowed)
        raise RequestError(f"{loss.name} does not read the input {unread[0]!r:.80}; it reads {known}: leave it out")
    if missing := [name for name in needed if name not in inputs]:
        raise RequestError(f"{loss.name} needs {', '.join(missing)}, one number for each of the {length} tokens")
    if loss.name == "cross_entropy" and len(inputs[TARGETS].shape) == 2:
        return _soft_targets(inputs, length)
    arrays: dict[str, np.ndarray] = {}
    for name, values in inputs.items():
        if isinstance(values, SparseMatrix) or values.shape != (length,):
            seen = f"{list(values.shape)}, but the datum has {length} tokens, with its images"
            raise RequestError(f"{name} has shape {seen}; send one number for each, [{length}]")
        arrays[name] = values
    floats = {name: _checked_floats(name, values) for name, values in arrays.items() if name != TARGETS}
    filled = {name: np.full(length, value, np.float32) for name, value in {"weights": 1.0, **clips}.items()}
    checked = {TARGETS: _checked_targets(arrays[TARGETS]), **filled, **floats}
    if clips:
        low, high = (checked[name] for name in _CLIP)
        if (bad := np.flatnonzero((low < 0) | (low > high))).size:
            _check_thresholds(f"token {bad[0]}", low[bad[0]], high[bad[0]])
    if "sequence_ratio_mask" in needed and not checked["sequence_ratio_mask"].any():
        raise RequestError("sequence_ratio_mask marks no token; mark those that were sampled with 1")
    return LossInputs(arrays=checked, shape=(length,))


def _soft_targets(inputs: Mapping[str, np.ndarray | SparseMatrix], length: int) -> LossInputs:
    """Return the targets with nonzero weight from [N, K] targets and weights, dense or sparse."""
    targets, weights = inputs[TARGETS], inputs.get("weights")
    shape = targets.shape
    if weights is None or weights.shape != shape or shape[0] != length or not 1 <= shape[1] <= MOST_TARGETS:
        raise RequestError(
            f"{TARGETS} has shape {list(shape)}, but the datum has {length} tokens, with its images; send [{length}], "
            f"or [{length}, K] with K at most {MOST_TARGETS} and weights of the same shape"
        )
    if isinstance(weights, SparseMatrix):
        keys, values = weights.keys, weights.values
    else:
        keys = np.flatnonzero(weights)
        values = weights.reshape(-1)[keys]
    floats = _checked_floats("weights", values)
    keys, floats = keys[floats != 0], floats[floats != 0]
    if isinstance(targets, SparseMatrix):
        places = np.searchsorted(targets.keys, keys)
        is_listed = np.append(targets.keys, -1)[places] == keys
        ids = np.where(is_listed, np.append(targets.values, 0)[places], 0)
    else:
        ids = targets.reshape(-1)[keys]
    return LossInputs(arrays={TARGETS: _checked_targets(ids), "weights": floats}, keys=keys, shape=shape)


def _checked_targets(targets: np.ndarray) -> np.ndarray:
    if targets.dtype.kind not in "iu":
        raise RequestError(f"{TARGETS} is {targets.dtype}; send token ids as int64")
    return targets.astype(np.int64)


def _checked_floats(name: str, values: np.ndarray) -> np.ndarray:
    if values.dtype.kind not in "iuf":
        raise RequestError(f"{name} is {values.dtype}; send float32")
    with np.errstate(over="ignore"):
        floats = values.astype(np.float32)
    if not np.isfinite(floats).all():
        at = int(np.flatnonzero(~np.isfinite(floats))[0])
        raise RequestError(f"{name} is {values[at]} at token {at}; every one has to be a finite number")
    return floats
