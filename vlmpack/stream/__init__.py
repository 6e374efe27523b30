"""Rows for a training loop: dealt from a plan, or packed from a stream of samples as they come."""

from __future__ import annotations

from vlmpack.stream.packer import StreamPacker, token_count
from vlmpack.stream.sampler import PackedBatchSampler, Remainder
from vlmpack.stream.settings import RowSettings
from vlmpack.stream.stream import PackedStream

__all__ = ["PackedBatchSampler", "PackedStream", "Remainder", "RowSettings", "StreamPacker", "token_count"]
