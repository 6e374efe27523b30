"""Our ways of the work that peers do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vlmpack.bench.peers.contest import Sample, Way, read_row
from vlmpack.bench.peers.work import PeerWork
from vlmpack.collate import VLMCollator
from vlmpack.layout import PackedRow
from vlmpack.text import RowCollator


def rows_joined(features: Sequence[Mapping[str, Any]]) -> Way:
    """Text by `RowCollator`, which checks shapes, with positions and boundaries."""
    collate = RowCollator(bare_row="one_sample")
    return Way(call=lambda: collate(features), read=lambda row: read_row(row, row["cu_seqlens_q"].tolist()))


def collated(features: Sequence[Mapping[str, Any]], work: PeerWork) -> Way:
    """Text by `VLMCollator`, which checks every sample, and its positions, which a step computes by itself."""
    collate = VLMCollator(work.tokenizer, layout="packed")

    def call() -> dict[str, Any]:
        batch = collate(features)
        return {**batch, "position_ids": batch["vlmpack"].segments.position_in_segment()}

    return Way(call=call, read=lambda row: read_row(row, row["cu_seqlens_q"].tolist()))


def collated_images(work: PeerWork) -> Way:
    """Text and images by `VLMCollator`, and the three rows of their positions; without each sample's last token."""
    collate = VLMCollator(work.processor, layout="packed")

    def call() -> tuple[PackedRow, torch.Tensor]:
        row = collate.collate(work.images)
        assert isinstance(row, PackedRow)
        assert row.metadata is not None
        grids = row.metadata.image_grids
        return row, work.family.positions(row.mm_token_type_ids, row.segments, config=work.config, image_grids=grids)

    def read(found: tuple[PackedRow, torch.Tensor]) -> list[Sample]:
        row, position_41T = found
        batch = {"input_ids": row.input_ids, "labels": row.shift_labels, "position_ids": position_41T[1:]}
        return [sample.without_last_token() for sample in read_row(batch, row.segments.real, shifted=True)]

    return Way(call=call, read=read)
