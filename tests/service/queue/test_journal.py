"""The journal: a transaction is on the disk as a whole, or not at all."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from vlmpack.service.queue.journal import Journal, JournalError, ModelRow, RequestRow, SessionRow
from vlmpack.service.wire.messages import Reply

MODEL = "s:train:0"


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.sqlite3", base_model="b")


def request(seq: int, owner: str = MODEL) -> RequestRow:
    return RequestRow(owner=owner, seq=seq, session="s", kind="OptimStep", digest=b"d")


def test_a_transaction_that_fails_leaves_nothing(journal: Journal) -> None:
    with pytest.raises(KeyError), journal.transaction():
        journal.add_request(request(1), body=b"x", now=0.0)
        with journal.transaction():
            journal.add_request(request(2), body=b"x", now=0.0)
        raise KeyError
    assert Journal(journal.path, base_model="b").rows(RequestRow) == []
    with pytest.raises(JournalError, match="make room"):
        journal._write("INSERT INTO nowhere VALUES (1)")
    journal.add_request(request(1), body=b"x", now=0.0)
    assert len(journal.rows(RequestRow)) == 1


def bodies(path: Path) -> list[tuple[str, int, bytes]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT owner, seq, body FROM bodies ORDER BY owner, seq").fetchall()


def test_bodies_go_with_what_needs_them(journal: Journal) -> None:
    """When a request is done that is not replayed, when a snapshot covers it, and with the request itself."""
    reply = Reply(content_type="application/json", body=b"{}")
    journal.put(SessionRow(id="s", created=1.0, sdk_version="0.38.0"))
    journal.put(ModelRow(id=MODEL, session="s", created=1.0, last_request=1.0, base_model="b", lora=None))
    for seq in range(1, 5):
        journal.add_request(request(seq), body=bytes([seq]), now=1.0)
    journal.finish_request(MODEL, 1, state="done", reply=reply, keep_body=True)
    journal.finish_request(MODEL, 2, state="failed", reply=reply, keep_body=False)
    assert bodies(journal.path) == [(MODEL, seq, bytes([seq])) for seq in (1, 3, 4)]
    assert [row.is_replayed for row in journal.rows(RequestRow)] == [True, False, False, False]
    journal.cover(MODEL, snapshot="f", covered=1)
    assert bodies(journal.path) == [(MODEL, seq, bytes([seq])) for seq in (3, 4)]
    journal._write("DELETE FROM requests WHERE owner = ? AND seq = 3", MODEL)
    assert bodies(journal.path) == [(MODEL, 4, bytes([4]))]
    journal.end_session("s", now=2.0)
    assert bodies(journal.path) == []


def test_a_change_of_a_request_does_not_write_its_body_again(journal: Journal) -> None:
    """SQLite writes a changed row whole."""
    journal.add_request(request(1), body=bytes(2**20), now=1.0)
    wal = journal.path.with_name(journal.path.name + "-wal")
    before = wal.stat().st_size
    reply = Reply(content_type="application/json", body=b"{}")
    journal.finish_request(MODEL, 1, state="done", reply=reply, keep_body=True)
    journal.drop_replies([(MODEL, 1)])
    assert wal.stat().st_size - before < 2**17
