"""transformers itself: the padded batch, and the flattened row of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from vlmpack.bench.peers.contest import Contest, Peer, Way, read_padded, read_row
from vlmpack.bench.peers.ours import collated, rows_joined
from vlmpack.bench.peers.work import PeerWork
from vlmpack.collate import VLMCollator


def _padded(transformers: ModuleType, work: PeerWork) -> Sequence[Contest]:
    collate = transformers.DataCollatorForSeq2Seq(work.tokenizer)
    ours = VLMCollator(work.tokenizer, layout="padded")
    features = [{**sample, "attention_mask": [1] * len(sample["input_ids"])} for sample in work.lists]
    return [
        Contest(
            theirs=Way(call=lambda: collate(features), read=read_padded),
            ours={"VLMCollator": Way(call=lambda: ours(work.lists), read=read_padded)},
        )
    ]


def _flattened(transformers: ModuleType, work: PeerWork) -> Sequence[Contest]:
    """`seq_idx` is left out: it says again what the boundaries say."""
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)

    def contest(kind: str, features: Sequence[Mapping[str, Any]]) -> Contest:
        return Contest(
            theirs=Way(call=lambda: collate(features), read=lambda row: read_row(row, row["cu_seq_lens_q"])),
            ours={"RowCollator": rows_joined(features), "VLMCollator": collated(features, work)},
            work=kind,
        )

    return [contest("lists", work.lists), contest("tensors", work.tensors)]


PADDED = Peer(
    name="Hugging Face, DataCollatorForSeq2Seq",
    distribution="transformers",
    module="transformers.data.data_collator",
    names=("DataCollatorForSeq2Seq",),
    contests=_padded,
)
FLATTENING = Peer(
    name="Hugging Face, DataCollatorWithFlattening",
    distribution="transformers",
    module="transformers.data.data_collator",
    names=("DataCollatorWithFlattening",),
    contests=_flattened,
)
