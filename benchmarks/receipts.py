"""The batch that step, head and memory are measured on: receipts in their proportions, filled with random ids.

Real receipts differ from one another about 5:1 in length: an image of a size that follows the paper's, a short
question, and a long answer that spells the receipt out, which alone is labelled. Contents do not change what a step
costs, so ids and pixels are random, and the same for the same seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isqrt, prod
from typing import Any, final

import torch

from vlmpack.families import Family, family_named
from vlmpack.layout import IGNORE, Grid, HostMetadata, Media, PaddedBatch
from vlmpack.testing import Sample, build_sample, padded, tiny_config

BY_FORMULA = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen4_exp",
    "qwen3",
    "qwen3_next",
)
"""Families whose FLOPs are known by formula too (`step_flops`)."""
MEASURED = (
    *BY_FORMULA,
    "qwen2_5_omni_thinker",
    "mistral3",
    "gemma3",
    "paligemma",
    "gemma2",
    "lfm2",
    "gpt_oss",
    "llama4_text",
)
"""Families that are measured: one at least of each mechanism. The others share theirs."""
FIRST_WORD = 6
"""Ids below this are special tokens of tiny models."""
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


def receipt_batch(
    family: Family, config: Any, shapes: ReceiptShapes, *, seed: int = 0, device: str = "cpu"
) -> PaddedBatch:
    """The samples of `shapes` as one right-padded batch on a device, with the metadata that a collator gives.

    To a family without vision they are text of the same lengths. Pixels are drawn where they will lie.
    """
    rng = torch.Generator().manual_seed(seed)
    width = max(shapes.lengths)
    ids = torch.randint(FIRST_WORD, shapes.vocab_size, (shapes.samples, width), generator=rng)
    labels = torch.full_like(ids, IGNORE)
    for row, length in enumerate(shapes.lengths):
        answer = slice(length - shapes.labelled(length), length)
        labels[row, answer] = ids[row, answer]
        ids[row, length:] = family.text_config(config).pad_token_id or 0
    batch = PaddedBatch(
        input_ids=ids,
        attention_mask=(torch.arange(width) < torch.tensor(shapes.lengths)[:, None]).long(),
        labels=labels,
        metadata=HostMetadata(lengths=shapes.lengths, num_targets=int((labels[:, 1:] != IGNORE).sum())),
    )
    if not family.has_vision:
        return batch.to(device)
    if not family.has_grids or family.has_audio:
        return padded(built_samples(config, shapes, seed=seed)).to(device)
    drawn = rng if device == "cpu" else torch.Generator(device).manual_seed(seed)
    return _with_images(batch, family, config, shapes, drawn).to(device)


def _with_images(
    batch: PaddedBatch, family: Family, config: Any, shapes: ReceiptShapes, rng: torch.Generator
) -> PaddedBatch:
    """An image at the start of every sample."""
    assert batch.metadata is not None
    merge = family.merge(config)
    grids = [image_grid(round(n * shapes.image_share), merge) for n in shapes.lengths]
    ids, types = batch.input_ids.clone(), torch.zeros_like(batch.input_ids)
    for row, grid in enumerate(grids):
        image = family.tokens_per_image(grid, merge)
        ids[row, 0], ids[row, image + 1] = config.vision_start_token_id, config.vision_end_token_id
        ids[row, 1 : image + 1] = config.image_token_id
        types[row, 1 : image + 1] = 1
    metadata = replace(batch.metadata, image_grids=tuple(grids), images_per_sample=(1,) * shapes.samples)
    media = _media(family.patch_channels(config), grids, rng)
    return replace(batch, input_ids=ids, mm_token_type_ids=types, media=media, metadata=metadata)


def built_samples(config: Any, shapes: ReceiptShapes, *, seed: int = 0) -> list[Sample]:
    """The samples of a family whose images have no grids, or that takes audio, one by one: each an image or an audio,
    then text."""
    return [
        build_sample(
            config,
            stretches=[0, length - _medium_length(config, medium)],
            labelled=shapes.labelled(length),
            seed=len(shapes.lengths) * seed + at,
            **medium,
        )
        for at, length in enumerate(shapes.lengths)
        for medium in [_medium(config, shapes, length)]
    ]


def _medium(config: Any, shapes: ReceiptShapes, length: int) -> dict[str, Any]:
    """The largest image or audio whose tokens, with those around and between them, leave room for the labels."""
    room, tokens = length - shapes.labelled(length), round(length * shapes.image_share)
    media: list[dict[str, Any]] = [{"image_grids": [image_grid(n, 1)]} for n in range(tokens, 0, -1)]
    if config.model_type in PATCHES_OF_TOKEN:
        media = [{"image_grids": [(1, 1, 1)]}]
    elif family_named(config.model_type).has_audio:
        media = [{"audio_frames": [FRAMES_OF_TOKEN * tokens]}]
    return next((medium for medium in media if _medium_length(config, medium) <= room), media[-1])


def _medium_length(config: Any, medium: dict[str, Any]) -> int:
    return len(build_sample(config, stretches=[0, 0], **medium)["input_ids"])


def alone(batch: PaddedBatch) -> list[dict[str, torch.Tensor]]:
    """Each sample of a batch of `receipt_batch` on its own, without padding, as a Hugging Face model takes it."""
    assert batch.metadata is not None
    tokens = {name: tensor for name, tensor in hf_inputs(batch).items() if name in _TOKENS}
    samples = [
        {name: tensor[row : row + 1, :length] for name, tensor in tokens.items()}
        for row, length in enumerate(batch.metadata.lengths)
    ]
    media = batch.media
    if media.pixel_values is None or media.image_grid_thw is None:
        return samples
    pixels = media.pixel_values.split([prod(grid) for grid in batch.metadata.image_grids])
    grids = media.image_grid_thw.split(1)
    return [
        {**sample, "pixel_values": patches, "image_grid_thw": grid}
        for sample, patches, grid in zip(samples, pixels, grids, strict=True)
    ]


_TOKENS = ("input_ids", "attention_mask", "labels", "mm_token_type_ids")


def hf_inputs(batch: PaddedBatch) -> dict[str, torch.Tensor]:
    """The batch as an unmodified Hugging Face model takes it: tensors only."""
    return {name: value for name, value in batch.to_hf().items() if isinstance(value, torch.Tensor)}


def image_grid(tokens: int, merge: int) -> Grid:
    """An image of about this many tokens, half as wide as it is high: a receipt."""
    columns = max(1, isqrt(tokens // 2))
    return 1, merge * max(1, round(tokens / columns)), merge * columns


def _media(channels: int, grids: Sequence[Grid], rng: torch.Generator) -> Media:
    pixels = torch.randn(sum(map(prod, grids)), channels, generator=rng, device=rng.device)
    return Media(pixel_values=pixels, image_grid_thw=torch.tensor(grids))
