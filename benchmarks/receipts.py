"""The batch that step, head and memory are measured on: receipts in their proportions, filled with random ids.

Real receipts differ from one another about 5:1 in length: an image of a size that follows the paper's, a short
question, and a long answer that spells the receipt out, which alone is labelled. Contents do not change what a step
costs, so ids and pixels are random, and the same for the same seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Any, final

import torch

from vlmpack.families import Family
from vlmpack.layout import Grid, PaddedBatch
from vlmpack.testing import Sample, build_sample, padded, tiny_config

MEASURED = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "qwen3"),
    *("qwen3_next", "qwen2_5_omni_thinker", "mistral3", "gemma3", "paligemma", "gemma2", "lfm2", "gpt_oss"),
    "llama4_text",
)
"""Families that are measured: one at least of each mechanism. The others share theirs."""
HEAD = 64
"""Channels of an attention head."""
DELTA_HEAD = 128
"""Channels of a head of a gated delta layer."""
PATCHES_OF_TOKEN = {"gemma3": 2, "paligemma": 1}
"""Patches along the side of what makes a token, of families whose images have one number of tokens, whatever their
form."""
FRAMES_OF_TOKEN = 4
"""Log-mel frames of a token of Qwen2.5-Omni."""
AUDIO_WINDOW = 100
"""Half of the log-mel frames that a block of Qwen2.5-Omni's audio tower attends within, as released."""


@final
@dataclass(frozen=True, kw_only=True)
class ReceiptShapes:
    """Sizes of the model and of the batch. The defaults are the yardstick of the project's targets.

    What a family adds is derived from `hidden` in the proportions of released models, see `receipt_config`.
    """

    hidden: int = 512
    """Width of the text model, in heads of 64."""
    layers: int = 4
    """Layers of the text model; in hybrid families every fourth has attention, the others are gated delta layers."""
    kv_heads: int = 4
    """Key and value heads of the text model."""
    experts: int = 32
    """Experts of each layer, where there are any."""
    experts_per_token: int = 8
    """Experts that each token is sent to; together they are as wide as the MLP of a dense family."""
    vision_hidden: int = 256
    """Width of the vision tower, in heads of 64."""
    vision_depth: int = 4
    """Blocks of the vision tower."""
    vocab_size: int = 4096
    """Token ids."""
    samples: int = 8
    """B."""
    longest: int = 768
    """Tokens of the longest sample."""
    ratio: float = 5.0
    """Longest over shortest; the lengths between are spread evenly on a logarithmic scale."""
    image_share: float = 0.3
    """Image tokens of a sample's tokens."""
    labelled_share: float = 0.5
    """Labelled tokens of a sample's tokens, at its end."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sample, long and short ones mixed."""
        steps = max(self.samples - 1, 1)
        falling = [round(self.longest * self.ratio ** (-i / steps)) for i in range(self.samples)]
        return tuple(falling[1::2] + falling[::2])

    def labelled(self, length: int) -> int:
        """Labelled tokens of a sample of so many tokens."""
        return max(1, round(length * self.labelled_share))


def receipt_config(family: Family, shapes: ReceiptShapes) -> Any:
    """The configuration of `receipt_model`.

    Every MLP is three times as wide as the text model. Experts share that width: those that a token is sent to have it
    together, and an expert that all tokens share is one more of them. Gated delta layers have keys of that width and
    values of twice as much, in heads of 128, as in Qwen3.5 and Qwen3-Next. A sliding window, or a chunk, is a third of
    the longest sample. An audio tower is as deep and as wide as that of images.
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
        side = isqrt(max(1, shortest - shapes.labelled(shortest) - 2))  # the tokens before and after an image
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
    """A random model of the family and of these sizes, unmodified, in train mode, on sdpa attention if it has that.

    The same arguments give the same weights.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto = AutoModelForImageTextToText if family.has_vision else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        config = receipt_config(family, shapes)
        model = auto.from_config(config, dtype=torch.float32)
    return model.train().to(device)


def receipt_samples(family: Family, config: Any, shapes: ReceiptShapes, *, seed: int = 0) -> list[Sample]:
    """The samples of `shapes`, one by one: each an image (an audio of Omni), then text of which the end is labelled."""
    samples = []
    for at, length in enumerate(shapes.lengths):
        labelled = shapes.labelled(length)
        medium = _medium(family, config, round(length * shapes.image_share), room=length - labelled)
        stretches = [0, length - _tokens(config, medium)] if medium else [length]
        number = len(shapes.lengths) * seed + at
        samples.append(build_sample(config, stretches=stretches, labelled=labelled, seed=number, **medium))
    return samples


def _medium(family: Family, config: Any, tokens: int, *, room: int) -> dict[str, Any]:
    """An image or audio of about so many tokens, which with those around and between them leave room for labels."""
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
    """An image of about this many tokens, half as wide as it is high: a receipt."""
    columns = max(1, isqrt(tokens // 2))
    return 1, merge * max(1, round(tokens / columns)), merge * columns


def receipt_batch(
    family: Family, config: Any, shapes: ReceiptShapes, *, seed: int = 0, device: str = "cpu"
) -> PaddedBatch:
    """The samples of `shapes` as one right-padded batch on a device, with the metadata that a collator gives."""
    return padded(receipt_samples(family, config, shapes, seed=seed)).to(device)


def hf_inputs(batch: PaddedBatch) -> dict[str, torch.Tensor]:
    """The batch as an unmodified Hugging Face model takes it: tensors only."""
    return {name: value for name, value in batch.to_hf().items() if isinstance(value, torch.Tensor)}
