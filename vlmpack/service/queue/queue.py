"""The request queue, which the HTTP layer calls.

POST requests only enqueue. The engine thread runs the requests, and long polls wait for the replies.

    submit ──▶ journal ──▶ lane or samples ──▶ engine thread ──▶ journal ──▶ reply
    (any thread)                                (owns the engine)             (asyncio)

    numbers   1 2 3 . 5 6     4 is missing for `gap_seconds`: 5 and 6 fail, 4 is used up, 7 is next. Time in which a
                              request of the model is being received does not count, up to `MOST_GAPS` times as long

    Lane                 1 2 3 4 5 . 7 8     the operations of a model; 5 is next; 7 and 8 are early: they wait for 6
      └─ Entry           done  ▲     early   one request, from its POST until its reply

A number that was accepted once never runs twice: a repetition gets the same id, and other content under the number is
rejected. An unreadable request with a readable number fails in its future, so that its number is used up.

The journal is always written first. Only what waits is in memory: sessions, models, checkpoints and replies are in the
journal alone. On start, what waits is read from there.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, is_dataclass, replace
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any, final

import numpy as np

from vlmpack.service.limits import ServiceLimits
from vlmpack.service.queue.checkpoints import StateFolder
from vlmpack.service.queue.engine_thread import EngineThread
from vlmpack.service.queue.journal import CheckpointRow, ModelRow, RequestRow, SamplingRow, SessionRow, State
from vlmpack.service.wire import codec, messages
from vlmpack.service.wire.messages import Rejected

if TYPE_CHECKING:
    from vlmpack.service.engine.engine import Engine
    from vlmpack.service.engine.rows import RowWork
    from vlmpack.service.sampling.batched import BatchedSampling
    from vlmpack.service.sampling.vllm import VllmSampling

MOST_GAPS = 5
"""A gap ends after this many times `gap_seconds`, even if requests are being received meanwhile."""
REFUSED = "Refused"
"""Kind of a request that could not be read."""
MISSING = "Missing"
"""Kind of a number whose request did not arrive in time."""

NOT_CONTENT = ("sampling_session_seq_id",)
"""Fields that differ when a client repeats a request: after a lost reply the client draws the next number."""

log = logging.getLogger("vlmpack.service")


# ---------------------------------------------------------------------- what waits, in memory alone


def _running() -> Future[None]:
    """Return a future that cannot be cancelled, so that a poll that is given up does not end the others."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


@final
@dataclass(kw_only=True, eq=False, slots=True)
class Entry:
    """A request that waits or runs."""

    row: RequestRow
    """Row of the request in the journal."""
    request: messages.Request | None = None
    """The parsed request; None: already encoded, or not yet read from the journal."""
    encoded: Future[Any] | None = None
    """Future of the encoded request; None: encoding has not started."""
    is_done: bool = False
    """Whether the journal has its reply, or its session has ended."""
    polls_end: Future[None] = field(default_factory=_running)
    """Long polls wait for this future. It ends when there is a reply, or when the service stops."""

    @property
    def is_forward_backward(self) -> bool:
        """Return whether the request can share rows with its neighbors."""
        return self.row.kind == messages.ForwardBackward.__name__

    @property
    def is_sample(self) -> bool:
        """Return whether it is a sample; samples are not ordered."""
        return self.row.kind == messages.Sample.__name__

    @property
    def is_encoded(self) -> bool:
        """Return whether it is encoded, or could not be."""
        return self.encoded is not None and self.encoded.done()

    def end_polls(self) -> None:
        """Let the long polls return."""
        if not self.polls_end.done():
            self.polls_end.set_result(None)


