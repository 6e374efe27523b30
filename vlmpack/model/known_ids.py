"""Token ids and masks with values that the host knows, so that a model's own code reads them without a sync.

transformers finds the placeholders of images by their id, and inserts features by a mask. On a GPU, counting a mask,
indexing with it, and the backward pass of `masked_scatter` are host-device syncs.

    input_ids == image_token_id      KnownIds     gives a HostMask, from the row's MediaTable
    mask.sum()                       HostMask     a Python number
    x.masked_scatter(mask, y)                     the same values, by `index_copy`
    x[mask], x[mask] = y                          the same, by an index that is copied to the device asynchronously

So the model's own forward runs as it is, with its own checks. T row tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from vlmpack.layout.device import around_graph, host_values, to_device


@final
class HostMask(Tensor):
    """A bool tensor on the host that a model uses as a mask of tensors on its device."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace what would be a sync; copy the mask to the device for anything else that needs it there."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass(), host_values():
            if (replaced := _REPLACED.get(func)) is not None and not kwargs:
                result = replaced(*args)
                if result is not NotImplemented:
                    return result
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            other = next((x for x in tensors if not isinstance(x, HostMask)), None)
            if other is None:
                result = func(*args, **kwargs)
                is_mask = isinstance(result, Tensor) and result.dtype == torch.bool
                return result.as_subclass(HostMask) if is_mask else result
            args = [_moved(x, other.device) for x in args]
            return func(*args, **{name: _moved(x, other.device) for name, x in kwargs.items()})


def host_mask(mask: np.ndarray) -> HostMask:
    """Return a mask from a bool array."""
    return torch.from_numpy(mask).as_subclass(HostMask)


@final
class KnownIds(Tensor):
    """Token ids on a device, with the placeholders that the host knows."""

    masks: Mapping[int, np.ndarray]
    """bool [1, T] for each placeholder's id: where the ids are equal to it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compare with a known id on the host; give plain tensors for anything else."""
        with torch._C.DisableTorchFunctionSubclass():
            if func in (Tensor.__eq__, Tensor.eq) and isinstance(args[1], int) and args[1] in args[0].masks:
                return host_mask(args[0].masks[args[1]])
            return func(*args, **(kwargs or {}))


def known_ids(input_ids: Tensor, masks: Mapping[int, np.ndarray]) -> KnownIds:
    """Return ids [1, T] with the placeholders that the host knows; see `KnownIds.masks`."""
    ids = input_ids.as_subclass(KnownIds)
    ids.masks = masks
    return ids


def with_plain_ids(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a model's inputs with plain ids: compilers cannot trace ours."""
    return {name: x.as_subclass(Tensor) if isinstance(x, KnownIds) else x for name, x in inputs.items()}


@around_graph
def for_compiler(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a model's inputs, with plain ids if `torch.compile` compiles what the caller calls next."""
    return with_plain_ids(inputs) if callable(get_eval_frame_callback()) else inputs


# ---------------------------------------------------------------------- what is replaced


def _moved(value: Any, device: torch.device) -> Any:
    if not isinstance(value, HostMask):
        return value
    return to_device(np.ascontiguousarray(value.as_subclass(Tensor).numpy()), device)


def _index(mask: HostMask, device: torch.device) -> tuple[Tensor, ...]:
    """Return the positions of the mask's true values along each axis, int64 on `device`, as `nonzero` does."""
    kept: dict[torch.device, tuple[Tensor, ...]] = vars(mask).setdefault("positions", {})
    if device not in kept:
        positions = np.nonzero(mask.as_subclass(Tensor).numpy())
        kept[device] = tuple(to_device(np.ascontiguousarray(axis), device) for axis in positions)
    return kept[device]


def _indexed(x: Tensor, index: Any) -> Any:
    """Replace the masks in an index of `x` by positions."""
    if isinstance(x, HostMask):
        return index
    parts = index if isinstance(index, tuple) else (index,)
    return tuple(
        position for part in parts for position in (_index(part, x.device) if isinstance(part, HostMask) else (part,))
    )


def _get(x: Tensor, index: Any) -> Any:
    return NotImplemented if isinstance(x, HostMask) else x[_indexed(x, index)]


def _set(x: Tensor, index: Any, value: Any) -> Any:
    x[_indexed(x, index)] = value


def _count(mask: Tensor, *axes: Any) -> Any:
    return NotImplemented if axes else int(np.count_nonzero(mask.numpy()))


def _to(mask: Tensor, *target: Any) -> Any:
    """A mask stays on the host when a model moves it to its device."""
    is_device = isinstance(mask, HostMask) and isinstance(target[0], str | torch.device)
    return mask if is_device else NotImplemented


def _expand_as(mask: Tensor, other: Tensor) -> Any:
    return mask.expand(other.shape).as_subclass(HostMask)


def _masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Any:
    """Insert the next rows of `source`, [..., D], at every token of the mask: [1, T, 1], or expanded to [1, T, D]."""
    whole_tokens = isinstance(mask, HostMask) and mask.ndim == x.ndim and 0 in (mask.shape[-1] - 1, mask.stride(-1))
    if not whole_tokens or mask.shape[:-1] != x.shape[:-1]:
        return NotImplemented
    tokens = mask[..., 0].numpy()
    index = to_device(np.flatnonzero(tokens), x.device)
    rows = source.reshape(-1, x.shape[-1])[: len(index)]
    return x.flatten(0, -2).index_copy(0, index, rows).view(x.shape)


_REPLACED: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _get,
    Tensor.__setitem__: _set,
    Tensor.sum: _count,
    Tensor.to: _to,
    Tensor.expand_as: _expand_as,
    Tensor.masked_scatter: _masked_scatter,
}
"""Functions of tensors that are computed in another way; each may return NotImplemented."""
