"""The padded batch: B rows of width S, the 2D mask of real tokens, and the media."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, final

import numpy as np
import torch

from vlmpack.errors import ConfigError, LayoutError
from vlmpack.layout.device import copied, on_host, outside_graph, require, to_device
from vlmpack.layout.media import IMAGE, VIDEO, MediaTable
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.segments import Segments

IGNORE = -100
"""The label that cross-entropy ignores."""
METADATA_KEY = "vlmpack"
"""Key of `HostMetadata` in a batch dictionary, beside the tensors."""

TEACHER = ("topk_ids", "topk_logprobs")
"""A teacher's K likeliest ids in place of each token and their log-probabilities, as labels not shifted: [n, K] in a
sample; in `extras` of a batch [K, B, S], of a row [K, 1, T]."""
TYPES_OF_TEACHER = dict(zip(TEACHER, (np.int64, np.float32), strict=True))
"""Their types in a sample."""

NO_ENTRY = -1
"""All K ids of a token that has no teacher: it is learned by cross-entropy."""
MOST_MASS = 1.01
"""Maximum sum of the probabilities of a token's entries: those of a teacher in bfloat16 add up to more than 1."""
NO_LOGPROBS = f"the probabilities of {TEACHER[1]} add up to nothing, or to more than 1: give log-probabilities"


Held = TypeVar("Held", bound="OfTensors")


class OfTensors:
    """A value object with tensors in its fields and mappings: they move together, and all else stays on the host."""

    def to(self: Held, device: torch.device | str | int, *, non_blocking: bool = False) -> Held:
        """Move the tensors to a device; with `non_blocking`, copies from pinned memory are asynchronous."""
        return self._changed(lambda tensor: copied(tensor, device, non_blocking=non_blocking))

    def pin_memory(self: Held) -> Held:
        """Copy the tensors to pinned memory, as `DataLoader(pin_memory=True)` asks of every batch."""
        return self._changed(lambda tensor: tensor.pin_memory())

    def _changed(self: Held, change: Callable[[torch.Tensor], torch.Tensor]) -> Held:
        def changed(part: Any) -> Any:
            if isinstance(part, torch.Tensor):
                return change(part)
            if isinstance(part, OfTensors):
                return part._changed(change)
            new = {name: changed(x) for name, x in part.items()} if isinstance(part, Mapping) else {}
            return new if any(x is not part[name] for name, x in new.items()) else part

        holder: Any = self
        before = vars(self)
        after = {field.name: changed(before[field.name]) for field in fields(holder)}
        return replace(holder, **after) if any(x is not before[name] for name, x in after.items()) else self


