"""Other projects that turn tokenised samples into a batch, one file each, held against ours on the same samples.

None is a dependency: whatever cannot be imported is skipped, with the reason.
"""

from __future__ import annotations

from vlmpack.bench.peers import automodel, hugging_face, megatron_bridge, seqpacker, trl
from vlmpack.bench.peers.contest import TWICE, Contest, Peer, Sample, Way, check_equal
from vlmpack.bench.peers.work import PeerShapes, PeerWork

PEERS: tuple[Peer, ...] = (
    hugging_face.PADDED,
    hugging_face.FLATTENING,
    trl.PADDING_FREE,
    seqpacker.COLLATE,
    seqpacker.PLAN,
    megatron_bridge.ROWS,
    megatron_bridge.BATCH,
    automodel.ROW,
)
"""In the order in which they are measured."""

__all__ = ["PEERS", "TWICE", "Contest", "Peer", "PeerShapes", "PeerWork", "Sample", "Way", "check_equal"]
