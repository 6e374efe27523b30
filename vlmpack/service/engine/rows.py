"""Training requests that run together: planned into packed rows, run row by row, and split into results per request.

    requests of one model     [a b c] [d e]        plan: rows with two budgets, tokens and patches
    row 0   a a a d d         forward, backward
    row 1   b b c e e e       forward, backward    after the last row, the model gets the whole gradient
    results [a b c] [d e]

    datums  P a   P b   P c   d        P: a prompt with an image, a to c: its completions
    row     P a b c | d                computed tokens; the token budget limits these

Rows depend only on the requests. Requests without a gradient get separate rows, which run without a backward pass: it
would be more than half of a row's cost.

Losses depend on log-probabilities only: the backward pass starts from `slopes`, dL / dlogprob of each token. Auxiliary
losses of expert routers (load balancing) are not computed. So a gradient is exactly the sum of the datums' losses'
gradients, however the datums are packed.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from vlmpack.collate.assemble import SharePrefixes, media_table, prefix_tree, to_packed
from vlmpack.families.family import Family
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.row import PackedRow
from vlmpack.layout.segments import SlotRule
from vlmpack.model.engine import packing_state
from vlmpack.model.head import target_logprobs
from vlmpack.model.step import PackedStep
from vlmpack.plan.lengths import Budget
from vlmpack.plan.plan import plan_bins
from vlmpack.plan.prefix_groups import ALONE, PrefixGroups
from vlmpack.service.engine.clients import ClientModel
from vlmpack.service.engine.datums import EncodedDatum, EncodedRequest, EncodedSequence
from vlmpack.service.engine.losses import LENGTHS, TARGETS, BoundLoss, LossInputs, bind_loss
from vlmpack.service.ranks import Gradients, Ranks, Sharding
from vlmpack.service.wire.messages import Failure, ForwardBackwardResult

if TYPE_CHECKING:
    from vlmpack.service.engine.engine import Engine

log = logging.getLogger(__name__)

SLACK = (1.01, 1.03, 1.1, 1.2, 1.4)
"""Token budgets to try for rows of similar size, as multiples of their mean."""


# ---------------------------------------------------------------------- which datums share a row


def plan_rows(
    sequences: Sequence[EncodedSequence],
    *,
    tokens: int,
    patches: int,
    min_shared: int | None = None,
    family: Family | None = None,
    has_pieces: bool = False,
    ranks: int = 1,
) -> list[list[int]]:
    """Return the indices of the sequences in each row, in the order of the rows. Within a row, indices increase.

    There are as few rows as the budgets allow, rounded up to a multiple of the ranks. Rows have similar sizes, because
    ranks wait for the largest row, and a nearly empty row costs more than its share.

    Args:
        sequences: sequences of one model. One beyond a budget gets its own row.
        tokens: maximum number of computed tokens of a row.
        patches: maximum number of image patches of a row.
        min_shared: minimum number of tokens of a shared prefix that is computed only once; None: prefixes are not
            shared.
        family: family of the model; needed if it takes images.
        has_pieces: whether the model computes a larger row in pieces. Large groups that share a long prefix then get
            one row.
        ranks: number of ranks that compute rows at the same time.
    """
    lengths = np.array([sequence.length for sequence in sequences])
    costs = np.array([sequence.patches for sequence in sequences])
    tree = None
    if min_shared is not None:  # of all sequences, as if they were one row
        samples = [sequence.sample for sequence in sequences]
        tree = prefix_tree(samples, sharing=SharePrefixes(min_shared=min_shared), family=family)
    groups = None if tree is None else _groups_of(tree, sequences)
    shared = None if groups is None else groups.patches
    limits = [Budget(name="patches", costs=costs, limit=patches, shared=shared)] if costs.any() else []

    def bins(tokens: int) -> list[list[int]]:
        plan = plan_bins(lengths, tokens, budgets=limits, overlength="own_row", groups=groups, whole_groups=has_pieces)
        return [sorted(int(at) for at in row) for row in plan]

    rows = bins(tokens)
    count = ranks * math.ceil(len(rows) / ranks)
    if count == 1:
        return rows
    total = lengths.sum() if tree is None else tree.num_tokens
    for slack in SLACK:
        even_tokens = max(int(lengths.max()), math.ceil(slack * total / count))
        if even_tokens < tokens and len(even := bins(even_tokens)) <= count:
            return even
    return rows


def _groups_of(tree: PrefixTree, sequences: Sequence[EncodedSequence]) -> PrefixGroups:
    """Return the nodes of a tree that several sequences share as groups, with the patches of the images in each."""
    paths = [tree.path(leaf) for leaf in tree.leaves]
    nodes = np.flatnonzero(np.bincount(np.concatenate(paths)) > 1).tolist()
    number = {node: group for group, node in enumerate(nodes)}
    tokens = np.array(tree.keys.lengths, np.int64)[nodes]
    patches = np.zeros(len(nodes), np.int64)
    of_samples = []
    for sequence, path in zip(sequences, paths, strict=True):
        groups = [number[node] for node in path if node in number]
        of_samples.append(groups[-1] if groups else ALONE)
        ends = [image.runs[-1][1] for image in media_table([sequence.sample]).images]
        for group in groups:  # a prefix holds whole images only
            whole = zip(ends, sequence.patches_of_images, strict=True)
            patches[group] = sum(each for end, each in whole if end <= tokens[group])
    parents = np.array([number.get(tree.parents[node], ALONE) for node in nodes], np.int64)
    return PrefixGroups(of_samples=np.array(of_samples), parents=parents, tokens=tokens, patches=patches)


# ---------------------------------------------------------------------- one row


def row_of(sequences: Sequence[EncodedSequence], model: Any, *, min_shared: int | None = None) -> PackedRow:
    """Pack sequences into a row without gaps, with pixels in the model's dtype. No token has a label.

    With `min_shared`, the row is a tree of shared prefixes of at least so many tokens.
    """
    family = packing_state(model).family
    samples = [sequence.sample for sequence in sequences]
    sharing = None if min_shared is None else SharePrefixes(min_shared=min_shared)
    return to_packed(samples, rule=SlotRule(), pad_token_id=0, pixel_dtype=model.dtype, family=family, sharing=sharing)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class RowItem:
    """A datum in a row."""

    request: int
    """Index of the request in the `RowWork`."""
    number: int
    """Index of the datum in its request."""
    datum: EncodedDatum
    """The datum."""
    loss: BoundLoss
    """The loss."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """A planned row."""

    items: tuple[RowItem, ...]
    """The datums, in order."""
    backward: bool
    """Whether the gradient is needed."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class DatumResult:
    """Results of a datum."""

    logprobs: np.ndarray
    """float32 [N] or [N, K]."""
    loss: float
    """Sum over the tokens; NaN if a log-probability, loss or derivative is not finite."""

    @property
    def is_finite(self) -> bool:
        """Return whether log-probabilities, losses and derivatives are all finite."""
        return math.isfinite(self.loss)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ComputedRow:
    """The results of one row."""

    results: list[DatumResult]
    """Results of the datums, in order."""
    tokens: int
    """Number of tokens that went through the model."""