@final
@dataclass(frozen=True, kw_only=True)
class HostMetadata:
    """Metadata of a batch on the host, so that a step can read it without a host-device sync."""

    lengths: tuple[int, ...]
    """Number of real tokens of each sample."""
    offsets: tuple[int, ...] = ()
    """Column of each sample's first real token in the padded batch; empty: right-padded, all 0."""
    media: MediaTable | None = None
    """Every image, video and audio with its positions; None: not known, read from the tensors instead. On an
    accelerator, this costs one host-device sync for the ids and one for each tensor of grids, sizes or frames."""
    prefixes: tuple[int, ...] = ()
    """Length of each sample's bidirectional prefix in tokens (PaliGemma); empty: not known, read from the batch's
    column instead."""
    num_targets: int | None = None
    """Number of next-token targets (labels that are not -100) of the whole batch; None: not counted."""
    num_distinct_targets: int | None = None
    """Tokens of a row's prefix tree that are a target of at least one sample; None: no tree, or not counted."""
    sample_ids: tuple[int | str, ...] = ()
    """Ids of the samples, if they have ids."""
    channels: tuple[str | None, ...] = ()
    """Name of each sample's data set, None for a sample without one; empty: no sample has one."""
    segments: Segments | None = None
    """The boundaries of a row in a batch dictionary; None for a padded batch and in a `PackedRow`, which holds them."""
    tree: PrefixTree | None = None
    """The prefix tree of a row in a batch dictionary; None: samples share nothing, or a `PackedRow` holds it."""

    @property
    def columns(self) -> tuple[int, ...]:
        """Column of each sample's first real token in the padded batch, B values."""
        return self.offsets or (0,) * len(self.lengths)

    def to(self, *_: Any, **__: Any) -> HostMetadata:
        """Return `self`: metadata stays on the host when a loop calls `.to()` on everything in a batch."""
        return self


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Media(OfTensors):
    """Pixels and grids in sample order, under the names that Hugging Face models use."""

    pixel_values: torch.Tensor | None = None
    """[P, C] concatenated patches of all images; any shape for families whose images have no grids."""
    image_grid_thw: torch.Tensor | None = None
    """[N, 3] int64: frames, rows and columns of patches of each image."""
    pixel_values_videos: torch.Tensor | None = None
    """[P, C] patches of all videos."""
    video_grid_thw: torch.Tensor | None = None
    """[N, 3] int64."""
    second_per_grid_ts: torch.Tensor | None = None
    """[N] seconds from one grid of a video to the next (Qwen2.5-VL)."""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Further tensors under the model's own names (`image_sizes`, `input_features`, ...)."""

    def __repr__(self) -> str:
        return f"Media({', '.join(f'{name} {list(value.shape)}' for name, value in self.to_hf().items())})"

    @property
    def in_words(self) -> str:
        """The numbers of images, videos and audios as text; "" if there are none."""
        counted = {"images": self.image_grid_thw, "videos": self.video_grid_thw, "audios": self.audio_mask}
        return "".join(f", {len(tensor)} {name}" for name, tensor in counted.items() if tensor is not None)

    @property
    def seconds_per_grid(self) -> Any:
        """Seconds from one grid of each video to the next, under either of its two names; None: not given."""
        seconds = self.second_per_grid_ts
        return self.tensors.get("video_second_per_grid") if seconds is None else seconds

    @property
    def audio_mask(self) -> torch.Tensor | None:
        """[N, F]: 1 on the frames of each audio, 0 on padding; None: there is no audio."""
        return self.tensors.get(AUDIO_MASK)

    def to_hf(self) -> dict[str, torch.Tensor]:
        """Return the tensors that are not None, by name."""
        return {name: self.__dict__[name] for name in MEDIA_KEYS if self.__dict__[name] is not None} | {**self.tensors}

    def with_sizes(self, table: MediaTable) -> Media:
        """Return the same media with the tensors of `SIZES` on the host, where the table knows their values."""
        known = {name: table.sizes(kind) for name, kind in SIZES.items()}
        names = [name for name in SIZES if name in self.tensors and known[name]]
        tensors = {name: torch.tensor(known[name], dtype=torch.int64, device="cpu") for name in names}
        return replace(self, tensors={**self.tensors, **tensors}) if names else self

    @classmethod
    def from_hf(cls, batch: Mapping[str, Any], *, names: Collection[str] = ()) -> Media:
        """Read the media from a batch dictionary; `names`: further tensors of the model's family."""
        further = {name: batch[name] for name in names if name not in MEDIA_KEYS and batch.get(name) is not None}
        return cls(**{name: batch.get(name) for name in MEDIA_KEYS}, tensors=further)


