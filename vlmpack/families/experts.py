"""What a family with mixture-of-experts layers adds: where they are, and what their routers are trained by."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, final

import torch
from torch import nn

_MIXERS = ("self_attn", "linear_attn")
"""Names of what runs before the experts in a decoder layer: attention, or a gated delta layer."""


@final
@dataclass(frozen=True, kw_only=True)
class ExpertLayer:
    """The two parts of one decoder layer that matter to its experts."""

    mixer: nn.Module
    """Attention or gated delta layer: runs before the block, in the same call of the layer, and is given the keywords
    of that call."""
    block: nn.Module
    """Router and experts, those that all tokens share included: hidden states [1, T, D] in and out, every token by
    itself."""


@final
@dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixture-of-experts part of a family. `text_config` is the text part's configuration."""

    modelling: str
    """Module of transformers that holds the family's own `load_balancing_loss_func`."""

    def layers(self, language_model: nn.Module) -> list[ExpertLayer]:
        """Every decoder layer that has experts; the others (`mlp_only_layers`) are dense."""
        layers = language_model.get_submodule("layers").children()
        blocks = [(layer, layer.get_submodule("mlp")) for layer in layers]
        return [ExpertLayer(mixer=_mixer(layer), block=block) for layer, block in blocks if hasattr(block, "experts")]

    def are_recomputed(self, language_model: nn.Module) -> bool:
        """Whether gradient checkpointing computes the layers again in the backward pass."""
        layers = language_model.get_submodule("layers").children()
        return any(layer.training and getattr(layer, "gradient_checkpointing", False) for layer in layers)

    def puts_aux_loss_first(self, model_class: str) -> bool:
        """Whether the load-balancing loss comes before the logits in the outputs of this class of models, as a tuple.

        The output class itself is looked at: Qwen3-VL-MoE's changed from transformers 5.17 to 5.23.
        """
        file = vars(import_module(self.modelling))
        of_vision = f"{model_class.removesuffix('ForConditionalGeneration')}CausalLMOutputWithPast"
        names = [field.name for field in fields(file.get(of_vision) or file["MoeCausalLMOutputWithPast"])]
        return names.index("aux_loss") < names.index("logits")

    # ------------------------------------------------------------------ the load-balancing loss

    def wants_balance(self, model: nn.Module, text_config: Any, asked: bool | None) -> bool:
        """Whether the unmodified model would compute its load-balancing loss.

        Args:
            model: the `...ForConditionalGeneration` or `...ForCausalLM`.
            text_config: its `output_router_logits` counts if nothing is asked for, and if the model's forward has an
                argument of that name: others (several in transformers 5.17) ignore the configuration.
            asked: the `output_router_logits` argument of the call.
        """
        if asked is not None:
            return bool(asked)
        return _reads_configuration(type(model)) and bool(text_config.output_router_logits)

    def coefficient(self, model: nn.Module, text_config: Any) -> float:
        """What the load-balancing loss is multiplied by before it is added to the loss: the model's own number (a
        `...ForCausalLM` takes one down when it is made), or else that of its configuration."""
        return getattr(model, "router_aux_loss_coef", text_config.router_aux_loss_coef)

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

    def balance_sums(
        self, router_logits: Sequence[torch.Tensor], text_config: Any, *, sample_R: torch.Tensor, samples: int
    ) -> torch.Tensor:
        """What the same loss of each of B samples is made of, float32 [2, B, E]: over the tokens of all layers,
        how many each expert was sent, and the sum of its probabilities.

        All samples at once: `balance` sample by sample would launch B times as many kernels. Ranks that have a part of
        the tokens each add up.

        Args:
            router_logits: [R, E] of each layer, the tokens of all samples.
            text_config: the text part's configuration.
            sample_R: int [R], the sample of each token.
            samples: B.
        """
        E = router_logits[0].shape[-1]
        chosen_BE = probs_BE = torch.zeros(samples, E, dtype=torch.float32, device=sample_R.device)
        for logits_RE in router_logits:
            probs_RE = logits_RE.softmax(dim=-1)
            top_RK = probs_RE.topk(text_config.num_experts_per_tok, dim=-1).indices
            ones_RE = torch.zeros_like(probs_RE, dtype=torch.float32).scatter(1, top_RK, 1.0)
            chosen_BE = chosen_BE.index_add(0, sample_R, ones_RE)
            probs_BE = probs_BE.index_add(0, sample_R, probs_RE.float())
        return torch.stack([chosen_BE, probs_BE])

    def balance_of(self, sums_2BE: torch.Tensor, *, layers: int, tokens_B: torch.Tensor) -> torch.Tensor:
        """The load-balancing loss of each sample, float32 [B]; 0 for a sample without tokens.

        Args:
            sums_2BE: what `balance_sums` gave.
            layers: how many layers they are of.
            tokens_B: int [B], the tokens of each sample.
        """
        chosen_BE, probs_BE = sums_2BE / (layers * tokens_B.clamp(min=1))[:, None]
        return chosen_BE.shape[-1] * (chosen_BE * probs_BE).sum(dim=-1)


def _mixer(layer: nn.Module) -> nn.Module:
    return next(getattr(layer, name) for name in _MIXERS if hasattr(layer, name))


@functools.cache
def _reads_configuration(model_class: type[nn.Module]) -> bool:
    return "output_router_logits" in inspect.signature(model_class.forward).parameters
