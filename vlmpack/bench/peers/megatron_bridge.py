"""Megatron-Bridge: rows of tensors joined for Megatron-Core, and what it did with a padded batch before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from vlmpack.bench.peers.contest import Contest, Peer, Sample, Way, read_row
from vlmpack.bench.peers.ours import rows_joined
from vlmpack.bench.peers.work import PeerWork
from vlmpack.layout import IGNORE, PackedRow, PaddedBatch, pack


def _rows(in_batch: ModuleType, work: PeerWork) -> Sequence[Contest]:
    """It checks shapes, as we do; positions are given to it, one row of them, while we compute ours."""
    rows = [{**sample, "position_ids": torch.arange(len(sample["input_ids"]))} for sample in work.tensors]
    batch = work.padded()

    def join_padded() -> Mapping[str, Any]:
        given = dict(batch)
        in_batch.pack_right_padded_sequence_batch_to_mcore_thd(given)
        return given

    return [
        Contest(
            theirs=Way(call=lambda: in_batch.build_mcore_thd_sequence_batch_from_rows(rows), read=_read),
            ours={"RowCollator": rows_joined(work.tensors)},
            work="tensors, positions given",
        ),
        Contest(
            theirs=Way(call=join_padded, read=_read),
            ours={"pack": _packed(batch)},
            work="a padded batch",
        ),
    ]


def _batch(vlm_step: ModuleType, work: PeerWork) -> Sequence[Contest]:
    """It takes lengths from the ids, so that a real token of the padding's id at a sample's end would be cut off."""
    batch = work.padded()
    loss_mask = (batch["labels"] != IGNORE).float()

    def call() -> Mapping[str, Any]:
        names = ("input_ids", "labels", "loss_mask", "attention_mask", "position_ids", "cu_seqlens_q", "max_seqlen")
        values = vlm_step.pack_batch_sequences(
            batch["input_ids"], batch["labels"], loss_mask, None, batch["position_ids"]
        )
        return dict(zip(names, values, strict=True))

    return [
        Contest(
            theirs=Way(call=call, read=_read),
            ours={"pack": _packed(batch, loss_mask=loss_mask)},
            work="a padded batch",
        )
    ]


def _packed(batch: Mapping[str, Any], **extras: torch.Tensor) -> Way:
    """`pack` without host metadata: the mask is read and checked."""
    padded = PaddedBatch(**batch, extras=extras)

    def read(row: PackedRow) -> list[Sample]:
        found = {"input_ids": row.input_ids, "labels": row.shift_labels, "position_ids": row.position_ids}
        return read_row(found, row.segments.real, shifted=True)

    return Way(call=lambda: pack(padded), read=read)


def _read(row: Mapping[str, Any]) -> list[Sample]:
    return read_row(row, row["cu_seqlens_q"])


ROWS = Peer(
    name="Megatron-Bridge",
    distribution="megatron-bridge",
    module="megatron.bridge.data.packing.in_batch",
    names=("build_mcore_thd_sequence_batch_from_rows", "pack_right_padded_sequence_batch_to_mcore_thd"),
    contests=_rows,
)
BATCH = Peer(
    name="Megatron-Bridge, pack_batch_sequences",
    distribution="megatron-bridge",
    module="megatron.bridge.training.vlm_step",
    names=("pack_batch_sequences",),
    contests=_batch,
)
