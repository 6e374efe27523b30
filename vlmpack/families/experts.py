"""What a family with mixture-of-experts layers adds: where they are, and the loss that keeps their load balanced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, final

import torch
from torch import nn


@final
@dataclass(frozen=True, kw_only=True)
class ExpertLayer:
    """The two parts of one decoder layer that matter to its experts."""

    attention: nn.Module
    """Runs before the block, in the same call of the layer, and is given the keywords of that call."""
    block: nn.Module
    """Router and experts: hidden states [1, T, D] in and out, every token by itself."""


@final
@dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixture-of-experts part of a family. `text_config` is the text part's configuration."""

    modelling: str
    """Module of transformers that holds the family's own `load_balancing_loss_func`."""

    def layers(self, language_model: nn.Module) -> list[ExpertLayer]:
        """Every decoder layer that has experts; the others (`mlp_only_layers`) are dense."""
        layers = language_model.get_submodule("layers").children()
        parts = [(layer.get_submodule("self_attn"), layer.get_submodule("mlp")) for layer in layers]
        return [ExpertLayer(attention=first, block=second) for first, second in parts if hasattr(second, "experts")]

    def are_recomputed(self, language_model: nn.Module) -> bool:
        """Whether gradient checkpointing computes the layers again in the backward pass."""
        layers = language_model.get_submodule("layers").children()
        return any(layer.training and getattr(layer, "gradient_checkpointing", False) for layer in layers)

    def wants_balance(self, text_config: Any, asked: bool | None) -> bool:
        """Whether the unmodified model would compute its load-balancing loss.

        Args:
            text_config: its `output_router_logits` counts if nothing is asked for, and if its class declares it:
                transformers 5.17 does not, and ignores it.
            asked: the `output_router_logits` argument of the call.
        """
        declared = hasattr(type(text_config), "output_router_logits")
        return bool(asked) if asked is not None else declared and bool(text_config.output_router_logits)

    def balance(self, router_logits: Sequence[torch.Tensor], text_config: Any) -> torch.Tensor:
        """The family's own load-balancing loss (scalar) of these tokens: `router_logits` [R, E] of each layer."""
        first = router_logits[0]
        return import_module(self.modelling).load_balancing_loss_func(
            tuple(router_logits),
            text_config.num_experts,
            text_config.num_experts_per_tok,
            # All of them count. Without a mask, transformers 5.17 waits for the device.
            torch.ones(first.shape[0], device=first.device),
        )

    def coefficient(self, text_config: Any) -> float:
        """What the load-balancing loss is multiplied by before it is added to the loss."""
        return text_config.router_aux_loss_coef
