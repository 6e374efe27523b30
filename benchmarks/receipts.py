"""The batch for measuring step, head and memory: samples with the proportions of receipts and random contents.

Lengths of real receipts differ by about 5:1. A sample has an image whose size follows the paper's size, a short
question, and a long answer that transcribes the receipt; only the answer is labeled. The cost of a step does not depend
on the contents, so ids and pixels are random, and the same for the same seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Any, final

import torch

from vlmpack.families import Family
from vlmpack.layout import PaddedBatch
from vlmpack.layout.media import Grid
from vlmpack.testing import Sample, build_sample, padded, tiny_config

MEASURED = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "qwen3"),
    *("qwen3_next", "qwen2_5_omni_thinker", "mistral3", "gemma3", "paligemma", "gemma2", "lfm2", "gpt_oss"),
    "llama4_text",
)
"""Families that are measured, at least one for each mechanism. The other families share these mechanisms."""
HEAD = 64
"""Channels of an attention head."""
DELTA_HEAD = 128
"""Channels of a head of a gated delta layer."""
PATCHES_OF_TOKEN = {"gemma3": 2, "paligemma": 1}
"""Patches along each side of a token, in families whose images all have the same number of tokens."""
FRAMES_OF_TOKEN = 4
"""Log-mel frames per token of Qwen2.5-Omni."""
AUDIO_WINDOW = 100
"""Half of the attention window, in log-mel frames, of the released Qwen2.5-Omni's audio tower."""


@final
@dataclass(frozen=True, kw_only=True)
class ReceiptShapes:
    """Sizes of the model and of the batch. The project's targets refer to the defaults.

    Family-specific sizes are derived from `hidden`, in the proportions of released models; see `receipt_config`.
    """

    hidden: int = 512
    """Width of the text model, in heads of 64."""
    layers: int = 4
    """Layers of the text model. In hybrid families, every fourth layer and the last one have attention; the others are
    gated delta layers or short convolutions."""
    kv_heads: int = 4
    """Key and value heads of the text model."""
    experts: int = 32
    """Experts of each layer, in families with experts."""
    experts_per_token: int = 8
    """Experts per token; together they are as wide as the MLP of a dense family."""
    vision_hidden: int = 256
    """Width of the vision tower, in heads of 64."""
    vision_depth: int = 4
    """Blocks of the vision tower."""
    vocab_size: int = 4096
    """Number of token ids."""
    samples: int = 8
    """Samples of the batch: B."""
    longest: int = 768
    """Tokens of the longest sample."""
    ratio: float = 5.0
    """Length of the longest sample / shortest sample; the other lengths are evenly spaced on a logarithmic scale."""
    image_share: float = 0.3
    """Fraction of a sample's tokens that are image tokens."""
    labelled_share: float = 0.5
    """Fraction of a sample's tokens that are labeled, at its end."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sample; long and short samples are mixed."""
        steps = max(self.samples - 1, 1)
        falling = [round(self.longest * self.ratio ** (-i / steps)) for i in range(self.samples)]
        return tuple(falling[1::2] + falling[::2])

    def labelled(self, length: int) -> int:
        """Return the number of labeled tokens of a sample with `length` tokens."""
        return max(1, round(length * self.labelled_share))


