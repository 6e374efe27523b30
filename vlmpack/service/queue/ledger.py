"""What waits, in memory: the numbered operations of models, the samples, and the long polls for them.

    Ledger ── Lane           operations of one model, in the order of their numbers
      │         └─ Entry     one request, from its POST until its reply
      └─────────── Entry     one sample

    numbers of a lane     1 2 3 4 5 . 7 8     5 is next; 7 and 8 are early: they wait for 6
                          done  ▲     early

The journal is always written first, and alone holds everything else: sessions, models, sampling sessions, checkpoints
and replies. On start, the ledger is read from the journal. One lock guards the ledger. The event loop takes it too, so
no thread may wait for the disk while holding it.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, is_dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, final

import numpy as np

from vlmpack.service.limits import ServiceLimits
from vlmpack.service.queue.journal import Journal, RequestRow, SamplingRow, SessionRow, State
from vlmpack.service.wire.messages import ForwardBackward, Rejected, Request, Sample

if TYPE_CHECKING:
    from vlmpack.service.engine.rows import RowWork


NOT_CONTENT = ("sampling_session_seq_id",)
"""Fields that differ when a client repeats a request: after a lost reply the client draws the next number."""


def content_digest(request: Request) -> bytes:
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
    request: Request | None = None
    """The parsed request; None: already encoded, or not yet read from the journal."""
    encoded: Future[Any] | None = None
    """Future of the encoded request; None: encoding has not started."""
    is_done: bool = False
    """Whether the journal has its reply, or its session has ended."""
    forward_only: bool = False
    """Whether it is a forward_backward without gradient; known once it is parsed."""
    polls_end: Future[None] = field(default_factory=_running)
    """Long polls wait for this future. It ends when there is a reply, or when the service stops."""

    @property
    def is_forward_backward(self) -> bool:
        """Return whether the request can share rows with its neighbors."""
        return self.row.kind == ForwardBackward.__name__

    @property
    def is_sample(self) -> bool:
        """Return whether it is a sample; samples are not ordered."""
        return self.row.kind == Sample.__name__

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


def no_session(session_id: str) -> Rejected:
    """Return the refusal of a request that names a session that is not open."""
    return Rejected(f"there is no session {session_id}, or it has ended: create another", status=410)


@final
class Ledger:
    """What waits in all open sessions, and its counts. See the module's docstring."""

    def __init__(self, journal: Journal, limits: ServiceLimits) -> None:
        self.journal = journal
        self.limits = limits
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.sessions: dict[str, float] = {}
        """Open sessions, the oldest first, and the monotonic time at which the client was last heard from."""
        self.lanes: dict[str, Lane] = {}
        self.samples: dict[tuple[str, int], Entry] = {}
        """Samples that wait or run, by sampling session and number."""
        self.new_samples: list[Entry] = []
        """Accepted samples that are not yet in the sampling engine."""
        self.closed: list[Lane] = []
        """Lanes of ended sessions, not yet freed in the engine."""
        self.encoded_bytes = {False: 0, True: 0}
        """Bytes of the bodies that are encoded, by whether they are samples."""
        self.waiting = 0
        """Number of waiting requests, including samples."""
        self.waiting_bytes = 0
        self.waiting_samples = 0
        self.fetched: dict[tuple[str, int], float] = {}
        """Monotonic time at which each reply was first fetched; after a restart, a reply counts as not yet fetched."""
        with self.lock:
            self._read()

    def _read(self) -> None:
        """Read from the journal what waits."""
        self.journal.forget_ended()
        self.sessions = {row.id: time.monotonic() for row in self.journal.rows(SessionRow, ended=None)}
        samplers = {row.id for row in self.journal.rows(SamplingRow)}
        for row in self.journal.rows(RequestRow):
            if row.owner not in samplers:
                lane = self.lanes.setdefault(row.owner, Lane(id=row.owner, session=row.session))
                if row.state != "queued":
                    lane.finish(row.seq, row.state)
            if row.state == "queued":
                self.add(Entry(row=row))

    # ------------------------------------------------------------------ changes, under the lock

    def add(self, entry: Entry) -> None:
        """Add a request that is in the journal."""
        lane = self.lanes.get(entry.row.owner)
        if lane is None:
            self.samples[entry.row.owner, entry.row.seq] = entry
        else:
            lane.entries[entry.row.seq] = entry
        if entry.is_sample:
            self.new_samples.append(entry)
        self._count(entry, 1)
        self.changed.notify_all()

    def done(self, entry: Entry, state: State) -> None:
        """Remove a request that is done. The journal must have its reply."""
        with self.lock:
            if not entry.is_done:
                self._close(entry)
            if (lane := self.lanes.get(entry.row.owner)) is not None:
                lane.finish(entry.row.seq, state)

    def end_session(self, session_id: str) -> None:
        """End a session, if it is open. Its models, replies and unnamed saves are deleted, and its long polls return.

        Must not be called under the lock.

        Raises:
            JournalError: the journal cannot be written.
        """
        self.journal.end_session(session_id, now=time.time())
        with self.lock:
            self.sessions.pop(session_id, None)
            for entry in [entry for entry in self.entries() if entry.row.session == session_id]:
                if entry.encoded is not None:
                    entry.encoded.cancel()
                self._close(entry)
            self.new_samples = [entry for entry in self.new_samples if not entry.is_done]
            for lane in [lane for lane in self.lanes.values() if lane.session == session_id]:
                self.closed.append(self.lanes.pop(lane.id))
            self.changed.notify_all()

    def _close(self, entry: Entry) -> None:
        self._count(entry, -1)
        if (lane := self.lanes.get(entry.row.owner)) is not None:
            lane.entries.pop(entry.row.seq, None)
        self.samples.pop((entry.row.owner, entry.row.seq), None)
        if entry.encoded is not None:
            self.encoded_bytes[entry.is_sample] -= entry.row.size
        entry.request = entry.encoded = None
        entry.is_done = True
        entry.end_polls()

    def has_room_for(self, entries: Sequence[Entry]) -> bool:
        """Return whether these requests, all samples or none, may be encoded now."""
        used = self.encoded_bytes[entries[0].is_sample]
        return used == 0 or used + sum(entry.row.size for entry in entries) <= self.limits.encoded_bytes

    def note_encoded(self, entry: Entry, encoded: Future[Any]) -> None:
        """Record that a request is being encoded."""
        entry.encoded = encoded
        self.encoded_bytes[entry.is_sample] += entry.row.size

    def _count(self, entry: Entry, sign: int) -> None:
        self.waiting += sign
        self.waiting_bytes += sign * entry.row.size
        self.waiting_samples += sign * entry.is_sample

    # ------------------------------------------------------------------ sessions

    def hear(self, session_id: str) -> None:
        """Note a sign of life of a session's client.

        Raises:
            Rejected: status 410: the session has ended or never existed.
        """
        with self.lock:
            if session_id not in self.sessions:
                raise no_session(session_id)
            self.sessions[session_id] = time.monotonic()

    # ------------------------------------------------------------------ look up

    def find(self, owner: str, seq: int) -> Entry | None:
        """Return the waiting request with this number; None: there is none. Called under the lock."""
        lane = self.lanes.get(owner)
        return self.samples.get((owner, seq)) if lane is None else lane.entries.get(seq)

    def entries(self) -> list[Entry]:
        """Return all requests that wait or run. Called under the lock."""
        return [*self.samples.values(), *(entry for lane in self.lanes.values() for entry in lane.entries.values())]

    def silent(self, seconds: float) -> list[str]:
        """Return sessions without a sign of the client for this many seconds, the longest silent first."""
        late = time.monotonic() - seconds
        with self.lock:
            silent = [session for session, seen in self.sessions.items() if seen < late]
            return sorted(silent, key=self.sessions.__getitem__)
