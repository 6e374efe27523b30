"""What a family with gated delta layers adds: where they are, and what computes them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import Any, final

from torch import nn

_WRAPPED = ("implementation", "func")
"""Closure variables under which wrappers keep the wrapped function: transformers' dispatcher, `kernels`."""


@final
@dataclass(frozen=True, kw_only=True)
class Delta:
    """The gated delta layers of a family: linear attention that carries state along the sequence.

    A causal convolution over a few tokens, then a recurrence over all of them (Yang et al., 2024, Gated Delta
    Networks). Neither reads position ids or attention masks, so both run on from one sample of a row into the next.
    """

    modelling: str
    """Module of transformers that holds the layer and the functions that it calls."""

    def layers(self, language_model: nn.Module) -> list[nn.Module]:
        """Every gated delta layer, hidden states [B, S, D] in and out; other decoder layers have attention."""
        layers = language_model.get_submodule("layers").children()
        return [layer.get_submodule("linear_attn") for layer in layers if hasattr(layer, "linear_attn")]

    def reach(self, text_config: Any) -> int:
        """Tokens before its own that the convolution reads."""
        return text_config.linear_conv_kernel_dim - 1

    def uses_fla(self) -> bool:
        """Whether transformers has bound the recurrence to flash-linear-attention, whose kernel takes boundaries.

        It did so, or not, when the family's module was imported. Anything else that computes the recurrence (PyTorch,
        a hub kernel) is given sequences, which needs nothing of it.
        """
        rule = _wrapped(getattr(import_module(self.modelling), "torch_chunk_gated_delta_rule", None))
        return str(getattr(rule, "__module__", "")).split(".")[0] == "fla"


def keeps_zeros(layer: nn.Module) -> bool:
    """Whether hidden states of zero still are zero where they reach a gated delta layer's convolution: none of the
    projections before it has a bias."""
    projections = [child for name, child in layer.named_children() if name.startswith("in_proj")]
    names = [name for projection in projections for name, _ in projection.named_parameters()]
    return not any(name.rpartition(".")[2] == "bias" for name in names)


def _wrapped(function: Any) -> Any:
    """The function at the bottom of these wrappers."""
    called = function.forward if isinstance(function, nn.Module) else function
    if not (inspect.isfunction(called) or inspect.ismethod(called)):
        return called
    kept = inspect.getclosurevars(called).nonlocals
    inner = next((kept[name] for name in _WRAPPED if name in kept), None)
    return called if inner is None else _wrapped(inner)
