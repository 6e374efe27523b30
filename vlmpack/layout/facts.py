"""What a batch says twice, to the host and in tensors: read from the tensor where the host was not told it, otherwise
compared with it where the tensor lies."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vlmpack.errors import LayoutError
from vlmpack.layout.batch import FACTS_KEY, Grid
from vlmpack.layout.device import require, to_device

_CHANGED = (
    "{} is not what the host facts ("
    + repr(FACTS_KEY)
    + ") say of this batch, so images or videos were changed behind "
    "the collator; reorder samples before it, or leave the facts out of the batch"
)
_ROUNDED = 1e-2
"""How far seconds may be from those of the host: loops that run in bfloat16 round whatever a batch holds."""


def host_grids(known: tuple[Grid, ...], tensor: torch.Tensor | None, name: str) -> tuple[Grid, ...]:
    """Grids of images or videos. Without those of the host, a device is waited for.

    Raises:
        LayoutError: no tensor [N, 3] of whole numbers; the host was told others, or another number of them.
    """
    if tensor is None:
        return ()
    if not isinstance(tensor, torch.Tensor) or tensor.ndim != 2 or tensor.shape[1] != 3 or not _is_whole(tensor):
        seen = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise LayoutError(
            f"{name} must be a tensor [N, 3] of whole numbers (frames, rows, columns of each), got {seen}; keep what "
            "the processor gives with return_tensors='pt'"
        )
    if not known:
        return tuple((int(t), int(h), int(w)) for t, h, w in tensor.tolist())
    if len(known) != tensor.shape[0]:
        raise LayoutError(
            f"the host knows {len(known)} grids but {name} is {list(tensor.shape)}; was the batch split or "
            "concatenated on its way (accelerate: set dispatch_batches=False)?"
        )
    told = to_device(np.asarray(known, np.int64), tensor.device)
    require((tensor == told).all(), _CHANGED.format(name), LayoutError)
    return known


def _is_whole(tensor: torch.Tensor) -> bool:
    """Of a type that transformers can count frames in."""
    return tensor.dtype in (torch.int64, torch.int32)


def seconds_of(given: Any) -> torch.Tensor:
    """Seconds from one grid of each video to the next as a tensor [N], of a list, [N] or [N, 1].

    Raises:
        LayoutError: anything else.
    """
    try:
        tensor = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        tensor = torch.zeros(1, 0, 0)
    if tensor.ndim not in (1, 2) or tensor.shape[1:].numel() != 1 or tensor.is_complex() or tensor.dtype == torch.bool:
        raise LayoutError(
            "second_per_grid_ts must be one number for each video, in a list or a tensor [N] or [N, 1]; got "
            f"{list(tensor.shape) if isinstance(given, torch.Tensor) else repr(given)[:80]}"
        )
    return tensor.reshape(-1)


def host_seconds(known: tuple[float, ...], given: torch.Tensor) -> tuple[float, ...]:
    """Seconds from one grid of each video to the next, [N]. Without those of the host, a device is waited for.

    Raises:
        LayoutError: the host was told others.
    """
    if not known:
        return tuple(given.tolist())
    told = to_device(np.asarray(known, np.float32), given.device)
    close = torch.isclose(given.float(), told, rtol=_ROUNDED) if given.shape == told.shape else given.new_zeros(1)
    require(close.all(), _CHANGED.format("second_per_grid_ts"), LayoutError)
    return known
