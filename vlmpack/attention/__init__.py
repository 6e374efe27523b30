"""How a row attends: one final class per back-end, each of which can say why not."""

from __future__ import annotations

from vlmpack.attention.backend import AttentionCall, Backend
from vlmpack.attention.choose import AUTO, BACKENDS, choose, explain
from vlmpack.attention.eager_mask import EagerMask

__all__ = [
    "AUTO",
    "BACKENDS",
    "AttentionCall",
    "Backend",
    "EagerMask",
    "choose",
    "explain",
]