MEDIA_KEYS = tuple(f.name for f in fields(Media) if f.name != "tensors")
SIZES = {"image_sizes": IMAGE, "target_sizes": IMAGE, "target_sizes_videos": VIDEO}
"""[N, 2] tensors of rows and columns that tell a vision tower where each image ends, and the kind of their media."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class PaddedBatch(OfTensors):
    """B samples as rows of one width S."""

    input_ids: torch.Tensor
    """[B, S] int64."""
    attention_mask: torch.Tensor
    """[B, S]: 1 (or True) on real tokens, in one unbroken run per row; padding may be on either side."""
    labels: torch.Tensor | None = None
    """[B, S] int64 in Hugging Face's convention: not shifted, -100 on tokens that are not trained on."""
    loss_weights: torch.Tensor | None = None
    """[B, S] floats: the weight of each label in the loss; None: all 1."""
    mm_token_type_ids: torch.Tensor | None = None
    """[B, S]: 0 text, 1 image, 2 video, 3 audio."""
    position_ids: torch.Tensor | None = None
    """[3, B, S] time, height, width, or [4, B, S] with the position in the sample first; [B, S] for a text model. The
    step compares them with the positions it computes, except on padding. None: not given."""
    media: Media = field(default_factory=Media)
    """Pixels and grids in sample order."""
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Further [B, S] or [k, B, S] tensors to pack with the tokens (advantages, reference log-probabilities)."""
    metadata: HostMetadata | None = None
    """Metadata on the host; None: lengths are read from the mask, which costs one host-device sync."""

    def __repr__(self) -> str:
        lengths = None if self.metadata is None else self.metadata.lengths
        if lengths is None and on_host(self.attention_mask):
            lengths = self.attention_mask.sum(1).tolist()
        tokens = ""
        if lengths is not None:
            tokens = f", {sum(lengths)} tokens, {sum(lengths) / max(self.input_ids.numel(), 1):.2%} full"
        return f"PaddedBatch({list(self.input_ids.shape)}{tokens}{self.media.in_words})"

    def to_hf(self) -> dict[str, Any]:
        """Return a dictionary for a DataLoader and for `model(**batch)`; `input_ids` comes first.

        A model without packing would ignore `loss_weights` and a teacher's entries. With these it raises
        (`OnlyPacked`).
        """
        tensors = {name: self.__dict__[name] for name in TOKEN_KEYS if self.__dict__[name] is not None}
        others: dict[str, Any] = {} if self.metadata is None else {METADATA_KEY: self.metadata}
        if self.loss_weights is not None or self.extras.keys() & {*TEACHER}:
            others["use_cache"] = OnlyPacked(_LOSS_IGNORED)
        return {**tensors, **self.extras, **self.media.to_hf(), **others}

    @classmethod
    def from_hf(
        cls, batch: Mapping[str, Any], *, extras: tuple[str, ...] = (), media: Collection[str] = ()
    ) -> PaddedBatch:
        """Invert `to_hf`; `extras` and `media` (`Family.media`) name the further tensors to keep.

        Raises:
            LayoutError: there are no token ids, or the batch has `shift_weights`, which belong to a packed row.
        """
        check_is_batch(batch)
        if batch.get("shift_weights") is not None:
            raise LayoutError("shift_weights belong to a packed row; give a padded batch loss_weights, as its labels")
        return cls(
            **{name: batch.get(name) for name in TOKEN_KEYS},  # pyright: ignore[reportArgumentType]
            extras={name: batch[name] for name in extras},
            media=Media.from_hf(batch, names=media),
            metadata=batch.get(METADATA_KEY),
        )


TOKEN_KEYS = ("input_ids", "attention_mask", "labels", "loss_weights", "mm_token_type_ids", "position_ids")


# ---------------------------------------------------------------------- inputs that only an enabled model may get

_MIXED = (
    "a packed row reached a model without passing through the packed forward, which would mix its samples: call "
    "enable_packing(model) first. If you did, the model's forward was replaced, or its backbone called directly, "
    "afterwards (Liger's fused cross-entropy, TRL's fused head): switch that off. A plain text model of attention "
    "layers alone takes rows of RowCollator"
)
_LOSS_IGNORED = (
    "a batch with loss_weights, or a teacher's topk_ids, reached a model without passing through the packed forward, "
    "which would ignore them: call enable_packing(model) first, or leave them out"
)


@final
@dataclass(frozen=True)
class OnlyPacked:
    """The `use_cache` value of a packed row; it makes a model without packing raise.

    Models of transformers accept every keyword, so a model without packing would treat a row as one sample. But each
    of them evaluates `use_cache` as a bool, and so calls `__bool__` below. An enabled model removes the object from
    its inputs first.
    """

    reason: str = _MIXED
    """Why a model without packing must not compute the batch, and the remedy."""

    def __bool__(self) -> bool:
        """Refuse the batch.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(self.reason)

    def to(self, *_: Any, **__: Any) -> OnlyPacked:
        """Return `self`; it holds no tensors."""
        return self