@final
@dataclass(kw_only=True, eq=False)
class Lane:
    """The operations of one model, which run in the order of their numbers."""

    id: str
    """Id of the model."""
    session: str
    """Id of the session."""
    entries: dict[int, Entry] = field(default_factory=dict)
    """Requests that wait or run, by number."""
    next: int = 0
    """First number that is not done."""
    done: set[int] = field(default_factory=set)
    """Numbers behind `next` that are done: they were refused."""
    gap: int | None = None
    """First missing number that later requests wait for, as of the last check; None: there is none."""
    gap_seconds: float = 0.0
    """Seconds that the gap has lasted, without the time in which a request of the model was being received."""
    gap_since: float = 0.0
    """Monotonic time at which the gap was first seen."""
    receiving: int = 0
    """Number of the model's requests that are being received."""
    group: list[Entry] = field(default_factory=list)
    """Requests whose rows are running."""
    work: RowWork | None = None
    """The rows of these requests."""
    adds_gradient: bool = False
    """Whether any of these requests adds to the gradient."""
    failure: str | None = None
    """Why the model cannot be used any more; None: it can."""
    alone: int = 0
    """Number of next requests to run one by one, because one of them broke their group."""
    is_created: bool = False
    """Whether the model is in the journal."""
    turn: int = 0
    """Turn in which the model was last served."""
    has_gradients: bool = False
    """Whether there are accumulated gradients, which no snapshot holds."""
    seconds: float = 0.0
    """Seconds of the model's operations since the last snapshot."""
    snapshot_seconds: float | None = None
    """Seconds that the last snapshot took; None: there is no snapshot yet."""
    replayed_bytes: int = 0
    """Bytes of the bodies kept for a replay."""

    def next_group(self, limits: ServiceLimits) -> list[Entry]:
        """Return the next forward_backwards that run together, up to the next other operation or missing number."""
        group: list[Entry] = []
        size, most = 0, 1 if self.alone else limits.group_requests
        for number in range(self.next, self.missing):
            if (entry := self.entries.get(number)) is not None:
                size += entry.row.size
                is_full = group and (size > limits.group_bytes or len(group) >= most)
                if is_full or not entry.is_forward_backward:
                    break
                group.append(entry)
        return group

    def early(self) -> list[Entry]:
        """Return the requests after the first missing number."""
        missing = self.missing
        return [entry for number, entry in sorted(self.entries.items()) if number > missing]

    def is_absent(self, number: int) -> bool:
        """Return whether a number has not arrived."""
        return number >= self.next and number not in self.entries and number not in self.done

    @property
    def missing(self) -> int:
        """First number that has not arrived."""
        return next(filter(self.is_absent, count(self.next)))

    def finish(self, number: int, state: State) -> None:
        """Mark a number as done, and advance `next`."""
        self.is_created |= number == 0 and state == "done"
        self.done.add(number)
        while self.next in self.done:
            self.done.remove(self.next)
            self.next += 1


# ---------------------------------------------------------------------- the queue


@final
@dataclass(frozen=True, kw_only=True)
class Pending:
    """The reply is not available yet."""

    reason: str | None = None
    """Why the queue is paused, e.g. by a full disk; None: it is not."""


