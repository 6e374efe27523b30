"""Tiny models and processors, synthetic receipts and samples, and the comparison of packed samples with each alone."""

from __future__ import annotations

from vlmpack.testing.models import TinySizes, tiny_config, tiny_model
from vlmpack.testing.processors import tiny_processor
from vlmpack.testing.receipts import SyntheticReceipts, receipt_conversations
from vlmpack.testing.samples import Sample, alone, branches_of, build_sample, joined, mixed_samples, padded

__all__ = [
    "Sample",
    "SyntheticReceipts",
    "TinySizes",
    "alone",
    "branches_of",
    "build_sample",
    "joined",
    "mixed_samples",
    "padded",
    "receipt_conversations",
    "tiny_config",
    "tiny_model",
    "tiny_processor",
]
