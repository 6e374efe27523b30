"""The open sessions, in memory: their models with numbered operations, their samples, and the long polls for them.

    Ledger ── Session ── Lane              operations of one model, in the order of their numbers
                 │         └─ Entry        one request, from its POST until its session ends
                 └────── SamplingSession
                           └─ Entry        one sample

    numbers of a lane     1 2 3 4 5 . 7 8     5 is next; 7 and 8 are early: they wait for 6
                          done  ▲     early

The journal is always written first, and holds everything else: replies, checkpoints, and the models' settings. On
start, the ledger is read from the journal. One lock guards the ledger. The event loop takes it too, so no thread may
wait for the disk while holding it.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, final

import numpy as np

from vlmpack.service.journal import Journal, ModelRow, RequestRow, SamplingRow, SessionRow, State
from vlmpack.service.limits import ServiceLimits
from vlmpack.service.messages import ForwardBackward, Request, Sample

if TYPE_CHECKING:
    from vlmpack.service.rows import RowWork


NOT_CONTENT = ("sampling_session_seq_id",)
"""Fields that differ when a client repeats a request: after a lost reply the client draws the next number."""


def content_digest(request: Request) -> bytes:
    """Return a digest of a request's parsed content, which does not depend on its encoding."""
    digest = hashlib.sha256()
    for part in _parts(request):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, np.ndarray):
        yield f"{value.dtype.str}{value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif is_dataclass(value):
        yield type(value).__name__.encode()
        for part in fields(value):
            if part.name not in NOT_CONTENT:
                yield part.name.encode()
                yield from _parts(value.__dict__[part.name])
    elif isinstance(value, Mapping):
        yield f"{{{len(value)}".encode()
        for key in sorted(value):
            yield from _parts(key)
            yield from _parts(value[key])
    elif isinstance(value, tuple | list):
        yield f"[{len(value)}".encode()
        for part in value:
            yield from _parts(part)
    elif isinstance(value, bytes):
        yield b"b"
        yield value
    else:
        yield f"{type(value).__name__} {value!r}".encode()


ARRIVED = threading.Event()
"""Shared event of all accepted requests: one event each would take most of their memory."""
ARRIVED.set()


@final
@dataclass(kw_only=True, eq=False, slots=True)
class Entry:
    """A request."""

    row: RequestRow
    """Row of the request in the journal."""
    request: Request | None = None
    """The parsed request; None: already encoded or done, or not yet read from the journal."""
    encoded: Future[Any] | None = None
    """Future of the encoded request; None: encoding has not started."""
    journaled: threading.Event = field(default_factory=threading.Event)
    """Set once the request is accepted or rejected."""
    accepted: bool = False
    """Whether the request is in the journal."""
    forward_only: bool = False
    """Whether it is a forward_backward without gradient; known once it is parsed."""
    waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = field(default_factory=list)
    """Long polls that wait for the reply."""

    @property
    def is_done(self) -> bool:
        """Return whether there is a reply."""
        return self.row.state != "queued"

    @property
    def is_forward_backward(self) -> bool:
        """Return whether the request can share rows with its neighbors."""
        return self.row.kind == ForwardBackward.__name__

    @property
    def is_sample(self) -> bool:
        """Return whether it is a sample; samples are not ordered."""
        return self.row.kind == Sample.__name__

    def wake(self) -> None:
        """Wake the long polls."""
        for loop, waiter in self.waiters:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_release, waiter)
        self.waiters.clear()


