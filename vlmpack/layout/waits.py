"""Waits of a host for its device, recorded as they happen: what was asked for, and by which line."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vlmpack.layout.device import nothing_on_host

VALUES = frozenset({"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"})
"""Operations whose result is a number of Python's."""
SIZES = frozenset(
    {
        *("nonzero", "masked_select", "bincount"),
        *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
    }
)
"""Operations whose result is as long as the values on the device say."""
INDEXED = frozenset({"index", "_unsafe_index"})
"""`x[mask]`: a mask as an index is a hidden `nonzero`."""
ASSIGNED = frozenset({"index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"})
"""`x[mask] = y`: so it is here, but for a single number, with which the mask is filled as it stands."""
TORCH = str(Path(torch.__file__).parent)


class Wait(NamedTuple):
    """The host waited for the device, or would have."""

    operation: str
    """What for; on CUDA nobody tells: "a wait"."""
    file: str
    """Of the innermost line outside PyTorch that led here; "": there is none. Of a backward pass it is the line that
    called `backward`."""
    line: int
    """Its number."""
    function: str
    """Which function it is in."""

    @property
    def place(self) -> str:
        """ "file.py:12 in function"."""
        return f"{self.file}:{self.line} in {self.function}" if self.file else "PyTorch's own"


@contextmanager
def recorded_waits(device: torch.device) -> Iterator[list[Wait]]:
    """Record while something runs: on CUDA PyTorch itself says when it waits; on a CPU, what would have to.

    The CPU then takes the paths of an accelerator (`nothing_on_host`). What is no operation there, and would be a copy
    from a device, cannot be seen: `tolist`, `cpu`, `numpy`.
    """
    waits: list[Wait] = []
    with _cuda_waits(waits) if device.type == "cuda" else _cpu_waits(waits):
        yield waits


@contextmanager
def _cuda_waits(waits: list[Wait]) -> Iterator[None]:
    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            waits.append(_asked_by("a wait"))

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note  # told while the operation waits, so that the stack says who asked
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _cpu_waits(waits: list[Wait]) -> Iterator[None]:
    with nothing_on_host(), _Waiting(waits):
        yield


@final
class _Waiting(TorchDispatchMode):
    """Records every operation that would wait."""

    def __init__(self, waits: list[Wait]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if _would_wait(func, name, args, kwargs or {}):
            self._waits.append(_asked_by(name))
        return func(*args, **(kwargs or {}))


def _would_wait(func: Any, name: str, args: Any, kwargs: Any) -> bool:
    if name == "repeat_interleave":  # by a tensor of times, whose sum is the size
        return func._overloadname != "self_int" and kwargs.get("output_size") is None
    if name in INDEXED:
        return _has_mask(args[1])
    if name in ASSIGNED:
        return _has_mask(args[1]) and args[2].dim() > 0
    return name in VALUES or name in SIZES


def _has_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _asked_by(operation: str) -> Wait:
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((TORCH, "<")) and file not in (__file__, warnings.__file__):
            return Wait(operation, file, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return Wait(operation, "", 0, "")
