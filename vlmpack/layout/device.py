"""Move data between host and device, and check it there, without host-device syncs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import numpy as np
import torch

P = ParamSpec("P")
R = TypeVar("R")

_nothing_on_host = False
"""True while the CPU is treated as a device."""


def outside_graph(function: Callable[P, R]) -> Callable[P, R]:
    """Keep a function of host metadata out of compiled graphs, which would be compiled again for every new length."""
    return torch.compiler.disable(function)  # pyright: ignore[reportCallIssue, reportReturnType]


def around_graph(function: Callable[P, R]) -> Callable[P, R]:
    """Keep a function itself out of compiled graphs, but not what it calls: the model's own layers."""
    return torch.compiler.disable(function, recursive=False)  # pyright: ignore[reportReturnType]


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy a host array to `device` without a host-device sync: pinned and asynchronous on CUDA.

    No inference tensor, wherever it is made: it may be kept, and be part of a training step later.
    """
    with torch.inference_mode(False):
        tensor = torch.from_numpy(array)
        return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def copied(tensor: torch.Tensor, device: torch.device | str | int, *, non_blocking: bool = True) -> torch.Tensor:
    """Copy a tensor to a device, asynchronously if `non_blocking`; a copy to the host waits for its values, which would
    be read before they arrive."""
    is_host = torch.device(device).type == "cpu" and not _nothing_on_host
    return tensor.to(device, non_blocking=non_blocking and not is_host)


def on_host(tensor: torch.Tensor) -> bool:
    """True if the values of `tensor` can be read without a host-device sync."""
    return tensor.device.type == "cpu" and not _nothing_on_host


@contextmanager
def nothing_on_host() -> Iterator[None]:
    """Take the paths of an accelerator on a CPU too, so that host-device syncs can be counted there."""
    global _nothing_on_host
    before, _nothing_on_host = _nothing_on_host, True
    try:
        yield
    finally:
        _nothing_on_host = before


LONGEST_DEVICE_MESSAGE = 254
"""Bytes of a message that CUDA's `_assert_async` accepts. It refuses a longer one even when the condition holds
("Message length must be smaller than 255", aten/src/ATen/native/cuda/TensorCompare.cu)."""


def require(condition: torch.Tensor, message: str, error: type[Exception]) -> None:
    """Raise unless a boolean scalar is true: at once on the host, by an asynchronous assertion on a device.

    A device prints the first 254 bytes of the message; the host raises the whole of it.

    Raises:
        Exception: an `error` with this message, if the tensor is on the host and false.
    """
    if not on_host(condition):
        shortened = message.encode()[:LONGEST_DEVICE_MESSAGE].decode(errors="ignore")  # never half a character
        torch._assert_async(condition, shortened)  # pyright: ignore[reportPrivateImportUsage]
    elif not bool(condition):
        raise error(message)