def compute_row(row: Row, client: ClientModel, engine: Engine, *, agree: Callable[[bool], bool] = bool) -> ComputedRow:
    """Compute one row, and add its gradient, if needed, to `.grad` of the model's parameters.

    If a loss is not finite, there is no backward pass.

    Args:
        row: the row.
        client: the model.
        engine: the engine that the model belongs to.
        agree: called with whether this row can have a backward pass; returns whether to run it. With a sharded base
            model, all ranks have to agree.
    """
    model, items = client.model, row.items
    packed = row_of([item.datum.sequence for item in items], model, min_shared=engine.min_shared)
    recomputing = _recomputing(model) if engine.config.gradient_checkpointing and row.backward else nullcontext()
    with recomputing, torch.set_grad_enabled(row.backward), engine.adapters.applied(client.adapter):
        logprobs = _logprobs(model, _hidden_of(model, packed), items, packed.tree)
        leaf = logprobs.detach().requires_grad_(row.backward)
        losses = _token_losses(leaf, items)
        slopes = torch.autograd.grad(losses.sum(), leaf)[0] if row.backward else torch.zeros_like(leaf)
        results = _split(leaf, losses, slopes, items)
        if row.backward and agree(all(result.is_finite for result in results)):
            torch.autograd.backward(logprobs, slopes)
    tokens = sum(item.datum.sequence.length for item in items)
    return ComputedRow(results=results, tokens=tokens if packed.tree is None else packed.tree.num_tokens)


