"""Host-device syncs of a `with` block: on CUDA those that PyTorch reports, on a CPU operations that would wait there.

On a CPU, vlmpack takes the code paths of an accelerator (`nothing_on_host`). Blocking copies show on CUDA only, also on
the pretend device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from traceback import FrameSummary
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vlmpack.layout.device import counts_as_device, nothing_on_host
from vlmpack.model.mechanisms.vision import VisionRow
from vlmpack.probing import work

work.PASSED_OVER.add(__file__)
READ = {"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"}
READ |= {"nonzero", "masked_select", "bincount", "_unique", "_unique2", "unique_dim"}
READ |= {"unique_consecutive", "unique_dim_consecutive"}
"""Operations whose result is a Python number, or a tensor whose size depends on values on the device."""
INDEXED = {"index", "_unsafe_index"}
"""`x[mask]`: indexing with a mask is a hidden `nonzero`."""
ASSIGNED = {"index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}
"""`x[mask] = y`: the same, unless `y` is a single number, which is filled in without `nonzero`."""


class HostSync(NamedTuple):
    """The line that waited, and the operation (CUDA names none)."""

    line: FrameSummary
    operation: str = ""


def own_lines(syncs: list[HostSync]) -> list[FrameSummary]:
    """Those of vlmpack's code; the others are the model's."""
    return [sync.line for sync in syncs if Path(sync.line.filename).is_relative_to(work.PACKAGE)]


def towers_get_boundaries_of_the_host() -> AbstractContextManager[Any]:
    """Others would be read from the device by `tolist`, which on a CPU is no operation."""
    return mock.patch.object(VisionRow, "find", lambda row, cu_seqlens, n: row._by_shape[cu_seqlens.numel(), n])


@contextmanager
def recorded_syncs(device: torch.device) -> Iterator[list[HostSync]]:
    syncs: list[HostSync] = []
    if device.type == "cuda":
        with work.recorded_syncs() as lines:
            yield syncs
        syncs += map(HostSync, lines)
    else:
        with nothing_on_host(), Operations(syncs):
            yield syncs


class Operations(TorchDispatchMode):
    """Records every operation that would wait."""

    def __init__(self, syncs: list[HostSync]) -> None:
        super().__init__()
        self.syncs = syncs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if counts_as_device() and waits(func, name, args, kwargs or {}):
            self.syncs.append(HostSync(work.line_outside_torch(), name))
        return func(*args, **(kwargs or {}))


def waits(func: Any, name: str, args: Any, kwargs: Any) -> bool:
    if name == "repeat_interleave":  # with a tensor of repeats, their sum is the output size
        return func._overloadname != "self_int" and kwargs.get("output_size") is None
    if name in INDEXED | ASSIGNED:
        has_mask = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        return has_mask and (name in INDEXED or args[2].dim() > 0)
    return name in READ
