"""Other projects that turn tokenised samples into a batch, compared with ours on the same samples.

None is a dependency: a project that cannot be imported is skipped, with the reason.
"""

from __future__ import annotations

from benchmarks.peers.contest import PeerShapes
from benchmarks.peers.projects import PEERS, measure_peers

__all__ = ["PEERS", "PeerShapes", "measure_peers"]
