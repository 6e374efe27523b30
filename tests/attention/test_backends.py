"""Every back-end lets each segment attend to itself and to nothing else, and writes every row."""

from dataclasses import replace

import pytest
import torch
from attention.naive import DIM, HEADS, KV_HEADS, alone, assert_equal, install_kernels, poisoned_qkv, random_qkv
from cases import pairs
from hypothesis import given
from hypothesis import strategies as st
from waiting import Launches

from vlmpack.attention import backends
from vlmpack.attention.backends import BACKENDS, AttentionCall, EagerMask, FlashAttn, SdpaSegments, TorchVarlen
from vlmpack.attention.patterns import CAUSAL, Pattern
from vlmpack.attention.spans import Spans
from vlmpack.layout import Segments, SlotRule

lengths_lists = st.lists(st.integers(0, 13), min_size=1, max_size=5).filter(sum)
ON_CPU = AttentionCall(device="cpu", dtype=torch.float64, head_dim=DIM, num_heads=HEADS, num_kv_heads=KV_HEADS)
SERVING = [backend for backend in BACKENDS.values() if not backend.unsupported(ON_CPU)]
ALLOWED = (2.0, 3.0, 3.0, 3.0)
"""Error over that of dense attention in the same type: of the output, and of the three gradients."""
exact = pytest.mark.parametrize("attend", SERVING, ids=lambda b: b.name)


@exact
@given(lengths=lengths_lists, causal=st.booleans(), padded_on=st.sampled_from([(), ("cpu",)]))
def test_each_segment_is_what_it_is_alone(attend, lengths, causal, padded_on):
    segments = Segments.from_lengths(lengths)
    qkv = random_qkv(segments.total)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "PADDED_ON", padded_on)
        out = attend(*qkv, segments, causal=causal, scale=0.3)
    truth = [alone(*(x[start:stop] for x in qkv), causal=causal) for start, stop in segments.spans]
    assert_equal(out, torch.cat(truth), *qkv)


def test_a_row_of_many_samples_takes_a_call_a_length_and_not_a_call_a_sample(monkeypatch):
    calls = []
    monkeypatch.setattr(backends, "AT_ONCE", 150)
    own = torch.nn.functional.scaled_dot_product_attention
    count = lambda q, *args, **kwargs: calls.append(len(q)) or own(q, *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", count)
    segments = Segments.from_lengths([2, 5, 2, 3] * 100)
    SdpaSegments()(*random_qkv(segments.total), segments, causal=True, scale=0.3)
    assert calls == [150, 50, 100, 100]  # no more at once than a GPU has room for


@exact
def test_padding_behind_the_samples_is_not_read_by_any(attend):
    segments = Segments.from_lengths([3, 5, 0, 2], SlotRule(row_multiple=16)).without_gaps()
    assert segments.has_padding
    results = []
    for fill in (0.0, 1e4):
        qkv = poisoned_qkv(segments.padding_mask(), fill=fill)
        out = attend(*qkv, segments, causal=True, scale=0.3)[: segments.num_tokens]
        out.sin().sum().backward()
        results.append([out, *(x.grad for x in qkv)])
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned)


@exact
def test_the_isolation_test_can_fail(attend):
    lie = Segments.from_lengths([8])
    q, k, v = random_qkv(8)
    out = attend(q, k, v, lie, causal=True, scale=0.3)
    truth = alone(q[3:], k[3:], v[3:])
    assert not torch.allclose(out[3:], truth, atol=1e-3)


# ---------------------------------------------------------------------- queries of a part of a row


def last_of_each(given_pieces: list[tuple[int, int]]) -> tuple[Segments, Segments, torch.Tensor]:
    """(queries, keys, places of the queries among the keys)."""
    keys = Segments.from_lengths([before + queries for before, queries in given_pieces])
    places = [
        torch.arange(stop - queries, stop) for (_, stop), (_, queries) in zip(keys.spans, given_pieces, strict=True)
    ]
    return Segments.from_lengths([queries for _, queries in given_pieces]), keys, torch.cat(places)


# ---------------------------------------------------------------------- kernels that only a GPU can run


def by_boundaries(q, k, v, cu_seqlens, *, causal, scale):
    """What a varlen kernel is documented to compute, from the boundaries it is given; the rest stays unwritten."""
    out = torch.full_like(q, float("nan"))
    for start, stop in zip(cu_seqlens.tolist()[:-1], cu_seqlens.tolist()[1:], strict=True):
        piece = Segments.from_lengths([stop - start])
        if stop > start:
            out[start:stop] = EagerMask()(
                q[start:stop], k[start:stop], v[start:stop], piece, causal=causal, scale=scale
            )
    return out


@pytest.fixture
def kernels(monkeypatch):
    """Stand-ins with the documented signatures of both kernels, and a record of how they were called."""
    calls = []

    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        calls.append((cu_q, max_q, enable_gqa))
        assert cu_q is cu_k
        return by_boundaries(q, k, v, cu_q, causal=window_size == (-1, 0), scale=scale)

    def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, dropout_p=0.0, softmax_scale=None, causal=False):
        calls.append((cu_q, max_q, True))
        return by_boundaries(q, k, v, cu_q, causal=causal, scale=softmax_scale)

    install_kernels(monkeypatch, varlen_attn, flash_attn_varlen_func)
    monkeypatch.setattr(backends, "_has_enable_gqa", lambda: True)  # cached: of the installed kernel, or of this one
    return calls


