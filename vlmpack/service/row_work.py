"""Training requests that run together: planned into rows, run a row at a time, results split by request again.

    requests of one model     [a b c] [d e]        plan: rows by two budgets, tokens and patches
    row 0   a a a d d         forward, backward
    row 1   b b c e e e       forward, backward    after the last one the gradient reaches the model, all of it
    results [a b c] [d e]

Rows depend on the requests alone. Requests that want no gradient have rows of their own, computed without one: half of
what a row costs, and more, is its backward pass.

Where adapters share rows, a row takes rows of other works along that fit into what it leaves free:

    a a a d d | x x x | y y         the works of x and y have a row less to run
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import final

from vlmpack.service.adapters import Adapters
from vlmpack.service.clients import ClientModel, Gradients
from vlmpack.service.datums import EncodedDatum, EncodedRequest
from vlmpack.service.messages import Failure, ForwardBackwardResult
from vlmpack.service.ranks import Ranks
from vlmpack.service.row_plans import RowSettings, plan_rows
from vlmpack.service.rows import ComputedRow, DatumResult, RowItem, WorkCount, compute_row
from vlmpack.service.sharding import Sharding, idle_item

log = logging.getLogger(__name__)


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
class Row:
    """A planned row: datums of one model."""

    work: RowWork
    """The work that it belongs to."""
    places: tuple[Place, ...]
    """Its datums."""
    items: tuple[RowItem, ...]
    """The same, as they are computed."""
    backward: bool
    """True if its gradient is wanted."""

    @property
    def client(self) -> ClientModel:
        """Its model."""
        return self.items[0].client

    @property
    def tokens(self) -> int:
        """Tokens of its datums."""
        return sum(item.datum.sequence.length for item in self.items)

    @property
    def patches(self) -> int:
        """Patches of their images."""
        return sum(item.datum.sequence.patches for item in self.items)

    def can_join(self, rows: Sequence[Row], settings: RowSettings) -> bool:
        """Return whether it may be computed together with these: adapters of other models, within both budgets."""
        first, all_rows = rows[0], (*rows, self)
        return (
            self.backward == first.backward
            and self.client.adapter is not None
            and self.client.model is first.client.model
            and all(self.client is not row.client for row in rows)
            and sum(row.tokens for row in all_rows) <= settings.tokens
            and sum(row.patches for row in all_rows) <= settings.patches
        )


@final
class SharedRows:
    """The works whose rows may be computed together, in the order in which they began."""

    def __init__(self) -> None:
        self._works: list[RowWork] = []

    def add(self, work: RowWork) -> None:
        """Enter a work."""
        self._works.append(work)

    def remove(self, work: RowWork) -> None:
        """Take a work out, if it is there."""
        self._works = [other for other in self._works if other is not work]

    def guests(self, host: Row, settings: RowSettings) -> list[Row]:
        """Rows of other models that fit beside `host`."""
        rows = [host]
        if host.client.adapter is not None:
            for work in self._works:
                for row in work.rows:
                    if row.can_join(rows, settings):
                        rows.append(row)
        return rows[1:]


@final
class RowWork:
    """Training requests that run together. Their models change when the last row has run."""

    def __init__(
        self,
        requests: Sequence[EncodedRequest],
        clients: Mapping[str, ClientModel],
        adapters: Adapters,
        settings: RowSettings,
        *,
        count: Callable[[WorkCount], None],
        shared: SharedRows | None = None,
        ranks: Ranks | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        """Plan the rows.

        Args:
            requests: that run together.
            clients: their models by id.
            adapters: the hooks on the base model.
            settings: what a row may hold.
            count: is called with what each row computed.
            shared: works whose rows may be computed together; None: each computes its own.
            ranks: that each compute some of the rows; None: this process computes all.
            sharding: of the base model over these ranks; None: each has all of it.
        """
        self.work = WorkCount()
        """Counts of the rows that `run_row` computed."""
        self.rows: deque[Row] = deque()
        """Rows that have not run."""
        self._requests, self._clients, self._adapters, self._settings = list(requests), clients, adapters, settings
        self._report, self._shared, self._ranks, self._sharding = count, shared, ranks, sharding
        self._failures: dict[int, Failure] = {}
        self._results: dict[Place, DatumResult] = {}
        self._gradients: dict[ClientModel, Gradients] = {}
        self._plan()
        if shared is not None:
            shared.add(self)

    @property
    def rows_left(self) -> int:
        """Rows that have not run. Others that share rows may compute them too."""
        return len(self.rows)

    def run_row(self) -> None:
        """Compute the next row; with several ranks the next rows, one on each.

        Raises:
            Exception: whatever the model raises. Nothing has changed then, and `cancel` ends the work.
        """
        if self._ranks is not None:
            self._run_on(self._ranks)
            return
        host = self.rows[0]
        guests = [] if self._shared is None else self._shared.guests(host, self._settings)
        try:
            self._run([host, *guests])
        except Exception:
            if not guests:
                raise
            for row in (host, *guests):  # whoever's fault it is, each goes on by itself
                row.work.leave_shared()
                row.work.restart()

    def cancel(self) -> None:
        """Forget everything: no model has changed."""
        self.rows.clear()
        self._gradients.clear()
        self.leave_shared()

    def leave_shared(self) -> None:
        """Compute no more rows together with others."""
        if self._shared is not None:
            self._shared.remove(self)
            self._shared = None

    def results(self) -> list[ForwardBackwardResult | Failure]:
        """One for each request, in order; all rows have to have run."""
        assert not self.rows
        return [self._failures.get(at) or self._result(at, request) for at, request in enumerate(self._requests)]

    # ------------------------------------------------------------------ rows

    def _plan(self) -> None:
        groups: dict[tuple[str, bool], list[Place]] = {}
        for at, request in enumerate(self._requests):
            if at not in self._failures:
                places = [Place(request=at, datum=number) for number in range(len(request.data))]
                groups.setdefault((request.model_id, request.forward_only), []).extend(places)
        for (_, forward_only), group in groups.items():
            sequences = [self._datum(place).sequence for place in group]
            for numbers in plan_rows(sequences, self._settings, ranks=1 if self._ranks is None else self._ranks.size):
                places = tuple(group[number] for number in numbers)
                items = tuple(self._item(place) for place in places)
                self.rows.append(Row(work=self, places=places, items=items, backward=not forward_only))

    def _datum(self, place: Place) -> EncodedDatum:
        return self._requests[place.request].data[place.datum]

    def _item(self, place: Place) -> RowItem:
        request = self._requests[place.request]
        return RowItem(client=self._clients[request.model_id], datum=self._datum(place), loss=request.loss)

    def _run(self, rows: Sequence[Row]) -> None:
        """Compute rows as one; if some of it is not finite, requests fail, and the others' rows stay to be run."""
        computed = self._compute(rows)
        self._count(rows, computed.tokens)
        results = iter(computed.results)
        by_row = [[next(results) for _ in row.items] for row in rows]
        is_finite = all(result.is_finite for part in by_row for result in part)
        for row, part in zip(rows, by_row, strict=True):
            row.work.take(row, part, is_computed=is_finite)

    def _compute(self, rows: Sequence[Row]) -> ComputedRow:
        items = [item for row in rows for item in row.items]
        with ExitStack() as stack:
            for row in rows if rows[0].backward else ():
                stack.enter_context(row.work.lent(row.client))
            return compute_row(
                items,
                self._adapters,
                backward=rows[0].backward,
                recomputes=self._settings.recomputes,
                min_shared=self._settings.min_shared,
            )

    def _compute_alike(self, rows: Sequence[Row], rank: int, sharding: Sharding) -> ComputedRow | None:
        """Compute this rank's row, or an idle one, as all ranks run the same passes."""
        row = rows[min(rank, len(rows) - 1)]
        is_idle = rank >= len(rows)
        items = [idle_item(row.items[0])] if is_idle else row.items
        with sharding.passes(), self.lent(row.client) if row.backward else nullcontext():
            computed = compute_row(
                items,
                self._adapters,
                backward=row.backward,
                recomputes=self._settings.recomputes,
                agree=sharding.all_agree,
            )
        return None if is_idle else computed

    def _run_on(self, ranks: Ranks) -> None:
        """Compute a row on each rank; every rank gets all results, and so the same state but for gradients."""
        rows = [self.rows[at] for at in range(min(ranks.size, len(self.rows)))]
        if self._sharding is not None:
            rows = [row for row in rows if row.backward == rows[0].backward]
        outcome: ComputedRow | str | None = None
        try:
            if self._sharding is not None:
                outcome = self._compute_alike(rows, ranks.rank, self._sharding)
            elif ranks.rank < len(rows):
                outcome = self._compute([rows[ranks.rank]])
        except Exception as error:  # the other ranks wait for what this one says
            log.exception("rank %d failed in a row", ranks.rank)
            outcome = f"rank {ranks.rank}: {type(error).__name__}: {error}"
        outcomes = ranks.gather(outcome)
        if errors := [of_rank for of_rank in outcomes if isinstance(of_rank, str)]:
            raise RuntimeError("; ".join(errors))
        for row, computed in zip(rows, outcomes, strict=False):
            self._count([row], computed.tokens)
            is_begun_again = row not in self.rows
            if not is_begun_again:
                self.take(row, computed.results, is_computed=True)

    def take(self, row: Row, results: Sequence[DatumResult], *, is_computed: bool) -> None:
        """Keep the results of a row of this work.

        Args:
            row: the row.
            results: of its datums.
            is_computed: whether all that was computed with it is finite; otherwise there was no backward pass.
        """
        bad = [place for place, result in zip(row.places, results, strict=True) if not result.is_finite]
        if bad:
            self._without(bad)
        elif is_computed:
            self.rows.remove(row)
            self._results |= zip(row.places, results, strict=True)
        if not self.rows:
            self._finish()

    def _without(self, bad: Sequence[Place]) -> None:
        """Begin again without the requests of these datums, so that nothing of them is left."""
        for place in bad:
            message = (
                f"datum {place.datum}: its loss or gradient is not finite; look at its logprobs, which may be far from "
                "those of the model, and at its weights and advantages"
            )
            self._failures.setdefault(place.request, Failure(message=message, category="user"))
        self.restart()

    def restart(self) -> None:
        """Begin again with the requests that have not failed."""
        self.rows.clear()
        self._results.clear()
        self._gradients.clear()
        self._plan()

    def _finish(self) -> None:
        for client in dict.fromkeys(self._clients.values()):
            gradients = self._gradients.get(client)
            if self._ranks is not None:
                gradients = self._ranks.sum(gradients, client.parameters)
            if gradients is not None:
                client.add(gradients)
        self._gradients.clear()
        self.leave_shared()

    # ------------------------------------------------------------------ gradients, counts, results

    @contextmanager
    def lent(self, client: ClientModel) -> Iterator[None]:
        """Lay what the work has accumulated where a backward pass adds to it, and take it up again."""
        gradients = self._gradients.get(client) or [None] * len(client.parameters)
        for parameter, gradient in zip(client.parameters, gradients, strict=True):
            parameter.grad = gradient
        try:
            yield
            self._gradients[client] = [parameter.grad for parameter in client.parameters]
        finally:
            for parameter in client.parameters:
                parameter.grad = None

    def _count(self, rows: Sequence[Row], computed: int) -> None:
        """Count a row, with those that it took along, of which so many tokens went through the model."""
        tokens, patches = sum(row.tokens for row in rows), sum(row.patches for row in rows)
        datums = sum(len(row.items) for row in rows)
        capacity = max(computed, self._settings.tokens)
        work = WorkCount(rows=1, datums=datums, tokens=tokens, computed=computed, capacity=capacity, patches=patches)
        self.work += work
        self._report(work)

    def _result(self, at: int, request: EncodedRequest) -> ForwardBackwardResult:
        results = [self._results[Place(request=at, datum=number)] for number in range(len(request.data))]
        metrics = {
            "loss:sum": sum(result.loss for result in results),
            "tokens:sum": float(sum(datum.sequence.length for datum in request.data)),
        }
        return ForwardBackwardResult(logprobs=tuple(result.logprobs for result in results), metrics=metrics)
