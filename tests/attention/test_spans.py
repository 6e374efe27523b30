"""Bidirectional spans: every sample is what it is alone, in every back-end, and no mask is as wide as a sample."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from attention.naive import HEADS, alone, assert_equal, attends, install_kernels, random_qkv
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmpack.attention import backends
from vlmpack.attention.backends import EagerMask, FlashAttn, SdpaSegments, TorchVarlen
from vlmpack.attention.patterns import LayerMask, Pattern, attended_pairs
from vlmpack.attention.spans import Spans
from vlmpack.layout import Segments

SINKS = torch.linspace(-2, 3, HEADS, dtype=torch.float64)
images = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 7)), max_size=3)
"""Of each image the tokens of text before it, and its own."""
samples = st.lists(st.tuples(images, st.integers(0, 6)), min_size=1, max_size=4).filter(
    lambda drawn: any(length(sample) for sample in drawn)
)
patterns = st.builds(
    Pattern,
    window=st.none() | st.integers(1, 9),
    softcap=st.none() | st.just(1.5),
    sinks=st.none() | st.just(SINKS),
)
serving = pytest.mark.parametrize("attend", [SdpaSegments(), EagerMask()], ids=lambda backend: backend.name)


def length(sample) -> int:
    drawn, rest = sample
    return sum(text + image for text, image in drawn) + rest


def runs_of(sample, start: int) -> list[tuple[int, int]]:
    runs = []
    for text, image in sample[0]:
        runs.append((start + text, start + text + image))
        start += text + image
    return runs


@serving
@settings(max_examples=12)
@given(drawn=samples, pattern=patterns, many=st.sampled_from([1, 256]), beyond=st.booleans())
def test_each_sample_is_what_it_is_alone(attend, drawn, pattern, many, beyond):
    segments = Segments.from_lengths([length(sample) for sample in drawn])
    within = [runs_of(sample, 0) for sample in drawn]
    runs = [runs_of(sample, start) for sample, (start, _) in zip(drawn, segments.spans, strict=True)]
    spread = Spans(runs=tuple(run for of in runs for run in of), beyond_window=beyond)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "MANY", many)
        patch.setattr(backends, "PADDED_ON", ("cpu",))
        qkv = random_qkv(segments.total)
        out = attend(*qkv, segments, causal=True, scale=0.3, pattern=replace(pattern, spans=spread))
        truth = out.new_zeros(out.shape)
        for (start, stop), of in zip(segments.spans, within, strict=True):
            truth[start:stop] = alone(*(x[start:stop] for x in qkv), pattern, runs=of, beyond=beyond)
        assert_equal(out, truth, *qkv)


@serving
@pytest.mark.parametrize("beyond", [False, True])
@pytest.mark.parametrize("window", [None, 2, 5])
def test_queries_of_a_part_see_the_spans_among_their_keys(attend, window, beyond):
    """Two nodes of a prefix tree: 4 queries after 3 keys, of which the last 3 are a span; 5 queries that are a
    sample."""
    queries, keys = Segments.from_lengths([4, 5]), Segments.from_lengths([7, 5])
    pattern = Pattern(window=window, spans=Spans(runs=((1, 4), (5, 8)), beyond_window=beyond))
    q, k, v = random_qkv(12)
    places = [*range(3, 7), *range(7, 12)]
    out = attend(q[places], k, v, queries, causal=True, scale=0.3, keys=keys, pattern=pattern)
    truth = torch.cat(
        [
            alone(q[3:7], k[:7], v[:7], pattern, runs=[(4, 7)], beyond=beyond),
            alone(q[7:], k[7:], v[7:], pattern, runs=[(1, 4)], beyond=beyond),
        ]
    )
    assert_equal(out, truth, q, k, v)


@pytest.mark.parametrize("beyond", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 20])
def test_pairs_are_counted(window, beyond):
    segments = Segments.from_lengths([9, 4])
    runs = [(0, 5)], [(0, 2)]
    spread = Spans(runs=((0, 5), (9, 11)), beyond_window=beyond)
    expected = sum(
        attends(i, j, Pattern(window=window), of, beyond=beyond)
        for n, of in zip((9, 4), runs, strict=True)
        for i in range(n)
        for j in range(n)
    )
    assert attended_pairs(segments, LayerMask(window=window)) + spread.further_pairs(window) == expected


def test_no_mask_is_wider_than_a_window_and_a_span(monkeypatch):
    masks = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def seen(*qkv, attn_mask=None, **more):
        masks.append(None if attn_mask is None else tuple(attn_mask.shape))
        return plain(*qkv, attn_mask=attn_mask, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    segments, spread = Segments.from_lengths([100, 40]), Spans(runs=((30, 42), (110, 116)))
    for window, expected in ((None, {None}), (8, {None, (8, 16), (4, 12), (12, 19), (6, 13)})):
        masks.clear()
        pattern = Pattern(window=window, spans=spread)
        SdpaSegments()(*random_qkv(140), segments, causal=True, scale=1.0, pattern=pattern)
        assert set(masks) == expected


# ---------------------------------------------------------------------- kernels


def varlen_twin(q, k, v, ends_q, ends_k, scale, window) -> torch.Tensor:
    """FlashAttention's words: query i of L sees keys i + L' - L - left to i + L' - L + right, -1 being no limit."""
    out, (left, right) = [], window
    for (a, b), (c, d) in zip(*(pairwise(ends) for ends in (ends_q, ends_k)), strict=True):
        i, j = torch.arange(b - a)[:, None] + (d - c) - (b - a), torch.arange(d - c)[None, :]
        visible = (left < 0) | (j >= i - left)
        visible = visible & ((right < 0) | (j <= i + right))
        group = q.shape[1] // k.shape[1]
        keys, values = (x[c:d].repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        scores = (q[a:b].transpose(0, 1) @ keys.mT * scale).masked_fill(~visible, float("-inf"))
        out.append((scores.softmax(-1) @ values).transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize(
    ("window", "beyond", "queries"),
    [(None, False, [12]), (1, False, [12]), (4, False, [12]), (3, True, [5, 2 + 3 + 4])],
)
def test_varlen_kernels_compute_spans_by_further_calls_that_are_not_causal(window, beyond, queries, monkeypatch):
    calls = []

    def kernel(q, k, v, ends_q, ends_k, most_q, most_k, *, window_size=(-1, -1), causal=None, **more):
        calls.append(len(q))
        scale = more.get("scale") or more["softmax_scale"]
        left, right = window_size
        assert (most_q, most_k) == (ends_q.diff().max(), ends_k.diff().max())
        return varlen_twin(q, k, v, ends_q.tolist(), ends_k.tolist(), scale, (left, 0 if causal else right))

    install_kernels(monkeypatch, kernel, kernel)
    segments = Segments.from_lengths([12, 3, 9])
    runs = ((2, 7), (12, 15), (15, 19)) if beyond else ((2, 7), (8, 11), (16, 20))
    pattern = Pattern(window=window, spans=Spans(runs=runs, beyond_window=beyond))
    qkv = random_qkv(segments.total)
    expected = EagerMask()(*qkv, segments, causal=True, scale=0.3, pattern=pattern)
    for attend in (TorchVarlen(), FlashAttn()):
        calls.clear()
        out = attend(*qkv, segments, causal=True, scale=0.3, pattern=pattern)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        assert calls == [segments.total, *queries]
