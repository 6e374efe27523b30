"""A request that waits, and the operations of a model in the order of their numbers. In memory alone.

Lane                 1 2 3 4 5 . 7 8     5 is next; 7 and 8 are early: they wait for 6
  └─ Entry           done  ▲     early   one request, from its POST until its reply
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import Future
from dataclasses import dataclass, field, is_dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, final

import numpy as np

from vlmpack.service.limits import ServiceLimits
from vlmpack.service.queue.journal import RequestRow, State
from vlmpack.service.wire.messages import ForwardBackward, Request, Sample

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
