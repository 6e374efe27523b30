"""One row of datums: which share it, its forward and backward pass, results split by datum again.

    datums    a, b of one adapter, c of another        spans: 2 of them
    row       a a a b b | c c c c                      hidden states of the whole row in one pass
    head      a a a b b   c c c c                      log-probabilities, each span by its own head
    losses    -> slopes: dL / dlogprob of each token   the backward pass begins there

The losses see log-probabilities alone. What routers of experts would add (a load-balancing loss) is not computed: a
gradient is that of the datums' losses, summed, and so the same in whatever rows they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, final

import numpy as np
import torch

from vlmpack.model import PackedStep, packing_state, target_logprobs
from vlmpack.plan import Budget, plan_bins
from vlmpack.service.adapters import Adapters, Span
from vlmpack.service.clients import ClientModel
from vlmpack.service.datums import EncodedDatum, EncodedSequence, row_of
from vlmpack.service.losses import BoundLoss


@final
@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """Budgets of a row, and how it is computed. A datum beyond a budget has a row of its own."""

    tokens: int
    """Most tokens."""
    patches: int
    """Most patches of images."""
    recomputes: bool = False
    """True if layers are computed again in the backward pass (gradient checkpointing)."""


@final
@dataclass(frozen=True, kw_only=True)
class WorkCount:
    """Counts of computed rows."""

    rows: int = 0
    """Packed rows."""
    datums: int = 0
    """Datums."""
    tokens: int = 0
    """Tokens of datums."""
    capacity: int = 0
    """Tokens that these rows had room for."""
    patches: int = 0
    """Patches that went through the vision tower."""

    def __add__(self, other: WorkCount) -> WorkCount:
        return WorkCount(**{name: value + vars(other)[name] for name, value in vars(self).items()})


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class DatumResult:
    """Results of a datum."""

    logprobs: np.ndarray
    """float32 [N]."""
    loss: float
    """Summed over its tokens; NaN if it is not finite."""
    is_finite: bool
    """True if the loss and its derivatives are."""


SLACK = (1.01, 1.03, 1.1, 1.2, 1.4)
"""Budgets that are tried for rows of like size, as parts of their mean."""


def plan_rows(sequences: Sequence[EncodedSequence], settings: RowSettings, *, ranks: int = 1) -> list[list[int]]:
    """Numbers of the sequences that share each row, in the order of the rows; inside a row they keep their order.

    The rows are as few as the budgets allow, rounded up to a multiple of the ranks, and of like size: ranks wait for
    the largest one, and a row that is nearly empty costs more than it computes.
    """
    lengths = np.array([sequence.length for sequence in sequences])
    patches = np.array([sequence.patches for sequence in sequences])
    limits = [Budget(name="patches", costs=patches, limit=settings.patches)] if patches.any() else []

    def bins(tokens: int) -> list[list[int]]:
        plan = plan_bins(lengths, tokens, budgets=limits, oversize="own_row")
        return [sorted(int(at) for at in row) for row in plan]

    rows = bins(settings.tokens)
    count = ranks * math.ceil(len(rows) / ranks)
    if count == 1:
        return rows
    for slack in SLACK:
        tokens = max(int(lengths.max()), math.ceil(slack * lengths.sum() / count))
        if tokens < settings.tokens and len(even := bins(tokens)) <= count:
            return even
    return rows


# ---------------------------------------------------------------------- one row


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class RowItem:
    """A segment of a row."""

    client: ClientModel
    """Its model."""
    datum: EncodedDatum
    """The datum."""
    loss: BoundLoss
    """Its loss."""


def compute_row(
    items: Sequence[RowItem],
    adapters: Adapters,
    *,
    backward: bool,
    recomputes: bool = False,
    agree: Callable[[bool], bool] = bool,
) -> list[DatumResult]:
    """Compute one row; with `backward`, gradients are added to `.grad` of the clients' parameters.

    If a loss is not finite, there is no backward pass.

    Args:
        items: segments in order; those of one client stand together.
        adapters: the hooks on the base model.
        backward: whether to compute gradients.
        recomputes: whether layers are computed again for them.
        agree: whether a backward pass that this row can have is made, because those of other ranks can have theirs.
    """
    spans = [
        Span(adapter=client.adapter, length=sum(item.datum.sequence.length for item in group))
        for client, group in _runs(items, lambda item: item.client)
    ]
    model = items[0].client.model
    if recomputes:
        _set_recomputing(model, recomputes=backward)
    with torch.set_grad_enabled(backward), adapters.applied(*spans):
        hidden = last_hidden(model, [item.datum.sequence for item in items])
        targets = torch.from_numpy(np.concatenate([item.datum.targets for item in items])).to(hidden.device)
        logprobs = span_logprobs(model, hidden, targets, spans, adapters)
        leaf = logprobs.detach().requires_grad_(backward)
        losses = _token_losses(leaf, items)
        slopes = torch.autograd.grad(losses.sum(), leaf)[0] if backward else torch.zeros_like(leaf)
        results = _split(leaf, losses, slopes, items)
        if backward and agree(all(result.is_finite for result in results)):
            torch.autograd.backward(logprobs, slopes)
    return results


def _set_recomputing(model: Any, *, recomputes: bool) -> None:
    """Layers in training mode are computed again; their parts stay in evaluation mode, without dropout."""
    family = packing_state(model).family
    for layer in family.language_model(model).get_submodule("layers").children():
        layer.training = recomputes


def last_hidden(model: Any, sequences: Sequence[EncodedSequence]) -> torch.Tensor:
    """[T, D]: what the head is given, of each token of a row of these sequences."""
    family = packing_state(model).family
    routers = {"output_router_logits": False} if family.has("experts") else {}
    step = PackedStep(model)(row_of(sequences, family, model.config), last_hidden=True, **routers)
    assert step.row_last_hidden is not None
    return step.row_last_hidden[0]


def span_logprobs(
    model: Any, hidden_TD: torch.Tensor, targets_T: torch.Tensor, spans: Sequence[Span], adapters: Adapters
) -> torch.Tensor:
    """float32 [T]: log-probability of every target, each span by the head with its own adapter."""
    state = packing_state(model)
    family, text_config = state.family, state.family.text_config(model.config)
    head, name, lengths = family.head(model), family.head_path, [span.length for span in spans]

    def head_of(span: Span) -> Callable[[torch.Tensor], torch.Tensor]:
        # `forward`, not a call: the hook on the head belongs to the whole row
        return lambda hidden: family.logits(adapters.added(head.forward(hidden), hidden, span, name), text_config)

    parts = zip(hidden_TD.split(lengths), targets_T.split(lengths), spans, strict=True)
    chunk = state.config.head_chunk
    return torch.cat([target_logprobs(hidden, ids, head_of(span), chunk=chunk) for hidden, ids, span in parts])


def _token_losses(logprobs: torch.Tensor, items: Sequence[RowItem]) -> torch.Tensor:
    """float32 [T]: what each token adds."""
    lengths = [item.datum.sequence.length for item in items]
    parts, pieces = [], iter(logprobs.split(lengths))
    for loss, group in _runs(items, lambda item: item.loss):
        inputs = {
            name: torch.from_numpy(np.concatenate([item.datum.inputs[name] for item in group])).to(logprobs.device)
            for name in group[0].datum.floats
        }
        parts.append(loss(torch.cat([next(pieces) for _ in group]), inputs))
    return torch.cat(parts)


def _split(
    logprobs: torch.Tensor, losses: torch.Tensor, slopes: torch.Tensor, items: Sequence[RowItem]
) -> list[DatumResult]:
    """By datum, on the host."""
    bounds = np.cumsum([item.datum.sequence.length for item in items])[:-1]
    columns = torch.stack([logprobs.detach(), losses.detach(), slopes]).cpu().numpy()
    return [_datum_result(part) for part in np.split(columns, bounds, axis=1)]


def _datum_result(columns: np.ndarray) -> DatumResult:
    """Of float32 [3, N]: log-probabilities, losses and derivatives."""
    is_finite = bool(np.isfinite(columns).all())
    loss = float(columns[1].sum(dtype=np.float64)) if is_finite else math.nan
    return DatumResult(logprobs=columns[0].copy(), loss=loss, is_finite=is_finite)


def _runs(items: Sequence[RowItem], key: Callable[[RowItem], Any]) -> list[tuple[Any, list[RowItem]]]:
    """Neighbours with the same key."""
    return [(value, list(group)) for value, group in groupby(items, key)]
