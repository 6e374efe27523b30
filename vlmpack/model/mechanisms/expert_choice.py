"""Choices of experts, as routers make them: of which scores each token has the best. For statistics alone.

    probability    softmax of the logits
    groups         softmax, among the experts of the best groups          DeepSeek-V2, section 2.2.2
    bias           sigmoid and a bias, among the best groups              DeepSeek-V3, section 2.1.2
    modality       softmax and a bias, among the experts of a token's kind    ERNIE 4.5, section 2.2.1

R tokens, E experts: of ERNIE 4.5 VL those of text and, behind them, as many of images.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn


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
