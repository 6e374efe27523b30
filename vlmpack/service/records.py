"""Rows of the journal: sessions, models, sampling sessions, checkpoints, requests, replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, final

from vlmpack.service.messages import LoraConfig

State = Literal["queued", "done", "failed"]


@final
@dataclass(frozen=True, kw_only=True)
class SessionRow:
    """A session of a client."""

    id: str
    """Of the session."""
    created: float
    """Unix seconds."""
    ended: float | None = None
    """Unix seconds; None: it lasts."""
    tags: Sequence[str] = ()
    """The client's."""
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    """The client's own notes."""
    sdk_version: str = ""
    """Of the client."""
    display_name: str | None = None
    """The client's name for it; None: it gave none."""


@final
@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """A model that was created, and where its state lies."""

    id: str
    """`{session}:train:{n}`."""
    session: str
    """Of the client that made it."""
    created: float
    """Unix seconds."""
    last_request: float
    """Unix seconds."""
    base_model: str
    """Name of the base model."""
    lora: LoraConfig | None
    """Its adapter, with the seed that was drawn; None: all weights are trained."""
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    """The client's own notes."""
    snapshot: str | None = None
    """Name of the folder of its last snapshot; None: none yet, or the session ended."""
    covered: int = 0
    """Last operation that the snapshot covers; 0: the creation."""


@final
@dataclass(frozen=True, kw_only=True)
class SamplingRow:
    """A sampling session."""

    id: str
    """`{session}:sample:{n}`."""
    session: str
    """Of the client."""
    created: float
    """Unix seconds."""
    model: str | None = None
    """Id of the model whose unnamed save it is; None: it samples from a path or the base model."""
    path: str | None = None
    """`tinker://` of the snapshot, if it has a name."""
    folder: str | None = None
    """Name of the folder of the snapshot; None: the base model."""


@final
@dataclass(frozen=True, kw_only=True)
class CheckpointRow:
    """A training checkpoint, or a snapshot to sample from, that has a name."""

    model: str
    """Id of the model it is from."""
    kind: Literal["weights", "sampler_weights"]
    """A training checkpoint, or a snapshot to sample from."""
    name: str
    """The client's name for it."""
    folder: str
    """Name of its folder."""
    created: float
    """Unix seconds."""
    size: int
    """Bytes of its files."""
    base_model: str
    """Name of the base model."""
    lora: LoraConfig | None
    """Adapter of the model; None: all weights."""
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    """The client's own notes."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRow:
    """A request without its body and reply."""

    owner: str
    """Id of its model or sampling session."""
    seq: int
    """Number within the owner; 0 of a model: its creation."""
    session: str
    """Of the client."""
    kind: str
    """Class name of the request; "Refused": it could not be read; "Missing": it never arrived."""
    digest: bytes
    """Of the parsed content."""
    seed: int | None = None
    """The seed drawn for a request without one."""
    state: State = "queued"
    """True if it was carried out."""
    group: int | None = None
    """First number of the requests that went through the model together with it."""
    retrieved: float | None = None
    """When its reply was first fetched, in Unix seconds."""
    size: int = 0
    """Bytes of the body that the journal has."""

    @property
    def is_replayed(self) -> bool:
        """Return whether a restart has to carry it out again: those that it does not, have lost their body."""
        return self.state != "queued" and self.size > 0


@final
@dataclass(frozen=True, kw_only=True)
class StoredReply:
    """A reply as it goes over the wire."""

    content_type: str
    """JSON or protobuf."""
    body: bytes
    """Encoded."""
