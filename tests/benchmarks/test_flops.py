"""FLOPs, counted and by formula: exact where they can be counted by hand; and the roofline."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiers import tiers
from torch import nn

from benchmarks.flops import CHUNK, COPY, PRODUCT, Ceilings, count_flops, step_flops
from benchmarks.receipts import (
    BY_FORMULA,
    ReceiptShapes,
    alone,
    hf_inputs,
    receipt_batch,
    receipt_config,
    receipt_model,
)
from benchmarks.timing import Timings, alternate
from vlmpack.families import family_named


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


@pytest.mark.parametrize("groups", [1, 6])
@pytest.mark.parametrize("values_need_it", [False, True])
def test_each_gradient_of_a_convolution_costs_what_the_forward_pass_does(groups, values_need_it):
    B, S, C, taps = 2, 11, 6, 4
    layer, x = nn.Conv1d(C, C, taps, groups=groups), torch.randn(B, C, S, requires_grad=values_need_it)
    forward = 2 * B * (S - taps + 1) * C * C // groups * taps
    assert count_flops(lambda: layer(x)) == forward
    assert count_flops(lambda: layer(x).sum().backward()) == forward * (3 if values_need_it else 2)


def test_a_transposed_convolution_too():
    B, S, C, taps = 2, 11, 6, 4
    layer, x = nn.ConvTranspose1d(C, C, taps, groups=3), torch.randn(B, C, S, requires_grad=True)
    forward = 2 * B * S * C * C // 3 * taps
    assert count_flops(lambda: layer(x).sum().backward()) - count_flops(lambda: layer(x)) == 2 * forward


TINY = ReceiptShapes(
    hidden=64,
    layers=4,
    kv_heads=2,
    experts=8,
    experts_per_token=2,
    vision_hidden=32,
    vision_depth=3,
    vocab_size=131,
    samples=3,
    longest=80,  # of gated delta layers' chunks: two, one and one
)
CLOSE = 1e-3


@pytest.mark.parametrize("name", BY_FORMULA)
def test_a_padded_batch(name):
    family, model, batch = parts(name)
    counted = count_flops(lambda: model(**hf_inputs(batch)).loss.backward())
    formula = step_flops(family, model.config, [TINY.longest] * TINY.samples, batch.metadata.image_grids)
    assert formula.total == pytest.approx(counted, rel=CLOSE)


@pytest.mark.parametrize("name", tiers(BY_FORMULA, short=["qwen2_5_vl", "qwen3_vl_moe", "qwen3_5", "qwen3"]))
def test_each_sample_alone(name):
    family, model, batch = parts(name)
    grids = [[grid] for grid in batch.metadata.image_grids] or [[]] * TINY.samples
    counts = {}
    for inputs, length, grid in zip(alone(batch), TINY.lengths, grids, strict=True):
        counts[length] = count_flops(lambda inputs=inputs: model(**inputs).loss.backward())
        formula = step_flops(family, model.config, [length], grid)
        assert formula.total == pytest.approx(counts[length], rel=CLOSE)
    assert len(counts) == TINY.samples


@pytest.mark.parametrize("name", BY_FORMULA)
def test_every_part_that_a_family_has_is_counted_and_no_other(name):
    family, model, batch = parts(name)
    flops = step_flops(family, model.config, TINY.lengths, batch.metadata.image_grids)
    assert (flops.vision > 0) == family.has_vision
    assert (flops.experts > 0) == family.has("experts")
    assert (flops.delta > 0) == family.has("gated_delta")
    assert min(flops.text_linear, flops.text_attention, flops.head) > 0


def test_what_is_not_computed_is_left_out():
    family = family_named("qwen3_vl")
    config = receipt_config(family, TINY)
    whole = step_flops(family, config, [10, 30])
    assert whole.vision == 0
    assert step_flops(family, config, [10, 30], head_tokens=20).head * 2 == whole.head
    assert step_flops(family, config, [10, 30], causal=True).text_attention * 1000 == whole.text_attention * (55 + 465)
    assert step_flops(family, config, [20, 20]).text_linear == whole.text_linear


def test_a_gated_delta_layer_computes_whole_chunks():
    family = family_named("qwen3_5")
    config = receipt_config(family, TINY)
    scans = [step_flops(family, config, [n]).delta for n in (1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK)]
    convolution = scans[1] - scans[0]  # grows with every token, the recurrence with every chunk
    assert 0 < convolution < scans[0] / 10
    assert scans[3] - scans[2] == convolution
    assert scans[4] - scans[3] == scans[3] - scans[1]


def parts(name: str):
    """A family, a tiny model of it, and a batch."""
    torch.manual_seed(0)
    family = family_named(name)
    model = receipt_model(family, TINY)
    return family, model, receipt_batch(family, model.config, TINY)


TOKENS, HIDDEN = 6, 4
MODEL = nn.Linear(5, 3, bias=False)  # 60 bytes


def timings(**seconds: float) -> Timings:
    found = {"step": (seconds["step"],), PRODUCT: (seconds["product"],), COPY: (seconds["copy"],)}
    return Timings(seconds={"wall": found, "cpu": found})


@pytest.fixture
def ceilings() -> Ceilings:
    return Ceilings.of(MODEL, tokens=TOKENS, hidden=HIDDEN)


def test_the_product_and_the_copy_are_of_the_model_s_size(ceilings: Ceilings) -> None:
    assert ceilings.product_flops == 2 * 6 * 4 * 12
    assert ceilings.step_bytes == 3 * 60


def test_a_step_of_many_products_is_held_to_products(ceilings: Ceilings) -> None:
    found = timings(step=24.0, product=2.0, copy=1e-9)
    assert ceilings.over_roofline(4 * ceilings.product_flops, found, "step", "wall").median == 3.0


def test_a_step_of_few_products_is_held_to_copies(ceilings: Ceilings) -> None:
    found = timings(step=6.0, product=1e-9, copy=2.0)  # a copy reads and writes: 120 bytes; the step moves 180
    assert ceilings.over_roofline(1, found, "step", "wall").median == 2.0


def test_utilisation_is_the_share_of_the_product_s_speed(ceilings: Ceilings) -> None:
    found = timings(step=8.0, product=1.0, copy=1.0)
    assert ceilings.utilisation(4 * ceilings.product_flops, found, "step", "wall").median == 0.5


def test_they_can_be_timed(ceilings: Ceilings) -> None:
    found = alternate({"step": lambda: None, **ceilings.callables}, seconds=0.0)
    assert found.of(PRODUCT, "wall").median > 0
    assert found.of(COPY, "wall").median > 0
