"""Audio of a family: tokens and boundaries of audio features, and positions that the model's own code computes.

    frames    log-mel frames [N, mel, F], padded to a common number, with a mask of each audio's own frames
    chunks    pieces of an audio's frames; convolutions run over each one, padded to the longest chunk of the call
    windows   the boundaries that blocks of the tower attend within: one chunk, or several
    tokens    one placeholder for each feature, in one run

Audio tokens count as text in rotary positions.

If a tower reads the padding of its chunks (Qwen3-Omni), the features of a short audio depend on longer audios in the
same call, in transformers' padded batches too. Such a tower computes audios in groups, so that the longest chunk of a
call is also the longest chunk of every sample in it.

N audios, F frames.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from vlmpack.errors import LayoutError
from vlmpack.layout.batch import Media, check_tensor
from vlmpack.layout.device import on_host, require, to_device
from vlmpack.layout.media import AUDIO, VIDEO, MediaTable, Medium
from vlmpack.layout.segments import Segments

AudioTokens = Callable[[int, Any], int]
"""Function of the frames of an audio and the audio part's configuration; returns the number of tokens."""

AudioWindows = Callable[[Sequence[int], Any], Segments]
"""Function of the frames of each audio in a call of the tower and its configuration; returns the boundaries that its
blocks attend within."""


@final
@dataclass(frozen=True, kw_only=True)
class AudioPart:
    """The audio part of a family's models: log-mel frames in, features of audio tokens out."""

    tokens: AudioTokens
    """Number of tokens of an audio."""
    windows: AudioWindows
    """The boundaries that its blocks attend within."""
    path: str = "model.audio_tower"
    """Its path in the model."""
    reads_padding: bool = False
    """True if its features depend on the longest chunk of a call."""
    passes_row: bool = True
    """True if the tower passes keyword arguments of a row on to its layers."""

    def check_features(self, media: Media, config: Any) -> None:
        """Compare the shape of `input_features` with the mask and the model.

        Raises:
            LayoutError: the shapes differ, or only one of features and mask is given.
        """
        features, mask = media.tensors.get("input_features"), media.audio_mask
        if features is None and mask is None:
            return
        if features is None or mask is None:
            there, missing = ("input_features", "feature_attention_mask")[:: 1 if mask is None else -1]
            raise LayoutError(f"there are {there} without {missing}; keep both as the processor gives them")
        check_tensor("feature_attention_mask", mask, (None, None), "[audios, frames] of 0 and 1")
        expected = (mask.shape[0], config.audio_config.num_mel_bins, mask.shape[1])
        what = f"[audios, mel bins, frames], here {list(expected)} by feature_attention_mask and the model"
        check_tensor("input_features", features, expected, what)

    def groups(self, audios: Sequence[Medium], table: MediaTable, config: Any) -> list[list[int]]:
        """Return the indices into `audios` for each call of the tower.

        Args:
            audios: the audios to compute, in order.
            table: the media of all samples.
            config: the model's configuration.
        """
        longest = longest_of_samples(table)
        groups = np.asarray([self.group_of(longest[audio.sample], config) for audio in audios], int)
        return [np.flatnonzero(groups == group).tolist() for group in np.unique(groups)]

    def group_of(self, longest: int, config: Any) -> int:
        """Return the frames of the longest chunk of an audio's group: of its sample if the tower reads padding.

        Args:
            longest: frames of the longest audio of its sample.
            config: the model's configuration.
        """
        chunk = 2 * config.audio_config.n_window
        return min(longest, chunk) if self.reads_padding else chunk


def longest_of_samples(table: MediaTable) -> dict[int, int]:
    """Return the number of frames of the longest audio, for each sample with audio."""
    longest: dict[int, int] = {}
    for audio in table.audios:
        longest[audio.sample] = max(longest.get(audio.sample, 0), audio.frames)
    return longest


# ---------------------------------------------------------------------- positions that the model's own code computes


PositionsOfSample = Callable[[np.ndarray, MediaTable, Any], torch.Tensor]
"""Function of the kinds of a sample's tokens, int64 [L], its media, and the model's configuration; returns positions
[3, L], int64 or float32."""


def replace_videos(
    of_sample: PositionsOfSample,
    positions_4T: np.ndarray,
    table: MediaTable,
    segments: Segments,
    restarts: Segments,
    config: Any,
) -> np.ndarray:
    """Replace the positions of samples with videos, or with images of several frames, by the model's own.

    There, a video (or an image of several frames) moves later tokens by its duration, in float32 if the model has
    fractional positions.

    Args:
        of_sample: function that calls `get_rope_index`.
        positions_4T: positions that are already correct for all other samples.
        table: the media of the row.
        segments: the boundaries of its samples.
        restarts: the boundaries where positions restart; none of them is inside a medium.
        config: the model's configuration.

    Returns:
        [4, T]; float32 if the model's own positions are.

    Raises:
        LayoutError: a video has no seconds, or positions restart right before a medium.
    """
    seconds = [video.seconds for video in table.videos if video.seconds is not None]
    if len(seconds) != len(table.videos):
        raise LayoutError(
            f"there are {len(table.videos)} videos but the seconds between two grids of {len(seconds)}; give the "
            "processor's video_second_per_grid"
        )
    kinds_T = table.types(segments)
    starts = [segments.stride[medium.sample] + medium.runs[0][0] for medium in table.media]
    for start, stop in restarts.spans:
        inside = [medium for medium, at in zip(table.media, starts, strict=True) if start <= at < stop]
        if not any(medium.kind == VIDEO or (medium.grid and medium.grid[0] > 1) for medium in inside):
            continue
        if kinds_T[start]:
            raise LayoutError(
                f"positions restart at place {start} of the row, between a medium and the token before it that "
                "marks its start; move that boundary"
            )
        found_3L = of_sample(kinds_T[start:stop], MediaTable(media=tuple(inside)), config).numpy()
        if found_3L.dtype.kind == "f":
            positions_4T = positions_4T.astype(found_3L.dtype, copy=False)
        positions_4T[1:, start:stop] = found_3L
    return positions_4T


def check_markers(input_ids: torch.Tensor, table: MediaTable, segments: Segments, config: Any) -> None:
    """Check that the start token comes right before each image and video: the model's positions count these tokens.

    Args:
        input_ids: [1, T].
        table: the media of the row.
        segments: the boundaries of its samples.
        config: the model's configuration.

    Raises:
        LayoutError: a start token is missing. On the host, the message names the sample.
    """
    runs = [(medium.sample, start) for medium in table.media if medium.kind != AUDIO for start, _ in medium.runs]
    if not runs:
        return
    places = np.asarray([segments.stride[sample] + start for sample, start in runs], np.int64)
    before = input_ids[0].index_select(0, to_device(np.maximum(places - 1, 0), input_ids.device))
    is_inside = to_device(np.asarray([start > 0 for _, start in runs]), input_ids.device)
    marked = (before == config.vision_start_token_id) & is_inside
    if on_host(marked) and not marked.all():
        at = int(marked.int().argmin())
        raise LayoutError(f"sample {runs[at][0]}: at place {places[at]} of the row {_MARKERS}")
    require(marked.all(), f"somewhere in the row {_MARKERS}", LayoutError)


_MARKERS = (
    "an image or a video begins without the token that marks its start (config.vision_start_token_id) right before it, "
    "so that the model would count its tokens as text. Samples are written as the model's chat template does; a video "
    "whose own sound is interleaved with it (use_audio_in_video) is not supported: give the sound as audio of its own"
)
