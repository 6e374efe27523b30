"""The thinkers of Qwen2.5-Omni and Qwen3-Omni: text, images, videos and audio in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vlmpack.families.audio import AudioPart
from vlmpack.families.family import Family, Rotary, pieces
from vlmpack.families.tiles import QWEN_MEDIA, Join
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


# ---------------------------------------------------------------------- the families

_MEDIA = {
    **QWEN_MEDIA,
    "video_second_per_grid": Join(),
    "input_features": Join(pad=True),
    "feature_attention_mask": Join(pad=True),
}


def _thinker(name: str, prefix: str, **fields: Any) -> Family:
    """Describe the thinker of a family whose code is in the folder `name` of transformers."""
    return Family(
        model_type=f"{name}_thinker",
        oldest_transformers=(5, 23),
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
        positions_rule=Rotary(timed=np.int64),
        audio=AudioPart(tokens=pooled_tokens, windows=chunk_windows),
    ),
    _thinker(
        "qwen3_omni_moe",
        "Qwen3OmniMoe",
        positions_rule=Rotary(timed=np.float32),
        mechanisms={"experts": {"layer": "mlp"}},
        audio=AudioPart(tokens=convolved_tokens, windows=inference_windows, reads_padding=True, passes_row=False),
    ),
)
"""The descriptors."""