@contextmanager
def _recomputing(model: Any) -> Iterator[None]:
    """Recompute layers in the backward pass, which is where gradient checkpointing finds them in training mode.

    Their submodules stay in evaluation mode, without dropout.
    """
    layers = [*packing_state(model).family.language_model(model).get_submodule("layers").children()]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def last_hidden(model: Any, sequences: Sequence[EncodedSequence]) -> torch.Tensor:
    """Return the final hidden states [T, D], the input of the head, for a row of these sequences."""
    return _hidden_of(model, row_of(sequences, model))


def _hidden_of(model: Any, row: PackedRow) -> torch.Tensor:
    """Return the final hidden states of all tokens that are computed: of the row, [T, D], or of its tree, [t, D]."""
    routers = {"output_router_logits": False} if packing_state(model).family.has("experts") else {}
    step = PackedStep(model)(row, last_hidden=True, **routers)
    assert step.computed_last_hidden is not None
    return step.computed_last_hidden[0]


def _logprobs(model: Any, hidden_tD: torch.Tensor, items: Sequence[RowItem], tree: PrefixTree | None) -> torch.Tensor:
    """Return the log-probability of every target, float32 [M].

    Equal (position, target) pairs of a shared prefix go through the head once.
    """
    state = packing_state(model)
    head, chunk, device = state.family.to_logits(model), state.config.head_chunk, hidden_tD.device
    targets_M = np.concatenate([item.datum.targets for item in items])
    has_several = any(item.datum.inputs.keys is not None for item in items)
    if tree is None and not has_several:
        return target_logprobs(hidden_tD, torch.from_numpy(targets_M).to(device), head, chunk=chunk)
    starts = np.cumsum([0, *(item.datum.sequence.length for item in items)])
    places_M = np.concatenate([item.datum.places + start for item, start in zip(items, starts, strict=False)])
    places_M = places_M if tree is None else tree.place("cpu").numpy()[places_M]
    if has_several:
        return _several_logprobs(hidden_tD, places_M, targets_M, head, chunk=chunk)
    pairs, entry = np.unique(np.stack([places_M, targets_M]), axis=1, return_inverse=True)
    places, targets, of_row = (torch.from_numpy(each).to(device) for each in (*pairs, entry.reshape(-1)))
    return target_logprobs(hidden_tD.index_select(0, places), targets, head, chunk=chunk).index_select(0, of_row)


def _several_logprobs(
    hidden_tD: torch.Tensor, places_M: np.ndarray, targets_M: np.ndarray, head: Any, *, chunk: int
) -> torch.Tensor:
    """Return the log-probabilities where positions may have several targets.

    The logits of a position are computed once for all of its targets.
    """
    device = hidden_tD.device
    if not len(places_M):
        return hidden_tD[:0].float().sum(-1)
    places_P, place_M, counts = np.unique(places_M, return_inverse=True, return_counts=True)
    place_M = place_M.reshape(-1)
    number_M = np.empty_like(place_M)  # index of each target among the targets of its position
    number_M[np.argsort(place_M, kind="stable")] = np.arange(len(place_M)) - np.repeat(
        np.cumsum(counts) - counts, counts
    )
    targets_PK = np.zeros((len(places_P), counts.max()), np.int64)
    targets_PK[place_M, number_M] = targets_M
    hidden_PD = hidden_tD.index_select(0, torch.from_numpy(places_P).to(device))
    scores_PK = target_logprobs(hidden_PD, torch.from_numpy(targets_PK).to(device), head, chunk=chunk)
    return scores_PK[tuple(torch.from_numpy(np.stack([place_M, number_M])).to(device))]


