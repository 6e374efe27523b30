"""Gated delta layers computed by flash-linear-attention (package `fla`): when it is used, when it is wrong, and its
boundaries."""

from __future__ import annotations

import functools
import inspect
import sys
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, final

import numpy as np
import torch
from torch import nn
from torch.torch_version import TorchVersion

from vlmpack.errors import BackendError
from vlmpack.families.family import Family
from vlmpack.layout.segments import Segments, ranges

HOPPER, BLACKWELL = 9, (10, 12)
"""Major compute capability of NVIDIA GPUs."""

CHUNK = 64
"""fla's chunk size in tokens."""

UNKNOWN_CHUNKS = "0.7"
"""First fla version whose chunk size we have not verified."""

_WRAPPED = ("implementation", "func")
"""Closure variables in which wrappers (transformers' dispatcher, `kernels`) keep the wrapped function."""


def uses_fla(family: Family) -> bool:
    """Return whether transformers has bound the recurrence to flash-linear-attention, whose kernel takes boundaries.

    This is decided when the family's module is imported. Any other implementation (PyTorch, a hub kernel) gets whole
    sequences, so it needs no support for boundaries.
    """
    rule = _wrapped(getattr(import_module(family.modeling), "torch_chunk_gated_delta_rule", None))
    return str(getattr(rule, "__module__", "")).split(".")[0] == "fla"


def _wrapped(function: Any) -> Any:
    """Return the innermost wrapped function."""
    called = function.forward if isinstance(function, nn.Module) else function
    if not (inspect.isfunction(called) or inspect.ismethod(called)):
        return called
    kept = inspect.getclosurevars(called).nonlocals
    inner = next((kept[name] for name in _WRAPPED if name in kept), None)
    return called if inner is None else _wrapped(inner)


@final
@dataclass(frozen=True, kw_only=True)
class FlaCall:
    """A call of fla: everything that decides whether fla may serve it."""

    device: str
    """Type of the model's device."""
    chip: int | None
    """Major compute capability of an NVIDIA GPU; None: another device."""
    fla: str
    """Version of fla."""
    triton: str | None
    """Version of Triton, in which fla's kernels are written; None: not loaded."""
    tilelang: bool
    """Whether tilelang is installed. fla uses it where Triton is wrong."""
    training: bool
    """Whether gradients will be computed."""

    @classmethod
    def of(cls, device: torch.device, *, training: bool) -> FlaCall:
        """Describe a call on `device` with the fla that transformers has loaded."""
        is_nvidia = device.type == "cuda" and torch.version.hip is None
        return cls(
            device=device.type,
            chip=torch.cuda.get_device_capability(device)[0] if is_nvidia else None,
            fla=sys.modules["fla"].__version__,
            triton=getattr(sys.modules.get("triton"), "__version__", None),
            tilelang=_is_installed("tilelang"),
            training=training,
        )

    def unsupported(self) -> list[str]:
        """Return the reasons why fla must not serve this call, with remedies; empty: it may."""
        version, reasons = TorchVersion(self.fla), []
        if self.device == "cpu":
            reasons.append(
                "its kernels need a GPU and the model is on the CPU: move the model, or start Python without fla "
                "(transformers binds its layers to it when they are imported)"
            )
        if version < "0.5.0":
            reasons.append(
                "before 0.5.0 it reads value heads that share a query head as if each had its own, and its gradients "
                "are wrong on Hopper with Triton 3.4 and newer: install fla-core 0.5.2 or newer"
            )
        elif self.training and version < "0.5.2" and self.chip in (HOPPER, *BLACKWELL):
            reasons.append(
                "before 0.5.2 its backward pass fails on Hopper, and hangs or gives NaN on Blackwell: install fla-core "
                "0.5.2 or newer"
            )
        if self.training and self.chip == HOPPER and _is_wrong_on_hopper(self.triton) and not self.tilelang:
            reasons.append(
                f"Triton {self.triton} compiles its backward pass wrongly on Hopper: install Triton 3.7.1 or newer, or "
                "tilelang"
            )
        return reasons


def check_fla(device: torch.device, *, training: bool) -> None:
    """Check that fla computes the gated delta rule on `device`, and computes it correctly.

    Raises:
        BackendError: it does not; the message gives reasons and remedies.
    """
    call = FlaCall.of(device, training=training)
    reasons = call.unsupported()
    if reasons:
        raise BackendError(
            f"transformers computes the gated delta layers with fla {call.fla}, which cannot serve this call: "
            + "; ".join(reasons)
        )


def fla_boundaries(pieces: Segments, device: torch.device) -> dict[str, torch.Tensor]:
    """Return keywords that tell fla where the recurrence restarts. transformers drops those that the loaded fla version
    does not take.

    fla reads the edges on the device. It could derive the other two from them, but passing them saves a host–device
    sync.
    """
    edges = {"cu_seq_lens_q": pieces.cu_seqlens(device), "cu_seqlens_cpu": pieces.cu_seqlens("cpu")}
    if TorchVersion(sys.modules["fla"].__version__) >= UNKNOWN_CHUNKS:
        return edges
    return {**edges, "chunk_indices": pieces.derived(("chunks", CHUNK), device, partial(_chunks, pieces))}


def _chunks(pieces: Segments) -> np.ndarray:
    """Return int32 [C, 2]: (piece, chunk within it) for each chunk of at most CHUNK tokens."""
    counts = -(-np.asarray(pieces.lengths) // CHUNK)
    return np.stack([np.repeat(np.arange(len(counts)), counts), ranges(0, counts)], 1).astype(np.int32)


def _is_wrong_on_hopper(triton: str | None) -> bool:
    return triton is not None and "3.4" <= TorchVersion(triton) < "3.7.1"


@functools.cache
def _is_installed(package: str) -> bool:
    return find_spec(package) is not None
