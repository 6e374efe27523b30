"""The common face of the model families: what the rest of vlmpack may ask about a Hugging Face model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from vlmpack.families.by_sample import BySample
from vlmpack.families.delta import Delta
from vlmpack.families.experts import Experts
from vlmpack.families.mrope import MediaItems, media_items, row_positions
from vlmpack.families.runs import ExpectedRuns, check_runs
from vlmpack.families.vision_segments import frame_segments
from vlmpack.layout import IMAGE, VIDEO, Grid, HostMetadata, Segments, outside_graph


class Family(ABC):
    """One model family. The final classes say only what is different from one to the next.

    `config` is always the whole model's configuration, the one with a text and a vision part if it has vision.
    """

    model_type: ClassVar[str]
    """`config.model_type` of the family."""
    model_class: ClassVar[str]
    """Name of the transformers class that is trained."""
    experts: ClassVar[Experts | None] = None
    """Its mixture-of-experts layers; None: a dense family."""
    delta: ClassVar[Delta | None] = None
    """Its gated delta layers; None: every layer has attention."""
    by_sample: ClassVar[BySample | None] = None
    """Its layers that are given each sample by itself; None: boundaries, or the cut of gated delta layers, suffice."""
    has_vision: ClassVar[bool] = True
    """Whether it takes images and videos."""

    # ------------------------------------------------------------------ positions

    @outside_graph
    def positions(
        self,
        mm_token_type_ids: torch.Tensor | None,
        segments: Segments,
        *,
        config: Any,
        image_grids: Sequence[Grid] = (),
        video_grids: Sequence[Grid] = (),
        seconds_per_grid: Sequence[float] = (),
        device: torch.device | str | None = None,
    ) -> torch.Tensor:
        """MRoPE positions of a packed row: int64 [4, 1, T], the text row, then time, height, width.

        Every segment gets what `get_rope_index` of the installed transformers gives its sample alone, bit for bit,
        and 0, 1, 2, ... as its text row; padding is 0. Boundaries at which only the rotary positions restart
        (`rope_cu_seqlens`) are given as `segments` of their own. Nothing waits for the device.

        Args:
            mm_token_type_ids: [1, T], 0 text, 1 image, 2 video, on any device; None: text only.
            segments: where positions restart.
            config: the model's configuration.
            image_grids: (frames, rows, columns) in patches of each image, in row order.
            video_grids: the same of each video.
            seconds_per_grid: seconds between two grids of each video (Qwen2.5-VL only); empty: 1.
            device: where the result lives if there are no token types.

        Raises:
            LayoutError: grids that cannot be, or that the row has no room for; token types of another width.
        """
        images = self._images(image_grids, config)
        videos = self._videos(video_grids, seconds_per_grid, config)
        return row_positions(mm_token_type_ids, segments, images=images, videos=videos, device=device)

    def rotary_ids(self, positions: torch.Tensor) -> torch.Tensor:
        """What the model is handed as `position_ids` of [4, 1, T]: the last three rows, time, height, width.

        With the text row, transformers would look for packed samples by itself, and wait for the device.
        """
        return positions[-3:]

    def _images(self, grids: Sequence[Grid], config: Any) -> MediaItems:
        """The runs of image tokens that these images stand for."""
        return media_items(grids, self.merge(config), "image")

    @abstractmethod
    def _videos(self, grids: Sequence[Grid], seconds: Sequence[float], config: Any) -> MediaItems:
        """The runs of video tokens that these videos stand for, and how far apart their frames lie."""

    # ------------------------------------------------------------------ tokens

    def tokens_per_image(self, grid: Grid, merge: int) -> int:
        """Placeholder tokens of an image of this grid (frames, rows, columns in patches)."""
        t, h, w = grid
        return t * (h // merge) * (w // merge)

    def media_tokens(self, grids: Sequence[Grid], config: Any) -> int:
        """Placeholder tokens of all these images or videos."""
        return sum(self.tokens_per_image(grid, self.merge(config)) for grid in grids)

    def check_runs(self, types: torch.Tensor, segments: Segments, metadata: HostMetadata, *, config: Any) -> None:
        """Insist that each run of placeholders of a row is as long as its grid says, in the order of the grids.

        Nothing waits for a device, which asserts it.

        Args:
            types: [1, T], what `media_types` returns.
            segments: the row's samples.
            metadata: grids, and how many images and videos each sample has, if that was counted.
            config: the model's configuration.

        Raises:
            LayoutError: it is not so; on the host it names the sample.
        """
        images, videos = self._images(metadata.image_grids, config), self._videos(metadata.video_grids, (), config)
        if not self.has_vision:
            return
        expected = (
            ExpectedRuns(kind=IMAGE, name="image", items=images, per_sample=metadata.images_per_sample),
            ExpectedRuns(kind=VIDEO, name="video", items=videos, per_sample=metadata.videos_per_sample),
        )
        check_runs(types, segments, expected)

    def video_runs(self, grids: Sequence[Grid], config: Any) -> list[int]:
        """Tokens of each run of placeholders that these videos stand for: whole videos, or single frames."""
        return self._videos(grids, (), config).grids.prod(1).tolist()

    def media_types(self, input_ids: torch.Tensor, config: Any) -> torch.Tensor:
        """0 text, 1 image, 2 video for each token, int64 in the shape of `input_ids`: what processors give as
        `mm_token_type_ids`."""
        return (input_ids == config.image_token_id).long() + 2 * (input_ids == config.video_token_id).long()

    # ------------------------------------------------------------------ attention of the text model

    def attended_pairs(self, segments: Segments, config: Any) -> int:
        """Query-key pairs of one layer that has attention."""
        return segments.attended_pairs

    # ------------------------------------------------------------------ the vision tower

    def vision_segments(self, grids: Sequence[Grid], config: Any) -> tuple[Segments, ...]:
        """Every set of boundaries that blocks of the vision tower attend within, for one call with these grids."""
        return (frame_segments(grids),)

    def patch_channels(self, config: Any) -> int:
        """Numbers that make up one patch, C of `pixel_values` [P, C]."""
        vision = self.vision_config(config)
        return vision.in_channels * vision.temporal_patch_size * vision.patch_size**2

    # ------------------------------------------------------------------ parts of the model

    def backbone(self, model: nn.Module) -> nn.Module:
        """The model without its head: ids, pixels and positions in, hidden states out."""
        return model.get_submodule("model")

    def language_model(self, model: nn.Module) -> nn.Module:
        """The text part: embeddings and positions in, hidden states out."""
        return model.get_submodule("model.language_model")

    def vision_tower(self, model: nn.Module) -> nn.Module | None:
        """The vision part: patches in, image features out; None: there is none."""
        return model.get_submodule("model.visual")

    def head(self, model: nn.Module) -> nn.Module:
        """The linear layer from hidden states to logits."""
        return model.get_submodule("lm_head")

    # ------------------------------------------------------------------ parts of the configuration

    def text_config(self, config: Any) -> Any:
        """The text part's configuration."""
        return config.text_config

    def vision_config(self, config: Any) -> Any:
        """The vision part's configuration."""
        return config.vision_config

    def merge(self, config: Any) -> int:
        """Patches merged into one token along each side."""
        return self.vision_config(config).spatial_merge_size
