"""The packed row: every real token of a batch in one [1, T] sequence, with the boundaries of its samples.

Row tensors are rolled to the left inside each segment, and labels are shifted so: nothing crosses a boundary. Lengths
[3, 5, 2], slots a multiple of 4, fill 0:

    row        1 2 3 .  4 5 6 7 8 . . .  9 10 . .
    depth 1    2 3 0 0  5 6 7 8 0 0 0 0  10 0 0 0
    depth 2    3 0 0 0  6 7 8 0 0 0 0 0  0  0 0 0
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np
import torch

from vlmpack.errors import LayoutError
from vlmpack.layout.batch import (
    METADATA_KEY,
    HostMetadata,
    Media,
    OnlyPacked,
    check_is_batch,
    check_weights,
    media_in_words,
    moved,
    pinned,
    shape_of,
    whole_numbers,
)
from vlmpack.layout.device import outside_graph, require
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.segments import Segments, checked_boundaries, ranges

IGNORE = -100
"""The label that cross-entropy leaves out."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRow:
    """One [1, T] row of packed samples."""

    input_ids: torch.Tensor
    """[1, T] int64."""
    segments: Segments
    """Where each sample lives in the row."""
    shift_labels: torch.Tensor | None = None
    """[1, T] int64: the target of each token, already shifted inside its segment; -100: none."""
    shift_weights: torch.Tensor | None = None
    """[1, T] floats: the weight of each target in the loss, shifted as they are; None: 1."""
    position_ids: torch.Tensor | None = None
    """[3, 1, T] time, height, width, or [4, 1, T] with the place in the sample first; [1, T] of a text model. The step
    compares them with those it computes. None: none came along."""
    mm_token_type_ids: torch.Tensor | None = None
    """[1, T]: 0 text, 1 image, 2 video, 3 audio."""
    media: Media = field(default_factory=Media)
    """Pixels and grids in row order; with a `tree`, those that it computes, in its order."""
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Further [1, T] or [k, 1, T] tensors."""
    metadata: HostMetadata | None = None
    """Metadata on the host beside the boundaries: media, target count, sample ids; always those of every sample."""
    tree: PrefixTree | None = None
    """Which beginnings samples share (`share`); None: each goes through the model by itself."""

    def __post_init__(self) -> None:
        if tuple(self.input_ids.shape) != (1, self.segments.total):
            raise LayoutError(
                f"a packed row is [1, {self.segments.total}] by its boundaries but input_ids is "
                f"{list(self.input_ids.shape)}; was the batch split or concatenated on its way "
                "(accelerate: set dispatch_batches=False)?"
            )
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
            f"PackedRow({shape_of(self.input_ids)}, {where.num_samples} samples, {where.num_tokens} tokens, "
            f"{where.fill:.2%} full{media_in_words(self.media)}"
            f"{'' if self.tree is None else f', shared in {self.tree.num_tokens} tokens'})"
        )

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> PackedRow:
        """Move tensors and media to a device; boundaries and metadata stay on the host."""
        return moved(self, device, non_blocking=non_blocking)

    def pin_memory(self) -> PackedRow:
        """The same row with tensors and media in pinned memory, as `DataLoader(pin_memory=True)` calls it: from there
        `to(device, non_blocking=True)` copies asynchronously. Boundaries are whole numbers on the host."""
        return pinned(self)

    @property
    def moe_padding_mask(self) -> torch.Tensor:
        """[1, T] bool: True where the row holds padding, which a router must not count."""
        return self.segments.padding_mask(self.input_ids.device)[None]

    @property
    def known_metadata(self) -> HostMetadata:
        """`metadata`; where there are none, those that follow from the boundaries."""
        return self.metadata or HostMetadata(lengths=self.segments.lengths[: self.segments.num_samples])

    def to_hf(self) -> dict[str, Any]:
        """A dictionary for a DataLoader and for `model(**batch)` of a model with packing enabled.

        Labels are unshifted again, with each segment's first one masked, so that a trainer which counts
        `labels[..., 1:]` counts every target once. A model without packing refuses it (`OnlyPacked`), unless it is one
        sample without gaps and weights, which such a model takes as it is.

        Raises:
            LayoutError: the last token of a segment has a target, which unshifted labels cannot express.
        """
        batch = self.step_inputs()
        if batch.pop("shift_labels") is not None:
            batch["labels"] = self.labels
        alone = self.segments.num_samples == 1 and not self.segments.has_padding and self.shift_weights is None
        return batch if alone else {**batch, "use_cache": OnlyPacked()}

    @property
    def labels(self) -> torch.Tensor | None:
        """int64 [1, T]: `shift_labels` as Hugging Face counts them, each under its own token; None: there are none.

        Raises:
            LayoutError: the last token of a segment has a target, which unshifted labels cannot express.
        """
        return None if self.shift_labels is None else self._unshifted(self.shift_labels)

    def step_inputs(self) -> dict[str, Any]:
        """The same dictionary with `shift_labels` instead of labels; `input_ids` comes first."""
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
        """The inverse of `to_hf`; `extras` and `media` (`Family.media`) name the further tensors to keep.

        Boundaries come from the metadata on the host where it travels along; otherwise from `cu_seqlens_q` and
        `cu_seqlens_q_padded` (tensors or lists), a host-device sync if they lie on a device.

        Raises:
            LayoutError: no token ids; no boundaries, impossible ones, or others than those of the metadata; boundaries
                that leave open where the padding is; `labels` and `shift_labels` that differ; token columns that are
                not [1, T].
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

    def _unshifted(self, shift_labels: torch.Tensor) -> torch.Tensor:
        ends = without_successor(self.segments, 1, shift_labels.device)
        kept = shift_labels[0].index_select(0, ends) == IGNORE
        message = (
            "the last token of a segment has a target in shift_labels: set it to -100, as shift_labels(labels, "
            "segments) does; or, if it is a token that was left out of the row, hand the row itself to PackedStep"
        )
        require(kept.all(), message, LayoutError)
        return unshift_labels(shift_labels, self.segments)


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
    """Compare boundaries that came beside the metadata with it; those on a device are compared there."""
    expected = {
        "cu_seqlens_q": (segments.real, segments.cu_seqlens),
        "cu_seqlens_q_padded": (segments.stride, segments.cu_seqlens_padded),
    }
    for name, (on_host, on_device) in expected.items():
        values = batch.get(name)
        if values is None:
            continue
        message = (
            f"{name} differs from the boundaries {list(on_host)[:9]} that the host metadata ({METADATA_KEY!r}) say of "
            "the row; was the batch split or concatenated on its way (accelerate: set dispatch_batches=False)? If you "
            "changed the row, leave its metadata out"
        )
        is_whole = isinstance(values, torch.Tensor) and not (values.is_floating_point() or values.is_complex())
        if is_whole and values.shape == (len(on_host),):
            require((values == on_device(values.device)).all(), message, LayoutError)
        elif is_whole or checked_boundaries(values, name) != on_host:
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
        "labels of the row hold targets between its samples or behind the last one, which belong to none; set them "
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


