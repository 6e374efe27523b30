"""Expiry: numbers that never arrive, sessions of silent clients, replies that were fetched long ago.

numbers   1 2 3 . 5 6     4 is missing for `gap_timeout`, whatever else arrives: 5 and 6 fail, 4 is used up, 7 is next
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import final

from vlmpack.service.journal import JournalError
from vlmpack.service.ledger import Entry, Lane, Ledger
from vlmpack.service.messages import Failure
from vlmpack.service.protocols import Codec
from vlmpack.service.records import RequestRow, StoredReply

MISSING = "Missing"
"""Kind of a number whose request never arrived in time."""

log = logging.getLogger("vlmpack.service")


def failed_reply(codec: Codec, message: str) -> StoredReply:
    """Return the reply of a request that its client has got wrong."""
    reply = codec.encode(Failure(message=message, category="user"))
    return StoredReply(content_type=reply.content_type, body=reply.body)


@final
class Expiry:
    """See the top of the file.

    Args:
        ledger: all that was accepted.
        codec: encodes failures.
        finish: ends a session.
    """

    def __init__(self, *, ledger: Ledger, codec: Codec, finish: Callable[[str], None]) -> None:
        self._ledger = ledger
        self._codec = codec
        self._finish = finish
        self._looked = time.monotonic()

    def tidy(self) -> None:
        """Look at what has run out; called in the engine thread about twice a second."""
        try:
            self._fail_gaps()
            self._end_silent_sessions()
            self.note_retrieved()
            self._drop_replies()
        except JournalError:
            log.exception("the journal cannot be written; tried again")

    def _fail_gaps(self) -> None:
        gaps = []
        with self._ledger.lock:
            now = time.monotonic()
            elapsed, self._looked = now - self._looked, now
            for lane in self._ledger.lanes.values():
                early = lane.early() if lane.open else []
                missing = lane.missing if early else None
                if missing != lane.gap:
                    lane.gap, lane.gap_seconds = missing, 0.0
                elif missing is not None and not lane.receiving:  # a call in chunks is sent with the first one last
                    lane.gap_seconds += elapsed
                if missing is not None and lane.gap_seconds >= self._ledger.settings.gap_timeout:
                    gaps.append((lane, missing, early))
        for lane, missing, early in gaps:
            self._fail_gap(lane, missing, early)

    def _fail_gap(self, lane: Lane, missing: int, early: list[Entry]) -> None:
        message = f"request {missing} of {lane.id} never arrived: this one, which comes after it, was not carried out"
        reply, absent = failed_reply(self._codec, message), []
        given_up = failed_reply(
            self._codec, f"this request of {lane.id} arrived after those behind it had been given up"
        )
        with self._ledger.lock:
            for number in range(missing, early[-1].row.seq):
                if number not in lane.entries:
                    row = RequestRow(
                        owner=lane.id, seq=number, session=lane.session, kind=MISSING, digest=b"", state="failed"
                    )
                    absent.append(Entry(row=row))
                    lane.add(absent[-1])  # one that arrives now is a repetition
        try:
            self._commit_gap(absent, early, given_up, reply)
        except BaseException:
            with self._ledger.lock:
                for entry in absent:
                    lane.remove(entry)
            raise
        finally:
            for entry in absent:
                entry.journaled.set()
        with self._ledger.lock:
            for entry in absent:
                self._ledger.arrive(entry)
                self._ledger.done(entry, "failed", given_up)
            for entry in early:
                self._ledger.done(entry, "failed", reply)

    def _commit_gap(self, absent: list[Entry], early: list[Entry], given_up: StoredReply, reply: StoredReply) -> None:
        journal = self._ledger.journal
        with journal.transaction():
            for entry in absent:
                journal.add_request(entry.row, body=None, now=time.time())
                journal.finish_request(entry.row.owner, entry.row.seq, state="failed", reply=given_up, keep_body=False)
            for entry in early:
                journal.finish_request(entry.row.owner, entry.row.seq, state="failed", reply=reply, keep_body=False)

    def _end_silent_sessions(self) -> None:
        late = time.monotonic() - self._ledger.settings.session_timeout
        with self._ledger.lock:
            silent = [session.row.id for session in self._ledger.sessions.values() if session.last_seen < late]
        for session in silent:
            log.info("the session %s ended: its client fell silent", session)
            self._finish(session)

    def note_retrieved(self) -> None:
        """Enter in the journal which replies were fetched."""
        with self._ledger.lock:
            keys = [*self._ledger.retrieved_now]
        if keys:
            self._ledger.journal.note_retrieved(keys, now=time.time())
            with self._ledger.lock:
                del self._ledger.retrieved_now[: len(keys)]

    def _drop_replies(self) -> None:
        old = time.time() - self._ledger.settings.reply_kept
        with self._ledger.lock:
            keys = [key for key, when in self._ledger.retrieved.items() if when < old]
        if keys:
            samples = [key for key in keys if key[0] in self._ledger.samplers]
            with self._ledger.journal.transaction():
                self._ledger.journal.drop_requests(samples)
                self._ledger.journal.drop_replies(keys)
            with self._ledger.lock:
                for key in keys:
                    self._ledger.uncache(key)
                    self._ledger.retrieved.pop(key, None)
                for owner, seq in samples:
                    if (sampler := self._ledger.samplers.get(owner)) is not None:
                        sampler.entries.pop(seq, None)
