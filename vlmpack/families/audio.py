"""Audio of a family: tokens and boundaries of audio features, and samples whose positions the model itself computes.

    frames    log-mel frames [N, mel, F], padded to a common number, with a mask of those that each audio has
    chunks    the frames of an audio, cut; convolutions run over each, padded to the longest chunk of the call
    windows   what the blocks of the tower attend within: one chunk, or several
    tokens    one placeholder for each feature, in one run

Audio tokens count as text in rotary positions.

A tower that reads the padding of its chunks (Qwen3-Omni) makes other features of a short audio beside a longer one, in
transformers' padded batches too. Its audios go through it in groups, so that the longest chunk of a call is that of
every sample in it.

N audios, F frames.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from vlmpack.errors import LayoutError
from vlmpack.families.media import MediaItems, media_starts
from vlmpack.layout.batch import AUDIO, IMAGE, VIDEO, Grid, HostMetadata, Media, check_tensor
from vlmpack.layout.device import on_host, require, to_device
from vlmpack.layout.segments import Segments

AudioTokens = Callable[[int, Any], int]
"""Frames of an audio, and the configuration of the audio part, to its tokens."""

AudioWindows = Callable[[Sequence[int], Any], Segments]
"""Frames of the audios of one call of the tower, and its configuration, to what its blocks attend within."""


@final
@dataclass(frozen=True, kw_only=True)
class AudioPart:
    """The audio part of a family's models: log-mel frames in, features of audio tokens out."""

    tokens: AudioTokens
    """Its tokens of an audio."""
    windows: AudioWindows
    """The boundaries that its blocks attend within."""
    path: str = "model.audio_tower"
    """Where it is."""
    reads_padding: bool = False
    """True if its features depend on the longest chunk of a call."""
    passes_row: bool = True
    """True if the tower passes keywords of a row on to its layers."""

    def items(self, frames: Sequence[int], config: Any) -> MediaItems:
        """The runs of tokens of these audios.

        Raises:
            LayoutError: an audio so short that no token stands for it.
        """
        counts = [self.tokens(count, config.audio_config) for count in frames]
        if (short := next((at for at, count in enumerate(counts) if count < 1), None)) is not None:
            raise LayoutError(
                f"audio {short} of the row has {frames[short]} frames (feature_attention_mask), too few for one token; "
                "leave it out of its sample"
            )
        grids = np.ones((len(counts), 3), np.int64)
        grids[:, 2] = counts
        return MediaItems(grids=grids, interval=np.ones(len(counts), np.float32), medium=np.arange(len(counts)))

    def check_features(self, media: Media, frames: Sequence[int], config: Any) -> None:
        """Compare the shape of `input_features` with the mask and with the model.

        Raises:
            LayoutError: other shapes than the processor makes, or features without their mask.
        """
        features, mask = media.tensors.get("input_features"), media.audio_mask
        if features is None and mask is None:
            return
        if features is None or mask is None:
            there, missing = ("input_features", "feature_attention_mask")[:: 1 if mask is None else -1]
            raise LayoutError(f"there are {there} without {missing}; keep both as the processor gives them")
        bins = config.audio_config.num_mel_bins
        expected = (len(frames), bins, mask.shape[1])
        what = f"[audios, mel bins, frames], here {list(expected)} by feature_attention_mask and the model"
        check_tensor("input_features", features, expected, what)

    def longest_of_samples(self, types: torch.Tensor, segments: Segments, metadata: HostMetadata) -> np.ndarray:
        """int64 [N]: frames of the longest audio of the sample of each audio.

        Without `audios_per_sample` in the metadata runs are counted: on a device one host–device sync.

        Args:
            types: [1, T], kinds of tokens.
            segments: the row's samples.
            metadata: with the frames of each audio.
        """
        per_sample = metadata.audios_per_sample or _counted(types, segments)
        samples = np.repeat(np.arange(len(per_sample)), per_sample)
        longest = np.zeros(len(per_sample), np.int64)
        np.maximum.at(longest, samples, np.asarray(metadata.audio_frames, np.int64))
        return longest[samples]

    def groups(
        self,
        types: torch.Tensor,
        segments: Segments,
        metadata: HostMetadata,
        config: Any,
        computed: Sequence[int],
    ) -> list[list[int]]:
        """Places, among the audios that are computed, of those of each call of the tower.

        Args:
            types: [1, T], kinds of tokens.
            segments: the row's samples.
            metadata: with the frames of each audio.
            config: the model's configuration.
            computed: numbers of the audios that are computed, in the order in which they are.
        """
        if not len(computed):
            return []
        if not self.reads_padding:
            return [[*range(len(computed))]]
        longest = self.longest_of_samples(types, segments, metadata)[list(computed)]
        chunks = np.minimum(longest, 2 * config.audio_config.n_window)
        return [np.flatnonzero(chunks == chunk).tolist() for chunk in np.unique(chunks)]


def _counted(types: torch.Tensor, segments: Segments) -> tuple[int, ...]:
    """The runs of audio tokens of each sample."""
    kinds_T = types[0].cpu().numpy()
    return tuple(len(media_starts(kinds_T[start:stop], AUDIO)) for start, stop in segments.spans)


