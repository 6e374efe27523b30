"""Vision: boundaries of the tower's blocks, and images and videos that ranks compute together.

Blocks attend within a frame of an image, some within a window of it. The host derives these boundaries from the grids.
Towers whose images are rows of a batch are left as they are: their own code keeps images apart. Towers, and parts of
them, that attend within boundaries and are given no keyword of a row (Pixtral, MiniCPM-V, GLM-OCR) become a subclass
that adds it.

Context parallelism: each image or video is computed by one rank, and its features are sent to its tokens. They lie in
the row's entry. The model without its head is given a mark in place of pixels, and its class becomes a subclass of
itself whose `get_image_features` and `get_video_features` return the features of the entry for the mark. The model puts
them on their tokens as ever, and adds deepstack features after its first layers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import nn

from vlmpack.context_parallel.vision import MediaShare
from vlmpack.families.family import Family
from vlmpack.layout.device import around_graph, to_device
from vlmpack.layout.media import IMAGE, VIDEO
from vlmpack.layout.segments import Segments
from vlmpack.model.mechanisms import (
    ClassMechanism,
    Maker,
    ModelParts,
    RowSetup,
    handed_row,
    handing_class,
    subclass,
    taking_class,
)
from vlmpack.model.mechanisms.attention import Attention, RowAttention
from vlmpack.model.mechanisms.audio import audio_windows
from vlmpack.model.row import CONTEXT, ContextParallelRow, RowContext, RowPart


@final
class VisionRow:
    """A row's entry: host boundaries of every call of a tower, found again by what a call shows of itself.

    A block of the vision tower, or of the audio tower, has its boundaries as a device tensor. Its length and the number
    of patches, or of frames, are read without a sync, and in all but contrived batches they name the boundaries; where
    they do not, the tensor is read.
    """

    def __init__(
        self,
        layouts: Iterable[Segments],
        *,
        inputs: Mapping[str, Any] | None = None,
        features: Mapping[str, Any] | None = None,
    ) -> None:
        self.layouts = tuple(layouts)
        """Boundaries of all calls."""
        self._by_shape: dict[tuple[int, int], Segments | None] = {}
        for segments in self.layouts:
            shape = (len(segments.lengths) + 1, segments.total)
            first = self._by_shape.setdefault(shape, segments)
            if first != segments:
                self._by_shape[shape] = None
        self.inputs = inputs or {}
        """Keyword arguments by which the model without its head gets images and videos."""
        self.features = features or {}
        """The features of this rank's tokens, by the method of the model that returns them."""

    def find(self, cu_seqlens: torch.Tensor, num_patches: int) -> Segments:
        """The segments whose boundaries are `cu_seqlens`, int32 [G + 1] on any device."""
        derived = self._by_shape.get((cu_seqlens.numel(), num_patches))
        return derived if derived is not None else Segments.from_boundaries(cu_seqlens.tolist(), total=num_patches)


@final
class Vision(ClassMechanism):
    """Images and videos of a row."""

    name: ClassVar[str] = "vision"

    def is_in(self, family: Family) -> bool:
        """Families with a vision tower."""
        return family.has_vision

    def makers(self, model: ModelParts) -> list[tuple[nn.Module, Maker]]:
        """The model without its head, where ranks compute media together."""
        family, backbone = model.family, model.family.backbone(model.core)
        changed: list[tuple[nn.Module, Maker]] = [(backbone, features_class)] if model.shares_rows else []
        if (tower := family.vision_tower(model.core)) is None:
            return changed
        if family.tile_boundaries is not None:
            changed += [(backbone, handing_class), (tower, bounded_class)]
        for path, name in family.keeps_row.items():
            holder = tower.get_submodule(path)
            part = holder.get_submodule(name)
            changed.append((holder, handing_class))
            changed += [(x, taking_class) for x in (part if isinstance(part, nn.ModuleList) else (part,))]
        return changed

    def prepare(self, setup: RowSetup) -> VisionRow:
        """Boundaries of all images and of all videos; the features of this rank's tokens, or the pixels."""
        family = setup.model.family
        if setup.model.shares_rows:
            return VisionRow((), inputs=dict.fromkeys(_PIXELS, COMPUTED), features=_features_of_part(setup))
        if not family.has_grids:
            media = setup.row.media.with_sizes(setup.part.computed_media(setup.media))
            layouts = family.tower_segments(media, setup.config)
            return VisionRow(layouts, inputs=setup.row.media.to_hf())
        row = setup.row
        media, calls = family.tower_media(row.media, setup.media, row.segments, row.tree)
        layouts = [segments for grids in calls if grids for segments in family.vision_segments(grids, setup.config)]
        layouts += audio_windows(setup) if family.has_audio else []
        return VisionRow(layouts, inputs=media.to_hf())

    def inputs(self, entry: VisionRow) -> Mapping[str, Any]:
        """Pixels and grids, or marks of features."""
        return entry.inputs


# ---------------------------------------------------------------------- towers that are given no keyword of a row


