"""Tiny models with experts, and rows with a chosen share of padding: what the tests of mixture of experts share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vlmpack.families import family_named
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import PaddedBatch, SlotRule
from vlmpack.model.mechanisms.experts import has_balance
from vlmpack.testing import Sample, mixed_samples, padded, tiny_model

MOE = tuple(
    name
    for name, family in FAMILIES.items()
    if family.has("experts")
    and not name.startswith("llama4")
    and ((name.startswith("qwen") and not family.has_audio) or not family.has_vision)
)
"""Text families, and Qwen's, whose experts are told which tokens are theirs. Llama 4's compute all (`test_chunks.py`);
other families with vision choose in ways of their own (`test_vision_experts.py`)."""
BALANCED = tuple(name for name in MOE if has_balance(FAMILIES[name]))
"""Families with a load-balancing loss: others balance their experts by a bias."""
LAYERS, EXPERTS, TOP_K = 3, 5, 3
KINDS = ("image", "text", "images", "text")
COEFFICIENT = 0.5
"""Hugging Face's default of 0.001 would hide a wrong load-balancing loss in the rounding of the cross-entropy."""


def fresh(family: str, *, seed: int = 3, implementation: str | None = None, **sizes: Any):
    """A model with experts, computed by `implementation`; hybrid ones have one layer with attention."""
    settings = {"layers": LAYERS, "experts": EXPERTS, "experts_per_token": TOP_K, **sizes}
    model = tiny_model(family, seed=seed, **settings)
    text_config(model).router_aux_loss_coef = COEFFICIENT
    if "router_aux_loss_coef" in vars(model):  # text models take it down when they are made
        model.router_aux_loss_coef = COEFFICIENT
    if implementation is not None:
        model.set_experts_implementation(implementation)
    return model


def text_config(model: Any) -> Any:
    """Its text part's configuration."""
    return family_named(model.config.model_type).text_config(model.config)


def decoder_layers(model: Any) -> list[Any]:
    """Its decoder layers."""
    return list(family_named(model.config.model_type).language_model(model).layers)


def router_of(layer: Any) -> Any:
    """The router of a decoder layer, whatever the family calls it."""
    block = block_of(layer)
    return getattr(block, "gate", None) or block.router


def block_of(layer: Any) -> Any:
    """The block of experts of a decoder layer, or its MLP."""
    return getattr(layer, "mlp", None) or layer.feed_forward


def before_experts(layer: Any) -> Any:
    """What gives a decoder layer's block of experts its input: the module that runs right before it."""
    return getattr(layer, "post_attention_layernorm", None) or layer.mlp_hyper_connection


def samples_of(model: Any, *, seed: int = 3, kinds: Sequence[Any] = KINDS) -> list[Sample]:
    """Samples of unlike length; text only for a text model."""
    has_vision = family_named(model.config.model_type).has_vision
    return mixed_samples(model.config, seed=seed, kinds=kinds if has_vision else ("text",) * len(kinds))


def plain_inputs(batch: PaddedBatch) -> dict[str, Any]:
    """The batch as unmodified transformers takes it."""
    return {name: value for name, value in batch.to_hf().items() if name != "vlmpack"}


def rule_for(samples: Sequence[Sample], share: int) -> SlotRule:
    """Slots of a row that is `share` percent padding, between the samples and on its tail."""
    lengths = [len(sample["input_ids"]) for sample in samples]
    if not share:
        return SlotRule()
    multiple = 4 if share < 50 else 16
    width = round(sum(lengths) / (1 - share / 100))
    assert sum(-(-n // multiple) * multiple for n in lengths) <= width
    return SlotRule(multiple=multiple, pad_to=width)


def real_rows(logits: Sequence[torch.Tensor], batch: PaddedBatch) -> list[torch.Tensor]:
    """Router logits [B * S, E] of a padded batch, real tokens only: [R, E] of each layer."""
    return [x[batch.attention_mask.bool().flatten()] for x in logits]


def naive_z_loss(logits: Sequence[torch.Tensor]) -> torch.Tensor:
    """Token by token: the mean of log(sum of exp)², of [R, E] of each layer."""
    tokens = [token for layer in logits for token in layer]
    return sum((token.exp().sum().log() ** 2 for token in tokens), start=torch.zeros(())) / len(tokens)


def naive_counts(logits: Sequence[torch.Tensor], top_k: int = TOP_K) -> list[list[int]]:
    """Token by token: how many tokens have each expert among their `top_k` best, of [R, E] of each layer."""
    counts = [[0] * layer.shape[1] for layer in logits]
    for layer, found in zip(logits, counts, strict=True):
        for token in layer.tolist():
            for expert in sorted(range(len(token)), key=token.__getitem__)[-top_k:]:
                found[expert] += 1
    return counts


def batch_of(model: Any, side: Any = "right", **more: Any) -> PaddedBatch:
    """`samples_of` as one padded batch."""
    return padded(samples_of(model, **more), side)
