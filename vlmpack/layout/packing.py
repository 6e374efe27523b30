"""Pack a [B, S] batch into a [1, T] row and unpack it: one copy or one gather per tensor in each direction.

A model computes rows without gaps: `without_gaps` removes padding between samples, and `Compact.spread` moves results
back to the positions of the original row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch

from vlmpack.errors import LayoutError, check_kind
from vlmpack.layout.batch import (
    HostMetadata,
    MaskSpans,
    PaddedBatch,
    check_is_tensor,
    check_weights,
    lengths_from_mask,
    whole_numbers,
)
from vlmpack.layout.device import on_host, outside_graph, require, to_device
from vlmpack.layout.row import COLUMNS, IGNORE, PackedRow, roll_left, shift_labels
from vlmpack.layout.segments import Segments, SlotRule, ranges


def pack(
    batch: PaddedBatch, *, rule: SlotRule | None = None, keep_empty: bool = False, pad_token_id: int = 0
) -> PackedRow:
    """Concatenate the real tokens of a padded batch into one row [1, T].

    Lengths come from the 2D mask alone, or from `batch.metadata`, which the collator read from the same mask. A
    left-padded batch gives the same row as a right-padded one. Media pass through unchanged, because sample order and
    row order are the same. On a device, packing is one gather per tensor. On the host, whole samples of int64 tensors
    are copied, which is three to four times as fast as a gather.

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
    spans, ids = _spans(batch), whole_numbers(batch.input_ids, "input_ids")
    labels = None if batch.labels is None else whole_numbers(batch.labels, "labels")
    _check_empty_rows(batch, spans, keep_empty=keep_empty)
    counted = batch.metadata is not None and batch.metadata.num_targets is not None
    # If the metadata counts targets, the step compares that count with the row's, which also finds labels on padding.
    if labels is not None and not counted and sum(spans.lengths) < labels.numel():
        _check_labels(labels, batch.attention_mask, spans)
    segments = Segments.from_lengths(spans.lengths, rule)
    if not segments.total:
        raise LayoutError(
            f"attention_mask is all zeros in all {len(spans.lengths)} rows, and a row of no tokens cannot go through a "
            "model; leave the batch out, or give every row a fixed width with SlotRule(pad_to=...)"
        )
    take = _Take(segments, spans.offsets, width=batch.input_ids.shape[1])

    def optional(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else take(tensor, 0)

    return PackedRow(
        input_ids=take(ids, pad_token_id),
        segments=segments,
        shift_labels=None if labels is None else take.targets(labels),
        shift_weights=None if batch.loss_weights is None else roll_left(take(batch.loss_weights, 0), segments, fill=0),
        position_ids=optional(batch.position_ids),
        mm_token_type_ids=optional(batch.mm_token_type_ids),
        extras={name: take(tensor, 0) for name, tensor in batch.extras.items()},
        media=batch.media,
        metadata=batch.metadata or HostMetadata(lengths=spans.lengths, offsets=spans.offsets),
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

    def take(name: str, tensor: torch.Tensor) -> torch.Tensor:
        check_is_tensor(tensor, name)
        if tensor.shape[-1:] != (row.segments.total,):
            raise LayoutError(f"{name} is {list(tensor.shape)}, but the row has {row.segments.total} tokens")
        return tensor.index_select(-1, index_on(tensor.device))

    given = {name: getattr(row, name) for name in COLUMNS}
    taken = {name: take(name, tensor) for name, tensor in given.items() if tensor is not None}
    extras = {name: take(name, tensor) for name, tensor in row.extras.items()}
    kept = replace(row, segments=segments, extras=extras, **taken)
    return Compact(row=kept, given=row, index=index_on(row.input_ids.device))


def _kept(row: PackedRow, segments: Segments) -> np.ndarray:
    """int64 [T']: positions of the real tokens, then of as much padding as the row keeps."""
    padding = np.flatnonzero(row.segments.padding_mask().numpy())
    return np.concatenate([row.segments.real_index().numpy(), padding])[: segments.total]


# ---------------------------------------------------------------------- checks of the batch


def _spans(batch: PaddedBatch) -> MaskSpans:
    check_is_tensor(batch.input_ids, "input_ids")
    check_is_tensor(batch.attention_mask, "attention_mask")
    if batch.input_ids.ndim != 2:
        raise LayoutError(f"input_ids must be [batch, width], got {list(batch.input_ids.shape)}")
    if batch.attention_mask.ndim == 2 and batch.attention_mask.shape != batch.input_ids.shape:
        raise LayoutError(
            f"attention_mask is {list(batch.attention_mask.shape)} but input_ids is {list(batch.input_ids.shape)}; "
            "both come from one call of the tokenizer: pad them together"
        )
    _check_shapes(batch)
    if batch.metadata is None:
        return lengths_from_mask(batch.attention_mask)
    _check_metadata(batch, batch.metadata)
    return batch.metadata.spans


def _check_shapes(batch: PaddedBatch) -> None:
    named = {"labels": batch.labels, "mm_token_type_ids": batch.mm_token_type_ids, "position_ids": batch.position_ids}
    for name, tensor in {**named, **batch.extras}.items():
        if tensor is None:
            continue
        check_is_tensor(tensor, name)
        whole = name in ("labels", "mm_token_type_ids")  # others may be [k, B, S]
        if (tensor.shape if whole else tensor.shape[-2:]) != batch.input_ids.shape:
            raise LayoutError(f"{name} is {list(tensor.shape)} but input_ids is {list(batch.input_ids.shape)}")
    check_weights(batch.loss_weights, batch.labels, "loss_weights")


def _check_metadata(batch: PaddedBatch, metadata: HostMetadata) -> None:
    """Compare metadata with a mask on the host; for a mask on a device, compare shapes only, to avoid a sync."""
    (rows, width), spans = batch.input_ids.shape, metadata.spans
    agree = len(spans.lengths) == len(spans.offsets) == rows
    agree = agree and all(at + n <= width for at, n in zip(spans.offsets, spans.lengths, strict=True))
    media = () if metadata.media is None else metadata.media.media
    agree = agree and all(m.sample < rows and m.runs[-1][1] <= spans.lengths[m.sample] for m in media if m.runs)
    if agree and on_host(batch.attention_mask):
        agree = lengths_from_mask(batch.attention_mask) == spans
    if not agree:
        raise LayoutError(
            f"the host's lengths {list(spans.lengths)} do not describe this attention_mask of "
            f"{list(batch.attention_mask.shape)}; was the batch split, concatenated or padded again on its way "
            "(accelerate: set dispatch_batches=False)?"
        )


def _check_empty_rows(batch: PaddedBatch, spans: MaskSpans, *, keep_empty: bool) -> None:
    empty = [row for row, n in enumerate(spans.lengths) if n == 0]
    if empty and not keep_empty:
        raise LayoutError(
            f"row {empty[0]}: attention_mask is all zeros, there is nothing to pack; "
            "leave the sample out, or pass keep_empty=True (in StepConfig, for an enabled model) to keep it as a "
            "segment of length 0"
        )
    types, mask = batch.mm_token_type_ids, batch.attention_mask
    if batch.metadata is None and types is not None and (hidden := ((types != 0) & (mask == 0)).any(1).cpu()).any():
        raise LayoutError(
            f"row {int(hidden.int().argmax())}: attention_mask hides tokens of images, videos or audio, but these "
            "would still be used; leave the sample's media out, or unmask its tokens"
        )


@outside_graph
def _check_labels(labels: torch.Tensor, mask: torch.Tensor, spans: MaskSpans) -> None:
    """Refuse labels on padding: packing drops them, but trainers count them and padded models train on them."""
    fault = "labels hold targets where attention_mask is 0, which belong to no sample; set them to -100 there"
    if not on_host(labels):
        require(~((labels != IGNORE) & (mask == 0)).any(), fault, LayoutError)
        return
    padding = [
        piece
        for row, offset, n in zip(labels.numpy(), spans.offsets, spans.lengths, strict=True)
        for piece in (row[:offset], row[offset + n :])
    ]
    if (np.concatenate(padding) != IGNORE).any():
        row = next(at for at, piece in enumerate(padding) if (piece != IGNORE).any()) // 2
        raise LayoutError(f"row {row}: {fault} (labels.masked_fill(mask == 0, -100))")


# ---------------------------------------------------------------------- the index map


@final
class _Take:
    """Gather the real tokens of [..., B, S] tensors into rows [..., 1, T]."""

    def __init__(self, segments: Segments, offsets: Sequence[int], *, width: int) -> None:
        self._segments = segments
        self._firsts = [row * width + offset for row, offset in enumerate(offsets)]
        self._index: torch.Tensor | None = None

    def __call__(self, tensor: torch.Tensor, fill: int) -> torch.Tensor:
        """Copy int64 tensors on the host, gather all others; padding gets `fill`."""
        if on_host(tensor) and tensor.dtype == torch.int64:
            return self._joined(tensor, fill)
        if self._index is None:
            self._index = self._row_index(tensor.device)
        row = tensor.flatten(-2).index_select(-1, self._index).unsqueeze(-2)
        return row.masked_fill_(self._segments.padding_mask(row.device), fill) if self._segments.has_padding else row

    def targets(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the row's `shift_labels` from the batch's `labels`; on the host, copying and shifting are one pass."""
        if on_host(labels) and labels.dtype == torch.int64:
            return self._joined(labels, IGNORE, ahead=1)
        return shift_labels(self(labels, IGNORE), self._segments)

    @outside_graph
    def _joined(self, tensor: torch.Tensor, fill: int, *, ahead: int = 0) -> torch.Tensor:
        """Concatenate whole samples at memory speed; a gather on the host is four times slower.

        With `ahead`, each position gets the token `ahead` positions later in its sample, or `fill` if there is none.
        """
        batch, segments = tensor.numpy(), self._segments
        flat = batch.reshape(*batch.shape[:-2], -1)
        padding = np.full((*flat.shape[:-1], segments.max_padding + ahead), fill, flat.dtype)
        pieces = []
        for first, n, slot in zip(self._firsts, segments.lengths, segments.slots, strict=False):
            pieces.append(flat[..., first + ahead : first + n])
            if missing := slot - n + min(ahead, n):
                pieces.append(padding[..., :missing])
        pieces.append(padding[..., : segments.total - segments.stride[-1]])
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
