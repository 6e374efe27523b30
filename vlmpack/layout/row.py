"""The packed row: every real token of a batch in one [1, T] sequence, with the boundaries of its samples.

`pack` copies or gathers each tensor of a [B, S] batch once, and `unpack` inverts it. A model computes rows without
gaps: `without_gaps` removes padding between samples, and `Compact.spread` moves results back to the original positions.

`roll_left` moves row tensors to the left inside each segment; nothing crosses a boundary. Labels are shifted this way.
Lengths [3, 5, 2], padded to a multiple of 4, fill 0:

    row        1 2 3 .  4 5 6 7 8 . . .  9 10 . .
    depth 1    2 3 0 0  5 6 7 8 0 0 0 0  10 0 0 0
    depth 2    3 0 0 0  6 7 8 0 0 0 0 0  0  0 0 0
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np
import torch

from vlmpack.errors import LayoutError, check_kind
from vlmpack.layout.batch import (
    IGNORE,
    METADATA_KEY,
    TEACHER,
    HostMetadata,
    Media,
    OfTensors,
    OnlyPacked,
    PaddedBatch,
    check_is_batch,
    check_is_tensor,
    check_weights,
    checked_metadata,
    whole_numbers,
)
from vlmpack.layout.device import on_host, outside_graph, require, to_device
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.segments import Segments, SlotRule, checked_boundaries, ranges

COLUMNS = ("input_ids", "shift_labels", "shift_weights", "position_ids", "mm_token_type_ids")
"""Fields of `PackedRow` with one entry for each token, along the last axis; `extras` holds further ones."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRow(OfTensors):
    """One [1, T] row of packed samples."""

    input_ids: torch.Tensor
    """[1, T] int64."""
    segments: Segments
    """Boundaries of the samples in the row."""
    shift_labels: torch.Tensor | None = None
    """[1, T] int64: the target of each token, already shifted inside its segment; -100: no target."""
    shift_weights: torch.Tensor | None = None
    """[1, T] floats: the weight of each target in the loss, shifted like the targets; None: all 1."""
    position_ids: torch.Tensor | None = None
    """[3, 1, T] time, height, width, or [4, 1, T] with the position in the sample first; [1, T] for a text model. The
    step compares them with the positions it computes. None: not given."""
    mm_token_type_ids: torch.Tensor | None = None
    """[1, T]: 0 text, 1 image, 2 video, 3 audio."""
    media: Media = field(default_factory=Media)
    """Pixels and grids in row order; with a `tree`, only the media that it computes, in the tree's order."""
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Further [1, T] or [k, 1, T] tensors."""
    metadata: HostMetadata | None = None
    """Metadata on the host besides the boundaries: media, target count, sample ids; with a `tree` too, it describes all
    samples in full."""
    tree: PrefixTree | None = None
    """Shared prefixes of the samples (`share`); None: each sample goes through the model in full."""

    def __post_init__(self) -> None:
        if not isinstance(self.segments, Segments):
            check_kind("segments", self.segments, Segments, "Segments.from_lengths([3, 2])")
        shape, labels = (1, self.segments.total), self.shift_labels
        for name, column in (("input_ids", self.input_ids), ("shift_labels", labels)):
            if column is not None:
                object.__setattr__(self, name, whole_numbers(column, name))
        if self.input_ids.shape != shape:
            raise LayoutError(
                f"a packed row is {list(shape)} by its boundaries but input_ids is {list(self.input_ids.shape)}; was "
                "the batch split or concatenated on its way (accelerate: set dispatch_batches=False)?"
            )
        if not self.segments.total:
            raise LayoutError(
                "a packed row of no tokens cannot go through a model; leave it out, or give it a fixed width"
            )
        if labels is not None and labels.shape != shape:
            raise LayoutError(f"shift_labels is {list(labels.shape)}, but the row is {list(shape)}")
        if self.shift_weights is not None:
            check_weights(self.shift_weights, self.shift_labels, "shift_weights")
        if self.tree is not None and self.tree.segments != self.segments:
            raise LayoutError(
                f"the row's tree is of samples of {list(self.tree.segments.lengths)[:9]} tokens, the row of "
                f"{list(self.segments.lengths)[:9]}; share a row after it is packed, and not before"
            )
        metadata = self.metadata
        if metadata is not None and (metadata.segments is not None or metadata.tree is not None):  # stored once
            object.__setattr__(self, "metadata", replace(metadata, segments=None, tree=None))

    def __repr__(self) -> str:
        where = self.segments
        return (
            f"PackedRow({list(self.input_ids.shape)}, {where.num_samples} samples, {where.num_tokens} tokens, "
            f"{where.fill:.2%} full{self.media.in_words}"
            f"{'' if self.tree is None else f', shared in {self.tree.num_tokens} tokens'})"
        )

    @property
    def moe_padding_mask(self) -> torch.Tensor:
        """[1, T] bool: True on padding, which a router must not count."""
        return self.segments.padding_mask(self.input_ids.device)[None]

    @property
    def known_metadata(self) -> HostMetadata:
        """`metadata`, or if it is None, metadata with the lengths from the boundaries."""
        return self.metadata or HostMetadata(lengths=self.segments.lengths[: self.segments.num_samples])

    def to_hf(self) -> dict[str, Any]:
        """Return a dictionary for a DataLoader and for `model(**batch)` of a model with packing enabled.

        Labels are unshifted, with each segment's first label masked, so that a trainer that counts `labels[..., 1:]`
        counts every target once. A model without packing refuses the dictionary (`OnlyPacked`), unless the row is a
        single sample without padding, weights and teacher, which any model computes correctly.

        Raises:
            LayoutError: the last token of a segment has a target, which unshifted labels cannot express.
        """
        batch = self.step_inputs()
        if batch.pop("shift_labels") is not None:
            batch["labels"] = self.labels
        alone = self.segments.num_samples == 1 and not self.segments.has_padding and self.shift_weights is None
        alone = alone and not self.extras.keys() & {*TEACHER}
        return batch if alone else {**batch, "use_cache": OnlyPacked()}

    @property
    def labels(self) -> torch.Tensor | None:
        """int64 [1, T]: unshifted labels in Hugging Face's convention; None if there are no `shift_labels`.

        Raises:
            LayoutError: the last token of a segment has a target, which unshifted labels cannot express.
        """
        if self.shift_labels is None:
            return None
        ends = without_successor(self.segments, 1, self.shift_labels.device)
        message = (
            "the last token of a segment has a target in shift_labels: set it to -100, as shift_labels(labels, "
            "segments) does; or, if it is a token that was left out of the row, hand the row itself to PackedStep"
        )
        require((self.shift_labels[0].index_select(0, ends) == IGNORE).all(), message, LayoutError)
        return unshift_labels(self.shift_labels, self.segments)

    def step_inputs(self) -> dict[str, Any]:
        """Return the dictionary of `to_hf` with `shift_labels` instead of `labels`, and without `OnlyPacked`.

        `input_ids` comes first.
        """
        names = ("input_ids", "mm_token_type_ids", "position_ids")
        return {
            **{name: self.__dict__[name] for name in names if self.__dict__[name] is not None},
            "shift_labels": self.shift_labels,
            **({} if self.shift_weights is None else {"shift_weights": self.shift_weights}),
            "moe_padding_mask": self.moe_padding_mask,
            "cu_seqlens_q": self.segments.cu_seqlens(),
            "cu_seqlens_q_padded": self.segments.cu_seqlens_padded(),
            **self.extras,
            **self.media.to_hf(),
            METADATA_KEY: replace(self.known_metadata, segments=self.segments, tree=self.tree),
        }

    @classmethod
    def from_hf(
        cls, batch: Mapping[str, Any], *, extras: tuple[str, ...] = (), media: Collection[str] = ()
    ) -> PackedRow:
        """Invert `to_hf`; `extras` and `media` (`Family.media`) name the further tensors to keep.

        Boundaries come from the host metadata if the batch has it, otherwise from `cu_seqlens_q` and
        `cu_seqlens_q_padded` (tensors or lists), which costs a host-device sync if they are on a device.

        Raises:
            LayoutError: token ids are missing; boundaries are missing, impossible, different from the metadata's, or
                do not say where the padding is; `labels` and `shift_labels` contradict each other; there are labels
                on padding; token columns are not [1, T]; or the batch has `loss_weights`, which belong to a padded
                batch.
        """
        check_is_batch(batch)
        if batch.get("loss_weights") is not None:
            raise LayoutError("loss_weights belong to a padded batch; give a packed row shift_weights, as shift_labels")
        input_ids = batch["input_ids"]
        metadata: HostMetadata | None = batch.get(METADATA_KEY)
        segments = metadata.segments if metadata is not None else None
        if segments is None:
            segments = _segments_from(batch, total=input_ids.shape[-1])
        else:
            _check_boundaries(batch, segments)
        return cls(
            input_ids=input_ids,
            segments=segments,
            shift_labels=_shifted(batch, segments),
            shift_weights=batch.get("shift_weights"),
            position_ids=batch.get("position_ids"),
            mm_token_type_ids=batch.get("mm_token_type_ids"),
            extras={name: batch[name] for name in extras},
            media=Media.from_hf(batch, names=media),
            metadata=metadata,
            tree=None if metadata is None else metadata.tree,
        )


def _segments_from(batch: Mapping[str, Any], *, total: int) -> Segments:
    real = batch.get("cu_seqlens_q")
    if real is None:
        raise LayoutError("a packed row needs its boundaries: cu_seqlens_q (and cu_seqlens_q_padded if it has gaps)")
    segments = Segments.from_boundaries(real, batch.get("cu_seqlens_q_padded"), total=total)
    placed = any(batch.get(name) is not None for name in ("cu_seqlens_q_padded", "moe_padding_mask"))
    if segments.has_padding and not placed:
        raise LayoutError(
            f"cu_seqlens_q ends at {segments.num_tokens}, but the row is {total} tokens wide, and nothing says whether "
            "its padding lies between the samples or behind the last one: give cu_seqlens_q_padded too (the same "
            "boundaries, if all padding lies behind)"
        )
    return segments


def _check_boundaries(batch: Mapping[str, Any], segments: Segments) -> None:
    """Compare boundaries in the batch with those of the metadata; boundaries on a device are compared there."""
    for name, known, on_device in (
        ("cu_seqlens_q", segments.real, segments.cu_seqlens),
        ("cu_seqlens_q_padded", segments.stride, segments.cu_seqlens_padded),
    ):
        if (values := batch.get(name)) is None:
            continue
        message = (
            f"{name} differs from the boundaries {list(known)[:9]} that the host metadata ({METADATA_KEY!r}) say of "
            "the row; was the batch split or concatenated on its way (accelerate: set dispatch_batches=False)? If you "
            "changed the row, leave its metadata out"
        )
        if isinstance(values, torch.Tensor) and values.shape == (len(known),):
            require((values == on_device(values.device)).all(), message, LayoutError)
        elif checked_boundaries(values, name) != known:
            raise LayoutError(message)


def _shifted(batch: Mapping[str, Any], segments: Segments) -> torch.Tensor | None:
    shifted, labels = batch.get("shift_labels"), batch.get("labels")
    for name, targets in (("shift_labels", shifted), ("labels", labels)):
        if targets is not None and whole_numbers(targets, name).shape != (1, segments.total):
            raise LayoutError(f"{name} is {list(targets.shape)}, but the row is [1, {segments.total}]")
    if labels is None:
        return shifted
    check_none_on_padding(
        labels,
        segments,
        "labels of the row hold targets between its samples or behind the last one, in no sample; set them "
        "to -100 there, or give the boundary that is missing in cu_seqlens_q (and, of a row with gaps, "
        "cu_seqlens_q_padded)",
    )
    targets = shift_labels(labels, segments)
    if shifted is not None:
        message = (
            "labels and shift_labels of the row say different things: shift_labels[t] has to be labels[t + 1] inside "
            "each sample, and -100 at its last token and on padding; leave one of the two out"
        )
        require((targets == shifted).all(), message, LayoutError)
    return targets


# ---------------------------------------------------------------------- pack and unpack


def pack(
    batch: PaddedBatch, *, rule: SlotRule | None = None, keep_empty: bool = False, pad_token_id: int = 0
) -> PackedRow:
    """Concatenate the real tokens of a padded batch into one row [1, T].

    Lengths come from the 2D mask alone, or from `batch.metadata`, which the collator read from the same mask. A
    left-padded batch gives the same row as a right-padded one. Media pass through unchanged, because sample order and
    row order are the same. On a device, packing is one gather per tensor. On the host, whole samples are copied, which
    is three to four times as fast as a gather.

    Args:
        batch: the padded batch.
        rule: padded lengths of the samples and width of the row; None: no padding at all.
        keep_empty: keep all-zero rows as segments of length 0 (fixed batch shapes) instead of refusing them.
        pad_token_id: token id of padding. Nothing reads it, but it must be a valid row of the embedding.

    Raises:
        LayoutError: the mask is not a usable 2D mask, disagrees with `input_ids` or `batch.metadata`, has an all-zero
            row (with `keep_empty`: has only all-zero rows, and the rule gives the row no width), or hides media or
            labels. Names the row, what was seen and the remedy.
    """
    if not isinstance(batch, PaddedBatch):
        check_kind("batch", batch, PaddedBatch, "PaddedBatch.from_hf(processor(...))")
    metadata = checked_metadata(batch, keep_empty=keep_empty)
    columns, segments = metadata.columns, Segments.from_lengths(metadata.lengths, rule)
    if not segments.total:
        raise LayoutError(
            f"attention_mask is all zeros in all {len(metadata.lengths)} rows, and a row of no tokens cannot go "
            "through a model; leave the batch out, or give every row a fixed width with SlotRule(pad_to=...)"
        )
    take = _Take(segments, columns, batch.input_ids)

    def optional(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else take(tensor, 0)

    return PackedRow(
        input_ids=take(batch.input_ids.long(), pad_token_id),
        segments=segments,
        shift_labels=None if batch.labels is None else take.targets(batch.labels.long()),
        shift_weights=None if batch.loss_weights is None else roll_left(take(batch.loss_weights, 0), segments, fill=0),
        position_ids=optional(batch.position_ids),
        mm_token_type_ids=optional(batch.mm_token_type_ids),
        extras={name: take(tensor, 0) for name, tensor in batch.extras.items()},
        media=batch.media,
        metadata=metadata,
    )


def unpack(
    tensor: torch.Tensor,
    segments: Segments,
    *,
    token_dim: int = 1,
    width: int | None = None,
    offsets: Sequence[int] = (),
    fill: float = 0,
) -> torch.Tensor:
    """Invert `pack` for one tensor: turn `[1, T, ...]` into `[B, S, ...]`. Differentiable.

    Args:
        tensor: a row tensor: [1, T, ...], or [k, 1, T, ...] with `token_dim=2`.
        segments: the row's boundaries; B is `segments.num_samples`.
        token_dim: the dimension of length T; the dimension before it has length 1.
        width: S in tokens; None: the longest sample.
        offsets: first column of each sample (`HostMetadata.offsets`); empty: right-padded.
        fill: value on padding.

    Raises:
        LayoutError: the tensor is not a row of these segments, `offsets` are not one column for each sample, or a
            sample does not fit `width`.
    """
    check_kind("tensor", tensor, torch.Tensor, "row.input_ids; unpack takes one tensor at a time")
    check_kind("segments", segments, Segments, "row.segments")
    if tensor.shape[token_dim - 1 : token_dim + 1] != (1, segments.total):
        raise LayoutError(
            f"unpack: expected 1 x {segments.total} tokens at dimensions {token_dim - 1} and {token_dim}, "
            f"got a tensor of shape {list(tensor.shape)}"
        )
    width = segments.max_length if width is None else width
    index, padding = _batch_index(segments, tuple(offsets), width=width, device=tensor.device)
    flat = tensor.squeeze(token_dim - 1).index_select(token_dim - 1, index)
    shape = (*tensor.shape[: token_dim - 1], segments.num_samples, width, *tensor.shape[token_dim + 1 :])
    keep = padding.logical_not().view(segments.num_samples, width, *(1,) * (tensor.ndim - token_dim - 1))
    return torch.where(keep, flat.view(shape), torch.full((), fill, dtype=tensor.dtype, device=tensor.device))


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Compact:
    """A row as a model computes it: all samples without gaps, then the padding."""

    row: PackedRow
    """The row without gaps, T' tokens."""
    given: PackedRow
    """The original row, T tokens."""
    index: torch.Tensor | None = None
    """int64 [T']: position of each token in the original row; None: positions are the same."""

    def spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """Move results [1, T', ...] to the positions of the original row [1, T, ...], 0 on padding. Differentiable."""
        if self.index is None:
            return tensor
        segments = self.given.segments
        row = tensor.new_zeros(1, segments.total, *tensor.shape[2:])
        return row.index_copy(1, self.index[: segments.num_tokens], tensor[:, : segments.num_tokens])

    def place(self, index: torch.Tensor) -> torch.Tensor:
        """Return the positions of these tokens in the original row, int64."""
        return index if self.index is None else self.index.index_select(0, index)


