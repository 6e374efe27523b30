"""The load-balancing loss of a row's routers: real tokens only, over the row or sample by sample."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, final

import torch
from torch import nn

from vlmpack.errors import ConfigError
from vlmpack.families import Experts
from vlmpack.layout import Segments

Balance = Literal["row", "sample"]


@final
@dataclass(frozen=True, kw_only=True)
class RouterStatistics:
    """What the routers did with one row."""

    logits: tuple[torch.Tensor, ...]
    """[R, E] of each layer that has experts: real tokens only, in row order."""
    loss: torch.Tensor
    """Scalar: the load-balancing loss, not yet multiplied by its coefficient."""
    coefficient: float
    """What it is multiplied by before it is added to the row's loss."""


def router_statistics(
    hidden: torch.Tensor,
    logits: tuple[torch.Tensor, ...],
    segments: Segments,
    *,
    experts: Experts,
    text_config: Any,
    per: Balance,
    language_model: nn.Module,
) -> RouterStatistics:
    """The statistics of one row.

    Args:
        hidden: what the text model gave back, [1, T, D].
        logits: [R, E] of each layer that has experts, as transformers recorded them.
        segments: the row's boundaries.
        experts: of the model's family.
        text_config: the text part's configuration.
        per: "row" or "sample"; see `StepConfig.aux_loss`.
        language_model: the text part of the model.

    Raises:
        ConfigError: the recorded logits have lost their gradient.
    """
    if hidden.requires_grad and not any(x.requires_grad for x in logits):
        _check_not_cut_off(experts, language_model)
    if per == "row":
        loss = experts.balance(logits, text_config)
    else:
        spans = [(start, stop) for start, stop in pairwise(segments.real) if stop > start]
        losses = [experts.balance([x[start:stop] for x in logits], text_config) for start, stop in spans]
        loss = torch.stack(losses).mean()
    return RouterStatistics(logits=logits, loss=loss, coefficient=experts.coefficient(text_config))


def _check_not_cut_off(experts: Experts, language_model: nn.Module) -> None:
    """A checkpointed layer runs under `no_grad` if reentrant; what was recorded inside is then a constant."""
    if experts.are_recomputed(language_model):
        raise ConfigError(
            "the router logits have no gradient, so the load-balancing loss would teach the routers nothing: gradient "
            "checkpointing with use_reentrant=True does that (unmodified transformers says nothing); give "
            'gradient_checkpointing_kwargs={"use_reentrant": False}, or leave output_router_logits out'
        )