def check_weights(weights: Any, labels: Any, name: str) -> None:
    """Check that the weights are floats, one for each label, and that no target has the weight 0: it would be counted.

    Raises:
        LayoutError: they are not, there are no labels, or the weight of a target is 0.
    """
    if labels is None:
        raise LayoutError(f"{name} weigh labels, and there are none: give labels too, or leave {name} out")
    if check_is_tensor(weights, name).shape != labels.shape or not weights.is_floating_point():
        seen = f"{weights.dtype} {list(weights.shape)}"
        raise LayoutError(f"{name} must be floats {list(labels.shape)}, one for each label, got {seen}")
    require(
        ((weights != 0) | (labels == IGNORE)).all(),
        f"{name} hold 0 at a label, which would be counted as a target: set labels of weight 0 to -100",
        LayoutError,
    )


# ---------------------------------------------------------------------- the mask


def lengths_from_mask(mask: torch.Tensor) -> HostMetadata:
    """Read the length and first column of every row from a 2D attention mask [B, S]; an empty row has length 0.

    On an accelerator this is the only host-device sync of packing; `HostMetadata` avoids it.

    Raises:
        LayoutError: the mask is not a tensor, is not 2D, holds anything but 0 and 1, or has a hole. Names the row.
    """
    check_is_tensor(mask, "attention_mask")
    if mask.ndim != 2 or not mask.shape[1]:
        raise LayoutError(
            f"attention_mask must be the 2D mask [batch, width] of the tokenizer, got {mask.ndim}D "
            f"{list(mask.shape)}; lengths cannot be read from a 4D attention bias: keep the 2D mask in your collator"
        )
    host = mask.detach().cpu()
    values = (host.double() if host.is_floating_point() else host).numpy()  # numpy has no bfloat16
    # fast path for a tokenizer's mask: viewed as unsigned, negative numbers are large
    is_plain = values.dtype == np.int64 and values.view(np.uint64).max(initial=0) <= 1
    if not is_plain and (odd := (values != 0) & (values != 1)).any():
        row, column = (int(i) for i in np.argwhere(odd)[0])
        raise LayoutError(
            f"row {row}: attention_mask holds {values[row, column]!s} at column {column}; only 0 (pad) and 1 (real) "
            "are meaningful: not additive biases (0 and -inf), not sample numbers (1, 1, 2, 2)"
        )
    real = values.astype(bool)
    lengths, offsets = values.sum(1, dtype=np.int64), real.argmax(1)
    rises = np.count_nonzero(real[:, 0]) + np.count_nonzero(real[:, 1:] > real[:, :-1])
    if rises != np.count_nonzero(lengths):  # a row without a hole rises from 0 to 1 at most once
        broken = real & (np.arange(mask.shape[1]) >= (offsets + lengths)[:, None])  # behind an unbroken run
        row = int(broken.any(1).argmax())
        column = int(offsets[row] + (~real[row, offsets[row] :]).argmax())
        raise LayoutError(
            f"row {row}: attention_mask has a hole at column {column}, between real tokens; the real tokens of a "
            "sample must be one unbroken run: remove the masked tokens from the sample"
        )
    return HostMetadata(lengths=tuple(lengths.tolist()), offsets=tuple(offsets.tolist()))