@outside_graph
def without_gaps(row: PackedRow, rule: SlotRule | None = None) -> Compact:
    """Remove the padding between the samples of a row; see `Segments.without_gaps`.

    Raises:
        LayoutError: a column of the row is no tensor, or not as wide as the row.
    """
    segments = row.segments.without_gaps(rule)
    if segments is row.segments:
        return Compact(row=row, given=row)
    if row.segments.slots == row.segments.lengths:
        return Compact(row=replace(row, segments=segments), given=row)

    def index_on(device: torch.device) -> torch.Tensor:
        return row.segments.derived(("without gaps", segments.total), device, lambda: _kept(row, segments))

    kept = replace(row, segments=segments, **columns_at(row, index_on))
    return Compact(row=kept, given=row, index=index_on(row.input_ids.device))


def columns_at(row: PackedRow, index_on: Callable[[torch.device], torch.Tensor]) -> dict[str, Any]:
    """Return the row's columns, and its `extras`, at some of its tokens; `index_on` gives their positions on a device.

    Raises:
        LayoutError: a column is no tensor, or not as wide as the row.
    """

    def take(name: str, column: Any) -> torch.Tensor:
        if check_is_tensor(column, name).shape[-1:] != (row.segments.total,):
            raise LayoutError(f"{name} is {list(column.shape)}, but the row has {row.segments.total} tokens")
        return column.index_select(-1, index_on(column.device))

    given = {name: getattr(row, name) for name in COLUMNS}
    taken = {name: take(name, column) for name, column in given.items() if column is not None}
    return {**taken, "extras": {name: take(name, column) for name, column in row.extras.items()}}


