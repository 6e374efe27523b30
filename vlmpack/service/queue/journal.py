"""The journal of the service: accepted requests, their outcomes, and where model states are stored. SQLite, WAL.

    sessions ── models ── requests ── bodies            (owner, seq): operations of a model; 0 is its creation
        └────── sampling_sessions ── requests ── bodies (owner, seq): samples
    checkpoints   by model, kind and name; they outlive their session

    a request   queued ──▶ done | failed      its body stays until a snapshot covers it
    a model     snapshot (a folder) up to operation `covered`; the done operations after it are replayed

Every change is one transaction, which is on disk before the call returns. Calls from several threads take turns;
reading does not wait for writing. Bodies have a separate table, because SQLite rewrites a changed row completely, and
bodies may hold megabytes of images.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, final, get_args

from vlmpack.errors import ConfigError, RequestError
from vlmpack.service.wire.messages import LoraConfig, NewSession, Rejected, Reply

log = logging.getLogger("vlmpack.service")

APPLICATION = 0x766C6D70
"""SQLite application id that marks the file as a vlmpack journal."""
VERSION = 5
"""Version of the tables below."""
READABLE = (4, VERSION)
"""Versions that can be read. Version 4 has one more column, which is ignored."""

REQUESTS = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE requests (
    owner TEXT NOT NULL, seq INTEGER NOT NULL, session TEXT NOT NULL, kind TEXT NOT NULL, digest BLOB NOT NULL,
    seed INTEGER, state TEXT NOT NULL, grp INTEGER, reply_type TEXT, reply BLOB, PRIMARY KEY (owner, seq));
CREATE INDEX requests_session ON requests (session);
CREATE TABLE bodies (owner TEXT NOT NULL, seq INTEGER NOT NULL, body BLOB NOT NULL, PRIMARY KEY (owner, seq));
CREATE TRIGGER requests_deleted AFTER DELETE ON requests
BEGIN DELETE FROM bodies WHERE owner = OLD.owner AND seq = OLD.seq; END;
"""
"""The tables that are not made of a dataclass below."""
FAULT_SECONDS = 5.0
"""Minimum seconds to report a failed write: on a disk that is full for large writes, small ones may succeed."""
ANOTHER = "choose another state folder (--state)"
SCHEME = "tinker://"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

T = TypeVar("T")

State = Literal["queued", "done", "failed"]
Kind = Literal["weights", "sampler_weights", "external_weights"]


@final
@dataclass(frozen=True, kw_only=True)
class SessionRow(NewSession):
    """A session of a client."""

    id: str
    """Id of the session."""
    created: float
    """Unix seconds."""
    ended: float | None = None
    """Unix seconds; None: the session is open."""


@final
@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """A created model, and where its state is stored."""

    id: str
    """`{session}:train:{n}`."""
    session: str
    """Id of the session that created it."""
    created: float
    """Unix seconds."""
    last_request: float
    """Unix seconds."""
    base_model: str
    """Name of the base model."""
    lora: LoraConfig | None
    """Settings of the adapter, with the seed that was drawn; None: all weights are trained."""
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    """The client's own metadata."""
    snapshot: str | None = None
    """Folder name of the last snapshot; None: there is none yet, or the session ended."""
    covered: int = 0
    """Last operation that the snapshot covers; 0: the creation."""


@final
@dataclass(frozen=True, kw_only=True)
class SamplingRow:
    """A sampling session."""

    id: str
    """`{session}:sample:{n}`."""
    session: str
    """Id of the session."""
    created: float
    """Unix seconds."""
    model: str | None = None
    """Id of the model whose unnamed save it is; None: it samples from a path or the base model."""
    path: str | None = None
    """`tinker://` path of the snapshot, if it has a name."""
    folder: str | None = None
    """Folder name of the snapshot; None: the base model."""