@final
class RequestQueue:
    """The request queue; see the module's docstring. Thread-safe.

    Args:
        engine: the engine. From `start` on it belongs to the queue's thread, except its `encode` methods.
        sampler: the sampler, which belongs to this thread too.
        state: the state folder; the queue closes it.
        limits: limits and timeouts.
    """

    def __init__(
        self,
        engine: Engine,
        sampler: BatchedSampling | VllmSampling,
        state: StateFolder,
        *,
        limits: ServiceLimits = ServiceLimits(),  # noqa: B008 (frozen)
    ) -> None:
        self.journal, self.state, self.limits = state.journal, state, limits
        self._engine = engine
        self._pool = ThreadPoolExecutor(limits.encode_threads, "vlmpack-encode")
        self._accepting = threading.Lock()
        """Held while a request is accepted or a sampling session opened, including the journal's commit."""
        self.lock = threading.RLock()
        """Guards what follows. The event loop takes it too, so nobody may wait for the disk while holding it."""
        self.changed = threading.Condition(self.lock)
        self.heard: dict[str, float] = {}
        """Open sessions, the oldest first, and the monotonic time at which the client was last heard from."""
        self.entries: dict[tuple[str, int], Entry] = {}
        """Requests that wait or run, by model or sampling session and number."""
        self.lanes: dict[str, Lane] = {}
        """Those of each model, in the order of their numbers."""
        self.new_samples: list[Entry] = []
        """Accepted samples that are not yet in the sampling engine."""
        self.closed: list[Lane] = []
        """Lanes of ended sessions, not yet freed in the engine."""
        self.encoded_bytes = {False: 0, True: 0}
        """Bytes of the bodies that are encoded, by whether they are samples."""
        self.is_short = False
        """Whether a model waits for room to encode. Models behind it must not take the room."""
        self.waiting_bytes = self.waiting_samples = 0
        """Bytes of the bodies of `entries`, and number of samples among them."""
        self.fetched: dict[tuple[str, int], float] = {}
        """Monotonic time at which each reply was first fetched; after a restart, a reply counts as not yet fetched."""
        self.is_draining = False
        """Whether the queue is being closed, and takes no more requests."""
        self._began = self._looked = time.monotonic()
        with self.lock:
            self._read()
        self._thread = EngineThread(engine, sampler, self)

    def _read(self) -> None:
        """Read from the journal what waits."""
        self.journal.forget_ended()
        self.heard = {row.id: time.monotonic() for row in self.journal.rows(SessionRow, ended=None)}
        samplers = {row.id for row in self.journal.rows(SamplingRow)}
        for row in self.journal.rows(RequestRow):
            if row.owner not in samplers:
                lane = self.lanes.setdefault(row.owner, Lane(id=row.owner, session=row.session))
                if row.state != "queued":
                    lane.finish(row.seq, row.state)
            if row.state == "queued":
                self.add(Entry(row=row))

    def start(self) -> None:
        """Start the engine thread, which first restores the models of the journal. Requests are accepted meanwhile."""
        self._thread.start()

    def close(self, *, drain: float | None = None) -> None:
        """Stop after the current row, operation or sampling slice.

        Accepted requests are not lost, and long polls return at once.

        Args:
            drain: seconds for running groups to finish; then snapshots are written. None: stop at once.
        """
        with self.lock:
            self.is_draining = True
            for entry in self.entries.values():
                entry.end_polls()
        self._thread.stop(drain=drain)
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.state.close()

    def check_running(self) -> None:
        """Check that the queue is not being closed.

        Raises:
            Rejected: status 503: it is.
        """
        if self.is_draining:
            raise Rejected("the service is being stopped; try again once it runs", status=503)

    # ------------------------------------------------------------------ sessions

    def create_session(self, session: messages.NewSession = messages.NewSession()) -> str:  # noqa: B008 (frozen)
        """Open a session and return its id.

        Raises:
            Rejected: status 429: there are too many sessions, or the disk is full; 503: the service is being stopped.
        """
        self.check_running()
        row = SessionRow(id=f"s{secrets.token_hex(6)}", created=time.time(), **vars(session))
        if len(self.heard) >= self.limits.sessions:
            for silent in self.silent(self.limits.silent_seconds)[:1]:
                log.info("the session %s ended: its client fell silent, and a new one needs its place", silent)
                self.finish(silent)
        with self.lock:
            if len(self.heard) >= self.limits.sessions:
                message = f"{len(self.heard)} sessions are open: finish one, or try again later"
                raise Rejected(message, status=429)
        self.journal.put(row)
        with self.lock:
            self.heard[row.id] = time.monotonic()
        return row.id

    def heartbeat(self, session_id: str) -> None:
        """Note a sign of life of a session's client.

        Raises:
            Rejected: status 410: the session has ended or never existed.
        """
        with self.lock:
            if session_id not in self.heard:
                raise _no_session(session_id)
            self.heard[session_id] = time.monotonic()

    def finish(self, session_id: str) -> None:
        """End a session.

        Its models, replies and unnamed saves are deleted; its checkpoints stay. A second call does nothing.

        Raises:
            Rejected: status 429: the disk is full.
        """
        if session_id not in self.heard:
            return
        self.journal.end_session(session_id, now=time.time())
        with self.lock:
            self.heard.pop(session_id, None)
            for entry in [entry for entry in self.entries.values() if entry.row.session == session_id]:
                if entry.encoded is not None:
                    entry.encoded.cancel()
                self._remove(entry)
            self.new_samples = [entry for entry in self.new_samples if not entry.is_done]
            for lane in [lane for lane in self.lanes.values() if lane.session == session_id]:
                self.closed.append(self.lanes.pop(lane.id))
            self.changed.notify_all()

    def sessions(self) -> list[str]:
        """Return the ids of the open sessions, newest first."""
        with self.lock:
            return [*reversed(self.heard)]

    def session(self, session_id: str) -> SessionRow:
        """Return an open session.

        Raises:
            Rejected: status 410: the session has ended or never existed.
        """
        if (row := self.journal.row(SessionRow, id=session_id, ended=None)) is None:
            raise _no_session(session_id)
        return row

    def silent(self, seconds: float) -> list[str]:
        """Return sessions without a sign of the client for this many seconds, the longest silent first."""
        late = time.monotonic() - seconds
        with self.lock:
            silent = [session for session, seen in self.heard.items() if seen < late]
            return sorted(silent, key=self.heard.__getitem__)

    # ------------------------------------------------------------------ sampling sessions

    def create_sampling_session(
        self, session_id: str, sampling_session_seq_id: int, *, path: str | None, base_model: str | None
    ) -> str:
        """Open a sampling session from a checkpoint or the base model, and return its id.

        A repeated call returns the same id.

        Raises:
            Rejected: status 400: the model is missing or wrong, or the number is in use; 404: there is no such
                checkpoint; 410: the session has ended or never existed; 429: the disk is full; 503: the service is
                being stopped.
        """
        self.check_running()
        name, served = f"{session_id}:sample:{sampling_session_seq_id}", self._engine.base.name
        if base_model != served and (path is None or base_model is not None):
            message = f"base_model {base_model!r}: this service has only {served!r}; send that, or a model_path"
            raise Rejected(message, status=400)
        with self._accepting:
            self.heartbeat(session_id)
            if (known := self.journal.row(SamplingRow, id=name)) is not None:
                if known.path != path or known.model is not None:
                    raise Rejected(f"the sampling session {name} was created for another model", status=400)
                return name
            with self.journal.transaction():  # not under the lock, because the disk may be slow
                folder = None if path is None else self.journal.checkpoint(path).folder
                self.journal.drop_idle_samplers(kept=self.limits.samplers_kept - 1, session=session_id)
                now = time.time()
                self.journal.put(SamplingRow(id=name, session=session_id, created=now, path=path, folder=folder))
            self.heartbeat(session_id)
        return name

    # ------------------------------------------------------------------ models and checkpoints

    def models(self) -> list[ModelRow]:
        """Return the models of open sessions and the models with checkpoints, newest first."""
        kept, saved = self.heard, {row.model for row in self.journal.rows(CheckpointRow)}
        return [row for row in reversed(self.journal.rows(ModelRow)) if row.session in kept or row.id in saved]

    def is_corrupted(self, model_id: str) -> bool:
        """Return whether a model cannot be used, e.g. because its state could not be restored."""
        lane = self.lanes.get(model_id)
        return lane is not None and lane.failure is not None

    # ------------------------------------------------------------------ POSTs

    @contextmanager
    def receiving(self, model_id: str) -> Iterator[None]:
        """Pause the gap timeout of a model while one of its requests is being received; see the module's docstring."""
        with self.lock:
            lane = self.lanes.get(model_id, Lane(id=model_id, session=""))  # a new one for an unknown model
            lane.receiving += 1
        try:
            yield
        finally:
            with self.lock:
                lane.receiving -= 1

    def submit(self, request: messages.Request, body: bytes) -> str:
        """Accept a request, and return the id of its future. When this returns, the request is on disk.

        Args:
            request: the parsed request.
            body: the body that it was parsed from.

        Raises:
            Rejected: status 400: other content already uses its number; 404, 410: the model or session does not exist
                (any more); 429: there is no room now, or the disk is full; 503: the service is being stopped.
        """
        (owner, seq), seed = request.owner, secrets.randbits(31)
        row = RequestRow(
            owner=owner, seq=seq, session=_session_of(owner), kind=type(request).__name__,
            digest=content_digest(request), seed=seed, size=len(body),
        )  # fmt: skip
        entry = Entry(row=row, request=with_seed(request, seed))
        self._accept(entry, body, is_creation=isinstance(request, messages.Creation))
        return f"{owner}:{seq}"

    def refuse(self, owner: str, seq: int, message: str, *, kind: str = REFUSED, is_creation: bool = False) -> str:
        """Use up the number of an unreadable or missing request, and return the id of its future, which fails.

        Args:
            owner: id of the model or sampling session.
            seq: number of the request; 0 for a creation.
            message: what was wrong, and what to do.
            kind: `REFUSED` or `MISSING`.
            is_creation: whether the request would have created the model.

        Raises:
            Rejected: as in `submit`; status 400 also if a readable request already has this number.
        """
        row = RequestRow(owner=owner, seq=seq, session=_session_of(owner), kind=kind, digest=b"", state="failed")
        self._accept(Entry(row=row), None, is_creation=is_creation, failure=message)
        return f"{owner}:{seq}"

    def _accept(self, entry: Entry, body: bytes | None, *, is_creation: bool, failure: str | None = None) -> None:
        """Write a request to the journal, and let it wait; with `failure`, it fails at once."""
        self.check_running()
        row, journal = entry.row, self.journal
        with self._accepting:
            with self.lock:
                self.heartbeat(row.session)
                waiting = self.entries.get((row.owner, row.seq))
            known = waiting.row if waiting else journal.row(RequestRow, owner=row.owner, seq=row.seq)
            if known is not None:
                if known.kind != MISSING and (known.kind, known.digest) != (row.kind, row.digest):
                    seen = f"number {row.seq} of {row.owner} was another {known.kind}"
                    raise Rejected(f"{seen}: use a number once", status=400)
                return
            with self.lock:  # only for a new request: a repeated one gets its reply, however full the queue is
                self._check_room(row)
            with journal.transaction():
                is_model = is_creation or row.owner in self.lanes
                is_known = is_model or journal.row(SamplingRow, id=row.owner) is not None
                if is_known and row.kind != REFUSED and is_model == entry.is_sample:
                    raise Rejected(
                        f"{row.kind} of {row.owner}: a model takes operations, a sampling session takes samples",
                        status=400,
                    )
                if not is_known:
                    raise Rejected(
                        f"there is no model or sampling session {row.owner}: it was never created, or was an unnamed "
                        f"save and {self.limits.unnamed_saves} later ones took its place (save under a name)",
                        status=404,
                    )
                journal.add_request(row, body=body, now=time.time())
                if failure is not None:
                    reply = codec.encode(messages.Failure(message=failure, category="user"))
                    journal.finish_request(row.owner, row.seq, state="failed", reply=reply, keep_body=False)
            with self.lock:
                self.heartbeat(row.session)
                if is_creation:
                    self.lanes.setdefault(row.owner, Lane(id=row.owner, session=row.session))
                self.add(entry)
                if failure is not None:
                    self.done(entry, "failed")
                elif entry.is_sample:
                    self.encode_samples()
                else:
                    self.encode_ahead(self.lanes[row.owner])

    def _check_room(self, row: RequestRow) -> None:
        """Raise `Rejected` if there is no room for a new request."""
        limits, lane = self.limits, self.lanes.get(row.owner)
        if lane is not None and row.seq == lane.missing:
            return  # later requests wait for it, so rejecting it could block them forever
        if lane is not None and row.seq > lane.missing + limits.numbers_ahead:
            message = f"request {row.seq} of {row.owner} is too far ahead of {lane.missing}, the next number"
            raise Rejected(message, status=400)
        full = len(self.entries) >= limits.queued_requests or self.waiting_bytes + row.size > limits.queued_bytes
        full |= row.kind == messages.Sample.__name__ and self.waiting_samples >= limits.queued_samples
        if full and row.kind not in (REFUSED, MISSING):
            message = f"{len(self.entries)} requests wait ({self.waiting_bytes >> 20} MiB): try again later"
            raise Rejected(message, status=429)

    # ------------------------------------------------------------------ what waits, under the lock

    def add(self, entry: Entry) -> None:
        """Add a request that is in the journal."""
        row = entry.row
        self.entries[row.owner, row.seq] = entry
        self.waiting_bytes += row.size
        if row.owner in self.lanes:
            self.lanes[row.owner].entries[row.seq] = entry
        elif entry.is_sample:
            self.waiting_samples += 1
            self.new_samples.append(entry)
        self.changed.notify_all()

    def done(self, entry: Entry, state: State) -> None:
        """Remove a request that is done. The journal must have its reply."""
        with self.lock:
            if not entry.is_done:
                self._remove(entry)
            if (lane := self.lanes.get(entry.row.owner)) is not None:
                lane.finish(entry.row.seq, state)

    def _remove(self, entry: Entry) -> None:
        row = entry.row
        del self.entries[row.owner, row.seq]
        self.waiting_bytes -= row.size
        self.waiting_samples -= entry.is_sample
        if row.owner in self.lanes:
            del self.lanes[row.owner].entries[row.seq]
        if entry.encoded is not None:
            self.encoded_bytes[entry.is_sample] -= entry.row.size
        entry.request = entry.encoded = None
        entry.is_done = True
        entry.end_polls()

    # ------------------------------------------------------------------ encoding, ahead of the engine, under the lock

    def encode_ahead(self, lane: Lane) -> list[Entry]:
        """Start to encode the forward_backwards of the next group, and return them."""
        group = lane.next_group(self.limits)
        new = [entry for entry in group if entry.encoded is None]
        has_begun = any(entry.encoded is not None for entry in group if entry not in lane.group)
        if new and (has_begun or (not self.is_short and self._has_room_for(new))):
            for entry in new:
                self._encode(entry)
        elif new:
            self.is_short = True
        return group

    def encode_samples(self) -> None:
        """Start to encode prompts as far as there is room."""
        for entry in self.new_samples:
            if entry.encoded is None:
                if not self._has_room_for([entry]):
                    break
                self._encode(entry)

    def _has_room_for(self, entries: list[Entry]) -> bool:
        """Return whether these requests, all samples or none, may be encoded now."""
        used = self.encoded_bytes[entries[0].is_sample]
        return used == 0 or used + sum(entry.row.size for entry in entries) <= self.limits.encoded_bytes

    def _encode(self, entry: Entry) -> None:
        with suppress(RuntimeError):  # the pool is closed: it is encoded after the next start
            entry.encoded = self._pool.submit(self._encoded, entry)
            self.encoded_bytes[entry.is_sample] += entry.row.size
            entry.encoded.add_done_callback(self._notify)

    def _notify(self, encoded: Future[Any]) -> None:
        with self.lock:
            self.changed.notify_all()

    def _encoded(self, entry: Entry) -> Any:
        request = self.request(entry)
        if isinstance(request, messages.Sample):
            return self._engine.encode_prompt(request)
        assert isinstance(request, messages.ForwardBackward), "other operations are not encoded"
        encoded = self._engine.encode(request)
        entry.request = None
        return encoded

    def request(self, entry: Entry) -> messages.Request:
        """Return the parsed request of an entry. Needs no lock."""
        if entry.request is None:
            entry.request = self.parse(entry.row)
        return entry.request

    def parse(self, row: RequestRow) -> messages.Request:
        """Parse a request from the journal, with the seed that was drawn for it. Needs no lock."""
        return with_seed(codec.decode(row.kind, self.journal.body(row.owner, row.seq)), row.seed)

    # ------------------------------------------------------------------ futures

    async def reply(self, request_id: str, timeout: float) -> messages.Reply | Pending | None:
        """Wait for a reply.

        Args:
            request_id: id of the request.
            timeout: maximum number of seconds to wait.

        Returns:
            The reply; `Pending`: there is none within the timeout; None: the request is unknown, or was fetched long
                ago.
        """
        owner, _, number = request_id.rpartition(":")
        if not number.isdecimal() or not (key := (owner, int(number)))[1] < 2**63:
            return None
        with self.lock:
            with suppress(Rejected):
                self.heartbeat(_session_of(owner))
            entry = self.entries.get(key)
        if entry is not None:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.wrap_future(entry.polls_end), timeout)
            if not entry.is_done:
                return Pending(reason=self.fault)
        reply = await asyncio.to_thread(self.journal.reply, *key)
        if reply is not None:
            with self.lock:
                self.fetched.setdefault(key, time.monotonic())
        return reply

    @property
    def fault(self) -> str | None:
        """Why work has stopped, e.g. on a full disk; None: it goes on."""
        return self._thread.fault or self.journal.fault

    def stats(self) -> dict[str, Any]:
        """Return the queue's metrics by name (see `status.METRICS`)."""
        thread, numbers = self._thread, self.journal.counts()
        with self.lock:
            return {
                **numbers,
                "uptime_seconds": time.monotonic() - self._began,
                "sessions": len(self.heard),
                "queued_requests": len(self.entries),
                "queued_bytes": self.waiting_bytes,
                "queued_samples": self.waiting_samples,
                "requests_total": dict(thread.counts["done"]),
                "requests_failed_total": dict(thread.counts["failed"]),
                "engine_seconds_total": dict(thread.seconds),
                "snapshots_total": thread.snapshots,
            }

    # ------------------------------------------------------------------ what runs out, in the engine thread

    def tidy(self) -> None:
        """Clear what has timed out: gaps, silent sessions, fetched replies and expired checkpoints.

        The engine thread calls it about twice a second.
        """
        with suppress(Rejected):  # the journal has logged its fault once; the next call tries again
            self.journal.try_again()
            self._fail_gaps()
            for session in self.silent(self.limits.idle_seconds):
                log.info("the session %s ended: its client fell silent", session)
                self.finish(session)
            self._drop_replies()
            self._drop_expired()

    def _fail_gaps(self) -> None:
        gaps = []
        with self.lock:
            now = time.monotonic()
            elapsed, self._looked = now - self._looked, now
            for lane in self.lanes.values():
                early = lane.early() if lane.entries else []
                missing = lane.missing if early else None
                if missing != lane.gap:
                    lane.gap, lane.gap_seconds, lane.gap_since = missing, 0.0, now
                elif missing is not None and not lane.receiving:  # a call in chunks sends the first one last
                    lane.gap_seconds += elapsed
                most = self.limits.gap_seconds
                if missing is not None and (lane.gap_seconds >= most or now - lane.gap_since >= MOST_GAPS * most):
                    gaps.append((lane, missing, early))
        for lane, missing, early in gaps:
            self._fail_gap(lane, missing, early)

    def _fail_gap(self, lane: Lane, missing: int, early: list[Entry]) -> None:
        """Fail the requests that wait for a missing number, and use up the numbers that never arrived.

        In this order: if the server is killed between the two, no request runs without the one before it.
        """
        message = f"request {missing} of {lane.id} never arrived, so this one, which comes after it, did not run"
        late = f"this request of {lane.id} came too late: those after it have already failed"
        self._thread.finish([(entry, messages.Failure(message=message, category="user")) for entry in early])
        for number in range(missing, early[-1].row.seq):
            with self.lock:
                is_absent = lane.is_absent(number)
            if is_absent:
                self.refuse(lane.id, number, late, kind=MISSING)

    def _drop_replies(self) -> None:
        """Delete replies some time after they were fetched."""
        late = time.monotonic() - self.limits.result_seconds
        with self.lock:
            keys = list(takewhile(lambda key: self.fetched[key] <= late, self.fetched))
        if keys:
            self.journal.drop_replies(keys)
            with self.lock:
                for key in keys:
                    del self.fetched[key]

    def _drop_expired(self) -> None:
        """Delete expired checkpoints, unless a load is waiting, which may need one of them.

        Weights that a sampling session uses are kept.
        """
        with self.lock:
            kinds = {entry.row.kind for entry in self.entries.values()}
        if not kinds & {"LoadWeights", "CreateFromCheckpoint"}:
            self.journal.drop_expired(now=time.time())


