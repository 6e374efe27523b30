"""Rows for a training loop: the rows of a plan, or rows packed from a stream of samples."""

from __future__ import annotations

from vlmpack.loading.sampler import PackedBatchSampler
from vlmpack.loading.stream import PackedStream, StreamLoader
from vlmpack.loading.stream_packer import RowSettings, SharedPrefix, StreamPacker

__all__ = ["PackedBatchSampler", "PackedStream", "RowSettings", "SharedPrefix", "StreamLoader", "StreamPacker"]
