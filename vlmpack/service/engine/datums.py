"""Check and encode the datums and prompts that clients send.

    chunks   [text 20 21 809] [image] [text 810 22]        as a client sends them
    ids       20 21 809  4 4 4 4      810 22               4: the image placeholder, once per image token

The model's own image processor cuts images into patches. Nothing here touches the model, so several threads may encode
at the same time. All datums of a request are checked before any of it is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from math import prod
from typing import Any, final

import numpy as np
import torch

from vlmpack.data.images import load_image, read_size
from vlmpack.errors import RequestError, SampleError
from vlmpack.families.family import Family
from vlmpack.layout.batch import Grid
from vlmpack.service.engine.losses import TARGETS, BoundLoss, LossInputs, bind_loss, check_inputs
from vlmpack.service.limits import FORMATS, ServiceLimits
from vlmpack.service.wire.messages import Chunk, ForwardBackward, ImageChunk, Sample, TextChunk

WITH_IMAGES = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp"),
    *("glm4v", "glm46v", "glm4v_moe", "glm_ocr", "paddleocr_vl", "ernie4_5_vl_moe"),
)
"""Families whose images can be encoded: each image is one grid of patches and one run of placeholders."""


def not_served(family: Family) -> str | None:
    """Return why requests for a family cannot be served; None: they can.

    Text models can be served, and the vision models of `WITH_IMAGES`.
    """
    if family.has("query_scale"):
        return (
            "it scales queries by places that its own code counts from the padding of sequences decoded together; "
            "serve another model"
        )
    if family.has_vision and family.model_type not in WITH_IMAGES:
        return f"the service does not encode its images; serve one of {', '.join(WITH_IMAGES)}, or a text model"
    return None


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedImage:
    """An image as patches."""

    pixel_values: torch.Tensor
    """float32 [P, C] or [P, 3, side, side]: P patches of C numbers."""
    grid: Grid
    """Frames, rows and columns of patches."""
    tokens: int
    """Number of placeholders of the image."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedSequence:
    """The N tokens and the images of a datum or a prompt."""

    input_ids: np.ndarray
    """int64 [N]. Each image has as many placeholders as it has tokens."""
    images: tuple[EncodedImage, ...] = ()
    """Images, in order."""

    @property
    def length(self) -> int:
        """Number of tokens, N."""
        return len(self.input_ids)

    @cached_property
    def digest(self) -> bytes:
        """Hash of the tokens and images: equal sequences have equal digests."""
        hashed = blake2b(self.input_ids.tobytes(), digest_size=32)
        for image in self.images:
            hashed.update(repr(image.grid).encode())
            hashed.update(image.pixel_values.contiguous().numpy().tobytes())
        return hashed.digest()

    @cached_property
    def patches(self) -> int:
        """Number of patches of all images."""
        return sum(prod(image.grid) for image in self.images)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedDatum:
    """A checked datum."""

    sequence: EncodedSequence
    """Tokens and images."""
    inputs: LossInputs
    """Inputs of the loss, M values of each."""

    @property
    def targets(self) -> np.ndarray:
        """int64 [M]: the target ids."""
        return self.inputs.arrays[TARGETS]

    @property
    def places(self) -> np.ndarray:
        """int64 [M]: index of the token that predicts each target."""
        keys = self.inputs.keys
        return np.arange(self.sequence.length) if keys is None else keys // self.inputs.shape[1]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedRequest:
    """A checked training request."""

    model_id: str
    """Id of the model."""
    data: tuple[EncodedDatum, ...]
    """The datums."""
    loss: BoundLoss
    """The loss."""
    forward_only: bool = False
    """Compute log-probabilities and the loss only; no gradient."""


@final
@dataclass(frozen=True, kw_only=True)
class MeasuredSize:
    """The size of some chunks, read from the headers of their images."""

    tokens: int = 0
    """Number of tokens."""
    patches: int = 0
    """Number of image patches."""

    def __add__(self, other: MeasuredSize) -> MeasuredSize:
        return MeasuredSize(tokens=self.tokens + other.tokens, patches=self.patches + other.patches)


