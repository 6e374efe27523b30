"""Rows for a training loop: dealt from a plan, or packed from a stream of samples as they come."""

from __future__ import annotations

from vlmpack.loading.sampler import PackedBatchSampler
from vlmpack.loading.stream import PackedStream, StreamLoader
from vlmpack.loading.stream_packer import RowSettings, SharedPrefix, StreamPacker

__all__ = [
    "PackedBatchSampler",
    "PackedStream",
    "RowSettings",
    "SharedPrefix",
    "StreamLoader",
    "StreamPacker",
]
