"""The description of a model family: its submodules, positions, media, and the mechanisms of its layers.

Multimodal rotary positions of a sample, four text tokens around an image of 1 x 4 x 4 patches, 2 x 2 patches per token:

    types     0 0 1 1 1 1 0 0
    text      0 1 2 3 4 5 6 7        position in the sample
    time      0 1 2 2 2 2 4 5        an image advances later positions by max(rows, columns) of its tokens
    height    0 1 2 2 3 3 4 5
    width     0 1 2 3 2 3 4 5

N runs, M media tokens, T row tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from importlib.metadata import version
from math import prod
from typing import Any, Literal, final

import numpy as np
import torch
from torch import nn

from vlmpack.errors import FamilyError, LayoutError
from vlmpack.families.audio import AudioPart, longest_of_samples, replace_videos
from vlmpack.families.frames import frames_as_images, kinds_between
from vlmpack.families.pixels import Draws
from vlmpack.families.spans import Bidirectional, Prefix
from vlmpack.families.tiles import QWEN_MEDIA, Join, TileBoundaries, TileEntries, TileTokens, patches_in
from vlmpack.layout.batch import Media
from vlmpack.layout.device import outside_graph, to_device
from vlmpack.layout.media import AUDIO, IMAGE, KINDS, VIDEO, Grid, MediaTable, Medium, placeholders
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.row import PackedRow
from vlmpack.layout.segments import Segments

TRANSFORMERS = tuple(int(part) for part in version("transformers").split(".")[:2])
"""The installed version of transformers: (major, minor)."""

LogitsRule = Callable[[torch.Tensor, Any], torch.Tensor]
"""Function of the head's output and the text part's configuration; returns logits."""


@final
@dataclass(frozen=True, kw_only=True)
class Placement:
    """The placeholder tokens of an image or video, as its family's processor writes them."""

    cells: tuple[Grid, ...]
    """Frames, rows and columns of tokens of each run of placeholders."""
    interval: float = 1.0
    """Distance in positions from one frame of a run to the next, before rounding down."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Number of placeholders of each run."""
        return tuple(map(prod, self.cells))


VideoPlacement = Callable[[Grid, float | None, Any], Placement]
"""Function of a video's grid in tokens (frames, rows, columns), its seconds per frame, and the vision configuration;
returns the runs that the family's processor writes. Its LayoutErrors do not name the video; the caller adds that."""


def single_run(grid: Grid, seconds: float | None, vision: Any) -> Placement:
    """Place an image, or a video, as one run of tokens; frames are one position apart."""
    return Placement(cells=(grid,))


def plain_logits(output: torch.Tensor, text_config: Any) -> torch.Tensor:
    """Return the head's output as logits."""
    return output


