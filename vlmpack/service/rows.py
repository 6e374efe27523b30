"""The rows of some training requests: planned, computed one at a time, results split by datum again.

    requests of one model     [a b c] [d e]        plan: rows by two budgets, tokens and patches
    row 0   a a a d d         forward, backward
    row 1   b b c e e e       forward, backward    after the last one the gradient reaches the model, all of it
    results [a b c] [d e]

Rows depend on the requests alone. Requests that want no gradient have rows of their own, computed without one: half of
what a row costs, and more, is its backward pass.

The losses see log-probabilities alone. What routers of experts would add (a load-balancing loss) is not computed: a
gradient is that of the datums' losses, summed, and so the same in whatever rows they are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, final

import numpy as np
import torch

from vlmpack.model import PackedStep, packing_state, target_logprobs
from vlmpack.plan import Budget, plan_bins
from vlmpack.service.adapters import Adapters, Span
from vlmpack.service.clients import ClientModel, Gradients
from vlmpack.service.datums import EncodedDatum, EncodedRequest, EncodedSequence, row_of
from vlmpack.service.losses import BoundLoss
from vlmpack.service.messages import Failure, ForwardBackwardResult


@final
@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """What a row may hold, and how it is computed. A datum beyond a budget has a row of its own."""

    tokens: int
    """Most tokens."""
    patches: int
    """Most patches of images."""
    shared: bool = False
    """Whether adapters share rows."""
    recomputes: bool = False
    """Whether layers are computed again in the backward pass (gradient checkpointing)."""


@final
@dataclass(frozen=True, kw_only=True)
class WorkCount:
    """What was computed."""

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
@dataclass(frozen=True, kw_only=True)
class Place:
    """A datum of a work."""

    request: int
    """Number of its request in the work."""
    datum: int
    """Number of the datum in that request."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class DatumResult:
    """What came of a datum."""

    logprobs: np.ndarray
    """float32 [N]."""
    loss: float
    """Summed over its tokens; NaN if it is not finite."""
    is_finite: bool
    """Whether the loss and its derivatives are."""


def plan_rows(sequences: Sequence[EncodedSequence], settings: RowSettings) -> list[list[int]]:
    """Numbers of the sequences that share each row, in the order of the rows; inside a row they keep their order."""
    lengths = np.array([sequence.length for sequence in sequences])
    patches = np.array([sequence.patches for sequence in sequences])
    limits = [Budget(name="patches", costs=patches, limit=settings.patches)] if patches.any() else []
    plan = plan_bins(lengths, settings.tokens, budgets=limits, oversize="own_row")
    return [sorted(int(at) for at in row) for row in plan]


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


def compute_row(items: Sequence[RowItem], adapters: Adapters, *, backward: bool) -> list[DatumResult]:
    """Compute one row; with `backward`, gradients are added to `.grad` of the clients' parameters.

    If a loss is not finite, there is no backward pass.

    Args:
        items: segments in order; those of one client stand together.
        adapters: the hooks on the base model.
        backward: whether to compute gradients.
    """
    spans = [
        Span(adapter=client.adapter, length=sum(item.datum.sequence.length for item in group))
        for client, group in _runs(items, lambda item: item.client)
    ]
    model = items[0].client.model
    with torch.set_grad_enabled(backward), adapters.applied(*spans):
        hidden = last_hidden(model, [item.datum.sequence for item in items])
        targets = torch.from_numpy(np.concatenate([item.datum.targets for item in items])).to(hidden.device)
        logprobs = span_logprobs(model, hidden, targets, spans, adapters)
        leaf = logprobs.detach().requires_grad_(backward)
        losses = _token_losses(leaf, items)
        slopes = torch.autograd.grad(losses.sum(), leaf)[0] if backward else torch.zeros_like(leaf)
        results = _split(leaf, losses, slopes, items)
        if backward and all(result.is_finite for result in results):
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
    head, name, lengths = state.family.head(model), state.family.head_path, [span.length for span in spans]

    def head_of(span: Span) -> Callable[[torch.Tensor], torch.Tensor]:
        # `forward`, not a call: the hook on the head belongs to the whole row
        return lambda hidden: adapters.added(head.forward(hidden), hidden, span, name)

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


# ---------------------------------------------------------------------- all rows of some requests