def _release(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


@final
@dataclass(kw_only=True, eq=False)
class Lane:
    """The operations of one model, which run in the order of their numbers."""

    id: str
    """Id of the model."""
    session: str
    """Id of the session."""
    entries: dict[int, Entry] = field(default_factory=dict)
    """Requests, by number."""
    open: dict[int, Entry] = field(default_factory=dict)
    """Requests that are not done, by number."""
    next: int = 0
    """First number that is not done."""
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
    failure: str | None = None
    """Why the model cannot be used any more; None: it can."""
    alone: int = 0
    """Number of next requests to run one by one, because one of them broke their group."""
    is_created: bool = False
    """Whether the model is in the journal."""
    turn: int = 0
    """Turn in which the model was last served."""
    is_closed: bool = False
    """Whether the session has ended."""
    has_gradients: bool = False
    """Whether there are accumulated gradients, which no snapshot holds."""
    seconds: float = 0.0
    """Seconds of the model's operations since the last snapshot."""
    snapshot_seconds: float | None = None
    """Seconds that the last snapshot took; None: there is no snapshot yet."""
    replayed_bytes: int = 0
    """Bytes of the bodies kept for a replay."""

    def waiting(self) -> list[Entry]:
        """Return accepted requests that are not done, in order, from the next number up to the first missing one."""
        waiting, number = [], self.next
        while (entry := self.entries.get(number)) is not None and entry.accepted:
            if not entry.is_done:
                waiting.append(entry)
            number += 1
        return waiting

    def early(self) -> list[Entry]:
        """Return accepted requests after the first missing number."""
        missing = self.missing
        return [entry for number, entry in sorted(self.open.items()) if number > missing and entry.accepted]

    @property
    def missing(self) -> int:
        """First number that has not arrived."""
        number = self.next
        while number in self.entries:
            number += 1
        return number

    def add(self, entry: Entry) -> None:
        """Add a request."""
        self.entries[entry.row.seq] = entry
        if not entry.is_done:
            self.open[entry.row.seq] = entry

    def remove(self, entry: Entry) -> None:
        """Remove a request that was not accepted, and so free its number."""
        self.entries.pop(entry.row.seq, None)
        self.open.pop(entry.row.seq, None)

    def advance(self) -> None:
        """Advance `next` past requests that are done."""
        while (entry := self.entries.get(self.next)) is not None and entry.is_done:
            self.open.pop(self.next, None)
            self.next += 1


@final
@dataclass(kw_only=True, eq=False)
class SamplingSession:
    """A sampling session and its samples, which run in any order."""

    row: SamplingRow
    """Row of the sampling session in the journal."""
    entries: dict[int, Entry] = field(default_factory=dict)
    """Samples, by number."""

    def add(self, entry: Entry) -> None:
        """Add a sample."""
        self.entries[entry.row.seq] = entry

    def remove(self, entry: Entry) -> None:
        """Remove a sample that was not accepted, and so free its number."""
        self.entries.pop(entry.row.seq, None)

    @property
    def is_busy(self) -> bool:
        """Return whether samples are waiting or running."""
        return any(not entry.is_done for entry in self.entries.values())


@final
@dataclass(kw_only=True, eq=False)
class Session:
    """A session of a client."""

    id: str
    """Id of the session."""
    last_seen: float
    """Monotonic time at which the client was last heard from."""
    lanes: list[Lane] = field(default_factory=list)
    """Lanes of the models."""
    samplers: list[SamplingSession] = field(default_factory=list)
    """The sampling sessions."""


@final
class Ledger:
    """All open sessions with their models, samples and counts. See the module's docstring."""

    def __init__(self, journal: Journal, limits: ServiceLimits) -> None:
        self.journal = journal
        self.limits = limits
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.sessions: dict[str, Session] = {}
        self.lanes: dict[str, Lane] = {}
        self.closed: list[Lane] = []
        """Lanes of ended sessions, not yet freed in the engine."""
        self.samplers: dict[str, SamplingSession] = {}
        self.is_swept = True
        """False if a folder may have lost its last reference since the last sweep."""
        self.new_samples: list[Entry] = []
        """Accepted samples that are not yet in the sampling engine."""
        self.encoded_bytes = {False: 0, True: 0}
        """Bytes of the bodies that are encoded, by whether they are samples."""
        self.waiting = 0
        """Number of waiting requests, including samples."""
        self.waiting_bytes = 0
        self.waiting_samples = 0
        self.fetched: list[tuple[str, int]] = []
        """Fetched replies that are not yet noted in the journal."""
        self._read()

    # ------------------------------------------------------------------ from the journal

    def _read(self) -> None:
        now = time.monotonic()
        self.journal.forget_ended()
        for row in self.journal.rows(SessionRow):
            if row.ended is None:
                self.sessions[row.id] = Session(id=row.id, last_seen=now)
        for row in self.journal.rows(SamplingRow):
            if row.session in self.sessions:
                self.add_sampler(row)
        for row in self.journal.requests():
            if row.session in self.sessions:
                self._read_request(row)
        created = {row.id for row in self.journal.rows(ModelRow)}
        for lane in self.lanes.values():
            lane.is_created = lane.id in created
            lane.advance()

    def _read_request(self, row: RequestRow) -> None:
        entry = Entry(row=row, accepted=True, journaled=ARRIVED)
        sampler = self.samplers.get(row.owner)
        if sampler is None:
            lane = self.lanes.get(row.owner) or self.add_lane(row.owner, row.session)
            lane.add(entry)
        else:
            sampler.entries[row.seq] = entry
            if not entry.is_done:
                self.new_samples.append(entry)
        if not entry.is_done:
            self._count(entry, 1)

    # ------------------------------------------------------------------ changes, under the lock

    def add_lane(self, model: str, session: str) -> Lane:
        """Start the lane of a model."""
        lane = self.lanes[model] = Lane(id=model, session=session)
        self.sessions[session].lanes.append(lane)
        return lane

    def add_sampler(self, row: SamplingRow) -> SamplingSession:
        """Open a sampling session."""
        sampler = self.samplers[row.id] = SamplingSession(row=row)
        self.sessions[row.session].samplers.append(sampler)
        return sampler

    def drop_sampler(self, sampling_session: str) -> None:
        """Remove a sampling session, if it still exists."""
        if (sampler := self.samplers.pop(sampling_session, None)) is None:
            return
        self.sessions[sampler.row.session].samplers.remove(sampler)
        self._forget(sampler.entries)

    def arrive(self, entry: Entry) -> None:
        """Accept a request that is in the journal."""
        entry.accepted = True
        if not entry.is_done:
            self._count(entry, 1)
            if entry.is_sample:
                self.new_samples.append(entry)
        if (lane := self.lanes.get(entry.row.owner)) is not None:
            lane.advance()
        entry.journaled.set()
        entry.journaled = ARRIVED
        self.changed.notify_all()

    def done(self, entry: Entry, state: State, *, group: int | None = None) -> None:
        """Mark a request as done. The journal must have its reply."""
        with self.lock:
            if not entry.is_done:
                self._count(entry, -1)
            self._release(entry)
            entry.row = replace(entry.row, state=state, group=group)
            if (lane := self.lanes.get(entry.row.owner)) is not None:
                lane.open.pop(entry.row.seq, None)
                lane.advance()
            entry.wake()

    def end_session(self, session_id: str) -> None:
        """End a session, if it is open. Its models, replies and unnamed saves are deleted, and its long polls return.

        Must not be called under the lock.

        Raises:
            JournalError: the journal cannot be written.
        """
        self.journal.end_session(session_id, now=time.time())
        with self.lock:
            if (session := self.sessions.pop(session_id, None)) is not None:
                self._end(session)

    def silent(self, seconds: float) -> list[Session]:
        """Return sessions without a sign of the client for this many seconds, the longest silent first."""
        late = time.monotonic() - seconds
        with self.lock:
            silent = [session for session in self.sessions.values() if session.last_seen < late]
        return sorted(silent, key=lambda session: session.last_seen)

    def _end(self, session: Session) -> None:
        for lane in session.lanes:
            lane.is_closed = True
            self.lanes.pop(lane.id, None)
            self.closed.append(lane)
            self._forget(lane.entries)
        for sampler in session.samplers:
            self.samplers.pop(sampler.row.id, None)
            self._forget(sampler.entries)
        self.new_samples = [entry for entry in self.new_samples if entry.row.session != session.id]
        self.changed.notify_all()

    def _forget(self, entries: dict[int, Entry]) -> None:
        for entry in entries.values():
            if entry.accepted and not entry.is_done:
                self._count(entry, -1)
                entry.row = replace(entry.row, state="failed")
            if entry.encoded is not None:
                entry.encoded.cancel()
            self._release(entry)
            entry.wake()

    def has_room_for(self, size: int, *, samples: bool) -> bool:
        """Return whether bodies of this size may be encoded now."""
        used = self.encoded_bytes[samples]
        return used == 0 or used + size <= self.limits.encoded_bytes

    def note_encoded(self, entry: Entry, encoded: Future[Any] | None) -> None:
        """Record that a request is being encoded."""
        entry.encoded = encoded
        if encoded is not None:
            self.encoded_bytes[entry.is_sample] += entry.row.size

    def _release(self, entry: Entry) -> None:
        if entry.encoded is not None:
            self.encoded_bytes[entry.is_sample] -= entry.row.size
        entry.request = entry.encoded = None

    def _count(self, entry: Entry, sign: int) -> None:
        self.waiting += sign
        self.waiting_bytes += sign * entry.row.size
        if entry.is_sample:
            self.waiting_samples += sign

    # ------------------------------------------------------------------ look up, under the lock

    def find(self, owner: str, seq: int) -> Entry | None:
        """Return the request with this number; None: there is none."""
        lane = self.lanes.get(owner) or self.samplers.get(owner)
        return None if lane is None else lane.entries.get(seq)