@final
@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary positions: time, height and width from the grids of images and videos, or the position in the sample."""

    axes: int = 3
    """Number of rotary positions per token: 3 (time, height, width) or 1 (position in the sample)."""
    start: int = 0
    """Position of the first token."""
    timed: type[np.number] | None = None
    """dtype of the positions if a video moves later tokens by its duration: whole numbers, or float32; None: it moves
    them by its rows or columns, as an image does."""


@final
@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family, as data.

    `config` is always the configuration of the whole model; with vision, it contains a text and a vision configuration.
    """

    model_type: str
    """`config.model_type` of the family."""
    oldest_transformers: tuple[int, int] = (5, 17)
    """Oldest (major, minor) version of transformers that this descriptor was tested with."""
    mechanisms: Mapping[str, Mapping[str, str]] = field(default_factory=dict, hash=False)
    """Mechanisms of its decoder layers besides plain attention (`vlmpack.model.mechanisms`), by name, each with the
    names of its submodules."""
    positions_rule: Rotary = field(default_factory=Rotary)
    """Rule for the rotary positions of its text part."""
    videos: VideoPlacement = single_run
    """How its processor writes videos as tokens."""
    videos_as_images: bool = False
    """True if its videos have the placeholder of images: a row then passes their frames to the model as images."""
    tile_tokens: TileTokens | None = None
    """Number of placeholder tokens of each tile or image, for a tiled family (its images are rows of a batch, or
    tiles); None: images are patches with grids."""
    tile_entries: TileEntries | None = None
    """For a tiled family: number of entries of each tile or image in tensors where it is not 1; None: it always is."""
    without_padding: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] | None = None
    """For a tiled family: function that removes padding tiles from the tensors; None: they have none."""
    video_tokens: TileTokens | None = None
    """For a tiled family: number of placeholder tokens of each video; None: it takes no videos."""
    frames_in: Callable[[int, Any], int] | None = None
    """For a tiled family that computes only videos of equally many frames together: the number of frames of a video
    with that many tokens; None: another family."""
    tile_boundaries: TileBoundaries | None = None
    """For a tiled family: the boundaries that blocks of its tower attend within; None: its tower needs none."""
    token_types: str | None = "mm_token_type_ids"
    """Keyword of the backbone for the kind of each token; None: it has none."""
    expert_types: str | None = None
    """Keyword of the backbone for the token kinds that select experts, in which tokens that start or end an image or
    video count as its own; None: it has none."""
    headless_class: str | None = None
    """Name of the transformers class of models without a head; None: the model has its head."""
    processor_name: str | None = None
    """Name of the transformers class of its processor; None: the one that `AutoProcessor` has for the family."""
    flat_patches: bool = True
    """True if `pixel_values` is [P, C]; False: [P, channels, rows, columns]."""
    patches_of_frames: bool = True
    """True if a patch has `temporal_patch_size` frames (an image is repeated); False: one frame."""
    reads_grids: Literal["on host", "on device", "alone"] = "on host"
    """Where its vision tower reads grids, while vlmpack computes on the host what follows from them. "alone": on its
    device, and the tower computes the rest there."""
    videos_apart: bool = False
    """True if its tower computes images and videos with grids in a call each."""
    image: Draws | None = None
    """For a tiled family: function that draws the tensors of an image."""
    video: Draws | None = None
    """The same of a video; None: it takes no videos."""
    blank: Callable[[Any], Mapping[str, torch.Tensor]] | None = None
    """For a tiled family: function of the configuration that returns the tensors of a small image; None: `image` draws
    one of one cell."""
    image_work: Callable[[Mapping[str, torch.Tensor], Any], Sequence[tuple[int, int]]] | None = None
    """For a tiled family: the number of tiles of each image that the tower computes, and the patches of one; None: as
    many as there are pixels."""
    not_over_ranks: str | None = None
    """Why ranks cannot compute its images together (`Parallel`); None: they can."""
    oldest_over_ranks: tuple[int, int] = (5, 17)
    """Oldest (major, minor) version of transformers with which they can."""
    audio: AudioPart | None = None
    """Its audio part; None: it takes no audio."""
    text_type: str | None = None
    """`model_type` of the transformers module with its decoder layers; None: its own."""
    backbone_path: str | None = "model"
    """The model without its head; "": the model itself; None: there is none, because the head is inside the text
    part."""
    text_path: str = "model.language_model"
    """The text part: embeddings and positions in, hidden states out."""
    vision_path: str | None = "model.visual"
    """The vision part: patches in, image features out; None: text only."""
    blocks_path: str = "blocks"
    """The blocks inside the vision part, for a tower that attends within boundaries."""
    keeps_row: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Modules of the vision part that do not pass keyword arguments of a row on to a submodule (or a list of
    submodules) that attends within boundaries: the path of each module, and the path of that submodule inside it.
    ``""`` is the vision part itself."""
    head_path: str = "lm_head"
    """The linear layer from hidden states to logits, or to the input of `logits`."""
    returns_router_logits: bool = True
    """False if the backbone has experts but does not return their router logits."""
    logits: LogitsRule = plain_logits
    """Function that the model applies to the head's output."""
    bidirectional: Bidirectional | None = None
    """The tokens that attend to later tokens of their sample; None: attention is causal."""
    media: Mapping[str, Join] = field(default_factory=lambda: QWEN_MEDIA, hash=False)
    """The backbone's media tensors by name, and how the tensors of several samples are joined."""

    @cached_property
    def model_class(self) -> str:
        """Name of the transformers class to train."""
        from transformers.models.auto import modeling_auto as auto

        with_vision, text = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        return self.headless_class or (with_vision if self.has_vision else text)[self.model_type]

    @property
    def processor(self) -> str:
        """Name of the transformers class of its processor."""
        from transformers.models.auto import processing_auto as auto

        names: Any = auto.PROCESSOR_MAPPING_NAMES  # pyright: ignore[reportPrivateImportUsage]
        return self.processor_name or names[self.model_type]

    @property
    def modeling(self) -> str:
        """Name of the transformers module that defines its layers and the functions that they call."""
        name = self.text_type or self.model_type
        return f"transformers.models.{name}.modeling_{name}"

    @property
    def has_vision(self) -> bool:
        """Return whether it takes images and videos."""
        return self.vision_path is not None

    @property
    def auto_class(self) -> Any:
        """The class of transformers that loads models of this family with their head."""
        name = "AutoModelForImageTextToText" if self.has_vision else "AutoModelForCausalLM"
        return getattr(import_module("transformers"), name)

    @property
    def has_grids(self) -> bool:
        """Return whether its images are patches with grids."""
        return self.has_vision and self.tile_tokens is None

    @property
    def keeps_grids(self) -> bool:
        """Return whether grids stay on the host, where vlmpack computes what the vision tower needs of them."""
        return self.has_grids and self.reads_grids != "alone"

    @property
    def has_videos(self) -> bool:
        """Return whether it takes videos, in tensors of their own."""
        return "pixel_values_videos" in self.media

    @property
    def has_audio(self) -> bool:
        """Return whether it takes audio."""
        return self.audio is not None

    @property
    def pixel_names(self) -> tuple[str, ...]:
        """Names of the tensors that hold pixels."""
        return tuple(name for name in self.media if name.startswith("pixel_values"))

    def has(self, mechanism: str) -> bool:
        """Return whether its layers have this mechanism."""
        return mechanism in self.mechanisms

    @property
    def token_columns(self) -> tuple[str, ...]:
        """Names of the batch columns that packed rows need besides ids: the column that marks the prefix."""
        return (self.bidirectional.column,) if isinstance(self.bidirectional, Prefix) else ()

    @property
    def processor_class(self) -> type:
        """The transformers class of its processor."""
        return getattr(import_module("transformers"), self.processor)

    # ------------------------------------------------------------------ positions

    @outside_graph
    def positions(
        self,
        table: MediaTable,
        segments: Segments,
        *,
        config: Any,
        restarts: Segments | None = None,
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """Return the positions of a packed row: int64 [4, 1, T], the position in the sample, then time, height, width.

        Time, height and width of every segment are equal, bit for bit, to those that `get_rope_index` of the installed
        transformers returns for the sample on its own. The position in the sample is 0, 1, 2, ...; padding is 0.
        Positions are float32 if the model's own are (`Rotary.timed`). They are computed on the host, without a
        host–device sync.

        Args:
            table: the media of the row (`media_of_row`).
            segments: the boundaries of the row's samples.
            config: the model's configuration.
            restarts: the boundaries where rotary positions restart (`rope_cu_seqlens`); None: at each sample.
            device: device of the result.

        Raises:
            LayoutError: a grid is impossible, or a video without seconds needs them.
        """
        restarts = restarts or segments
        if not (table.images or table.videos) or self.positions_rule.axes == 1:
            return restarts.position_in_segment(device).expand(4, 1, -1).contiguous()
        media = (*table.images, *table.videos)
        offsets_4M = token_offsets(self.placements(media, config))
        positions_4T = row_positions(placeholders(media, segments), offsets_4M, restarts)
        if (dtype := self.positions_rule.timed) is not None:
            positions_4T = replace_videos(dtype, positions_4T, table, segments, restarts, config)
        return to_device(positions_4T[:, None], torch.device(device))

    def rotary_ids(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the model's `position_ids` from positions [4, 1, T].

        With three axes, these are time, height and width, [3, 1, T]; with one axis, the position in the sample plus
        `Rotary.start`, [1, T]. With all four, transformers would itself search for packed samples, with a sync.
        """
        rule = self.positions_rule
        return positions[-3:] if rule.axes == 3 else positions[0] + rule.start if rule.start else positions[0]

    # ------------------------------------------------------------------ media

    def placements(self, media: Sequence[Medium], config: Any) -> list[Placement]:
        """Return the tokens of images and videos with grids, in the order of `media`.

        Raises:
            LayoutError: a grid is impossible. Names the image or video by its index among those of its kind.
        """
        merge, vision, placements = self.merge(config), config.vision_config, list[Placement]()
        for at, medium in enumerate(media):
            assert medium.grid is not None, "a family with grids"
            place = self.videos if medium.kind == VIDEO else single_run
            try:
                placements.append(place(merged_grid(medium.grid, merge), medium.seconds, vision))
            except LayoutError as error:
                number = sum(other.kind == medium.kind for other in media[:at])
                raise LayoutError(f"{KINDS[medium.kind]} {number}: {error}") from None
        return placements

    def media_tokens(self, grids: Sequence[Grid], config: Any) -> int:
        """Return the number of placeholder tokens of all images with these grids."""
        return sum(sum(each.tokens) for each in self.placements([Medium(kind=IMAGE, grid=g) for g in grids], config))

    def video_runs(self, grids: Sequence[Grid], config: Any) -> list[int]:
        """Return the number of tokens in each run of placeholders of these videos; a run is a video, or a frame."""
        return [n for each in self.placements([Medium(kind=VIDEO, grid=g) for g in grids], config) for n in each.tokens]

    def check_takes(self, media: Sequence[Medium]) -> None:
        """Raise a `LayoutError` for images and videos with grids that models of the family do not take."""
        videos = sum(medium.kind == VIDEO for medium in media if medium.grid)
        count = sum(medium.grid is not None for medium in media)
        if count and not self.has_vision:
            raise LayoutError(f"{self.model_type} is a text model, but the batch has {count} images or videos")
        if count and not self.has_grids:
            raise LayoutError(
                f"images of {self.model_type} have no grids, but the batch has {count}; use the processor that belongs "
                "to the model"
            )
        if videos and not self.has_videos:
            raise LayoutError(f"{self.model_type} takes no videos, but the batch has {videos}; leave them out")

    def with_contexts(self, table: MediaTable) -> MediaTable:
        """Set `Medium.context`: the value that a medium's features depend on besides its own tensors."""
        counts_images = any(join.counts_images for join in self.media.values())
        of_samples = [image.sample for image in table.images]
        longest = longest_of_samples(table) if self.audio is not None and self.audio.reads_padding else {}

        def context(medium: Medium) -> bool | int | None:
            if medium.kind == IMAGE:
                return of_samples.count(medium.sample) == 1 if counts_images else None
            return longest.get(medium.sample) if medium.kind == AUDIO else None

        return replace(table, media=tuple(replace(medium, context=context(medium)) for medium in table.media))

    def check_floats(self, media: Media) -> None:
        """Check that pixels and audio features are floats: towers would cast whole numbers, or fail."""
        for name, tensor in media.to_hf().items():
            is_float = not isinstance(tensor, torch.Tensor) or tensor.is_floating_point()
            if not is_float and name in (*self.pixel_names, "input_features"):
                raise LayoutError(
                    f"{name} is {tensor.dtype}, but the model reads rescaled and normalized floats; give what its "
                    "processor makes (pixels of 0 to 255 are not that), or .float() of values that were stored rounded"
                )

    def media_types(self, input_ids: torch.Tensor, config: Any) -> torch.Tensor:
        """Return the kind of each token, as a processor's `mm_token_type_ids`: int64 in the shape of `input_ids`.

        0 text, 1 image, 2 video, 3 audio.
        """
        if not self.has_vision:
            return torch.zeros_like(input_ids)
        if self.videos_as_images:
            return kinds_between(input_ids, config)
        types = (input_ids == config.image_token_id).long()
        types = types + VIDEO * (input_ids == config.video_token_id).long() if self.has_videos else types
        return types + AUDIO * (input_ids == config.audio_token_id).long() if self.has_audio else types

    def types_of_row(self, row: PackedRow, config: Any) -> torch.Tensor:
        """Return the kind of each token of a row, [1, T].

        If images and videos have the same placeholder, the row's `mm_token_type_ids` tell them apart, or without
        them, the tokens that start and end videos in the same sample.
        """
        if not self.videos_as_images:
            return self.media_types(row.input_ids, config)
        return kinds_between(row.input_ids, config, segments=row.segments, column=row.mm_token_type_ids)

    @property
    def type_values(self) -> str:
        """The values of `mm_token_type_ids` on placeholders, as text for a message."""
        kinds = ((IMAGE, "image", self.has_vision), (VIDEO, "video", self.has_videos), (AUDIO, "audio", self.has_audio))
        return "".join(f"{value} exactly on {name} placeholders, " for value, name, has in kinds if has)

    def tower_media(
        self, media: Media, table: MediaTable, segments: Segments, tree: PrefixTree | None
    ) -> tuple[Media, tuple[tuple[Medium, ...], ...]]:
        """Return a row's media as the backbone takes them, and the images or videos of each call of its tower.

        `table`: the media of the samples.

        Raises:
            LayoutError: see `frames_as_images`.
        """
        if self.videos_as_images:
            media, images = frames_as_images(media, table, segments, tree, self.model_type)
            return media, (images,)
        computed = table if tree is None else table.in_tree(tree)
        return media, (computed.images, computed.videos)

    def expert_types_of(self, input_ids: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
        """Return the column `expert_types` as the family's processor makes it; {} if the family has none.

        int64 in the shape of `input_ids`.
        """
        if self.expert_types is None:
            return {}
        types = torch.zeros_like(input_ids)
        for kind, name in (IMAGE, "image"), (VIDEO, "video"):
            for token in f"{name}_token_id", f"{name}_start_token_id", f"{name}_end_token_id":
                types = types.masked_fill(input_ids == getattr(config, token), kind)
        return {self.expert_types: types}

    # ------------------------------------------------------------------ the vision tower

    def tower_segments(self, media: Media, config: Any) -> Sequence[Segments]:
        """Return all sets of boundaries that blocks of the tower attend within, for images without grids.

        Reads the sizes of images from the tensors.
        """
        if self.tile_boundaries is None or not {*self.pixel_names} & media.to_hf().keys():
            return ()
        return self.tile_boundaries(media.to_hf(), config)

    def vision_segments(self, grids: Sequence[Grid], config: Any) -> tuple[Segments, ...]:
        """Return all sets of boundaries that blocks of the vision tower attend within, for a call with these grids."""
        vision = config.vision_config
        if not hasattr(vision, "fullatt_block_indexes"):  # of towers with windows
            return (frame_segments(grids),)
        window = vision.window_size // vision.patch_size
        return frame_segments(grids), window_segments(grids, window=window, merge=vision.spatial_merge_size)

    @property
    def tower_calls(self) -> tuple[tuple[int, ...], ...]:
        """Kinds of media that go through a tower in one call: images and videos together, or in a call each; audio."""
        visual = (IMAGE, VIDEO) if self.has_videos and not self.videos_as_images else (IMAGE,)
        calls = (visual,) if self.has_grids and not self.videos_apart else tuple((kind,) for kind in visual)
        return (*calls, (AUDIO,)) if self.has_audio else calls

    def blank_media(self, kind: int, config: Any) -> dict[str, torch.Tensor]:
        """Return the tensors of a small image, video or audio; pixels and features are ones."""
        if kind == AUDIO:
            frames, bins = 2 * config.audio_config.n_window, config.audio_config.num_mel_bins
            mask = torch.ones(1, frames, dtype=torch.int64)
            return {"input_features": torch.ones(1, bins, frames), "feature_attention_mask": mask}
        if (draws := self.image if kind == IMAGE else self.video) is not None:
            tensors = draws(config, (1, 1, 1), torch.ones) if self.blank is None else self.blank(config)
            counted = [name for name in self.tensors_of(kind) if self.media[name].counts_images]
            return {**tensors, **dict.fromkeys(counted, torch.tensor([1]))}
        grid = (kind, self.merge(config), self.merge(config))  # of videos in a call of their own, two frames are merged
        pixels, grids = self.tensors_of(kind)
        return {pixels: torch.ones(prod(grid), *self.patch_shape(config)), grids: torch.tensor([grid])}

    def tensors_of(self, kind: int) -> list[str]:
        """Return the names of the tensors of images, or of videos."""
        if self.has_grids:
            return [["pixel_values", "image_grid_thw"], ["pixel_values_videos", "video_grid_thw"]][kind == VIDEO]
        return [name for name in self.media if ("video" in name) is (kind == VIDEO)]

    def tile_work(
        self, tensors: Mapping[str, torch.Tensor], entries: Mapping[str, Sequence[int]], config: Any, kind: int
    ) -> np.ndarray:
        """Return the patches of each tile, image or video in the tower, and their pairs in one block: int64 [N, 2].

        Args:
            tensors: the tensors of a row without grids.
            entries: the entries of each tile, image or video in the tensors of its kind.
            config: the model's configuration.
            kind: IMAGE or VIDEO.
        """
        if self.tile_boundaries is not None:
            lengths = self.tile_boundaries({name: tensors[name] for name in entries}, config)[0].lengths
            return np.asarray([(count, count**2) for count in lengths])
        if kind == IMAGE and self.image_work is not None:
            return np.asarray([(n * count, n * count**2) for n, count in self.image_work(tensors, config)])
        work_N2 = np.zeros((len(next(iter(entries.values()))), 2), np.int64)
        for name in self.pixel_names:
            if name in entries:
                one = tensors[name].narrow(self.media[name].axis, 0, 1)
                tiles = prod(one.shape[:-3])  # frames of a video
                count = patches_in([one], config.vision_config) // tiles
                work_N2 += np.outer(entries[name], [tiles * count, tiles * count**2])
        return work_N2

    def patch_channels(self, config: Any) -> int:
        """Return the number of values of one patch: C of `pixel_values` [P, C]."""
        return prod(self.patch_shape(config))

    def patch_shape(self, config: Any) -> tuple[int, ...]:
        """Return the shape of one patch in `pixel_values` [P, ...] of images with grids."""
        vision = config.vision_config
        if not self.flat_patches:
            return getattr(vision, "num_channels", 3), vision.patch_size, vision.patch_size
        frames = vision.temporal_patch_size if self.patches_of_frames else 1
        return (vision.in_channels * frames * vision.patch_size**2,)

    def tile_patches(self, media: Media, config: Any) -> int:
        """Return the number of patches of a tiled family's pixels, including padding of tiles to a common size."""
        tensors = media.to_hf()
        pixels = [tensors[name] for name in self.pixel_names if name in tensors]
        return patches_in(pixels, config.vision_config)

    # ------------------------------------------------------------------ parts of the model

    def backbone(self, model: nn.Module) -> nn.Module:
        """Return the model without its head: ids, pixels and positions in, hidden states out."""
        if self.backbone_path is None:
            return without_head(model, self.upstream_class(model))
        return model.get_submodule(self.backbone_path)

    def bidirectional_tokens(self, config: Any) -> Bidirectional | None:
        """Return the tokens that attend to later ones, if the model's configuration enables them."""
        found = self.bidirectional
        return found if found is not None and found.enabled(self.text_config(config)) else None

    def upstream_class(self, model: nn.Module) -> Any:
        """Return the transformers class of a model of this family, even if the model is of a subclass."""
        return next(klass for klass in reversed(type(model).__mro__) if klass.__name__ == self.model_class)

    def headless(self, class_name: str) -> Family:
        """Return the description of this family's models without a head, which are of the class `class_name`."""
        prefix = f"{self.backbone_path}."

        def inside(path: str) -> str:
            return "" if path == self.backbone_path else path.removeprefix(prefix)

        vision = None if self.vision_path is None else inside(self.vision_path)
        audio = None if self.audio is None else replace(self.audio, path=inside(self.audio.path))
        paths = {"backbone_path": "", "text_path": inside(self.text_path), "vision_path": vision}
        return replace(self, headless_class=class_name, audio=audio, **paths)

    def language_model(self, model: nn.Module) -> nn.Module:
        """Return the text part: embeddings and positions in, hidden states out."""
        return model.get_submodule(self.text_path)

    def vision_tower(self, model: nn.Module) -> nn.Module | None:
        """Return the vision part if it attends within boundaries: patches in, image features out; otherwise None."""
        if self.vision_path is None or not (self.has_grids or self.tile_boundaries):
            return None
        return model.get_submodule(self.vision_path)

    def audio_tower(self, model: nn.Module) -> nn.Module | None:
        """Return the audio part: log-mel frames in, audio features out; None if there is none."""
        return None if self.audio is None else model.get_submodule(self.audio.path)

    def vision_blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the blocks of `vision_tower`; [] if there is none."""
        tower = self.vision_tower(model)
        return [] if tower is None else list(tower.get_submodule(self.blocks_path).children())

    def head(self, model: nn.Module) -> nn.Module:
        """Return the linear layer after the hidden states."""
        return model.get_submodule(self.head_path)

    def to_logits(
        self, model: Any, head: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the function from hidden states [..., D] to logits [..., V]: the head (None: the model's), then
        `logits`."""
        head, config = head or self.head(model), self.text_config(model.config)
        return head if self.logits is plain_logits else lambda hidden: self.logits(head(hidden), config)

    # ------------------------------------------------------------------ parts of the configuration

    def text_config(self, config: Any) -> Any:
        """Return the text part's configuration; for a text model, `config` itself."""
        return config.text_config if self.has_vision else config

    def experts_of_token(self, config: Any) -> int:
        """Return the number of routed experts that each token goes to, which Gemma 4 names differently; 0: none."""
        text = self.text_config(config)
        return getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None) or 0

    def merge(self, config: Any) -> int:
        """Return the number of patches merged into one token along each side; 1 if images have no grids.

        Raises:
            FamilyError: the numbers of merged rows and columns differ.
        """
        if not self.has_grids:
            return 1
        vision = config.vision_config
        if not hasattr(vision, "merge_kernel_size"):
            return vision.spatial_merge_size
        rows, columns = vision.merge_kernel_size
        if rows != columns:
            raise FamilyError(
                f"{self.model_type} merges {rows} x {columns} patches into one token, which packed rows cannot count; "
                "use a merge_kernel_size of as many rows as columns"
            )
        return rows


# ---------------------------------------------------------------------- placeholders and positions


def merged_grid(grid: Grid, merge: int) -> Grid:
    """Convert a grid of patches to a grid of tokens: (frames, rows, columns), `merge` x `merge` patches per token.

    Raises:
        LayoutError: the grid is not (frames, rows, columns), has a side of 0, or is not divisible by `merge`.
    """
    if len(grid) != 3 or min(grid) < 1:
        raise LayoutError(f"its grid is {tuple(grid)}; it must be (frames, rows, columns), all >= 1")
    frames, rows, columns = grid
    if rows % merge or columns % merge:
        raise LayoutError(
            f"its grid {tuple(grid)} is not a multiple of the merge size {merge} in height and width; grids "
            "are counted in patches, before merging: give `image_grid_thw` as the processor made it"
        )
    return frames, rows // merge, columns // merge


def token_offsets(placements: Sequence[Placement]) -> np.ndarray:
    """Return offsets (time, height, width) of each token from the start of its run, and the advance after it.

    int64 [4, M]. As in transformers' `get_rope_index`, a run advances positions by max(rows, columns) after its last
    token, whatever its number of frames, and the time offset is a float32 product rounded down.
    """
    cells = np.asarray([cell for placement in placements for cell in placement.cells], np.int64).reshape(-1, 3)
    intervals = np.asarray([placement.interval for placement in placements for _ in placement.cells], np.float32)
    sizes = cells.prod(1)
    run = np.repeat(np.arange(len(sizes)), sizes)
    ends = sizes.cumsum()
    local = np.arange(len(run)) - (ends - sizes)[run]
    _, rows, columns = cells.T
    frame, within = np.divmod(local, (rows * columns)[run])
    out = np.zeros((4, len(run)), np.int64)
    out[0] = frame.astype(np.float32) * intervals[run]
    out[1], out[2] = np.divmod(within, columns[run])
    out[3, ends - 1] = np.maximum(rows, columns)
    return out


def row_positions(places_M: np.ndarray, offsets_4M: np.ndarray, restarts: Segments) -> np.ndarray:
    """Return the positions of a row: int64 [4, T], position in the segment, then time, height and width.

    All restart at 0 in every segment, and are 0 on padding.

    Args:
        places_M: int64, position in the row of each media token.
        offsets_4M: offsets of each media token and the advance after it (`token_offsets`).
        restarts: the boundaries where positions restart.
    """
    text_T = restarts.position_in_segment().numpy()
    offsets_3T, advance_T = np.zeros((3, restarts.total), np.int64), np.ones(restarts.total, np.int64)
    offsets_3T[:, places_M], advance_T[places_M] = offsets_4M[:3], offsets_4M[3]
    before_T = advance_T.cumsum() - advance_T
    # subtract the value at each token's segment start; padding is its own start, so its position is 0
    spatial_3T = before_T - before_T[np.arange(restarts.total) - text_T] + offsets_3T
    return np.concatenate((text_T[None], spatial_3T))


# ---------------------------------------------------------------------- boundaries of vision towers


def frame_segments(grids: Sequence[Grid]) -> Segments:
    """Return one segment for each frame of each image or video: h * w patches.

    The boundaries are those of `transformers.vision_utils.get_vision_cu_seqlens`.
    """
    return Segments.from_lengths([h * w for t, h, w in grids for _ in range(t)])


def window_segments(grids: Sequence[Grid], *, window: int, merge: int) -> Segments:
    """Return one segment for each window of each frame, in the order of windows in the tower.

    The boundaries are those of Qwen2.5-VL's `get_window_index` without its empty windows.

    Args:
        grids: (frames, rows, columns) of patches of each image or video.
        window: side of a window in patches.
        merge: number of patches merged into one token along each side; windows contain whole tokens.
    """
    side = window // merge
    lengths: list[int] = []
    for t, h, w in grids:
        rows, columns = pieces(h // merge, side), pieces(w // merge, side)
        lengths += [row * column * merge**2 for row in rows for column in columns] * t
    return Segments.from_lengths(lengths)


def pieces(tokens: int, side: int) -> list[int]:
    """Split `tokens` into pieces of `side`; the last one may be shorter."""
    whole, rest = divmod(tokens, side)
    return [side] * whole + [rest] * bool(rest)


# ---------------------------------------------------------------------- models whose text part holds the head


@final
class WithoutHead(nn.Module):
    """The backbone of a model whose head is inside its text part.

    It calls the model's own forward, in which the text part skips its head for rows (the mechanism `inner_head`). It is
    not a submodule of the model, and has no parameters.
    """

    def __init__(self, model: nn.Module, upstream_class: Any) -> None:
        super().__init__()
        self._model, self._upstream_class = weakref.ref(model), upstream_class

    def forward(self, **inputs: Any) -> Any:
        """Call the model's own forward."""
        return self._upstream_class.forward(self._model(), **inputs)


def without_head(model: nn.Module, upstream_class: Any) -> WithoutHead:
    """Return the `WithoutHead` of a model, always the same object."""
    if model not in _WITHOUT_HEAD:
        _WITHOUT_HEAD[model] = WithoutHead(model, upstream_class)
    return _WITHOUT_HEAD[model]


_WITHOUT_HEAD: weakref.WeakKeyDictionary[nn.Module, WithoutHead] = weakref.WeakKeyDictionary()
