"""Attention of a shared row by heads and by keys, all ranks in one process; `Parallel`; gradients sent together."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlmpack.attention.backends import SdpaSegments
from vlmpack.context_parallel import Parallel, Partition
from vlmpack.context_parallel.attention import GatheredKV, kv_heads
from vlmpack.errors import ConfigError
from vlmpack.layout import Segments, SlotRule, pack
from vlmpack.model import PackedStep, disable_packing, enable_packing
from vlmpack.testing import mixed_samples, padded, tiny_model

HEADS, KV_HEADS, DIM = 3, 1, 5


# ---------------------------------------------------------------------- by heads


@pytest.mark.parametrize(
    ("heads", "kv", "ranks", "expected"),
    [
        (8, 4, 2, [0, 1, 2, 3]),
        (8, 4, 4, [0, 1, 2, 3]),
        (8, 2, 4, [0, 0, 1, 1]),  # more ranks than key-value heads: each goes to two
        (8, 4, 8, [0, 0, 1, 1, 2, 2, 3, 3]),
        (12, 4, 3, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]),  # 0 0 0 1 cannot be shared out evenly: one a query
    ],
)
def test_every_query_head_finds_its_key_value_head(heads, kv, ranks, expected):
    sent = kv_heads(heads, kv, ranks)
    assert sent == expected
    n, m = heads // ranks, len(sent) // ranks
    for head in range(heads):
        rank, place = divmod(head, n)
        assert sent[rank * m + place // (n // m)] == head // (heads // kv)


# ---------------------------------------------------------------------- by keys


@given(
    lengths=st.lists(st.integers(0, 13), min_size=1, max_size=5).filter(sum),
    ranks=st.integers(1, 5),
)
def test_parts_by_keys_make_up_the_whole_row(lengths, ranks):
    segments = Segments.from_lengths(lengths, SlotRule(row_multiple=ranks)).without_gaps()
    partition = Partition(segments=segments, ranks=ranks, layout="contiguous")
    whole, parts = random_qkv(segments.total), random_qkv(segments.total)

    def attend(*qkv: Any, **keys: Segments) -> torch.Tensor:
        return SdpaSegments()(*qkv, causal=True, scale=0.3, **keys)

    def all_keys(own_kv: torch.Tensor, what: str) -> torch.Tensor:
        return torch.cat([x.flatten(1) for x in parts[1:]], 1)

    out = []
    for rank in range(ranks):
        everyone: Any = SimpleNamespace(rank=rank, size=ranks, all_gather=all_keys)
        own = [partition.cut(x, rank, token_dim=0) for x in parts]
        out.append(GatheredKV(partition, everyone).attend(attend, *own))
    truth = attend(*whole, segments)
    torch.testing.assert_close(torch.cat(out), truth, rtol=0, atol=1e-12)
    torch.cat(out).sin().sum().backward()
    truth.sin().sum().backward()
    for own, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(own.grad, expected.grad, rtol=0, atol=1e-12)


def random_qkv(tokens: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    shapes = [(tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_() for shape in shapes]


# ---------------------------------------------------------------------- Parallel without processes


@pytest.mark.parametrize(
    ("names", "context", "message"),
    [
        (("data", "sequence"), 1, "has the name 'sequence'; names that say what it is for: replicate, dp_replicate,"),
        (None, 1, "has the name ''"),
        (("cp", "context"), 1, "a second context dimension, 'context'"),
        (("data", "pp"), 1, r"2 pipeline stages \(pp_size\), which cannot be trained"),
        (("data", "context"), 4, "context=4 does not fit 2 context ranks of the mesh"),
        (("fsdp", "dp_replicate"), 3, r"3 does not fit .* 4 ranks with rows of their own; sizes that fit: \[2, 4\]"),
    ],
)
def test_a_mesh_that_rows_cannot_be_shared_by_is_refused(names, context, message):
    mesh: Any = SimpleNamespace(mesh_dim_names=names, shape=(2, 2), ndim=2)
    with pytest.raises(ConfigError, match=message):
        Parallel(mesh, context=context)


def test_the_ranks_of_a_mesh_that_is_not_found_yet_are_not_known():
    with pytest.raises(ConfigError, match="call enable_packing"):
        _ = Parallel().data_ranks


def test_a_model_that_talks_to_others_is_copied_but_not_pickled():
    model = enable_packing(tiny_model(), parallel=Parallel())
    assert copy.deepcopy(model) is not model
    with pytest.raises(ConfigError, match="cannot be pickled"):
        pickle.dumps(model)


def test_disabling_gives_every_class_back():
    model = tiny_model()
    before = [type(module) for module in model.modules()]
    enable_packing(model, parallel=Parallel())
    assert [type(module) for module in model.modules()] != before
    enable_packing(model)  # by itself again: features of others are no longer expected
    assert type(model.model) is before[1]
    disable_packing(enable_packing(model, parallel=Parallel()))
    assert [type(module) for module in model.modules()] == before


def test_the_tower_is_called_once_whatever_the_row_holds():
    model = enable_packing(tiny_model(), parallel=Parallel())
    calls = []
    model.model.visual.register_forward_hook(lambda *_: calls.append(1))
    for kinds in (("text",), ("image", "images"), ("video",), ("images_and_video", "text")):
        calls.clear()
        PackedStep(model)(pack(padded(mixed_samples(model.config, kinds=kinds)))).loss.backward()
        assert calls == [1]
        assert all(p.grad is not None for p in model.parameters())
        model.zero_grad()
