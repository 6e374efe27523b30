"""FLOPs: exact on a model that can be counted by hand, and the formula agrees with what is counted."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vlmpack.bench.flops import count_flops, step_flops
from vlmpack.bench.workload import ReceiptShapes, alone, hf_inputs, receipt_batch, receipt_model

TINY = ReceiptShapes(
    hidden=64, layers=3, kv_heads=2, vision_hidden=32, vision_depth=2, vocab_size=131, samples=3, longest=40
)


class OneLayer(nn.Module):
    """A projection and attention of N heads of H channels."""

    def __init__(self, channels: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.sizes = (heads, kv_heads, kv_heads)
        self.head_dim = head_dim
        self.project = nn.Linear(channels, sum(self.sizes) * head_dim, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2).split(self.sizes, dim=1)
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)


@pytest.mark.parametrize("masked", [False, True])
def test_a_projection_and_attention_counted_by_hand(masked):
    B, S, D, N, K, H = 2, 11, 13, 6, 3, 8
    layer, x = OneLayer(D, N, K, H), torch.randn(B, S, D, requires_grad=True)
    mask = torch.ones(B, 1, S, S, dtype=torch.bool) if masked else None
    projection = 2 * B * S * D * (N + 2 * K) * H
    product = 2 * B * N * S * S * H
    assert count_flops(lambda: layer(x, mask)) == projection + 2 * product
    assert count_flops(lambda: layer(x, mask).sum().backward()) == 3 * projection + 7 * product


def test_the_formula_is_what_is_counted_on_a_padded_qwen3_vl():
    model = receipt_model(TINY)
    batch = receipt_batch(model.config, TINY)
    assert batch.facts is not None
    counted = count_flops(lambda: model(**hf_inputs(batch)).loss.backward())
    formula = step_flops(model.config, [TINY.longest] * TINY.samples, batch.facts.image_grids)
    assert formula.total == pytest.approx(counted, rel=0.01)


def test_the_formula_is_what_is_counted_on_each_sample_alone():
    model = receipt_model(TINY)
    batch = receipt_batch(model.config, TINY)
    assert batch.facts is not None
    facts = zip(alone(batch), TINY.lengths, batch.facts.image_grids, strict=True)
    for inputs, length, grid in facts:
        counted = count_flops(lambda inputs=inputs: model(**inputs).loss.backward())
        assert step_flops(model.config, [length], [grid]).total == pytest.approx(counted, rel=0.01)


def test_the_formula_leaves_out_what_is_not_computed():
    config = receipt_model(TINY).config
    whole = step_flops(config, [10, 30])
    assert whole.vision == 0
    assert step_flops(config, [10, 30], head_tokens=20).head * 2 == whole.head
    assert step_flops(config, [10, 30], causal=True).text_attention * 1000 == whole.text_attention * (55 + 465)
    assert step_flops(config, [20, 20]).text_linear == whole.text_linear
