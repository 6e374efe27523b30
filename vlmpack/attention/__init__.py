"""Attention back-ends and the choice among them: block-diagonal causal (document) attention."""

from __future__ import annotations

from vlmpack.attention.backends import AUTO, BACKENDS, AttentionCall, Backend, EagerMask, choose, explain

__all__ = ["AUTO", "BACKENDS", "AttentionCall", "Backend", "EagerMask", "choose", "explain"]
