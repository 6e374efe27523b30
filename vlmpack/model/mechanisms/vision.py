"""Vision: boundaries of the tower's blocks, and images and videos that ranks compute together.

Blocks attend within a frame of an image, and some within a window of a frame. The host derives these boundaries from
the grids. Towers that take images as rows of a batch are left alone: their own code keeps images apart. Towers (or
parts of towers) that attend within boundaries but get no row keyword (Pixtral, MiniCPM-V, GLM-OCR) become a subclass
that adds it.

Over ranks: each image or video is computed by one rank, which sends the features to the ranks that have its tokens. The
backbone gets them in place of pixels, and its class becomes a subclass whose `get_image_features` and
`get_video_features` return them. The model inserts them at their placeholders as usual, and adds deepstack features
after its first layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from typing import Any, ClassVar, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmpack.context_parallel.vision import Entry, Image, RowMedia, StepMedia, VisionRanks
from vlmpack.families.audio import longest_of_samples
from vlmpack.families.family import Family
from vlmpack.families.media import tile_entries
from vlmpack.layout.batch import SIZES, Media
from vlmpack.layout.device import around_graph, host_values, is_compiled, outside_graph, to_device
from vlmpack.layout.media import AUDIO, IMAGE, KINDS, VIDEO, Grid, Medium, image_counts, placeholders
from vlmpack.layout.segments import Segments
from vlmpack.model.mechanisms import (
    ClassMechanism,
    Maker,
    ModelParts,
    RowSetup,
    handed_on,
    handed_row,
    handing_class,
    replaces,
    subclass,
    taking_class,
)
from vlmpack.model.mechanisms.attention import Attention, RowAttention
from vlmpack.model.mechanisms.audio import Audio, AudioRow, audio_windows
from vlmpack.model.row import CONTEXT, RowContext, RowOverRanks
from vlmpack.plan.balance import CostModel


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
        frames: Sequence[int] = (),
        grids_on_device: bool = False,
    ) -> None:
        self.layouts = tuple(layouts)
        """Boundaries of all calls."""
        self.grids_on_device = grids_on_device
        """Whether the vision tower reads grids on its device."""
        self._by_shape: dict[tuple[int, int], Segments | None] = {}
        for segments in self.layouts:
            shape = (len(segments.lengths) + 1, segments.total)
            first = self._by_shape.setdefault(shape, segments)
            if first != segments:
                self._by_shape[shape] = None
        self.inputs = inputs or {}
        """Keyword arguments that pass images and videos, or their features, to the backbone."""
        self.frames = frames
        """Number of frames of each video, if the backbone computes only videos of equally many together."""

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
        """Return the backbone if it computes media in another way, and towers (or parts of them) without a keyword."""
        family, backbone = model.family, model.family.backbone(model.core)
        together = model.vision is not None
        changed: list[tuple[nn.Module, Maker]] = [(backbone, features_class)] if together else []
        if family.frames_in is not None and not together:
            changed.append((backbone, framed_class))
        if (tower := family.vision_tower(model.core)) is None:
            return changed
        if family.tile_boundaries is not None:
            changed += [*([] if together else [(backbone, handing_class)]), (tower, bounded_class)]
        if family.keeps_grids:
            changed.append((tower, informed_class))
        for path, name in family.keeps_row.items():
            holder = tower.get_submodule(path)
            part = holder.get_submodule(name)
            changed.append((holder, handing_class))
            changed += [(x, taking_class) for x in (part if isinstance(part, nn.ModuleList) else (part,))]
        return changed

    def prepare(self, setup: RowSetup) -> VisionRow:
        """Derive the boundaries of images and videos, and pass on the pixels or compute features with other ranks."""
        family = setup.model.family
        if setup.model.vision is not None:
            return VisionRow((), inputs=_computed_together(setup, setup.model.vision))
        if not family.has_grids:
            media = _with_known_sizes(setup)
            layouts = family.tower_segments(media, setup.config)
            videos = setup.part.computed_media(setup.media).videos
            frames = _frames(family, [video.tokens for video in videos], setup.config)
            return VisionRow(layouts, inputs=media.to_hf() | _known_ids(setup), frames=frames)
        row = setup.row
        media, calls = family.tower_media(row.media, setup.media, row.segments, row.tree)
        grids_of = [_grids(call) for call in calls]
        layouts = [segments for grids in grids_of if grids for segments in family.vision_segments(grids, setup.config)]
        layouts += audio_windows(setup) if family.has_audio else []
        inputs = media.to_hf() | _host_grids(family, grids_of) | _known_ids(setup)
        return VisionRow(layouts, inputs=inputs, grids_on_device=family.reads_grids == "on device")

    def inputs(self, entry: VisionRow) -> Mapping[str, Any]:
        """Return pixels and grids, or features."""
        return entry.inputs


# ---------------------------------------------------------------------- what the host knows
#
# Towers compute positions and boundaries from grids, with several host-device syncs. The host knows the grids, so the
# tower gets them there, and before it runs, transformers' own functions compute on the host what it would compute.
# Models whose images have sizes instead of grids read these one by one: they get them on the host too.


def _host_grids(family: Family, calls: Sequence[Sequence[Grid]]) -> dict[str, torch.Tensor]:
    """Return the grids of images and videos, int64 [n, 3] on the host; {} if the tower reads them on its device."""
    if not family.keeps_grids:
        return {}
    named = zip(("image_grid_thw", "video_grid_thw"), calls, strict=False)
    return {name: torch.tensor(grids, device="cpu") for name, grids in named if grids}


def _with_known_sizes(setup: RowSetup) -> Media:
    """Return the media of a row without grids, with the sizes and counts of images on the host."""
    family, computed = setup.model.family, setup.part.computed_media(setup.media)
    media = setup.row.media.with_sizes(computed)
    counts = image_counts(family.with_contexts(computed).images, in_tree=setup.row.tree is not None)
    names = [name for name, join in family.media.items() if join.counts_images and name in media.tensors]
    return replace(media, tensors={**media.tensors, **{name: torch.tensor(counts, device="cpu") for name in names}})


def _grids(media: Sequence[Medium]) -> list[Grid]:
    return [medium.grid for medium in media if medium.grid is not None]


@replaces()
def informed_class(plain: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Make a subclass of a tower's class that gets what it would compute from grids, and hands its row on."""
    row: RowContext | None = kwargs.get(CONTEXT)
    if row is None:
        return plain(module, *args, **kwargs)
    named = ("hidden_states", "pixel_values", "grid_thw")  # families name pixels in either way
    pixels, grids = (*args, *(kwargs.pop(name) for name in named if name in kwargs))
    known = _inputs_on(pixels.device, module, grids, on_device=row.entries[Vision.name].grids_on_device)
    with handed_on(row):
        return plain(module, pixels, **kwargs, **known)


