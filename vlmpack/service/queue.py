"""The queue: what the HTTP layer calls. POSTs only enqueue; the engine thread carries out; long polls wait for replies.

    submit ──▶ journal ──▶ ledger ──▶ engine thread ──▶ journal ──▶ reply
    (any thread)                       (owns the engine)             (asyncio)

A number that was accepted once is never carried out twice: its repetition gets the same id, other content under it is
refused. What can be read is refused in its future, so that its number is used up.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from vlmpack.service.checkpoints import StateFolder
from vlmpack.service.engine_thread import EngineThread
from vlmpack.service.expiry import MISSING, Expiry, failed_reply
from vlmpack.service.journal import Journal, JournalError
from vlmpack.service.ledger import Entry, Lane, Ledger, SamplingSession, content_digest, owner_of
from vlmpack.service.messages import (
    CreateFromCheckpoint,
    CreateModel,
    ForwardBackward,
    Request,
    Sample,
)
from vlmpack.service.operations import Operations, lacks_seed, with_seed
from vlmpack.service.protocols import Codec, ModelEngine, QueueSettings
from vlmpack.service.records import RequestRow, StoredReply
from vlmpack.service.sessions import CheckpointInfo, ModelInfo, Rejected, SamplerInfo, SessionInfo, Sessions

__all__ = [
    "CheckpointInfo",
    "ModelInfo",
    "Pending",
    "QueueSettings",
    "QueueStats",
    "Rejected",
    "Reply",
    "RequestQueue",
    "SamplerInfo",
    "SessionInfo",
    "Submitted",
]

REFUSED = "Refused"
"""Kind of a request that could not be read."""


@final
@dataclass(frozen=True, kw_only=True)
class Submitted:
    """A request that was accepted."""

    request_id: str
    """Under which its reply is fetched."""
    sequence_ids: tuple[str, ...] = ()
    """One a sequence of a `Sample`."""


@final
@dataclass(frozen=True, kw_only=True)
class Pending:
    """No reply yet."""

    state: Literal["active", "paused_capacity", "paused_rate_limit"] = "active"
    """Of the queue."""
    reason: str | None = None
    """Why it is paused."""


Reply = StoredReply


@final
@dataclass(frozen=True, kw_only=True)
class QueueStats:
    """Counts of the queue."""

    queued: int
    """Requests that wait, samples too."""
    queued_bytes: int
    """Bytes of their bodies."""
    samples_waiting: int
    """Samples that wait or run."""
    sessions: int
    """Open sessions."""
    models: int
    """Models of open sessions."""
    samplers: int
    """Sampling sessions."""
    checkpoints: int
    """Checkpoints."""
    rows: int
    """Rows run since the start."""
    snapshots: int
    """Snapshots written since the start."""
    requests_done: dict[str, int]
    """Requests carried out since the start, by kind."""
    requests_failed: dict[str, int]
    """Requests that failed since the start, by kind."""
    seconds: dict[str, float]
    """Time of the engine thread since the start, by use: training, sampling, snapshots."""
    uptime: float
    """Seconds since the start."""
    paused: str | None
    """Why nothing can be committed, as on a full disk."""
    fault: str | None
    """Why the engine thread ended; None: it runs."""
    is_restored: bool
    """True if the models of the journal are back."""


@final
class RequestQueue(Sessions):
    """See the top of the file. Thread-safe.

    Args:
        engine: computes; belongs to the queue's thread from `start` on, but for its `encode` methods.
        state: the state folder.
        codec: parses bodies and encodes replies.
        settings: limits and times.

    Raises:
        ConfigError: the state folder is used by another server, damaged, foreign, or of another base model.
    """

    def __init__(
        self,
        engine: ModelEngine,
        state: Path,
        *,
        codec: Codec,
        settings: QueueSettings = QueueSettings(),  # noqa: B008 (frozen)
    ) -> None:
        folder = StateFolder(state)
        try:
            journal = Journal(folder.journal, base_model=engine.base.name)
            folder.make_private()
        except BaseException:
            folder.close()
            raise
        super().__init__(Ledger(journal, settings), folder, engine.base)
        self._codec = codec
        self._is_draining = False
        self._is_closed = False
        self._began = time.monotonic()
        operations = Operations(engine=engine, ledger=self._ledger, codec=codec, state=folder)
        self._expiry = Expiry(ledger=self._ledger, codec=codec, finish=self.finish)
        self._thread = EngineThread(
            engine=engine, ledger=self._ledger, codec=codec, state=folder, operations=operations, tidy=self._expiry.tidy
        )

    def start(self) -> None:
        """Start the engine thread, which restores the models of the journal first; requests are accepted meanwhile."""
        self._thread.start()

    def drain(self, timeout: float) -> None:
        """Finish the groups that run, write snapshots and close; long polls return at once, what waits is kept."""
        self._end_polls()
        self._thread.stop(drain=timeout)
        self._close_files()

    def close(self) -> None:
        """End after the unit of work that runs; nothing that was accepted is lost."""
        self._end_polls()
        self._thread.stop()
        self._close_files()

    def _end_polls(self) -> None:
        with self._ledger.lock:
            self._is_draining = True
            for owner in (*self._ledger.lanes.values(), *self._ledger.samplers.values()):
                for entry in owner.entries.values():
                    entry.wake()

    def _close_files(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(JournalError):
            self._expiry.note_retrieved()
        self._ledger.journal.close()
        self._state.close()

    # ------------------------------------------------------------------ POSTs

    @contextmanager
    def receiving(self, model_id: str) -> Iterator[None]:
        """Stop the clock of a model's gaps while one of its requests is being received, see `Expiry`."""
        with self._ledger.lock:
            lane = self._ledger.lanes.get(model_id, Lane(id=model_id, session=""))  # one that nobody knows
            lane.receiving += 1
        try:
            yield
        finally:
            with self._ledger.lock:
                lane.receiving -= 1

    def submit(self, request: Request, body: bytes, content_type: str = "") -> Submitted:
        """Accept a request; it is on the disk when this returns.

        Args:
            request: parsed.
            body: what it was parsed from, decompressed, for `Codec.decode`.
            content_type: of the body; its kind says it already.

        Raises:
            Rejected: 400: its number is used by other content; 404, 410: no such model or session (any more); 429: no
                room now, or the disk is full.
        """
        owner, seq = owner_of(request)
        seed = secrets.randbits(31) if lacks_seed(request) else None
        digest = content_digest(request)
        row = RequestRow(
            owner=owner, seq=seq, session=_session_of(owner), kind=type(request).__name__, digest=digest, seed=seed,
            size=len(body),
        )  # fmt: skip
        forward_only = isinstance(request, ForwardBackward) and request.forward_only
        entry = Entry(row=row, request=with_seed(request, seed), forward_only=forward_only)
        self._accept(entry, body, is_creation=isinstance(request, CreateModel | CreateFromCheckpoint))
        count = request.num_samples if isinstance(request, Sample) else 0
        return _submitted(owner, seq, count)

    def refuse(self, model_id: str, seq_id: int, message: str) -> str:
        """Use up the number of an operation that could not be read; return the id of a future that fails.

        Raises:
            Rejected: as `submit`; 400: the number was accepted before, with what could be read.
        """
        return self._refuse(model_id, seq_id, message).request_id

    def refuse_creation(self, session_id: str, model_seq_id: int, message: str) -> str:
        """Use up the number of a creation, see `refuse`."""
        return self._refuse(f"{session_id}:train:{model_seq_id}", 0, message, is_creation=True).request_id

    def refuse_sample(self, sampling_session_id: str, seq_id: int, num_samples: int, message: str) -> Submitted:
        """Use up the number of a sample, see `refuse`."""
        self._refuse(sampling_session_id, seq_id, message)
        return _submitted(sampling_session_id, seq_id, num_samples)

    def _refuse(self, owner: str, seq: int, message: str, *, is_creation: bool = False) -> Submitted:
        row = RequestRow(owner=owner, seq=seq, session=_session_of(owner), kind=REFUSED, digest=b"", state="failed")
        self._accept(Entry(row=row), None, is_creation=is_creation, failure=message)
        return _submitted(owner, seq, 0)

    def _accept(self, entry: Entry, body: bytes | None, *, is_creation: bool, failure: str | None = None) -> None:
        with self._ledger.lock:
            self._touch(entry.row.session)
            holder = self._holder(entry.row, is_creation=is_creation)
            known = holder.entries.get(entry.row.seq)
            if known is None:
                self._check_room(entry.row, holder)
                _add(holder, entry)
        if known is not None:
            self._repeat(known, entry, body, is_creation=is_creation, failure=failure)
            return
        try:
            self._enter(entry, body, failure)
        except BaseException as error:
            with self._ledger.lock:
                _remove(holder, entry)
            if isinstance(error, JournalError):
                raise Rejected(str(error), status=429, retry_after=self._ledger.settings.retry_after) from error
            raise
        finally:
            entry.journaled.set()

    def _enter(self, entry: Entry, body: bytes | None, failure: str | None) -> None:
        key = (entry.row.owner, entry.row.seq)
        reply = None if failure is None else failed_reply(self._codec, failure)
        with self._ledger.journal.transaction():
            self._ledger.journal.add_request(entry.row, body=body, now=time.time())
            if reply is not None:
                self._ledger.journal.finish_request(*key, state="failed", reply=reply, keep_body=False)
        with self._ledger.lock:
            if entry.row.session not in self._ledger.sessions:
                raise Rejected(f"the session {entry.row.session} has ended", status=410)
            self._ledger.arrive(entry)
            if reply is not None:
                self._ledger.done(entry, "failed", reply)
            elif entry.is_sample:
                self._thread.encode_samples()
            elif (lane := self._ledger.lanes.get(entry.row.owner)) is not None:
                self._thread.encode_ahead(lane)

    def _repeat(
        self, known: Entry, entry: Entry, body: bytes | None, *, is_creation: bool, failure: str | None
    ) -> None:
        known.journaled.wait()
        if not known.accepted:  # the first of two POSTs at once found the disk full
            self._accept(entry, body, is_creation=is_creation, failure=failure)
        elif known.row.kind != MISSING and (known.row.kind, known.row.digest) != (entry.row.kind, entry.row.digest):
            raise Rejected(
                f"number {entry.row.seq} of {entry.row.owner} was a {known.row.kind} of other content: "
                "a number is used once",
                status=400,
            )

    def _holder(self, row: RequestRow, *, is_creation: bool) -> Lane | SamplingSession:
        holder = self._ledger.lanes.get(row.owner) or self._ledger.samplers.get(row.owner)
        if holder is not None:
            return holder
        self._check_session(row.session)
        if is_creation:
            return self._ledger.add_lane(row.owner, row.session)
        raise Rejected(
            f"there is no model or sampling session {row.owner}: it was never made, or, if an unnamed save, "
            f"{self._ledger.settings.unnamed_saves} later ones of its model took its place (save under a name)",
            status=404,
        )

    def _check_room(self, row: RequestRow, holder: Lane | SamplingSession) -> None:
        ledger, settings = self._ledger, self._ledger.settings
        if self._is_draining:
            raise Rejected("the server is going down", status=429, retry_after=settings.retry_after)
        if not 0 <= row.seq < 2**63:
            raise Rejected(f"request {row.seq} of {row.owner}: numbers count from 0", status=400)
        if isinstance(holder, Lane):
            if row.seq == holder.missing:
                return  # others wait for it: to refuse it would be to wait for a request that is not let in
            if row.seq > holder.missing + settings.numbers_ahead:
                raise Rejected(f"request {row.seq} of {row.owner}, which is at {holder.missing}", status=400)
        full = ledger.waiting >= settings.queued_requests or ledger.waiting_bytes + row.size > settings.queued_bytes
        if row.kind == Sample.__name__:
            full |= ledger.waiting_samples >= settings.queued_samples
        if full and row.kind != REFUSED:
            raise Rejected(
                f"{ledger.waiting} requests wait ({ledger.waiting_bytes >> 20} MiB): try again later",
                status=429,
                retry_after=settings.retry_after,
            )

    # ------------------------------------------------------------------ futures

    async def reply(self, request_id: str, timeout: float) -> Reply | Pending | None:
        """Wait for a reply.

        Args:
            request_id: of a request.
            timeout: seconds to wait at most.

        Returns:
            The reply; `Pending`: none within the timeout; None: unknown, or fetched long ago.
        """
        owner, _, number = request_id.rpartition(":")
        if not number.isdecimal():
            return None
        key = (owner, int(number))
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        with self._ledger.lock:
            self._touch(_session_of(owner))
            entry = self._ledger.find(*key)
            if entry is None:
                return None
            if not entry.is_done and not self._is_draining:
                entry.waiters.append((loop, waiter))
            else:
                waiter.set_result(None)
        try:
            await asyncio.wait_for(waiter, timeout)
        except asyncio.TimeoutError:
            pass
        finally:
            with self._ledger.lock, suppress(ValueError):
                entry.waiters.remove((loop, waiter))
        if not entry.is_done:
            paused = self._thread.paused or self._thread.fault
            return Pending() if paused is None else Pending(state="paused_capacity", reason=paused)
        return await self._stored(key)

    async def _stored(self, key: tuple[str, int]) -> Reply | None:
        with self._ledger.lock:
            reply = self._ledger.cached(key)
        if reply is None:
            reply = await asyncio.to_thread(self._ledger.journal.reply, *key)
        if reply is not None:
            with self._ledger.lock:
                if key not in self._ledger.retrieved and self._ledger.find(*key) is not None:
                    self._ledger.retrieved[key] = time.time()
                    self._ledger.retrieved_now.append(key)
        return reply

    def stats(self) -> QueueStats:
        """Return what the queue holds and has done."""
        ledger, thread = self._ledger, self._thread
        with ledger.lock:
            counts = dict(thread.counts)
            return QueueStats(
                queued=ledger.waiting, queued_bytes=ledger.waiting_bytes, samples_waiting=ledger.waiting_samples,
                sessions=len(ledger.sessions), models=len(ledger.lanes), samplers=len(ledger.samplers),
                checkpoints=len(ledger.checkpoints), rows=counts.get("rows", 0), snapshots=counts.get("snapshots", 0),
                requests_done=_by_kind(counts, ".done"), requests_failed=_by_kind(counts, ".failed"),
                seconds=dict(thread.seconds), uptime=time.monotonic() - self._began, paused=thread.paused,
                fault=thread.fault, is_restored=thread.is_restored,
            )  # fmt: skip


def _by_kind(counts: dict[str, int], suffix: str) -> dict[str, int]:
    return {name.removesuffix(suffix): count for name, count in counts.items() if name.endswith(suffix)}


def _session_of(owner: str) -> str:
    return owner.rsplit(":", 2)[0]


def _submitted(owner: str, seq: int, samples: int) -> Submitted:
    name = f"{owner}:{seq}"
    return Submitted(request_id=name, sequence_ids=tuple(f"{name}:{number}" for number in range(samples)))


def _add(holder: Lane | SamplingSession, entry: Entry) -> None:
    if isinstance(holder, Lane):
        holder.add(entry)
    else:
        holder.entries[entry.row.seq] = entry


def _remove(holder: Lane | SamplingSession, entry: Entry) -> None:
    if isinstance(holder, Lane):
        holder.remove(entry)
    else:
        holder.entries.pop(entry.row.seq, None)
