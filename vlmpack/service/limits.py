"""The limits and timeouts of a service.

The operator can change each number. A body over its limit is refused with status 413, a request over a limit with a
failed future that names the datum, and too many requests with status 429.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from vlmpack.data.images import ImageLimits

FORMATS = ("png", "jpeg")
"""Accepted image formats."""


@final
@dataclass(frozen=True, kw_only=True)
class ServiceLimits:
    """Limits and timeouts of a service."""

    body_bytes: int = 128 * 2**20
    """Maximum size of the body of a training request."""
    sample_bytes: int = 64 * 2**20
    """Maximum size of the body of a sampling request, whose images are in base64."""
    json_bytes: int = 4 * 2**20
    """Maximum size of any other body."""
    bodies_bytes: int = 1024 * 2**20
    """Total bytes of bodies being received; requests beyond it get status 429."""
    body_seconds: float = 60.0
    """Seconds that a body may take to arrive, and one more for each 100,000 bytes of it."""
    header_seconds: float = 20.0
    """Seconds until a new connection must have sent the header of its first request. Also the time that the body of a
    request with a wrong key may take to arrive."""
    connections: int = 4096
    """Maximum number of open connections; never more than half of the process's open files. Beyond it, the connection
    that has waited longest for its client is closed."""

    datums: int = 4096
    """Maximum number of datums in a request."""
    images: int = 2048
    """Maximum number of images in a request."""
    image_bytes: int = 32 * 2**20
    """Maximum size of an image file in bytes."""
    image_pixels: int = 100_000_000
    """Maximum width times height of an image, read from its header before decoding."""
    pixel_bytes: int = 8 * 2**30
    """Maximum bytes of the patches of a request's images, computed from their headers before decoding."""
    soft_targets: int = 2**25
    """Maximum number of targets (tokens times targets per token) in a request with soft targets. The reply has one
    number for each target."""
    fields: int = 500_000
    """Maximum number of protobuf fields in a request: empty fields take far more memory than bytes on the wire."""
    context: int | None = None
    """Maximum number of tokens of a datum, or of a prompt with its sampled tokens; None: the limit in the model's
    configuration."""
    row_tokens: int = 8192
    """Token budget of a packed row; a longer datum gets its own row."""
    row_patches: int | None = None
    """Patch budget of a packed row's images; None: 8 per token of `row_tokens`."""
    samples: int = 1024
    """Maximum number of sequences in a sampling request."""

    sessions: int = 1024
    """Maximum number of open sessions."""
    models: int = 64
    """Maximum number of models, over all sessions."""
    rank: int = 256
    """Maximum rank of a LoRA adapter."""
    queued_requests: int = 4096
    """Maximum number of waiting requests, over all models; requests beyond it get status 429."""
    queued_bytes: int = 2 * 2**30
    """Maximum bytes of the bodies of waiting requests; requests beyond it get status 429."""
    queued_samples: int = 4096
    """Maximum number of waiting samples."""
    samplers_kept: int = 1024
    """Number of sampling sessions kept per session; the oldest idle ones are removed."""
    unnamed_saves: int = 64
    """Number of unnamed sampler snapshots kept per model; the oldest are removed with their sampling sessions."""
    numbers_ahead: int = 8192
    """How far the number of a request may be ahead of the first number that has not arrived."""

    poll_seconds: float = 30.0
    """Seconds to hold back the reply to a poll whose result is not ready; the client gives up after 45 s."""
    gap_seconds: float = 60.0
    """Seconds to hold requests for an earlier request that has not arrived, whatever else arrives meanwhile; then they
    fail, and the error names the missing number. Time in which a training request of the model is being received does
    not count. At least 30 s, because the client may wait that long before it retries."""
    idle_seconds: float = 600.0
    """Seconds without heartbeats after which a session is finished and its models are freed."""
    silent_seconds: float = 60.0
    """Seconds without heartbeats after which a session may be finished to make room for a new session or model. The
    client sends a heartbeat every 10 s."""
    result_seconds: float = 600.0
    """Seconds to keep a result after it was fetched; one that was fetched before a restart stays until it is fetched
    again, or until its session ends."""

    group_bytes: int = 16 * 2**20
    """Maximum bytes of bodies of one model that go through the model together."""
    group_requests: int = 1024
    """Maximum number of requests of one model that go through the model together."""
    encoded_bytes: int = 64 * 2**20
    """Maximum bytes of bodies, over all models, that are encoded at the same time; sampling requests have a budget of
    the same size. Decoded images take many times the bytes of their files."""
    encode_threads: int = 2
    """Number of threads that check requests and decode images."""
    samplers_open: int = 16
    """Maximum number of snapshots in the memory of the sampling engine; the least recently used one is dropped."""
    snapshot_share: float = 0.1
    """Share of the time of a model's operations that writing its state may take."""
    replayed_bytes: int = 512 * 2**20
    """Maximum bytes of bodies kept to replay a model; beyond it the state is written, whatever time that takes."""

    chunk_bytes: int = 64_000_000
    """Size at which the client splits a call into several requests."""
    sample_requests: int = 64
    """Maximum number of sampling requests that a client has in progress."""

    @property
    def image_limits(self) -> ImageLimits:
        """Limits of one image. The bytes of a file decide its format, not the declared one."""
        formats = tuple(name.upper() for name in FORMATS)
        return ImageLimits(max_pixels=self.image_pixels, max_bytes=self.image_bytes, formats=formats)

    @property
    def patches(self) -> int:
        """Patch budget of a packed row's images."""
        return 8 * self.row_tokens if self.row_patches is None else self.row_patches
