"""The only file that talks to CUDA: memory, waits, and whether the device still answers; and a CPU that stands in."""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, final

import torch

from vlmpack.bench.environment import version_of
from vlmpack.layout import recorded_syncs

R = TypeVar("R")

PACKAGES = ("triton", "fla-core", "flash-linear-attention", "causal-conv1d", "flash-attn", "kernels", "accelerate")
"""What changes how a GPU computes a model, where it is installed."""
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_CUDNN_SDPA_DEPRIORITIZED")
"""What else does, in the environment."""
NO_ENGINE = "unable to find an engine"
"""What a convolution of cuDNN says, among other things, when no plan of it finds room for its workspace."""


class Device(Protocol):
    """What the parts ask of a device."""

    name: str
    """"cuda" or "cpu"."""
    dtype: torch.dtype
    """What models are computed in."""

    def describe(self) -> dict[str, Any]:
        """Facts about it, as JSON values."""
        ...

    def wait(self) -> None:
        """Until everything that was asked for is done."""
        ...

    def release(self) -> None:
        """Give back all memory that nobody holds."""
        ...

    def retries(self) -> int:
        """How often the allocator had to give back its cache to find room, so far."""
        ...

    def refusals(self) -> int:
        """How often the allocator found no room, so far."""
        ...

    def answers(self) -> bool:
        """Whether it can still be used: a kernel that failed takes the whole process with it."""
        ...

    def waits(self, function: Callable[[], object]) -> list[str]:
        """Every time that the host waits for the device during a call: "file.py:12 in function"."""
        ...


@final
class Cuda:
    """A CUDA device."""

    name = "cuda"
    dtype = torch.bfloat16

    def describe(self) -> dict[str, Any]:
        """See `Device`."""
        found = torch.cuda.get_device_properties(0)
        return {
            "capability": list(torch.cuda.get_device_capability(0)),
            "memory_bytes": found.total_memory,
            "multiprocessors": found.multi_processor_count,
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

    def waits(self, function: Callable[[], object]) -> list[str]:
        """See `Device`. What a backward pass waits for is named by the line that called `backward`."""
        self.wait()
        with recorded_syncs(torch.device("cuda")) as waits:
            function()
        self.wait()
        return [wait.place for wait in waits]


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

    def waits(self, function: Callable[[], object]) -> list[str]:
        """See `Device`. What would make the host wait, where the paths of an accelerator are taken."""
        with recorded_syncs(torch.device("cpu")) as waits:
            function()
        return [wait.place for wait in waits]


DEVICES: dict[str, Callable[[], Device]] = {"cuda": Cuda, "cpu": Cpu}


def host_seconds(function: Callable[[], object], device: Device) -> float:
    """Seconds until a call returns, whatever the device still has to do."""
    device.wait()
    started = time.perf_counter()
    function()
    taken = time.perf_counter() - started
    device.wait()
    return taken


def if_it_fits(function: Callable[[], R], device: Device) -> R | None:
    """What a call returns; None: there is not enough memory for it, all of which is free again."""
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
    """Whether an error says that memory ran out: PyTorch's own, or a library's that found no room for its workspace."""
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
