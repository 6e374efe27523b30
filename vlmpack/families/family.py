"""Describe a model family: where its parts are, its positions and media, the mechanisms of its layers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from math import prod
from typing import Any, final

import torch
from torch import nn

from vlmpack.errors import FamilyError, LayoutError
from vlmpack.families.audio import AskModel, AudioPart, longest_of_samples
from vlmpack.families.media import (
    Placement,
    VideoPlacement,
    frames_as_images,
    kinds_between,
    merged_grid,
    row_positions,
    single_run,
    token_offsets,
)
from vlmpack.families.media_table import media_of_row, with_media_table
from vlmpack.families.spans import Prefix, Sees
from vlmpack.families.tiles import (
    QWEN_MEDIA,
    Join,
    TileBoundaries,
    TileEntries,
    TileTokens,
    patches_in,
)
from vlmpack.layout.batch import Media
from vlmpack.layout.device import outside_graph, to_device
from vlmpack.layout.media import AUDIO, IMAGE, KINDS, VIDEO, Grid, MediaTable, Medium, placeholders
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.row import PackedRow
from vlmpack.layout.segments import Segments
from vlmpack.layout.sharing import ReadMedia

LogitsRule = Callable[[torch.Tensor, Any], torch.Tensor]
"""The output of the head, and the text part's configuration, to logits."""


def plain_logits(output: torch.Tensor, text_config: Any) -> torch.Tensor:
    """Take the head's output as logits."""
    return output


