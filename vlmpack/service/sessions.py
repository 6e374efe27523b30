"""Sessions of clients, sampling sessions, and lists of models and checkpoints: the queue without its futures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import final

from vlmpack.errors import RequestError
from vlmpack.service.checkpoints import CheckpointPath, Kind, StateFolder, parse_path
from vlmpack.service.journal import JournalError
from vlmpack.service.ledger import Ledger, Session
from vlmpack.service.messages import LoraConfig
from vlmpack.service.protocols import BaseModel
from vlmpack.service.records import CheckpointRow, ModelRow, SamplingRow, SessionRow


@final
class Rejected(RequestError):  # noqa: N818 (an answer, not an accident)
    """A POST or GET is answered with a status instead of a result.

    Args:
        message: what was seen and the remedy.
        status: 400, 404, 410 or 429.
        retry_after: seconds after which to try again.
    """

    def __init__(self, message: str, *, status: int, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


@final
@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """A model of a client."""

    model_id: str
    """`{session}:train:{n}`."""
    session_id: str
    """Of the client that made it."""
    base_model: str
    """Name of the base model."""
    arch: str
    """Its model type, such as "qwen3_vl"."""
    tokenizer_id: str
    """Where its tokenizer lies."""
    lora: LoraConfig | None
    """Its adapter; None: all weights are trained."""
    last_request_time: float
    """Unix seconds."""
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    """The client's own notes."""
    last_checkpoint: CheckpointInfo | None = None
    """Its newest training checkpoint."""
    last_sampler_checkpoint: CheckpointInfo | None = None
    """Its newest snapshot to sample from that has a name."""
    is_corrupted: bool = False
    """True if it is of no use, as its state could not be restored."""


@final
@dataclass(frozen=True, kw_only=True)
class SamplerInfo:
    """A sampling session."""

    sampler_id: str
    """`{session}:sample:{n}`."""
    base_model: str
    """Name of the base model."""
    model_path: str | None
    """`tinker://` of its snapshot, if that has a name."""


@final
@dataclass(frozen=True, kw_only=True)
class SessionInfo:
    """A session of a client."""

    session_id: str
    """Its id."""
    model_ids: tuple[str, ...]
    """Its models, in the order of their numbers; those whose creation failed are not among them."""
    sampler_ids: tuple[str, ...]
    """Its sampling sessions."""
    created: float
    """Unix seconds."""
    user_metadata: Mapping[str, str]
    """The client's own notes."""
    display_name: str | None = None
    """The client's name for it."""


@final
@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint."""

    path: str
    """`tinker://...`"""
    model_id: str
    """Of the model it is from."""
    kind: Kind
    """A training checkpoint, or a snapshot to sample from."""
    name: str
    """The client's name for it."""
    time: float
    """Unix seconds."""
    size_bytes: int
    """Of its files."""
    base_model: str
    """Name of the base model."""
    lora: LoraConfig | None
    """Adapter of its model; None: all weights."""
    user_metadata: Mapping[str, str]
    """The client's own notes."""


