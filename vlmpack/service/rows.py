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
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, final

import numpy as np
import torch

from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.row import PackedRow
from vlmpack.layout.sharing import share
from vlmpack.model.engine import packing_state
from vlmpack.model.head import target_logprobs
from vlmpack.model.step import PackedStep
from vlmpack.service.adapters import Adapters, Span
from vlmpack.service.clients import ClientModel
from vlmpack.service.datums import EncodedDatum, EncodedSequence, row_of
from vlmpack.service.losses import BoundLoss


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
    computed: int = 0
    """Tokens that went through the model; what datums of a row begin with is computed once."""
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


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ComputedRow:
    """The results of one row."""

    results: list[DatumResult]
    """Of its datums, in order."""
    tokens: int
    """Tokens that went through the model."""


def compute_row(
    items: Sequence[RowItem],
    adapters: Adapters,
    *,
    backward: bool,
    recomputes: bool = False,
    min_shared: int | None = None,
    agree: Callable[[bool], bool] = bool,
) -> ComputedRow:
    """Compute one row; with `backward`, gradients are added to `.grad` of the clients' parameters.

    If a loss is not finite, there is no backward pass.

    Args:
        items: segments in order; those of one client stand together.
        adapters: the hooks on the base model.
        backward: whether to compute gradients.
        recomputes: whether layers are computed again for them.
        min_shared: tokens from which a beginning that datums of one client share is computed once; None: it is not.
        agree: whether a backward pass that this row can have is made, because those of other ranks can have theirs.
    """
    spans = [
        Span(adapter=client.adapter, length=sum(item.datum.sequence.length for item in group))
        for client, group in _runs(items, lambda item: item.client)
    ]
    model = items[0].client.model
    if recomputes:
        _set_recomputing(model, recomputes=backward)
    state = packing_state(model)
    row = row_of([item.datum.sequence for item in items], state.family, model.config)
    if min_shared is not None and len(spans) == 1:
        row = share(row, min_shared=min_shared)
    with torch.set_grad_enabled(backward), adapters.applied(*spans):
        hidden = _hidden_of(model, row)
        targets = np.concatenate([item.datum.targets for item in items])
        logprobs = _row_logprobs(model, hidden, targets, row.tree, spans, adapters)
        leaf = logprobs.detach().requires_grad_(backward)
        losses = _token_losses(leaf, items)
        slopes = torch.autograd.grad(losses.sum(), leaf)[0] if backward else torch.zeros_like(leaf)
        results = _split(leaf, losses, slopes, items)
        if backward and agree(all(result.is_finite for result in results)):
            torch.autograd.backward(logprobs, slopes)
    return ComputedRow(results=results, tokens=len(targets) if row.tree is None else row.tree.num_tokens)


def _set_recomputing(model: Any, *, recomputes: bool) -> None:
    """Layers in training mode are computed again; their parts stay in evaluation mode, without dropout."""
    family = packing_state(model).family
    for layer in family.language_model(model).get_submodule("layers").children():
        layer.training = recomputes


def last_hidden(model: Any, sequences: Sequence[EncodedSequence]) -> torch.Tensor:
    """[T, D]: what the head is given, of each token of a row of these sequences."""
    return _hidden_of(model, row_of(sequences, packing_state(model).family, model.config))


def _hidden_of(model: Any, row: PackedRow) -> torch.Tensor:
    routers = {"output_router_logits": False} if packing_state(model).family.has("experts") else {}
    step = PackedStep(model)(row, last_hidden=True, **routers)
    assert step.row_last_hidden is not None
    return step.row_last_hidden[0]


def _row_logprobs(
    model: Any,
    hidden_TD: torch.Tensor,
    targets_T: np.ndarray,
    tree: PrefixTree | None,
    spans: Sequence[Span],
    adapters: Adapters,
) -> torch.Tensor:
    """float32 [T]: log-probability of every target; what datums share, targets too, goes through the head once."""
    if tree is None:
        return span_logprobs(model, hidden_TD, torch.from_numpy(targets_T).to(hidden_TD.device), spans, adapters)
    pairs_2T = np.stack([tree.place("cpu").numpy(), targets_T])
    _, first, entry = np.unique(pairs_2T, axis=1, return_index=True, return_inverse=True)
    distinct, of_row = (torch.from_numpy(places.reshape(-1)).to(hidden_TD.device) for places in (first, entry))
    targets = torch.from_numpy(targets_T[first]).to(hidden_TD.device)
    (span,) = spans
    one = [replace(span, length=len(first))]
    return span_logprobs(model, hidden_TD.index_select(0, distinct), targets, one, adapters).index_select(0, of_row)


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