def _no_session(session_id: str) -> Rejected:
    return Rejected(f"there is no session {session_id}, or it has ended: create another", status=410)


def _session_of(owner: str) -> str:
    return owner.rsplit(":", 2)[0]


def content_digest(request: messages.Request) -> bytes:
    """Return a digest of a request's parsed content, which does not depend on its encoding."""
    return hashlib.sha256(json.dumps(request, default=_content, sort_keys=True).encode()).digest()


def _content(value: Any) -> Any:
    """Return what stands in JSON for an object, an array or bytes."""
    if is_dataclass(value):
        parts = {name: part for name, part in vars(value).items() if name not in NOT_CONTENT}
        return {"type of the object": type(value).__name__, **parts}
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.shape, _content(np.ascontiguousarray(value).tobytes())]
    return hashlib.sha256(value).hexdigest()


def with_seed(request: messages.Request, seed: int | None) -> messages.Request:
    """Return a request with the seed that was drawn for it, unless it has its own or needs none."""
    match request:
        case messages.CreateModel(lora=messages.LoraConfig(seed=None) as lora):
            return replace(request, lora=replace(lora, seed=seed))
        case messages.Sample(params=messages.SamplingParams(seed=None) as params):
            return replace(request, params=replace(params, seed=seed))
        case _:
            return request