@final
class RowWork:
    """Training requests that run together, a row at a time. The models change when the last row has run."""

    def __init__(
        self,
        requests: Sequence[EncodedRequest],
        clients: Mapping[str, ClientModel],
        adapters: Adapters,
        settings: RowSettings,
        *,
        count: Callable[[WorkCount], None],
    ) -> None:
        self.work = WorkCount()
        """What was computed so far."""
        self._requests, self._clients, self._adapters, self._settings = list(requests), clients, adapters, settings
        self._report = count
        self._failures: dict[int, Failure] = {}
        self._results: dict[Place, DatumResult] = {}
        self._gradients: dict[ClientModel, Gradients] = {}
        self._rows: deque[list[Place]] = deque()
        self._is_open = True
        self._plan()

    @property
    def rows_left(self) -> int:
        """Rows that have not run."""
        return len(self._rows)

    def run_row(self) -> None:
        """Compute the next row."""
        places = self._rows[0]
        items = [self._item(place) for place in places]
        backward = not self._requests[places[0].request].forward_only
        clients = list(dict.fromkeys(item.client for item in items))
        try:
            self._lend(clients if backward else [])
            if self._settings.recomputes:
                _set_recomputing(clients[0].model, recomputes=backward)
            results = compute_row(items, self._adapters, backward=backward)
        finally:
            self._take_back(clients if backward else [])
        self._rows.popleft()
        self._count(items)
        self._results |= zip(places, results, strict=True)
        if bad := [place for place, result in zip(places, results, strict=True) if not result.is_finite]:
            self._without(bad)
        if not self._rows:
            self._finish()

    def cancel(self) -> None:
        """Forget everything: no model has changed."""
        self._rows.clear()
        self._gradients.clear()
        self._is_open = False

    def results(self) -> list[ForwardBackwardResult | Failure]:
        """One for each request, in order; all rows have to have run."""
        assert not self._rows
        return [self._failures.get(at) or self._result(at, request) for at, request in enumerate(self._requests)]

    # ------------------------------------------------------------------ rows

    def _plan(self) -> None:
        places = [
            Place(request=at, datum=number)
            for at, request in enumerate(self._requests)
            if at not in self._failures
            for number in range(len(request.data))
        ]
        groups: dict[Any, list[Place]] = {}
        for place in places:
            groups.setdefault(self._group(self._requests[place.request]), []).append(place)
        order = {name: at for at, name in enumerate(dict.fromkeys(request.model_id for request in self._requests))}
        for group in groups.values():
            group.sort(key=lambda place: order[self._requests[place.request].model_id])
            rows = plan_rows([self._datum(place).sequence for place in group], self._settings)
            self._rows.extend([group[at] for at in row] for row in rows)

    def _group(self, request: EncodedRequest) -> tuple[Any, ...]:
        """Requests of one group may share rows."""
        is_adapter = self._clients[request.model_id].adapter is not None
        return ("adapters" if self._settings.shared and is_adapter else request.model_id, request.forward_only)

    def _datum(self, place: Place) -> EncodedDatum:
        return self._requests[place.request].data[place.datum]

    def _item(self, place: Place) -> RowItem:
        request = self._requests[place.request]
        return RowItem(client=self._clients[request.model_id], datum=self._datum(place), loss=request.loss)

    def _count(self, items: Sequence[RowItem]) -> None:
        tokens = sum(item.datum.sequence.length for item in items)
        patches = sum(item.datum.sequence.patches for item in items)
        capacity = max(tokens, self._settings.tokens)
        work = WorkCount(rows=1, datums=len(items), tokens=tokens, capacity=capacity, patches=patches)
        self.work += work
        self._report(work)

    # ------------------------------------------------------------------ gradients

    def _lend(self, clients: Sequence[ClientModel]) -> None:
        """Put what the work has accumulated where a backward pass adds to it."""
        for client in clients:
            gradients = self._gradients.get(client) or [None] * len(client.parameters)
            for parameter, gradient in zip(client.parameters, gradients, strict=True):
                parameter.grad = gradient

    def _take_back(self, clients: Sequence[ClientModel]) -> None:
        for client in clients:
            self._gradients[client] = [parameter.grad for parameter in client.parameters]
            for parameter in client.parameters:
                parameter.grad = None

    def _without(self, bad: Sequence[Place]) -> None:
        """Begin again without the requests of these datums, so that nothing of them is left."""
        for place in bad:
            message = (
                f"datum {place.datum}: its loss or gradient is not finite; look at its logprobs, which may be "
                "far from those of the model, and at its weights and advantages"
            )
            self._failures.setdefault(place.request, Failure(message=message, category="user"))
        self._rows.clear()
        self._results.clear()
        self._gradients.clear()
        self._plan()

    def _finish(self) -> None:
        assert self._is_open
        for client, gradients in self._gradients.items():
            client.add(gradients)
        self._gradients.clear()
        self._is_open = False

    def _result(self, at: int, request: EncodedRequest) -> ForwardBackwardResult:
        results = [self._results[Place(request=at, datum=number)] for number in range(len(request.data))]
        metrics = {
            "loss:sum": sum(result.loss for result in results),
            "tokens:sum": float(sum(datum.sequence.length for datum in request.data)),
        }
        return ForwardBackwardResult(logprobs=tuple(result.logprobs for result in results), metrics=metrics)
