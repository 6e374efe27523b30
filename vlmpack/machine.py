"""Measure the peak memory of a call reproducibly, and look up package versions.

On a CPU, the resident size depends on what the allocator returned to the system, so it is no reliable measure. Here,
each storage of every operation's output is counted once when it appears, and subtracted when it is freed. This includes
tensors saved for the backward pass, but not memory that a kernel allocates and frees internally. On CUDA, the
allocator's own peak is read.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

NEWEST_TESTED = {"torch": "2.13", "transformers": "5.24"}
"""The newest minor versions that were tested; `pip` enforces the oldest ones."""


def peak_bytes(function: Callable[[], object], *, held: Iterable[torch.Tensor] = (), device: str = "cpu") -> int:
    """Measure the peak bytes of tensors alive during a call, including those in `held` (weights, the batch)."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        function()
        return torch.cuda.max_memory_allocated(device)
    was_on = gc.isenabled()
    gc.disable()  # it would run at arbitrary times, and memory it frees would count as freed by the call
    try:
        with LiveBytes(held) as live:
            function()
    finally:
        if was_on:
            gc.enable()
    return live.peak


@final
class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all live storages that operations return, while active."""

    def __init__(self, held: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in held:
            self._weigh(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run the operation, and count the storages of its outputs."""
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor):
                self._weigh(value)
        return out

    def _weigh(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        size = storage.nbytes()

        def freed(_: weakref.ref[torch.UntypedStorage]) -> None:
            del self._alive[key]
            self.now -= size

        self._alive[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None: it is not installed.

    `__version__` of an imported package comes first, because metadata may lack the build, such as PyTorch's "+cu132".
    """
    module = sys.modules.get(package.replace("-", "_"))
    build = getattr(module, "__version__", None)
    if build is not None:
        return str(build)
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def is_newer_than_tested(package: str, installed: str) -> bool:
    """Return whether a version is newer than the newest tested one; False for packages without a tested version."""

    def minor(version: str) -> tuple[int, ...]:
        return tuple(int(part) for part in version.split(".")[:2])

    return package in NEWEST_TESTED and minor(installed) > minor(NEWEST_TESTED[package])
