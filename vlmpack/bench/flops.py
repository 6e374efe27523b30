"""Floating-point operations: counted as they run, and by formula. A multiply-add is two.

PyTorch's `FlopCounterMode` is the referee. It knows matrix products, convolutions and the fused attention of CUDA,
but not the fused attention of a CPU, so the same two formulas are given to it for that one too. Like its own they
count every pair of query and key, whether causal or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, final

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from vlmpack.layout import Grid

BACKWARD_OF_LINEAR = 2
"""Backward over forward of a matrix product: one product for the input's gradient, one for the weight's."""
BACKWARD_OF_ATTENTION = 2.5
"""Backward over forward of fused attention: five matrix products, one of them the scores once more, against two."""


def count_flops(function: Callable[[], object]) -> int:
    """FLOPs of all that `function` runs, forward and backward."""
    aten = torch.ops.aten
    on_cpu = {
        aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
    }
    with FlopCounterMode(display=False, custom_mapping=on_cpu) as counter:
        function()
    return counter.get_total_flops()


def _cpu_attention(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _cpu_attention_backward(
    gradient: Sequence[int], query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    return sdpa_backward_flop_count(gradient, query, key, value)


@final
@dataclass(frozen=True, kw_only=True)
class StepFlops:
    """FLOPs of the forward and backward pass of one training step, by part."""

    text_linear: int
    """Projections and MLPs of the text model."""
    text_attention: int
    """Scores and weighted sums of the text model."""
    head: int
    """The language-model head."""
    vision: int
    """Patch embedding, vision blocks and mergers."""

    @property
    def total(self) -> int:
        """All parts."""
        return self.text_linear + self.text_attention + self.head + self.vision


def step_flops(
    config: Any, lengths: Sequence[int], grids: Sequence[Grid] = (), *, head_tokens: int | None = None, causal=False
) -> StepFlops:
    """FLOPs of a Qwen3-VL training step on samples that are not padded, by formula.

    Nothing is computed twice (no recomputed activations), and pixels need no gradient.

    Args:
        config: of the whole model.
        lengths: tokens of each sample; B rows of width S are B times S.
        grids: (frames, rows, columns) in patches of each image or video.
        head_tokens: tokens that get logits; None: all of them.
        causal: count the pairs that causal attention needs, n (n + 1) / 2, instead of all n * n.
    """
    text, tokens = config.text_config, sum(lengths)
    width, queries = text.hidden_size, text.num_attention_heads * text.head_dim
    keys = text.num_key_value_heads * text.head_dim
    layer = 2 * width * queries + 2 * width * keys + 3 * width * text.intermediate_size
    pairs = sum(n * (n + 1) // 2 if causal else n * n for n in lengths)
    return StepFlops(
        text_linear=_linear(tokens * text.num_hidden_layers * layer),
        text_attention=_attention(text.num_hidden_layers * queries * pairs),
        head=_linear((tokens if head_tokens is None else head_tokens) * width * text.vocab_size),
        vision=_vision_flops(config.vision_config, grids),
    )


def _vision_flops(vision: Any, grids: Sequence[Grid]) -> int:
    width, wide = vision.hidden_size, vision.hidden_size * vision.spatial_merge_size**2
    patches, tokens = sum(map(prod, grids)), sum(map(prod, grids)) // vision.spatial_merge_size**2
    pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    blocks = vision.depth * patches * (4 * width**2 + 2 * width * vision.intermediate_size)
    mergers = (1 + len(vision.deepstack_visual_indexes)) * tokens * (wide**2 + wide * vision.out_hidden_size)
    pairs = sum(t * (h * w) ** 2 for t, h, w in grids)
    embedding = 2 * 2 * patches * pixels * width  # forward and the weight's gradient
    return embedding + _linear(blocks + mergers) + _attention(vision.depth * width * pairs)


def _linear(multiplications: int) -> int:
    return 2 * (1 + BACKWARD_OF_LINEAR) * multiplications


def _attention(pairs_times_width: int) -> int:
    """Two matrix products forward: scores and weighted sums."""
    return round(2 * 2 * (1 + BACKWARD_OF_ATTENTION) * pairs_times_width)