@final
class Encoder:
    """Checks and encodes requests for one model. Threads may share one encoder."""

    def __init__(
        self, family: Family, config: Any, image_processor: Any, *, context: int, limits: ServiceLimits
    ) -> None:
        """Set what requests are checked against.

        Args:
            family: family of the model.
            config: configuration of the model.
            image_processor: the model's image processor; None: a text model.
            context: maximum number of tokens of a datum.
            limits: limits of the service.
        """
        self.family, self.config, self.context, self.limits = family, config, context, limits
        self.vocabulary: int = family.text_config(config).vocab_size
        """Size of the vocabulary: valid ids are below it."""
        self.placeholders: dict[int, str] = {}
        """Placeholder ids, which text must not contain, and what each stands for."""
        if family.has_vision:
            self.placeholders = {config.image_token_id: "an image", config.video_token_id: "a video"}
        self._image_processor = image_processor

    def encode(self, request: ForwardBackward) -> EncodedRequest:
        """Check and encode a training request.

        Raises:
            RequestError: the request cannot be used. The message names the datum, if one is at fault.
        """
        loss, patches, targets, checked = bind_loss(request.loss_fn, request.loss_config), 0, 0, []
        for at, datum in enumerate(request.data):  # check everything that headers tell before decoding any image
            with _named(f"datum {at}"):
                size = self.check_chunks(datum.chunks)
                inputs = check_inputs(loss, datum.inputs, size.tokens)
                self._check_ids(TARGETS, inputs.arrays[TARGETS])
            checked.append((size, inputs))
            patches += size.patches
            self._check_patches(patches)
            targets += prod(inputs.shape)
            if targets > self.limits.soft_targets and inputs.keys is not None:
                raise RequestError(f"more than {self.limits.soft_targets:,} targets in a request: send fewer datums")
        data = []
        for at, (size, inputs) in enumerate(checked):
            with _named(f"datum {at}"):
                sequence = self._encode_chunks(request.data[at].chunks, size)
            data.append(EncodedDatum(sequence=sequence, inputs=inputs))
        return EncodedRequest(model_id=request.model_id, data=tuple(data), loss=loss, forward_only=request.forward_only)

    def encode_prompt(self, request: Sample) -> EncodedSequence:
        """Check and encode a prompt.

        Raises:
            RequestError: the prompt cannot be used.
        """
        if (targets := request.target_prompt_logprobs) is not None:
            self._check_ids("target_prompt_logprobs", targets.values[targets.values >= 0])
        with _named("prompt"):
            return self.encode_chunks(request.prompt)

    def encode_chunks(self, chunks: Sequence[Chunk]) -> EncodedSequence:
        """Check and encode text and images.

        Raises:
            RequestError: the chunks cannot be used.
        """
        size = self.check_chunks(chunks)
        self._check_patches(size.patches)
        return self._encode_chunks(chunks, size)

    def _check_patches(self, patches: int) -> None:
        size = 4 * patches * self.family.patch_channels(self.config) if patches else 0
        if size > self.limits.pixel_bytes:
            raise RequestError(
                f"the images take {size} bytes as patches, more than {self.limits.pixel_bytes}; send smaller or fewer "
                "images at a time"
            )

    def _check_ids(self, name: str, ids: np.ndarray) -> None:
        outside = (ids < 0) | (ids >= self.vocabulary)
        if outside.any():
            at = int(np.flatnonzero(outside)[0])
            raise RequestError(
                f"{name} holds the id {ids[at]} at place {at}, outside the model's vocabulary of "
                f"{self.vocabulary}; use ids from 0 to {self.vocabulary - 1} (a target that does not count "
                "is 0 with weight 0)"
            )

    # ------------------------------------------------------------------ its chunks

    def check_chunks(self, chunks: Sequence[Chunk]) -> MeasuredSize:
        """Check text chunks and image headers, and return the size of the chunks.

        Raises:
            RequestError: the chunks cannot be used.
        """
        size, after_image = MeasuredSize(), False
        for at, chunk in enumerate(chunks):
            if isinstance(chunk, TextChunk):
                self._check_text(at, chunk)
                size += MeasuredSize(tokens=len(chunk.tokens))
                after_image = after_image and not len(chunk.tokens)
                continue
            if after_image:
                raise RequestError(
                    f"chunk {at} is an image right after another one, and the model would take both for one; put text "
                    "between them, such as <|vision_end|><|vision_start|>"
                )
            size, after_image = size + self._measure(at, chunk), True
            self._check_length(size.tokens)
        self._check_length(size.tokens)
        return size

    def _check_length(self, length: int) -> None:
        if length > self.context:
            raise RequestError(f"it has {length} tokens, but the context here is {self.context}; shorten or split it")

    def _check_text(self, at: int, chunk: TextChunk) -> None:
        name = f"chunk {at}"
        if chunk.tokens.ndim != 1 or chunk.tokens.dtype.kind not in "iu":
            raise RequestError(f"{name}: tokens are {chunk.tokens.dtype} {list(chunk.tokens.shape)}; send int32 [n]")
        self._check_ids(name, chunk.tokens)
        for token, meaning in self.placeholders.items():
            if (chunk.tokens == token).any():
                raise RequestError(
                    f"{name} has the id {token} at place {int(np.flatnonzero(chunk.tokens == token)[0])}, the "
                    f"placeholder of {meaning}, in its text; leave it out and send the image as a chunk in its place"
                )

    def _measure(self, at: int, chunk: ImageChunk) -> MeasuredSize:
        """Return the size of an image as patches, from its header."""
        if not self.family.has_vision:
            raise RequestError(f"chunk {at} is an image, but {self.family.model_type} is a text model")
        if chunk.format not in FORMATS:
            raise RequestError(
                f"chunk {at} is an image of format {chunk.format!r:.40}; send {' or '.join(FORMATS)} bytes"
            )
        with _named_chunk(at):
            height, width = read_size(chunk.data, limits=self.limits.image_limits)
            patches = self._image_processor.get_number_of_image_patches(height, width)
        tokens = patches // self.family.merge(self.config) ** 2
        if chunk.expected_tokens is not None and chunk.expected_tokens != tokens:
            raise RequestError(
                f"chunk {at} is an image of {tokens} tokens by the model's own processor, but expected_tokens is "
                f"{chunk.expected_tokens}; count with the processor of the model, or leave expected_tokens out"
            )
        return MeasuredSize(tokens=tokens, patches=patches)

    def _encode_chunks(self, chunks: Sequence[Chunk], size: MeasuredSize) -> EncodedSequence:
        """Decode images and cut them into patches. `size` is the size that the headers give."""
        family, config = self.family, self.config
        ids: list[np.ndarray] = []
        images: list[EncodedImage] = []
        for at, chunk in enumerate(chunks):
            if isinstance(chunk, TextChunk):
                ids.append(chunk.tokens.astype(np.int64))
                continue
            with _named_chunk(at):
                image = load_image(chunk.data, limits=self.limits.image_limits)
                patches = self._image_processor(images=[image], return_tensors="pt")
            t, h, w = (int(n) for n in patches["image_grid_thw"][0])
            tokens = family.media_tokens([(t, h, w)], config)
            images.append(EncodedImage(pixel_values=patches["pixel_values"], grid=(t, h, w), tokens=tokens))
            ids.append(np.full(tokens, config.image_token_id, np.int64))
        sequence = EncodedSequence(input_ids=np.concatenate(ids), images=tuple(images))
        if sequence.length != size.tokens:
            raise RequestError(
                f"its images decode to {sequence.length} tokens with the text, but their headers say {size.tokens}; "
                "save them again"
            )
        return sequence


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Prefix errors with the name of the thing at fault."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{name}: {error}") from error


@contextmanager
def _named_chunk(at: int) -> Iterator[None]:
    """Turn errors about an image into a `RequestError` that names its chunk."""
    try:
        yield
    except SampleError as error:
        raise RequestError(f"chunk {at}: {error}") from error
    except (ValueError, TypeError, ArithmeticError, OSError) as error:
        raise RequestError(f"chunk {at}: the model's image processor refused it: {error}") from error
