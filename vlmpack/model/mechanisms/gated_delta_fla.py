"""Gated delta layers computed by flash-linear-attention (package `fla`): when it is used, when it is wrong, and its
boundaries."""

from __future__ import annotations

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

OLDEST = "0.5.2"
"""First fla version that is right on every GPU."""

HOPPER = 9
"""Major compute capability of the NVIDIA GPUs on which some versions of Triton are wrong."""

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
            tilelang=find_spec("tilelang") is not None,
            training=training,
        )

    def unsupported(self) -> list[str]:
        """Return the reasons why fla must not serve this call, with remedies; empty: it may."""
        reasons = []
        if self.device == "cpu":
            reasons.append(
                "its kernels need a GPU and the model is on the CPU: move the model, or start Python without fla "
                "(transformers binds its layers to it when they are imported)"
            )
        if TorchVersion(self.fla) < OLDEST:
            reasons.append(
                f"before {OLDEST} it computes other results with fewer query heads than value heads, and its backward "
                f"pass fails or is wrong on newer GPUs: install fla-core {OLDEST} or newer"
            )
        is_wrong = self.triton is not None and "3.4" <= TorchVersion(self.triton) < "3.7.1"
        if self.training and self.chip == HOPPER and is_wrong and not self.tilelang:
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
    if reasons := call.unsupported():
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
