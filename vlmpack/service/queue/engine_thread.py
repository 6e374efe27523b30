"""The thread that owns the engine.

It runs one row, operation or sampling slice at a time, and alternates between models and sampling.

models       A ▣▣▣   B ▣   C ▣▣          rows of their running groups, or their next operation
turns        A B C sample A C sample ...  the least recently served model; a sampling slice between two rows

a group      consecutive waiting forward_backwards of a model, up to its next other operation: they share
             rows, and their replies are committed together.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, final

from vlmpack.errors import RequestError, VlmpackError
from vlmpack.service.queue.checkpoints import StateFolder
from vlmpack.service.queue.journal import JournalError, State
from vlmpack.service.queue.ledger import Entry, Lane, Ledger
from vlmpack.service.queue.operations import Done, Operations
from vlmpack.service.wire import codec
from vlmpack.service.wire.messages import Failure, ForwardBackward, Outcome, Reply, Sample

if TYPE_CHECKING:
    from vlmpack.service.engine.engine import Engine

TIDY_SECONDS = 0.5
"""Seconds between two calls of `tidy`."""
CREATIONS = ("CreateModel", "CreateFromCheckpoint")
CHANGES = ("OptimStep", "LoadWeights")
"""Operations that leave a model undefined when the engine fails in them."""

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
        ledger: all accepted requests.
        state: the state folder.
        tidy: called about twice a second.
    """

    def __init__(
        self, engine: Engine, sampler: Any, ledger: Ledger, state: StateFolder, *, tidy: Callable[[], None]
    ) -> None:
        self._engine, self._sampler, self._ledger, self._state, self._tidy = engine, sampler, ledger, state, tidy
        self._operations = Operations(engine, ledger, state)
        self._pool = ThreadPoolExecutor(ledger.limits.encode_threads, "vlmpack-encode")
        self._sampling: dict[str, tuple[Path | None, Entry]] = {}
        """Snapshot and request, by the name in the sampling engine; None: the base model."""
        self._thread = threading.Thread(target=self._main, name="vlmpack-engine", daemon=True)
        self._turn = 0
        self._tidied = 0.0
        self._is_short = False
        """Whether a model waits for room to encode. Models behind it must not take the room."""
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
        with self._ledger.lock:
            if drain is None:
                self._stop = True
            else:
                self._drain_until = time.monotonic() + drain
            self._ledger.changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._pool.shutdown(wait=True, cancel_futures=True)

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
            self._tidy()
            if not self._ledger.is_swept:
                self.sweep()
        with self._ledger.lock:
            self.encode_samples()
            lane, unit = self._next_unit()
            samples = bool(self._sampling) or any(map(_is_encoded, self._ledger.new_samples))
            samples = samples and self._drain_until is None
            if unit is None and not samples:
                if not self._stop and not self._is_drained():  # a stop may have come since the loop checked
                    self._ledger.changed.wait(TIDY_SECONDS)
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
        with self._ledger.lock:
            return [*self._ledger.lanes.values()]

    def _next_unit(self) -> tuple[Lane | None, Callable[[], None] | None]:
        self._is_short = False
        for lane in sorted(self._ledger.lanes.values(), key=lambda lane: lane.turn):
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
        group = self.encode_ahead(lane)
        encoded = [cast("Future[Any]", entry.encoded) for entry in group if _is_encoded(entry)]
        return (lambda: self._begin_group(lane, group, encoded)) if len(encoded) == len(group) else None

    def _free_closed(self) -> None:
        with self._ledger.lock:
            closed, self._ledger.closed = self._ledger.closed, []
        for lane in closed:
            try:
                if lane.work is not None:
                    lane.work.cancel()
                if lane.id in self._engine.models():
                    self._engine.free(lane.id)
            except Exception:
                log.exception("the model %s could not be released", lane.id)
        if closed:
            self._ledger.is_swept = False

    def sweep(self) -> None:
        """Remove folders that nothing refers to. Called in the engine thread."""
        self._ledger.is_swept = True
        try:
            wanted = self._ledger.journal.folders()
            wanted |= {folder.name for folder, _ in self._sampling.values() if folder is not None}
            for folder in self._state.sweep(wanted):
                self._sampler.close(folder)
        except Exception:
            log.exception("folders that nothing refers to could not be removed")

    # ------------------------------------------------------------------ encoding

    def encode_ahead(self, lane: Lane) -> list[Entry]:
        """Start to encode the forward_backwards of the next group, and return them. Called under the lock."""
        limits = self._ledger.limits
        group: list[Entry] = []
        size = 0
        for entry in lane.waiting():
            size += entry.row.size
            full = size > limits.group_bytes or len(group) >= (1 if lane.alone else limits.group_requests)
            if not entry.is_forward_backward or (group and full):
                break
            group.append(entry)
        new = [entry for entry in group if entry.encoded is None]
        has_begun = any(entry.encoded is not None for entry in group if entry not in lane.group)
        has_room = self._ledger.has_room_for(sum(entry.row.size for entry in new), samples=False)
        if has_begun or (has_room and not self._is_short):
            for entry in new:
                self._submit(entry)
        elif new:
            self._is_short = True
        return group

    def encode_samples(self) -> None:
        """Start to encode prompts as far as there is room. Called under the lock."""
        for entry in self._ledger.new_samples:
            if entry.encoded is None:
                if not self._ledger.has_room_for(entry.row.size, samples=True):
                    break
                self._submit(entry)

    def _submit(self, entry: Entry) -> None:
        with suppress(RuntimeError):  # the pool is closed: it is encoded after the next start
            future = self._pool.submit(self._encode, entry)
            self._ledger.note_encoded(entry, future)
            future.add_done_callback(self._notify)

    def _notify(self, encoded: Future[Any]) -> None:
        with self._ledger.lock:
            self._ledger.changed.notify_all()

    def _encode(self, entry: Entry) -> Any:
        request = self._operations.request(entry)
        if isinstance(request, Sample):
            return self._engine.encode_prompt(request)
        assert isinstance(request, ForwardBackward), "other operations are not encoded"
        entry.forward_only = request.forward_only
        encoded = self._engine.encode(request)
        entry.request = None
        return encoded

    # ------------------------------------------------------------------ samples

    def _sample(self) -> None:
        """Pass encoded samples to the sampling engine, and do one slice of work."""
        with self._ledger.lock:
            ready = {id(entry): entry for entry in self._ledger.new_samples if _is_encoded(entry)}
            self._ledger.new_samples = [entry for entry in self._ledger.new_samples if id(entry) not in ready]
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
            folder = self._ledger.journal.sampler(entry.row.owner).folder
            snapshot = None if folder is None else self._state.folder(folder)
            self._sampler.add(name, snapshot, encoded.result(), self._operations.request(entry))
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

    def _begin_group(self, lane: Lane, group: list[Entry], encoded: list[Future[Any]]) -> None:
        lane.alone = max(lane.alone - len(group), 0)
        errors = [future.exception() for future in encoded]
        bad = [(entry, Failure.of(error)) for entry, error in zip(group, errors, strict=True) if error is not None]
        if bad:
            self.finish(bad)
        lane.group = [entry for entry, error in zip(group, errors, strict=True) if error is None]
        if lane.group:
            requests = [future.result() for future, error in zip(encoded, errors, strict=True) if error is None]
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
        adds = any(not entry.forward_only for entry in group)
        lane.has_gradients |= adds
        if adds:
            lane.replayed_bytes += sum(entry.row.size for entry in group)
        self.finish([*zip(group, outcomes, strict=True)], group=group[0].row.seq if adds else None)

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
        begin = time.perf_counter()
        try:
            if entry.row.kind in CREATIONS:
                self._make_room(lane)
            done = self._operations.run(lane, entry)
        except Exception as error:
            done = Done(outcome=Failure.of(error))
            self._clean_up(lane, entry, error)
        lane.seconds += time.perf_counter() - begin
        self.seconds["training"] += time.perf_counter() - begin
        if done.is_replayed:
            lane.replayed_bytes += entry.row.size
        self.finish([(entry, done.outcome)], done=done)
        if entry.row.kind in CREATIONS:
            if isinstance(done.outcome, Failure):
                lane.failure = f"{lane.id} was not created: {done.outcome.message}"
        elif done.is_replayed and lane in self._lanes() and self._operations.snapshot_is_due(lane):
            self._snapshot(lane)
        self._ledger.is_swept = False

    def _make_room(self, lane: Lane) -> None:
        """End silent sessions, the longest silent first, until there is room for a new model."""
        limits = self._ledger.limits
        for session in self._ledger.silent(limits.silent_seconds):
            if len(self._engine.models()) < limits.models:
                return
            holders = {one.session for one in self._lanes() if one.id in self._engine.models()}
            if session in holders - {lane.session}:
                log.info("the session %s ended: its client fell silent, and a new model needs its place", session)
                self._ledger.end_session(session)
                self._free_closed()

    def _clean_up(self, lane: Lane, entry: Entry, error: Exception) -> None:
        if not isinstance(error, VlmpackError):
            log.error("%s %d of %s failed", entry.row.kind, entry.row.seq, lane.id, exc_info=error)
        if entry.row.kind in CREATIONS and lane.id in self._engine.models():
            self._engine.free(lane.id)
        elif entry.row.kind in CHANGES and not isinstance(error, RequestError):
            self._restore(lane)

    def _snapshot(self, lane: Lane) -> None:
        try:
            self._operations.snapshot(lane)
        except Exception:
            lane.seconds = 0.0  # retry after as much work as would pay for it
            log.exception("the state of %s could not be written; the one before it stays", lane.id)
        else:
            self.snapshots += 1
            self.seconds["snapshots"] += lane.snapshot_seconds or 0.0
            self._ledger.is_swept = False

    def _snapshot_all(self) -> None:
        for lane in self._lanes():
            if lane.work is None and not lane.has_gradients and lane.failure is None and lane.seconds > 0:
                self._snapshot(lane)

    def _restore_all(self) -> None:
        self.sweep()
        for lane in self._lanes():
            if lane.is_created:
                self._restore(lane)
            if self._stop or self._drain_until is not None:
                raise Stopped
        self.is_restored = True

    def _restore(self, lane: Lane) -> None:
        try:
            self._operations.restore(lane)
        except Exception as error:
            log.exception("%s could not be restored", lane.id)
            lane.failure = f"the state of {lane.id} could not be restored ({error}): create a model from a checkpoint"

    # ------------------------------------------------------------------ commit

    def finish(
        self, outcomes: Sequence[tuple[Entry, Outcome]], *, group: int | None = None, done: Done | None = None
    ) -> None:
        """Commit replies, and the writes of an operation, together.

        Skips requests of ended sessions, which are already done.
        """
        replies = [self._encoded(entry, outcome) for entry, outcome in outcomes if not entry.is_done]
        if not replies:
            return
        is_replayed = group is not None if done is None else done.is_replayed

        def write() -> None:
            for entry, state, reply in replies:
                self._ledger.journal.finish_request(
                    entry.row.owner, entry.row.seq, state=state, reply=reply, group=group, keep_body=is_replayed
                )
            if done is not None and done.write is not None:
                done.write()

        self._commit(write)
        for entry, state, _ in replies:
            self.counts[state][entry.row.kind] += 1
            self._ledger.done(entry, state)

    def _encoded(self, entry: Entry, outcome: Outcome) -> tuple[Entry, State, Reply]:
        try:
            reply = codec.encode(outcome)
        except Exception as error:  # the wire format cannot express a number
            log.exception("a reply could not be encoded")
            outcome = Failure.of(error)
            reply = codec.encode(outcome)
        return entry, "failed" if isinstance(outcome, Failure) else "done", reply

    def _commit(self, write: Callable[[], None]) -> None:
        """Commit, and retry for as long as the disk is full.

        The engine's work cannot be undone, and its outcome must not be reported before the commit.
        """
        while True:
            try:
                with self._ledger.journal.transaction():
                    write()
                return
            except JournalError as error:
                with self._ledger.lock:
                    if self._stop or self._drain_until is not None:
                        raise Stopped from error
                    self._ledger.changed.wait(TIDY_SECONDS)


def _is_encoded(entry: Entry) -> bool:
    return entry.encoded is not None and entry.encoded.done()