@functools.cache
def bounded_class(base: Any) -> type[nn.Module]:
    """A subclass of a tower's class that adds the row, and boundaries where images have sizes; one a base class.

    transformers 5.17 gives blocks of Pixtral's tower none.
    """

    @functools.wraps(base.forward)
    def forward(self: Any, pixel_values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes, row = kwargs.get("image_sizes"), handed_row()
        if sizes is not None:
            if row is None:
                patches = torch.as_tensor(sizes) // self.patch_size
                segments = Segments.from_lengths(patches.prod(-1).tolist())
            else:
                (segments,) = row.entries[Vision.name].layouts
            kwargs |= _keywords_of(segments, pixel_values.device)
        if row is not None:
            kwargs[CONTEXT] = row
        return base.forward(self, pixel_values, *args, **kwargs)

    return subclass(base, {"forward": around_graph(forward)}, bounded_class)


def _keywords_of(segments: Segments, device: torch.device) -> dict[str, Any]:
    """The keywords by which attention of transformers gets boundaries."""
    edges, longest = segments.cu_seqlens(device), segments.max_length
    return {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": longest, "max_length_k": longest}


# ---------------------------------------------------------------------- features in place of what a tower computes


@final
class Computed:
    """Stands in place of pixels: the features of this rank's tokens lie in the row's entry."""


COMPUTED = Computed()
_PIXELS = ("pixel_values", "pixel_values_videos")
_GETTERS = ("get_image_features", "get_video_features")


@functools.cache
def features_class(base: Any) -> type[nn.Module]:
    """A subclass of the class of a model without its head that takes `Computed`; one a base class."""

    def accepting(name: str) -> Any:
        plain = vars(base)[name]

        @functools.wraps(plain)
        def features(self: Any, *args: Any, **kwargs: Any) -> Any:  # by any name: `generate` has that of pixels
            if args and isinstance(args[0], Computed):
                return kwargs[CONTEXT].entries[Vision.name].features[name]
            return plain(self, *args, **kwargs)

        return features

    return subclass(base, {name: accepting(name) for name in _GETTERS}, features_class)


@final
@dataclass(frozen=True, kw_only=True)
class FeatureForm:
    """The form of a family's features as one tensor [n, D (1 + L)]: L levels of deepstack beside the first.

    The model's own object has `pooler_output`, [n, D] of each image, which take the place of its tokens' embeddings;
    and in some families `deepstack_features`, of each of the first text layers, after which they are added.
    """

    of_class: type[Any]
    """The class of what the model's own `get_image_features` returns."""
    width: int
    """D."""
    cut_by_image: bool
    """True if levels of deepstack are a tensor for each image, as in transformers 5.23; in 5.17 they are one."""

    @classmethod
    def of(cls, features: Any) -> FeatureForm:
        """The form of what a model's own `get_image_features` returned."""
        deep = getattr(features, "deepstack_features", None) or ()
        return cls(
            of_class=type(features),
            width=features.pooler_output[0].shape[-1],
            cut_by_image=not all(isinstance(level, torch.Tensor) for level in deep),
        )

    def join(self, features: Any) -> torch.Tensor:
        """Features to one tensor."""
        deep = getattr(features, "deepstack_features", None) or ()
        levels = [torch.cat(level) if self.cut_by_image else level for level in deep]
        return torch.cat([torch.cat(features.pooler_output), *levels], -1)

    def split(self, levels: torch.Tensor) -> Any:
        """The inverse, as if it all were one image."""
        pooled, *deep = levels.split(self.width, -1)
        by_level = [(level,) if self.cut_by_image else level for level in deep]
        return self.of_class(pooler_output=(pooled,), **({"deepstack_features": by_level} if deep else {}))


# ---------------------------------------------------------------------- media that ranks compute together


def _features_of_part(setup: RowSetup) -> dict[str, Any]:
    """The features of this rank's tokens.

    The tower is called once on every rank, whatever the row holds: also where there is nothing for it to do.
    """
    part, shares = setup.part, _spread(setup)
    features = _computed(setup, shares, part.rank)
    form = FeatureForm.of(features)
    counts = [share.num_features(part.rank) for share in shares]
    pieces = form.join(features)[: sum(counts)].split(counts)
    sent = (_sent(own, share, part) for own, share in zip(pieces, shares, strict=True))
    return dict(zip(_GETTERS, map(form.split, sent), strict=True))


def _spread(setup: RowSetup) -> tuple[MediaShare, MediaShare]:
    """Images and videos, spread over ranks together."""
    computed = setup.part.computed_media(setup.media)
    both = MediaShare.spread((*computed.images, *computed.videos), ranks=setup.part.ranks)
    return both.of_kind(IMAGE), both.of_kind(VIDEO)


def _computed(setup: RowSetup, shares: Sequence[MediaShare], rank: int) -> Any:
    """The tower's features of this rank's images and videos, in one call."""
    family, media, device = setup.model.family, setup.row.media, setup.row.input_ids.device
    pixels = (media.pixel_values, media.pixel_values_videos)
    grids = [grid for share in shares for grid in share.grids(rank)]
    parts = [share.take(of_all, rank) for share, of_all in zip(shares, pixels, strict=True) if of_all is not None]
    if not grids:  # a blank image, of which nothing is read
        merge = family.merge(setup.config)
        grids = [(1, merge, merge)]
        parts = [torch.zeros(merge**2, family.patch_channels(setup.config), device=device)]
    on_device = to_device(np.asarray(grids, np.int64), device)
    tower = VisionRow(family.vision_segments(grids, setup.config))
    entries = {Vision.name: tower, Attention.name: RowAttention(setup.backend)}
    context = RowContext(segments=setup.row.segments, entries=entries)
    backbone: Any = family.backbone(setup.model.core)
    return backbone.get_image_features(torch.cat(parts), on_device, return_dict=True, **{CONTEXT: context})


def _sent(features: torch.Tensor, share: MediaShare, part: RowPart) -> torch.Tensor:
    """The features of the images that this rank computed to those of the tokens that it has, in their order."""
    if not isinstance(part, ContextParallelRow) or part.is_whole or not share.media:
        return features
    media = share.route(part.partition, part.rank)
    arrived = part.collectives.along(media.route, features, "images")
    return arrived.index_select(0, to_device(np.argsort(media.tokens.numpy()), features.device))