class Sessions:
    """The part of `RequestQueue` without futures; thread-safe.

    Args:
        ledger: all that was accepted.
        state: where the states of models lie.
        base: the base model.
    """

    def __init__(self, ledger: Ledger, state: StateFolder, base: BaseModel) -> None:
        self._ledger = ledger
        self._state = state
        self._base = base
        self._changing = threading.Lock()
        """Held while a sampling session is begun or a checkpoint deleted, one at a time, over the journal's commit."""

    # ------------------------------------------------------------------ sessions

    def create_session(
        self,
        *,
        tags: Sequence[str] = (),
        user_metadata: Mapping[str, str] | None = None,
        sdk_version: str = "",
        display_name: str | None = None,
    ) -> str:
        """Begin a session; return its id.

        Raises:
            Rejected: 429: there are too many, or the disk is full.
        """
        row = SessionRow(
            id=f"s{token_hex(6)}", created=time.time(), tags=tuple(tags), user_metadata=dict(user_metadata or {}),
            sdk_version=ascii(sdk_version)[1:-1], display_name=display_name,
        )  # fmt: skip
        with self._ledger.lock:
            if len(self._ledger.sessions) >= self._ledger.settings.sessions:
                raise self._busy(f"{len(self._ledger.sessions)} sessions are open: finish one, or try again later")
        self._written(lambda: self._ledger.journal.add_session(row))
        with self._ledger.lock:
            self._ledger.sessions[row.id] = Session(row=row, last_seen=time.monotonic())
        return row.id

    def heartbeat(self, session_id: str) -> None:
        """Keep a session.

        Raises:
            Rejected: 404: there is none; 410: it has ended.
        """
        with self._ledger.lock:
            self._check_session(session_id)
            self._touch(session_id)

    def finish(self, session_id: str) -> None:
        """End a session: its models, replies and unnamed saves go, its checkpoints stay. A second time does nothing.

        Raises:
            Rejected: 404: there is none; 429: the disk is full.
        """
        with self._ledger.lock:
            if session_id in self._ledger.ended:
                return
            self._check_session(session_id)
        self._written(lambda: self._ledger.journal.end_session(session_id, now=time.time()))
        with self._ledger.lock:
            if (session := self._ledger.sessions.get(session_id)) is not None:
                self._ledger.end(session)

    def sessions(self) -> list[str]:
        """Return the ids of the open sessions, newest first."""
        with self._ledger.lock:
            return [*reversed(self._ledger.sessions)]

    def session(self, session_id: str) -> SessionInfo:
        """Look up an open session.

        Raises:
            Rejected: 404: there is none; 410: it has ended.
        """
        with self._ledger.lock:
            session = self._check_session(session_id)
            return SessionInfo(
                session_id=session_id,
                model_ids=tuple(lane.id for lane in session.lanes if lane.id in self._ledger.models),
                sampler_ids=tuple(sampler.row.id for sampler in session.samplers), created=session.row.created,
                user_metadata=session.row.user_metadata, display_name=session.row.display_name,
            )  # fmt: skip

    def _check_session(self, session_id: str) -> Session:
        if session_id in self._ledger.ended:
            raise Rejected(f"the session {session_id} has ended: begin another", status=410)
        if session_id not in self._ledger.sessions:
            raise Rejected(f"there is no session {session_id}: begin one", status=404)
        return self._ledger.sessions[session_id]

    def _touch(self, session_id: str) -> None:
        if (session := self._ledger.sessions.get(session_id)) is not None:
            session.last_seen = time.monotonic()

    # ------------------------------------------------------------------ sampling sessions

    def create_sampling_session(
        self, session_id: str, sampling_session_seq_id: int, *, path: str | None, base_model: str | None
    ) -> str:
        """Begin a sampling session from a checkpoint or the base model; return its id. A repetition returns it again.

        Raises:
            Rejected: 400: neither or a wrong one is given, or the number is used; 404: there is no such checkpoint or
                session; 410: the session has ended; 429: the disk is full.
        """
        name = f"{session_id}:sample:{sampling_session_seq_id}"
        with self._changing:
            with self._ledger.lock:
                self._touch(session_id)
                samplers = self._check_session(session_id).samplers
                known = self._ledger.samplers.get(name)
                if known is not None and (known.row.path != path or known.row.model is not None):
                    raise Rejected(f"the sampling session {name} was begun with another model", status=400)
                if known is not None:
                    return name
                if path is not None:
                    self._checkpoint(path)
                elif base_model != self._base.name:
                    message = f"this server has the base model {self._base.name!r}, not {base_model!r}"
                    raise Rejected(message, status=400)
                count = max(len(samplers) - self._ledger.settings.samplers_kept + 1, 0)
                dropped = [old.row.id for old in samplers[:count] if not old.is_busy]
                for old in dropped:
                    self._ledger.drop_sampler(old)
            while not self._add_sampling_session(name, session_id, path, dropped):
                pass
        return name

    def _add_sampling_session(self, name: str, session_id: str, path: str | None, dropped: Sequence[str]) -> bool:
        """Enter a sampling session in the place of others; return False if a save replaced its checkpoint meanwhile."""
        ledger = self._ledger
        with ledger.lock:
            folder = None if path is None else self._checkpoint(path).folder
        row = SamplingRow(id=name, session=session_id, created=time.time(), path=path, folder=folder)

        def write() -> None:
            with ledger.journal.transaction():
                for old in dropped:
                    ledger.journal.drop_sampling_session(old)
                ledger.journal.add_sampling_session(row)

        self._written(write)  # without the lock, which the event loop takes: a disk may be slow
        with ledger.lock:
            self._check_session(session_id)
            if path is not None and self._checkpoint(path).folder != folder:
                return False
            if name not in ledger.samplers:
                ledger.add_sampler(row)
        return True

    def sampler(self, sampling_session_id: str) -> SamplerInfo:
        """Look up a sampling session.

        Raises:
            Rejected: 404: there is none.
        """
        with self._ledger.lock:
            sampler = self._ledger.samplers.get(sampling_session_id)
            if sampler is None:
                raise Rejected(f"there is no sampling session {sampling_session_id}", status=404)
            return SamplerInfo(sampler_id=sampling_session_id, base_model=self._base.name, model_path=sampler.row.path)

    # ------------------------------------------------------------------ models and checkpoints

    def get_info(self, model_id: str) -> ModelInfo:
        """Look up a model.

        Raises:
            Rejected: 404: there is none (yet).
        """
        with self._ledger.lock:
            row = self._ledger.models.get(model_id)
            if row is None:
                raise Rejected(f"there is no model {model_id}: wait for its creation, or create it", status=404)
            return self._info(row, self._last_checkpoints())

    def models(self) -> list[ModelInfo]:
        """Return the models of open sessions and those that have checkpoints, newest first."""
        with self._ledger.lock:
            last = self._last_checkpoints()
            kept = {model for model, _ in last}
            rows = [
                row for row in self._ledger.models.values() if row.session in self._ledger.sessions or row.id in kept
            ]
            return [self._info(row, last) for row in reversed(rows)]

    def _last_checkpoints(self) -> dict[tuple[str, Kind], CheckpointInfo]:
        """The newest checkpoint of each model and kind."""
        rows = sorted(self._ledger.checkpoints.values(), key=lambda row: row.created)
        return {(row.model, row.kind): _checkpoint_info(row) for row in rows}

    def _info(self, row: ModelRow, last: Mapping[tuple[str, Kind], CheckpointInfo]) -> ModelInfo:
        lane = self._ledger.lanes.get(row.id)
        return ModelInfo(
            model_id=row.id, session_id=row.session, base_model=row.base_model, arch=self._base.arch,
            tokenizer_id=self._base.tokenizer_id, lora=row.lora,
            last_request_time=self._ledger.last_requests.get(row.id, row.last_request),
            user_metadata=row.user_metadata, last_checkpoint=last.get((row.id, "weights")),
            last_sampler_checkpoint=last.get((row.id, "sampler_weights")),
            is_corrupted=lane is not None and lane.failure is not None,
        )  # fmt: skip

    def checkpoints(self, model_id: str | None = None) -> list[CheckpointInfo]:
        """Return the checkpoints of a model, or all, newest first.

        Raises:
            Rejected: 404: there is no such model.
        """
        with self._ledger.lock:
            if model_id is not None and model_id not in self._ledger.models:
                raise Rejected(f"there is no model {model_id}", status=404)
            rows = [row for row in self._ledger.checkpoints.values() if model_id in (None, row.model)]
        return [_checkpoint_info(row) for row in sorted(rows, key=lambda row: (-row.created, row.name))]

    def checkpoint(self, path: str) -> CheckpointInfo:
        """Look up a checkpoint.

        Raises:
            Rejected: 400: it is no path; 404: there is none.
        """
        with self._ledger.lock:
            return _checkpoint_info(self._checkpoint(path))

    def delete_checkpoint(self, path: str) -> None:
        """Delete a checkpoint. Sampling sessions that were begun from it go on.

        Raises:
            Rejected: 400: it is no path; 404: there is none; 429: the disk fails.
        """
        with self._changing:
            with self._ledger.lock:
                row = self._checkpoint(path)
            self._written(lambda: self._ledger.journal.drop_checkpoint(row))
            with self._ledger.lock:
                key = (row.model, row.kind, row.name)
                if self._ledger.checkpoints.get(key) is row:  # no save has taken its place meanwhile
                    del self._ledger.checkpoints[key]
                self._ledger.is_swept = False

    def _checkpoint(self, path: str) -> CheckpointRow:
        try:
            parts = parse_path(path)
        except RequestError as error:
            raise Rejected(str(error), status=400) from error
        row = self._ledger.checkpoints.get((parts.model, parts.kind, parts.name))
        if row is None:
            raise Rejected(f"there is no checkpoint {path}: it was never saved here, or deleted", status=404)
        return row

    def _busy(self, message: str) -> Rejected:
        return Rejected(message, status=429, retry_after=self._ledger.settings.retry_after)

    def _written(self, write: Callable[[], None]) -> None:
        try:
            write()
        except JournalError as error:
            raise self._busy(str(error)) from error


def _checkpoint_info(row: CheckpointRow) -> CheckpointInfo:
    path = CheckpointPath(model=row.model, kind=row.kind, name=row.name)
    return CheckpointInfo(
        path=str(path), model_id=row.model, kind=row.kind, name=row.name, time=row.created, size_bytes=row.size,
        base_model=row.base_model, lora=row.lora, user_metadata=row.user_metadata,
    )  # fmt: skip
