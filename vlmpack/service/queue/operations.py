"""Operations of a model in the engine, and the model's state on disk: snapshots, and replay after a restart.

    snapshot (covers 1..4)      5 forward_backward   6 forward_backward   7 optim_step   8 forward_backward (queued)
    └────────── restored ──────────────── replayed, in the same groups ───────────┘      run as usual

A model's state is always its last snapshot plus the operations that the journal records after it. An operation counts
once its reply is in the journal. Any other work of the engine is lost with the process. So nothing is applied twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from vlmpack.errors import RequestError
from vlmpack.service.queue.checkpoints import StateFolder, check_name, describe, final_name, size_of
from vlmpack.service.queue.journal import CheckpointRow, Kind, ModelRow, RequestRow, SamplingRow
from vlmpack.service.queue.ledger import Entry, Lane, Ledger
from vlmpack.service.wire import codec, messages

if TYPE_CHECKING:
    from vlmpack.service.engine.engine import Engine


SAVES: Mapping[type[messages.Save], tuple[Kind, str]] = {
    messages.SaveWeights: ("weights", "save_weights"),
    messages.SaveForSampler: ("sampler_weights", "save_weights_for_sampler"),
    messages.SaveExternal: ("external_weights", "save_weights_external"),
}
"""Kind of checkpoint of each kind of save, and the type tag that the client reads."""


@final
@dataclass(frozen=True, kw_only=True)
class Done:
    """The outcome of an operation before it is committed."""

    outcome: messages.Outcome
    """The outcome for the client."""
    write: Callable[[], None] | None = None
    """Called to write to the journal, in the same transaction as the reply."""
    is_replayed: bool = False
    """Whether the operation has to be replayed after a restart."""


@final
class Operations:
    """Runs one operation at a time, in the engine thread."""

    def __init__(self, engine: Engine, ledger: Ledger, state: StateFolder) -> None:
        self._engine, self._ledger, self._state, self._journal = engine, ledger, state, ledger.journal

    def parse(self, row: RequestRow) -> messages.Request:
        """Parse a request from the journal, with the seed that was drawn for it."""
        return with_seed(codec.decode(row.kind, self._journal.body(row.owner, row.seq)), row.seed)

    def request(self, entry: Entry) -> messages.Request:
        """Return the parsed request of an entry."""
        if entry.request is None:
            entry.request = self.parse(entry.row)
        return entry.request

    def run(self, lane: Lane, entry: Entry) -> Done:
        """Run an operation other than forward_backward.

        Raises:
            RequestError: the operation cannot be run; the model is unchanged.
            Exception: the engine or the disk failed.
        """
        match request := self.request(entry):
            case messages.CreateModel():
                return self._create(lane, request)
            case messages.CreateFromCheckpoint():
                return self._create_from(lane, request)
            case messages.OptimStep():
                return self._step(lane, request)
            case messages.SaveForSampler(name=None):
                return self._save_unnamed(lane, request)
            case messages.Save():
                return self._save(lane, request)
            case messages.LoadWeights():
                return self._load(lane, entry, request)
            case _:
                raise RequestError(f"{type(request).__name__} is no operation of a model")

    def _step(self, lane: Lane, request: messages.OptimStep) -> Done:
        try:
            metrics = self._engine.optim_step(lane.id, request.adam)
            outcome: messages.Outcome = {"type": "optim_step", "metrics": metrics}
        except RequestError as error:  # the gradient is dropped, and a replay has to drop it too
            outcome = messages.Failure.of(error)
        lane.has_gradients = False
        return Done(outcome=outcome, is_replayed=True)

    # ------------------------------------------------------------------ new models

    def _create(self, lane: Lane, request: messages.CreateModel) -> Done:
        if request.base_model != self._engine.base.name:
            raise RequestError(f"this server has the base model {self._engine.base.name!r}, not {request.base_model!r}")
        self._engine.create(lane.id, request.lora)
        return self._created(lane, request, {"type": "create_model"}, lora=request.lora)

    def _create_from(self, lane: Lane, request: messages.CreateFromCheckpoint) -> Done:
        checkpoint = self._journal.checkpoint(request.path)
        if request.base_model not in (None, checkpoint.base_model):
            seen = f"{request.path} is of the base model {checkpoint.base_model!r}"
            raise RequestError(f"{seen}, not {request.base_model!r}")
        folder = self._training_folder(checkpoint, optimizer=request.optimizer)
        lora = self._engine.create_from(lane.id, folder, optimizer=request.optimizer)
        reply = {"type": "load_weights", "path": request.path}
        return self._created(lane, request, reply, lora=lora, snapshot=self._write_state(lane))

    def _created(
        self, lane: Lane, request: messages.Creation, reply: Mapping[str, Any], *, lora: messages.LoraConfig | None,
        snapshot: str | None = None,
    ) -> Done:  # fmt: skip
        now, base_model = time.time(), self._engine.base.name
        row = ModelRow(
            id=lane.id, session=lane.session, created=now, last_request=now, base_model=base_model, lora=lora,
            user_metadata=request.user_metadata, snapshot=snapshot,
        )  # fmt: skip
        return Done(outcome={**reply, "model_id": lane.id}, write=lambda: self._journal.put(row))

    # ------------------------------------------------------------------ checkpoints

    def _training_folder(self, checkpoint: CheckpointRow, *, optimizer: bool) -> Path:
        if checkpoint.kind == "external_weights":
            raise RequestError(f"{checkpoint.path} is for download only: load a checkpoint of save_state")
        if optimizer and checkpoint.kind != "weights":
            remedy = "load one of save_state, or load it without the optimizer"
            raise RequestError(f"{checkpoint.path} is for sampling and has no optimizer state: {remedy}")
        return self._state.folder(checkpoint.folder)

    def _save(self, lane: Lane, request: messages.Save) -> Done:
        (kind, tag), name, now = SAVES[type(request)], request.name, time.time()
        expires = None if request.ttl_seconds is None else now + request.ttl_seconds
        row = CheckpointRow(
            model=lane.id, kind=kind, name=check_name(name), folder="", created=now, size=0,
            lora=self._journal.model(lane.id).lora,
            base_model=self._engine.base.name, user_metadata=request.user_metadata, expires=expires,
        )  # fmt: skip
        exists = self._journal.row(CheckpointRow, model=lane.id, kind=kind, name=name) is not None
        if exists and not (isinstance(request, messages.SaveWeights) and request.overwrite):
            raise RequestError(f"{row.path} exists: choose another name, or delete it first")
        with self._state.new(lane.id, name) as folder:
            if kind == "external_weights":
                self._engine.export(lane.id, folder)
            else:
                self._engine.save(lane.id, folder, optimizer=kind == "weights")
            row = replace(row, folder=final_name(folder), size=size_of(folder))
            describe(folder, row)
        return Done(outcome={"type": tag, "path": row.path}, write=lambda: self._journal.put(row))

    def _save_unnamed(self, lane: Lane, request: messages.SaveForSampler) -> Done:
        sampler = f"{lane.session}:sample:{request.sampling_session_seq_id}"
        if self._journal.row(SamplingRow, id=sampler) is not None:
            raise RequestError(f"the sampling session {sampler} exists: save with the next sampling_session_seq_id")
        with self._state.new(sampler, "unnamed") as folder:
            self._engine.save(lane.id, folder, optimizer=False)
        now, saved = time.time(), final_name(folder)
        row = SamplingRow(id=sampler, session=lane.session, created=now, model=lane.id, folder=saved)

        def write() -> None:
            self._journal.drop_idle_samplers(kept=self._ledger.limits.unnamed_saves - 1, model=lane.id)
            self._journal.put(row)

        return Done(outcome={"type": "save_weights_for_sampler", "sampling_session_id": sampler}, write=write)

    def _load(self, lane: Lane, entry: Entry, request: messages.LoadWeights) -> Done:
        checkpoint = self._journal.checkpoint(request.path)
        folder = self._training_folder(checkpoint, optimizer=request.optimizer)
        self._engine.load(lane.id, folder, optimizer=request.optimizer)
        lane.has_gradients = False
        snapshot = self._write_state(lane)  # the checkpoint may be deleted before a replay needs it
        return Done(
            outcome={"type": "load_weights", "path": request.path},
            write=lambda: self._journal.cover(lane.id, snapshot=snapshot, covered=entry.row.seq),
        )

    # ------------------------------------------------------------------ the state of a model

    def _write_state(self, lane: Lane) -> str:
        begin = time.perf_counter()
        with self._state.new(lane.id, "state") as folder:
            self._engine.save(lane.id, folder, optimizer=True)
        lane.snapshot_seconds = time.perf_counter() - begin
        lane.seconds = lane.replayed_bytes = 0
        return final_name(folder)

    def snapshot_is_due(self, lane: Lane) -> bool:
        """Return whether a snapshot is possible and worth its time."""
        limits = self._ledger.limits
        if lane.failure is not None or lane.seconds == 0:
            return False
        if lane.snapshot_seconds is None or lane.replayed_bytes > limits.replayed_bytes:
            return True
        return lane.seconds * limits.snapshot_share >= lane.snapshot_seconds

    def snapshot(self, lane: Lane) -> None:
        """Write the model's state after its last operation. Later replays start from this snapshot.

        Raises:
            VlmpackError: the disk is full or fails; the previous snapshot is kept.
        """
        assert not lane.has_gradients, "a snapshot holds no gradients"
        self._journal.cover(lane.id, snapshot=self._write_state(lane), covered=lane.next - 1)

    def restore(self, lane: Lane) -> None:
        """Restore a model from the journal: load its snapshot and replay the operations after it.

        Raises:
            Exception: the model cannot be restored.
        """
        if lane.id in self._engine.models():
            self._engine.free(lane.id)
        row = self._journal.model(lane.id)
        if row.snapshot is None:
            self._engine.create(lane.id, row.lora)
        else:
            self._engine.create_from(lane.id, self._state.folder(row.snapshot), optimizer=True)
        lane.has_gradients = False
        begin = time.perf_counter()
        done = [row for row in self._journal.rows(RequestRow, owner=lane.id) if row.is_replayed]
        for group, rows in groupby(done, key=lambda row: row.seq if row.group is None else row.group):
            self._replay(lane, group, [*rows])
        lane.seconds = time.perf_counter() - begin if done else 0.0

    def _replay(self, lane: Lane, group: int, rows: list[RequestRow]) -> None:
        requests = [self.parse(row) for row in rows]
        lane.replayed_bytes += sum(row.size for row in rows)
        match requests[0]:
            case messages.OptimStep(adam=adam):
                with suppress(RequestError):  # it failed in the first run too
                    self._engine.optim_step(lane.id, adam)
                lane.has_gradients = False
            case messages.ForwardBackward():
                work = self._engine.forward_backward([self._engine.encode(request) for request in requests])  # type: ignore
                while work.rows_left:
                    work.run_row()
                work.results()
                lane.has_gradients |= any(not request.forward_only for request in requests)  # type: ignore
            case other:
                raise AssertionError(f"operation {group} of {lane.id} is a {type(other).__name__}, and has a body")


def with_seed(request: messages.Request, seed: int | None) -> messages.Request:
    """Return a request with the seed that was drawn for it, unless it has its own or needs none."""
    match request:
        case messages.CreateModel(lora=messages.LoraConfig(seed=None) as lora):
            return replace(request, lora=replace(lora, seed=seed))
        case messages.Sample(params=messages.SamplingParams(seed=None) as params):
            return replace(request, params=replace(params, seed=seed))
        case _:
            return request