def _kept(row: PackedRow, segments: Segments) -> np.ndarray:
    """int64 [T']: positions of the real tokens, then of as much padding as the row keeps."""
    padding = np.flatnonzero(row.segments.padding_mask().numpy())
    return np.concatenate([row.segments.real_index().numpy(), padding])[: segments.total]


_COPIED = frozenset({torch.int64, torch.int32, torch.float64, torch.float32, torch.float16, torch.bool})


@final
class _Take:
    """Gather the real tokens of [..., B, S] tensors into rows [..., 1, T]."""

    def __init__(self, segments: Segments, offsets: Sequence[int], input_ids: torch.Tensor) -> None:
        self._segments, self._on_host = segments, on_host(input_ids)
        self._firsts = [row * input_ids.shape[1] + offset for row, offset in enumerate(offsets)]
        self._index: torch.Tensor | None = None

    def __call__(self, tensor: torch.Tensor, fill: int) -> torch.Tensor:
        """Copy tensors on the host that numpy reads, gather all others; padding gets `fill`."""
        if self._on_host and tensor.dtype in _COPIED and not tensor.requires_grad:
            return self._joined(tensor, fill)
        if self._index is None:
            self._index = self._row_index(tensor.device)
        row = tensor.flatten(-2).index_select(-1, self._index).unsqueeze(-2)
        return row.masked_fill_(self._segments.padding_mask(row.device), fill) if self._segments.has_padding else row

    def targets(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the row's `shift_labels` from the batch's `labels`; on the host, copying and shifting are one pass."""
        if self._on_host:
            return self._joined(labels, IGNORE, ahead=1)
        return shift_labels(self(labels, IGNORE), self._segments)

    @outside_graph
    def _joined(self, tensor: torch.Tensor, fill: int, *, ahead: int = 0) -> torch.Tensor:
        """Concatenate whole samples at memory speed; a gather on the host is four times slower.

        With `ahead`, each position gets the token `ahead` positions later in its sample, or `fill` if there is none.
        """
        batch, segments = tensor.numpy(), self._segments
        flat = batch.reshape(*batch.shape[:-2], -1)
        tail = segments.total - sum(segments.slots)
        missing = [slot - n + min(ahead, n) for n, slot in zip(segments.lengths, segments.slots, strict=True)]
        padding = np.full((*flat.shape[:-1], max(tail, *missing)), fill, flat.dtype)
        pieces = []
        for first, n, absent in zip(self._firsts, segments.lengths, missing, strict=False):
            pieces.append(flat[..., first + ahead : first + n])
            if absent:
                pieces.append(padding[..., :absent])
        pieces.append(padding[..., :tail])
        return torch.from_numpy(np.concatenate(pieces, axis=-1)).unsqueeze(-2)

    @outside_graph
    def _row_index(self, device: torch.device) -> torch.Tensor:
        """int64 [T]: source of each row token in the flat [B * S] batch; 0 on padding."""
        lengths = np.asarray(self._segments.lengths[: len(self._firsts)], np.int64)
        index = np.zeros(self._segments.total, np.int64)
        index[self._segments.real_index().numpy()] = ranges(np.asarray(self._firsts), lengths)
        return to_device(index, device)


@outside_graph
def _batch_index(
    segments: Segments, offsets: tuple[int, ...], *, width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(index, padding), both [B * S]: source of each batch position in the row, and True where it is padding."""
    if offsets and len(offsets) != segments.num_samples:
        raise LayoutError(f"unpack: {len(offsets)} offsets for the {segments.num_samples} samples of the row")
    columns = np.asarray(offsets or (0,) * segments.num_samples)
    if columns.dtype.kind not in "iu" or columns.min(initial=0) < 0:
        raise LayoutError(f"unpack: offsets are columns of the batch, whole numbers from 0, got {list(offsets)[:9]}")
    lengths = np.asarray(segments.lengths[: segments.num_samples], np.int64)
    ends = columns + lengths
    if ends.size and ends.max() > width:
        row = int(ends.argmax())
        raise LayoutError(f"row {row}: {lengths[row]} tokens do not fit width {width}; unpack with a larger one")
    target = ranges(width * np.arange(segments.num_samples) + columns, lengths)
    index, padding = np.zeros(segments.num_samples * width, np.int64), np.ones(segments.num_samples * width, bool)
    index[target], padding[target] = segments.real_index().numpy(), False
    return to_device(index, device), to_device(padding, device)


# ---------------------------------------------------------------------- roll left and shift labels


def roll_left(
    row_tensor: torch.Tensor, segments: Segments, *, depth: int = 1, fill: float, token_dim: int = -1
) -> torch.Tensor:
    """Set `out[..., i] = row_tensor[..., i + depth]` inside a segment's real tokens, and `fill` everywhere else.

    Rolling by 1 twice is rolling by 2. Differentiable; no host-device sync.

    Args:
        row_tensor: [1, T], [k, 1, T], or any other shape with the row's T tokens along `token_dim`; any dtype.
        segments: the row's boundaries, which may have gaps, a tail and repeated boundaries.
        depth: number of tokens to move by, at least 1.
        fill: value of padding and of the last `depth` tokens of a segment: 0, True for a padding mask, -100 for labels.
        token_dim: the dimension of length T.

    Raises:
        LayoutError: the tensor is not a row of these segments, or `depth` is below 1.
    """
    if row_tensor.shape[token_dim] != segments.total:
        raise LayoutError(
            f"roll_left: the row is {segments.total} tokens wide by its boundaries, the tensor "
            f"{list(row_tensor.shape)} has {row_tensor.shape[token_dim]} at dimension {token_dim}; "
            "a part of a row is rolled with its halo"
        )
    ends = without_successor(segments, depth, row_tensor.device)
    return torch.roll(row_tensor, -depth, dims=token_dim).index_fill_(token_dim, ends, fill)


@outside_graph
def without_successor(segments: Segments, depth: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the positions with no token of the same segment `depth` tokens later, and all padding: int64 [n].

    Raises:
        LayoutError: `depth` is below 1.
    """
    if depth < 1:
        raise LayoutError(f"a row is rolled left by at least 1 token, got depth={depth}; the row itself is depth 0")
    return segments.derived(("without_successor", depth), device, lambda: _without_successor(segments, depth))


def shift_labels(labels: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Return a row's targets: `out[..., i] = labels[..., i + 1]` inside a segment, -100 on last tokens and padding.

    Args:
        labels: [1, T] int64, not shifted.
        segments: the row's boundaries.
    """
    return roll_left(labels, segments, depth=1, fill=IGNORE)


def unshift_labels(shifted: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Invert `shift_labels`; each segment's first label, which no token predicts, becomes -100."""
    is_first = segments.position_in_segment(shifted.device) == 0  # or padding
    return torch.roll(shifted, 1, dims=-1).masked_fill_(is_first, IGNORE)


def check_none_on_padding(labels: torch.Tensor, segments: Segments, message: str) -> None:
    """Check that no padding of a row has a label; such a label belongs to no sample.

    Args:
        labels: [1, T], shifted or not.
        segments: the row's boundaries.
        message: the error message.

    Raises:
        LayoutError: padding has a label (on an accelerator, an asynchronous assertion instead).
    """
    if segments.has_padding:
        require(((labels == IGNORE) | ~segments.padding_mask(labels.device)).all(), message, LayoutError)


def _without_successor(segments: Segments, depth: int) -> np.ndarray:
    if depth == 1 and not segments.has_padding:
        return segments.last_tokens().numpy()
    starts = np.asarray((*segments.stride, segments.total), np.int64)
    stops = starts[:-1] + np.asarray((*segments.lengths, 0))
    firsts = np.maximum(starts[:-1], stops - depth)
    return ranges(firsts, starts[1:] - firsts)
