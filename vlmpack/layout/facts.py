"""Grids and seconds of media on the host: from metadata, compared with the tensor on its device, or read from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vlmpack.errors import LayoutError
from vlmpack.layout.batch import FACTS_KEY, Grid
from vlmpack.layout.device import require, to_device

_CHANGED = (
    f"{{}} is not what the host facts ({FACTS_KEY!r}) say of this batch, so images or videos were changed behind the "
    "collator; reorder samples before it, or leave the facts out of the batch"
)
_COUNTS = (torch.int64, torch.int32)
"""Types that transformers can count frames in."""
_ROUNDED = 1e-2
"""How far seconds may be from the metadata, relatively: loops that run in bfloat16 round whatever a batch holds."""


def host_grids(known: tuple[Grid, ...], tensor: torch.Tensor | None, name: str) -> tuple[Grid, ...]:
    """Grids of images or videos on the host; without metadata they are read from the device, one host-device sync.

    Raises:
        LayoutError: no tensor [N, 3] of whole numbers; the metadata has others, or another number of them.
    """
    if tensor is None:
        return ()
    if not isinstance(tensor, torch.Tensor) or tensor.ndim != 2 or tensor.shape[1] != 3 or tensor.dtype not in _COUNTS:
        seen = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise LayoutError(
            f"{name} must be a tensor [N, 3] of whole numbers (frames, rows, columns of each), got {seen}; keep what "
            "the processor gives with return_tensors='pt'"
        )
    if not known:
        return tuple((int(t), int(h), int(w)) for t, h, w in tensor.tolist())
    if len(known) != tensor.shape[0]:
        raise LayoutError(
            f"the metadata has {len(known)} grids but {name} is {list(tensor.shape)}; was the batch split or "
            "concatenated on its way (accelerate: set dispatch_batches=False)?"
        )
    expected = to_device(np.asarray(known, np.int64), tensor.device)
    require((tensor == expected).all(), _CHANGED.format(name), LayoutError)
    return known


def seconds_of(seconds: Any) -> torch.Tensor:
    """Convert the seconds from one grid of each video to the next, a list, [N] or [N, 1], to a tensor [N].

    Raises:
        LayoutError: anything else.
    """
    try:
        tensor = torch.as_tensor(seconds)
    except (TypeError, ValueError, RuntimeError):
        tensor = torch.zeros(1, 0, 0)
    if tensor.ndim not in (1, 2) or tensor.shape[1:].numel() != 1 or tensor.is_complex() or tensor.dtype == torch.bool:
        raise LayoutError(
            "second_per_grid_ts must be one number for each video, in a list or a tensor [N] or [N, 1]; got "
            f"{list(tensor.shape) if isinstance(seconds, torch.Tensor) else repr(seconds)[:80]}"
        )
    return tensor.reshape(-1)


def host_seconds(known: tuple[float, ...], tensor: torch.Tensor) -> tuple[float, ...]:
    """Seconds from one grid of each video to the next, N of them; without metadata read from the device, one sync.

    Raises:
        LayoutError: the metadata has others.
    """
    if not known:
        return tuple(tensor.tolist())
    expected = to_device(np.asarray(known, np.float32), tensor.device)
    is_close = tensor.shape == expected.shape and torch.isclose(tensor.float(), expected, rtol=_ROUNDED).all()
    require(torch.as_tensor(is_close), _CHANGED.format("second_per_grid_ts"), LayoutError)
    return known
