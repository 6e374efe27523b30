"""The packed row: every real token of a batch in one [1, T] sequence, with the boundaries of its samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch

from vlmpack.errors import ConfigError, LayoutError
from vlmpack.layout.batch import METADATA_KEY, HostMetadata, Media, media_of, moved, shape_of, whole_numbers
from vlmpack.layout.device import require
from vlmpack.layout.roll import IGNORE, check_none_on_padding, shift_labels, unshift_labels, without_successor
from vlmpack.layout.segments import Segments, checked_boundaries


@final
@dataclass(frozen=True)
class OnlyPacked:
    """Stands under `use_cache` in the dictionary of a row, and stops a model without packing.

    Models of transformers accept every keyword, so a model without packing would take a row for one sample. But each
    of them evaluates `use_cache` as a bool, and so calls `__bool__` below. An enabled model removes the object from
    its inputs first.
    """

    def __bool__(self) -> bool:
        """Refuse the row.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "a packed row reached a model without passing through the packed forward, which would mix its samples: "
            "call enable_packing(model) first. If you did, the model's forward was replaced, or its backbone called "
            "directly, afterwards (Liger's fused cross-entropy, TRL's fused head): switch that off. A plain text model "
            "of attention layers alone takes rows of RowCollator"
        )

    def to(self, *_: Any, **__: Any) -> OnlyPacked:
        """Itself: it lies on no device."""
        return self


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
    position_ids: torch.Tensor | None = None
    """[3, 1, T] time, height, width, or [4, 1, T] with the place in the sample first; [1, T] of a text model. The step
    compares them with those it computes. None: none came along."""
    mm_token_type_ids: torch.Tensor | None = None
    """[1, T]: 0 text, 1 image, 2 video."""
    media: Media = field(default_factory=Media)
    """Pixels and grids in row order."""
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Further [1, T] or [k, 1, T] tensors."""
    metadata: HostMetadata | None = None
    """Metadata on the host beside the boundaries: grids, target count, sample ids."""

    def __post_init__(self) -> None:
        if tuple(self.input_ids.shape) != (1, self.segments.total):
            raise LayoutError(
                f"a packed row is [1, {self.segments.total}] by its boundaries but input_ids is "
                f"{list(self.input_ids.shape)}; was the batch split or concatenated on its way "
                "(accelerate: set dispatch_batches=False)?"
            )
        if self.metadata is not None and self.metadata.segments is not None:  # a row stores its boundaries once
            object.__setattr__(self, "metadata", replace(self.metadata, segments=None))

    def __repr__(self) -> str:
        where = self.segments
        return (
            f"PackedRow({shape_of(self.input_ids)}, {where.num_samples} samples, {where.num_tokens} tokens, "
            f"{where.fill:.2%} full{media_of(self.media)})"
        )

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> PackedRow:
        """Move tensors and media to a device; boundaries and metadata stay on the host."""
        return moved(self, device, non_blocking=non_blocking)

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
        sample without gaps, which such a model takes as it is.

        Raises:
            LayoutError: the last token of a segment has a target, which unshifted labels cannot express.
        """
        batch = self.step_inputs()
        shifted = batch.pop("shift_labels")
        if shifted is not None:
            batch["labels"] = self._unshifted(shifted)
        alone = self.segments.num_samples == 1 and not self.segments.has_gaps
        return batch if alone else {**batch, "use_cache": OnlyPacked()}

    def step_inputs(self) -> dict[str, Any]:
        """The same dictionary with `shift_labels` instead of labels; `input_ids` comes first."""
        names = ("input_ids", "mm_token_type_ids", "position_ids")
        return {
            **{name: self.__dict__[name] for name in names if self.__dict__[name] is not None},
            "shift_labels": self.shift_labels,
            "moe_padding_mask": self.moe_padding_mask,
            "cu_seqlens_q": self.segments.cu_seqlens(),
            "cu_seqlens_q_padded": self.segments.cu_seqlens_padded(),
            **self.extras,
            **self.media.to_hf(),
            METADATA_KEY: replace(self.known_metadata, segments=self.segments),
        }

    @classmethod
    def from_hf(cls, batch: Mapping[str, Any], *, extras: tuple[str, ...] = ()) -> PackedRow:
        """The inverse of `to_hf`.

        Boundaries come from the metadata on the host where it travels along; otherwise from `cu_seqlens_q` and
        `cu_seqlens_q_padded` (tensors or lists), a host-device sync if they lie on a device.

        Raises:
            LayoutError: no boundaries, impossible ones, or others than those of the metadata; boundaries that leave
                open where the padding is; `labels` and `shift_labels` that differ; token columns that are not [1, T].
        """
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
            position_ids=batch.get("position_ids"),
            mm_token_type_ids=batch.get("mm_token_type_ids"),
            extras={name: batch[name] for name in extras},
            media=Media.from_hf(batch),
            metadata=metadata,
        )

    def _unshifted(self, shift_labels: torch.Tensor) -> torch.Tensor:
        ends = without_successor(self.segments, 1, shift_labels.device)
        kept = shift_labels[0].index_select(0, ends) == IGNORE
        message = "the last token of a segment has a target; pass shift_labels to the model instead of labels"
        require(kept.all(), message, LayoutError)
        return unshift_labels(shift_labels, self.segments)


def _segments_from(batch: Mapping[str, Any], *, total: int) -> Segments:
    real = batch.get("cu_seqlens_q")
    if real is None:
        raise LayoutError("a packed row needs its boundaries: cu_seqlens_q (and cu_seqlens_q_padded if it has gaps)")
    segments = Segments.from_boundaries(real, batch.get("cu_seqlens_q_padded"), total=total)
    placed = any(batch.get(name) is not None for name in ("cu_seqlens_q_padded", "moe_padding_mask"))
    if segments.has_gaps and not placed:
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
