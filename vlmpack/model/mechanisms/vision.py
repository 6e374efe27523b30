"""Vision: boundaries of the tower's blocks, and images and videos split across ranks.

Blocks attend within a frame of an image, and some within a window of a frame. The host derives these boundaries from
the grids. Towers that take images as rows of a batch are left alone: their own code keeps images apart. Towers (or
parts of towers) that attend within boundaries but get no row keyword (Pixtral, MiniCPM-V, GLM-OCR) become a subclass
that adds it.

Context parallelism: each image or video is computed by one rank, which sends the features to the ranks that have its
tokens. The features are stored in the row's entry. The backbone gets a marker in place of pixels, and its class becomes
a subclass whose `get_image_features` and `get_video_features` return the stored features for the marker. The model
inserts them at their placeholders as usual, and adds deepstack features after its first layers.
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
from vlmpack.families.tower_inputs import tower_inputs
from vlmpack.layout.device import around_graph, host_values, outside_graph, to_device
from vlmpack.layout.media import IMAGE, KINDS, VIDEO, Grid
from vlmpack.layout.segments import Segments
from vlmpack.model.known_ids import known_ids
from vlmpack.model.mechanisms import (
    ClassMechanism,
    Maker,
    ModelParts,
    PreHook,
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
    """A row's entry for vision: host boundaries of every call of a tower.

    A block of the vision or audio tower has its boundaries as a device tensor. We find the host boundaries by this
    tensor's length and the number of patches (or frames), which need no sync. They are ambiguous only in contrived
    batches; the tensor is read then.
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
        """Keyword arguments that pass images and videos to the backbone."""
        self.features = features or {}
        """The features of this rank's tokens, by the name of the model's method that returns them."""

    def find(self, cu_seqlens: torch.Tensor, num_patches: int) -> Segments:
        """Return the segments whose boundaries are `cu_seqlens`, int32 [G + 1] on any device."""
        derived = self._by_shape.get((cu_seqlens.numel(), num_patches))
        return derived if derived is not None else Segments.from_boundaries(cu_seqlens.tolist(), total=num_patches)


@final
class Vision(ClassMechanism):
    """Images and videos of a row."""

    name: ClassVar[str] = "vision"

    def is_in(self, family: Family) -> bool:
        """Return whether the family has a vision tower."""
        return family.has_vision

    def makers(self, model: ModelParts) -> list[tuple[nn.Module, Maker]]:
        """Return the backbone if ranks compute media together, and towers (or parts of them) that get no keyword."""
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

    def hook(self, model: ModelParts) -> tuple[nn.Module, PreHook] | None:
        """Compute the tower's inputs from grids on the host."""
        tower = model.family.vision_tower(model.core) if model.family.from_grids else None
        return None if tower is None else (tower, functools.partial(_add_tower_inputs, model.family.from_grids))

    def prepare(self, setup: RowSetup) -> VisionRow:
        """Derive the boundaries of images and videos, and pass on the pixels or compute this rank's features."""
        family = setup.model.family
        if setup.model.shares_rows:
            return VisionRow((), inputs=dict.fromkeys(_PIXELS, COMPUTED), features=_features_of_part(setup))
        if not family.has_grids:
            media = setup.row.media.with_sizes(setup.part.computed_media(setup.media))
            layouts = family.tower_segments(media, setup.config)
            return VisionRow(layouts, inputs=setup.row.media.to_hf() | _known_ids(setup))
        row = setup.row
        media, calls = family.tower_media(row.media, setup.media, row.segments, row.tree)
        layouts = [segments for grids in calls if grids for segments in family.vision_segments(grids, setup.config)]
        layouts += audio_windows(setup) if family.has_audio else []
        return VisionRow(layouts, inputs=media.to_hf() | _host_grids(family, calls) | _known_ids(setup))

    def inputs(self, entry: VisionRow) -> Mapping[str, Any]:
        """Return pixels and grids, or markers for features."""
        return entry.inputs