# ---------------------------------------------------------------------- checks of a padded batch


def checked_metadata(batch: PaddedBatch, *, keep_empty: bool) -> HostMetadata:
    """Check a padded batch, and return its metadata; without any, those that its mask gives.

    Raises:
        LayoutError: see `vlmpack.layout.pack`.
    """
    _check_shapes(batch)
    known, mask = batch.metadata, batch.attention_mask
    read = lengths_from_mask(mask) if known is None or on_host(mask) else None  # to read it on a device is a sync
    if known is not None and not _fits(known, batch.input_ids.shape, read):
        raise LayoutError(
            f"the host's lengths {list(known.lengths)} do not describe this attention_mask of {list(mask.shape)}; was "
            "the batch split, concatenated or padded again on its way (accelerate: set dispatch_batches=False)?"
        )
    metadata = known or read
    assert metadata is not None
    if 0 in metadata.lengths and not keep_empty:
        raise LayoutError(
            f"row {metadata.lengths.index(0)}: attention_mask is all zeros, there is nothing to pack; leave the sample "
            "out, or pass keep_empty=True (in StepConfig, for an enabled model) to keep it as a segment of length 0"
        )
    _check_padding(batch, metadata)
    if batch.loss_weights is not None:
        check_weights(batch.loss_weights, batch.labels, "loss_weights")
    return metadata


def _check_shapes(batch: PaddedBatch) -> None:
    shape = check_is_tensor(batch.input_ids, "input_ids").shape
    if len(shape) != 2:
        raise LayoutError(f"input_ids must be [batch, width], got {list(shape)}")
    mask_shape = check_is_tensor(batch.attention_mask, "attention_mask").shape
    if len(mask_shape) == 2 and mask_shape != shape:
        raise LayoutError(
            f"attention_mask is {list(mask_shape)} but input_ids is {list(shape)}; both come from one call of the "
            "tokenizer: pad them together"
        )
    named = {"labels": batch.labels, "mm_token_type_ids": batch.mm_token_type_ids, "position_ids": batch.position_ids}
    for name, tensor in {**named, **batch.extras}.items():
        if tensor is None:
            continue
        whole = name in ("labels", "mm_token_type_ids")  # others may be [k, B, S]
        seen = check_is_tensor(tensor, name).shape
        if (seen if whole else seen[-2:]) != shape:
            raise LayoutError(f"{name} is {list(seen)} but input_ids is {list(shape)}")
    for name, tensor in (("input_ids", batch.input_ids), ("labels", batch.labels)):
        if tensor is not None:
            whole_numbers(tensor, name)


def _fits(known: HostMetadata, shape: Sequence[int], read: HostMetadata | None) -> bool:
    """Return whether metadata describe a batch of this shape, whose mask was `read` (None: it was not)."""
    rows, width = shape
    lengths, columns = known.lengths, known.columns
    media = () if known.media is None else known.media.media
    return (
        len(lengths) == len(columns) == rows
        and all(at + n <= width for at, n in zip(columns, lengths, strict=True))
        and all(m.sample < rows and m.runs[-1][1] <= lengths[m.sample] for m in media if m.runs)
        and (read is None or (read.lengths, read.columns) == (lengths, columns))
    )


