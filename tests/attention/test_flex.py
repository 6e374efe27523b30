"""FlexAttention. PyTorch compiles its gradients for a GPU alone: here its graph runs, and its forward pass compiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention.naive import HEADS, alone, assert_equal, random_qkv
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention

from vlmpack.attention import backends, flex
from vlmpack.attention.backends import AttentionCall, EagerMask, FlexAttention, choose
from vlmpack.attention.patterns import Pattern, key_bounds, visible_keys
from vlmpack.attention.spans import Spans
from vlmpack.layout import Segments

ATTEND: Any = FlexAttention()
SINKS = torch.linspace(-2, 3, HEADS, dtype=torch.float64)
LENGTHS = [9, 1, 14]
RUNS = [[(2, 5), (5, 8)], [], [(0, 6), (9, 14)]]
PATTERNS = {
    "causal": Pattern(),
    "window": Pattern(window=4, sinks=SINKS),
    "chunk": Pattern(chunk=4),
    "softcap": Pattern(window=4, softcap=1.5),
    "images": Pattern(window=3, spans=Spans(runs=())),
    "prefixes": Pattern(window=3, spans=Spans(runs=(), beyond_window=True)),
}
"""Runs of the spans are those of the row."""
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(scope="module", autouse=True)
def graphs() -> Iterator[CompileCounterWithBackend]:
    """Counts the graphs that were compiled."""
    counter = CompileCounterWithBackend("aot_eager")
    graph = torch.compile(flex_attention.flex_attention, dynamic=True, fullgraph=True, backend=counter)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex_attention, "_validate_device", lambda *_: None)
        patch.setattr(flex, "compiled", lambda: graph)
        yield counter
    torch._dynamo.reset()


def of_row(pattern: Pattern, segments: Segments) -> Pattern:
    if pattern.spans is None:
        return pattern
    spans = zip(segments.spans, RUNS, strict=True)
    runs = tuple((start + a, start + b) for (start, _), within in spans for a, b in within)
    return replace(pattern, spans=replace(pattern.spans, runs=runs))


@pytest.mark.parametrize("kind", PATTERNS)
def test_each_sample_is_what_it_is_alone(kind: str) -> None:
    segments, pattern = Segments.from_lengths(LENGTHS), PATTERNS[kind]
    learnt = [] if pattern.sinks is None else [pattern.sinks.clone().requires_grad_()]
    pattern = replace(pattern, sinks=learnt[0]) if learnt else pattern
    qkv = random_qkv(segments.total)
    out = ATTEND(*qkv, segments, causal=True, scale=0.3, pattern=of_row(pattern, segments))
    truth = out.new_zeros(out.shape)
    for (start, stop), runs in zip(segments.spans, RUNS, strict=True):
        more: Any = {"runs": runs, "beyond": pattern.spans.beyond_window} if pattern.spans else {}
        truth[start:stop] = alone(*(x[start:stop] for x in qkv), pattern=pattern, **more)
    assert_equal(out, truth, *qkv, *learnt)


def test_queries_of_a_part_see_the_keys_of_their_path() -> None:
    queries, keys, places = Segments.from_lengths([4, 5]), Segments.from_lengths([7, 5]), [*range(3, 12)]
    q, k, v = random_qkv(12)
    out = ATTEND(q[places], k, v, queries, causal=True, scale=0.3, keys=keys, pattern=Pattern(window=3))
    truth = [alone(q[a:b], k[c:b], v[c:b], Pattern(window=3)) for a, b, c in ((3, 7, 0), (7, 12, 7))]
    assert_equal(out, torch.cat(truth), q, k, v)


def test_rows_of_other_lengths_take_the_same_graph_and_layers_the_same_mask(
    graphs: CompileCounterWithBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = []
    own = backends.block_mask
    monkeypatch.setattr(backends, "block_mask", lambda *given: masks.append(own(*given)) or masks[-1])
    before = graphs.frame_count
    for lengths in ([100, 90], [200, 3, 71], [150] * 3, [301]):
        segments = Segments.from_lengths(lengths)
        for _ in range(3):
            ATTEND(*random_qkv(segments.total), segments, causal=True, scale=0.3).sum().backward()
    assert graphs.frame_count - before <= 1
    assert len(masks) == 4


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pattern", [Pattern(), Pattern(window=100), Pattern(chunk=200)], ids=lambda p: str(p.names))
def test_blocks_are_skipped_masked_or_full(pattern: Pattern, causal: bool) -> None:
    """As `create_block_mask` of PyTorch sorts them, with the whole mask in memory."""
    segments, keys = Segments.from_lengths([300, 70, 513, 1]), Segments.from_lengths([300, 200, 600, 1])
    for others in (segments, keys):
        limits = {"causal": causal, "pattern": pattern}
        ours = flex.block_mask(key_bounds(segments, others, **limits), others.total, torch.device("cpu"))
        dense = visible_keys(segments, others, torch.device("cpu"), **limits).numpy()
        padded = np.pad(dense, [(0, -size % flex.BLOCK) for size in dense.shape])
        blocks = padded.reshape(len(padded) // flex.BLOCK, flex.BLOCK, -1, flex.BLOCK)
        full, some = np.asarray(blocks.all((1, 3))), np.asarray(blocks.any((1, 3)))
        for prefix, which in (("", some & ~full), ("full_", full)):
            for axis, by_axis in (("kv", which), ("q", which.T)):
                counts = getattr(ours, f"{prefix}{axis}_num_blocks")[0, 0].tolist()
                numbers = getattr(ours, f"{prefix}{axis}_indices")[0, 0].tolist()
                listed = [sorted(row[:count]) for row, count in zip(numbers, counts, strict=True)]
                assert listed == [np.flatnonzero(row).tolist() for row in by_axis]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_the_compiled_kernel_reads_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile(flex_attention.flex_attention, dynamic=True, fullgraph=True)
    monkeypatch.setattr(flex, "compiled", lambda: compiled)
    generator = torch.Generator().manual_seed(0)
    for lengths in ([300, 70, 513, 1], [129, 260]):
        segments, pattern = Segments.from_lengths(lengths), Pattern(window=100)
        q, k, v = (torch.randn(segments.total, heads, 16, generator=generator) for heads in (4, 2, 2))
        results = [
            attend(q, k, v, segments, causal=True, scale=0.3, pattern=pattern) for attend in (ATTEND, EagerMask())
        ]
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("pattern", [("softcap",), ("window", "softcap", "sinks"), ("window", "softcap", "spans")])
def test_it_serves_what_varlen_kernels_do_not(pattern: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    call = AttentionCall(device="cuda", dtype=torch.bfloat16, head_dim=64, num_heads=4, num_kv_heads=2, pattern=pattern)
    monkeypatch.setattr(backends, "_has_compiler", lambda: True)
    assert choose(call).name == "flex"
    assert choose(replace(call, dropout=0.1)).name == "sdpa_segments"
    monkeypatch.setattr(backends, "_has_compiler", lambda: False)
    assert choose(call).name == "sdpa_segments"
