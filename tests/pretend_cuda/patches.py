"""`torch.cuda` of the device: what a CPU build of PyTorch leaves out of it."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, final

import torch

NAME = "Pretend H100"
CAPABILITY = (9, 0)
MODES = {"default": 0, "warn": 1, "error": 2}

device = torch.ops.pretend_cuda


@final
class Stream:
    """The one stream. What is queued has run at once, but for copies that are waited for."""

    cuda_stream = 0
    device = torch.device("cuda", 0)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        device.synchronize()

    def query(self) -> bool:
        return True

    def wait_stream(self, _: Any) -> None:
        pass

    def wait_event(self, _: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


@final
class Event:
    """A point in time of the one stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._time = 0.0

    def record(self, *_: Any) -> None:
        self._time = time.perf_counter()

    def wait(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        device.synchronize()

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: Event) -> float:
        return 1000 * (later._time - self._time)


class _Device(contextlib.nullcontext):
    """`with torch.cuda.device(0)`."""

    def __init__(self, *_: Any) -> None:
        super().__init__()


def _properties(*_: Any) -> SimpleNamespace:
    major, minor = CAPABILITY
    return SimpleNamespace(
        name=NAME,
        major=major,
        minor=minor,
        total_memory=device.total(),
        multi_processor_count=132,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=232448,
        L2_cache_size=50 << 20,
        warp_size=32,
        gcnArchName="",
        uuid="0",
    )


def _set_sync_debug_mode(mode: int | str) -> None:
    if not _set_sync_debug_mode.__dict__.setdefault("warned", False):
        _set_sync_debug_mode.warned = True  # pyright: ignore[reportFunctionMemberAccess]
        warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=2)
    device.set_sync_mode(MODES[mode] if isinstance(mode, str) else mode)


CUDA: dict[str, Any] = {
    # the device
    "can_device_access_peer": lambda *_: False,
    "current_device": lambda: 0,
    "device": _Device,
    "device_count": lambda: 1,
    "get_arch_list": lambda: ["sm_90"],
    "get_device_capability": lambda *_: CAPABILITY,
    "get_device_name": lambda *_: NAME,
    "get_device_properties": _properties,
    "init": lambda: None,
    "is_available": lambda: True,
    "is_bf16_supported": lambda *_, **__: True,
    "is_initialized": lambda: True,
    "set_device": lambda _: None,
    "utilization": lambda *_: 0,
    "_is_in_bad_fork": lambda: False,
    "_lazy_init": lambda: None,
    # waiting
    "Event": Event,
    "Stream": Stream,
    "current_stream": Stream,
    "default_stream": Stream,
    "get_sync_debug_mode": device.sync_mode,
    "is_current_stream_capturing": lambda: False,
    "set_sync_debug_mode": _set_sync_debug_mode,
    "stream": lambda _: contextlib.nullcontext(),
    "synchronize": lambda *_: device.synchronize(),
    # memory
    "empty_cache": lambda: None,
    "ipc_collect": lambda: None,
    "max_memory_allocated": lambda *_: device.peak(),
    "max_memory_reserved": lambda *_: device.peak(),
    "mem_get_info": lambda *_: (device.total() - device.allocated(), device.total()),
    "memory_allocated": lambda *_: device.allocated(),
    "memory_reserved": lambda *_: device.allocated(),
    "memory_stats": lambda *_: defaultdict(int),
    "reset_peak_memory_stats": lambda *_: device.reset_peak(),
    # random numbers
    "get_rng_state": lambda *_: device.get_rng_state(),
    "get_rng_state_all": lambda: [device.get_rng_state()],
    "initial_seed": lambda: 0,
    "manual_seed": lambda seed: device.seed(seed),
    "manual_seed_all": lambda seed: device.seed(seed),
    "seed": lambda: device.seed(time.time_ns()),
    "set_rng_state": lambda state, *_, **__: device.set_rng_state(state),
    "set_rng_state_all": lambda states: device.set_rng_state(states[0]),
}
COMPILED: dict[str, Any] = {
    "_cuda_emptyCache": lambda: None,
    "_cuda_exchangeDevice": lambda _: 0,
    "_cuda_getCurrentRawStream": lambda _: 0,
    "_cuda_getDevice": lambda: 0,
    "_cuda_getDeviceCount": lambda: 1,
    "_cuda_isCurrentStreamCapturing": lambda: False,
    "_cuda_isInBadFork": lambda: False,
    "_cuda_maybeExchangeDevice": lambda _: 0,
    "_cuda_setDevice": lambda _: None,
    "_cuda_synchronize": device.synchronize,
}


def apply() -> None:
    """Patch `torch.cuda`, and what it is called by elsewhere."""
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams):
        for name, value in CUDA.items():
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, value)
    for name, value in COMPILED.items():
        if not hasattr(torch._C, name):
            setattr(torch._C, name, value)
    torch.version.cuda = "13.0"
    for storage in (torch.UntypedStorage, torch.storage._StorageBase):
        storage.clone = _cloned  # pyright: ignore[reportAttributeAccessIssue]
        storage.to = _moved  # pyright: ignore[reportAttributeAccessIssue]


# ---------------------------------------------------------------------- storages: a CPU build makes none on "cuda"

_clone, _move = torch.storage._StorageBase.clone, torch.storage._StorageBase.to


def _cloned(storage: Any) -> Any:
    return _move_by_tensor(storage, storage.device, copy=True) if storage.device.type == "cuda" else _clone(storage)


def _moved(storage: Any, *, device: Any, non_blocking: bool = False) -> Any:
    if "cuda" not in (torch.device(device).type, storage.device.type):
        return _move(storage, device=device, non_blocking=non_blocking)
    return _move_by_tensor(storage, torch.device(device), non_blocking=non_blocking)


def _move_by_tensor(storage: Any, device: torch.device, **how: bool) -> Any:
    entries = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return entries.to(device, **how).untyped_storage()