@outside_graph
def _check_padding(batch: PaddedBatch, metadata: HostMetadata) -> None:
    """Refuse labels and media on padding. Packing drops them, but trainers count the labels, and towers the media."""
    mask, types, labels, known = batch.attention_mask, batch.mm_token_type_ids, batch.labels, batch.metadata
    if sum(metadata.lengths) == mask.numel():
        return

    def where(place: int) -> str:
        return f"row {place // mask.shape[1]}"

    if known is None and types is not None:
        message = (
            "attention_mask hides tokens of images, videos or audio, but these would still be used; leave the sample's "
            "media out, or unmask its tokens"
        )
        require((types == 0) | (mask != 0), message, LayoutError, where=where)
    # If the metadata counts targets, the step compares that count with the row's, which also finds labels on padding.
    if labels is None or (known is not None and known.num_targets is not None):
        return
    if on_host(labels):  # fast path: a look at the padding alone
        rows = zip(labels.numpy(), metadata.columns, metadata.lengths, strict=True)
        padding = [piece for row, start, n in rows for piece in (row[:start], row[start + n :])]
        if (np.concatenate(padding) == IGNORE).all():
            return
    message = (
        "labels hold targets where attention_mask is 0, which belong to no sample; set them to -100 there: "
        "labels.masked_fill(mask == 0, -100)"
    )
    require((labels == IGNORE) | (mask != 0), message, LayoutError, where=where)


def check_is_batch(batch: Mapping[str, Any]) -> None:
    """Raise a `LayoutError` for a dictionary without token ids, for example a raw sample or a data set's columns."""
    if batch.get("input_ids") is None:
        columns = ", ".join(map(str, batch)) or "nothing"
        raise LayoutError(
            f"a batch needs input_ids, but this one has {columns}: a collator makes batches of samples (messages and "
            "images, texts): VLMCollator(processor, layout='packed')([sample, ...])"
        )


def check_tensor(
    name: str, value: Any, shape: Sequence[int | None], what: str, *, dtypes: Collection[torch.dtype] = ()
) -> None:
    """Check the shape and dtype of a tensor.

    Args:
        name: name of the tensor, for the message.
        value: the tensor to check.
        shape: expected size of each axis; None: any size.
        what: the axes and values in words, for the message.
        dtypes: allowed dtypes; (): any.

    Raises:
        LayoutError: it is not a tensor, or has another shape or dtype.
    """
    is_tensor = isinstance(value, torch.Tensor)
    fits = is_tensor and value.ndim == len(shape) and (not dtypes or value.dtype in dtypes)
    if not fits or any(expected not in (None, n) for expected, n in zip(shape, value.shape, strict=True)):
        seen = f"{value.dtype} {list(value.shape)}" if is_tensor else type(value).__name__
        raise LayoutError(
            f"{name} must be a tensor {what}, got {seen}; keep what the model's own processor gives with "
            "return_tensors='pt'"
        )


def check_is_tensor(value: Any, name: str) -> torch.Tensor:
    """Return a column that is a tensor.

    Raises:
        LayoutError: it is missing, or is still a list or an array.
    """
    if not isinstance(value, torch.Tensor):
        raise LayoutError(
            f"{name} must be a tensor [batch, width], got {type(value).__name__}; keep what the tokenizer gives with "
            "return_tensors='pt' (lengths come from its 2D mask alone)"
        )
    return value


_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8)
"""Dtypes of token ids and labels: bools are masks, and unsigned dtypes cannot hold -100."""


def whole_numbers(value: Any, name: str) -> torch.Tensor:
    """Return token ids or labels as int64, without a copy if they already are.

    Args:
        value: the column [..., batch, width].
        name: name of the column, for the message.

    Raises:
        LayoutError: `value` is not a tensor of signed whole numbers.
    """
    if check_is_tensor(value, name).dtype not in _WHOLE:
        raise LayoutError(
            f"{name} is {value.dtype}, but must hold whole numbers with a sign (int64): labels are token ids, -100 "
            "where nothing is trained on, not a mask of what is trained on"
        )
    return value.long()


GRIDS = {"image_grid_thw": IMAGE, "video_grid_thw": VIDEO}
"""[N, 3] tensors of grids, and the kind of their media."""
AUDIO_MASK = "feature_attention_mask"
SECONDS = "second_per_grid_ts"
_ROUNDED = 1e-2
"""Relative tolerance when seconds are compared with the metadata: bfloat16 training loops round every tensor."""


