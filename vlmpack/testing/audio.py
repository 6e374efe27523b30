"""Audio of tiny models, processors and synthetic samples: settings of towers, tokens and log-mel frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vlmpack.families.family import Family
from vlmpack.families.registry import FAMILIES
from vlmpack.testing.towers import deepstack_vision, patch_blocks, vision_settings

if TYPE_CHECKING:
    from vlmpack.testing.models import TinySizes
    from vlmpack.testing.tiles import Sample

MEL_BINS = 6
"""Log-mel bins of tiny models."""
UNREAD = 1e4
"""The value of frames behind an audio's own in the synthetic tensors: nothing may read them."""

# ---------------------------------------------------------------------- settings of tiny models


def omni_windowed_vision(sizes: TinySizes) -> dict[str, Any]:
    """Windows of 4 x 4 tokens as in the released models; the last block sees whole images."""
    assert sizes.patch_size is not None
    windows = {"window_size": 4 * sizes.merge * sizes.patch_size, "fullatt_block_indexes": [sizes.vision_depth - 1]}
    return {**patch_blocks(sizes), **vision_settings(sizes), **windows}


def omni_deepstack_vision(sizes: TinySizes) -> dict[str, Any]:
    """Deepstack features of images, as in Qwen3-VL."""
    return {**patch_blocks(sizes), **deepstack_vision(sizes)}


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


# ---------------------------------------------------------------------- processors

_MEDIA = ("image", "video", "audio")
OMNI_TOKENS = {
    "qwen2_5_omni_thinker": {
        **{f"{kind}_token": f"<|{kind.upper()}|>" for kind in _MEDIA},
        **{f"{kind}_{end}_token": f"<|{kind}_{end}|>" for kind in ("vision", "audio") for end in ("bos", "eos")},
    },
    "qwen3_omni_moe_thinker": {
        **{f"{kind}_token": f"<|{kind}_pad|>" for kind in _MEDIA},
        **{
            f"{kind}_{end}_token": f"<|{kind}_{name}|>"
            for kind in ("vision", "audio")
            for end, name in (("bos", "start"), ("eos", "end"))
        },
    },
}
"""Special tokens by the names that their tokenizers give them."""


def omni_template(family: str) -> str:
    """ChatML in which a medium is one placeholder between the tokens that mark its ends, as in released models."""
    tokens = OMNI_TOKENS[family]
    written = {
        kind: tokens[f"{around}_bos_token"] + tokens[f"{kind}_token"] + tokens[f"{around}_eos_token"]
        for kind, around in (("image", "vision"), ("video", "vision"), ("audio", "audio"))
    }
    parts = "".join(f"{{%- elif part['type'] == '{kind}' -%}}{{{{- '{text}' -}}}}" for kind, text in written.items())
    return (
        "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\n' -}}"
        "{%- if message['content'] is string -%}{{- message['content'] -}}"
        "{%- else -%}{%- for part in message['content'] -%}"
        "{%- if part['type'] == 'text' -%}{{- part['text'] -}}" + parts + "{%- endif -%}"
        "{%- endfor -%}{%- endif -%}{{- '<|im_end|>\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
    )


def tiny_extractor() -> Any:
    """A real feature extractor of as many log-mel bins as tiny models take, for audio of 8 s at most."""
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=MEL_BINS, chunk_length=8, return_attention_mask=True)


def omni_sizes(processor: Any) -> dict[str, Any] | None:
    """Token ids, vocabulary and patch sizes of a processor that hears; None: it is another one."""
    if type(processor).__name__ not in [FAMILIES[family].processor for family in OMNI_TOKENS if family in FAMILIES]:
        return None
    tokenizer, images = processor.tokenizer, processor.image_processor
    names = {
        "image_token_id": processor.image_token,
        "video_token_id": processor.video_token,
        "audio_token_id": processor.audio_token,
        "vision_start_token_id": processor.vision_bos_token,
        "vision_end_token_id": processor.vision_eos_token,
        "audio_start_token_id": processor.audio_bos_token,
        "audio_end_token_id": processor.audio_eos_token,
    }
    return {
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()},
        "vocab_size": len(tokenizer),
        "patch_size": images.patch_size,
        "merge": images.merge_size,
        "temporal_patch_size": images.temporal_patch_size,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def noises(count: int) -> list[dict[str, Any]]:
    """Draw parts of messages: noise of more than a second each, none as long as another."""
    rng = np.random.default_rng(0)
    lengths = (18_000 + 3_001 * at for at in range(count))
    return [{"type": "audio", "audio": rng.normal(scale=0.1, size=n).astype(np.float32)} for n in lengths]


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


def frames_in(sample: Sample) -> tuple[int, ...]:
    """Read the log-mel frames of each of a sample's audios."""
    mask = sample.get("feature_attention_mask")
    return () if mask is None else tuple(mask.sum(1).tolist())
