"""Audio of tiny models and of synthetic samples: settings of towers, tokens and log-mel frames, without a processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from vlmpack.families import Family
from vlmpack.testing.towers import deepstack_vision, vision_settings

if TYPE_CHECKING:
    from vlmpack.testing.models import TinySizes

MEL_BINS = 6
"""Log-mel bins of tiny models."""
UNREAD = 1e4
"""The value of frames behind an audio's own in the synthetic tensors: nothing may read them."""

# ---------------------------------------------------------------------- settings of tiny models


def _blocks(sizes: TinySizes) -> dict[str, Any]:
    assert sizes.patch_size is not None
    return {
        "depth": sizes.vision_depth,
        "num_heads": sizes.vision_heads,
        "in_channels": 3,
        "patch_size": sizes.patch_size,
        "spatial_merge_size": sizes.merge,
        "temporal_patch_size": sizes.temporal_patch_size,
    }


def omni_windowed_vision(sizes: TinySizes) -> dict[str, Any]:
    """Windows of 4 x 4 tokens as in the released models; the last block sees whole images."""
    assert sizes.patch_size is not None
    windows = {"window_size": 4 * sizes.merge * sizes.patch_size, "fullatt_block_indexes": [sizes.vision_depth - 1]}
    return {**_blocks(sizes), **vision_settings(sizes), **windows}


def omni_deepstack_vision(sizes: TinySizes) -> dict[str, Any]:
    """Deepstack features of images, as in Qwen3-VL."""
    return {**_blocks(sizes), **deepstack_vision(sizes)}


def _audio(sizes: TinySizes) -> dict[str, Any]:
    return {
        "num_mel_bins": MEL_BINS,
        "encoder_layers": 2,
        "encoder_attention_heads": sizes.vision_heads,
        "encoder_ffn_dim": 2 * sizes.vision_hidden,
        "d_model": sizes.vision_hidden,
        "max_source_positions": 64,
        "output_dim": sizes.hidden,
    }


def pooled_audio(sizes: TinySizes) -> dict[str, Any]:
    """Qwen2.5-Omni's: chunks of 8 frames, 2 tokens each."""
    return sizes.audio_tokens | {"audio_config": _audio(sizes) | {"n_window": 4}}


def convolved_audio(sizes: TinySizes) -> dict[str, Any]:
    """Qwen3-Omni's: chunks of 100 frames, as transformers counts 13 tokens for each, and windows of two chunks."""
    tower = _audio(sizes) | {"n_window": 50, "n_window_infer": 200, "downsample_hidden_size": 4}
    return sizes.audio_tokens | {"audio_config": tower}


# ---------------------------------------------------------------------- synthetic audio


def frames_of(config: Any) -> tuple[int, int]:
    """The fewest and the most frames of synthetic audio: more than a chunk, so that no padding is read."""
    window = config.audio_config.n_window
    return 2 * window + 1, 5 * window


def audio_tokens(config: Any, frames: int, family: Family) -> list[int]:
    """The tokens that stand for an audio, between those that mark its ends."""
    assert family.audio is not None
    count = family.audio.tokens(frames, config.audio_config)
    return [config.audio_start_token_id, *[config.audio_token_id] * count, config.audio_end_token_id]


def audio_tensors(config: Any, frames: Sequence[int], rng: torch.Generator) -> dict[str, torch.Tensor]:
    """float32 [N, mel, F] log-mel frames of audios, and int64 [N, F] their mask; the rest is `UNREAD`."""
    mask = (torch.arange(max(frames))[None] < torch.tensor(frames)[:, None]).long()
    values = torch.randn(len(frames), config.audio_config.num_mel_bins, max(frames), generator=rng)
    return {"input_features": values.where(mask[:, None].bool(), UNREAD), "feature_attention_mask": mask}