# ---------------------------------------------------------------------- positions that the model's own code computes


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class SampleMedia:
    """One sample, as the `get_rope_index` of its model reads it."""

    kinds: np.ndarray
    """int64 [L]: 0 text, 1 image, 2 video, 3 audio."""
    image_grids: Sequence[Grid]
    """(frames, rows, columns) in patches of each image."""
    video_grids: Sequence[Grid]
    """The same of each video."""
    seconds: Sequence[float]
    """From one grid of each video to the next."""
    audio_frames: Sequence[int]
    """Log-mel frames of each audio."""


PositionsOfSample = Callable[[SampleMedia, Any], torch.Tensor]
"""A sample, and the model's configuration, to its positions [3, L], int64 or float32."""


@final
@dataclass(frozen=True, kw_only=True)
class AskModel:
    """Multimodal rotary positions, of which those of a sample with videos are the installed `get_rope_index`'s.

    A video, or an image of several frames, moves what follows by its length in time there, in float32 where the model
    has fractions of positions. All other samples follow from grids, as of `Rotary`.
    """

    of_sample: PositionsOfSample
    """Calls it."""
    axes: int = 3
    """Rotary positions of a token."""
    start: int = 0
    """Position of the first token."""

    def is_asked(self, image_grids: Sequence[Grid], video_grids: Sequence[Grid]) -> bool:
        """Return whether positions of a row do not follow from its grids alone."""
        return len(video_grids) > 0 or any(grid[0] > 1 for grid in image_grids)

    def replace_videos(
        self, positions_4T: torch.Tensor, segments: Segments, row: SampleMedia, config: Any
    ) -> torch.Tensor:
        """Replace the positions of samples with videos.

        Args:
            positions_4T: [4, 1, T], right for all others.
            segments: where positions restart.
            row: kinds of tokens, [T], and media of the whole row, in its order.
            config: the model's configuration.

        Returns:
            [4, 1, T]; float32 where the model's own are.

        Raises:
            LayoutError: a video without seconds, or positions restart right before a medium.
        """
        if len(row.seconds) != len(row.video_grids):
            raise LayoutError(
                f"there are {len(row.video_grids)} videos but the seconds between two grids of {len(row.seconds)}; "
                "give the processor's video_second_per_grid"
            )
        used = np.zeros(4, np.int64)
        for start, stop in segments.spans:
            kinds = row.kinds[start:stop]
            starts = media_starts(kinds, IMAGE, VIDEO, AUDIO)
            after = used + np.bincount(kinds[starts], minlength=4)
            images = row.image_grids[used[IMAGE] : after[IMAGE]]
            if self.is_asked(images, row.video_grids[used[VIDEO] : after[VIDEO]]):
                if starts[0] == 0:
                    raise LayoutError(
                        f"positions restart at place {start} of the row, between a medium and the token before it that "
                        "marks its start; move that boundary"
                    )
                sample = SampleMedia(
                    kinds=kinds,
                    image_grids=images,
                    video_grids=row.video_grids[used[VIDEO] : after[VIDEO]],
                    seconds=row.seconds[used[VIDEO] : after[VIDEO]],
                    audio_frames=row.audio_frames[used[AUDIO] : after[AUDIO]],
                )
                found_3L = self.of_sample(sample, config)
                positions_4T = positions_4T.to(torch.promote_types(positions_4T.dtype, found_3L.dtype))
                positions_4T[1:, 0, start:stop] = to_device(found_3L.numpy(), positions_4T.device)
            used = after
        return positions_4T


def check_markers(input_ids: torch.Tensor, types: torch.Tensor, segments: Segments, config: Any) -> None:
    """Insist that the token which marks its start is before each image and each video: positions count these tokens.

    Args:
        input_ids: [1, T].
        types: [1, T], kinds of tokens.
        segments: the row's samples.
        config: the model's configuration.

    Raises:
        LayoutError: it is not; on the host it names the sample.
    """
    before_T, kinds_T = input_ids[0].roll(1), types[0]
    first = segments.first_tokens(types.device)
    begins_T = kinds_T != kinds_T.roll(1)
    begins_T[first] = True
    is_vision = (kinds_T == IMAGE) | (kinds_T == VIDEO)
    wrong_T = begins_T & is_vision & (before_T != config.vision_start_token_id)
    wrong_T[first] = is_vision[first]
    if on_host(wrong_T) and wrong_T.any():
        place = int(wrong_T.int().argmax())
        sample = next(at for at, (start, stop) in enumerate(segments.spans) if start <= place < stop)
        raise LayoutError(f"sample {sample}: at place {place} of the row {_MARKERS}")
    require(~wrong_T.any(), f"somewhere in the row {_MARKERS}", LayoutError)


_MARKERS = (
    "an image or a video begins without the token that marks its start (config.vision_start_token_id) right before it, "
    "so that the model would count its tokens as text. Samples are written as the model's chat template does; a video "
    "whose own sound is interleaved with it (use_audio_in_video) is not supported: give the sound as audio of its own"
)