@outside_graph
def _inputs_on(device: torch.device, tower: nn.Module, grids: Tensor, *, on_device: bool) -> dict[str, Any]:
    """Return what the tower would compute from grids, on its device, and the grids, there or on the host."""
    with host_values():
        inputs = tower_inputs(tower, grids) | ({"grid_thw": grids.cpu()} if on_device else {})
    moved = {name: to_device(x.numpy(), device) for name, x in inputs.items() if isinstance(x, Tensor)}
    return {"grid_thw": grids, **inputs, **moved}


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
    ids = part.cut(setup.row.input_ids).as_subclass(KnownIds)
    ids.masks = masks
    return {"input_ids": ids}


def tower_inputs(tower: Any, grid_thw: torch.Tensor) -> dict[str, Any]:
    """Compute a tower's keyword arguments on the host, with transformers' own functions: numbers, and tensors.

    On a GPU, each of these functions would cost the tower one to four host-device syncs.

        rotary           position_ids     int64 [P, 2]
        boundaries       cu_seqlens       int32 [G + 1] of frames, and max_seqlen
        windows          window_index     int64 [P / merge^2], with cu_window_seqlens and max_window_seqlen
        interpolation    interp_indices   int64 [P, taps] into the learned position embeddings, and interp_weights

    P patches, G frames. `grid_thw`: int64 [n, 3] on the host, the grids of one call.
    """
    from transformers import vision_utils

    grids, merge = grid_thw.cpu(), getattr(tower, "spatial_merge_size", 1)  # PaddleOCR-VL's merges no patches
    edges = vision_utils.get_vision_cu_seqlens(grids)
    inputs: dict[str, Any] = {"position_ids": vision_utils.get_vision_position_ids(grids, merge)}
    inputs |= {"cu_seqlens": edges, "max_seqlen": int(edges.diff().max())}
    if "window_size" in vars(tower):
        index, edges = vision_utils.get_vision_window_index(
            grids, spatial_merge_size=merge, window_size=tower.window_size, patch_size=tower.patch_size
        )
        inputs |= {"window_index": index, "cu_window_seqlens": edges, "max_window_seqlen": int(edges.diff().max())}
    children = (child for part in tower.children() for child in (part, *part.children()))
    interpolating = (part for part in chain((tower,), children) if "num_grid_per_side" in vars(part))
    if (embeddings := next(interpolating, None)) is not None:
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grids,
            num_grid_per_side=embeddings.num_grid_per_side,
            mode=embeddings.interpolation_mode,
            align_corners=embeddings.interpolation_align_corners,
            spatial_merge_size=merge,
        )
        inputs |= {"interp_indices": indices, "interp_weights": weights}
    return inputs


