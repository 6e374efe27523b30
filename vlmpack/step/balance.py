"""What a row's routers did, real tokens only: their losses over the row or sample by sample, and experts' loads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, final

import numpy as np
import torch
from torch import nn

from vlmpack.errors import ConfigError
from vlmpack.families import Experts, Family
from vlmpack.layout import Segments, outside_graph, to_device
from vlmpack.step.shared import Share

Balance = Literal["row", "sample"]


@final
@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """What is wanted of a row's routers."""

    per: Balance
    """"row" or "sample"; see `StepConfig.aux_loss`."""
    balance: bool
    """Whether to compute the load-balancing loss."""
    z_loss_coef: float
    """What the z-loss is multiplied by before it is added to the row's loss."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class RouterStatistics:
    """What the routers did with the R real tokens of one row. E experts."""

    logits: tuple[torch.Tensor, ...]
    """[R, E] of each layer that has experts, in row order; where ranks share the row, of this rank's tokens."""
    top_k: int
    """Experts that each token is sent to."""
    aux_loss: torch.Tensor | None
    """Scalar: the load-balancing loss, not yet multiplied by its coefficient; None: the model computes none."""
    z_loss: torch.Tensor
    """Scalar: the mean over tokens and layers of logsumexp(router logits)², not yet multiplied by its coefficient."""
    added: torch.Tensor
    """Scalar: what the two, with their coefficients, add to the row's loss."""
    counts: torch.Tensor | None = None
    """`expert_counts` of all ranks that share the row, who count together at once; None: one rank has it all."""

    @property
    def expert_counts(self) -> torch.Tensor:
        """int64 [layers, E]: how many tokens each expert was sent. Counted whenever it is asked for."""
        if self.counts is not None:
            return self.counts
        return torch.stack([_counts(logits_RE.detach(), self.top_k) for logits_RE in self.logits])


@outside_graph
def router_statistics(
    logits: tuple[torch.Tensor, ...],
    hidden: torch.Tensor,
    segments: Segments,
    settings: RouterSettings,
    *,
    share: Share,
    family: Family,
    model: nn.Module,
) -> RouterStatistics:
    """The statistics of one row.

    Args:
        logits: [R, E] of each layer that has experts, as transformers recorded them.
        hidden: what the text model gave back, [1, T, D].
        segments: the row's boundaries.
        settings: what is wanted.
        share: how much of the row this rank has.
        family: the model's family, one with experts.
        model: the model with its head.

    Raises:
        ConfigError: the recorded logits are not those of the real tokens, or have lost their gradient.
    """
    experts, text_config = family.experts, family.text_config(model.config)
    assert experts is not None
    if not share.segments.num_tokens:  # the experts got padding, see `RowContext.experts`
        logits = tuple(logits_RE[:0] for logits_RE in logits)
    _check_real(logits, share.segments)
    if hidden.requires_grad and not any(logits_RE.requires_grad for logits_RE in logits):
        _check_not_cut_off(experts, family.language_model(model))
    aux_loss = _aux_loss(logits, segments, share, experts, text_config, settings.per) if settings.balance else None
    z_loss = _z_loss(logits, segments, share, settings.per)
    parts = [settings.z_loss_coef * z_loss] if settings.z_loss_coef else []
    if aux_loss is not None:
        parts.append(experts.coefficient(model, text_config) * aux_loss)
    found = RouterStatistics(
        logits=logits,
        top_k=text_config.num_experts_per_tok,
        aux_loss=aux_loss,
        z_loss=z_loss,
        added=torch.stack(parts).sum(),
    )
    return found if share.has_all else replace(found, counts=share.sum(found.expert_counts))


def _aux_loss(
    logits: tuple[torch.Tensor, ...], segments: Segments, share: Share, experts: Experts, text_config: Any, per: Balance
) -> torch.Tensor:
    if per == "row" and segments.num_tokens and share.has_all:
        return experts.balance(logits, text_config)
    sample_R, tokens_G = _samples(segments, share, per, logits[0].device)
    sums_2GE = experts.balance_sums(logits, text_config, sample_R=sample_R, samples=len(tokens_G))
    return _mean(experts.balance_of(share.sum(sums_2GE), layers=len(logits), tokens_B=tokens_G), segments, per)


def _z_loss(logits: tuple[torch.Tensor, ...], segments: Segments, share: Share, per: Balance) -> torch.Tensor:
    """Zoph et al., 2022, ST-MoE, equation 5: the mean over tokens; and over layers."""
    z_R = torch.stack([logits_RE.float().logsumexp(dim=-1).square() for logits_RE in logits]).mean(dim=0)
    if per == "row":
        return share.sum(z_R.sum()) / max(segments.num_tokens, 1)
    sample_R, tokens_G = _samples(segments, share, per, z_R.device)
    sums_G = share.sum(z_R.new_zeros(len(tokens_G)).index_add(0, sample_R, z_R))
    return _mean(sums_G / tokens_G.clamp(min=1), segments, per)


def _samples(segments: Segments, share: Share, per: Balance, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(sample of each real token that this rank has int64 [R], real tokens of each sample int64 [G]); the whole row is
    one sample if losses are taken per row."""
    lengths_G = np.asarray(segments.lengths if per == "sample" else (segments.num_tokens,), np.int64)
    sample_R = np.repeat(np.arange(len(lengths_G)), lengths_G)[share.real]
    return to_device(sample_R, device), to_device(lengths_G, device)


def _mean(losses_G: torch.Tensor, segments: Segments, per: Balance) -> torch.Tensor:
    """Over the samples that have tokens."""
    return losses_G.sum() / (max(sum(n > 0 for n in segments.lengths), 1) if per == "sample" else 1)


def _counts(logits_RE: torch.Tensor, top_k: int) -> torch.Tensor:
    """As routers choose: by probabilities in float32 whatever their logits are; rounded ones have other ties."""
    chosen = logits_RE.softmax(dim=-1, dtype=torch.float32).topk(top_k, dim=-1).indices.flatten()
    counts_E = torch.zeros(logits_RE.shape[-1], dtype=torch.int64, device=chosen.device)
    return counts_E.index_add(0, chosen, torch.ones_like(chosen))


def _check_real(logits: tuple[torch.Tensor, ...], segments: Segments) -> None:
    """transformers records what routers give; a kernel in a block's place has none, or one of its own."""
    seen = sorted({len(logits_RE) for logits_RE in logits})
    if seen != [segments.num_tokens]:
        raise ConfigError(
            f"routers saw {seen} tokens of a row with {segments.num_tokens} real ones, so their losses would be wrong: "
            "the forward of blocks of experts or routers was replaced (use_kernels does that); undo that, or leave "
            "output_router_logits and z_loss_coef out"
        )


def _check_not_cut_off(experts: Experts, language_model: nn.Module) -> None:
    """A checkpointed layer runs under `no_grad` if reentrant; what was recorded inside is then a constant."""
    if experts.are_recomputed(language_model):
        raise ConfigError(
            "the router logits have no gradient, so the routers' losses would teach them nothing: gradient "
            "checkpointing with use_reentrant=True does that (unmodified transformers says nothing); give "
            'gradient_checkpointing_kwargs={"use_reentrant": False}, or leave output_router_logits and z_loss_coef out'
        )
