"""FLOPs of a training step by formula, for every family: what `count_flops` counts on the unmodified model.

T tokens, D width, N heads of H, K key-value heads, C tokens of a chunk of a gated delta layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, final

from vlmpack.families import Family
from vlmpack.layout import Grid

BACKWARD_OF_LINEAR = 2
"""Backward over forward of a matrix product: one product for the input's gradient, one for the weight's."""
BACKWARD_OF_ATTENTION = 2.5
"""Backward over forward of fused attention: five matrix products, one of them the scores once more, against two."""
CHUNK = 64
"""Tokens that transformers' gated delta layers compute at one time; a sample fills whole chunks."""


@final
@dataclass(frozen=True, kw_only=True)
class StepFlops:
    """FLOPs of the forward and backward pass of one training step, by part."""

    text_linear: int
    """Projections and dense MLPs of the text model, and what chooses, mixes and looks up in Qwen4-exp."""
    text_attention: int
    """Scores and weighted sums of the text model."""
    delta: int
    """Convolution and recurrence of gated delta layers, without their projections."""
    experts: int
    """Routers, the experts that tokens are sent to, and shared experts with their gates."""
    head: int
    """The language-model head."""
    vision: int
    """Patch embedding, vision blocks and mergers."""

    @property
    def total(self) -> int:
        """All parts."""
        return self.text_linear + self.text_attention + self.delta + self.experts + self.head + self.vision


