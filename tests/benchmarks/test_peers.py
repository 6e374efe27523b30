"""Peers get the same samples as we do, are timed only where both give the same, and are skipped where they are not."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.command import CASES
from benchmarks.figures import BenchSettings, Figure, Skipped
from benchmarks.peers import PEERS, PeerShapes, projects
from benchmarks.peers.contest import Contest, Peer, PeerWork, Sample, Way, check_equal, read_padded, read_row
from vlmpack.errors import ConfigError, VlmpackError
from vlmpack.layout import IGNORE

QUICK = BenchSettings(seconds=0.0)
TINY = PeerShapes(lengths=(12, 9, 15), grid=(1, 4, 4), planned=50)
OTHERS = tuple(peer for peer in PEERS if peer.distribution != "transformers")


@pytest.fixture(scope="module")
def work() -> PeerWork:
    return PeerWork.of(TINY)


def samples(work: PeerWork) -> list[Sample]:
    """What everybody has to find in a batch of the samples of text."""
    return [
        Sample(
            input_ids=tuple(one["input_ids"]),
            targets=(*one["labels"][1:], IGNORE),
            positions=(tuple(range(len(one["input_ids"]))),),
        )
        for one in work.lists
    ]


# ---------------------------------------------------------------------- the samples


def test_samples_are_tokenised_labelled_and_of_the_lengths_that_were_asked_for(work: PeerWork) -> None:
    assert tuple(len(one["input_ids"]) for one in work.lists) == TINY.lengths
    for listed, tensor, image in zip(work.lists, work.tensors, work.images, strict=True):
        assert listed == {name: column.tolist() for name, column in tensor.items()}
        learnt = [label for label in listed["labels"] if label != IGNORE]
        assert listed["labels"] == [IGNORE] * (len(listed["labels"]) - len(learnt)) + learnt
        assert learnt == listed["input_ids"][-len(learnt) :]
        assert int((image["input_ids"] == work.processor.image_token_id).sum()) == 4
        assert image["pixel_values"].shape[0] == 16


def test_the_padded_batch_holds_the_same_samples(work: PeerWork) -> None:
    found = read_padded(work.padded())
    assert found == [replace(one, positions=None) for one in samples(work)]


# ---------------------------------------------------------------------- equal, or not timed


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_ours_gives_what_an_installed_peer_gives(peer: Peer, work: PeerWork) -> None:
    try:
        module = peer.load()
    except ConfigError as error:
        assert peer in OTHERS
        pytest.skip(str(error))
    contests = peer.contests(module, work)
    assert contests
    for contest in contests:
        check_equal(contest)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_peer_whose_samples_differ_is_not_timed(place: int, work: PeerWork, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = samples(work)
    changed[1] = replace(changed[1], **[{"input_ids": (7,)}, {"targets": (7,)}, {"positions": None}][place])
    contest = Contest(
        peer=Way(call=lambda: changed, read=lambda found: found),
        vlmpack={"mine": Way(call=lambda: samples(work), read=lambda found: found)},
    )
    name = ("input_ids", "targets", "positions")[place]
    with pytest.raises(VlmpackError, match=f"not that of mine: sample 1 has other {name}$"):
        check_equal(contest)
    monkeypatch.setattr(projects, "PEERS", (replace(PEERS[0], contests=lambda module, given: [contest]),))
    (skipped,) = projects.measure_peers(QUICK, TINY)
    assert isinstance(skipped, Skipped)
    assert skipped.owed
    assert f"sample 1 has other {name}" in skipped.why


def test_missing_samples_and_other_numbers_are_told() -> None:
    def contest(theirs: object, ours: object) -> Contest:
        return Contest(
            peer=Way(call=lambda: theirs, read=lambda found: found),
            vlmpack={"mine": Way(call=lambda: ours, read=lambda found: found)},
        )

    check_equal(contest((3, True), (3, True)))
    with pytest.raises(VlmpackError, match=r"\(3, True\), and not \(4, True\)"):
        check_equal(contest((3, True), (4, True)))
    with pytest.raises(VlmpackError, match="0 samples, and not 1"):
        check_equal(contest([], [Sample(input_ids=(1,), targets=(IGNORE,))]))


# ---------------------------------------------------------------------- reading what peers give


def test_a_row_is_read_by_its_boundaries_whether_labels_are_shifted_or_not(work: PeerWork) -> None:
    ids, labels, targets = (
        torch.tensor([value for one in samples(work) for value in column(one)])
        for column in (lambda one: one.input_ids, lambda one: (IGNORE, *one.targets[:-1]), lambda one: one.targets)
    )
    positions = torch.cat([torch.arange(n) for n in TINY.lengths])
    boundaries = [0, *accumulate(TINY.lengths)]
    plain = {"input_ids": ids[None], "labels": labels[None], "position_ids": positions[None]}
    assert read_row(plain, boundaries) == samples(work)
    assert read_row({**plain, "labels": targets}, torch.tensor(boundaries), shifted=True) == samples(work)  # type: ignore[arg-type]
    three = read_row({**plain, "position_ids": positions.expand(3, 1, -1)}, boundaries)
    assert [one.positions for one in three] == [one.positions * 3 for one in samples(work) if one.positions]


def test_a_sample_can_lose_its_last_token() -> None:
    sample = Sample(input_ids=(1, 2), targets=(2, IGNORE), positions=((0, 1),))
    assert sample.without_last_token() == Sample(input_ids=(1,), targets=(2,), positions=((0,),))


# ---------------------------------------------------------------------- stand-ins for peers that are rarely installed


def bridge_rows(rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """What Megatron-Bridge gives for rows."""
    names = ("input_ids", "labels", "position_ids")
    row = {name: torch.cat([one[name] for one in rows])[None] for name in names}
    lengths = [len(one["input_ids"]) for one in rows]
    return {**row, "cu_seqlens_q": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)}


def bridge_padded(batch: dict[str, torch.Tensor]) -> None:
    """What it does to a padded batch, in place."""
    names = ("input_ids", "labels", "position_ids")
    real = [mask != 0 for mask in batch["attention_mask"]]
    batch.update(bridge_rows([{name: batch[name][i][keep] for name in names} for i, keep in enumerate(real)]))


def bridge_batch(ids: Any, labels: Any, loss_mask: Any, attention_mask: Any, positions: Any) -> tuple[Any, ...]:
    """What its older function gives: lengths are taken from the ids."""
    given = {"input_ids": ids, "labels": labels, "position_ids": positions, "attention_mask": ids != 0}
    bridge_padded(given)
    boundaries = given["cu_seqlens_q"]
    return given["input_ids"], given["labels"], loss_mask, None, given["position_ids"], boundaries, boundaries.diff()


STAND_INS = {
    "megatron.bridge.data.packing.in_batch": {
        "build_mcore_thd_sequence_batch_from_rows": bridge_rows,
        "pack_right_padded_sequence_batch_to_mcore_thd": bridge_padded,
    },
    "megatron.bridge.training.vlm_step": {"pack_batch_sequences": bridge_batch},
}


@pytest.mark.parametrize("name", STAND_INS)
def test_megatron_bridge_is_asked_and_read_as_its_functions_are_written(name: str, work: PeerWork) -> None:
    (peer,) = (peer for peer in PEERS if peer.module == name)
    module = ModuleType(name)
    vars(module).update(STAND_INS[name])
    assert set(peer.names) == set(STAND_INS[name])
    contests = peer.contests(module, work)
    assert contests
    for contest in contests:
        check_equal(contest)


# ---------------------------------------------------------------------- the case


@pytest.mark.full
def test_peers_that_cannot_be_imported_are_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for peer in OTHERS:
        monkeypatch.setitem(sys.modules, peer.module, None)
    found = CASES["peers"].run(QUICK, TINY)
    skipped = {one.name: one for one in found if isinstance(one, Skipped)}
    assert list(skipped) == [peer.name for peer in OTHERS]
    assert all(f"{peer.module} cannot be imported (" in skipped[peer.name].why for peer in OTHERS)
    assert not any(one.owed for one in skipped.values())
    figures = [one for one in found if isinstance(one, Figure)]
    assert [figure.unit for figure in figures] == ["s", "x", "s", "x", "x", "s", "x", "x"]
    assert all(figure.value > 0 and figure.case == "peers" for figure in figures)
    assert len({figure.name for figure in figures}) == len(figures)
    assert [figure.target.limit for figure in figures if figure.target] == [2.0] * 5


def test_a_module_without_the_function_is_skipped_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = OTHERS[0]
    monkeypatch.setitem(sys.modules, peer.module, ModuleType(peer.module))
    with pytest.raises(ConfigError, match=f"{peer.module} has no {peer.names[0]} in {peer.distribution} "):
        peer.load()


def test_whatever_breaks_at_import_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "broken_peer.py").write_text("raise OSError('libcuda.so.1: cannot open\\nmore lines')")
    monkeypatch.syspath_prepend(str(tmp_path))
    peer = replace(OTHERS[0], module="broken_peer")
    with pytest.raises(ConfigError, match=r"broken_peer cannot be imported \(OSError: libcuda.so.1: cannot open\)$"):
        peer.load()
