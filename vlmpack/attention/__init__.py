"""Attention back-ends, one final class each, and the choice among them: block-diagonal causal (document) attention."""

from __future__ import annotations

from vlmpack.attention.backend import AttentionCall, Backend
from vlmpack.attention.eager_mask import EagerMask
from vlmpack.attention.sdpa_segments import SdpaSegments
from vlmpack.attention.varlen import FlashAttn, TorchVarlen
from vlmpack.errors import BackendError

__all__ = ["AUTO", "BACKENDS", "AttentionCall", "Backend", "EagerMask", "choose", "explain"]

AUTO = "auto"

BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (TorchVarlen(), FlashAttn(), SdpaSegments(), EagerMask())
}
"""In the order in which "auto" tries them."""


def choose(call: AttentionCall, name: str = AUTO) -> Backend:
    """Choose the back-end for `call`: the named one, or with "auto" the first that can.

    Raises:
        BackendError: no back-end of that name, or the named one cannot serve the call, with its reasons. A named
            back-end is never exchanged for another.
    """
    if name == AUTO:
        return next(backend for backend in BACKENDS.values() if not backend.unsupported(call))
    if name not in BACKENDS:
        raise BackendError(f"there is no attention back-end {name!r}; choose one of {[AUTO, *BACKENDS]}")
    reasons = BACKENDS[name].unsupported(call)
    if reasons:
        raise BackendError(f"attention back-end {name!r} cannot serve this call: {'; '.join(reasons)}")
    return BACKENDS[name]


def explain(call: AttentionCall) -> dict[str, list[str]]:
    """Return every back-end's reasons for not serving `call`, in the order in which "auto" tries them."""
    return {name: backend.unsupported(call) for name, backend in BACKENDS.items()}