# ---------------------------------------------------------------------- rolled to the left


def roll_left(
    row_tensor: torch.Tensor, segments: Segments, *, depth: int = 1, fill: float, token_dim: int = -1
) -> torch.Tensor:
    """`out[..., i] = row_tensor[..., i + depth]` inside a segment's real tokens, `fill` on every other place.

    Rolling by 1 twice is rolling by 2. Differentiable; no host-device sync.

    Args:
        row_tensor: [1, T], [k, 1, T], or any other shape with the row's T tokens along `token_dim`; any type.
        segments: the row's boundaries: gaps, a tail and repeated boundaries included.
        depth: tokens to move by, at least 1.
        fill: what the last `depth` tokens of a segment and padding get: 0, True for a padding mask, -100 for labels.
        token_dim: the dimension of length T.

    Raises:
        LayoutError: the tensor is not a row of these segments, or a depth below 1.
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
    """int64 [n]: where in the row no token of the same segment comes `depth` places later; all padding is there.

    Raises:
        LayoutError: a depth below 1.
    """
    if depth < 1:
        raise LayoutError(f"a row is rolled left by at least 1 token, got depth={depth}; the row itself is depth 0")
    return segments.derived(("without_successor", depth), device, lambda: _without_successor(segments, depth))


def shift_labels(labels: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Targets of a row: `out[..., i] = labels[..., i + 1]` inside a segment, -100 on last tokens and padding.

    Args:
        labels: [1, T] int64, not shifted.
        segments: the row's boundaries.
    """
    return roll_left(labels, segments, depth=1, fill=IGNORE)


def unshift_labels(shifted: torch.Tensor, segments: Segments) -> torch.Tensor:
    """The inverse of `shift_labels`; each segment's first label, which predicts nothing, becomes -100."""
    return torch.roll(shifted, 1, dims=-1).index_fill_(-1, _without_predecessor(segments, shifted.device), IGNORE)


def check_none_on_padding(labels: torch.Tensor, segments: Segments, message: str) -> None:
    """Raise if padding of a row has a label, shifted or not, [1, T]: it belongs to no sample.

    Raises:
        LayoutError: some has (an accelerator asserts the same, asynchronously).
    """
    if segments.has_padding:
        stray = (labels != IGNORE) & segments.padding_mask(labels.device)
        require(~stray.any(), message, LayoutError)


@outside_graph
def _without_predecessor(segments: Segments, device: torch.device | str) -> torch.Tensor:
    """int64 [n]: first tokens, and all padding."""
    if not segments.has_padding:
        return segments.first_tokens(device)
    return segments.derived(
        "without_predecessor", device, lambda: np.flatnonzero(segments.position_in_segment().numpy() == 0)
    )


def _without_successor(segments: Segments, depth: int) -> np.ndarray:
    if depth == 1 and not segments.has_padding:
        return segments.last_tokens().numpy()
    starts = np.asarray((*segments.stride, segments.total), np.int64)
    stops = starts[:-1] + np.asarray((*segments.lengths, 0))
    firsts = np.maximum(starts[:-1], stops - depth)
    return ranges(firsts, starts[1:] - firsts)