def step_flops(
    family: Family,
    config: Any,
    lengths: Sequence[int],
    grids: Sequence[Grid] = (),
    *,
    head_tokens: int | None = None,
    causal: bool = False,
) -> StepFlops:
    """FLOPs of a training step on samples that are not padded, by formula.

    Nothing is computed twice (no recomputed activations), pixels need no gradient, and every layer of a family with
    experts has them.

    Args:
        family: of the model.
        config: of the whole model.
        lengths: tokens of each sample; B rows of width S are B times S.
        grids: (frames, rows, columns) in patches of each image or video.
        head_tokens: tokens that get logits; None: all of them.
        causal: count the pairs that causal attention needs, n (n + 1) / 2, instead of all n * n.
    """
    text, tokens = family.text_config(config), sum(lengths)
    delta_layers = 0 if not family.has("gated_delta") else text.layer_types.count("linear_attention")
    attention_layers = text.num_hidden_layers - delta_layers
    queries = text.num_attention_heads * _head_dim(family, text)
    pairs = sum(n * (n + 1) // 2 if causal else n * n for n in lengths)
    layers = attention_layers * _attention_weights(family, text)
    if family.has("gated_delta"):
        layers += delta_layers * _delta_weights(text)
    if not family.has("experts"):
        layers += text.num_hidden_layers * 3 * text.hidden_size * text.intermediate_size
    indexers = 0
    if family.has("per_sample"):
        layers += _stream_weights(text) + len(text.ple_layer_ids) * _ngram_weights(text)
        indexers = attention_layers * sum(_indexer(text, n) for n in lengths)
    return StepFlops(
        text_linear=_linear(tokens * layers) + indexers,
        text_attention=_attention(attention_layers * queries * pairs),
        delta=sum(delta_layers * _delta_rule(text, n) for n in lengths) if delta_layers else 0,
        experts=_linear(tokens * text.num_hidden_layers * _expert_weights(family, text)),
        head=_linear((tokens if head_tokens is None else head_tokens) * text.hidden_size * text.vocab_size),
        vision=_vision(family, config, grids) if family.has_vision else 0,
    )


# ---------------------------------------------------------------------- the text model: weights that a token meets


def _head_dim(family: Family, text: Any) -> int:
    first = ("qwen2_vl", "qwen2_5_vl")
    return text.hidden_size // text.num_attention_heads if family.model_type in first else text.head_dim


def _attention_weights(family: Family, text: Any) -> int:
    """Projections of one attention layer. Families with gated delta layers gate their attention too."""
    heads = text.num_attention_heads * (2 if not family.has("gated_delta") else 3) + 2 * text.num_key_value_heads
    return text.hidden_size * heads * _head_dim(family, text)


def _stream_weights(text: Any) -> int:
    """What mixes residual streams of Qwen4-exp and adds to them, before both halves of every layer and at the end."""
    streams = text.hc_count * text.hidden_size
    mixers = (2 * text.num_hidden_layers + 1) * 2 * streams * text.hc_lowrank
    return mixers + 2 * text.num_hidden_layers * streams * text.hc_count


def _ngram_weights(text: Any) -> int:
    """One n-gram layer: keys for every stream, values, and a convolution over the streams."""
    streams = text.hc_count * text.hidden_size
    return text.ple_embed_dim * (streams + text.hidden_size) + streams * text.ple_conv_kernel_size


def _indexer(text: Any, tokens: int) -> int:
    """One indexer on one sample, forward only: it chooses, which has no gradient. A query meets the whole blocks of
    tokens before it."""
    blocks = sum(seen // text.indexer_compress_ratio for seen in range(1, tokens + 1))
    projections = tokens * text.hidden_size * (text.indexer_n_heads + text.indexer_kv_heads)
    return 2 * text.indexer_head_dim * (projections + blocks * text.indexer_n_heads)


def _delta_weights(text: Any) -> int:
    """Projections of one gated delta layer: queries and keys; values, gate, output; decay and learning rate."""
    keys, values = _delta_widths(text)
    return text.hidden_size * (2 * keys + 3 * values + 2 * text.linear_num_value_heads)


def _delta_widths(text: Any) -> tuple[int, int]:
    """Channels of all keys and of all values."""
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    return keys, text.linear_num_value_heads * text.linear_value_head_dim


def _expert_weights(family: Family, text: Any) -> int:
    """Router and chosen experts of one layer; and, in families with gated delta layers, the expert that all share."""
    if not family.has("experts"):
        return 0
    chosen = text.num_experts + 3 * text.num_experts_per_tok * text.moe_intermediate_size
    shared = 0 if not family.has("gated_delta") else 1 + 3 * text.shared_expert_intermediate_size
    return text.hidden_size * (chosen + shared)


def _delta_rule(text: Any, tokens: int) -> int:
    """Convolution and chunked recurrence of one gated delta layer for one sample, forward and backward.

    For each chunk and head, with keys of K and values of V channels, the forward pass has products of C C K (keys with
    keys, queries with keys), C C V (weights with values) and three of C K V (with the state), and solves a triangular
    system for K + V right sides, at half of a product each. A solve's backward pass is another solve and a product. The
    state before the first chunk needs no gradient, and that after the last gets none.
    """
    keys, values = _delta_widths(text)
    width_k, width_v = text.linear_key_head_dim, text.linear_value_head_dim
    places = tokens + text.linear_conv_kernel_dim - 1  # the convolution runs past the end, and the rest is dropped
    convolution = _linear(places * (2 * keys + values) * text.linear_conv_kernel_dim)
    chunks = -(-tokens // CHUNK)
    products = chunks * (CHUNK**2 * (2 * width_k + width_v) + 3 * CHUNK * width_k * width_v)
    solves = chunks * CHUNK**2 * (width_k + width_v) * 4  # a forward solve is CHUNK ** 2 of them a right side
    edges = 2 * 4 * CHUNK * width_k * width_v
    return convolution + text.linear_num_value_heads * (_linear(products) + solves - edges)


# ---------------------------------------------------------------------- the vision tower


def _vision(family: Family, config: Any, grids: Sequence[Grid]) -> int:
    if not grids:
        return 0
    vision = family.vision_config(config)
    width = vision.embed_dim if family.model_type == "qwen2_vl" else vision.hidden_size
    wide = width * vision.spatial_merge_size**2
    patches, tokens = sum(map(prod, grids)), sum(map(prod, grids)) // vision.spatial_merge_size**2
    blocks = vision.depth * patches * (4 * width**2 + _vision_mlp(family, vision))
    mergers = _mergers(family, vision) * tokens * (wide**2 + wide * family.text_config(config).hidden_size)
    embedding = 2 * 2 * patches * family.patch_channels(config) * width  # forward and the weight's gradient
    return embedding + _linear(blocks + mergers) + _attention(width * _vision_pairs(family, config, grids))


def _vision_mlp(family: Family, vision: Any) -> int:
    """Weights of one block's MLP."""
    if family.model_type == "qwen2_vl":
        return 2 * vision.embed_dim * int(vision.embed_dim * vision.mlp_ratio)
    matrices = 3 if family.model_type == "qwen2_5_vl" else 2
    return matrices * vision.hidden_size * vision.intermediate_size


def _mergers(family: Family, vision: Any) -> int:
    """One at the end, and one for each text layer that is given features of its own (deepstack)."""
    deepstack = family.model_type in ("qwen3_vl", "qwen3_vl_moe")
    return 1 + (len(vision.deepstack_visual_indexes) if deepstack else 0)


def _vision_pairs(family: Family, config: Any, grids: Sequence[Grid]) -> int:
    """Pairs of patches that attend to each other, of all blocks: within frames, or within windows of them."""
    vision = family.vision_config(config)
    frames, *windows = (sum(n * n for n in found.lengths) for found in family.vision_segments(grids, config))
    if not windows:
        return vision.depth * frames
    whole = len(vision.fullatt_block_indexes)
    return whole * frames + (vision.depth - whole) * windows[0]


def _linear(multiplications: int) -> int:
    return 2 * (1 + BACKWARD_OF_LINEAR) * multiplications


def _attention(pairs_times_width: int) -> int:
    """Two matrix products forward: scores and weighted sums."""
    return round(2 * 2 * (1 + BACKWARD_OF_ATTENTION) * pairs_times_width)
