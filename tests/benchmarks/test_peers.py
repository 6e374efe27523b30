"""Peers get the same samples as we do, and are timed only where both give the same."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import peers
from benchmarks.measuring import BenchSettings, Skipped
from benchmarks.peers import PEERS, Contest, PeerShapes, PeerWork, Sample, Way, difference
from vlmpack.layout.batch import IGNORE

QUICK = BenchSettings(seconds=0.0)
TINY = PeerShapes(lengths=(12, 9, 15), grid=(1, 4, 4))


@pytest.fixture(scope="module")
def work() -> PeerWork:
    return PeerWork(TINY, seed=0)


def samples(work: PeerWork) -> list[Sample]:
    """What everybody has to find in a batch of the samples of text."""
    return [
        Sample(tuple(one["input_ids"]), (*one["labels"][1:], IGNORE), (tuple(range(len(one["input_ids"]))),))
        for one in work.lists
    ]


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer[0])
def test_ours_gives_what_an_installed_peer_gives(peer: Any, work: PeerWork) -> None:
    _, distribution, module, make = peer
    loaded = importlib.import_module(module) if distribution == "transformers" else pytest.importorskip(module)
    contests = list(make(loaded, work))
    assert contests
    assert [difference(contest) for contest in contests] == [None] * len(contests)


def test_a_peer_that_gives_something_else_is_not_timed(work: PeerWork, monkeypatch: pytest.MonkeyPatch) -> None:
    def contest(_: Any, __: Any) -> Iterator[Contest]:
        one = Way(call=lambda: samples(work)[1:], read=lambda found: found)
        yield Contest(peer=one, ours={"mine": Way(call=lambda: samples(work), read=lambda found: found)})

    monkeypatch.setattr(peers, "PEERS", (("theirs", "torch", "torch", contest),))
    (skipped,) = peers.measure_peers(QUICK, TINY)
    assert isinstance(skipped, Skipped)
    assert skipped.owed
    assert "its result is not that of mine" in skipped.why
