"""Experts: the losses and counts of routers are those of a row's real tokens.

A row has no padding between its samples (`Segments.without_gaps`), so blocks of experts run as they are. Padding behind
the samples, where a width needs some, goes through them and is left out of losses and counts.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import Any, Literal, final

import numpy as np
import torch
from torch import nn

from vlmpack.errors import ConfigError
from vlmpack.families.family import Family
from vlmpack.layout.device import outside_graph, to_device
from vlmpack.layout.segments import Segments
from vlmpack.model.mechanisms import ModelParts, RowSetup
from vlmpack.model.row import RowPart


def expert_blocks(model: ModelParts) -> list[Any]:
    """Router and experts, those that all tokens share included, of every decoder layer that has them; the others
    (`mlp_only_layers`) are dense. Hidden states [1, T, D] in and out, every token by itself."""
    parts = model.family.mechanisms.get("experts")
    if parts is None:
        return []
    blocks = [layer.get_submodule(parts["layer"]) for layer in model.text.layers.children()]
    return [block for block in blocks if hasattr(block, parts.get("experts", "experts"))]


# ---------------------------------------------------------------------- the load-balancing loss


def puts_aux_loss_first(family: Family) -> bool:
    """Return whether the load-balancing loss comes before the logits in outputs of this family as a tuple.

    The output class itself is looked at: Qwen3-VL-MoE's changed from transformers 5.17 to 5.23.
    """
    file = vars(import_module(family.modelling))
    of_vision = f"{family.model_class.removesuffix('ForConditionalGeneration')}CausalLMOutputWithPast"
    output_class = file.get(of_vision) or file.get("MoeCausalLMOutputWithPast")
    names = [] if output_class is None else [field.name for field in fields(output_class)]
    return "aux_loss" in names and names.index("aux_loss") < names.index("logits")


def wants_balance(model: ModelParts, requested: bool | None) -> bool:
    """Return whether the unmodified model would compute its load-balancing loss.

    Args:
        model: the model. Its configuration's `output_router_logits` counts if nothing is requested, and if the model's
            forward has an argument of that name: others (several in transformers 5.17) ignore the configuration.
        requested: the `output_router_logits` argument of the call.
    """
    if requested is not None:
        return bool(requested)
    if not _reads_configuration(type(model.core)):
        return False
    return bool(model.family.text_config(model.core.config).output_router_logits)


@functools.cache
def _reads_configuration(model_class: type[nn.Module]) -> bool:
    return "output_router_logits" in inspect.signature(model_class.forward).parameters


def coefficient(model: nn.Module, text_config: Any) -> float:
    """Return the factor of the load-balancing loss before it is added to the loss: the model's own number (a
    `...ForCausalLM` stores one when it is made), or else that of its configuration."""
    return getattr(model, "router_aux_loss_coef", text_config.router_aux_loss_coef)


def has_balance(family: Family) -> bool:
    """Return whether models of this family compute a load-balancing loss: those that choose by a bias do not."""
    return hasattr(import_module(family.modelling), "load_balancing_loss_func")


def balance(family: Family, router_logits: Sequence[torch.Tensor], text_config: Any) -> torch.Tensor:
    """The family's own load-balancing loss (scalar) of these tokens: `router_logits` [R, E] of each layer."""
    first = router_logits[0]
    return import_module(family.modelling).load_balancing_loss_func(
        tuple(router_logits),
        first.shape[-1],
        text_config.num_experts_per_tok,
        # All of them count. Without a mask, transformers 5.17 has a host–device sync.
        torch.ones(first.shape[0], device=first.device),
    )


