"""The journal of the service: what was accepted, what came of it, and where each model's state lies. SQLite, WAL.

    sessions ── models ── requests ── bodies            (owner, seq): operations of a model; 0 is its creation
        └────── sampling_sessions ── requests ── bodies (owner, seq): samples
    checkpoints   by model, kind and name; they outlive their session

    a request   queued ──▶ done | failed      its body stays until a snapshot covers it
    a model     snapshot (a folder) up to operation `covered`; the done operations after it are replayed

Every change is one transaction, on the disk before the call returns. Calls from several threads take turns; reading
does not wait for writing. Bodies have a table of their own: SQLite writes a changed row whole, megabytes of images too.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

from vlmpack.errors import ConfigError, VlmpackError
from vlmpack.service.messages import LoraConfig
from vlmpack.service.records import CheckpointRow, ModelRow, RequestRow, SamplingRow, SessionRow, State, StoredReply

APPLICATION = 0x766C6D70
"""Marks a SQLite file as ours."""
VERSION = 3
"""Of the tables below."""

SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE sessions (
    id TEXT PRIMARY KEY, created REAL NOT NULL, ended REAL,
    tags TEXT NOT NULL, user_metadata TEXT NOT NULL, sdk_version TEXT NOT NULL, display_name TEXT);
CREATE TABLE models (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, created REAL NOT NULL, last_request REAL NOT NULL,
    base_model TEXT NOT NULL, lora TEXT, user_metadata TEXT NOT NULL, snapshot TEXT, covered INTEGER NOT NULL);
CREATE TABLE sampling_sessions (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, created REAL NOT NULL, model TEXT, path TEXT, folder TEXT);
CREATE TABLE checkpoints (
    model TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, folder TEXT NOT NULL, created REAL NOT NULL,
    size INTEGER NOT NULL, base_model TEXT NOT NULL, lora TEXT, user_metadata TEXT NOT NULL,
    PRIMARY KEY (model, kind, name));
CREATE TABLE requests (
    owner TEXT NOT NULL, seq INTEGER NOT NULL, session TEXT NOT NULL, kind TEXT NOT NULL, digest BLOB NOT NULL,
    seed INTEGER, state TEXT NOT NULL, grp INTEGER, retrieved REAL, reply_type TEXT, reply BLOB,
    PRIMARY KEY (owner, seq));
CREATE INDEX requests_session ON requests (session);
"""
BODIES = """
CREATE TABLE bodies (owner TEXT NOT NULL, seq INTEGER NOT NULL, body BLOB NOT NULL, PRIMARY KEY (owner, seq));
CREATE TRIGGER requests_deleted AFTER DELETE ON requests
BEGIN DELETE FROM bodies WHERE owner = OLD.owner AND seq = OLD.seq; END;
"""
BODIES_OF_REQUESTS = """
INSERT INTO bodies SELECT owner, seq, body FROM requests WHERE body IS NOT NULL;
ALTER TABLE requests DROP COLUMN body;
"""
DISPLAY_NAMES = "ALTER TABLE sessions ADD COLUMN display_name TEXT"
MIGRATIONS = {1: (BODIES, BODIES_OF_REQUESTS), 2: (DISPLAY_NAMES,)}
"""Statements that bring tables to the next version. 1 had bodies in the table of requests, 2 no display names."""


@final
class JournalError(VlmpackError):
    """The journal cannot be written now, as on a full disk; nothing of the transaction was."""


REQUEST_COLUMNS = "owner, seq, session, kind, digest, seed, state, grp, retrieved, length(body)"
REQUEST_ROWS = f"SELECT {REQUEST_COLUMNS} FROM requests LEFT JOIN bodies USING (owner, seq)"


