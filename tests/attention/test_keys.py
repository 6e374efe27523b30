"""Queries of a part of a row against keys of all of it: what attention over the whole row gives at those queries."""

from __future__ import annotations

import pytest
import torch
from benchmarks.gpu.checks import ALLOWED
from hypothesis import given
from hypothesis import strategies as st

from vlmpack.attention import backends
from vlmpack.attention.backends import BACKENDS, AttentionCall, EagerMask, SdpaSegments
from vlmpack.layout import Segments

HEADS, KV_HEADS, DIM = 6, 3, 11
pieces = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), min_size=1, max_size=4)
"""Of each segment: keys before the first query, queries."""


def random_qkv(tokens: int, **where: object) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    shapes = [(tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_() for shape in shapes]


def last_of_each(given_pieces: list[tuple[int, int]]) -> tuple[Segments, Segments, torch.Tensor]:
    """(queries, keys, places of the queries among the keys)."""
    keys = Segments.from_lengths([before + queries for before, queries in given_pieces])
    places = [
        torch.arange(stop - queries, stop) for (_, stop), (_, queries) in zip(keys.spans, given_pieces, strict=True)
    ]
    return Segments.from_lengths([queries for _, queries in given_pieces]), keys, torch.cat(places)


@pytest.mark.parametrize("attend", [SdpaSegments(), EagerMask()], ids=lambda backend: backend.name)
@given(given_pieces=pieces)
def test_queries_see_the_keys_before_them_and_no_later_ones(attend, given_pieces):
    queries, keys, places = last_of_each(given_pieces)
    q, k, v = random_qkv(keys.total)
    out = attend(q[places], k, v, queries, causal=True, scale=0.3, keys=keys)
    out.sin().sum().backward()
    gradients = [x.grad for x in (q, k, v)]

    q, k, v = random_qkv(keys.total)
    truth = EagerMask()(q, k, v, keys, causal=True, scale=0.3)[places]
    truth.sin().sum().backward()
    torch.testing.assert_close(out, truth, rtol=0, atol=1e-12)
    for own, expected in zip(gradients, (q.grad, k.grad, v.grad), strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-12)


def test_queries_of_many_segments_go_by_their_own_lengths_and_those_of_their_keys(monkeypatch):
    queries, keys, places = last_of_each([(0, 3), (2, 3), (1, 1), (2, 3), (0, 3), (4, 1)])
    found = []
    for many in (1, 10):
        monkeypatch.setattr(backends, "MANY", many)
        q, k, v = random_qkv(keys.total)
        out = SdpaSegments()(q[places], k, v, queries, causal=True, scale=0.3, keys=keys)
        out.sin().sum().backward()
        found.append([out, q.grad, k.grad, v.grad])
    assert all(map(torch.equal, *found))


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "eager_mask"])
def test_gpu_kernels_put_the_last_query_at_the_last_key(name):
    queries, keys, places = last_of_each([(0, 100), (300, 37), (513, 1), (64, 128)])
    rng = torch.Generator("cuda").manual_seed(0)
    shapes = [(keys.total, heads, 128) for heads in (16, 4, 4)]
    low = [torch.randn(s, generator=rng, device="cuda", dtype=torch.bfloat16) for s in shapes]
    if reasons := BACKENDS[name].unsupported(AttentionCall.of(low[0], low[1])):
        pytest.skip(f"waits for {name}: {'; '.join(reasons)}")
    results = []
    for attend, dtype in (
        (BACKENDS[name], torch.bfloat16),
        (EagerMask(), torch.bfloat16),
        (EagerMask(), torch.float32),
    ):
        q, k, v = (x.detach().to(dtype, copy=True).requires_grad_() for x in low)
        out = attend(q[places.to("cuda")], k, v, queries, causal=True, scale=128**-0.5, keys=keys)
        out.float().sin().sum().backward()
        results.append([out, q.grad, k.grad, v.grad])
    for times, ours, plain_low, truth in zip(ALLOWED, *results, strict=True):
        assert (ours.float() - truth).abs().max() <= times * (plain_low.float() - truth).abs().max() + 1e-5
