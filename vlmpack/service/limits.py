"""The limits and times of a service, and the checks that need nothing but the request itself.

Each is a number that the operator can change. What goes past one is refused: a body with status 413, a request by a
failed future that names the datum, too many requests with status 429.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from vlmpack.errors import RequestError
from vlmpack.service.messages import Chunk, ForwardBackward, ImageChunk, Request, Sample, TextChunk


@final
@dataclass(frozen=True, kw_only=True)
class ServiceLimits:
    """Limits and times of a service."""

    body_bytes: int = 128 * 2**20
    """Largest body of a training request."""
    sample_bytes: int = 64 * 2**20
    """Largest body of a sampling request, whose images are in base64."""
    json_bytes: int = 4 * 2**20
    """Largest body of any other request."""
    bodies_bytes: int = 1024 * 2**20
    """Bytes of bodies that are received at one time; further requests get status 429."""
    body_seconds: float = 60.0
    """Longest time that a body may take to arrive."""
    header_seconds: float = 20.0
    """Longest time until a new connection has sent the header of its first request, and that the body of a request with
    a wrong key may take to arrive."""
    connections: int = 4096
    """Connections at one time, and at most half of the process's open files; the one that has waited longest for a
    request gives way to a new one."""

    datums: int = 4096
    """Datums of a request."""
    images: int = 2048
    """Images of a request."""
    image_bytes: int = 32 * 2**20
    """Size of an image file."""
    image_pixels: int = 100_000_000
    """Width times height of an image, read from its header before it is decoded."""
    pixel_bytes: int = 8 * 2**30
    """Bytes of the patches of a request's images, counted from their headers before any is decoded."""
    soft_targets: int = 2**25
    """Tokens times targets of each, of a request of which tokens have several: the reply has a number for each."""
    fields: int = 500_000
    """Protobuf fields of a request: many empty ones take far more memory than they have bytes."""
    context: int | None = None
    """Tokens of a datum, or of a prompt with what is sampled; None: what the model's configuration says."""
    row_tokens: int = 8192
    """Token budget of a packed row; a longer datum has a row of its own."""
    row_patches: int | None = None
    """Patch budget of a packed row's images; None: eight for each token of `row_tokens`."""
    samples: int = 1024
    """Sequences of a sampling request."""

    sessions: int = 1024
    """Open sessions."""
    models: int = 64
    """Models of all sessions."""
    rank: int = 256
    """Rank of a LoRA adapter."""
    queued_requests: int = 4096
    """Requests that wait, over all models; further ones get status 429."""
    queued_bytes: int = 2 * 2**30
    """Bytes of the bodies of requests that wait; further ones get status 429."""
    queued_samples: int = 4096
    """Samples that wait."""
    samplers_kept: int = 1024
    """Sampling sessions of a session that are kept; the oldest idle ones go."""
    unnamed_saves: int = 64
    """Unnamed saves of a model to sample from that are kept; the oldest go, with their sampling sessions."""
    numbers_ahead: int = 8192
    """Most that a request's number may be ahead of the first that has not arrived."""

    poll_seconds: float = 30.0
    """Seconds that an answer to a result that is not there yet is held back; the client gives up after 45 s."""
    gap_seconds: float = 60.0
    """Seconds that requests are held for one before them that never arrives, whatever comes meanwhile; then they fail
    by name. Time in which a training request of the model is being received does not count. Not below 30 s, which the
    client may wait until it tries again."""
    idle_seconds: float = 600.0
    """A session without heartbeats is finished after this time, and its models are freed."""
    silent_seconds: float = 60.0
    """A session without heartbeats for this time is finished when a new session or model needs its place; the client
    sends one every 10 s."""
    result_seconds: float = 600.0
    """Seconds that a result is kept after it was fetched."""

    retry_seconds: float = 1.0
    """Seconds after which a client that is refused for want of room should try again."""

    group_bytes: int = 16 * 2**20
    """Bytes of bodies of one model that go through the model together."""
    group_requests: int = 1024
    """Requests of one model that go through the model together."""
    encoded_bytes: int = 64 * 2**20
    """Bytes of bodies of all models, and as many of samples, that are encoded at one time: decoded images take many
    times the bytes of their files."""
    encode_threads: int = 2
    """Threads that check requests and decode images."""
    samplers_open: int = 16
    """Snapshots that the sampling engine holds at once while it has a choice."""
    snapshot_share: float = 0.1
    """Share of the time of a model's operations that writing its state may take."""
    replayed_bytes: int = 512 * 2**20
    """Bytes of bodies kept for a model's replay, after which its state is written whatever the time."""

    chunk_bytes: int = 64_000_000
    """Size at which the client cuts a call into several requests."""
    sample_requests: int = 64
    """Sampling requests that the client has under way at one time."""

    @property
    def patches(self) -> int:
        """Patch budget of a packed row's images."""
        return 8 * self.row_tokens if self.row_patches is None else self.row_patches


def check(request: Request, limits: ServiceLimits) -> None:
    """Count datums, images, bytes and samples of a request.

    Raises:
        RequestError: one is past its limit; the message names the datum.
    """
    parts: dict[str, Sequence[Chunk]] = {}
    if isinstance(request, ForwardBackward):
        if not request.data:
            raise RequestError("a request without datums: send one at least")
        if len(request.data) > limits.datums:
            raise RequestError(f"{len(request.data)} datums in a request: send at most {limits.datums}")
        parts = {f"datum {index}": datum.chunks for index, datum in enumerate(request.data)}
    elif isinstance(request, Sample):
        if request.num_samples > limits.samples:
            raise RequestError(f"num_samples {request.num_samples}: at most {limits.samples}")
        parts = {"prompt": request.prompt}
    count = 0
    for name, chunks in parts.items():
        if not any(len(chunk.tokens) if isinstance(chunk, TextChunk) else 1 for chunk in chunks):
            raise RequestError(f"{name}: no tokens; every datum and prompt needs one at least")
        images = [chunk for chunk in chunks if isinstance(chunk, ImageChunk)]
        count += len(images)
        if (size := max((len(image.data) for image in images), default=0)) > limits.image_bytes:
            raise RequestError(
                f"{name}: an image of {size:,} bytes; at most {limits.image_bytes:,}, so make it smaller"
            )
    if count > limits.images:
        raise RequestError(f"{count} images in a request: send at most {limits.images}")