def balance_sums(
    router_logits: Sequence[torch.Tensor], text_config: Any, *, sample_R: torch.Tensor, samples: int
) -> torch.Tensor:
    """Compute the terms of each of B samples' own loss, float32 [2, B, E]: over the tokens of all layers,
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


def balance_of(sums_2BE: torch.Tensor, *, layers: int, tokens_B: torch.Tensor) -> torch.Tensor:
    """The load-balancing loss of each sample, float32 [B]; 0 for a sample without tokens.

    Args:
        sums_2BE: what `balance_sums` gave.
        layers: how many layers they are of.
        tokens_B: int [B], the tokens of each sample.
    """
    chosen_BE, probs_BE = sums_2BE / (layers * tokens_B.clamp(min=1))[:, None]
    return chosen_BE.shape[-1] * (chosen_BE * probs_BE).sum(dim=-1)


# ---------------------------------------------------------------------- statistics of a row's routers

Balance = Literal["row", "sample"]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class RouterStatistics:
    """Statistics of the routers on the R real tokens of one row. E experts."""

    logits: tuple[torch.Tensor, ...]
    """[R, E] of each layer that has experts, in row order; where ranks share the row, of this rank's tokens."""
    top_k: int
    """Experts that each token is sent to."""
    aux_loss: torch.Tensor | None
    """Scalar: the load-balancing loss, not yet multiplied by its coefficient; None: not requested, or the model
    computes none."""
    z_loss: torch.Tensor
    """Scalar: the mean over tokens and layers of logsumexp(router logits)², not yet multiplied by its coefficient."""
    added: torch.Tensor
    """Scalar: what the two, with their coefficients, add to the row's loss."""
    choices: tuple[ExpertChoice, ...] = ()
    """Of each layer how its experts are chosen; empty: by probabilities in all layers."""
    counts: torch.Tensor | None = None
    """`expert_counts` of all ranks that share the row, who count together at once; None: one rank has it all."""

    @property
    def expert_counts(self) -> torch.Tensor:
        """int64 [layers, E]: how many tokens each expert was sent, of ERNIE 4.5 VL [layers, 2 E], the experts of text
        before those of images. Counted at every access."""
        if self.counts is not None:
            return self.counts
        choices = self.choices or (ByProbability(),) * len(self.logits)
        layers = zip(self.logits, choices, strict=True)
        return torch.stack([choice.counts(logits_RE.detach(), self.top_k) for logits_RE, choice in layers])


@outside_graph
def router_statistics(
    logits: tuple[torch.Tensor, ...],
    hidden: torch.Tensor,
    setup: RowSetup,
    *,
    per: Balance,
    with_balance: bool,
    z_loss_coef: float,
) -> RouterStatistics:
    """Compute the statistics of one row.

    Args:
        logits: [t, E] of each layer that has experts, as transformers recorded them.
        hidden: the text model's output, [1, T, D].
        setup: the row, and a model with experts.
        per: "row" or "sample"; see `StepConfig.aux_loss`.
        with_balance: whether to compute the load-balancing loss.
        z_loss_coef: what the z-loss is multiplied by before it is added to the row's loss.

    Raises:
        ConfigError: the recorded logits are not those of the row's tokens, or have lost their gradient.
    """
    segments, part, text_config = setup.row.segments, setup.part, setup.text_config
    _check_recorded(logits, part.segments)
    logits = tuple(_of_real_tokens(part.for_each_sample(logits_tE), part) for logits_tE in logits)
    if hidden.requires_grad and not any(logits_RE.requires_grad for logits_RE in logits):
        _check_not_cut_off(setup.model.text)
    aux_loss = _aux_loss(logits, setup, per) if with_balance and has_balance(setup.model.family) else None
    z_loss = _z_loss(logits, segments, part, per)
    parts = [z_loss_coef * z_loss] if z_loss_coef else [torch.zeros_like(z_loss)]
    if aux_loss is not None:
        parts.append(coefficient(setup.model.core, text_config) * aux_loss)
    statistics = RouterStatistics(
        logits=logits,
        top_k=text_config.num_experts_per_tok,
        aux_loss=aux_loss,
        z_loss=z_loss,
        added=torch.stack(parts).sum(),
        choices=_choices(setup),
    )
    return statistics if part.ranks == 1 else replace(statistics, counts=part.sum(statistics.expert_counts))


def _of_real_tokens(logits_tE: torch.Tensor, part: RowPart) -> torch.Tensor:
    """Leave out those of padding, by a copy: FSDP2 warns of views."""
    count = part.real.stop - part.real.start
    return logits_tE if len(logits_tE) == count else logits_tE[:count].clone()


def _aux_loss(logits: tuple[torch.Tensor, ...], setup: RowSetup, per: Balance) -> torch.Tensor:
    segments, part, text_config = setup.row.segments, setup.part, setup.text_config
    if per == "row" and segments.num_tokens and part.ranks == 1:
        return balance(setup.model.family, logits, text_config)
    sample_R, tokens_G = _samples(segments, part, per, logits[0].device)
    sums_2GE = balance_sums(logits, text_config, sample_R=sample_R, samples=len(tokens_G))
    return _mean(balance_of(part.sum(sums_2GE), layers=len(logits), tokens_B=tokens_G), segments, per)


