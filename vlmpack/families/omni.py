"""The thinkers of Qwen2.5-Omni and Qwen3-Omni: text, images, videos and audio in, text out."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vlmpack.families.audio import AudioPart
from vlmpack.families.family import Family, Rotary, pieces
from vlmpack.families.tiles import QWEN_MEDIA, Join
from vlmpack.layout.media import AUDIO, IMAGE, VIDEO, MediaTable
from vlmpack.layout.segments import Segments

# ---------------------------------------------------------------------- tokens and windows of audio


def _halved(count: int) -> int:
    """Number of frames after a convolution of width 3 and stride 2; 0 for 0."""
    return (count + 1) // 2


def pooled_tokens(frames: int, audio: Any) -> int:
    """Return the number of tokens of an audio in Qwen2.5-Omni: a convolution of stride 2, then means of two."""
    return _halved(frames) // 2


def chunk_windows(frames: Sequence[int], audio: Any) -> Segments:
    """Return one segment for each chunk of `2 * n_window` frames of each audio, halved by a convolution."""
    return Segments.from_lengths([_halved(chunk) for count in frames for chunk in pieces(count, 2 * audio.n_window)])


_TOKENS_OF_CHUNK = 13
"""Number of tokens that transformers counts for each whole chunk of Qwen3-Omni (100 frames in the released models)."""


def convolved_tokens(frames: int, audio: Any) -> int:
    """Return the number of tokens of an audio in Qwen3-Omni: three convolutions each halve every chunk."""
    whole, rest = divmod(frames, 2 * audio.n_window)
    return _TOKENS_OF_CHUNK * whole + _halved(_halved(_halved(rest)))


def inference_windows(frames: Sequence[int], audio: Any) -> Segments:
    """Return segments of as many tokens as `n_window_infer` frames make, counted with the longest chunk of the call.

    The boundaries are those of `get_audio_cu_seqlens` of transformers.
    """
    longest = convolved_tokens(min(max(frames), 2 * audio.n_window), audio)
    window = longest * (audio.n_window_infer // (2 * audio.n_window))
    return Segments.from_lengths([piece for n in frames for piece in pieces(convolved_tokens(n, audio), window)])


# ---------------------------------------------------------------------- positions of samples with videos

_TEXT_ID, _VISION_START, _AUDIO_START = 0, 4, 5
"""Token ids of the dummy sample for `get_rope_index`; placeholders have their kind as id."""


def model_positions(kinds_L: np.ndarray, table: MediaTable, config: Any, *, model_class: str) -> torch.Tensor:
    """Return the positions of one sample, [3, L], from `get_rope_index` of the installed transformers.

    The dtype is transformers' own, int64 or float32. `get_rope_index` is called on a dummy object with only the
    attributes that it reads.
    """
    model: Any = getattr(importlib.import_module("transformers"), model_class)
    settings = SimpleNamespace(
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=AUDIO,
        vision_start_token_id=_VISION_START,
        audio_start_token_id=_AUDIO_START,
        position_id_per_seconds=config.position_id_per_seconds,
        seconds_per_chunk=getattr(config, "seconds_per_chunk", None),
        audio_config=config.audio_config,
    )
    fake_self = SimpleNamespace(config=settings, spatial_merge_size=config.vision_config.spatial_merge_size)
    fake_self.get_llm_pos_ids_for_vision = partial(model.get_llm_pos_ids_for_vision, fake_self)
    ids = kinds_L.copy()
    ids[_media_starts(kinds_L, IMAGE, VIDEO) - 1] = _VISION_START
    ids[_media_starts(kinds_L, AUDIO) - 1] = _AUDIO_START
    with torch.device("cpu"):
        input_ids = torch.from_numpy(ids)[None]
        positions, _ = model.get_rope_index(
            fake_self,
            input_ids,
            image_grid_thw=_tensor(table.grids(IMAGE)),
            video_grid_thw=_tensor(table.grids(VIDEO)),
            attention_mask=torch.ones_like(input_ids),
            audio_seqlens=_tensor([audio.frames for audio in table.audios]),
            second_per_grids=_tensor([video.seconds for video in table.videos], np.float32),
        )
    return positions[:, 0]


def _media_starts(kinds_L: np.ndarray, *of: int) -> np.ndarray:
    """The positions where runs of tokens of the kinds `of` begin; `kinds_L`: kinds of a sample's tokens."""
    begins = np.isin(kinds_L, of)
    begins[1:] &= kinds_L[1:] != kinds_L[:-1]
    return np.flatnonzero(begins)


def _tensor(values: Sequence[Any], kind: Any = np.int64) -> torch.Tensor | None:
    """A CPU tensor of these numbers; None if there are none."""
    return torch.from_numpy(np.asarray(values, kind)) if len(values) else None


# ---------------------------------------------------------------------- the families

_MEDIA = {
    **QWEN_MEDIA,
    "video_second_per_grid": Join(),
    "input_features": Join(pad=True),
    "feature_attention_mask": Join(pad=True),
}


def _thinker(name: str, prefix: str, **fields: Any) -> Family:
    """Describe the thinker of a family whose code is in the folder `name` of transformers."""
    of_sample = partial(model_positions, model_class=f"{prefix}ThinkerModel")
    return Family(
        model_type=f"{name}_thinker",
        oldest_transformers=(5, 23),
        positions_rule=Rotary(of_sample=of_sample),
        processor_name=f"{prefix}Processor",
        text_type=name,
        token_types=None,
        media=_MEDIA,
        **fields,
    )


OMNI = (
    _thinker(
        "qwen2_5_omni",
        "Qwen2_5Omni",
        from_grids=("rotary", "boundaries", "windows"),
        audio=AudioPart(tokens=pooled_tokens, windows=chunk_windows),
    ),
    _thinker(
        "qwen3_omni_moe",
        "Qwen3OmniMoe",
        mechanisms={"experts": {"layer": "mlp"}},
        from_grids=("rotary", "boundaries", "interpolation"),
        audio=AudioPart(tokens=convolved_tokens, windows=inference_windows, reads_padding=True, passes_row=False),
    ),
)
"""The descriptors."""