@final
@dataclass(frozen=True, kw_only=True)
class CheckpointRow:
    """A named training checkpoint, snapshot to sample from, or set of files to download."""

    model: str
    """Id of the model."""
    kind: Kind
    """Kind of checkpoint."""
    name: str
    """The client's name for the checkpoint."""
    folder: str
    """Name of the folder."""
    created: float
    """Unix seconds."""
    size: int
    """Total bytes of the files."""
    base_model: str
    """Name of the base model."""
    lora: LoraConfig | None
    """Adapter settings of the model; None: all weights are trained."""
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    """The client's own metadata."""
    expires: float | None = None
    """Unix seconds; None: the checkpoint does not expire."""

    @property
    def path(self) -> str:
        """The path `tinker://MODEL/KIND/NAME`."""
        return f"{SCHEME}{self.model}/{self.kind}/{self.name}"


def parse_path(path: str) -> tuple[str, str, str]:
    """Return model, kind and name from a checkpoint path.

    Raises:
        RequestError: it is not a checkpoint path.
    """
    model, *rest = path.removeprefix(SCHEME).split("/") if path.startswith(SCHEME) else [""]
    if not model or len(rest) != 2 or rest[0] not in get_args(Kind) or not NAME.fullmatch(rest[1]):
        known = "tinker://MODEL/weights/NAME or tinker://MODEL/sampler_weights/NAME"
        raise RequestError(f"{path!r:.200} is no path of a checkpoint: use one that a save returned, {known}")
    return model, rest[0], rest[1]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRow:
    """A request without its body and reply."""

    owner: str
    """Id of the model or sampling session."""
    seq: int
    """Number within the owner; for a model, 0 is its creation."""
    session: str
    """Id of the session."""
    kind: str
    """Class name of the request; "Refused": it could not be read; "Missing": it never arrived."""
    digest: bytes
    """Digest of the parsed content."""
    seed: int | None = None
    """The seed drawn for it, in case that it needs one and has none."""
    state: State = "queued"
    """"queued", or the outcome: "done" or "failed"."""
    group: int | None = None
    """First number of the requests that ran together with it."""
    size: int = 0
    """Size in bytes of the body in the journal; 0: there is none."""

    @property
    def is_replayed(self) -> bool:
        """Return whether a restart has to replay it. Other finished requests have no body any more."""
        return self.state != "queued" and self.size > 0


# ---------------------------------------------------------------------- the file


TABLES: dict[type, tuple[str, str]] = {
    SessionRow: ("sessions", "id"),
    SamplingRow: ("sampling_sessions", "id"),
    ModelRow: ("models", "id"),
    CheckpointRow: ("checkpoints", "model, kind, name"),
    RequestRow: ("requests", "owner, seq"),
}
"""Table and primary key of each kind of row."""
_SIZE = "SELECT length(body) FROM bodies WHERE bodies.owner = requests.owner AND bodies.seq = requests.seq"
COLUMNS: dict[tuple[type, str], str] = {
    (RequestRow, "group"): "grp",
    (RequestRow, "size"): f"coalesce(({_SIZE}), 0)",
}
"""Columns whose names differ from the fields'."""


def _schema() -> Iterator[str]:
    """Yield the statements that make the tables: one per dataclass above, with a column per field, and `REQUESTS`."""
    for kind, (table, key) in TABLES.items():
        if kind is not RequestRow:
            columns = ", ".join(column.name for column in fields(kind))
            yield f"CREATE TABLE {table} ({columns}, PRIMARY KEY ({key}))"
    yield from REQUESTS.split(";\n")


