"""The thread that owns the engine, and the models' states on disk.

It runs one row, operation or sampling slice at a time, and alternates between models and sampling.

models       A ▣▣▣   B ▣   C ▣▣          rows of their running groups, or their next operation
turns        A B C sample A C sample ...  the least recently served model; a sampling slice between two rows

a group      consecutive waiting forward_backwards of a model, up to its next other operation: they share
             rows, and their replies are committed together.

a state      snapshot (covers 1..4)      5 forward_backward   6 forward_backward   7 optim_step   8 (queued)
             └────────── restored ──────────────── replayed, in the same groups ───────────┘      runs as usual

A model's state is always its last snapshot plus the operations that the journal records after it. An operation counts
once its reply is in the journal. Any other work of the engine is lost with the process. So nothing is applied twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from vlmpack.errors import RequestError, VlmpackError
from vlmpack.service.queue.checkpoints import check_name, describe, final_name, size_of
from vlmpack.service.queue.journal import CheckpointRow, JournalError, Kind, ModelRow, RequestRow, SamplingRow, State
from vlmpack.service.wire import codec, messages
from vlmpack.service.wire.messages import Failure, Outcome, Reply

if TYPE_CHECKING:
    from vlmpack.service.engine.engine import Engine
    from vlmpack.service.queue.queue import Entry, Lane, RequestQueue

SAVES: Mapping[type[messages.Save], tuple[Kind, str]] = {
    messages.SaveWeights: ("weights", "save_weights"),
    messages.SaveForSampler: ("sampler_weights", "save_weights_for_sampler"),
    messages.SaveExternal: ("external_weights", "save_weights_external"),
}
"""Kind of checkpoint of each kind of save, and the type tag that the client reads."""
TIDY_SECONDS = 0.5
"""Seconds between two calls of `tidy`."""
CREATIONS = ("CreateModel", "CreateFromCheckpoint")
CHANGES = ("OptimStep", "LoadWeights")
"""Operations that leave a model undefined when the engine fails in them."""

Write = Callable[[], None]
"""Writes to the journal what an operation has done; called in the transaction that records the reply."""

log = logging.getLogger("vlmpack.service")


@final
class Stopped(Exception):  # noqa: N818 (never leaves this file)
    """The thread was told to stop while it waited for the disk."""


@final
class EngineThread:
    """The thread that owns the engine; see the module's docstring.

    Args:
        engine: the engine, which belongs to this thread from `start` on.
        sampler: the sampler, too.
        queue: all accepted requests, and the folder of the models' states. The thread calls its `tidy` about twice a
            second.
    """

    def __init__(self, engine: Engine, sampler: Any, queue: RequestQueue) -> None:
        self._engine, self._sampler, self._queue = engine, sampler, queue
        self._journal, self._state, self._limits = queue.journal, queue.state, queue.limits
        self._sampling: dict[str, tuple[Path | None, Entry]] = {}
        """Snapshot and request, by the name in the sampling engine; None: the base model."""
        self._thread = threading.Thread(target=self._main, name="vlmpack-engine", daemon=True)
        self._turn = 0
        self._tidied = 0.0
        self._stop = False
        self._drain_until: float | None = None
        self.fault: str | None = None
        """Why the thread ended; None: it has not failed."""
        self.is_restored = False
        """Whether the journal's models are in the engine."""
        self.counts: dict[State, Counter[str]] = {"done": Counter(), "failed": Counter()}
        """Number of requests by outcome and kind."""
        self.snapshots = 0
        """Number of snapshots written."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds in the engine, by use."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, *, drain: float | None = None) -> None:
        """Stop after the current unit of work, or after the running groups. Returns when the thread has ended.

        Args:
            drain: seconds for running groups to finish; then snapshots are written. None: stop at once.
        """
        with self._queue.lock:
            if drain is None:
                self._stop = True
            else:
                self._drain_until = time.monotonic() + drain
            self._queue.changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    # ------------------------------------------------------------------ the loop

    def _main(self) -> None:
        try:
            self._restore_all()
            while not self._stop and not self._is_drained():
                self._turn_once()
            if not self._stop:
                self._snapshot_all()
        except Stopped:
            pass
        except BaseException as error:
            log.exception("the engine thread ended")
            self.fault = Failure.of(error).message

    def _is_drained(self) -> bool:
        if self._drain_until is None:
            return False
        return time.monotonic() >= self._drain_until or all(lane.work is None for lane in self._lanes())

    def _turn_once(self) -> None:
        self._free_closed()
        if (now := time.monotonic()) - self._tidied >= TIDY_SECONDS:
            self._tidied = now
            self._queue.tidy()
            self._sweep()
        with self._queue.lock:
            self._queue.encode_samples()
            lane, unit = self._next_unit()
            samples = bool(self._sampling) or any(entry.is_encoded for entry in self._queue.new_samples)
            samples = samples and self._drain_until is None
            if unit is None and not samples:
                if not self._stop and not self._is_drained():  # a stop may have come since the loop checked
                    self._queue.changed.wait(TIDY_SECONDS)
                return
        if unit is not None and lane is not None:
            self._guarded(lane, unit)
        if samples:
            begin = time.perf_counter()
            self._sample()
            self.seconds["sampling"] += time.perf_counter() - begin

    def _guarded(self, lane: Lane, unit: Callable[[], None]) -> None:
        """Run a unit. An internal error stops only its model, which the next start restores."""
        try:
            unit()
        except Stopped:
            raise
        except Exception as error:
            log.exception("%s is stopped", lane.id)
            lane.work, lane.group = None, []
            message = Failure.of(error).message
            lane.failure = f"{message}; the state of {lane.id} comes back when the server is started anew"

    def _lanes(self) -> list[Lane]:
        with self._queue.lock:
            return [*self._queue.lanes.values()]

    def _next_unit(self) -> tuple[Lane | None, Callable[[], None] | None]:
        self._queue.is_short = False
        for lane in sorted(self._queue.lanes.values(), key=lambda lane: lane.turn):
            if (lane.entries or lane.work) and (unit := self._unit_of(lane)) is not None:
                self._turn += 1
                lane.turn = self._turn
                return lane, unit
        return None, None

    def _unit_of(self, lane: Lane) -> Callable[[], None] | None:
        if lane.work is not None:
            return lambda: self._run_row(lane)
        head = lane.entries.get(lane.next)
        if head is None or self._drain_until is not None:
            return None
        if lane.failure is None and lane.next > 0 and not lane.is_created:
            lane.failure = f"{lane.id} was not created: its creation failed"
        if lane.failure is not None:
            message = lane.failure
            return lambda: self.finish([(head, Failure(message=message, category="server"))])
        if not head.is_forward_backward:
            return lambda: self._operate(lane, head)
        group = self._queue.encode_ahead(lane)
        return (lambda: self._begin_group(lane, group)) if all(entry.is_encoded for entry in group) else None

    def _free_closed(self) -> None:
        with self._queue.lock:
            closed, self._queue.closed = self._queue.closed, []
        for lane in closed:
            try:
                if lane.work is not None:
                    lane.work.cancel()
                if lane.id in self._engine.models():
                    self._engine.free(lane.id)
            except Exception:
                log.exception("the model %s could not be released", lane.id)

    def _sweep(self) -> None:
        """Remove folders that nothing refers to."""
        try:
            wanted = self._journal.folders()
            wanted |= {folder.name for folder, _ in self._sampling.values() if folder is not None}
            for folder in self._state.sweep(wanted):
                self._sampler.close(folder)
        except Exception:
            log.exception("folders that nothing refers to could not be removed")

    # ------------------------------------------------------------------ samples

    def _sample(self) -> None:
        """Pass encoded samples to the sampling engine, and do one slice of work."""
        with self._queue.lock:
            ready = {id(entry): entry for entry in self._queue.new_samples if entry.is_encoded}
            self._queue.new_samples = [entry for entry in self._queue.new_samples if id(entry) not in ready]
        for entry in ready.values():
            self._begin_sample(entry)
        if not self._sampling:
            return
        try:
            finished = self._sampler.step()
        except Exception as error:
            log.exception("the sampling engine failed")
            self._fail_samples(Failure.of(error))
        else:  # a name is unknown if its snapshot was closed when the engine failed
            self.finish([(self._sampling.pop(name)[1], got) for name, got in finished if name in self._sampling])

    def _begin_sample(self, entry: Entry) -> None:
        name = f"{entry.row.owner}:{entry.row.seq}"
        try:
            if (encoded := entry.encoded) is None:
                return  # its session has ended
            folder = self._journal.sampler(entry.row.owner).folder
            snapshot = None if folder is None else self._state.folder(folder)
            self._sampler.add(name, snapshot, encoded.result(), self._queue.request(entry))
        except Exception as error:
            if not isinstance(error, RequestError):
                log.exception("a sample could not be begun")
            self.finish([(entry, Failure.of(error))])
        else:
            self._sampling[name] = snapshot, entry

    def _fail_samples(self, failure: Failure) -> None:
        failed, self._sampling = self._sampling, {}
        for folder in {folder for folder, _ in failed.values()}:
            try:
                self._sampler.close(folder)
            except Exception:
                log.exception("a snapshot could not be closed")
        self.finish([(entry, failure) for _, entry in failed.values()])

    # ------------------------------------------------------------------ forward_backwards

    def _begin_group(self, lane: Lane, group: list[Entry]) -> None:
        lane.alone = max(lane.alone - len(group), 0)
        lane.group, requests, bad = [], [], []
        for entry in group:
            if (encoded := entry.encoded) is None:
                continue  # its session has ended
            if (error := encoded.exception()) is not None:
                bad.append((entry, Failure.of(error)))
            else:
                lane.group.append(entry)
                requests.append(encoded.result())
        self.finish(bad)
        if requests:
            lane.adds_gradient = any(not request.forward_only for request in requests)
            try:
                lane.work = self._engine.forward_backward(requests)
            except Exception as error:
                self._break_group(lane, error)

    def _run_row(self, lane: Lane) -> None:
        work, begin = lane.work, time.perf_counter()
        assert work is not None
        try:
            if work.rows_left:
                work.run_row()
            if work.rows_left:
                return
            outcomes = work.results()
        except Exception as error:
            self._break_group(lane, error)
            return
        finally:
            lane.seconds += time.perf_counter() - begin
            self.seconds["training"] += time.perf_counter() - begin
        group, lane.group, lane.work = lane.group, [], None
        if not lane.adds_gradient:
            self.finish([*zip(group, outcomes, strict=True)])
            return
        lane.has_gradients = True
        lane.replayed_bytes += sum(entry.row.size for entry in group)
        self.finish([*zip(group, outcomes, strict=True)], group=group[0].row.seq, is_replayed=True)

    def _break_group(self, lane: Lane, error: Exception) -> None:
        """Cancel a group whose rows failed. Its requests run again one by one, so that only the one at fault fails."""
        group, lane.group = lane.group, []
        work, lane.work = lane.work, None
        if not isinstance(error, RequestError):
            log.error("rows of %s failed", lane.id, exc_info=error)
        try:
            if work is not None:
                work.cancel()
        except Exception:
            log.exception("gradients of %s could not be taken back", lane.id)
            self._restore(lane)
        if len(group) > 1:
            lane.alone = len(group)
        else:
            self.finish([(entry, Failure.of(error)) for entry in group])

    # ------------------------------------------------------------------ other operations

    def _operate(self, lane: Lane, entry: Entry) -> None:
        begin, is_creation, is_replayed = time.perf_counter(), entry.row.kind in CREATIONS, False
        write: Write | None = None
        try:
            if is_creation:
                self._make_room(lane)
            outcome, write = self._run(lane, entry)
            is_replayed = entry.row.kind == messages.OptimStep.__name__
        except Exception as error:
            outcome = Failure.of(error)
            self._clean_up(lane, entry, error)
        lane.seconds += time.perf_counter() - begin
        self.seconds["training"] += time.perf_counter() - begin
        if is_replayed:
            lane.replayed_bytes += entry.row.size
        self.finish([(entry, outcome)], is_replayed=is_replayed, write=write)
        if is_creation and isinstance(outcome, Failure):
            lane.failure = f"{lane.id} was not created: {outcome.message}"
        elif is_replayed and lane in self._lanes() and self._snapshot_is_due(lane):
            self._snapshot(lane)

    def _make_room(self, lane: Lane) -> None:
        """End silent sessions, the longest silent first, until there is room for a new model."""
        for session in self._queue.silent(self._limits.silent_seconds):
            if len(self._engine.models()) < self._limits.models:
                return
            holders = {one.session for one in self._lanes() if one.id in self._engine.models()}
            if session in holders - {lane.session}:
                log.info("the session %s ended: its client fell silent, and a new model needs its place", session)
                self._queue.finish(session)
                self._free_closed()

    def _clean_up(self, lane: Lane, entry: Entry, error: Exception) -> None:
        if not isinstance(error, VlmpackError):
            log.error("%s %d of %s failed", entry.row.kind, entry.row.seq, lane.id, exc_info=error)
        if entry.row.kind in CREATIONS and lane.id in self._engine.models():
            self._engine.free(lane.id)
        elif entry.row.kind in CHANGES and not isinstance(error, RequestError):
            self._restore(lane)

    def _run(self, lane: Lane, entry: Entry) -> tuple[Outcome, Write | None]:
        """Run an operation other than forward_backward, and return its outcome and how to record it.

        Raises:
            RequestError: the operation cannot be run; the model is unchanged.
            Exception: the engine or the disk failed.
        """
        match request := self._queue.request(entry):
            case messages.CreateModel():
                return self._create(lane, request)
            case messages.CreateFromCheckpoint():
                return self._create_from(lane, request)
            case messages.OptimStep():
                return self._step(lane, request), None
            case messages.SaveForSampler(name=None):
                return self._save_unnamed(lane, request)
            case messages.Save():
                return self._save(lane, request)
            case messages.LoadWeights():
                return self._load(lane, entry, request)
            case _:
                raise RequestError(f"{type(request).__name__} is no operation of a model")

    def _step(self, lane: Lane, request: messages.OptimStep) -> Outcome:
        try:
            return {"type": "optim_step", "metrics": self._engine.optim_step(lane.id, request.adam)}
        except RequestError as error:  # the gradient is dropped, and a replay has to drop it too
            return Failure.of(error)
        finally:
            lane.has_gradients = False

    # ------------------------------------------------------------------ new models

    def _create(self, lane: Lane, request: messages.CreateModel) -> tuple[Outcome, Write]:
        if request.base_model != self._engine.base.name:
            raise RequestError(f"this server has the base model {self._engine.base.name!r}, not {request.base_model!r}")
        self._engine.create(lane.id, request.lora)
        return self._created(lane, request, {"type": "create_model"}, lora=request.lora)

    def _create_from(self, lane: Lane, request: messages.CreateFromCheckpoint) -> tuple[Outcome, Write]:
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
    ) -> tuple[Outcome, Write]:  # fmt: skip
        now, base_model = time.time(), self._engine.base.name
        row = ModelRow(
            id=lane.id, session=lane.session, created=now, last_request=now, base_model=base_model, lora=lora,
            user_metadata=request.user_metadata, snapshot=snapshot,
        )  # fmt: skip
        return {**reply, "model_id": lane.id}, lambda: self._journal.put(row)

    # ------------------------------------------------------------------ checkpoints

    def _training_folder(self, checkpoint: CheckpointRow, *, optimizer: bool) -> Path:
        if checkpoint.kind == "external_weights":
            raise RequestError(f"{checkpoint.path} is for download only: load a checkpoint of save_state")
        if optimizer and checkpoint.kind != "weights":
            remedy = "load one of save_state, or load it without the optimizer"
            raise RequestError(f"{checkpoint.path} is for sampling and has no optimizer state: {remedy}")
        return self._state.folder(checkpoint.folder)

    def _save(self, lane: Lane, request: messages.Save) -> tuple[Outcome, Write]:
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
        return {"type": tag, "path": row.path}, lambda: self._journal.put(row)

    def _save_unnamed(self, lane: Lane, request: messages.SaveForSampler) -> tuple[Outcome, Write]:
        sampler = f"{lane.session}:sample:{request.sampling_session_seq_id}"
        if self._journal.row(SamplingRow, id=sampler) is not None:
            raise RequestError(f"the sampling session {sampler} exists: save with the next sampling_session_seq_id")
        with self._state.new(sampler, "unnamed") as folder:
            self._engine.save(lane.id, folder, optimizer=False)
        now, saved = time.time(), final_name(folder)
        row = SamplingRow(id=sampler, session=lane.session, created=now, model=lane.id, folder=saved)

        def write() -> None:
            self._journal.drop_idle_samplers(kept=self._limits.unnamed_saves - 1, model=lane.id)
            self._journal.put(row)

        return {"type": "save_weights_for_sampler", "sampling_session_id": sampler}, write

    def _load(self, lane: Lane, entry: Entry, request: messages.LoadWeights) -> tuple[Outcome, Write]:
        checkpoint = self._journal.checkpoint(request.path)
        folder = self._training_folder(checkpoint, optimizer=request.optimizer)
        self._engine.load(lane.id, folder, optimizer=request.optimizer)
        lane.has_gradients = False
        snapshot = self._write_state(lane)  # the checkpoint may be deleted before a replay needs it
        reply = {"type": "load_weights", "path": request.path}
        return reply, lambda: self._journal.cover(lane.id, snapshot=snapshot, covered=entry.row.seq)

    # ------------------------------------------------------------------ the state of a model

    def _write_state(self, lane: Lane) -> str:
        begin = time.perf_counter()
        with self._state.new(lane.id, "state") as folder:
            self._engine.save(lane.id, folder, optimizer=True)
        lane.snapshot_seconds = time.perf_counter() - begin
        lane.seconds = lane.replayed_bytes = 0
        return final_name(folder)

    def _snapshot_is_due(self, lane: Lane) -> bool:
        """Return whether a snapshot is possible and worth its time."""
        if lane.failure is not None or lane.seconds == 0:
            return False
        if lane.snapshot_seconds is None or lane.replayed_bytes > self._limits.replayed_bytes:
            return True
        return lane.seconds * self._limits.snapshot_share >= lane.snapshot_seconds

    def _snapshot(self, lane: Lane) -> None:
        try:
            assert not lane.has_gradients, "a snapshot holds no gradients"
            self._journal.cover(lane.id, snapshot=self._write_state(lane), covered=lane.next - 1)
        except Exception:
            lane.seconds = 0.0  # retry after as much work as would pay for it
            log.exception("the state of %s could not be written; the one before it stays", lane.id)
        else:
            self.snapshots += 1
            self.seconds["snapshots"] += lane.snapshot_seconds or 0.0

    def _snapshot_all(self) -> None:
        for lane in self._lanes():
            if lane.work is None and not lane.has_gradients and lane.failure is None and lane.seconds > 0:
                self._snapshot(lane)

    def _restore_all(self) -> None:
        self._sweep()
        for lane in self._lanes():
            if lane.is_created:
                self._restore(lane)
            if self._stop or self._drain_until is not None:
                raise Stopped
        self.is_restored = True

    def _restore(self, lane: Lane) -> None:
        """Load a model's snapshot, and replay the operations that the journal records after it."""
        try:
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
            done.sort(key=lambda row: row.seq)
            for _, rows in groupby(done, key=lambda row: row.seq if row.group is None else row.group):
                self._replay(lane, [*rows])
            lane.seconds = time.perf_counter() - begin if done else 0.0
        except Exception as error:
            log.exception("%s could not be restored", lane.id)
            lane.failure = f"the state of {lane.id} could not be restored ({error}): create a model from a checkpoint"

    def _replay(self, lane: Lane, rows: list[RequestRow]) -> None:
        requests = [self._queue.parse(row) for row in rows]
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
                raise AssertionError(f"a {type(other).__name__} of {lane.id} has a body")

    # ------------------------------------------------------------------ commit

    def finish(
        self,
        outcomes: Sequence[tuple[Entry, Outcome]],
        *,
        group: int | None = None,
        is_replayed: bool = False,
        write: Write | None = None,
    ) -> None:
        """Commit replies, and the writes of an operation, together.

        Skips requests of ended sessions, which are already done.
        """
        replies = [self._encoded(entry, outcome) for entry, outcome in outcomes if not entry.is_done]
        if not replies:
            return

        def write_all() -> None:
            for entry, state, reply in replies:
                self._journal.finish_request(
                    entry.row.owner, entry.row.seq, state=state, reply=reply, group=group, keep_body=is_replayed
                )
            if write is not None:
                write()

        self._commit(write_all)
        for entry, state, _ in replies:
            self.counts[state][entry.row.kind] += 1
            self._queue.done(entry, state)

    def _encoded(self, entry: Entry, outcome: Outcome) -> tuple[Entry, State, Reply]:
        try:
            reply = codec.encode(outcome)
        except Exception as error:  # the wire format cannot express a number
            log.exception("a reply could not be encoded")
            outcome = Failure.of(error)
            reply = codec.encode(outcome)
        return entry, "failed" if isinstance(outcome, Failure) else "done", reply

    def _commit(self, write: Write) -> None:
        """Commit, and retry for as long as the disk is full.

        The engine's work cannot be undone, and its outcome must not be reported before the commit.
        """
        while True:
            try:
                with self._journal.transaction():
                    write()
                return
            except JournalError as error:
                with self._queue.lock:
                    if self._stop or self._drain_until is not None:
                        raise Stopped from error
                    self._queue.changed.wait(TIDY_SECONDS)