# ---------------------------------------------------------------------- known ids
#
# Token ids and masks with values that the host knows, so that a model's own code reads them without a sync.
#
# transformers finds the placeholders of images by their id, and inserts features by a mask. On a GPU, counting a mask,
# indexing with it, and the backward pass of `masked_scatter` are host-device syncs.
#
#     input_ids == image_token_id      KnownIds     gives a HostMask, from the row's MediaTable
#     mask.sum()                       HostMask     a Python number
#     x.masked_scatter(mask, y)                     the same values, by `index_copy`
#     x[mask], x[mask] = y                          the same, by an index that is copied to the device asynchronously
#
# So the model's own forward runs as it is, with its own checks. T row tokens, D hidden size.


@final
class HostMask(Tensor):
    """A bool tensor on the host that a model uses as a mask of tensors on its device."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace what would be a sync; copy the mask to the device for anything else that needs it there."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass(), host_values():
            if (replaced := _REPLACED.get(func)) is not None and not kwargs:
                result = replaced(*args)
                if result is not NotImplemented:
                    return result
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            other = next((x for x in tensors if not isinstance(x, HostMask)), None)
            if other is None:
                result = func(*args, **kwargs)
                is_mask = isinstance(result, Tensor) and result.dtype == torch.bool
                return result.as_subclass(HostMask) if is_mask else result
            args = [_moved(x, other.device) for x in args]
            return func(*args, **{name: _moved(x, other.device) for name, x in kwargs.items()})


@final
class KnownIds(Tensor):
    """Token ids on a device, with the placeholders that the host knows."""

    masks: Mapping[int, np.ndarray]
    """bool [1, T] for each placeholder's id: where the ids are equal to it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compare with a known id on the host; give plain tensors for anything else."""
        with torch._C.DisableTorchFunctionSubclass():
            if func in (Tensor.__eq__, Tensor.eq) and isinstance(args[1], int) and args[1] in args[0].masks:
                return torch.from_numpy(args[0].masks[args[1]]).as_subclass(HostMask)
            return func(*args, **(kwargs or {}))


