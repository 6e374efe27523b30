"""FLOPs of a step, counted and by formula, and the roofline: the least time in which this machine could do them.

A multiply-add is two FLOPs; element-wise operations count as none. PyTorch's `FlopCounterMode` is the reference. It is
completed where it miscounts:

- the fused attention of a CPU, by the two formulas that it has for that of CUDA: like its own they count every pair of
  query and key, whether causal or not;
- grouped products (experts) and triangular solves (gated delta layers), which it passes over;
- the backward pass of a grouped convolution (gated delta layers), which it counts as one of all channels with all.

`step_flops` gives the same numbers by formula, for the families in `BY_FORMULA`: T tokens, D width, N heads of H, K
key-value heads, C tokens of a chunk of a gated delta layer.

    roofline = max(FLOPs / FLOPs a second of a matrix product, bytes / bytes a second of a copy)

Both are timed at the model's own sizes, in the rounds of the step itself, so that a slow minute lowers them too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, final

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from benchmarks.timing import Clock, Spread, Timings
from vlmpack.families import Family
from vlmpack.layout import Grid

Shape = Sequence[int]


def count_flops(function: Callable[[], object]) -> int:
    """FLOPs of all that `function` runs, forward and backward."""
    aten = torch.ops.aten
    missing = {
        aten._scaled_dot_product_flash_attention_for_cpu: _count_attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _count_attention_backward,
        aten._grouped_mm: _grouped_product,
        aten.linalg_solve_triangular: _triangular_solve,
        aten.convolution_backward: _convolution_backward,
    }
    with FlopCounterMode(display=False, custom_mapping=missing) as counter:
        function()
    return counter.get_total_flops()


def _count_attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, _of_all_heads(key, query), _of_all_heads(value, query))


def _count_attention_backward(gradient: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(gradient, query, _of_all_heads(key, query), _of_all_heads(value, query))


def _of_all_heads(shape: Shape, query: Shape) -> Shape:
    """The shape [B, N, S, H] of keys or values, once a query head: torch 2.11 counts no heads that share them."""
    return (shape[0], query[1], *shape[2:])


def _grouped_product(left: Shape, right: Shape, *_: Any, **__: Any) -> int:
    """Rows, columns or summands of a two-dimensional factor belong to one group each; three-dimensional ones are a
    group a matrix."""
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2 * groups * left[-2] * left[-1] * right[-1]


def _triangular_solve(system: Shape, right_sides: Shape, *_: Any, left: bool = True, **__: Any) -> int:
    """Half of what a product with the whole square would cost."""
    return prod(right_sides) * system[-1]


def _convolution_backward(
    gradient: Shape, values: Shape, weight: Shape, *rest: Any, out_shape: Sequence[Shape | None], **__: Any
) -> int:
    """Each of the gradients of values and weight costs what the forward pass does. `weight` is [out, in / groups, ...].

    The last argument lists which of the gradients of values, weight and bias are computed.
    """
    transposed, wanted = rest[4], rest[-1]
    places = values if transposed else gradient
    return 2 * places[0] * prod(places[2:]) * prod(weight) * sum(wanted[:2])


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
    """Weights that mix residual streams of Qwen4-exp, around both halves of every layer and at the end."""
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
    blocks = sum(length // text.indexer_compress_ratio for length in range(1, tokens + 1))
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
    vision = config.vision_config
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
    vision = config.vision_config
    frames, *windows = (sum(n * n for n in segments.lengths) for segments in family.vision_segments(grids, config))
    if not windows:
        return vision.depth * frames
    whole = len(vision.fullatt_block_indexes)
    return whole * frames + (vision.depth - whole) * windows[0]


def _linear(multiplications: int) -> int:
    return 2 * (1 + BACKWARD_OF_LINEAR) * multiplications


def _attention(pairs_times_width: int) -> int:
    """Two matrix products forward: scores and weighted sums."""
    return round(2 * 2 * (1 + BACKWARD_OF_ATTENTION) * pairs_times_width)


PRODUCT, COPY = "matrix product", "copy"
"""The names of the two callables."""
WIDENING = 3
"""Columns of the product over its inner size: the widest product of these models, of an MLP."""
WEIGHT_PASSES = 3
"""Times that a step passes over all weights: forward, backward to the input, and the gradients it writes."""

MOST_COPIED = 2**29
"""Bytes: more than any cache, and little beside the model."""


@final
@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """One matrix product and one copy to be timed in turn with a step, and what follows from their times."""

    left: torch.Tensor
    """[T, D]: the tokens of a step, as wide as the model."""
    right: torch.Tensor
    """[D, 3 D]."""
    source: torch.Tensor
    """[n]: as many bytes as the model's weights, at most `MOST_COPIED`."""
    target: torch.Tensor
    """[n]: the target of the copy."""
    weight_bytes: int
    """Of the model's weights."""

    @classmethod
    def of(cls, model: Any, *, tokens: int, hidden: int) -> Ceilings:
        """The ceilings of a step of this model on so many tokens, on its device and in its type."""
        weight = next(model.parameters())
        size = sum(parameter.numel() for parameter in model.parameters())
        copied = min(size, MOST_COPIED // weight.element_size())
        source = torch.zeros(copied, dtype=weight.dtype, device=weight.device)
        return cls(
            left=torch.randn(tokens, hidden, dtype=weight.dtype, device=weight.device),
            right=torch.randn(hidden, WIDENING * hidden, dtype=weight.dtype, device=weight.device),
            source=source,
            target=torch.empty_like(source),
            weight_bytes=size * weight.element_size(),
        )

    @property
    def callables(self) -> dict[str, Callable[[], object]]:
        """To be timed in turn with the step."""
        return {PRODUCT: lambda: self.left @ self.right, COPY: lambda: self.target.copy_(self.source)}

    @property
    def product_flops(self) -> int:
        """FLOPs of the matrix product."""
        return 2 * self.left.numel() * self.right.shape[1]

    @property
    def step_bytes(self) -> int:
        """Bytes that a step moves at the very least: its weights, and their gradients."""
        return WEIGHT_PASSES * self.weight_bytes

    def over_roofline(self, flops: int, timings: Timings, step: str, clock: Clock) -> Spread:
        """Time of a step of so many FLOPs over its time at the ceilings, each round within itself."""
        seconds = timings.seconds[clock]
        rounds = zip(seconds[step], seconds[PRODUCT], seconds[COPY], strict=True)
        return Spread.of(
            tuple(
                step_seconds
                / max(flops * product / self.product_flops, self.step_bytes * copy / (2 * self.source.nbytes))
                for step_seconds, product, copy in rounds
            )
        )

    def utilisation(self, flops: int, timings: Timings, step: str, clock: Clock) -> Spread:
        """FLOPs of the step a second over those of the matrix product: 1 is as fast as the machine multiplies."""
        seconds = timings.seconds[clock]
        rounds = zip(seconds[step], seconds[PRODUCT], strict=True)
        return Spread.of(
            tuple(flops * product / (self.product_flops * step_seconds) for step_seconds, product in rounds)
        )
