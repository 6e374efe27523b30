"""Move data between host and device, and check values on the device, without host-device syncs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar, final

import numpy as np
import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

P = ParamSpec("P")
R = TypeVar("R")

_nothing_on_host = False
"""True while the CPU is treated as a device."""


def outside_graph(function: Callable[P, R]) -> Callable[P, R]:
    """Keep a function of host metadata out of compiled graphs, which would otherwise recompile for every new length."""
    return torch.compiler.disable(function)  # pyright: ignore[reportCallIssue, reportReturnType]


def around_graph(function: Callable[P, R]) -> Callable[P, R]:
    """Keep a function out of compiled graphs, but not the functions it calls (the model's own layers)."""
    return torch.compiler.disable(function, recursive=False)  # pyright: ignore[reportReturnType]


def is_compiled() -> bool:
    """Return whether `torch.compile` compiles the caller, or what it calls next."""
    return torch.compiler.is_compiling() or callable(get_eval_frame_callback())


@final
class Copies:
    """Copies of one pass's host arrays. An array that is equal to one of the pass before is not copied again, so a
    second pass of the same row takes no pinned memory."""

    def __init__(self, before: Copies | None) -> None:
        self._before: dict[Hashable, list[tuple[np.ndarray, torch.Tensor]]] = {} if before is None else before._now
        self._now: dict[Hashable, list[tuple[np.ndarray, torch.Tensor]]] = {}

    def of(self, array: np.ndarray, device: torch.device) -> torch.Tensor:
        """Return the array's copy on `device`."""
        key = device, array.dtype, array.shape
        now = self._now.setdefault(key, [])
        for known, copy in (*now, *self._before.get(key, ())):
            if np.array_equal(known, array):
                now.append((known, copy))
                return copy
        now.append((array, _copied(array, device)))
        return now[-1][1]

    def end_pass(self) -> None:
        """Drop the copies of the pass before."""
        self._before = {}


_COPIES: ContextVar[Copies | None] = ContextVar("vlmpack_copies", default=None)


@contextmanager
def copies_reused(before: Copies | None) -> Iterator[Copies]:
    """Reuse the copies of the pass before inside a `with` block; see `Copies`. Code inside must not change them."""
    token = _COPIES.set(copies := Copies(before))
    try:
        yield copies
    finally:
        _COPIES.reset(token)
        copies.end_pass()


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy a host array to `device` without a host-device sync: pinned and asynchronous on CUDA.

    The result is never an inference tensor, because it may be cached and used in a later training step.
    """
    copies = None if device.type == "cpu" else _COPIES.get()
    return _copied(array, device) if copies is None else copies.of(array, device)


def _copied(array: np.ndarray, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        tensor = torch.from_numpy(array)
        return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def copied(tensor: torch.Tensor, device: torch.device | str | int, *, non_blocking: bool = True) -> torch.Tensor:
    """Copy a tensor to a device, asynchronously if `non_blocking`.

    A copy to the host always waits; otherwise its values could be read before they arrive.
    """
    is_host = torch.device(device).type == "cpu" and not _nothing_on_host
    return tensor.to(device, non_blocking=non_blocking and not is_host)


def on_host(tensor: torch.Tensor) -> bool:
    """True if the values of `tensor` can be read without a host-device sync."""
    return tensor.device.type == "cpu" and not _nothing_on_host


@contextmanager
def nothing_on_host(is_device: bool = True) -> Iterator[None]:
    """Take the code paths of an accelerator on a CPU, so that host-device syncs can be counted without one."""
    global _nothing_on_host
    before, _nothing_on_host = _nothing_on_host, is_device
    try:
        yield
    finally:
        _nothing_on_host = before


def host_values() -> AbstractContextManager[None]:
    """Mark computations of tensors that are on the host in any case: in `nothing_on_host` they are no syncs."""
    return nothing_on_host(False)


def counts_as_device() -> bool:
    """True in `nothing_on_host`, except for `host_values`: tensors on a CPU count as tensors on a device."""
    return _nothing_on_host


LONGEST_DEVICE_MESSAGE = 254
"""Maximum message length in bytes for CUDA's `_assert_async`. It refuses a longer one even when the condition holds
("Message length must be smaller than 255", aten/src/ATen/native/cuda/TensorCompare.cu)."""


def require(
    condition: torch.Tensor, message: str, error: type[Exception], *, where: Callable[[int], str] | None = None
) -> None:
    """Check that all of a boolean tensor is true: at once on the host, by an asynchronous assertion on a device.

    A device prints the first 254 bytes of the message; the host raises an error with the whole message. `where` names
    the first element that is false, by its number, in front of the message.

    Raises:
        Exception: the tensor is on the host, and an element is false. The type is `error`.
    """
    if not on_host(condition):
        shortened = message.encode()[:LONGEST_DEVICE_MESSAGE].decode(errors="ignore")  # no partial character
        torch._assert_async(condition.all(), shortened)  # pyright: ignore[reportPrivateImportUsage]
    elif not condition.all():
        place = "" if where is None else f"{where(int(condition.flatten().int().argmin()))}: "
        raise error(f"{place}{message}")
