"""Peak memory of a call, the same number every time; versions of installed packages, and the newest tested ones.

On a CPU the resident size depends on what the allocator gave back to the system, so it is no measure. Here every
operation's outputs are weighed as they come up, once a storage, and taken off when the storage is freed. That
includes what the backward pass keeps, and leaves out what a kernel allocates for itself and frees before it returns.
On CUDA the allocator's own record is read.
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
"""The newest minor versions with which the tests were run; the oldest are those that `pip` insists on."""


def peak_bytes(function: Callable[[], object], *, held: Iterable[torch.Tensor] = (), device: str = "cpu") -> int:
    """Measure the most bytes of tensors alive at one time in a call, with those in `held` (weights, the batch)."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        function()
        return torch.cuda.max_memory_allocated(device)
    was_on = gc.isenabled()
    gc.disable()  # it would run at an arbitrary time, and what it frees would be counted as freed by the call
    try:
        with LiveBytes(held) as live:
            function()
    finally:
        if was_on:
            gc.enable()
    return live.peak


@final
class LiveBytes(TorchDispatchMode):
    """Counts the bytes of every storage that operations touch, for as long as it lives."""

    def __init__(self, held: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in held:
            self._weigh(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run the operation and weigh what comes out."""
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
    """The version of an installed package; None: it is not installed.

    `__version__` of an imported package comes first: the metadata may lack the build, such as "+cu132" of PyTorch.
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
    """Return whether a version of a package is newer than the newest that was tested; of others nothing is known."""

    def minor(version: str) -> tuple[int, ...]:
        return tuple(int(part) for part in version.split(".")[:2])

    return package in NEWEST_TESTED and minor(installed) > minor(NEWEST_TESTED[package])
