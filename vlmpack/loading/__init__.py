"""Rows for a training loop: dealt from a plan, or packed from a stream of samples as they come."""

from __future__ import annotations

from vlmpack.loading.resumable import MapStyle, check_samples, sample_at
from vlmpack.loading.sampler import PackedBatchSampler, Remainder
from vlmpack.loading.state import digest_of
from vlmpack.loading.stream import PackedStream
from vlmpack.loading.stream_groups import SharedPrefix
from vlmpack.loading.stream_packer import RowSettings, StreamPacker, token_count

__all__ = [
    "MapStyle",
    "PackedBatchSampler",
    "PackedStream",
    "Remainder",
    "RowSettings",
    "SharedPrefix",
    "StreamPacker",
    "check_samples",
    "digest_of",
    "sample_at",
    "token_count",
]