@final
@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary positions: time, height and width by the grids of images and videos, or the place in the sample alone."""

    axes: int = 3
    """Rotary positions of a token, 3 or 1."""
    start: int = 0
    """Position of the first token."""


@final
@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family, as data.

    `config` is always the whole model's configuration, the one with a text and a vision part if it has vision.
    """

    model_type: str
    """`config.model_type` of the family."""
    model_class: str
    """Name of the transformers class that is trained."""
    oldest_transformers: tuple[int, int] = (5, 17)
    """Oldest version of transformers whose code of the family it was tested with."""
    mechanisms: Mapping[str, Mapping[str, str]] = field(default_factory=dict, hash=False)
    """The mechanisms of its decoder layers beside plain attention: of each of `vlmpack.model`, by its name, the names
    of its parts."""
    positions_rule: Rotary | AskModel = field(default_factory=Rotary)
    """The rotary positions of its text part."""
    videos: VideoPlacement = single_run
    """The way in which its processor writes videos as tokens."""
    videos_as_images: bool = False
    """True if its videos are written with the placeholder of images: rows hand their frames on as images."""
    tile_tokens: TileTokens | None = None
    """Of a family whose images are rows of a batch, or tiles: the placeholder tokens of each; None: images are patches
    with a grid each."""
    tile_entries: TileEntries | None = None
    """Of such a family: the number of entries of each tile or image in tensors that have not one each; None: all
    have."""
    without_padding: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] | None = None
    """Of such a family whose tensors may hold tiles that are padding: the same tensors without these; None: they hold
    none."""
    video_tokens: TileTokens | None = None
    """Of such a family that takes videos: the placeholder tokens of each; None: it takes none."""
    tile_boundaries: TileBoundaries | None = None
    """Of such a family whose tower attends within boundaries: those of each of its blocks; None: it has none."""
    token_types: str | None = "mm_token_type_ids"
    """Keyword by which the backbone takes the kind of each token; None: it takes none."""
    expert_types: str | None = None
    """Keyword by which the backbone takes the kinds of tokens by which experts are chosen, those that start and end an
    image among its own; None: it takes none."""
    processor: str | None = "Qwen3VLProcessor"
    """Name of the transformers class of its processors; None: a text model, which has a tokenizer."""
    patch_size: int = 16
    """Pixels along the side of a patch."""
    flat_patches: bool = True
    """True if the values of a patch are one axis of `pixel_values`; False: channels, rows and columns are three."""
    patches_of_frames: bool = True
    """True if a patch holds several frames (`temporal_patch_size`), an image twice; False: one."""
    vision_windows: bool = False
    """True if some blocks of the vision tower attend within windows of a frame (`window_size`)."""
    media_over_ranks: bool = True
    """True if ranks can compute its images together (`Parallel`), which takes grids."""
    audio: AudioPart | None = None
    """Its audio part; None: it takes no audio."""
    text_type: str | None = None
    """`model_type` whose code has its decoder layers; None: its own."""
    backbone_path: str = "model"
    """The model without its head; "": no part is that, since the head is inside the text part."""
    text_path: str = "model.language_model"
    """The text part: embeddings and positions in, hidden states out."""
    vision_path: str | None = "model.visual"
    """The vision part: patches in, image features out; None: text only."""
    blocks_path: str = "blocks"
    """The blocks of a tower that attends within boundaries, inside the vision part."""
    keeps_row: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Modules inside the vision part that are given a row, and do not pass it on to a part of theirs, or a list of
    parts, that attends within boundaries: that part of each, by path. ``""`` is the vision part itself."""
    head_path: str = "lm_head"
    """The linear layer from hidden states to logits, or to what `logits` makes them of."""
    returns_router_logits: bool = True
    """False if the model without its head has experts, and does not return what their routers gave in its text part."""
    logits: LogitsRule = plain_logits
    """The model's function of the output of the head."""
    sees: Sees | None = None
    """The tokens that see later ones of their sample; None: none do, attention is causal."""
    media: Mapping[str, Join] = field(default_factory=lambda: QWEN_MEDIA, hash=False)
    """Tensors by which the backbone takes images and videos, and how those of samples are joined."""

    @property
    def modelling(self) -> str:
        """Module of transformers that holds its layers and the functions that they call."""
        name = self.text_type or self.model_type
        return f"transformers.models.{name}.modeling_{name}"

    @property
    def has_vision(self) -> bool:
        """Return whether it takes images and videos."""
        return self.vision_path is not None

    @property
    def has_grids(self) -> bool:
        """Return whether its images are patches with a grid each."""
        return self.has_vision and self.tile_tokens is None

    @property
    def has_videos(self) -> bool:
        """Return whether it takes videos apart from images."""
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
        """Names of the columns of a batch that packed rows need beside ids: that of the prefix."""
        return (self.sees.column,) if isinstance(self.sees, Prefix) else ()

    @property
    def processor_class(self) -> type:
        """The transformers class of its processors."""
        assert self.processor is not None, f"{self.model_type} is a text model"
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
        """MRoPE positions of a packed row: int64 [4, 1, T], the text row, then time, height, width.

        Every segment gets what `get_rope_index` of the installed transformers gives its sample alone, bit for bit,
        and 0, 1, 2, ... as its text row; padding is 0. They are float32 where the model's own are (`AskModel`), and
        computed on the host: no host–device sync.

        Args:
            table: the media of the row (`media_of_row`).
            segments: the row's samples.
            config: the model's configuration.
            restarts: the row cut where rotary positions restart (`rope_cu_seqlens`); None: at its samples.
            device: where the result lives.

        Raises:
            LayoutError: grids that cannot be, or a video without seconds that needs them.
        """
        restarts = restarts or segments
        if not (table.images or table.videos) or self.positions_rule.axes == 1:
            return restarts.position_in_segment(device).repeat(4, 1, 1)
        media = (*table.images, *table.videos)
        offsets_4M = token_offsets(self.placements(media, config))
        positions_4T = row_positions(placeholders(media, segments), offsets_4M, restarts)
        if isinstance(rule := self.positions_rule, AskModel):
            positions_4T = rule.replace_videos(positions_4T, table, segments, restarts, config)
        return to_device(positions_4T[:, None], torch.device(device))

    def rotary_ids(self, positions: torch.Tensor) -> torch.Tensor:
        """The model's `position_ids` of [4, 1, T]: time, height, width; of a text model the text row, [1, T].

        With the text row beside the others, transformers would look for packed samples by itself, with a sync.
        """
        rule = self.positions_rule
        return positions[-3:] if rule.axes == 3 else positions[0] + rule.start if rule.start else positions[0]

    # ------------------------------------------------------------------ media

    def placements(self, media: Sequence[Medium], config: Any) -> list[Placement]:
        """The tokens of images and videos with grids, of each kind in its order.

        Raises:
            LayoutError: a grid that cannot be; names its place among those of its kind.
        """
        merge, vision = self.merge(config), config.vision_config
        numbers, placements = dict.fromkeys(KINDS, 0), []
        for medium in media:
            name = f"{KINDS[medium.kind]} {numbers[medium.kind]}"
            numbers[medium.kind] += 1
            assert medium.grid is not None, "a family with grids"
            grid = merged_grid(medium.grid, merge, name)
            try:
                of_video = self.videos(grid, medium.seconds, vision) if medium.kind == VIDEO else None
            except LayoutError as error:
                raise LayoutError(f"{name}: {error}") from None
            placements.append(of_video or Placement(cells=(grid,)))
        return placements

    def media_tokens(self, grids: Sequence[Grid], config: Any) -> int:
        """Placeholder tokens of all these images."""
        return sum(sum(each.tokens) for each in self.placements([Medium(kind=IMAGE, grid=g) for g in grids], config))

    def video_runs(self, grids: Sequence[Grid], config: Any) -> list[int]:
        """Tokens of each run of placeholders that these videos stand for: whole videos, or single frames."""
        return [n for each in self.placements([Medium(kind=VIDEO, grid=g) for g in grids], config) for n in each.tokens]

    @outside_graph
    def media_of_row(self, row: PackedRow, config: Any) -> MediaTable:
        """The media of the samples of a row, each with its placeholders.

        They are those of the host metadata, which is compared with tensors and token ids; on an accelerator without a
        host–device sync. Metadata that does not know them is read from the tensors and the ids.

        Args:
            row: with a prefix tree, its tensors are those of the media that the tree computes.
            config: the model's configuration.

        Raises:
            LayoutError: media that the family does not take, that do not fit their placeholders, or are others than
                those of the metadata. On the host it names the sample.
        """
        return media_of_row(self, row, config)

    def check_takes(self, images: Sequence[Grid], videos: Sequence[Grid]) -> None:
        """Refuse images and videos that a model of the family does not take: a LayoutError."""
        count = len(images) + len(videos)
        if count and not self.has_vision:
            raise LayoutError(f"{self.model_type} is a text model, but the batch has {count} images or videos")
        if count and not self.has_grids:
            raise LayoutError(
                f"images of {self.model_type} have no grids, but the batch has {count}; use the processor that belongs "
                "to the model"
            )
        if videos and not self.has_videos:
            raise LayoutError(f"{self.model_type} takes no videos, but the batch has {len(videos)}; leave them out")

    def media_reader(self, config: Any) -> ReadMedia:
        """Return the function that finds the media of a row, each with its part of the tensors, for `share`."""
        return partial(with_media_table, self, config=config)

    def with_contexts(self, table: MediaTable) -> MediaTable:
        """Add what the features of each medium depend on beside its tensors (`Medium.context`)."""
        counts_images = any(join.counts_images for join in self.media.values())
        of_samples = [image.sample for image in table.images]
        longest = longest_of_samples(table) if self.audio is not None and self.audio.reads_padding else {}

        def context(medium: Medium) -> bool | int | None:
            if medium.kind == IMAGE:
                return of_samples.count(medium.sample) == 1 if counts_images else None
            return longest.get(medium.sample) if medium.kind == AUDIO else None

        return replace(table, media=tuple(replace(medium, context=context(medium)) for medium in table.media))

    def check_floats(self, media: Media) -> None:
        """Insist that pixels, and features of audio, are floats: towers would cast whole numbers, or fail."""
        for name, tensor in media.to_hf().items():
            is_float = not isinstance(tensor, torch.Tensor) or tensor.is_floating_point()
            if not is_float and name in (*self.pixel_names, "input_features"):
                raise LayoutError(
                    f"{name} is {tensor.dtype}, but the model reads rescaled and normalised floats; give what its "
                    "processor makes (pixels of 0 to 255 are not that), or .float() of values that were stored rounded"
                )

    def media_types(self, input_ids: torch.Tensor, config: Any) -> torch.Tensor:
        """0 text, 1 image, 2 video, 3 audio for each token, int64 in the shape of `input_ids`: what processors give as
        `mm_token_type_ids`."""
        if not self.has_vision:
            return torch.zeros_like(input_ids)
        if self.videos_as_images:
            return kinds_between(input_ids, config)
        types = (input_ids == config.image_token_id).long()
        types = types + VIDEO * (input_ids == config.video_token_id).long() if self.has_videos else types
        return types + AUDIO * (input_ids == config.audio_token_id).long() if self.has_audio else types

    def types_of_row(self, row: PackedRow, config: Any) -> torch.Tensor:
        """The same of a row, [1, T]: where images and videos have one placeholder, the row's own column tells them
        apart, or tokens of the same sample."""
        if not self.videos_as_images:
            return self.media_types(row.input_ids, config)
        return kinds_between(row.input_ids, config, segments=row.segments, column=row.mm_token_type_ids)

    @property
    def type_values(self) -> str:
        """The values of `mm_token_type_ids` on placeholders, in words."""
        kinds = ((IMAGE, "image", self.has_vision), (VIDEO, "video", self.has_videos), (AUDIO, "audio", self.has_audio))
        return "".join(f"{value} exactly on {name} placeholders, " for value, name, has in kinds if has)

    def tower_media(
        self, media: Media, table: MediaTable, segments: Segments, tree: PrefixTree | None
    ) -> tuple[Media, tuple[tuple[Grid, ...], ...]]:
        """The media of a row whose images have grids as the model without its head takes them, and the grids of each
        call of its tower (`table`: the media of the samples); raises a LayoutError where `frames_as_images` does."""
        if self.videos_as_images:
            media, grids = frames_as_images(media, table, segments, tree, self.model_type)
            return media, (grids,)
        computed = table if tree is None else table.in_tree(tree)
        return media, (computed.grids(IMAGE), computed.grids(VIDEO))

    def expert_types_of(self, input_ids: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
        """The column of `expert_types`, int64 in the shape of `input_ids`, as the family's processor makes it of them;
        {}: it has none."""
        if self.expert_types is None:
            return {}
        types = torch.zeros_like(input_ids)
        for kind, name in (IMAGE, "image"), (VIDEO, "video"):
            for token in f"{name}_token_id", f"{name}_start_token_id", f"{name}_end_token_id":
                types = types.masked_fill(input_ids == getattr(config, token), kind)
        return {self.expert_types: types}

    # ------------------------------------------------------------------ the vision tower

    def tower_segments(self, media: Media, config: Any) -> Sequence[Segments]:
        """Every set of boundaries that blocks of the tower attend within, of images without grids; their sizes are
        read."""
        if self.tile_boundaries is None or not {*self.pixel_names} & media.to_hf().keys():
            return ()
        return self.tile_boundaries(media.to_hf(), config)

    def vision_segments(self, grids: Sequence[Grid], config: Any) -> tuple[Segments, ...]:
        """Every set of boundaries that blocks of the vision tower attend within, for one call with these grids."""
        if not self.vision_windows:
            return (frame_segments(grids),)
        vision = config.vision_config
        window = vision.window_size // vision.patch_size
        return frame_segments(grids), window_segments(grids, window=window, merge=vision.spatial_merge_size)

    def patch_channels(self, config: Any) -> int:
        """Numbers that make up one patch, C of `pixel_values` [P, C]."""
        return prod(self.patch_shape(config))

    def patch_shape(self, config: Any) -> tuple[int, ...]:
        """Shape of one patch in `pixel_values` [P, ...] of images with grids."""
        vision = config.vision_config
        if not self.flat_patches:
            return getattr(vision, "num_channels", 3), vision.patch_size, vision.patch_size
        frames = vision.temporal_patch_size if self.patches_of_frames else 1
        return (vision.in_channels * frames * vision.patch_size**2,)

    def tile_patches(self, media: Media, config: Any) -> int:
        """Patches of all pixels of a family whose images have no grids: padding of tiles to a common size included."""
        tensors = media.to_hf()
        pixels = [tensors[name] for name in self.pixel_names if name in tensors]
        return patches_in(pixels, config.vision_config)

    # ------------------------------------------------------------------ parts of the model

    def backbone(self, model: nn.Module) -> nn.Module:
        """The model without its head: ids, pixels and positions in, hidden states out."""
        if self.backbone_path:
            return model.get_submodule(self.backbone_path)
        return without_head(model, self.stock_class(model))

    def stock_class(self, model: nn.Module) -> Any:
        """The transformers class of a model of this family, whatever subclass of it the model is."""
        return next(klass for klass in reversed(type(model).__mro__) if klass.__name__ == self.model_class)

    def language_model(self, model: nn.Module) -> nn.Module:
        """The text part: embeddings and positions in, hidden states out."""
        return model.get_submodule(self.text_path)

    def vision_tower(self, model: nn.Module) -> nn.Module | None:
        """The vision part, if it attends within boundaries: patches in, image features out; None: there is none."""
        if self.vision_path is None or not (self.has_grids or self.tile_boundaries):
            return None
        return model.get_submodule(self.vision_path)

    def audio_tower(self, model: nn.Module) -> nn.Module | None:
        """The audio part: log-mel frames in, audio features out; None: there is none."""
        return None if self.audio is None else model.get_submodule(self.audio.path)

    def vision_blocks(self, model: nn.Module) -> list[nn.Module]:
        """The blocks of `vision_tower`; []: there is none."""
        tower = self.vision_tower(model)
        return [] if tower is None else list(tower.get_submodule(self.blocks_path).children())

    def head(self, model: nn.Module) -> nn.Module:
        """The linear layer behind the hidden states."""
        return model.get_submodule(self.head_path)

    def to_logits(self, model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        """The function from hidden states [..., D] to logits [..., V]: the head, and what the model does afterwards."""
        head, config = self.head(model), self.text_config(model.config)
        return head if self.logits is plain_logits else lambda hidden: self.logits(head(hidden), config)

    # ------------------------------------------------------------------ parts of the configuration

    def text_config(self, config: Any) -> Any:
        """The text part's configuration: of a text model the configuration itself."""
        return config.text_config if self.has_vision else config

    def merge(self, config: Any) -> int:
        """Patches merged into one token along each side; 1 of a model whose images have no grids.

        Raises:
            FamilyError: other numbers of rows and of columns are merged.
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


# ---------------------------------------------------------------------- boundaries of vision towers


def frame_segments(grids: Sequence[Grid]) -> Segments:
    """One segment for each frame of each image or video: h * w patches.

    The same boundaries as `transformers.vision_utils.get_vision_cu_seqlens`.
    """
    return Segments.from_lengths([h * w for t, h, w in grids for _ in range(t)])


def window_segments(grids: Sequence[Grid], *, window: int, merge: int) -> Segments:
    """One segment for each window of each frame, in the order in which the tower lays windows out.

    The same boundaries as Qwen2.5-VL's `get_window_index` gives after its empty windows are taken out.

    Args:
        grids: (frames, rows, columns) in patches of each image or video.
        window: the side of a window, in patches.
        merge: patches merged into one token along each side; windows hold whole tokens.
    """
    side = window // merge
    lengths: list[int] = []
    for t, h, w in grids:
        rows, columns = pieces(h // merge, side), pieces(w // merge, side)
        lengths += [row * column * merge**2 for row in rows for column in columns] * t
    return Segments.from_lengths(lengths)


def pieces(tokens: int, side: int) -> list[int]:
    """`tokens` in pieces of `side`, the last one shorter."""
    whole, rest = divmod(tokens, side)
    return [side] * whole + [rest] * bool(rest)


# ---------------------------------------------------------------------- models whose text part holds the head


@final
class WithoutHead(nn.Module):
    """A model whose text part holds the head, as a module that is given a row: its own forward, for which the head
    leaves rows alone (the mechanism `inner_head`). No part of the model, and without parameters."""

    def __init__(self, model: nn.Module, stock_class: Any) -> None:
        super().__init__()
        self._model, self._stock_class = weakref.ref(model), stock_class

    def forward(self, **inputs: Any) -> Any:
        """Call the model's own forward."""
        return self._stock_class.forward(self._model(), **inputs)


def without_head(model: nn.Module, stock_class: Any) -> WithoutHead:
    """Return the model as one without its head, ever the same object."""
    if model not in _WITHOUT_HEAD:
        _WITHOUT_HEAD[model] = WithoutHead(model, stock_class)
    return _WITHOUT_HEAD[model]


_WITHOUT_HEAD: weakref.WeakKeyDictionary[nn.Module, WithoutHead] = weakref.WeakKeyDictionary()
