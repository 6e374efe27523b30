"""The only file that calls CUDA: memory, host–device syncs, whether the device still works; and a CPU in its place."""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, final

import torch

from vlmpack.machine import version_of
from vlmpack.probing.host_syncs import recorded_syncs

R = TypeVar("R")

PACKAGES = ("triton", "fla-core", "flash-linear-attention", "causal-conv1d", "flash-attn", "kernels", "accelerate")
"""Packages that change how a GPU computes a model, where they are installed."""
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_CUDNN_SDPA_DEPRIORITIZED")
"""Environment variables that do so."""
NO_ENGINE = "unable to find an engine"
"""Words of cuDNN's error when, among other causes, no plan of a convolution finds room for its workspace."""


class Device(Protocol):
    """The interface of a device to the cells."""

    name: str
    """"cuda" or "cpu"."""
    dtype: torch.dtype
    """Type that models are computed in."""

    def describe(self) -> dict[str, Any]:
        """Facts about it, as JSON values."""
        ...

    def wait(self) -> None:
        """Block until all queued work is done."""
        ...

    def release(self) -> None:
        """Free all memory that holds no live tensor."""
        ...

    def retries(self) -> int:
        """Number of times the allocator emptied its cache to find room, so far."""
        ...

    def refusals(self) -> int:
        """Number of times the allocator found no room, so far."""
        ...

    def answers(self) -> bool:
        """Return whether it can still be used: a kernel that failed breaks the device for the whole process."""
        ...

    def syncs(self, function: Callable[[], object]) -> list[str]:
        """List the host–device syncs of a call: "file.py:12 in function"."""
        ...


@final
class Cuda:
    """A CUDA device."""

    name = "cuda"
    dtype = torch.bfloat16

    def describe(self) -> dict[str, Any]:
        """See `Device`."""
        properties = torch.cuda.get_device_properties(0)
        return {
            "capability": list(torch.cuda.get_device_capability(0)),
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "cudnn_attention": torch.backends.cuda.cudnn_sdp_enabled(),
            "environment": {name: os.environ[name] for name in SETTINGS if name in os.environ},
            **_packages(),
        }

    def wait(self) -> None:
        """See `Device`."""
        torch.cuda.synchronize()

    def release(self) -> None:
        """See `Device`."""
        gc.collect()
        torch.cuda.empty_cache()

    def retries(self) -> int:
        """See `Device`."""
        return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))

    def refusals(self) -> int:
        """See `Device`."""
        return int(torch.cuda.memory_stats().get("num_ooms", 0))

    def answers(self) -> bool:
        """See `Device`."""
        try:
            torch.zeros(1, device="cuda").item()
        except torch.OutOfMemoryError:
            return True
        except RuntimeError:
            return False
        return True

    def syncs(self, function: Callable[[], object]) -> list[str]:
        """See `Device`. A sync of a backward pass is named by the line that called `backward`."""
        self.wait()
        with recorded_syncs(torch.device("cuda")) as syncs:
            function()
        self.wait()
        return [sync.place for sync in syncs]


@final
class Cpu:
    """Stands in for a GPU, so that every part can be run and tested anywhere."""

    name = "cpu"
    dtype = torch.float32

    def describe(self) -> dict[str, Any]:
        """See `Device`."""
        return _packages()

    def wait(self) -> None:
        """See `Device`."""

    def release(self) -> None:
        """See `Device`."""
        gc.collect()

    def retries(self) -> int:
        """See `Device`."""
        return 0

    def refusals(self) -> int:
        """See `Device`."""
        return 0

    def answers(self) -> bool:
        """See `Device`."""
        return True

    def syncs(self, function: Callable[[], object]) -> list[str]:
        """See `Device`. Lists what would be syncs, where the paths of an accelerator are taken."""
        with recorded_syncs(torch.device("cpu")) as syncs:
            function()
        return [sync.place for sync in syncs]


DEVICES: dict[str, Callable[[], Device]] = {"cuda": Cuda, "cpu": Cpu}


def host_seconds(function: Callable[[], object], device: Device) -> float:
    """Seconds until a call returns, whatever the device still has to do."""
    device.wait()
    started = time.perf_counter()
    function()
    seconds = time.perf_counter() - started
    device.wait()
    return seconds


def if_it_fits(function: Callable[[], R], device: Device) -> R | None:
    """Return what a call returns; None: memory ran out, and is free again."""
    before = device.refusals()
    try:
        return function()
    except RuntimeError as error:
        if not is_out_of_memory(error) and not (NO_ENGINE in str(error) and device.refusals() > before):
            raise
        traceback.clear_frames(error.__traceback__)  # their variables hold what filled the memory
    device.release()
    return None


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error means that memory ran out, of PyTorch or of a library that needs a workspace."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in str(error) for words in ("out of memory", "ALLOC_FAILED", "can't allocate memory")
    )


@contextmanager
def reserved(size: int, device: Device) -> Iterator[None]:
    """So many bytes of the device are taken by something else (an optimiser's state).

    Raises:
        torch.OutOfMemoryError: there are not so many.
    """
    block = torch.empty(size, dtype=torch.uint8, device=device.name)
    try:
        yield
    finally:
        del block
        device.release()


def _packages() -> dict[str, Any]:
    return {name: version_of(name) for name in PACKAGES}