def with_plain_ids(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a model's inputs with plain ids: compilers cannot trace ours."""
    return {name: x.as_subclass(Tensor) if isinstance(x, KnownIds) else x for name, x in inputs.items()}


@around_graph
def for_compiler(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a model's inputs, with plain ids if `torch.compile` compiles what the caller calls next."""
    return with_plain_ids(inputs) if is_compiled() else inputs


def _moved(value: Any, device: torch.device) -> Any:
    if not isinstance(value, HostMask):
        return value
    return to_device(np.ascontiguousarray(value.as_subclass(Tensor).numpy()), device)


def _index(mask: HostMask, device: torch.device) -> tuple[Tensor, ...]:
    """Return the positions of the mask's true values along each axis, int64 on `device`, as `nonzero` does."""
    kept: dict[torch.device, tuple[Tensor, ...]] = vars(mask).setdefault("positions", {})
    if device not in kept:
        positions = np.nonzero(mask.as_subclass(Tensor).numpy())
        kept[device] = tuple(to_device(np.ascontiguousarray(axis), device) for axis in positions)
    return kept[device]


def _indexed(x: Tensor, index: Any) -> Any:
    """Replace the masks in an index of `x` by positions."""
    if isinstance(x, HostMask):
        return index
    parts = index if isinstance(index, tuple) else (index,)
    return tuple(
        position for part in parts for position in (_index(part, x.device) if isinstance(part, HostMask) else (part,))
    )


def _get(x: Tensor, index: Any) -> Any:
    return NotImplemented if isinstance(x, HostMask) else x[_indexed(x, index)]


def _set(x: Tensor, index: Any, value: Any) -> Any:
    x[_indexed(x, index)] = value


def _count(mask: Tensor, *axes: Any) -> Any:
    return NotImplemented if axes else int(np.count_nonzero(mask.numpy()))


def _to(mask: Tensor, *target: Any) -> Any:
    """A mask stays on the host when a model moves it to its device."""
    is_device = isinstance(mask, HostMask) and isinstance(target[0], str | torch.device)
    return mask if is_device else NotImplemented


def _expand_as(mask: Tensor, other: Tensor) -> Any:
    return mask.expand(other.shape).as_subclass(HostMask)


def _masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Any:
    """Insert the next rows of `source`, [..., D], at every token of the mask: [1, T, 1], or expanded to [1, T, D]."""
    whole_tokens = isinstance(mask, HostMask) and mask.ndim == x.ndim and 0 in (mask.shape[-1] - 1, mask.stride(-1))
    if not whole_tokens or mask.shape[:-1] != x.shape[:-1]:
        return NotImplemented
    tokens = mask[..., 0].numpy()
    index = to_device(np.flatnonzero(tokens), x.device)
    rows = source.reshape(-1, x.shape[-1])[: len(index)]
    return x.flatten(0, -2).index_copy(0, index, rows).view(x.shape)


_REPLACED: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _get,
    Tensor.__setitem__: _set,
    Tensor.sum: _count,
    Tensor.to: _to,
    Tensor.expand_as: _expand_as,
    Tensor.masked_scatter: _masked_scatter,
}
"""Functions of tensors that are computed in another way; each may return NotImplemented."""


# ---------------------------------------------------------------------- towers that get no row keyword


@replaces()
def bounded_class(plain: Any, module: Any, pixel_values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Make a subclass of a tower's class that adds the row, and boundaries if images have sizes.

    transformers 5.17 gives the blocks of Pixtral's tower no boundaries.
    """
    sizes, row = kwargs.get("image_sizes"), handed_row()
    if sizes is not None:
        if row is None:
            patches = torch.as_tensor(sizes) // module.patch_size
            segments = Segments.from_lengths(patches.prod(-1).tolist())
        else:
            (segments,) = row.entries[Vision.name].layouts
        kwargs |= _keywords_of(segments, pixel_values.device)
    if row is not None:
        kwargs[CONTEXT] = row
    return plain(module, pixel_values, *args, **kwargs)


def _keywords_of(segments: Segments, device: torch.device) -> dict[str, Any]:
    """Return the keywords with which transformers' attention gets boundaries."""
    edges, longest = segments.cu_seqlens(device), segments.max_length
    return {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": longest, "max_length_k": longest}


# ---------------------------------------------------------------------- videos of equally many frames


def _frames(family: Family, tokens: Sequence[int], config: Any) -> list[int]:
    """Return the number of frames of each video, from its tokens; []: the family takes any number in a call."""
    return [] if family.frames_in is None else [family.frames_in(count, config) for count in tokens]


@functools.cache
def framed_class(base: Any) -> type[nn.Module]:
    """Return a subclass of a backbone's class that computes videos of equally many frames together."""
    makers = {"forward": handing_class, _GETTERS[VIDEO]: _framed_class}
    return subclass(base, {name: getattr(maker(base), name) for name, maker in makers.items()}, framed_class)


@replaces("get_video_features")
def _framed_class(plain: Any, module: Any, videos: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute videos [N, F, ...] without their padding, and return features as if all belonged to one video."""
    row = handed_row()
    frames = () if row is None else row.entries[Vision.name].frames
    if {*frames} <= {videos.shape[1]}:
        return plain(module, videos, *args, **kwargs)
    features, of_videos = None, dict[int, Tensor]()
    for count in sorted({*frames}):
        of_count = [at for at, own in enumerate(frames) if own == count]
        features = plain(module, torch.stack([videos[at, :count] for at in of_count]), *args, **kwargs)
        of_videos |= zip(of_count, features.pooler_output, strict=True)
    assert features is not None
    features.pooler_output = torch.cat([of_videos[at] for at in range(len(frames))])[None]
    return features


# ---------------------------------------------------------------------- features instead of pixels


@final
class Computed:
    """Features of this rank's tokens, passed to the backbone in place of pixels."""

    def __init__(self, features: Any) -> None:
        self.features = features
        """The return value of `get_image_features` or `get_video_features`."""

    def size(self, dim: int) -> int:
        """Return 1: models ask whether there are pixels."""
        return 1

    def __getitem__(self, index: Any) -> Computed:
        """Return itself: models take a part of the pixels."""
        return self


_INPUTS = {IMAGE: "pixel_values", VIDEO: "pixel_values_videos", AUDIO: "input_features"}
_GETTERS = {IMAGE: "get_image_features", VIDEO: "get_video_features", AUDIO: "get_audio_features"}
_AUDIO = ("input_features", "feature_attention_mask")
_GRIDS = {IMAGE: "image_grid_thw", VIDEO: "video_grid_thw"}


@functools.cache
def features_class(base: Any) -> type[nn.Module]:
    """Return a subclass of a backbone's class that accepts `Computed` in place of pixels. One per base class."""

    def accepting(plain: Any) -> Any:
        @functools.wraps(plain)
        def features(self: Any, *args: Any, **kwargs: Any) -> Any:
            pixels = args[0] if args else next((kwargs[name] for name in _INPUTS.values() if name in kwargs), None)
            return pixels.features if isinstance(pixels, Computed) else plain(self, *args, **kwargs)

        return features

    own = {name: accepting(getattr(base, name)) for name in _GETTERS.values() if hasattr(base, name)}
    if (videos := _GETTERS[VIDEO]) in own:
        own[videos] = accepting(getattr(_framed_class(base), videos))
    return subclass(base, own, features_class)


def join_features(features: Any, name: str) -> Tensor:
    """Join the features of a call into one tensor [n, D (1 + L)], with L deepstack levels after the first D.

    Args:
        features: what the model's own `get_image_features` returns. Its `pooler_output` replaces the embeddings of
            placeholders: [n, D] for each image, or a tensor [N, n, D] of N tiles. In some families it also has
            `deepstack_features`, one level for each of the first text layers, added after that layer: [n, D] for each
            image, or one tensor (transformers 5.17).
        name: its attribute with the features: `pooler_output`, or `last_hidden_state` for audio.
    """
    levels = [getattr(features, name), *(getattr(features, "deepstack_features", None) or ())]
    return torch.cat([x.flatten(0, -2) if isinstance(x, Tensor) else torch.cat(tuple(x)) for x in levels], -1)


def split_features(joined: Tensor, like: Any, name: str) -> Any:
    """Split a tensor into features, the inverse of `join_features`, as if they all belonged to one image.

    `like`: features of the same model, for their form.
    """
    form, out = getattr(like, name), type(like)()  # transformers 5.17 has no such field in some classes
    pooled, *levels = joined.split(form[0].shape[-1], -1)
    setattr(out, name, pooled.unsqueeze(1) if isinstance(form, Tensor) else (pooled,))
    if levels:
        forms = zip(levels, like.deepstack_features, strict=True)
        out.deepstack_features = [level if isinstance(form, Tensor) else (level,) for level, form in forms]
    return out


# ---------------------------------------------------------------------- images that ranks compute together
#
# A row describes its images (`RowMedia`), and the entries of its tensors go to the ranks that compute the images. A
# tower computes all images and videos in one call, or videos in a second one.


def _computed_together(setup: RowSetup, ranks: VisionRanks) -> dict[str, Computed]:
    """Return the features of this rank's tokens, by the keyword of the backbone for pixels.

    Every rank calls the towers equally often for every row, even if it has no images to compute.
    """
    family, part = setup.model.family, setup.part
    media, calls = family.tower_media(setup.row.media, setup.media, setup.row.segments, setup.row.tree)
    audios = part.computed_media(setup.media).audios
    of_kind = {IMAGE: calls[0], VIDEO: () if len(calls) == 1 else calls[1], AUDIO: audios}
    row, own = _row_media(setup, media, of_kind)
    if isinstance(part, RowOverRanks):
        places_F = placeholders([medium for of in of_kind.values() for medium in of], setup.row.segments)
        row = replace(row, parts_F=part.rank_of(places_F))
    step = ranks.step(row)
    arrived: dict[str, torch.Tensor] = {}
    for name, entry in step.tensors.items():
        if name in own:
            missing = [(0, size - n) for size, n in zip(entry.shape, own[name].shape[1:], strict=True)]
            x = F.pad(own[name], [end for pair in reversed(missing) for end in pair])
        else:
            x = torch.empty(0, *entry.shape, dtype=entry.dtype, device=setup.row.input_ids.device)
        arrived[name] = ranks.send(step.send(name), x, "pixels")
    tokens = {kind: sum(medium.tokens for medium in of) for kind, of in of_kind.items()}
    if row.parts_F is not None:
        parts = np.split(row.parts_F, np.cumsum([*tokens.values()]))
        tokens = {kind: int((held == part.rank).sum()) for kind, held in zip(tokens, parts, strict=False)}
    computed: dict[str, Computed] = {}
    for call, kinds in enumerate(family.tower_calls):
        items = step.items(ranks.rank, call)
        if AUDIO in kinds:
            features = _audio_features(setup, arrived, step, call, items)
        else:
            features = _features(setup, kinds[0], arrived, step.told(items))
        name = "last_hidden_state" if AUDIO in kinds else "pooler_output"
        received = ranks.send(step.send_features(call), join_features(features, name)[: step.tokens(items)], "images")
        for kind, part_F in zip(kinds, received.split([tokens[kind] for kind in kinds]), strict=True):
            computed[_INPUTS[kind]] = Computed(split_features(part_F, features, name))
    return computed


def _row_media(
    setup: RowSetup, media: Media, of_kind: Mapping[int, Sequence[Medium]]
) -> tuple[RowMedia, dict[str, torch.Tensor]]:
    """Return the description of a row's images, videos and audios, and their tensors, entries along the first axis.

    `media`: the row's tensors as the backbone takes them.
    """
    family, images, tensors = setup.model.family, [], {}
    for call, kinds in enumerate(family.tower_calls):
        of_call = [medium for kind in kinds for medium in of_kind[kind]]
        if AUDIO in kinds:
            found = _audios(setup, of_call)
            tensors |= {name: setup.row.media.tensors[name] for image in found[:1] for name in image.entries}
        elif family.has_grids:
            pixels = [x for kind in kinds if isinstance(x := media.to_hf().get(_INPUTS[kind]), torch.Tensor)]
            tensors |= {_INPUTS[kinds[0]]: torch.cat(pixels) if len(pixels) > 1 else pixels[0]} if pixels else {}
            found = _with_grids(setup, kinds[0], of_call)
        else:
            found, of_tiles = _tiles(setup, kinds[0])
            tensors |= of_tiles
        images += [replace(image, call=call) for image in found]
    joins = {name: family.media[name] for name in tensors}
    entries = {n: Entry(dtype=x.dtype, shape=tuple(x.shape[1:]), pads=joins[n].pad) for n, x in tensors.items()}
    return RowMedia(images=tuple(images), tensors=entries), tensors


def _with_grids(setup: RowSetup, kind: int, media: Sequence[Medium]) -> list[Image]:
    """Describe images and videos with grids."""
    family, config, grids = setup.model.family, setup.config, _grids(media)
    costs = _costs(config.vision_config, [prod(grid) for grid in grids], [_pairs(family, config, g) for g in grids])
    return [
        Image(cost=cost, tokens=x.tokens, entries={_INPUTS[kind]: x.patches}, told={_GRIDS[kind]: [x.grid]})
        for x, cost in zip(media, costs, strict=True)
    ]


def _tiles(setup: RowSetup, kind: int) -> tuple[list[Image], dict[str, torch.Tensor]]:
    """Describe tiles, or images and videos without grids, and return their tensors.

    Images that the model counts (`Join.counts_images`) stay together with the others of their sample.
    """
    family, config = setup.model.family, setup.config
    tensors, images = _with_known_sizes(setup).to_hf(), []
    if family.without_padding is not None:
        tensors = family.without_padding(tensors)
    tokens, entries = tile_entries(family, tensors, config, kind)
    if not tokens:
        return [], {}
    counts = [name for name, x in family.media.items() if x.counts_images and kind == IMAGE and name in tensors]
    groups = tensors[counts[0]].tolist() if counts else [1] * len(tokens)
    costs = _costs(config.vision_config, *family.tile_work(tensors, entries, config, kind).T)
    start = 0
    for size in groups:
        own = slice(start, start := start + size)
        told = {name: tensors[name][own].tolist() for name in entries if name in SIZES}
        sent = {name: sum(of[own]) for name, of in entries.items() if name not in SIZES}
        told |= {name: [size] for name in counts}
        if kind == VIDEO and family.frames_in is not None:
            told["frames"] = _frames(family, tokens[own], config)
        images.append(Image(cost=sum(costs[own]), tokens=sum(tokens[own]), entries=sent, told=told))
    return images, {name: tensors[name].movedim(family.media[name].axis, 0) for name in images[0].entries}


def _audios(setup: RowSetup, audios: Sequence[Medium]) -> list[Image]:
    """Describe audios; their frames are told, with those of the longest one of their sample."""
    family, config, longest = setup.model.family, setup.config, longest_of_samples(setup.media)
    part, audio, vision = family.audio, config.audio_config, config.vision_config
    assert part is not None
    windows = [np.asarray(part.windows([each.frames], audio).lengths) for each in audios]
    counts_N2 = np.asarray([(lengths.sum(), (lengths**2).sum()) for lengths in windows]).reshape(-1, 2)
    block = _block(audio.d_model, audio.encoder_ffn_dim)
    costs = block.of_samples(np.zeros(len(audios)), *counts_N2.T) * audio.encoder_layers
    costs = costs / (_block_of(vision).patch * vision.depth)
    return [
        Image(
            cost=round(cost),
            tokens=each.tokens,
            entries=dict.fromkeys(_AUDIO, 1),
            told={"frames": [(each.frames, longest[each.sample])]},
        )
        for each, cost in zip(audios, costs.tolist(), strict=True)
    ]


def _costs(vision: Any, patches: Sequence[int], pairs: Sequence[float]) -> list[int]:
    """Return the cost of each image in one block of a tower, as a number of patches without attention."""
    block = _block_of(vision)
    if not block.patch:  # patches are embedded, and there are no blocks
        return [*patches]
    costs = block.of_samples(np.zeros(len(patches)), np.asarray(patches), np.asarray(pairs)) / block.patch
    return np.rint(costs).astype(int).tolist()


def _block_of(vision: Any) -> CostModel:
    vision = getattr(vision, "sam_config", vision)
    width = getattr(vision, "embed_dim", None) or getattr(vision, "hidden_size", 0)
    return _block(width, getattr(vision, "intermediate_size", 4 * width))


def _block(width: int, inner: int) -> CostModel:
    """Return the costs of one block of a tower."""
    sizes = {"vision_hidden": width, "vision_layers": 1, "vision_intermediate": inner}
    return CostModel.from_sizes(hidden=0, layers=0, intermediate=0, **sizes)


def _pairs(family: Family, config: Any, grid: Grid) -> float:
    """Return the number of pairs of patches that attend to each other in one block, the mean over blocks."""
    vision = config.vision_config
    whole, *windows = (sum(n * n for n in layout.lengths) for layout in family.vision_segments([grid], config))
    if not windows:
        return whole
    share = len(vision.fullatt_block_indexes) / vision.depth
    return share * whole + (1 - share) * windows[0]


def _features(setup: RowSetup, kind: int, arrived: dict[str, torch.Tensor], told: dict[str, list[Any]]) -> Any:
    """Compute the features of a call's images, and of a blank one behind them where a tensor of pixels is missing."""
    family, config, device = setup.model.family, setup.config, setup.row.input_ids.device
    blank, on_host = family.blank_media(kind, config), {*SIZES, *(_GRIDS.values() if family.keeps_grids else ())}
    frames = told.pop("frames", ())
    inputs = {name: torch.tensor(rows, device="cpu") for name, rows in told.items()}
    inputs |= {name: x.movedim(0, family.media[name].axis) for name, x in arrived.items() if len(x) and name in blank}
    if any(name.startswith("pixel_values") and name not in inputs for name in blank):
        others = {name: x.to(arrived[name].dtype) if name in arrived else x for name, x in blank.items()}
        inputs = others | {name: torch.cat([x, torch.ones_like(x[:1])]) for name, x in inputs.items()}
    if family.has_grids:
        layouts = family.vision_segments([tuple(grid) for grid in inputs[_GRIDS[kind]].tolist()], config)
    else:
        layouts = family.tower_segments(Media.from_hf(inputs, names=inputs.keys()), config)
    for name, x in inputs.items():
        if x.device != device and name not in on_host and not family.media[name].counts_images:
            inputs[name] = to_device(x.numpy(), device)
    entry = VisionRow(layouts, frames=frames, grids_on_device=family.reads_grids == "on device")
    return _called(setup, kind, inputs, {Vision.name: entry})


def _audio_features(
    setup: RowSetup, arrived: dict[str, torch.Tensor], step: StepMedia, call: int, items: Sequence[int]
) -> Any:
    """Compute the features of audios, and of blank ones behind them, so that all ranks have equally many groups.

    A tower that reads padding computes an audio together with one whose first chunk is as long as the longest of the
    audio's sample; if that one is on another rank, with a blank one.
    """
    family, config, device = setup.model.family, setup.config, setup.row.input_ids.device
    part = family.audio
    assert part is not None
    all_items = [at for at, image in enumerate(step.images) if image.call == call]
    audios, all_audios = (step.told(at).get("frames", []) for at in (items, all_items))
    wanted = {part.group_of(longest, config) for _, longest in all_audios} or {part.group_of(2**31, config)}
    reach = {group: [n for n, longest in audios if part.group_of(longest, config) == group] for group in wanted}
    blanks = [group for group, frames in reach.items() if not frames or (part.reads_padding and max(frames) < group)]
    inputs = {name: arrived[name] for name in _AUDIO if name in arrived and audios}
    if blanks:
        for name, x in family.blank_media(AUDIO, config).items():
            x = x.repeat(len(blanks), *[1] * (x.ndim - 1))
            if name == "feature_attention_mask":
                x *= torch.arange(x.shape[1]) < torch.tensor(blanks)[:, None]
            x = to_device(x.numpy(), device)
            inputs[name] = family.media[name]([inputs[name], x.to(inputs[name].dtype)]) if name in inputs else x
    audios = [*audios, *((n, n) for n in blanks)]
    frames, groups = [n for n, _ in audios], [part.group_of(longest, config) for _, longest in audios]
    calls = [[at for at, group in enumerate(groups) if group == each] for each in sorted(wanted)]
    tokens = tuple(part.tokens(n, config.audio_config) for n in frames)
    layouts = [part.windows([frames[at] for at in each], config.audio_config) for each in calls]
    row = AudioRow(frames=tuple(frames), tokens=tokens, groups=calls)
    return _called(setup, AUDIO, inputs, {Vision.name: VisionRow(layouts), Audio.name: row})


def _called(setup: RowSetup, kind: int, inputs: Mapping[str, torch.Tensor], entries: Mapping[str, Any]) -> Any:
    """Call a tower through the backbone, as its own forward does."""
    entries = {**entries, Attention.name: RowAttention(setup.backend)}
    context = RowContext(segments=setup.row.segments, entries=entries)
    with handed_on(context):
        keywords = {CONTEXT: context} if setup.model.family.has_grids else {}
        keywords |= {name: x for name, x in inputs.items() if name != _INPUTS[kind]}
        getter = getattr(setup.model.family.backbone(setup.model.core), _GETTERS[kind])
        return getter(inputs[_INPUTS[kind]], return_dict=True, **keywords)  # each version names its first argument
