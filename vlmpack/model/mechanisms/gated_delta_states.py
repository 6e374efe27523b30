"""Tests whether gated delta layers can compute a tree node by node, each from its parent's final state (`LayerState`).

This depends on an internal protocol of transformers' caches. It is tried on a small layer of the same class, once per
process. If it fails, layers run along the paths of the samples (`PrefixTreeRow.by_heads`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.segments import Segments
from vlmpack.model.mechanisms.gated_delta_fla import fla_boundaries
from vlmpack.model.mechanisms.recurrent_rows import Buckets, LayerState, VarlenCalls
from vlmpack.model.plain import cache_name


def with_state(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a layer's forward as a function of hidden states, the initial state (passed as the layer's cache, whatever
    that argument's name) and the pieces in which the recurrence restarts."""

    def run(hidden: torch.Tensor, state: LayerState | None, pieces: Segments | None = None) -> torch.Tensor:
        boundaries = {} if pieces is None else fla_boundaries(pieces, hidden.device)
        given = {} if state is None else {cache_name(forward): state}  # wrappers (PEFT's) do not name the cache
        return forward(hidden, **boundaries, **given)

    return run


_HANDS: dict[tuple[type[nn.Module], str, bool], bool] = {}
"""Results by layer class, device type, and whether gradients are computed."""

_PIECES = 5, 1, 2
"""Tokens of a node, its child, and its child's child."""
_FORGETS = -4.0
"""Logarithm of a decay rate that is low enough for states to matter: random layers forget within a few tokens."""
CLOSE = {"cpu": 1e-4}
CLOSE_IN_TF32 = 2e-2
"""Largest error that counts as rounding, relative to the largest entry: by device type, and for all other types."""


def supports_initial_state(
    layer_class: Any, text_config: Any, *, cut: Callable[..., Buckets | VarlenCalls], device: torch.device
) -> bool:
    """Return whether layers of this class compute the same node by node with `LayerState` as in one call, including
    gradients if they are enabled.

    Args:
        layer_class: the class of an unmodified layer.
        text_config: the language model's configuration.
        cut: splits `tree.nodes` and the tree into calls.
        device: where to try it: any device that can compute the layers.
    """
    key = layer_class, device.type, torch.is_grad_enabled()
    if key not in _HANDS:
        sample = Segments.from_lengths([sum(_PIECES)])
        chain = PrefixTree(segments=sample, parents=(-1, 0, 1), lengths=_PIECES, leaves=(2,))
        try:
            _HANDS[key] = _is_exact(layer_class, text_config, cut(chain.nodes, tree=chain), device)
        except Exception:  # another version of transformers may raise anything: its protocol differs
            _HANDS[key] = False
    return _HANDS[key]


def _is_exact(layer_class: Any, text_config: Any, delta: Buckets | VarlenCalls, device: torch.device) -> bool:
    """Compare outputs and input gradients of a layer with few channels and the model's own number of heads."""
    small, training = copy.copy(text_config), torch.is_grad_enabled()
    small.hidden_size = 8
    # With no device listed, only the CPU generator is used, and it is restored.
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.device("cpu"):
        torch.default_generator.manual_seed(0)
        layer = layer_class(small, 0).float()
        nn.init.constant_(layer.A_log, _FORGETS)
        hidden = torch.randn(1, sum(_PIECES), small.hidden_size, dtype=torch.float32)
        weights = torch.randn_like(hidden)
    layer, hidden, weights = layer.to(device), hidden.to(device), weights.to(device)
    with torch.inference_mode(False), torch.set_grad_enabled(training), torch.autocast(device.type, enabled=False):
        whole = _computed(layer, hidden, weights)
        by_node = _computed(functools.partial(delta.run, with_state(layer.forward)), hidden, weights)
    close = CLOSE.get(device.type, CLOSE_IN_TF32)
    return all(bool((a - b).abs().max() <= close * a.abs().max()) for a, b in zip(whole, by_node, strict=True))


def _computed(
    function: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, weights: torch.Tensor
) -> list[torch.Tensor]:
    """Return the output, and the gradient of the input if gradients are enabled."""
    leaf = hidden.clone().requires_grad_(torch.is_grad_enabled())
    out = function(leaf)
    if not torch.is_grad_enabled():
        return [out]
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaf)]