def _token_losses(logprobs: torch.Tensor, items: Sequence[RowItem]) -> torch.Tensor:
    """Return the loss of each target, float32 [M]. Adjacent datums with the same loss are computed together."""
    parts, pieces = [], iter(logprobs.split([len(item.datum.targets) for item in items]))
    for loss, same in groupby(items, lambda item: item.loss):
        group = list(same)
        inputs = {
            name: torch.from_numpy(np.concatenate([each.datum.inputs.arrays[name] for each in group])).to(
                logprobs.device
            )
            for name in group[0].datum.inputs.arrays
            if name != TARGETS
        }
        inputs[LENGTHS] = torch.tensor([len(each.datum.targets) for each in group], device=logprobs.device)
        parts.append(loss(torch.cat([next(pieces) for _ in group]), inputs))
    return torch.cat(parts)


def _split(
    logprobs: torch.Tensor, losses: torch.Tensor, slopes: torch.Tensor, items: Sequence[RowItem]
) -> list[DatumResult]:
    """Split results by datum, on the host."""
    bounds = np.cumsum([len(item.datum.targets) for item in items])[:-1]
    columns = torch.stack([logprobs.detach(), losses.detach(), slopes]).cpu().numpy()
    results = []
    for item, part in zip(items, np.split(columns, bounds, axis=1), strict=True):
        loss = float(part[1].sum(dtype=np.float64)) if np.isfinite(part).all() else math.nan
        results.append(DatumResult(logprobs=item.datum.inputs.unflatten(part[0].copy()), loss=loss))
    return results


# ---------------------------------------------------------------------- the rows of some requests


