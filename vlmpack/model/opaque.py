"""Python code as one operator of compiled graphs.

Compiled code that reads the boundaries of a row would be compiled again for every row, so compilers must not look into
it. Operators take tensors and numbers only, so other objects pass through a graph as handles: tensors on the host that
stand for an object.

    forward     q, k, v, handle of the row                  ──▶ out, handle of the autograd graph
    backward    grad, q, k, v, out, handle of that graph    ──▶ gradients

A compiler reuses the memory of tensors that it no longer needs. So the autograd graph of such a call holds none of the
operator's own tensors: the backward pass gets them again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import Any, final

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks

from vlmpack.errors import ConfigError

_OBJECTS: dict[int, Any] = {}
_NUMBERS = count()


def handle_of(value: Any) -> torch.Tensor:
    """Return a tensor that stands for an object, int64 [] on the host. Its memory keeps the object alive."""
    array = np.array(next(_NUMBERS))
    _OBJECTS[number := int(array)] = value
    weakref.finalize(array, _OBJECTS.pop, number).atexit = False
    return torch.from_numpy(array)


def value_of(handle: torch.Tensor) -> Any:
    """Return the object that a handle stands for.

    Raises:
        ConfigError: the handle was copied, and its memory freed.
    """
    if (number := int(handle)) not in _OBJECTS:
        raise ConfigError(
            "what compiled attention needs for its backward pass is gone, because a copy was saved in its place "
            "(save_on_cpu(pin_memory=True), offload_wrapper): set pin_memory=False, or do not compile these layers"
        )
    return _OBJECTS[number]


Tensors = Sequence[torch.Tensor | None]


@final
class OpaqueCall:
    """The autograd graph of a call inside an operator, for which PyTorch records none."""

    def __init__(self, function: Callable[..., torch.Tensor], tensors: Tensors, learns: Sequence[bool]) -> None:
        """Run the code. `learns`: whether each of the tensors gets a gradient."""
        saved, tensors = list[_Saved](), _contiguous(tensors)
        self._given: Tensors = ()

        def pack(x: torch.Tensor) -> _Saved:
            saved.append(_Saved(x))
            return saved[-1]

        leaves = [None if x is None else x.detach().requires_grad_(one) for x, one in zip(tensors, learns, strict=True)]
        with _autograd(), torch.enable_grad(), saved_tensors_hooks(pack, lambda x: x.value(self._given)):
            self._out = function(*leaves)
        self.out = self._out.detach()
        """The result."""
        self._leaves = [x for x in leaves if x is not None and x.requires_grad]
        for each in saved:
            each.leave_out((*tensors, self.out))

    def gradients(self, grad: torch.Tensor, given: Tensors) -> list[torch.Tensor]:
        """Return the gradients of the tensors that learn. `given`: all tensors of the call, and its result."""
        self._given = _contiguous(given)
        try:
            with _autograd():
                found = torch.autograd.grad(self._out, self._leaves, grad, retain_graph=True)
        finally:
            self._given = ()
        return [x.contiguous() for x in found]


def _contiguous(tensors: Tensors) -> Tensors:
    return [x if x is None else x.contiguous() for x in tensors]


def _autograd() -> AbstractContextManager[Any]:
    """Record autograd graphs, which operators do not."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)


@final
class _Saved:
    """A saved tensor, or where it is in one of the operator's tensors."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x: Any = x.detach()
        self._place: Any = None

    def leave_out(self, tensors: Tensors) -> None:
        """Drop the tensor if it is a view of one of these, which are contiguous."""
        x = self._x
        for number, base in enumerate(tensors):
            if base is not None and x.dtype == base.dtype and 0 <= x.data_ptr() - base.data_ptr() < base.nbytes:
                offset = (x.data_ptr() - base.data_ptr()) // x.itemsize
                self._x, self._place = None, (number, x.shape, x.stride(), offset)
                return

    def value(self, given: Tensors) -> torch.Tensor:
        """Return the tensor, or the view of one of these."""
        if self._place is None:
            return self._x
        number, size, stride, offset = self._place
        base: Any = given[number]
        return base.as_strided(size, stride, base.storage_offset() + offset)
