"""The limits of a service, and the checks that need nothing but the request itself.

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
    """Limits of a service."""

    body_bytes: int = 128 * 2**20
    """Largest body of a training request as it arrives, compressed or not."""
    decoded_bytes: int = 256 * 2**20
    """Largest body of a training request once it is decompressed."""
    sample_bytes: int = 64 * 2**20
    """Largest body of a sampling request, whose images are in base64."""
    json_bytes: int = 4 * 2**20
    """Largest body of any other request."""
    bodies_bytes: int = 1024 * 2**20
    """Bytes of bodies that are received at one time; further requests get status 429."""
    body_seconds: float = 60.0
    """Longest time that a body may take to arrive."""

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
    result_seconds: float = 600.0
    """Seconds that a result is kept after it was fetched."""

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
    if isinstance(request, ForwardBackward):
        if not request.data:
            raise RequestError("a request without datums: send one at least")
        if len(request.data) > limits.datums:
            raise RequestError(f"{len(request.data)} datums in a request: send at most {limits.datums}")
        for index, datum in enumerate(request.data):
            _check_chunks(f"datum {index}", datum.chunks, limits)
        _check_images(sum(_count_images(datum.chunks) for datum in request.data), limits)
    elif isinstance(request, Sample):
        if request.num_samples > limits.samples:
            raise RequestError(f"num_samples {request.num_samples}: at most {limits.samples}")
        _check_chunks("prompt", request.prompt, limits)
        _check_images(_count_images(request.prompt), limits)


def _count_images(chunks: Sequence[Chunk]) -> int:
    return sum(isinstance(chunk, ImageChunk) for chunk in chunks)


def _check_images(count: int, limits: ServiceLimits) -> None:
    if count > limits.images:
        raise RequestError(f"{count} images in a request: send at most {limits.images}")


def _check_chunks(name: str, chunks: Sequence[Chunk], limits: ServiceLimits) -> None:
    if not any(len(chunk.tokens) if isinstance(chunk, TextChunk) else 1 for chunk in chunks):
        raise RequestError(f"{name}: no tokens; every datum and prompt needs one at least")
    for chunk in chunks:
        if isinstance(chunk, ImageChunk) and len(chunk.data) > limits.image_bytes:
            raise RequestError(
                f"{name}: an image of {len(chunk.data):,} bytes; at most {limits.image_bytes:,}, so make it smaller"
            )
