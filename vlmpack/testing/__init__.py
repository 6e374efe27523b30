"""Tiny models and processors, drawn receipts, and synthetic samples: for tests, demos, the probe and benchmarks."""

from __future__ import annotations

from vlmpack.testing.measures import field_f1, nted_accuracy
from vlmpack.testing.models import TinySizes, tiny_config, tiny_model
from vlmpack.testing.processors import CHAT_TEMPLATE, tiny_processor
from vlmpack.testing.receipts import SMALLEST_LEGIBLE, SyntheticReceipts, receipt_conversations
from vlmpack.testing.samples import (
    KINDS,
    TEXT_ONLY,
    TOKEN_KEYS,
    VISION,
    Kind,
    Sample,
    alone,
    build_sample,
    grids_of,
    kind_of,
    kinds_of,
    media_of,
    metadata_of,
    mixed_samples,
    num_targets,
    padded,
    patch_channels,
    perturbed,
    processed_samples,
    random_sample,
    synthetic_samples,
    with_adversarial_lengths,
    word_ids,
)

__all__ = [
    "CHAT_TEMPLATE",
    "KINDS",
    "SMALLEST_LEGIBLE",
    "TEXT_ONLY",
    "TOKEN_KEYS",
    "VISION",
    "Kind",
    "Sample",
    "SyntheticReceipts",
    "TinySizes",
    "alone",
    "build_sample",
    "field_f1",
    "grids_of",
    "kind_of",
    "kinds_of",
    "media_of",
    "metadata_of",
    "mixed_samples",
    "nted_accuracy",
    "num_targets",
    "padded",
    "patch_channels",
    "perturbed",
    "processed_samples",
    "random_sample",
    "receipt_conversations",
    "synthetic_samples",
    "tiny_config",
    "tiny_model",
    "tiny_processor",
    "with_adversarial_lengths",
    "word_ids",
]