def _z_loss(logits: tuple[torch.Tensor, ...], segments: Segments, part: RowPart, per: Balance) -> torch.Tensor:
    """Zoph et al., 2022, ST-MoE, equation 5: the mean over tokens; and over layers."""
    z_R = torch.stack([logits_RE.float().logsumexp(dim=-1).square() for logits_RE in logits]).mean(dim=0)
    if per == "row":
        return part.sum(z_R.sum()) / max(segments.num_tokens, 1)
    sample_R, tokens_G = _samples(segments, part, per, z_R.device)
    sums_G = part.sum(z_R.new_zeros(len(tokens_G)).index_add(0, sample_R, z_R))
    return _mean(sums_G / tokens_G.clamp(min=1), segments, per)


def _samples(
    segments: Segments, part: RowPart, per: Balance, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sample of each real token that this rank has int64 [R], real tokens of each sample int64 [G]); the whole row is
    one sample if losses are taken per row."""
    lengths_G = np.asarray(segments.sample_lengths if per == "sample" else (segments.num_tokens,), np.int64)
    sample_R = np.repeat(np.arange(len(lengths_G)), lengths_G)[part.real]
    return to_device(sample_R, device), to_device(lengths_G, device)


def _mean(losses_G: torch.Tensor, segments: Segments, per: Balance) -> torch.Tensor:
    """Over the samples that have tokens."""
    return losses_G.sum() / (max(sum(n > 0 for n in segments.sample_lengths), 1) if per == "sample" else 1)


def _choices(setup: RowSetup) -> tuple[ExpertChoice, ...]:
    """Of each layer how its experts are chosen."""
    family, row, is_vision_R = setup.model.family, setup.row, None
    for types_1T in family.expert_types_of(row.input_ids, setup.config).values():
        real_R = row.segments.real_index(types_1T.device)[setup.part.real]
        is_vision_R = types_1T[0].index_select(0, real_R) > 0
    parts, blocks = family.mechanisms["experts"], expert_blocks(setup.model)
    return tuple(choice_of(block, parts, setup.text_config, is_vision_R) for block in blocks)


def _check_recorded(logits: tuple[torch.Tensor, ...], segments: Segments) -> None:
    """transformers records what routers give; a kernel in a block's place has none, or one of its own."""
    sizes = sorted({len(logits_tE) for logits_tE in logits})
    if sizes != [segments.total]:
        raise ConfigError(
            f"routers saw {sizes} tokens of a row of {segments.total}, so losses would be wrong: "
            "the forward of blocks of experts or routers was replaced (use_kernels does that); undo that, or leave "
            "output_router_logits and z_loss_coef out"
        )


def _check_not_cut_off(text: Any) -> None:
    """A checkpointed layer runs under `no_grad` if reentrant; what was recorded inside is then a constant."""
    if any(layer.training and getattr(layer, "gradient_checkpointing", False) for layer in text.layers.children()):
        raise ConfigError(
            "the router logits have no gradient, so the routers' losses would teach them nothing: gradient "
            "checkpointing with use_reentrant=True does that (unmodified transformers says nothing); give "
            'gradient_checkpointing_kwargs={"use_reentrant": False}, or leave output_router_logits and z_loss_coef out'
        )


# ---------------------------------------------------------------------- expert choice
#
# Choices of experts, as routers make them: of which scores each token has the best. For statistics alone.
#
#     probability    softmax of the logits
#     groups         softmax, among the experts of the best groups          DeepSeek-V2, section 2.2.2
#     bias           sigmoid and a bias, among the best groups              DeepSeek-V3, section 2.1.2
#     modality       softmax and a bias, among the experts of a token's kind    ERNIE 4.5, section 2.2.1
#
# R tokens, E experts: of ERNIE 4.5 VL those of text and, behind them, as many of images.


