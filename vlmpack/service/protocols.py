"""Protocols of the parts that the queue drives: engine, rows in work, sampling engine, wire codec; and its settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

from vlmpack.service.messages import (
    AdamParams,
    Failure,
    ForwardBackward,
    ForwardBackwardResult,
    LoraConfig,
    OptimStepResult,
    Outcome,
    Request,
    Sample,
    SampleResult,
)


class RowWork(Protocol):
    """The rows of some requests of one model, run one at a time."""

    @property
    def rows_left(self) -> int:
        """Rows to run yet."""
        ...

    def run_row(self) -> None:
        """Run the next row."""
        ...

    def results(self) -> Sequence[ForwardBackwardResult | Failure]:
        """Results of the requests, in their order, once no row is left; one that failed has left no gradient."""
        ...

    def cancel(self) -> None:
        """Take the gradients of all requests back."""
        ...


class SamplingEngine(Protocol):
    """Samples from snapshots and from the base model; called in the engine thread alone."""

    @property
    def is_idle(self) -> bool:
        """Return whether there is nothing to sample."""
        ...

    def open(self, session_id: str, folder: Path | None) -> None:
        """Make a snapshot ready under a name; None: the base model."""
        ...

    def close(self, session_id: str) -> None:
        """Release it."""
        ...

    def add(self, key: str, session_id: str, prompt: Any, request: Sample) -> None:
        """Enter a request."""
        ...

    def step(self) -> Sequence[tuple[str, SampleResult | Failure]]:
        """Do one slice of work; return what was finished."""
        ...


class BaseModel(Protocol):
    """The base model."""

    @property
    def name(self) -> str:
        """The name that clients use."""
        ...

    @property
    def arch(self) -> str:
        """Its model type, such as "qwen3_vl"."""
        ...

    @property
    def tokenizer_id(self) -> str:
        """Where its tokenizer lies."""
        ...


class ModelEngine(Protocol):
    """Computes; `encode` and `encode_prompt` are called in any thread, all else in the engine thread alone."""

    @property
    def base(self) -> BaseModel:
        """The base model."""
        ...

    @property
    def sampler(self) -> SamplingEngine:
        """Samples."""
        ...

    def encode(self, request: ForwardBackward) -> Any:
        """Check a request and make it ready to run."""
        ...

    def encode_prompt(self, request: Sample) -> Any:
        """Check a prompt and make it ready."""
        ...

    def create(self, model_id: str, lora: LoraConfig | None) -> None:
        """Create a model."""
        ...

    def create_from(self, model_id: str, folder: Path, *, optimizer: bool) -> LoraConfig | None:
        """Create a model from a saved state; return its adapter's settings."""
        ...

    def free(self, model_id: str) -> None:
        """Release a model."""
        ...

    def models(self) -> Sequence[str]:
        """Ids of the models that exist."""
        ...

    def forward_backward(self, requests: Sequence[Any]) -> RowWork:
        """Divide encoded requests of one model into rows."""
        ...

    def optim_step(self, model_id: str, adam: AdamParams) -> OptimStepResult:
        """Apply the accumulated gradient and clear it."""
        ...

    def save(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        """Save a model into an empty folder."""
        ...

    def load(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        """Go back to a saved state."""
        ...


class Encoded(Protocol):
    """A reply as it goes over the wire."""

    @property
    def content_type(self) -> str:
        """JSON or protobuf."""
        ...

    @property
    def body(self) -> bytes:
        """Encoded."""
        ...


class Codec(Protocol):
    """Parses bodies and encodes replies."""

    def decode(self, kind: str, body: bytes) -> Request:
        """Parse the body of a request of the class `kind`."""
        ...

    def encode(self, outcome: Outcome) -> Encoded:
        """Encode a reply."""
        ...


@final
@dataclass(frozen=True, kw_only=True)
class QueueSettings:
    """Limits and times of the queue."""

    gap_timeout: float = 45.0
    """Seconds that requests wait for a number that never arrives, before they fail; time in which a request of the
    model is being received does not count."""
    session_timeout: float = 600.0
    """Seconds of silence after which a session ends."""
    reply_kept: float = 600.0
    """Seconds that a reply is kept after it was fetched."""
    queued_requests: int = 8192
    """Most requests that wait; beyond it clients are asked to try again later."""
    numbers_ahead: int = 8192
    """Most that the number of a request may be ahead of the first that has not arrived."""
    queued_bytes: int = 2 << 30
    """Most bytes of bodies of requests that wait."""
    queued_samples: int = 4096
    """Most samples that wait."""
    sessions: int = 1024
    """Most sessions at once."""
    group_bytes: int = 16 << 20
    """Bytes of bodies of one model that go through the model together, at most."""
    encoded_bytes: int = 64 << 20
    """Bytes of bodies of all models, and as many of samples, that are encoded at one time: decoded images take many
    times the bytes of their files."""
    group_requests: int = 1024
    """Requests of one model that go through the model together, at most."""
    samplers_open: int = 16
    """Snapshots that the sampling engine holds at once while it has a choice."""
    encode_threads: int = 2
    """Threads that check requests and decode images."""
    samplers_kept: int = 1024
    """Sampling sessions of a session that are kept; the oldest idle ones go."""
    unnamed_saves: int = 64
    """Unnamed saves of a model to sample from that are kept; the oldest go, with their sampling sessions."""
    snapshot_share: float = 0.1
    """Share of the time of a model's operations that writing its state may take."""
    replayed_bytes: int = 512 << 20
    """Bytes of bodies kept for a model's replay, after which its state is written whatever the time."""
    replies_cached: int = 128 << 20
    """Bytes of replies kept in memory; the others are read from the journal."""
    retry_after: float = 1.0
    """Seconds after which a client that is refused for want of room should try again."""