@pytest.mark.parametrize("attend", [TorchVarlen(), FlashAttn()], ids=lambda b: b.name)
@pytest.mark.parametrize("causal", [True, False])
def test_kernels_are_given_boundaries_that_cover_every_row(kernels, attend, causal):
    segments = Segments.from_lengths([3, 5, 0, 2], SlotRule(pad_to=200, max_segments=6)).without_gaps()
    qkv = random_qkv(segments.total)
    out = attend(*qkv, segments, causal=causal, scale=0.3)
    truth = EagerMask()(*qkv, segments, causal=causal, scale=0.3)
    torch.testing.assert_close(out, truth, rtol=0, atol=1e-12)  # padding included
    ((cu_seqlens, longest, grouped),) = kernels
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens[-1] == segments.total
    assert longest == segments.longest == 200  # the same in every row of this size
    assert grouped


@pytest.mark.parametrize("enabled", [False, True])
def test_flash_attn_is_deterministic_where_pytorch_is(enabled, monkeypatch):
    asked = []

    def kernel(q, k, v, *seqlens, deterministic=False, **settings):
        asked.append(deterministic)
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    install_kernels(monkeypatch, kernel, kernel)
    segments = Segments.from_lengths([3, 5])
    torch.use_deterministic_algorithms(enabled)
    try:
        FlashAttn()(*random_qkv(segments.total), segments, causal=True, scale=0.3)
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [enabled]


# ---------------------------------------------------------------------- on the GPU itself


@pytest.mark.gpu
@pytest.mark.slow
@pairs(
    name=[name for name in BACKENDS if name != "eager_mask"],
    shape=[(16, 16, 64), (16, 16, 72), (16, 8, 128), (8, 2, 256)],
    causal=[True, False],
)
def test_gpu_kernels_are_as_close_to_float32_as_low_precision_can_be(name, shape, causal):
    *heads, dim = shape
    segments = Segments.from_lengths([100, 0, 37, 513, 1], SlotRule(row_multiple=128)).without_gaps()
    check_low_precision(name, [(segments.total, n, dim) for n in (*heads, heads[1])], segments, causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("more_keys", [0, 5])
@pytest.mark.parametrize("span", [0, 6])
@pytest.mark.parametrize(
    "pattern", [CAUSAL, Pattern(window=9), Pattern(softcap=5.0)], ids=["full", "window", "softcap"]
)
def test_what_is_left_to_pytorchs_own_attention_takes_few_calls_for_many_segments(pattern, span, more_keys):
    counts = []
    for samples in (4, 64):
        segments = Segments.from_lengths([12 + at % 7 for at in range(samples)])
        keys = Segments.from_lengths([n + more_keys for n in segments.lengths]) if more_keys else segments
        q, k, v = (torch.randn(x.total, 4, 16, device="cuda", requires_grad=True) for x in (segments, keys, keys))
        runs = tuple((stop - span - at % 3, stop) for at, (_, stop) in enumerate(segments.spans)) if span else ()
        of_row = replace(pattern, spans=Spans(runs=runs)) if span else pattern
        given = {"causal": True, "scale": 0.3, "pattern": of_row, **({"keys": keys} if more_keys else {})}
        with Launches() as launches:
            out = SdpaSegments()(q, k, v, segments, **given)
            out.sum().backward()
        assert torch.isclose(out, EagerMask()(q, k, v, segments, **given), atol=1e-5).all()
        counts.append(launches.seen.total())
    assert counts[1] <= 1.15 * counts[0]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "eager_mask"])
def test_gpu_kernels_put_the_last_query_at_the_last_key(name):
    queries, keys, _ = last_of_each([(0, 100), (300, 37), (513, 1), (64, 128)])
    shapes = [(queries.total, 16, 128), *[(keys.total, 4, 128)] * 2]
    check_low_precision(name, shapes, queries, causal=True, keys=keys)


def check_low_precision(name, shapes, segments, **settings):
    """Compare a kernel in bfloat16 with dense scores in float32, and allow a multiple of their error in bfloat16."""
    rng = torch.Generator("cuda").manual_seed(0)
    qkv = [torch.randn(s, generator=rng, device="cuda", dtype=torch.bfloat16) for s in shapes]
    if reasons := BACKENDS[name].unsupported(AttentionCall.of(*qkv[:2])):
        pytest.skip(f"waits for {name}: {'; '.join(reasons)}")
    low, dense, results = torch.bfloat16, EagerMask(), []
    for attend, dtype in ((BACKENDS[name], low), (dense, low), (dense, torch.float32)):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in qkv]
        out = attend(*leaves, segments, scale=shapes[0][2] ** -0.5, **settings)
        out.float().sin().sum().backward()
        results.append([out, *(x.grad for x in leaves)])
    for times, ours, plain_low, truth in zip(ALLOWED, *results, strict=True):
        assert (ours.float() - truth).abs().max() <= times * (plain_low.float() - truth).abs().max() + 1e-5
