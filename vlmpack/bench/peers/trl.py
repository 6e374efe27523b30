"""TRL: the padding-free batch of its trainer for text. Its packer is measured by the case `plan`."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from vlmpack.bench.peers.contest import Contest, Peer, Way, read_row
from vlmpack.bench.peers.ours import collated, rows_joined
from vlmpack.bench.peers.work import PeerWork


def _padding_free(trl: ModuleType, work: PeerWork) -> Sequence[Contest]:
    """Lists only, which is what its trainer hands it; it also gives `seq_idx`."""
    collate = trl.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    return [
        Contest(
            theirs=Way(call=lambda: collate(work.lists), read=lambda row: read_row(row, row["cu_seq_lens_q"])),
            ours={"RowCollator": rows_joined(work.lists), "VLMCollator": collated(work.lists, work)},
            work="lists",
        )
    ]


PADDING_FREE = Peer(
    name="TRL, padding-free",
    distribution="trl",
    module="trl.trainer.sft_trainer",
    names=("DataCollatorForLanguageModeling",),
    contests=_padding_free,
)
