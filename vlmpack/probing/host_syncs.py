"""Record host-device syncs and the lines that cause them: real ones on CUDA, or on a CPU those that CUDA would have."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from vlmpack.layout import device as moving
from vlmpack.layout.device import nothing_on_host

VALUES = frozenset({"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"})
"""Operations whose result is a Python number."""
SIZES = frozenset(
    {
        *("nonzero", "masked_select", "bincount"),
        *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
    }
)
"""Operations whose output size depends on values on the device."""
INDEXED = frozenset({"index", "_unsafe_index"})
"""`x[mask]`: indexing with a mask is a hidden `nonzero`."""
ASSIGNED = frozenset({"index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"})
"""`x[mask] = y`: the same, unless `y` is a single number, which is filled in without `nonzero`."""
FROM_NUMBERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, torch.frombuffer})
"""Functions that create a tensor from values on the host, and copy it if a device is given."""
FACTORIES = frozenset(
    {
        *(torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.zeros),
        *(torch.rand, torch.randint, torch.randn, torch.randperm),
    }
)
"""Functions that create a tensor directly on its device, without a copy."""
INDEXING = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})
TORCH = str(Path(torch.__file__).parent)
_PASSED_OVER = (__file__, moving.__file__, warnings.__file__)


class HostSync(NamedTuple):
    """One host-device sync, or an operation that would be one on an accelerator."""

    operation: str
    """The operation that synchronized; "a sync" on CUDA, which does not name it."""
    file: str
    """File of the innermost line outside PyTorch on the stack; "": there is none. In a backward pass, this is the line
    that called `backward`."""
    line: int
    """Number of that line."""
    function: str
    """Function that contains the line."""

    @property
    def place(self) -> str:
        """ "file.py:12 in function"."""
        return f"{self.file}:{self.line} in {self.function}" if self.file else "PyTorch itself"


@contextmanager
def recorded_syncs(device: torch.device) -> Iterator[list[HostSync]]:
    """Record host-device syncs in a `with` block: on CUDA those that PyTorch reports, on a CPU those CUDA would have.

    On a CPU, vlmpack takes the code paths of an accelerator (`nothing_on_host`), and `_SyncCopies` tracks copies
    between host and device. `numpy` is not recorded, because it raises for a tensor on a device.
    """
    syncs: list[HostSync] = []
    if device.type != "cuda":
        with nothing_on_host(), _SyncOperations(syncs), _SyncCopies(syncs):
            yield syncs
        return

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            syncs.append(_sync_here("a sync"))

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note  # is called during the operation, so the stack contains its line
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield syncs
        finally:
            torch.cuda.set_sync_debug_mode(before)


@final
class _SyncOperations(TorchDispatchMode):
    """Records every operation that would synchronize."""

    def __init__(self, syncs: list[HostSync]) -> None:
        super().__init__()
        self._syncs = syncs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if moving.counts_as_device() and _synchronizes(func, name, args, kwargs or {}):
            self._syncs.append(_sync_here(name))
        return func(*args, **(kwargs or {}))


def _synchronizes(func: Any, name: str, args: Any, kwargs: Any) -> bool:
    if name == "repeat_interleave":  # with a tensor of repeats, their sum is the output size
        return func._overloadname != "self_int" and kwargs.get("output_size") is None
    if name in INDEXED:
        return _has_mask(args[1])
    if name in ASSIGNED:
        return _has_mask(args[1]) and args[2].dim() > 0
    return name in VALUES or name in SIZES


def _has_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _sync_here(operation: str) -> HostSync:
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((TORCH, "<")) and file not in _PASSED_OVER:
            return HostSync(operation, file, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return HostSync(operation, "", 0, "")


# ---------------------------------------------------------------------- copies


@final
class _SyncCopies(TorchFunctionMode):
    """Records blocking copies between host and device on a CPU, where such copies are not operations.

    A tensor counts as on the host if it was created there (from numbers or by a factory, without a device or with the
    name "cpu"), or if it was computed from such tensors only. All other tensors count as on the device.
    """

    def __init__(self, syncs: list[HostSync]) -> None:
        super().__init__()
        self._syncs = syncs
        self._on_host = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in BACKWARD:  # `func` runs outside the mode, which would then miss recomputed forward passes
            with self:
                return BACKWARD[func](*args, **kwargs)
        if moving.counts_as_device() and self._copies(func, args, kwargs):
            self._syncs.append(_sync_here(f"copy in {func.__name__}"))
        out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor):
            if self._makes_on_host(func, args, kwargs):
                out = out.view_as(out) if out is args[0] and not self._is_host(out) else out  # a copy on an accelerator
                self._on_host[out] = True
            else:
                self._on_host.pop(out, None)
        return out

    def _copies(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Return True if a call must copy between host and device before it returns."""
        if func in FROM_NUMBERS:
            return self._is_host(args[0]) and _on_device(kwargs.get("device"))
        if func in (torch.Tensor.cpu, torch.Tensor.tolist):
            return not self._is_host(args[0])
        if func is torch.Tensor.new_tensor:
            return not self._is_host(args[0]) and self._is_host(args[1])
        if func is torch.Tensor.to:
            device = _device_of(args, kwargs)
            if device is None or _asynchronous(args, kwargs):
                return False
            return (self._is_host(args[0]) or _is_numpy(args[0])) == _on_device(device)
        if func is torch.Tensor.copy_:
            return self._is_host(args[0]) != self._is_host(args[1]) and not _asynchronous(args, kwargs)
        if func in INDEXING:
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            return not self._is_host(args[0]) and any(map(self._is_list, parts))
        return False

    def _makes_on_host(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Return True if the tensor that a call returns is on the host."""
        if func is torch.Tensor.cpu:
            return True
        if func in FROM_NUMBERS:
            return self._is_host(args[0]) and not _on_device(kwargs.get("device"))
        if func in FACTORIES:
            return not _on_device(kwargs.get("device"))
        if func is torch.Tensor.to and (device := _device_of(args, kwargs)) is not None:
            return not _on_device(device)
        parts = [part for x in (*args, *kwargs.values()) for part in (x if isinstance(x, list | tuple) else (x,))]
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        return bool(tensors) and all(map(self._is_host, tensors))

    def _is_host(self, value: Any) -> bool:
        return value in self._on_host if isinstance(value, torch.Tensor) else True

    def _is_list(self, index: Any) -> bool:
        """Return True if an index must be copied to the device: a list, array or tensor of indices on the host."""
        if isinstance(index, torch.Tensor):
            return index.dim() > 0 and self._is_host(index)
        return isinstance(index, list | np.ndarray)


def _on_device(device: Any) -> bool:
    """Return True if `device` counts as an accelerator: it is not None, and not the string "cpu"."""
    return device is not None and device != "cpu"


def _backward_of_tensor(tensor: torch.Tensor, *, gradient: Any = None, **kwargs: Any) -> None:
    torch.autograd.backward((tensor,), None if gradient is None else (gradient,), **kwargs)


def _backward(
    tensors: Any, *, grad_tensors: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    """`torch.autograd.backward`, from the call of the engine on."""
    grads = grad_tensors or [None] * len(tensors)
    ones = tuple(torch.ones_like(x) if grad is None else grad for x, grad in zip(tensors, grads, strict=True))
    torch.autograd.graph._engine_run_backward(  # pyright: ignore[reportPrivateUsage]
        tensors,
        ones,
        retain_graph or create_graph,
        create_graph,
        inputs or (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


BACKWARD = {torch.Tensor.backward: _backward_of_tensor, torch.autograd.backward: _backward}


def _device_of(args: Any, kwargs: Any) -> str | torch.device | None:
    """Return the device among the arguments of `x.to(...)`, or that of the other tensor; None: only a dtype."""
    arguments = (*args[1:], kwargs.get("device"), kwargs.get("other"))
    devices = [x.device if isinstance(x, torch.Tensor) else x for x in arguments]
    return next((x for x in devices if isinstance(x, str | torch.device)), None)


def _is_numpy(x: torch.Tensor) -> bool:
    """Return True if PyTorch does not own the memory, as after `torch.from_numpy`, which no mode records."""
    return type(x) is torch.Tensor and not x.untyped_storage().resizable()


def _asynchronous(args: Any, kwargs: Any) -> bool:
    return kwargs.get("non_blocking", False) or any(x is True for x in args)
