"""Pairs are read off the arguments of kernels, and syncs are counted by the code that needs them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from host_syncs import recorded_syncs
from torch import nn

from vlmpack.attention.backends import BACKENDS
from vlmpack.layout import PaddedBatch, Segments, pack
from vlmpack.model import enable_packing
from vlmpack.probing.work import counted_pairs, package_syncs
from vlmpack.testing import tiny_model
from vlmpack.testing.comparison import backward

CPU = torch.device("cpu")


class Attention(nn.Module):
    """A layer around an attention function."""

    def __init__(self, attend) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend(x)


def pairs_of(attend, x: torch.Tensor):
    layer = Attention(attend)
    with counted_pairs([layer]) as pairs:
        layer(x)
    return pairs


def test_pytorchs_own_attention_is_counted_by_its_widths() -> None:
    pairs = pairs_of(lambda x: F.scaled_dot_product_attention(x, x[:, :, :3], x[:, :, :3]), torch.randn(2, 4, 5, 8))
    assert (pairs.computed, pairs.calls, pairs.dense) == (2 * 5 * 3, 1, 0)


def test_a_written_out_score_matrix_is_dense() -> None:
    pairs = pairs_of(lambda x: (x @ x.transpose(-1, -2)).softmax(-1) @ x, torch.randn(2, 4, 5, 8))
    assert (pairs.computed, pairs.dense) == (2 * 5 * 5, 2 * 5 * 5)


@pytest.mark.parametrize(("backend", "computed"), [("sdpa_segments", 3 * 3 + 5 * 5), ("eager_mask", 8 * 8)])
def test_back_ends_compute_what_they_say(backend: str, computed: int) -> None:
    segments = Segments.from_lengths([3, 5])

    def attend(x: torch.Tensor) -> torch.Tensor:
        return BACKENDS[backend](x, x, x, segments, causal=True, scale=1.0)

    pairs = pairs_of(attend, torch.randn(8, 2, 8))
    assert pairs.per_layer == computed
    assert bool(pairs.dense) == (backend == "eager_mask")


def test_what_runs_outside_the_layers_is_not_counted() -> None:
    layer = Attention(lambda x: x)
    with counted_pairs([layer]) as pairs:
        x = torch.randn(1, 1, 4, 8)
        F.scaled_dot_product_attention(x, x, x)
        layer(x)
    assert (pairs.computed, pairs.calls, pairs.per_layer) == (0, 1, None)


def test_a_sync_of_the_package_is_listed_with_its_file() -> None:
    """Without host metadata lengths have to be read from the mask, which is what the metadata are for."""
    model = enable_packing(tiny_model("qwen3"))
    batch = PaddedBatch(input_ids=torch.full((2, 4), 9), attention_mask=torch.ones(2, 4), labels=torch.full((2, 4), 9))
    with recorded_syncs(CPU) as syncs:
        model(**pack(batch).to_hf())
    files = package_syncs([sync.line for sync in syncs])
    assert any(file.startswith("model/") for file in files), syncs


def test_a_sync_of_a_backward_pass_is_not_the_packages_because_it_called_backward() -> None:
    x = torch.ones(3, requires_grad=True)
    picked = x[torch.ones(3) > 0].sum()
    with recorded_syncs(CPU) as syncs:
        backward(picked)
    assert package_syncs([sync.line for sync in syncs]) == []
    assert len(syncs) == 1
