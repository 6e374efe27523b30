"""Attention back-ends and the choice among them: block-diagonal causal (document) attention."""

from __future__ import annotations

from vlmpack.attention.backends import AUTO, BACKENDS, AttentionCall, Backend, EagerMask, choose, explain
from vlmpack.attention.patterns import CAUSAL, EVERYTHING, Pattern, Reach, attended_pairs, visible_keys
from vlmpack.attention.spans import Spans

__all__ = [
    "AUTO",
    "BACKENDS",
    "CAUSAL",
    "EVERYTHING",
    "AttentionCall",
    "Backend",
    "EagerMask",
    "Pattern",
    "Reach",
    "Spans",
    "attended_pairs",
    "choose",
    "explain",
    "visible_keys",
]