@final
class RowWork:
    """Training requests of one model that run together. The model changes only when the last row has run."""

    def __init__(self, client: ClientModel, requests: Sequence[EncodedRequest], engine: Engine) -> None:
        """Plan the rows of requests that run together on a client's model."""
        self._client, self._requests, self._engine = client, list(requests), engine
        self._rows: deque[Row] = deque()
        self._failures: dict[int, Failure] = {}
        self._results: dict[tuple[int, int], DatumResult] = {}
        self._gradients: Gradients | None = None
        self._plan()

    @property
    def rows_left(self) -> int:
        """Number of rows that have not run."""
        return len(self._rows)

    def run_row(self) -> None:
        """Compute the next row; with several ranks, the next rows, one per rank.

        Raises:
            Exception: any error of the model, which has not changed then; `cancel` must be called.
        """
        if self._engine.ranks is None:
            row = self._rows[0]
            self._take(row, self._compute(row))
        else:
            self._run_on(self._engine.ranks, self._engine.sharding)

    def cancel(self) -> None:
        """Discard all work. The model has not changed."""
        self._rows.clear()
        self._gradients = None

    def results(self) -> list[ForwardBackwardResult | Failure]:
        """Return one result per request, in order. All rows must have run."""
        assert not self._rows
        return [self._failures.get(at) or self._result(at, request) for at, request in enumerate(self._requests)]

    # ------------------------------------------------------------------ rows

    def _plan(self) -> None:
        engine = self._engine
        limits = engine.config.limits
        for backward in (True, False):
            group = [
                RowItem(request=at, number=number, datum=datum, loss=request.loss)
                for at, request in enumerate(self._requests)
                if at not in self._failures and request.forward_only != backward
                for number, datum in enumerate(request.data)
            ]
            if not group:
                continue
            rows = plan_rows(
                [item.datum.sequence for item in group],
                tokens=limits.row_tokens,
                patches=limits.patches,
                min_shared=engine.min_shared,
                family=engine.family,
                has_pieces=engine.has_pieces,
                ranks=1 if engine.ranks is None else engine.ranks.size,
            )
            self._rows += [Row(items=tuple(group[at] for at in row), backward=backward) for row in rows]

    def _compute(self, row: Row, *, agree: Callable[[bool], bool] = bool) -> ComputedRow:
        if not row.backward:
            return compute_row(row, self._client, self._engine, agree=agree)
        with self._client.with_grad(self._gradients):  # the backward pass adds to it
            computed = compute_row(row, self._client, self._engine, agree=agree)
            self._gradients = [parameter.grad for parameter in self._client.parameters]
        return computed

    def _run_on(self, ranks: Ranks, sharding: Sharding | None) -> None:
        """Compute one row per rank. Every rank gets all results, so that ranks differ only in their gradients.

        With a sharded base model, all ranks run the same passes, a rank without a row those of an idle one.
        """
        rows = [self._rows[at] for at in range(min(ranks.size, len(self._rows)))]
        if sharding is not None:
            rows = [row for row in rows if row.backward == rows[0].backward]
        outcome: ComputedRow | str | None = None
        try:
            if ranks.rank < len(rows):
                with nullcontext() if sharding is None else sharding.passes():
                    outcome = self._compute(rows[ranks.rank], agree=bool if sharding is None else sharding.all_agree)
            elif sharding is not None:
                with sharding.passes():
                    self._compute(replace(rows[0], items=(_idle_item(),)), agree=sharding.all_agree)
        except Exception as error:  # the other ranks wait for this one's outcome
            log.exception("rank %d failed in a row", ranks.rank)
            outcome = f"rank {ranks.rank}: {type(error).__name__}: {error}"
        outcomes = ranks.gather(outcome)
        if errors := [of_rank for of_rank in outcomes if isinstance(of_rank, str)]:
            raise RuntimeError("; ".join(errors))
        for row, computed in zip(rows, outcomes, strict=False):
            self._take(row, computed)

    def _take(self, row: Row, computed: ComputedRow) -> None:
        """Count a row and keep its results.

        If datums are not finite, fail their requests, and restart the work without them.
        """
        self._engine.counts.update(
            rows_total=1,
            trained_tokens_total=sum(item.datum.sequence.length for item in row.items),
            computed_tokens_total=computed.tokens,
            patches_total=sum(item.datum.sequence.patches for item in row.items),
        )
        if row not in self._rows:  # a row of another rank, and the work was restarted
            return
        results = list(zip(row.items, computed.results, strict=True))
        if bad := [item for item, result in results if not result.is_finite]:
            for item in bad:
                message = (
                    f"datum {item.number}: its loss or gradient is not finite; look at its logprobs, which may be far "
                    "from those of the model, and at its weights and advantages"
                )
                self._failures.setdefault(item.request, Failure(message=message, category="user"))
            self.cancel()
            self._results.clear()
            self._plan()
        else:
            self._rows.remove(row)
            self._results |= {(item.request, item.number): result for item, result in results}
        if not self._rows:
            self._finish()

    def _finish(self) -> None:
        gradients, self._gradients = self._gradients, None
        if self._engine.ranks is not None:
            gradients = self._engine.ranks.sum(gradients, self._client.parameters)
        if gradients is not None:
            self._client.add(gradients)

    def _result(self, at: int, request: EncodedRequest) -> ForwardBackwardResult:
        results = [self._results[at, number] for number in range(len(request.data))]
        metrics = {
            "loss:sum": sum(result.loss for result in results),
            "tokens:sum": float(sum(datum.sequence.length for datum in request.data)),
        }
        return ForwardBackwardResult(logprobs=tuple(result.logprobs for result in results), metrics=metrics)


def _idle_item() -> RowItem:
    """Return the item of an idle row: one token with weight 0."""
    inputs = LossInputs(arrays={TARGETS: np.zeros(1, np.int64), "weights": np.zeros(1, np.float32)}, shape=(1,))
    datum = EncodedDatum(sequence=EncodedSequence(input_ids=np.zeros(1, np.int64)), inputs=inputs)
    return RowItem(request=0, number=0, datum=datum, loss=bind_loss("cross_entropy", {}))
