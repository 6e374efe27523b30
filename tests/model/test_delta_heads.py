"""A gated delta layer cut by heads computes what the whole layer computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parts import gated_delta_layers

from vlmpack.model.mechanisms.gated_delta import DeltaHeads
from vlmpack.testing import tiny_model


def delta_layer(family: str) -> Any:
    model = tiny_model(family, kv_heads=2, heads=4)
    return gated_delta_layers(model)[0]


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp"])
def test_the_parts_of_all_heads_make_up_the_layer(family: str) -> None:
    layer = delta_layer(family)
    forward: Any = type(layer).forward
    hidden_1TD = torch.randn(1, 19, layer.hidden_size, generator=torch.Generator().manual_seed(1))
    truth = layer(hidden_1TD)
    truth.sin().sum().backward()
    gradients = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()

    heads = DeltaHeads(layer, 2)
    assert heads.is_possible
    projected = heads.project(hidden_1TD[0])
    parts = [torch.cat([block[:, rank] for block in projected], -1)[None] for rank in range(2)]
    computed = torch.cat([forward(heads.stand_in(rank), part) for rank, part in enumerate(parts)], -1)
    out = layer.out_proj(computed)
    torch.testing.assert_close(out, truth, rtol=0, atol=1e-5)
    out.sin().sum().backward()
    assert gradients
    for name, p in layer.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], rtol=1e-4, atol=1e-5)


def test_a_stand_in_leaves_the_layer_as_it_is() -> None:
    layer = delta_layer("qwen3_5")
    before = {name: value for name, value in vars(layer).items() if name not in ("_parameters", "_modules")}
    modules = dict(layer._modules)
    DeltaHeads(layer, 2).stand_in(1)
    assert {name: vars(layer)[name] for name in before} == before
    assert dict(layer._modules) == modules


def test_heads_that_ranks_cannot_share_out_are_not_cut() -> None:
    assert not DeltaHeads(delta_layer("qwen3_5"), 4).is_possible


def test_a_layer_with_projections_that_are_not_known_is_not_cut() -> None:
    layer = delta_layer("qwen3_5")
    layer.in_proj_gate = torch.nn.Linear(1, 1)
    assert not DeltaHeads(layer, 2).is_possible
