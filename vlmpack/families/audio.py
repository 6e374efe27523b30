"""Audio of a family: tokens and boundaries of audio features, and positions in samples with videos, which take time.

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
from vlmpack.layout.device import require, to_device
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


# ---------------------------------------------------------------------- positions of samples with videos


def replace_videos(
    dtype: type[np.number],
    positions_4T: np.ndarray,
    table: MediaTable,
    segments: Segments,
    restarts: Segments,
    config: Any,
) -> np.ndarray:
    """Replace the positions of samples with videos, or with images of several frames, which take time.

    There, a video (or an image of several frames) moves later tokens by its duration, as in `get_rope_index` of
    transformers' Omni models.

    Args:
        dtype: dtype of the positions (`Rotary.timed`).
        positions_4T: positions that are already correct for all other samples.
        table: the media of the row.
        segments: the boundaries of its samples.
        restarts: the boundaries where positions restart; none of them is inside a medium.
        config: the model's configuration.

    Returns:
        [4, T]; float32 if `dtype` is and there are such samples.

    Raises:
        LayoutError: a video has no seconds.
    """
    seconds = [video.seconds for video in table.videos if video.seconds is not None]
    if len(seconds) != len(table.videos):
        raise LayoutError(
            f"there are {len(table.videos)} videos but the seconds between two grids of {len(seconds)}; give the "
            "processor's video_second_per_grid"
        )
    placed = sorted((segments.stride[m.sample] + m.runs[0][0], at) for at, m in enumerate(table.media))
    for start, stop in restarts.spans:
        inside = [(first, table.media[at]) for first, at in placed if start <= first < stop]
        if any(medium.kind == VIDEO or (medium.grid and medium.grid[0] > 1) for _, medium in inside):
            positions_4T = positions_4T.astype(dtype, copy=False)
            positions_4T[1:, start:stop] = _timed_positions(start, stop, inside, config, dtype)
    return positions_4T


def _timed_positions(
    start: int, stop: int, media: Sequence[tuple[int, Medium]], config: Any, dtype: type[np.number]
) -> np.ndarray:
    """Return time, height and width of the tokens from `start` to `stop` of a row: [3, L].

    Every piece (text, a medium, the token behind it) starts after the largest position of the piece before. Sums are
    rounded piece by piece as in transformers. `media`: position in the row of each medium's first token, and the
    medium.
    """
    pieces: list[np.ndarray] = []

    def add(offsets: np.ndarray) -> None:
        if offsets.shape[1]:
            first = pieces[-1].max() + dtype(1) if pieces else dtype(0)
            pieces.append(np.broadcast_to(offsets.astype(dtype) + first, (3, offsets.shape[1])))

    place = start
    for first, medium in media:
        add(np.arange(first - place)[None])
        add(_offsets(medium, config))
        place = min(first + medium.tokens + 1, stop)
        add(np.zeros((1, place - first - medium.tokens)))
    add(np.arange(stop - place)[None])
    return np.concatenate(pieces, axis=1)


def _offsets(medium: Medium, config: Any) -> np.ndarray:
    """Return time, height and width of each token of a medium from its start, [3, M]; of an audio, [1, M]."""
    if medium.grid is None:
        return np.arange(medium.tokens)[None]
    frames, *sides = medium.grid
    frame, row, column = np.indices((frames, *(n // config.vision_config.spatial_merge_size for n in sides)))
    seconds = np.float32(1.0 if medium.seconds is None else medium.seconds)
    time = frame.astype(np.float32) * seconds * np.float32(config.position_id_per_seconds)
    return np.stack([time, row, column]).reshape(3, -1)


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
    require(marked, _MARKERS, LayoutError, where=lambda at: segments.where(int(places[at])))


_MARKERS = (
    "an image or a video begins without the token that marks its start (config.vision_start_token_id) right before it, "
    "so that the model would count its tokens as text. Samples are written as the model's chat template does; a video "
    "whose own sound is interleaved with it (use_audio_in_video) is not supported: give the sound as audio of its own"
)
