"""What is open, in memory: sessions, models with their numbered operations, samples, and the long polls for them.

    Ledger ── Session ── Lane              operations of one model, in the order of their numbers
                 │         └─ Entry        one request, from its POST until its session ends
                 └────── SamplingSession
                           └─ Entry        one sample

    numbers of a lane     1 2 3 4 5 . 7 8     5 is next; 7 and 8 are early: they wait for 6
                          done  ▲     early

The journal is written first and holds the rest: replies, checkpoints, what models are. A start reads it. One lock
guards what is here. The event loop takes it too, so nobody waits for the disk while holding it.
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
"""Fields that an honest repetition changes: after a lost reply the client draws the next number."""


def content_digest(request: Request) -> bytes:
    """Return a digest of what a request says, whatever the bytes it came in."""
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
"""Of every request that was accepted: an event each would be most of its memory."""
ARRIVED.set()


@final
@dataclass(kw_only=True, eq=False, slots=True)
class Entry:
    """One request."""

    row: RequestRow
    """Its row in the journal."""
    request: Request | None = None
    """Parsed; None once it is encoded or done, or not read from the journal yet."""
    encoded: Future[Any] | None = None
    """Being encoded, or encoded."""
    journaled: threading.Event = field(default_factory=threading.Event)
    """Set when it is accepted, or was not."""
    accepted: bool = False
    """True if it is in the journal."""
    forward_only: bool = False
    """True if it is a forward_backward without gradient; known once it is parsed."""
    waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = field(default_factory=list)
    """Long polls."""

    @property
    def is_done(self) -> bool:
        """Return whether there is a reply."""
        return self.row.state != "queued"

    @property
    def is_forward_backward(self) -> bool:
        """Return whether it shares rows with its neighbours."""
        return self.row.kind == ForwardBackward.__name__

    @property
    def is_sample(self) -> bool:
        """Return whether it is a sample, which has no place in an order."""
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
    """The operations of one model, carried out in the order of their numbers."""

    id: str
    """Of the model."""
    session: str
    """Of the client."""
    entries: dict[int, Entry] = field(default_factory=dict)
    """By number."""
    open: dict[int, Entry] = field(default_factory=dict)
    """Entries that are not done, by number."""
    next: int = 0
    """First number that is not done."""
    gap: int | None = None
    """First missing number while later ones wait for it, as it was last looked at."""
    gap_seconds: float = 0.0
    """Time that they have waited, less that in which a request of the model was being received."""
    gap_since: float = 0.0
    """When the gap was first seen, by the monotonic clock."""
    receiving: int = 0
    """Its requests that are being received now."""
    group: list[Entry] = field(default_factory=list)
    """Requests that are in rows now."""
    work: RowWork | None = None
    """Their rows."""
    failure: str | None = None
    """Why the model is of no use."""
    alone: int = 0
    """Next requests that go through the model one by one: one of them broke the group that they were in."""
    is_created: bool = False
    """True once the journal has its model."""
    turn: int = 0
    """When it was last served."""
    is_closed: bool = False
    """True if its session ended."""
    has_gradients: bool = False
    """True if there are gradients that no snapshot holds."""
    seconds: float = 0.0
    """Time of its operations since its last snapshot."""
    snapshot_seconds: float | None = None
    """Time that its last snapshot took; None: none was taken yet."""
    replayed_bytes: int = 0
    """Bytes of bodies kept for a replay."""

    def waiting(self) -> list[Entry]:
        """Accepted requests in their order, from the next number up to the first that is missing."""
        waiting, number = [], self.next
        while (entry := self.entries.get(number)) is not None and entry.accepted:
            if not entry.is_done:
                waiting.append(entry)
            number += 1
        return waiting

    def early(self) -> list[Entry]:
        """Requests beyond a number that is missing."""
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
        """Take a request in."""
        self.entries[entry.row.seq] = entry
        if not entry.is_done:
            self.open[entry.row.seq] = entry

    def remove(self, entry: Entry) -> None:
        """Give the number of a request back that was not accepted."""
        self.entries.pop(entry.row.seq, None)
        self.open.pop(entry.row.seq, None)

    def advance(self) -> None:
        """Move on past what is done."""
        while (entry := self.entries.get(self.next)) is not None and entry.is_done:
            self.open.pop(self.next, None)
            self.next += 1


@final
@dataclass(kw_only=True, eq=False)
class SamplingSession:
    """A sampling session and its samples, in any order."""

    row: SamplingRow
    """Its row in the journal."""
    entries: dict[int, Entry] = field(default_factory=dict)
    """By number."""

    def add(self, entry: Entry) -> None:
        """Take a sample in."""
        self.entries[entry.row.seq] = entry

    def remove(self, entry: Entry) -> None:
        """Give the number of a sample back that was not accepted."""
        self.entries.pop(entry.row.seq, None)

    @property
    def is_busy(self) -> bool:
        """Return whether samples wait."""
        return any(not entry.is_done for entry in self.entries.values())


@final
@dataclass(kw_only=True, eq=False)
class Session:
    """A session of a client."""

    id: str
    """Of the session."""
    last_seen: float
    """Monotonic seconds."""
    lanes: list[Lane] = field(default_factory=list)
    """Of its models."""
    samplers: list[SamplingSession] = field(default_factory=list)
    """Its sampling sessions."""


@final
class Ledger:
    """See the top of the file."""

    def __init__(self, journal: Journal, limits: ServiceLimits) -> None:
        self.journal = journal
        self.limits = limits
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.sessions: dict[str, Session] = {}
        self.lanes: dict[str, Lane] = {}
        self.closed: list[Lane] = []
        """Of ended sessions, not yet freed in the engine."""
        self.samplers: dict[str, SamplingSession] = {}
        self.is_swept = True
        """True if no folder lost its last reference since the folders were last swept."""
        self.new_samples: list[Entry] = []
        """Accepted, not yet in the sampling engine."""
        self.encoded_bytes = {False: 0, True: 0}
        """Bytes of the bodies that are encoded: of training, and of samples."""
        self.waiting = 0
        """Requests that wait, samples too."""
        self.waiting_bytes = 0
        self.waiting_samples = 0
        self.fetched: list[tuple[str, int]] = []
        """Replies that were fetched, which the journal does not say yet."""
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
        """Begin the operations of a model."""
        lane = self.lanes[model] = Lane(id=model, session=session)
        self.sessions[session].lanes.append(lane)
        return lane

    def add_sampler(self, row: SamplingRow) -> SamplingSession:
        """Begin a sampling session."""
        sampler = self.samplers[row.id] = SamplingSession(row=row)
        self.sessions[row.session].samplers.append(sampler)
        return sampler

    def drop_sampler(self, sampling_session: str) -> None:
        """Forget a sampling session, if it is still there."""
        if (sampler := self.samplers.pop(sampling_session, None)) is None:
            return
        self.sessions[sampler.row.session].samplers.remove(sampler)
        self._forget(sampler.entries)

    def arrive(self, entry: Entry) -> None:
        """Take a request in that the journal has."""
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
        """Take in that a request is done; the journal has its reply."""
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
        """End a session, if it is open: its models, replies and unnamed saves go; its long polls return. Not under the
        lock.

        Raises:
            JournalError: the journal cannot be written.
        """
        self.journal.end_session(session_id, now=time.time())
        with self.lock:
            if (session := self.sessions.pop(session_id, None)) is not None:
                self._end(session)

    def silent(self, seconds: float) -> list[Session]:
        """Sessions whose clients have not been heard of for some time, the longest first."""
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
        """Take in that a request is being encoded."""
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
        """Request of this number; None: there is none."""
        lane = self.lanes.get(owner) or self.samplers.get(owner)
        return None if lane is None else lane.entries.get(seq)
