"""The varlen back-ends on a device: as exact as PyTorch's own attention on each segment, by one launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from waiting import Launches

from vlmpack.attention.backends import BACKENDS
from vlmpack.attention.patterns import Pattern
from vlmpack.layout import Segments

LENGTHS = (5, 17, 1, 40)
CASES = {
    "sinks": ("torch_varlen", torch.bfloat16, 16, {"sinks": True}),
    "sinks in a window": ("torch_varlen", torch.bfloat16, 16, {"sinks": True, "window": 4}),
    "sinks in chunks": ("torch_varlen", torch.float16, 16, {"sinks": True, "chunk": 7}),
    "float32": ("efficient", torch.float32, 12, {}),
    "float32 in chunks": ("efficient", torch.float32, 12, {"chunk": 7}),
    "wide heads": ("efficient", torch.bfloat16, 264, {}),
}
pytestmark = pytest.mark.gpu


def computed(backend: str, leaves: list[torch.Tensor], *, causal: bool, more_keys: int, **parts: Any) -> Any:
    """The output and every gradient."""
    *qkv, sinks = (x.detach().requires_grad_() for x in leaves)
    pattern = Pattern(**parts | ({"sinks": sinks} if parts.pop("sinks", False) else {}))
    keys = Segments.from_lengths([n + more_keys for n in LENGTHS])
    settings = {"causal": causal, "scale": 0.3, "pattern": pattern, **({"keys": keys} if more_keys else {})}
    out = BACKENDS[backend](*qkv, Segments.from_lengths(LENGTHS), **settings)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out)
    wanted = [*qkv, *([] if pattern.sinks is None else [sinks])]
    return [x.double().cpu() for x in (out, *torch.autograd.grad(out, wanted, weight))]


@pytest.mark.parametrize(
    ("name", "causal", "more_keys"),
    [*((name, True, more) for name in CASES for more in (0, 9)), ("float32", False, 0), ("wide heads", False, 0)],
)
def test_it_is_as_exact_as_attention_on_each_segment(name: str, causal: bool, more_keys: int) -> None:
    backend, dtype, dim, parts = CASES[name]
    rng = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    shapes = [(total, 8, dim), *[(total + more_keys * len(LENGTHS), 2, dim)] * 2, (8,)]
    leaves = [torch.randn(shape, generator=rng).to(dtype) for shape in shapes]
    run = {"causal": causal, "more_keys": more_keys, **parts}
    truth = computed("eager_mask", [x.double() for x in leaves], **run)
    with Launches() as launches:
        ours = computed(backend, [x.cuda() for x in leaves], **run)
    each = computed("sdpa_segments", [x.cuda() for x in leaves], **run)
    for exact, found, other in zip(truth, ours, each, strict=True):
        error, theirs = ((x - exact).norm() / exact.norm() for x in (found, other))
        assert error <= 3 * theirs + 1e-6
    kernel = f"aten::_{'flash' if backend == 'torch_varlen' else 'efficient'}_attention"
    assert (launches.seen[f"{kernel}_forward"], launches.seen[f"{kernel}_backward"]) == (1, 1)


def test_the_emulated_kernel_returns_what_pytorch_says_of_it() -> None:
    """Shapes and dtypes of the real schema: the kernel itself is compiled for CUDA alone."""
    found = []
    for device in ("cuda", "meta"):
        qkv = [torch.randn(1, 63, 2, width, device=device) for width in (12, 12, 8)]
        cu_seqlens = torch.tensor([0, 23, 63], dtype=torch.int32).to(device)
        out = torch.ops.aten._efficient_attention_forward(*qkv, None, cu_seqlens, cu_seqlens, 40, 40, 0.0, 2, True)
        found.append([*((x.shape, x.dtype) for x in out[:2]), *out[4:]])
    assert found[0] == found[1]