def receipt_config(family: Family, shapes: ReceiptShapes) -> Any:
    """Build the configuration of `receipt_model`.

    Every MLP is three times as wide as the text model. With experts, this is the total width of the experts of one
    token; a shared expert has the width of one expert more. Gated delta layers have keys as wide as the text model and
    values twice as wide, in heads of 128, as in Qwen3.5 and Qwen3-Next. A sliding window or chunk is a third of the
    longest sample. An audio tower is as deep and as wide as the vision tower.
    """
    config = tiny_config(
        family.model_type,
        hidden=shapes.hidden,
        layers=shapes.layers,
        heads=max(shapes.hidden // HEAD, shapes.kv_heads),
        kv_heads=shapes.kv_heads,
        intermediate=3 * shapes.hidden,
        experts=shapes.experts,
        experts_per_token=shapes.experts_per_token,
        vision_hidden=shapes.vision_hidden,
        vision_depth=shapes.vision_depth,
        vision_heads=max(shapes.vision_hidden // HEAD, 1),
        vocab_size=shapes.vocab_size,
    )
    text = family.text_config(config)
    for name in {"sliding_window", "attention_chunk_size"} & vars(text).keys():
        if vars(text)[name] is not None:
            text.update({name: shapes.longest // 3})
    if family.model_type in PATCHES_OF_TOKEN:
        shortest = min(shapes.lengths)
        side = isqrt(max(1, shortest - shapes.labelled(shortest) - 2))  # minus the tokens before and after an image
        config.mm_tokens_per_image = text.num_image_tokens = side**2
        patches = PATCHES_OF_TOKEN[family.model_type] * side
        config.vision_config.image_size = patches * config.vision_config.patch_size
    if family.has_audio:
        config.audio_config.n_window, config.audio_config.max_source_positions = AUDIO_WINDOW, AUDIO_WINDOW
        config.audio_config.encoder_layers = shapes.vision_depth
    if family.model_type in ("gpt_oss", "llama4_text"):
        text.intermediate_size = 3 * shapes.hidden // shapes.experts_per_token
    elif family.has("experts"):
        text.moe_intermediate_size = 3 * shapes.hidden // shapes.experts_per_token
        if family.has("gated_delta"):
            text.shared_expert_intermediate_size = text.moe_intermediate_size
    if family.has("gated_delta"):
        text.linear_key_head_dim = text.linear_value_head_dim = min(DELTA_HEAD, shapes.hidden)
        text.linear_num_key_heads = shapes.hidden // text.linear_key_head_dim
        text.linear_num_value_heads = 2 * text.linear_num_key_heads
    return config


def receipt_model(family: Family, shapes: ReceiptShapes, *, seed: int = 0, device: str = "cpu") -> Any:
    """Build an unmodified model of these sizes with random weights, in train mode, with sdpa attention if available.

    The same arguments give the same weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        config = receipt_config(family, shapes)
        model = family.auto_class.from_config(config, dtype=torch.float32)
    return model.train().to(device)


def receipt_samples(family: Family, config: Any, shapes: ReceiptShapes, *, seed: int = 0) -> list[Sample]:
    """Build the samples of `shapes`: an image (in Omni, an audio), then text whose end is labeled."""
    samples = []
    for at, length in enumerate(shapes.lengths):
        labelled = shapes.labelled(length)
        medium = _medium(family, config, round(length * shapes.image_share), room=length - labelled)
        stretches = [0, length - _tokens(config, medium)] if medium else [length]
        number = len(shapes.lengths) * seed + at
        samples.append(build_sample(config, stretches=stretches, labeled=labelled, seed=number, **medium))
    return samples


def _medium(family: Family, config: Any, tokens: int, *, room: int) -> dict[str, Any]:
    """Return an image or audio of about `tokens` tokens; with the tokens around it, it has at most `room` tokens."""
    media: list[dict[str, Any]] = []
    if family.has_audio:
        media = [{"audio_frames": [FRAMES_OF_TOKEN * tokens]}]
    elif family.model_type in PATCHES_OF_TOKEN:
        media = [{"image_grids": [(1, 1, 1)]}]
    elif family.has_vision:
        merge = family.merge(config) if family.has_grids else 1
        media = [{"image_grids": [image_grid(n, merge)]} for n in range(tokens, 0, -1)]
    return next((medium for medium in media if _tokens(config, medium) <= room), media[-1] if media else {})


def _tokens(config: Any, medium: dict[str, Any]) -> int:
    return len(build_sample(config, stretches=[0, 0], **medium)["input_ids"])


def image_grid(tokens: int, merge: int) -> Grid:
    """Return the grid of an image of about `tokens` tokens, half as wide as it is high, like a receipt."""
    columns = max(1, isqrt(tokens // 2))
    return 1, merge * max(1, round(tokens / columns)), merge * columns


def receipt_batch(
    family: Family, config: Any, shapes: ReceiptShapes, *, seed: int = 0, device: str = "cpu"
) -> PaddedBatch:
    """Pad the samples of `shapes` to a right-padded batch on a device, with the metadata that a collator adds."""
    return padded(receipt_samples(family, config, shapes, seed=seed)).to(device)


def hf_inputs(batch: PaddedBatch) -> dict[str, torch.Tensor]:
    """Return the batch as an unmodified Hugging Face model takes it: only tensors."""
    return {name: value for name, value in batch.to_hf().items() if isinstance(value, torch.Tensor)}
