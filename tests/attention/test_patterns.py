"""Windows, softcaps, sinks and narrow values: what each segment has alone, and no pair is computed that nobody sees."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention.naive import HEADS, alone, assert_equal, install_kernels, random_qkv
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vlmpack.attention import backends
from vlmpack.attention.backends import (
    AttentionCall,
    EagerMask,
    FlashAttn,
    SdpaSegments,
    TorchVarlen,
    choose,
    explain,
)
from vlmpack.attention.patterns import LayerMask, Pattern, attended_pairs
from vlmpack.errors import BackendError
from vlmpack.layout import Segments, SlotRule

VALUE_DIM = 7
SINKS = torch.linspace(-2, 3, HEADS, dtype=torch.float64)
lengths_lists = st.lists(st.integers(0, 17), min_size=1, max_size=5).filter(sum)
scores = {"softcap": st.none() | st.just(1.5), "sinks": st.none() | st.just(SINKS)}
patterns = st.builds(Pattern, window=st.none() | st.integers(1, 15), **scores) | st.builds(
    Pattern, chunk=st.integers(1, 15), **scores
)
serving = pytest.mark.parametrize("attend", [SdpaSegments(), EagerMask()], ids=lambda backend: backend.name)


@serving
@settings(max_examples=15)
@example(lengths=[11, 2], pattern=Pattern(window=3), many=1, padded_on=())
@example(lengths=[11, 2, 9, 3], pattern=Pattern(window=3, softcap=1.5), many=256, padded_on=("cpu",))
@given(
    lengths=lengths_lists,
    pattern=patterns,
    many=st.sampled_from([1, 256]),
    padded_on=st.sampled_from([(), ("cpu",)]),
)
def test_each_segment_is_what_it_is_alone(attend, lengths, pattern, many, padded_on):
    if pattern.sinks is not None:
        pattern = replace(pattern, sinks=pattern.sinks.clone().requires_grad_())
    learnt = [] if pattern.sinks is None else [pattern.sinks]
    segments = Segments.from_lengths(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "MANY", many)
        patch.setattr(backends, "PADDED_ON", padded_on)
        qkv = random_qkv(segments.total, value_dim=VALUE_DIM)
        out = attend(*qkv, segments, causal=True, scale=0.3, pattern=pattern)
        truth = out.new_zeros(out.shape)
        for start, stop in segments.spans:
            truth[start:stop] = alone(*(x[start:stop] for x in qkv), pattern)
        assert_equal(out, truth, *qkv, *learnt)


@serving
@settings(max_examples=50)
@given(
    pieces=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=4),
    pattern=patterns,
    many=st.sampled_from([1, 256]),
)
def test_queries_of_a_part_see_the_keys_that_their_places_allow(attend, pieces, pattern, many):
    keys = Segments.from_lengths([before + queries for before, queries in pieces])
    queries = Segments.from_lengths([queries for _, queries in pieces])
    places = [range(stop - n, stop) for (_, stop), (_, n) in zip(keys.spans, pieces, strict=True)]
    q, k, v = random_qkv(keys.total, value_dim=VALUE_DIM)
    asked = q[[at for of in places for at in of]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "MANY", many)
        patch.setattr(backends, "PADDED_ON", ("cpu",))
        out = attend(asked, k, v, queries, causal=True, scale=0.3, keys=keys, pattern=pattern)
    truth = [
        alone(q[of.start : of.stop], k[start:stop], v[start:stop], pattern)
        for (start, stop), of in zip(keys.spans, places, strict=True)
    ]
    assert_equal(out, torch.cat(truth), q, k, v)


@pytest.mark.parametrize("size", [1, 3, 4, 5, 23, 30])
def test_pairs_of_windows_and_chunks_are_counted(size):
    segments, places = Segments.from_lengths([23, 4, 1]), [at for n in (23, 4, 1) for at in range(n)]
    for mask in (LayerMask(window=size), LayerMask(chunk=size)):
        assert attended_pairs(segments, mask) == sum(at + 1 - mask.first_key(at) for at in places)
    assert attended_pairs(segments, LayerMask(window=size)) == sum(min(at + 1, size) for at in places)
    assert attended_pairs(segments, LayerMask(chunk=size)) == sum(at % size + 1 for at in places)
    assert attended_pairs(segments) == segments.attended_pairs == 23 * 24 // 2 + 11


def test_chunks_are_segments_of_one_call(monkeypatch):
    """Of a row in which no sample is longer than a chunk the very same ones, so that nothing is derived again."""
    segments, short = Segments.from_lengths([9, 2]), Segments.from_lengths([4, 3])
    assert segments.in_chunks(4) is segments.in_chunks(4)
    assert short.in_chunks(4) is short
    cut = segments.in_chunks(4)
    assert (cut.lengths, cut.slots, cut.total) == ((4, 4, 1, 2), (4, 4, 1, 2), 11)
    with_tail = Segments.from_lengths([9, 2], SlotRule(pad_to=20)).without_gaps().in_chunks(4)
    assert (with_tail.lengths, with_tail.num_samples) == ((4, 4, 1, 2, 4, 4, 1), 4)
    calls = []
    plain = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *a, **b: calls.append(b["attn_mask"]) or plain(*a, **b),
    )
    SdpaSegments()(*random_qkv(11), segments, causal=True, scale=1.0, pattern=Pattern(chunk=4))
    assert calls == [None] * 3  # the two of four tokens in one


def test_no_mask_is_as_wide_as_a_sample_that_is_longer_than_its_window(monkeypatch):
    sizes = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def seen(q, k, v, **settings):
        sizes.append((len(q), q.shape[2], k.shape[2]))
        return plain(q, k, v, **settings)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    SdpaSegments()(*random_qkv(100), Segments.from_lengths([100]), causal=True, scale=1.0, pattern=Pattern(window=8))
    assert sizes == [(1, 8, 8), (11, 8, 16), (1, 4, 12)]


# ---------------------------------------------------------------------- back-ends that cannot serve


CALL = AttentionCall(device="cuda", dtype=torch.bfloat16, head_dim=64, num_heads=4, num_kv_heads=2)


@pytest.mark.parametrize(
    ("pattern", "refused_by"),
    [
        (("window",), ["efficient"]),
        (("chunk", "spans"), []),
        (("softcap",), ["torch_varlen", "efficient"]),
        (("sinks",), ["flash_attn", "efficient"]),
    ],
)
def test_what_a_kernel_does_not_compute_is_refused_by_name(pattern, refused_by):
    reasons = explain(replace(CALL, pattern=pattern))
    named = {name: [text for text in texts if "computes no" in text] for name, texts in reasons.items()}
    assert [name for name, texts in named.items() if texts] == refused_by
    assert all(set(pattern) & set(text.replace(",", "").split()) for texts in named.values() for text in texts)
    assert choose(replace(CALL, device="cpu", pattern=pattern)).name == "sdpa_segments"
    for name in refused_by:
        with pytest.raises(BackendError, match="computes no"):
            choose(replace(CALL, pattern=pattern), name)


def test_values_wider_than_keys_are_refused_by_kernels():
    wide = replace(CALL, value_dim=128)
    assert any("values are 128 wide" in text for text in TorchVarlen().unsupported(wide))
    assert not any("wide" in text for text in TorchVarlen().unsupported(replace(CALL, value_dim=32)))


@pytest.mark.parametrize("window", [None, 1, 4])
def test_kernels_are_given_the_window_and_values_as_wide_as_keys(window, monkeypatch):
    calls = []

    def kernel(q, k, v, *seqlens, window_size=None, softcap=None, **settings):
        calls.append((window_size, softcap))
        assert q.shape[2] == k.shape[2] == v.shape[2]
        scale = settings.get("scale") or settings["softmax_scale"]
        return EagerMask()(q, k, v, segments, causal=True, scale=scale)

    install_kernels(monkeypatch, kernel, kernel)
    segments, qkv = Segments.from_lengths([3, 5]), random_qkv(8, value_dim=VALUE_DIM)
    call = {"causal": True, "scale": 0.3, "pattern": Pattern(window=window)}
    outputs = [TorchVarlen()(*qkv, segments, **call), FlashAttn()(*qkv, segments, **call)]
    FlashAttn()(*qkv, segments, causal=True, scale=0.3, pattern=Pattern(window=window, softcap=2.0))
    left = -1 if window is None else window - 1
    of_flash = None if window is None else (left, 0)  # its own argument for causal attention says the rest
    assert calls == [((left, 0), None), (of_flash, None), (of_flash, 2.0)]
    for out in outputs:
        assert out.shape == (8, HEADS, VALUE_DIM)
        torch.testing.assert_close(out, EagerMask()(*qkv, segments, causal=True, scale=0.3), rtol=0, atol=1e-12)


def test_a_rank_with_some_of_the_heads_has_their_sinks():
    assert Pattern(sinks=SINKS, window=3).of_heads(2, 2).sinks.tolist() == SINKS[2:4].tolist()
    assert Pattern(sinks=SINKS, window=3).of_heads(2, 2).window == 3
    assert Pattern(sinks=SINKS).of_heads(0, HEADS).sinks is SINKS