class ExpertChoice(ABC):
    """The choice of one layer's router."""

    @abstractmethod
    def scores(self, logits_RE: torch.Tensor) -> torch.Tensor:
        """Floats [R, E]: the scores of which each token has the best."""

    def counts(self, logits_RE: torch.Tensor, top_k: int) -> torch.Tensor:
        """int64 [E]: how many tokens each expert was sent."""
        scores_RE = self.scores(logits_RE)
        chosen = scores_RE.topk(top_k, dim=-1).indices.flatten()
        counts_E = torch.zeros(scores_RE.shape[-1], dtype=torch.int64, device=chosen.device)
        return counts_E.index_add(0, chosen, torch.ones_like(chosen))


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ByProbability(ExpertChoice):
    """By softmax in float32 whatever the logits are: rounded ones have other ties."""

    def scores(self, logits_RE: torch.Tensor) -> torch.Tensor:
        """float32 [R, E]: probabilities."""
        return logits_RE.softmax(dim=-1, dtype=torch.float32)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ByGroup(ExpertChoice):
    """By probabilities, among the groups that have the best expert."""

    groups: int
    """Groups of experts, as many in each."""
    top_groups: int
    """Groups that the experts of a token are chosen from."""

    def scores(self, logits_RE: torch.Tensor) -> torch.Tensor:
        """float32 [R, E]: probabilities; -inf in the other groups."""
        probs_RgE = logits_RE.softmax(dim=-1, dtype=torch.float32).unflatten(1, (self.groups, -1))
        return _of_best_groups(probs_RgE, probs_RgE.amax(-1), self.top_groups)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ByBias(ExpertChoice):
    """By sigmoid scores and a bias, among the groups whose two best experts have the largest sum."""

    bias_E: torch.Tensor
    """float32 [E], as it was in this step."""
    groups: int
    """Groups of experts, as many in each."""
    top_groups: int
    """Groups that the experts of a token are chosen from."""

    def scores(self, logits_RE: torch.Tensor) -> torch.Tensor:
        """[R, E]: scores in the type of the logits, as routers compute them, with the bias; -inf in other groups."""
        scores_RgE = (logits_RE.sigmoid() + self.bias_E).unflatten(1, (self.groups, -1))
        return _of_best_groups(scores_RgE, scores_RgE.topk(2, dim=-1).values.sum(-1), self.top_groups)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ByModality(ExpertChoice):
    """By probabilities and a bias, among the experts of text or among those of images."""

    bias_2E: torch.Tensor
    """float32 [2, E]: of text, of images; as it was in this step."""
    is_vision_R: torch.Tensor
    """bool [R]: the tokens that are sent to experts of images."""

    def scores(self, logits_RE: torch.Tensor) -> torch.Tensor:
        """float32 [R, 2 E]: probabilities with the bias; -inf for the experts of the other kind."""
        scores_R2E = logits_RE.softmax(dim=-1, dtype=torch.float32)[:, None] + self.bias_2E
        is_of_kind_R2 = torch.stack([~self.is_vision_R, self.is_vision_R], dim=-1)
        return scores_R2E.masked_fill(~is_of_kind_R2[..., None], float("-inf")).flatten(1)


def choice_of(
    block: nn.Module, parts: Mapping[str, str], config: Any, is_vision_R: torch.Tensor | None
) -> ExpertChoice:
    """Read the choice of a layer off its router.

    Args:
        block: router and experts.
        parts: names of the family's parts: of the `router`, and of the `vision_router` where images have one.
        config: the text part's configuration.
        is_vision_R: bool [R]: the tokens that are sent to experts of images; None: there are none.
    """
    routers: list[Any] = [block.get_submodule(parts[name]) for name in ("router", "vision_router") if name in parts]
    if is_vision_R is not None:
        biases = [_whole(router.moe_statics.e_score_correction_bias).flatten() for router in routers]
        return ByModality(bias_2E=torch.stack(biases).detach().clone(), is_vision_R=is_vision_R)
    if (bias_E := getattr(block, "expert_bias", None)) is not None:
        return ByBias(bias_E=bias_E.detach().clone(), groups=1, top_groups=1)
    for router in routers:
        if (bias_E := getattr(router, "e_score_correction_bias", None)) is not None:
            return ByBias(bias_E=bias_E.detach().clone(), groups=config.n_group, top_groups=config.topk_group)
        if getattr(router, "topk_method", None) == "group_limited_greedy":
            return ByGroup(groups=config.n_group, top_groups=config.topk_group)
    return ByProbability()


def _whole(bias: Any) -> torch.Tensor:
    """A bias that is a parameter, of which FSDP2 leaves each rank a part: one all-gather."""
    return bias.full_tensor() if hasattr(bias, "full_tensor") else bias


def _of_best_groups(scores_RgE: torch.Tensor, best_Rg: torch.Tensor, top_groups: int) -> torch.Tensor:
    """[R, E]: the scores of the best groups, -inf in the others."""
    chosen_Rg = best_Rg.topk(top_groups, dim=-1).indices
    kept_Rg = torch.zeros_like(best_Rg, dtype=torch.bool).scatter(1, chosen_Rg, True)
    return scores_RgE.masked_fill(~kept_Rg[..., None], float("-inf")).flatten(1)
