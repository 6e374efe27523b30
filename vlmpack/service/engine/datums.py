"""Check and encode the datums and prompts that clients send.

    chunks   [text 20 21 809] [image] [text 810 22]        as a client sends them
    ids       20 21 809  4 4 4 4      810 22               4: the image placeholder, once per image token

The model's own processor cuts images into patches and writes what stands for them. Nothing here touches the model, so
several threads may encode at the same time. All datums of a request are checked before any of it is computed.
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

from vlmpack.collate.encode import Encoder as SampleEncoder
from vlmpack.collate.encoded import Encoded, Visual
from vlmpack.collate.processor_metadata import read_processor
from vlmpack.data.messages import MediaRef
from vlmpack.errors import RequestError, SampleError
from vlmpack.families.family import Family
from vlmpack.layout.batch import Media
from vlmpack.layout.media import IMAGE, TEXT
from vlmpack.layout.row import IGNORE
from vlmpack.service.engine.losses import TARGETS, BoundLoss, LossInputs, bind_loss, check_inputs
from vlmpack.service.limits import FORMATS, ServiceLimits
from vlmpack.service.wire.messages import Chunk, ForwardBackward, ImageChunk, Sample, TextChunk


def not_served(family: Family) -> str | None:
    """Return why requests for a family cannot be served; None: they can."""
    if family.has("query_scale"):
        return "it scales queries by places that its code counts with the padding in decoding; serve another model"
    if family.token_columns:
        return "its prompts attend in both directions, and no datum says where one ends; serve another model"
    return None


def image_token_of(family: Family, config: Any) -> int | None:
    """Return the image placeholder id; None: the family takes no images."""
    return config.image_token_id if family.has_vision else None


def placeholders_of(family: Family, config: Any) -> dict[int, str]:
    """Return the ids that stand for media, which are never text and never sampled, and what each stands for."""
    if not family.has_vision:
        return {}
    names = {"image_token_id": "an image", "video_token_id": "a video", "audio_token_id": "audio"}
    ids = {getattr(config, name, None): kind for name, kind in names.items()}
    return {i: kind for i, kind in ids.items() if i is not None and i < family.text_config(config).vocab_size}


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedSequence:
    """The N tokens and the images of a datum or a prompt."""

    input_ids: np.ndarray
    """int64 [N]. Each image has as many placeholders as it has tokens."""
    images: tuple[Visual, ...] = ()
    """Images, in order."""
    patches_of_images: tuple[int, ...] = ()
    """Number of patches of each image."""
    image_token: int | None = None
    """Image placeholder id; None: the family takes no images."""

    @property
    def length(self) -> int:
        """Number of tokens, N."""
        return len(self.input_ids)

    @cached_property
    def digest(self) -> bytes:
        """Hash of the tokens and images: equal sequences have equal digests."""
        hashed = blake2b(self.input_ids.tobytes(), digest_size=32)
        for image in self.images:
            hashed.update(repr((image.grid, image.runs)).encode())
            for tensor in (image.pixels, *image.tensors.values()):
                assert tensor is not None, "an image that was only measured"
                hashed.update(repr(tensor.shape).encode() + tensor.contiguous().numpy().tobytes())
        return hashed.digest()

    @property
    def patches(self) -> int:
        """Number of patches of all images."""
        return sum(self.patches_of_images)

    @cached_property
    def sample(self) -> Encoded:
        """The sequence as a sample without targets."""
        return Encoded(
            input_ids=self.input_ids,
            labels=np.full_like(self.input_ids, IGNORE),
            types=np.where(self.input_ids == self.image_token, IMAGE, TEXT),
            images=self.images,
        )


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


@final
class Encoder:
    """Checks and encodes requests for one model. Threads may share one encoder."""

    def __init__(self, family: Family, config: Any, processor: Any, *, context: int, limits: ServiceLimits) -> None:
        """Set what requests are checked against.

        Args:
            family: family of the model.
            config: configuration of the model.
            processor: the model's processor; for a text model, its tokenizer.
            context: maximum number of tokens of a datum.
            limits: limits of the service.
        """
        self.family, self.config, self.context, self.limits = family, config, context, limits
        self.vocabulary: int = family.text_config(config).vocab_size
        """Size of the vocabulary: valid ids are below it."""
        self.placeholders = placeholders_of(family, config)
        """Placeholder ids, which text must not contain, and what each stands for."""
        self._reader = SampleEncoder(
            processor=processor, metadata=read_processor(processor), limits=limits.image_limits, train_on="all"
        )

    def encode(self, request: ForwardBackward) -> EncodedRequest:
        """Check and encode a training request.

        Raises:
            RequestError: the request cannot be used. The message names the datum, if one is at fault.
        """
        if not 0 < len(request.data) <= self.limits.datums:
            raise RequestError(f"{len(request.data)} datums in a request: send 1 to {self.limits.datums}")
        self._count_images([datum.chunks for datum in request.data])
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
        if request.num_samples > self.limits.samples:
            raise RequestError(f"num_samples {request.num_samples}: at most {self.limits.samples}")
        self._count_images([request.prompt])
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

    def _count_images(self, parts: Sequence[Sequence[Chunk]]) -> None:
        count = sum(isinstance(chunk, ImageChunk) for chunks in parts for chunk in chunks)
        if count > self.limits.images:
            raise RequestError(f"{count} images in a request: send at most {self.limits.images}")

    def _check_patches(self, patches: int) -> None:
        size = 4 * patches * self.family.patch_channels(self.config) if patches else 0
        if size > self.limits.pixel_bytes:
            limit = self.limits.pixel_bytes
            raise RequestError(f"the images take {size} bytes as patches, more than {limit}; send smaller or fewer")

    def _check_ids(self, name: str, ids: np.ndarray) -> None:
        outside = (ids < 0) | (ids >= self.vocabulary)
        if outside.any():
            at = int(np.flatnonzero(outside)[0])
            raise RequestError(
                f"{name} holds the id {ids[at]} at place {at}; use ids from 0 to {self.vocabulary - 1}, the model's "
                "vocabulary (a target that does not count is 0 with weight 0)"
            )

    # ------------------------------------------------------------------ its chunks

    def check_chunks(self, chunks: Sequence[Chunk]) -> MeasuredSize:
        """Check text chunks and image headers, and return the size of the chunks.

        Raises:
            RequestError: the chunks cannot be used.
        """
        tokens, patches, after_image = 0, 0, False
        measured = iter(self._images(chunks, is_measured=True))
        for at, chunk in enumerate(chunks):
            if isinstance(chunk, TextChunk):
                self._check_text(at, chunk)
                tokens += len(chunk.tokens)
                after_image = after_image and not len(chunk.tokens)
                continue
            if after_image and self.family.has_grids:
                remedy = "put text between them, such as <|vision_end|><|vision_start|>"
                raise RequestError(f"chunk {at} is an image right after another, and both would count as one; {remedy}")
            visual, ids = next(measured)
            if chunk.expected_tokens not in (None, len(ids)):
                seen = f"an image of {len(ids)} tokens, but expected_tokens is {chunk.expected_tokens}"
                raise RequestError(
                    f"chunk {at} is {seen}; count with the model's processor, or leave expected_tokens out"
                )
            tokens, after_image = tokens + len(ids), True
            patches += 0 if visual.grid is None else prod(visual.grid)  # others are counted once they are decoded
        if not tokens:
            raise RequestError("no tokens; every datum and prompt needs one at least")
        if tokens > self.context:
            raise RequestError(f"it has {tokens} tokens, but the context here is {self.context}; shorten or split it")
        return MeasuredSize(tokens=tokens, patches=patches)

    def _check_text(self, at: int, chunk: TextChunk) -> None:
        name = f"chunk {at}"
        if chunk.tokens.ndim != 1 or chunk.tokens.dtype.kind not in "iu":
            raise RequestError(f"{name}: tokens are {chunk.tokens.dtype} {list(chunk.tokens.shape)}; send int32 [n]")
        self._check_ids(name, chunk.tokens)
        for token, meaning in self.placeholders.items():
            if (chunk.tokens == token).any():
                place = int(np.flatnonzero(chunk.tokens == token)[0])
                raise RequestError(
                    f"{name} has the id {token} at place {place}, the placeholder of {meaning}, in its text; leave it "
                    "out and send the image as a chunk in its place"
                )

    def _images(self, chunks: Sequence[Chunk], *, is_measured: bool = False) -> Sequence[tuple[Visual, np.ndarray]]:
        """Read the images among some chunks, or only their headers, each with the ids that stand for it."""
        images = [(at, chunk) for at, chunk in enumerate(chunks) if isinstance(chunk, ImageChunk)]
        for at, chunk in images:
            if not self.family.has_vision:
                raise RequestError(f"chunk {at} is an image, but {self.family.model_type} is a text model")
            if chunk.format not in FORMATS:
                kinds = " or ".join(FORMATS)
                raise RequestError(f"chunk {at} is an image of format {chunk.format!r:.40}; send {kinds} bytes")
        refs = [MediaRef(source=chunk.data, index=number) for number, (_, chunk) in enumerate(images)]
        try:
            return self._reader.images(refs, is_measured=is_measured)
        except SampleError as error:
            raise RequestError(str(error)) from error

    def _encode_chunks(self, chunks: Sequence[Chunk], size: MeasuredSize) -> EncodedSequence:
        """Decode images and cut them into patches. `size` is the size that the headers give."""
        images = self._images(chunks)
        read = iter(images)
        ids = [chunk.tokens.astype(np.int64) if isinstance(chunk, TextChunk) else next(read)[1] for chunk in chunks]
        sequence = EncodedSequence(
            input_ids=np.concatenate(ids),
            images=tuple(visual for visual, _ in images),
            patches_of_images=tuple(self._patches(visual) for visual, _ in images),
            image_token=image_token_of(self.family, self.config),
        )
        if sequence.length != size.tokens:
            seen = f"{sequence.length} tokens with the text, but their headers say {size.tokens}"
            raise RequestError(f"its images decode to {seen}; save them again")
        return sequence

    def _patches(self, visual: Visual) -> int:
        if visual.grid is not None:
            return prod(visual.grid)
        return self.family.tile_patches(Media(pixel_values=visual.pixels, tensors=visual.tensors), self.config)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Prefix errors with the name of the thing at fault."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{name}: {error}") from error