def media_values(name: str, tensor: Any) -> torch.Tensor:
    """Check a tensor that describes media, and return one entry for each medium, on the tensor's device.

    Args:
        name: one of `GRIDS` (the result is the tensor, [N, 3]), `SIZES` (likewise, [N, 2]), `AUDIO_MASK` (number of
            log-mel frames, [N]) or `SECONDS` (seconds from one grid of a video to the next, float32 [N]).
        tensor: its values; seconds may also be a list.

    Raises:
        LayoutError: the tensor is malformed.
    """
    if name in GRIDS:
        what = "[N, 3] of whole numbers (frames, rows, columns of each)"
        check_tensor(name, tensor, (None, 3), what, dtypes=(torch.int64, torch.int32))
    elif name == AUDIO_MASK:
        what = "[audios, frames] of 0 and 1"
        check_tensor(name, tensor, (None, None), what, dtypes=(torch.bool, torch.uint8, *_WHOLE))
        message = f"{name} must hold 0 (padding) and 1 (a frame of the audio) and nothing else"
        require(((tensor == 0) | (tensor == 1)).all(), message, LayoutError)
        return tensor.sum(1)
    elif name == SECONDS:
        try:
            values = torch.as_tensor(tensor)
        except (TypeError, ValueError, RuntimeError):
            values = torch.zeros(1, 0, 0)
        is_number = not values.is_complex() and values.dtype != torch.bool
        if values.ndim not in (1, 2) or values.shape[1:].numel() != 1 or not is_number:
            seen = list(tensor.shape) if isinstance(tensor, torch.Tensor) else repr(tensor)[:80]
            raise LayoutError(
                f"{name} (Qwen-Omni: video_second_per_grid) must be one number for each video, in a list or a tensor "
                f"[N] or [N, 1]; got {seen}"
            )
        return values.reshape(-1).float()
    return torch.as_tensor(tensor)


def compare_media(held: MediaTable, media: Media) -> None:
    """Compare the records of the media with the grids, frames, sizes and seconds in the tensors.

    Tensors on a device are compared there. Seconds and sizes are compared only if the records have them.

    Raises:
        LayoutError: records and tensors differ, or a tensor is missing.
    """
    tensors, seconds = media.to_hf(), media.seconds_per_grid
    tensors |= {} if seconds is None else {SECONDS: seconds}
    needed = {name: held.grids(kind) for name, kind in GRIDS.items()}
    needed |= {AUDIO_MASK: tuple(medium.frames for medium in held.audios)}
    for name, known in needed.items():
        if known and name not in tensors:
            raise LayoutError(
                f"the host metadata has {len(known)} media that {name} describes, but the batch has no {name}; give "
                "the media of every sample, or leave the metadata out"
            )
    others = {name: held.sizes(kind) for name, kind in SIZES.items()}
    others |= {SECONDS: tuple(medium.seconds for medium in held.videos if medium.seconds is not None)}
    for name, known in {**needed, **{name: known for name, known in others.items() if known}}.items():
        if name in tensors:
            _require_same(media_values(name, tensors[name]), known, name)


def _require_same(values: torch.Tensor, known: Sequence[Any], name: str) -> None:
    """Compare the entries of a media tensor with those of the host metadata, on the device of the tensor."""
    dtype = np.float32 if values.is_floating_point() else np.int64
    expected = to_device(np.asarray(known, dtype).reshape(-1, *values.shape[1:]), values.device)
    if values.shape != expected.shape:
        raise LayoutError(
            f"the metadata has {len(known)} media but {name} is {list(values.shape)}; was the batch split "
            "or concatenated on its way (accelerate: set dispatch_batches=False)?"
        )
    is_same = torch.isclose(values, expected, rtol=_ROUNDED) if dtype is np.float32 else values == expected
    message = (
        f"{name} is not what the host metadata ({METADATA_KEY!r}) say of this batch, so media were changed behind the "
        "collator; reorder samples before it, or leave the metadata out of the batch"
    )
    require(is_same.all(), message, LayoutError)
