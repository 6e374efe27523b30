"""On a GPU: waits for the device are errors, operations are counted, FlexAttention runs without Triton."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from vlmpack.attention import backends, flex


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """PyTorch warns, once in a process, that this mode is a prototype; what it finds raises a RuntimeError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Launches(TorchDispatchMode):
    """Counts the operations on tensors of the device."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen[func.name()] += any(
            isinstance(x, torch.Tensor) and x.is_cuda for x in tree_leaves((args, kwargs, out))
        )
        return out


def flex_graph(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let FlexAttention run as its graph: the pretend device compiles no kernels. Returns the list of its calls."""
    graph: Any = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend="aot_eager")
    calls: list[Any] = []

    def called(*args: Any, **settings: Any) -> Any:
        calls.append(args[0].shape)
        with _disable_current_modes(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            return graph(*args, **settings)

    monkeypatch.setattr(flex, "compiled", lambda: called)
    monkeypatch.setattr(backends, "_has_compiler", lambda: True)
    return calls
