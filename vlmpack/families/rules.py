"""Rules that descriptors choose from: rotary positions, how videos are placed, what is done to the head's output; and a
model without its head, where that is no part of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, final

import numpy as np
import torch
from torch import nn

from vlmpack.errors import FamilyError, LayoutError
from vlmpack.families.media import MediaItems

LogitsRule = Callable[[torch.Tensor, Any], torch.Tensor]
"""The output of the head, and the text part's configuration, to logits."""


def plain_logits(output: torch.Tensor, text_config: Any) -> torch.Tensor:
    """Take the head's output as logits."""
    return output


@final
@dataclass(frozen=True, kw_only=True)
class MRope:
    """Multimodal rotary positions, three a token: time, height and width, by the grids of images and videos."""

    axes: int = 3
    """Rotary positions of a token."""
    start: int = 0
    """Position of the first token."""


@final
@dataclass(frozen=True, kw_only=True)
class OneAxis:
    """One rotary position a token: its place in the sample."""

    axes: int = 1
    """Rotary positions of a token."""
    start: int = 0
    """Position of the first token."""


# ---------------------------------------------------------------------- videos

VideoPlacement = Callable[[MediaItems, Sequence[float], Any], MediaItems]
"""Runs of tokens of whole videos, seconds from one grid of each to the next, and the vision configuration, to the runs
that the family's processor writes and the distances of their frames."""


def single_run(videos: MediaItems, seconds: Sequence[float], vision: Any) -> MediaItems:
    """Place a video as one run of tokens, its frames one position apart."""
    return videos


def run_per_frame(videos: MediaItems, seconds: Sequence[float], vision: Any) -> MediaItems:
    """Place every frame of a video as a run of its own, like an image; time stamps are text between."""
    frames = np.repeat(videos.grids * (0, 1, 1) + (1, 0, 0), videos.grids[:, 0], axis=0)
    medium = np.repeat(videos.medium, videos.grids[:, 0])
    return MediaItems(grids=frames, interval=np.ones(len(frames), np.float32), medium=medium)


def run_of_pairs(videos: MediaItems, seconds: Sequence[float], vision: Any) -> MediaItems:
    """Place a video as one run of tokens, each of several frames (`temporal_merge_size`), one position apart.

    Raises:
        LayoutError: frames are left over, of which the model makes no token.
    """
    size = vision.temporal_merge_size
    if (odd := videos.grids[:, 0] % size).any():
        at = int(odd.argmax())
        raise LayoutError(
            f"video {at}: its grid has {videos.grids[at, 0]} frames, and the model makes a token of {size} each; "
            "repeat its last frame, as the model's processor does"
        )
    return replace(videos, grids=videos.grids // (size, 1, 1))


def timed_run(
    videos: MediaItems, seconds: Sequence[float], vision: Any, *, whole_seconds: bool | None = None
) -> MediaItems:
    """Place a video as one run of tokens, its frames as many positions apart as they are in time.

    `whole_seconds`: round the seconds between frames down before use, as older transformers do; None: as the installed
    transformers does.
    """
    if not len(seconds):
        seconds = (1.0,) * len(videos.grids)
    if len(seconds) != len(videos.grids):
        raise LayoutError(
            f"there are {len(videos.grids)} videos but seconds_per_grid has {len(seconds)} values; give one for each "
            "video (the processor's second_per_grid_ts), or none"
        )
    check_seconds(seconds)
    if whole_seconds is None:
        whole_seconds = truncates_seconds()
    # float32 all the way: the model computes with the float32 tensor second_per_grid_ts
    times = np.asarray(seconds, np.float32)
    rate = np.float32(vision.tokens_per_second)
    return replace(videos, interval=rate * (np.trunc(times) if whole_seconds else times))


def check_seconds(seconds: Sequence[float], videos_per_sample: Sequence[int] = ()) -> None:
    """Insist on times from one grid of each video to the next.

    Args:
        seconds: one for each video of a row.
        videos_per_sample: the videos of each sample, which name it; empty: not known.

    Raises:
        LayoutError: one is NaN, infinite or negative.
    """
    for at, value in enumerate(seconds):
        if not 0 <= value < float("inf"):
            samples = np.repeat(np.arange(len(videos_per_sample)), videos_per_sample)
            of_sample = f"sample {samples[at]}: " if at < len(samples) else ""
            raise LayoutError(
                f"{of_sample}video {at}: seconds_per_grid is {value}; it must be a finite time, not negative: give "
                "what the processor makes (second_per_grid_ts; Qwen-Omni: video_second_per_grid)"
            )


@cache
def truncates_seconds() -> bool:
    """Return whether the installed transformers rounds `second_per_grid_ts` down to whole seconds.

    5.17 does, 5.23 does not. The function itself is tried, not the version read: a video of three frames 0.7 s apart,
    at 4 positions a second, lies at 0, 2, 5 or, with whole seconds, at 0, 0, 0.

    Raises:
        FamilyError: it does neither.
    """
    from transformers import Qwen2_5_VLModel

    model: Any = Qwen2_5_VLModel  # its methods are called on a stand-in that has only what they read
    vision = SimpleNamespace(spatial_merge_size=1, tokens_per_second=4)
    stand_in = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    stand_in.get_vision_position_ids = partial(model.get_vision_position_ids, stand_in)
    tokens = torch.full((1, 3), 2, device="cpu")
    positions, _ = model.get_rope_index(
        stand_in,
        tokens,
        mm_token_type_ids=tokens,
        video_grid_thw=torch.tensor([[3, 1, 1]], device="cpu"),
        second_per_grid_ts=torch.tensor([0.7], device="cpu"),
    )
    times = positions[0, 0].tolist()
    if times not in ([0, 2, 5], [0, 0, 0]):
        raise FamilyError(
            f"qwen2_5_vl: the installed transformers puts three frames 0.7 s apart at {times}; vlmpack supports "
            "[0, 2, 5] and [0, 0, 0]. Its video positions would be wrong: use a version of the supported range"
        )
    return times == [0, 0, 0]


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
