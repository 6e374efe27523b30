"""The losses, written out in numpy; and what a datum's inputs have to be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlmpack.errors import RequestError
from vlmpack.service.engine.losses import LOSSES, bind_loss, check_inputs

Array = np.ndarray
EPS = 1e-4
MASK = np.array([0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 1, 0], np.float32)


def in_numpy(name: str, lp: Array, fixed: Array, q: Array, a: Array, w: Array, **settings: Any) -> float:
    """The table of the losses, in float64, of two datums; `fixed`: log-probabilities that are not derived."""
    r = np.exp(lp - q)
    if name == "cross_entropy":
        return float(-(w * lp).sum())
    if name == "importance_sampling":
        return float(-(w * r * a).sum())
    if name == "dro":
        return float(-(w * (lp * a - settings["beta"] / 2 * (lp - q) ** 2)).sum())
    low, high = settings["clip_low_threshold"], settings["clip_high_threshold"]
    if name == "cispo":
        return float(-(w * np.clip(np.exp(fixed - q), low, high) * lp * a).sum())
    if name == "gspo":
        means = [(fixed - q)[at][MASK[at] != 0].mean() for at in (slice(0, 5), slice(5, None))]
        r = np.exp(np.repeat(means, (5, len(lp) - 5)) + lp - fixed)
    return float(-(w * np.minimum(r * a, np.clip(r, low, high) * a)).sum())


def drawn(seed: int, n: int = 12) -> tuple[Array, Array, Array, Array]:
    """lp, q, A, w; ratios from about 0.3 to 3, none within rounding of a threshold."""
    rng = np.random.default_rng(seed)
    lp = rng.uniform(-6, -0.5, n)
    ratio = rng.choice([0.3, 0.7, 0.9, 1.0, 1.1, 1.4, 3.0, 4.5], n)
    return tuple(x.astype(np.float32).astype(np.float64) for x in (lp, lp - np.log(ratio), *rng.normal(size=(2, n))))


def computed(name: str, config: dict[str, Any], lp: Array, q: Array, a: Array, w: Array) -> tuple[float, Array]:
    """Our loss of two datums and its derivatives."""
    leaf = torch.tensor(lp, dtype=torch.float32, requires_grad=True)
    loss = bind_loss(name, {key: value for key, value in config.items() if np.ndim(value) == 0})
    given = {"target_tokens": np.zeros(len(lp), int), "weights": w}
    given |= {} if name == "cross_entropy" else {"logprobs": q, "advantages": a}
    given |= {"sequence_ratio_mask": MASK} if name == "gspo" else {}
    given |= {key: value for key, value in config.items() if np.ndim(value) == 1}  # one for each token
    inputs = {key: torch.from_numpy(value) for key, value in check_inputs(loss, given, len(lp)).arrays.items()}
    losses = loss(leaf, {**inputs, "lengths": torch.tensor([5, len(lp) - 5])})
    assert losses.shape == leaf.shape
    losses.sum().backward()
    assert leaf.grad is not None
    return losses.detach().double().sum().item(), leaf.grad.numpy()


def derivatives(function: Callable[[Array], float], lp: Array) -> Array:
    steps = np.eye(len(lp)) * EPS
    return np.array([(function(lp + step) - function(lp - step)) / (2 * EPS) for step in steps])


DEFAULTS = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
    "gspo": {},
}
CHANGED = {
    "gspo": {"clip_low_threshold": 0.93, "clip_high_threshold": 1.27},
    "ppo": {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "dro": {"beta": 0.7},
}


@pytest.mark.parametrize("name", sorted({*LOSSES, *DEFAULTS}))
@given(seed=st.integers(0, 10_000))
def test_a_loss_and_its_derivatives_are_those_of_numpy(name: str, seed: int) -> None:
    lp, q, a, w = drawn(seed)
    changed = CHANGED.get(name, {})
    each = {key: np.linspace(value, value + 0.05, len(lp)) for key, value in changed.items() if key != "beta"}
    for config in (*([] if name == "gspo" else [{}]), changed, {**changed, **({} if name == "gspo" else each)}):
        expected = partial(in_numpy, name, fixed=lp, q=q, a=a, w=w, **{**DEFAULTS[name], **config})
        loss, slopes = computed(name, config, lp, q, a, w)
        assert loss == pytest.approx(expected(lp), rel=1e-5, abs=1e-5)
        np.testing.assert_allclose(slopes, derivatives(expected, lp), rtol=1e-3, atol=1e-4)


# ---------------------------------------------------------------------- settings

BAD_SETTINGS = [
    ("nothing", {}, "loss_fn 'nothing' is not known here; use one of cross_entropy"),
    ("", {}, "loss_fn '' is not known"),
    ("mine", {}, "loss_fn 'mine' is not known"),
    ("custom", {}, "call forward_backward_custom"),
    ("stable_reinforce", {}, "its formula is not published; use importance_sampling"),
    ("gspo", {"clip_low_threshold": 1.1}, "thresholds are 1.1 and 1.0004"),
    ("cross_entropy", {"beta": 1.0}, "cross_entropy has no setting 'beta'; it has no settings"),
    ("ppo", {"clip": 0.2}, "ppo has no setting 'clip'; it has clip_low_threshold"),
    ("ppo", {"clip_low_threshold": float("nan")}, "clip_low_threshold is nan"),
    ("ppo", {"clip_low_threshold": "0.8"}, "clip_low_threshold is '0.8'"),
    ("ppo", {"clip_low_threshold": 1.5}, "thresholds are 1.5 and 1.2"),
    ("cispo", {"clip_low_threshold": -0.1}, "thresholds are -0.1 and 4"),
    ("dro", {"beta": -1.0}, "beta is -1"),
    ("dro", {"beta": float("inf")}, "beta is inf"),
]


@pytest.mark.parametrize(("name", "config", "message"), BAD_SETTINGS)
def test_unknown_losses_and_settings_are_refused(name: str, config: dict, message: str) -> None:
    with pytest.raises(RequestError) as raised:
        bind_loss(name, config)
    assert message in str(raised.value)


# ---------------------------------------------------------------------- inputs

TARGETS = np.array([1, 2, 3])
ONES = np.ones(3, np.float32)
RATED = {"target_tokens": TARGETS, "logprobs": ONES, "advantages": ONES}
BAD_INPUTS = [
    ("cross_entropy", {}, "cross_entropy needs target_tokens"),
    ("ppo", {"target_tokens": TARGETS, "advantages": ONES}, "ppo needs logprobs"),
    ("cross_entropy", {"target_tokens": TARGETS, "mask": ONES}, "does not read the input 'mask'"),
    ("cross_entropy", {"target_tokens": TARGETS, "logprobs": ONES}, "does not read the input 'logprobs'"),
    ("cross_entropy", {"target_tokens": TARGETS[:2]}, "target_tokens has shape [2], but the datum has 3 tokens"),
    ("cross_entropy", {"target_tokens": np.ones((3, 2), int)}, "target_tokens has shape [3, 2]"),
    ("cross_entropy", {"target_tokens": np.ones((2, 2), int), "weights": np.ones((2, 2))}, "the datum has 3 tokens"),
    ("cross_entropy", {"target_tokens": np.ones((3, 999), int), "weights": np.ones((3, 999))}, "K at most 256"),
    ("cross_entropy", {"target_tokens": np.ones((3, 2), int), "weights": np.full((3, 2), np.inf)}, "weights is inf"),
    ("ppo", {**RATED, "target_tokens": np.ones((3, 2), int)}, "target_tokens has shape [3, 2]"),
    ("cross_entropy", {"target_tokens": TARGETS, "weights": ONES[:, None]}, "weights has shape [3, 1]"),
    ("cross_entropy", {"target_tokens": TARGETS, "weights": np.float32(1)}, "weights has shape []"),
    ("cross_entropy", {"target_tokens": ONES}, "target_tokens is float32; send token ids as int64"),
    ("cross_entropy", {"target_tokens": TARGETS, "weights": ONES * np.nan}, "weights is nan at token 0"),
    ("cross_entropy", {"target_tokens": TARGETS, "weights": ONES.astype(complex)}, "weights is complex128"),
    ("cross_entropy", {"target_tokens": TARGETS, "weights": np.full(3, 1e300)}, "weights is 1e+300 at token 0"),
    ("ppo", {**RATED, "clip_low_threshold": ONES * 2}, "token 0: thresholds are 2 and 1.2"),
    ("dro", {**RATED, "clip_low_threshold": ONES}, "dro does not read the input 'clip_low_threshold'"),
    ("gspo", {**RATED, "sequence_ratio_mask": ONES * 0}, "sequence_ratio_mask marks no token"),
    ("dro", {**RATED, "logprobs": np.full(3, -np.inf)}, "logprobs is -inf at token 0"),
]


@pytest.mark.parametrize(("loss", "inputs", "message"), BAD_INPUTS)
def test_inputs_that_a_loss_cannot_use_are_refused(loss: str, inputs: dict, message: str) -> None:
    with pytest.raises(RequestError) as raised:
        check_inputs(bind_loss(loss, CHANGED["gspo"] if loss == "gspo" else {}), inputs, 3)
    assert message in str(raised.value)


def test_weights_are_1_where_there_are_none_and_may_be_anything_finite() -> None:
    loss = bind_loss("cross_entropy", {})
    for sent, expected in (({}, [1, 1, 1]), ({"weights": np.array([-2.5, 0, 7])}, [-2.5, 0, 7])):
        weights = check_inputs(loss, {"target_tokens": TARGETS, **sent}, 3).arrays["weights"]
        assert (weights.dtype, weights.tolist()) == (np.float32, expected)
