"""FLOPs that are counted, where they can be counted by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.flops import count_flops, matrix_product


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


def test_grouped_products_cost_what_their_groups_cost_one_by_one():
    counts, D, F_ = (3, 0, 5), 16, 24  # rows of whole 16 bytes, as the kernel wants them
    x, w = torch.randn(sum(counts), D, requires_grad=True), torch.randn(len(counts), D, F_, requires_grad=True)
    ends = torch.tensor(counts).cumsum(0).int()

    def one_by_one() -> torch.Tensor:
        return torch.cat([rows @ weight for rows, weight in zip(x.split(counts), w, strict=True)])

    for loss in (torch.detach, lambda out: out.square().sum().backward()):
        grouped = count_flops(lambda loss=loss: loss(F.grouped_mm(x, w, offs=ends)))
        assert grouped == count_flops(lambda loss=loss: loss(one_by_one())) > 0


def test_a_triangular_solve_is_half_a_product_and_its_backward_pass_a_solve_and_a_product():
    B, C, K = 2, 7, 5
    system, sides = torch.eye(C).repeat(B, 1, 1).requires_grad_(), torch.randn(B, C, K, requires_grad=True)
    product = 2 * B * C * C * K

    def solve() -> torch.Tensor:
        return torch.linalg.solve_triangular(system, sides, upper=False)

    assert count_flops(solve) * 2 == product
    assert count_flops(lambda: solve().sum().backward()) == product // 2 + (product // 2 + product)


def test_the_product_beside_a_step_is_as_large_as_its_widest():
    product, flops = matrix_product(nn.Linear(5, 3), tokens=6, hidden=4)
    assert count_flops(product) == flops == 2 * 6 * 4 * 12