@final
class Journal:
    """See the top of the file.

    Args:
        path: the SQLite file; made if there is none.
        base_model: name of the base model, to which all that the journal holds belongs.

    Raises:
        ConfigError: the file is damaged, not ours, of a newer version, or of another base model.
    """

    def __init__(self, path: Path, *, base_model: str) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._reading = threading.Lock()
        self._depth = 0
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite gives its other files the mode of this one
            self._writer = self._connect()
            self._check(base_model)
            self._reader = self._connect()
        except (OSError, sqlite3.DatabaseError) as error:
            raise ConfigError(
                f"{path} is damaged, or cannot be written ({error}). Restore the state folder from a backup, or "
                "start with another one (--state); checkpoints in its folder `weights` are whole without the journal"
            ) from error

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=60)
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA journal_size_limit = 67108864")
        return connection

    def _check(self, base_model: str) -> None:
        (application,) = self._writer.execute("PRAGMA application_id").fetchone()
        (version,) = self._writer.execute("PRAGMA user_version").fetchone()
        (tables,) = self._writer.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables == 0 and application == 0:
            with self.transaction():
                self._run(SCHEMA, BODIES)
                self._writer.execute("INSERT INTO facts VALUES ('base_model', ?)", (base_model,))
                self._writer.execute(f"PRAGMA application_id = {APPLICATION}")
                self._writer.execute(f"PRAGMA user_version = {VERSION}")
            return
        if application != APPLICATION:
            raise ConfigError(f"{self.path} is no journal of vlmpack: choose another state folder (--state)")
        if not 1 <= version <= VERSION:
            raise ConfigError(
                f"{self.path} has tables of version {version}, this vlmpack knows version {VERSION}: "
                "use the vlmpack that wrote it, or another state folder (--state)"
            )
        for old in range(version, VERSION):
            with self.transaction():
                self._run(*MIGRATIONS[old])
                self._writer.execute(f"PRAGMA user_version = {old + 1}")
        (result,) = self._writer.execute("PRAGMA quick_check(1)").fetchone()
        if result != "ok":
            raise sqlite3.DatabaseError(result)
        (name,) = self._writer.execute("SELECT value FROM facts WHERE name = 'base_model'").fetchone()
        if name != base_model:
            raise ConfigError(
                f"{self.path} belongs to the base model {name!r}, not to {base_model!r}: "
                "serve that model, or choose another state folder (--state)"
            )

    def _run(self, *scripts: str) -> None:
        """Carry out statements that each end with a line."""
        for script in scripts:
            for statement in script.split(";\n"):
                self._writer.execute(statement)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit what is written in the block together, or nothing of it; blocks may be nested.

        Raises:
            JournalError: it cannot be written.
        """
        with self._lock:
            self._depth += 1
            try:
                if self._depth == 1:
                    self._writer.execute("BEGIN IMMEDIATE")
                yield
                if self._depth == 1:
                    self._commit()
            except sqlite3.Error as error:
                raise JournalError(f"{self.path} cannot be written ({error}): make room on its disk") from error
            finally:
                self._depth -= 1
                if self._depth == 0 and self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")

    def _commit(self) -> None:
        self._writer.execute("COMMIT")

    def _write(self, statement: str, *values: Any) -> None:
        with self.transaction():
            self._writer.execute(statement, values)

    def _read(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._reading:
            return self._reader.execute(statement, values).fetchall()

    def close(self) -> None:
        """Close the file."""
        with self._lock, self._reading:
            self._reader.close()
            self._writer.close()

    # ------------------------------------------------------------------ sessions

    def add_session(self, row: SessionRow) -> None:
        """Begin a session."""
        self._write(
            "INSERT INTO sessions VALUES (?, ?, NULL, ?, ?, ?, ?)",
            row.id, row.created, json.dumps(list(row.tags)), json.dumps(dict(row.user_metadata)), row.sdk_version,
            row.display_name,
        )  # fmt: skip

    def end_session(self, session: str, *, now: float) -> None:
        """End a session: its requests, replies, sampling sessions and states of models go; checkpoints stay."""
        with self.transaction():
            self._write("UPDATE sessions SET ended = ? WHERE id = ?", now, session)
            self._write("UPDATE models SET snapshot = NULL WHERE session = ?", session)
            self._write("DELETE FROM sampling_sessions WHERE session = ?", session)
            self._write("DELETE FROM requests WHERE session = ?", session)
            self._writer.execute("PRAGMA incremental_vacuum").fetchall()

    def forget_ended(self) -> None:
        """Drop what came in while its session ended."""
        with self.transaction():
            for table in ("requests", "sampling_sessions"):
                self._write(f"DELETE FROM {table} WHERE session NOT IN (SELECT id FROM sessions WHERE ended IS NULL)")

    def sessions(self) -> list[SessionRow]:
        """All sessions, oldest first."""
        rows = self._read(
            "SELECT id, created, ended, tags, user_metadata, sdk_version, display_name FROM sessions ORDER BY created"
        )
        return [
            SessionRow(
                id=row[0], created=row[1], ended=row[2], tags=json.loads(row[3]),
                user_metadata=json.loads(row[4]), sdk_version=row[5], display_name=row[6],
            )
            for row in rows
        ]  # fmt: skip

    def add_sampling_session(self, row: SamplingRow) -> None:
        """Begin a sampling session."""
        self._write(
            "INSERT OR REPLACE INTO sampling_sessions VALUES (?, ?, ?, ?, ?, ?)",
            row.id, row.session, row.created, row.model, row.path, row.folder,
        )  # fmt: skip

    def drop_sampling_session(self, sampling_session: str) -> None:
        """Forget a sampling session and its samples."""
        with self.transaction():
            self._write("DELETE FROM sampling_sessions WHERE id = ?", sampling_session)
            self._write("DELETE FROM requests WHERE owner = ?", sampling_session)

    def sampling_sessions(self) -> list[SamplingRow]:
        """All sampling sessions."""
        rows = self._read("SELECT id, session, created, model, path, folder FROM sampling_sessions ORDER BY created")
        return [
            SamplingRow(id=row[0], session=row[1], created=row[2], model=row[3], path=row[4], folder=row[5])
            for row in rows
        ]

    # ------------------------------------------------------------------ models and checkpoints

    def add_model(self, row: ModelRow) -> None:
        """Enter a model that was created."""
        self._write(
            "INSERT OR REPLACE INTO models VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            row.id, row.session, row.created, row.last_request, row.base_model, _lora_text(row.lora),
            json.dumps(dict(row.user_metadata)), row.snapshot, row.covered,
        )  # fmt: skip

    def models(self) -> list[ModelRow]:
        """All models, newest first."""
        rows = self._read(
            "SELECT id, session, created, last_request, base_model, lora, user_metadata, snapshot, covered "
            "FROM models ORDER BY created DESC, id"
        )
        return [
            ModelRow(
                id=row[0], session=row[1], created=row[2], last_request=row[3], base_model=row[4],
                lora=_lora(row[5]), user_metadata=json.loads(row[6]), snapshot=row[7], covered=row[8],
            )
            for row in rows
        ]  # fmt: skip

    def cover(self, model: str, *, snapshot: str, covered: int) -> None:
        """Make a folder the state of a model up to an operation; bodies up to it are not needed any more."""
        with self.transaction():
            self._write("UPDATE models SET snapshot = ?, covered = ? WHERE id = ?", snapshot, covered, model)
            self._write("DELETE FROM bodies WHERE owner = ? AND seq <= ?", model, covered)

    def put_checkpoint(self, row: CheckpointRow) -> None:
        """Enter a checkpoint, in the place of one of this name."""
        self._write(
            "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            row.model, row.kind, row.name, row.folder, row.created, row.size, row.base_model, _lora_text(row.lora),
            json.dumps(dict(row.user_metadata)),
        )  # fmt: skip

    def drop_checkpoint(self, row: CheckpointRow) -> None:
        """Forget a checkpoint; one that has taken its place stays."""
        self._write(
            "DELETE FROM checkpoints WHERE model = ? AND kind = ? AND name = ? AND folder = ?",
            row.model, row.kind, row.name, row.folder,
        )  # fmt: skip

    def checkpoints(self) -> list[CheckpointRow]:
        """All checkpoints, newest first."""
        rows = self._read(
            "SELECT model, kind, name, folder, created, size, base_model, lora, user_metadata FROM checkpoints "
            "ORDER BY created DESC, model, kind, name"
        )
        return [
            CheckpointRow(
                model=row[0], kind=row[1], name=row[2], folder=row[3], created=row[4], size=row[5], base_model=row[6],
                lora=_lora(row[7]), user_metadata=json.loads(row[8]),
            )
            for row in rows
        ]  # fmt: skip

    def folders(self) -> set[str]:
        """Names of the folders that something refers to."""
        rows = self._read(
            "WITH open AS (SELECT id FROM sessions WHERE ended IS NULL) SELECT folder FROM checkpoints "
            "UNION SELECT snapshot FROM models WHERE snapshot IS NOT NULL AND session IN open "
            "UNION SELECT folder FROM sampling_sessions WHERE folder IS NOT NULL AND session IN open"
        )
        return {row[0] for row in rows}

    # ------------------------------------------------------------------ requests

    def add_request(self, row: RequestRow, *, body: bytes | None, now: float) -> None:
        """Accept a request; on the disk when this returns."""
        with self.transaction():
            self._write(
                "INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL, NULL, NULL)",
                row.owner, row.seq, row.session, row.kind, row.digest, row.seed, row.state, row.group,
            )  # fmt: skip
            if body is not None:
                self._write("INSERT INTO bodies VALUES (?, ?, ?)", row.owner, row.seq, body)
            self._write("UPDATE models SET last_request = ? WHERE id = ?", now, row.owner)

    def finish_request(
        self, owner: str, seq: int, *, state: State, reply: StoredReply, group: int | None = None, keep_body: bool
    ) -> None:
        """Enter what came of a request.

        Args:
            owner: of the request.
            seq: of the request.
            state: "done" or "failed".
            reply: what its client gets.
            group: first number of the requests that ran together.
            keep_body: whether a replay may need the body.
        """
        with self.transaction():
            self._write(
                "UPDATE requests SET state = ?, grp = ?, reply_type = ?, reply = ? WHERE owner = ? AND seq = ?",
                state, group, reply.content_type, reply.body, owner, seq,
            )  # fmt: skip
            if not keep_body:
                self._write("DELETE FROM bodies WHERE owner = ? AND seq = ?", owner, seq)

    def requests(self, owner: str | None = None, *, after: int = -1) -> list[RequestRow]:
        """Requests of an owner beyond a number, or of everybody, in their order."""
        if owner is None:
            rows = self._read(f"{REQUEST_ROWS} ORDER BY owner, seq")
        else:
            rows = self._read(f"{REQUEST_ROWS} WHERE owner = ? AND seq > ? ORDER BY seq", owner, after)
        return [
            RequestRow(
                owner=row[0], seq=row[1], session=row[2], kind=row[3], digest=row[4], seed=row[5], state=row[6],
                group=row[7], retrieved=row[8], size=row[9] or 0,
            )
            for row in rows
        ]  # fmt: skip

    def body(self, owner: str, seq: int) -> bytes:
        """Body of a request that is waiting or may be replayed."""
        rows = self._read("SELECT body FROM bodies WHERE owner = ? AND seq = ?", owner, seq)
        assert rows, f"the body of {owner}:{seq} is gone"
        return rows[0][0]

    def reply(self, owner: str, seq: int) -> StoredReply | None:
        """Reply of a request; None: there is none (any more)."""
        rows = self._read("SELECT reply_type, reply FROM requests WHERE owner = ? AND seq = ?", owner, seq)
        if not rows or rows[0][1] is None:
            return None
        return StoredReply(content_type=rows[0][0], body=rows[0][1])

    def note_retrieved(self, keys: Sequence[tuple[str, int]], *, now: float) -> None:
        """Note that replies were fetched."""
        with self.transaction():
            for owner, seq in keys:
                self._write(
                    "UPDATE requests SET retrieved = ? WHERE owner = ? AND seq = ? AND retrieved IS NULL",
                    now,
                    owner,
                    seq,
                )

    def drop_requests(self, keys: Sequence[tuple[str, int]]) -> None:
        """Delete requests whose numbers may be used again: samples, which change nothing."""
        with self.transaction():
            for owner, seq in keys:
                self._write("DELETE FROM requests WHERE owner = ? AND seq = ?", owner, seq)

    def drop_replies(self, keys: Sequence[tuple[str, int]]) -> None:
        """Delete replies that were fetched long ago; the numbers stay used."""
        with self.transaction():
            for owner, seq in keys:
                self._write("UPDATE requests SET reply = NULL WHERE owner = ? AND seq = ?", owner, seq)


def _lora_text(lora: LoraConfig | None) -> str | None:
    return None if lora is None else json.dumps(asdict(lora))


def _lora(text: str | None) -> LoraConfig | None:
    return None if text is None else LoraConfig(**json.loads(text))