# ---------------------------------------------------------------------- what the host knows
#
# Towers compute positions and boundaries from grids, with several host-device syncs. The host knows the grids, so the
# tower gets them there, and before it runs, transformers' own functions compute on the host what it would compute.


def _host_grids(family: Family, calls: Sequence[Sequence[Grid]]) -> dict[str, torch.Tensor]:
    """Return the grids of images and videos, int64 [n, 3] on the host; {} if the tower reads them on its device."""
    if not family.from_grids:
        return {}
    named = zip(("image_grid_thw", "video_grid_thw"), calls, strict=False)
    return {name: torch.tensor(grids, device="cpu") for name, grids in named if grids}


@outside_graph
def _add_tower_inputs(
    names: Sequence[str], tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Copy the grids of a row to the device of the pixels, with what the tower would compute from them."""
    if CONTEXT not in kwargs:
        return None
    pixels, grids = (*args, *(kwargs.pop(name) for name in ("hidden_states", "grid_thw") if name in kwargs))
    with host_values():
        inputs = {"grid_thw": grids, **tower_inputs(tower, grids, names)}
    on_host = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor) and x.device.type == "cpu"}
    return (pixels,), {**kwargs, **inputs, **{name: to_device(x.numpy(), pixels.device) for name, x in on_host.items()}}


def _known_ids(setup: RowSetup) -> dict[str, torch.Tensor]:
    """Return the ids of this part with the placeholders of its media; {} for a row without media."""
    if not setup.media.media:
        return {}
    family, config, part = setup.model.family, setup.config, setup.part
    types_1t = part.cut(torch.from_numpy(setup.media.types(setup.row.segments))[None]).numpy()
    if family.videos_as_images:
        masks = {config.image_token_id: types_1t != 0}
    else:
        names = {kind: f"{name}_token_id" for kind, name in KINDS.items()}
        masks = {getattr(config, name): types_1t == kind for kind, name in names.items() if hasattr(config, name)}
    return {"input_ids": known_ids(part.cut(setup.row.input_ids), masks)}


# ---------------------------------------------------------------------- towers that get no row keyword


@functools.cache
def bounded_class(base: Any) -> type[nn.Module]:
    """Return a subclass of a tower's class that adds the row, and boundaries if images have sizes. One per base class.

    transformers 5.17 gives the blocks of Pixtral's tower no boundaries.
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
    """Return the keywords with which transformers' attention gets boundaries."""
    edges, longest = segments.cu_seqlens(device), segments.max_length
    return {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": longest, "max_length_k": longest}


# ---------------------------------------------------------------------- features instead of pixels


@final
class Computed:
    """Marker in place of pixels: the features of this rank's tokens are in the row's entry."""


COMPUTED = Computed()
_PIXELS = ("pixel_values", "pixel_values_videos")
_GETTERS = ("get_image_features", "get_video_features")


@functools.cache
def features_class(base: Any) -> type[nn.Module]:
    """Return a subclass of a backbone's class that accepts `Computed` in place of pixels. One per base class."""

    def accepting(name: str) -> Any:
        plain = vars(base)[name]

        @functools.wraps(plain)
        def features(self: Any, *args: Any, **kwargs: Any) -> Any:  # `generate` passes pixels by name
            if args and isinstance(args[0], Computed):
                return kwargs[CONTEXT].entries[Vision.name].features[name]
            return plain(self, *args, **kwargs)

        return features

    return subclass(base, {name: accepting(name) for name in _GETTERS}, features_class)


@final
@dataclass(frozen=True, kw_only=True)
class FeatureForm:
    """How to store a family's features in one tensor [n, D (1 + L)], with L deepstack levels after the first D.

    The model's own object has `pooler_output`, [n, D] for each image, which replaces the embeddings of its tokens. In
    some families it also has `deepstack_features`, one level for each of the first text layers, added after that layer.
    """

    of_class: type[Any]
    """The class of the object that the model's `get_image_features` returns."""
    width: int
    """D."""
    cut_by_image: bool
    """Whether a deepstack level has one tensor per image, as in transformers 5.23; in 5.17 it is one tensor."""

    @classmethod
    def of(cls, features: Any) -> FeatureForm:
        """Read the form off the return value of a model's own `get_image_features`."""
        deep = getattr(features, "deepstack_features", None) or ()
        return cls(
            of_class=type(features),
            width=features.pooler_output[0].shape[-1],
            cut_by_image=not all(isinstance(level, torch.Tensor) for level in deep),
        )

    def join(self, features: Any) -> torch.Tensor:
        """Join features into one tensor."""
        deep = getattr(features, "deepstack_features", None) or ()
        levels = [torch.cat(level) if self.cut_by_image else level for level in deep]
        return torch.cat([torch.cat(features.pooler_output), *levels], -1)

    def split(self, levels: torch.Tensor) -> Any:
        """Split a tensor into features, the inverse of `join`, as if they all belonged to one image."""
        pooled, *deep = levels.split(self.width, -1)
        by_level = [(level,) if self.cut_by_image else level for level in deep]
        return self.of_class(pooler_output=(pooled,), **({"deepstack_features": by_level} if deep else {}))


# ---------------------------------------------------------------------- media split across ranks


def _features_of_part(setup: RowSetup) -> dict[str, Any]:
    """Return the features of this rank's tokens.

    Every rank calls the tower once for every row, even if it has no images to compute.
    """
    part, shares = setup.part, _spread(setup)
    features = _computed(setup, shares, part.rank)
    form = FeatureForm.of(features)
    counts = [share.num_features(part.rank) for share in shares]
    pieces = form.join(features)[: sum(counts)].split(counts)
    sent = (_sent(own, share, part) for own, share in zip(pieces, shares, strict=True))
    return dict(zip(_GETTERS, map(form.split, sent), strict=True))


def _spread(setup: RowSetup) -> tuple[MediaShare, MediaShare]:
    """Split images and videos across ranks together."""
    computed = setup.part.computed_media(setup.media)
    both = MediaShare.spread((*computed.images, *computed.videos), ranks=setup.part.ranks)
    return both.of_kind(IMAGE), both.of_kind(VIDEO)


def _computed(setup: RowSetup, shares: Sequence[MediaShare], rank: int) -> Any:
    """Compute the features of this rank's images and videos in one call of the tower."""
    family, media, device = setup.model.family, setup.row.media, setup.row.input_ids.device
    pixels = (media.pixel_values, media.pixel_values_videos)
    grids = [grid for share in shares for grid in share.grids(rank)]
    parts = [share.take(of_all, rank) for share, of_all in zip(shares, pixels, strict=True) if of_all is not None]
    if not grids:  # a blank image whose features are not used
        merge = family.merge(setup.config)
        grids = [(1, merge, merge)]
        parts = [torch.zeros(merge**2, family.patch_channels(setup.config), device=device)]
    tower = VisionRow(family.vision_segments(grids, setup.config))
    entries = {Vision.name: tower, Attention.name: RowAttention(setup.backend)}
    context = RowContext(segments=setup.row.segments, entries=entries)
    backbone: Any = family.backbone(setup.model.core)
    grid_thw = torch.tensor(grids, device="cpu")
    return backbone.get_image_features(torch.cat(parts), grid_thw, return_dict=True, **{CONTEXT: context})


def _sent(features: torch.Tensor, share: MediaShare, part: RowPart) -> torch.Tensor:
    """Exchange features: from the images that this rank computed to the tokens that it has, in token order."""
    if not isinstance(part, ContextParallelRow) or part.is_whole or not share.media:
        return features
    media = share.route(part.partition, part.rank)
    arrived = part.collectives.along(media.route, features, "images")
    return arrived.index_select(0, to_device(np.argsort(media.tokens.numpy()), features.device))
