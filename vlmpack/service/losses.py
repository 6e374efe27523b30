"""The losses of a training request: their inputs and settings, and what each token adds.

Every loss is a sum over the tokens of all datums, never a mean. lp: log-probability of a target, with its gradient; q:
`logprobs`, that of the policy that sampled it; A: `advantages`; w: `weights`, 1 where there are none; r = exp(lp - q).

    cross_entropy          -w lp
    importance_sampling    -w r A
    ppo                    -w min(r A, clip(r, low, high) A)
    cispo                  -w stop_gradient(clip(r, low, high)) lp A
    dro                    -w (lp A - beta / 2 (lp - q)^2)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch

from vlmpack.errors import RequestError

TARGETS = "target_tokens"
"""The input that every loss needs: the id that each token predicts."""

Inputs = Mapping[str, torch.Tensor]
Settings = Mapping[str, float]
TokenLosses = Callable[[torch.Tensor, Inputs, Settings], torch.Tensor]
"""Log-probabilities [n], inputs [n] by name and settings to what each token adds, [n]; weights are applied after it."""


def cross_entropy(lp: torch.Tensor, inputs: Inputs, settings: Settings) -> torch.Tensor:
    """Negative log-likelihood of the targets."""
    return -lp


def importance_sampling(lp: torch.Tensor, inputs: Inputs, settings: Settings) -> torch.Tensor:
    """Policy gradient, corrected for the policy that sampled."""
    return -_ratio(lp, inputs) * inputs["advantages"]


def ppo(lp: torch.Tensor, inputs: Inputs, settings: Settings) -> torch.Tensor:
    """Clipped surrogate objective (Schulman et al., 2017, Proximal Policy Optimization, equation 7)."""
    ratio, advantages = _ratio(lp, inputs), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, settings) * advantages)


def cispo(lp: torch.Tensor, inputs: Inputs, settings: Settings) -> torch.Tensor:
    """Clipped importance-sampling weights on every token (MiniMax, 2025, MiniMax-M1, equation 4)."""
    return -_clipped(_ratio(lp, inputs), settings).detach() * lp * inputs["advantages"]


def dro(lp: torch.Tensor, inputs: Inputs, settings: Settings) -> torch.Tensor:
    """Direct reward optimisation with a quadratic penalty (Richemond et al., 2024, Offline Regularised RL)."""
    distance = lp - inputs["logprobs"]
    return -(lp * inputs["advantages"] - settings["beta"] / 2 * distance**2)


def _ratio(lp: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return torch.exp(lp - inputs["logprobs"])


def _clipped(ratio: torch.Tensor, settings: Settings) -> torch.Tensor:
    return ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])


@final
@dataclass(frozen=True, kw_only=True)
class Loss:
    """One loss."""

    token_losses: TokenLosses
    """The loss of each token."""
    needs: tuple[str, ...] = ()
    """Inputs that every datum has to have, beside the targets."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """Its settings and their defaults."""


_RATED = ("logprobs", "advantages")
_CLIP = ("clip_low_threshold", "clip_high_threshold")

LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(token_losses=cross_entropy),
    "importance_sampling": Loss(token_losses=importance_sampling, needs=_RATED),
    "ppo": Loss(token_losses=ppo, needs=_RATED, settings=dict(zip(_CLIP, (0.8, 1.2), strict=True))),
    "cispo": Loss(token_losses=cispo, needs=_RATED, settings=dict(zip(_CLIP, (0.0, 4.0), strict=True))),
    "dro": Loss(token_losses=dro, needs=_RATED, settings={"beta": 0.05}),
}
"""The losses by the name that a client sends."""


@final
@dataclass(frozen=True, kw_only=True)
class BoundLoss:
    """A loss with the settings of one request."""

    name: str
    """Its name."""
    settings: tuple[tuple[str, float], ...]
    """Every setting of it."""

    def __call__(self, logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """float32 [n]: what each token adds to the loss.

        Args:
            logprobs: float32 [n].
            inputs: float32 [n] by name, `weights` among them.
        """
        return inputs["weights"] * LOSSES[self.name].token_losses(logprobs, inputs, dict(self.settings))


def bind_loss(name: str, config: Mapping[str, float | str]) -> BoundLoss:
    """Check the name and the settings of a loss.

    Raises:
        RequestError: an unknown loss or setting; a setting that is no finite number, or out of its range.
    """
    if name not in LOSSES:
        raise RequestError(f"loss_fn {name!r:.80} is not known here; use one of {', '.join(LOSSES)}")
    settings = dict(LOSSES[name].settings)
    for key, value in config.items():
        if key not in settings:
            known = f"it has {', '.join(settings)}" if settings else "it has no settings"
            raise RequestError(f"loss_fn_config: {name} has no setting {key!r:.80}; {known}")
        if isinstance(value, str) or not math.isfinite(value):
            raise RequestError(f"loss_fn_config: {key} is {value!r:.80}; it has to be a finite number")
        settings[key] = float(value)
    if _CLIP[0] in settings and not 0 <= settings[_CLIP[0]] <= settings[_CLIP[1]]:
        low, high = (settings[key] for key in _CLIP)
        raise RequestError(
            f"loss_fn_config: thresholds are {low:g} and {high:g}; they are bounds of the ratio itself, such as 0.8 "
            "and 1.2, the lower one at least 0"
        )
    if settings.get("beta", 0.0) < 0:
        raise RequestError(f"loss_fn_config: beta is {settings['beta']:g}; it is 0 or a positive number")
    return BoundLoss(name=name, settings=tuple(settings.items()))


def check_inputs(loss: str, inputs: Mapping[str, np.ndarray], length: int) -> dict[str, np.ndarray]:
    """Check the inputs of one datum's loss; targets come back as int64, everything else as float32, `weights` always.

    Args:
        loss: a name of `LOSSES`.
        inputs: as the client sent them.
        length: N, tokens of the datum.

    Raises:
        RequestError: inputs that the loss does not read, or lacks; another shape than [N]; no numbers, or not finite.
    """
    needed = (TARGETS, *LOSSES[loss].needs)
    allowed = (*needed, "weights")
    if unread := sorted(set(inputs) - set(allowed)):
        raise RequestError(
            f"{loss} does not read the input {unread[0]!r:.80}; it reads {', '.join(allowed)}: leave it out"
        )
    if missing := [name for name in needed if name not in inputs]:
        raise RequestError(f"{loss} needs {', '.join(missing)}, one number for each of the {length} tokens")
    for name, values in inputs.items():
        _check_shape(name, values, length)
    floats = {name: _checked_floats(name, values) for name, values in inputs.items() if name != TARGETS}
    weights = floats.pop("weights", np.ones(length, np.float32))
    return {TARGETS: _checked_targets(inputs[TARGETS]), "weights": weights, **floats}


def _check_shape(name: str, values: np.ndarray, length: int) -> None:
    if values.shape != (length,):
        raise RequestError(
            f"{name} has shape {list(values.shape)}, but the datum has {length} tokens (those of its images included); "
            f"send one number for each, [{length}]"
        )


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