@final
class JournalError(Rejected):
    """The journal cannot be written now, e.g. because the disk is full. Nothing of the transaction was written."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=429)


@final
class Journal:
    """The journal; see the module's docstring.

    Args:
        path: the SQLite file; created if missing.
        base_model: name of the base model that the whole journal belongs to.
        states: number of saved states in the folder. A new journal knows none, so they would be removed.

    Raises:
        ConfigError: the file is damaged, not a vlmpack journal, of another version, of another base model, or empty
            while there are saved states.
    """

    def __init__(self, path: Path, *, base_model: str, states: int = 0) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._reading = threading.Lock()
        self._depth = 0
        self._failed: tuple[float, str] | None = None
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite gives its other files the same mode
            self._writer = self._connect()
            try:
                self._check(base_model, states)
            except BaseException:
                self._writer.close()
                raise
            self._reader = self._connect()
        except JournalError as error:
            raise ConfigError(f"{error}, or {ANOTHER}") from error
        except (OSError, sqlite3.OperationalError) as error:
            raise ConfigError(f"{_unwritable(path, error)}, or {ANOTHER}") from error
        except sqlite3.DatabaseError as error:
            remedy = f"restore the state folder from a backup, or {ANOTHER}; folders in `weights` are whole"
            raise ConfigError(f"{path} is damaged ({error}): {remedy}") from error

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=60)
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA journal_size_limit = 67108864")
        return connection

    def _check(self, base_model: str, states: int) -> None:
        (application,) = self._writer.execute("PRAGMA application_id").fetchone()
        (version,) = self._writer.execute("PRAGMA user_version").fetchone()
        (tables,) = self._writer.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables == 0 and application == 0:
            if states:
                seen = f"{self.path} is empty or new, and does not say whose the {states} saved states beside it are"
                raise ConfigError(f"{seen}: restore it from a backup, with journal.sqlite3-wal, or {ANOTHER}")
            with self.transaction():
                for statement in _schema():
                    self._writer.execute(statement)
                self._writer.execute("INSERT INTO facts VALUES ('base_model', ?)", (base_model,))
                self._writer.execute(f"PRAGMA application_id = {APPLICATION}")
                self._writer.execute(f"PRAGMA user_version = {VERSION}")
            return
        if application != APPLICATION:
            raise ConfigError(f"{self.path} is no journal of vlmpack: {ANOTHER}")
        if version not in READABLE:
            seen = f"{self.path} has tables of version {version}, not {VERSION}"
            raise ConfigError(f"{seen}: use the vlmpack that wrote it, or {ANOTHER}")
        (result,) = self._writer.execute("PRAGMA quick_check(1)").fetchone()
        if result != "ok":
            raise sqlite3.DatabaseError(result)
        (name,) = self._writer.execute("SELECT value FROM facts WHERE name = 'base_model'").fetchone()
        if name != base_model and not self._writer.execute("SELECT 1 FROM sessions LIMIT 1").fetchone():
            self._write("UPDATE facts SET value = ? WHERE name = 'base_model'", base_model)  # nothing is its own yet
        elif name != base_model:
            seen = f"{self.path} belongs to the base model {name!r}, not to {base_model!r}"
            raise ConfigError(f"{seen}: serve that model, or {ANOTHER}")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all writes in the block together, or none of them. Blocks may be nested.

        Raises:
            JournalError: the journal cannot be written.
        """
        with self._lock:
            self._depth += 1
            try:
                if self._depth == 1:
                    self._writer.execute("BEGIN IMMEDIATE")
                yield
                if self._depth == 1:
                    self._commit()
                    if self._failed is not None and time.monotonic() >= self._failed[0] + FAULT_SECONDS:
                        log.warning("%s can be written again", self.path)
                        self._failed = None
            except sqlite3.Error as error:
                message = _unwritable(self.path, error)
                if self._failed is None:
                    log.error("%s", message)
                self._failed = time.monotonic(), message
                raise JournalError(message) from error
            finally:
                self._depth -= 1
                if self._depth == 0 and self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")

    def _commit(self) -> None:
        self._writer.execute("COMMIT")

    @property
    def fault(self) -> str | None:
        """Why the journal cannot be written, or could not a moment ago; None: it can."""
        return None if self._failed is None else self._failed[1]

    def try_again(self) -> None:
        """Write something if the last write failed.

        Raises:
            JournalError: the journal still cannot be written.
        """
        if self._failed is not None:
            self._write("UPDATE facts SET value = value")

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

    # ------------------------------------------------------------------ sessions, models, checkpoints

    def put(self, row: SessionRow | ModelRow | SamplingRow | CheckpointRow) -> None:
        """Insert a row, or replace the row with the same key.

        Fields are columns; lists and mappings are stored as JSON.
        """
        values = asdict(row)
        columns, marks = ", ".join(values), ", ".join("?" * len(values))
        statement = f"INSERT OR REPLACE INTO {TABLES[type(row)][0]} ({columns}) VALUES ({marks})"
        self._write(
            statement, *(json.dumps(x) if isinstance(x, Mapping | list | tuple) else x for x in values.values())
        )

    def rows(self, kind: type[T], /, **equal: Any) -> list[T]:
        """Return the rows whose columns have the given values, in the order in which they were put there."""
        names = [column.name for column in fields(kind)]  # type: ignore[arg-type]
        table, columns = TABLES[kind][0], [COLUMNS.get((kind, name), name) for name in names]
        where = " AND ".join(("1", *(f"{name} IS ?" for name in equal)))
        statement = f"SELECT {', '.join(columns)} FROM {table} WHERE {where} ORDER BY rowid"
        return [
            kind(**{name: _from_sql(name, value) for name, value in zip(names, row, strict=True)})
            for row in self._read(statement, *equal.values())
        ]

    def row(self, kind: type[T], /, **equal: Any) -> T | None:
        """Return the first of `rows`; None: there is none."""
        return next(iter(self.rows(kind, **equal)), None)

    def model(self, model_id: str) -> ModelRow:
        """Return a model.

        Raises:
            Rejected: status 404: there is no such model (yet).
        """
        if (row := self.row(ModelRow, id=model_id)) is None:
            raise Rejected(f"there is no model {model_id}: wait for its creation, or create it", status=404)
        return row

    def sampler(self, sampling_session_id: str) -> SamplingRow:
        """Return a sampling session.

        Raises:
            Rejected: status 404: there is no such sampling session.
        """
        if (row := self.row(SamplingRow, id=sampling_session_id)) is None:
            raise Rejected(f"there is no sampling session {sampling_session_id}: it never was, or ended", status=404)
        return row

    def checkpoint(self, path: str) -> CheckpointRow:
        """Return a checkpoint.

        Raises:
            RequestError: `path` is not a checkpoint path. Rejected: status 404: there is no such checkpoint.
        """
        model, kind, name = parse_path(path)
        if (row := self.row(CheckpointRow, model=model, kind=kind, name=name)) is None:
            message = f"there is no checkpoint {path}: it was never saved here, was deleted, or has expired"
            raise Rejected(message, status=404)
        return row

    def end_session(self, session: str, *, now: float) -> None:
        """End a session. Its requests, replies, sampling sessions and model states are deleted; checkpoints stay."""
        with self.transaction():
            self._write("UPDATE sessions SET ended = ? WHERE id = ?", now, session)
            self._write("UPDATE models SET snapshot = NULL WHERE session = ?", session)
            self._write("DELETE FROM sampling_sessions WHERE session = ?", session)
            self._write("DELETE FROM requests WHERE session = ?", session)
            self._writer.execute("PRAGMA incremental_vacuum").fetchall()

    def forget_ended(self) -> None:
        """Delete requests and sampling sessions that arrived while their session ended."""
        with self.transaction():
            for table in ("requests", "sampling_sessions"):
                self._write(f"DELETE FROM {table} WHERE session NOT IN (SELECT id FROM sessions WHERE ended IS NULL)")

    def drop_idle_samplers(self, *, kept: int, **equal: Any) -> None:
        """Delete all but the newest sampling sessions of some, with their samples, unless a sample waits."""
        with self.transaction():
            samplers = [row.id for row in self.rows(SamplingRow, **equal)]
            for sampler in samplers[: max(len(samplers) - kept, 0)]:
                if not self._read("SELECT 1 FROM requests WHERE owner = ? AND state = 'queued' LIMIT 1", sampler):
                    self._write("DELETE FROM sampling_sessions WHERE id = ?", sampler)
                    self._write("DELETE FROM requests WHERE owner = ?", sampler)

    def cover(self, model: str, *, snapshot: str, covered: int) -> None:
        """Set a folder as the state of a model up to an operation. Bodies up to this operation are deleted."""
        with self.transaction():
            self._write("UPDATE models SET snapshot = ?, covered = ? WHERE id = ?", snapshot, covered, model)
            self._write("DELETE FROM bodies WHERE owner = ? AND seq <= ?", model, covered)

    def set_expiry(self, row: CheckpointRow, expires: float | None) -> None:
        """Change when a checkpoint expires. A newer checkpoint of the same name keeps its own time."""
        self._write("UPDATE checkpoints SET expires = ? WHERE folder = ?", expires, row.folder)

    def drop_expired(self, *, now: float) -> None:
        """Delete expired checkpoints from the journal."""
        if self._read("SELECT 1 FROM checkpoints WHERE expires <= ? LIMIT 1", now):
            self._write("DELETE FROM checkpoints WHERE expires <= ?", now)

    def counts(self) -> dict[str, int]:
        """Return the numbers of models of open sessions, of sampling sessions and of checkpoints."""
        models = "models WHERE session IN (SELECT id FROM sessions WHERE ended IS NULL)"
        tables = {"models": models, "samplers": "sampling_sessions", "checkpoints": "checkpoints"}
        return {name: self._read(f"SELECT count(*) FROM {table}")[0][0] for name, table in tables.items()}

    def drop_checkpoint(self, row: CheckpointRow) -> None:
        """Delete a checkpoint from the journal. A newer checkpoint of the same name stays."""
        self._write("DELETE FROM checkpoints WHERE folder = ?", row.folder)

    def folders(self) -> set[str]:
        """Return the names of the folders that the journal refers to."""
        rows = self._read(
            "WITH open AS (SELECT id FROM sessions WHERE ended IS NULL) SELECT folder FROM checkpoints "
            "UNION SELECT snapshot FROM models WHERE snapshot IS NOT NULL AND session IN open "
            "UNION SELECT folder FROM sampling_sessions WHERE folder IS NOT NULL AND session IN open"
        )
        return {row[0] for row in rows}

    # ------------------------------------------------------------------ requests

    def add_request(self, row: RequestRow, *, body: bytes | None, now: float) -> None:
        """Accept a request. It is on disk when this returns."""
        with self.transaction():
            self._write(
                "INSERT INTO requests (owner, seq, session, kind, digest, seed, state) VALUES (?, ?, ?, ?, ?, ?, ?)",
                row.owner, row.seq, row.session, row.kind, row.digest, row.seed, row.state,
            )  # fmt: skip
            if body is not None:
                self._write("INSERT INTO bodies VALUES (?, ?, ?)", row.owner, row.seq, body)
            self._write("UPDATE models SET last_request = ? WHERE id = ?", now, row.owner)

    def finish_request(
        self, owner: str, seq: int, *, state: State, reply: Reply, group: int | None = None, keep_body: bool
    ) -> None:
        """Record the outcome of a request.

        Args:
            owner: owner of the request.
            seq: number of the request.
            state: "done" or "failed".
            reply: reply for the client.
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

    def body(self, owner: str, seq: int) -> bytes:
        """Return the body of a request that is waiting or may be replayed."""
        rows = self._read("SELECT body FROM bodies WHERE owner = ? AND seq = ?", owner, seq)
        assert rows, f"the body of {owner}:{seq} is gone"
        return rows[0][0]

    def reply(self, owner: str, seq: int) -> Reply | None:
        """Return the reply of a request; None: there is none (any more)."""
        statement = "SELECT reply_type, reply FROM requests WHERE owner = ? AND seq = ? AND reply IS NOT NULL"
        return next((Reply(content_type=kind, body=body) for kind, body in self._read(statement, owner, seq)), None)

    def drop_replies(self, keys: Sequence[tuple[str, int]]) -> None:
        """Delete replies that were fetched.

        The numbers stay used, except for samples: they change nothing, so they are deleted completely.
        """
        with self.transaction():
            for key in keys:
                of_sample = "owner IN (SELECT id FROM sampling_sessions)"
                self._write(f"DELETE FROM requests WHERE owner = ? AND seq = ? AND {of_sample}", *key)
                self._write("UPDATE requests SET reply = NULL WHERE owner = ? AND seq = ?", *key)


def _unwritable(path: Path, error: Exception) -> str:
    remedy = "end the process that holds it" if "locked" in str(error) else "make room on its disk"
    return f"{path} cannot be written ({error}): {remedy}"


def _from_sql(name: str, value: Any) -> Any:
    if value is None or name not in ("tags", "user_metadata", "lora"):
        return value
    parsed = json.loads(value)
    return LoraConfig(**parsed) if name == "lora" else tuple(parsed) if name == "tags" else parsed
