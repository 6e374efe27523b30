"""Packed rows in the installed megatron-core's own roll and cut: where it is right, and where it is wrong unnoticed."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron_models import import_megatron

from vlmpack.context_parallel.partition import Partition
from vlmpack.errors import LayoutError
from vlmpack.interop.megatron import packed_seq_params, to_megatron
from vlmpack.layout import IGNORE, PackedRow, Segments, SlotRule, roll_left

VECTORS = Path(__file__).parents[1] / "vectors"
ROLLS = json.loads((VECTORS / "roll.json").read_text())["cases"]
CUTS = json.loads((VECTORS / "context_parallel.json").read_text())

lengths_lists = st.lists(st.integers(1, 9), min_size=1, max_size=6)
rules = st.builds(SlotRule, multiple=st.integers(1, 5), row_multiple=st.integers(1, 13))


@pytest.fixture(scope="module", autouse=True)
def megatron_core() -> None:
    import_megatron()


def row_of(lengths, rule=None, **more) -> PackedRow:
    """Ids from 1, a target (the next id) on every real token but the last of its segment and every third."""
    segments = Segments.from_lengths(lengths, rule)
    ids = torch.arange(1, segments.total + 1)[None].masked_fill(segments.padding_mask(), 0)
    labels = roll_left(ids, segments, fill=IGNORE).masked_fill(ids % 3 == 0, IGNORE)
    return PackedRow(input_ids=ids, segments=segments, shift_labels=labels, **more)


# ---------------------------------------------------------------------- megatron-core's own roll


def roll_of_megatron(tensor: torch.Tensor, params: Any, cp_group: Any = None) -> torch.Tensor:
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    return roll_tensor(tensor, shifts=-1, dims=-1, packed_seq_params=params, cp_group=cp_group)[0]


@given(lengths=lengths_lists)
def test_its_roll_and_ours_agree_on_rows_without_gaps(lengths):
    row = row_of(lengths)
    theirs = roll_of_megatron(row.input_ids, packed_seq_params(row.segments))
    assert torch.equal(theirs, roll_left(row.input_ids, row.segments, fill=0))


def test_its_roll_crosses_boundaries_where_a_row_has_gaps_and_ours_does_not():
    case = next(c for c in ROLLS if c.get("name") == "gaps, cp 1")
    segments = Segments.from_boundaries(case["real"], case["stride"])
    row = torch.tensor([case["in"]])
    theirs = roll_of_megatron(row, packed_seq_params(segments))
    assert theirs.tolist() == [[2, 3, 4, 5, 0, 0, 0, 0, 12, 13, 0, 21, 22, 0, 23, 24, 25, 26, 0, 0]]
    assert theirs.tolist() != [case["out"]]
    assert roll_left(row, segments, fill=0).tolist() == [case["out"]]


@given(lengths=lengths_lists, rule=rules, depth=st.integers(1, 3))
def test_told_slots_alone_it_rolls_targets_right_on_rows_with_gaps(lengths, rule, depth):
    row = row_of(lengths, rule)
    batch = to_megatron(row, boundaries="slots")
    labels, loss_mask = batch["labels"], batch["loss_mask"]
    for _ in range(depth):
        labels = roll_of_megatron(labels, batch["packed_seq_params"])
        loss_mask = roll_of_megatron(loss_mask, batch["packed_seq_params"])
    ours = roll_left(row.shift_labels, row.segments, depth=depth, fill=IGNORE)
    assert torch.equal(labels.masked_fill(loss_mask == 0, IGNORE), ours)


class Ranks:
    """Ranks as threads that send each other tensors, under the names of torch.distributed that megatron-core calls."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self._here = count, threading.local()
        self._mail = {(a, b): queue.Queue() for a in range(count) for b in range(count)}
        names = {
            "is_initialized": lambda: True,
            "get_rank": lambda group=None: self.rank(),
            "get_world_size": lambda group=None: self.count,
            "get_process_group_ranks": lambda group: list(range(count)),
            "isend": self._isend,
            "irecv": self._irecv,
        }
        for name, function in names.items():
            monkeypatch.setattr(torch.distributed, name, function)

    def size(self) -> int:
        return self.count

    def rank(self) -> int:
        return self._here.rank

    def _isend(self, *, tensor: torch.Tensor, dst: int) -> Any:
        self._mail[self.rank(), dst].put(tensor.clone())
        return SimpleNamespace(wait=lambda: None)

    def _irecv(self, *, tensor: torch.Tensor, src: int) -> Any:
        box = self._mail[src, self.rank()]
        return SimpleNamespace(wait=lambda: tensor.copy_(box.get(timeout=20)))

    def run(self, function: Any) -> list[Any]:
        """What `function(rank)` gives on every rank."""

        def on(rank: int) -> Any:
            self._here.rank = rank
            return function(rank)

        with ThreadPoolExecutor(self.count) as threads:
            return list(threads.map(on, range(self.count)))


def rolled_over_ranks(row: PackedRow, ranks: int, monkeypatch: pytest.MonkeyPatch, **how) -> torch.Tensor:
    """megatron-core's roll of a row's ids, each rank with its part, joined."""
    partition = Partition(segments=row.segments, ranks=ranks, layout="mirrored")
    params = packed_seq_params(row.segments, **how)
    group = Ranks(ranks, monkeypatch)
    parts = [partition.cut(row.input_ids, rank) for rank in range(ranks)]
    return partition.join(group.run(lambda rank: roll_of_megatron(parts[rank], params, group)))


@pytest.mark.parametrize("ranks", [2, 4])
def test_its_roll_over_ranks_and_ours_agree_where_slots_are_full(ranks, monkeypatch):
    row = row_of([16, 32, 8], SlotRule.for_parallel(layout="mirrored", context=ranks))
    theirs = rolled_over_ranks(row, ranks, monkeypatch)
    assert torch.equal(theirs, roll_left(row.input_ids, row.segments, fill=0))


def test_its_roll_over_ranks_tears_rows_with_gaps_unless_it_is_told_slots_alone(monkeypatch):
    row = row_of([13, 30, 6], SlotRule.for_parallel(layout="mirrored", context=2))
    ours = roll_left(row.input_ids, row.segments, fill=0)
    assert not torch.equal(rolled_over_ranks(row, 2, monkeypatch), ours)
    assert torch.equal(rolled_over_ranks(row, 2, monkeypatch, boundaries="slots"), ours)


# ---------------------------------------------------------------------- megatron-core's own cut


def transformer_engines_cut(cu_seqlens: torch.Tensor, total: int, ranks: int, rank: int) -> torch.Tensor:
    """`thd_get_partitioned_indices`, which needs CUDA, by the formula of its kernel, without its device assertion."""
    local = (cu_seqlens // ranks).tolist()
    index = []
    for token in range(total // ranks):
        segment = max(i for i in range(len(local) - 1) if local[i] <= token)
        width = local[segment + 1] - local[segment]
        chunk = rank if token - local[segment] < width // 2 else 2 * (ranks - 1) - rank
        index.append(token - local[segment] + local[segment] * ranks + width // 2 * chunk)
    return torch.tensor(index)


@pytest.fixture
def transformer_engine(monkeypatch) -> None:
    from megatron.core import utils

    monkeypatch.setattr(utils, "tex", SimpleNamespace(thd_get_partitioned_indices=transformer_engines_cut))
    monkeypatch.setattr(utils, "is_te_min_version", lambda version: True)


def thd_cut_of(group: Ranks) -> Callable[..., dict[str, Any]]:
    """megatron-core's cut of a THD batch on the rank that calls it: 0.16's name for it, or that of later versions."""
    from megatron.core import utils

    def older(batch: dict[str, Any], real: torch.Tensor, slots: torch.Tensor, longest: int) -> dict[str, Any]:
        where = {"cp_size": group.size(), "cp_rank": group.rank()}
        return utils.get_thd_batch_on_this_cp_rank(batch, real, slots, torch.tensor([longest]), **where)[0]

    def newer(batch: dict[str, Any], real: torch.Tensor, slots: torch.Tensor, longest: int) -> dict[str, Any]:
        known = {"cu_seqlens": real[None], "cu_seqlens_padded": slots[None], "max_seqlen": torch.tensor([longest])}
        return utils.get_batch_on_this_cp_rank({**batch, **known}, is_hybrid_cp=False, cp_group=group)

    return older if hasattr(utils, "get_thd_batch_on_this_cp_rank") else newer


def cut_by_megatron(row: PackedRow, ranks: int, slots: torch.Tensor, monkeypatch: Any) -> list[torch.Tensor]:
    """Each rank's tokens, cut at these boundaries."""
    group = Ranks(ranks, monkeypatch)
    cut, real = thd_cut_of(group), row.segments.cu_seqlens()
    return group.run(lambda rank: cut({"tokens": row.input_ids}, real, slots, row.segments.max_slot)["tokens"])


@pytest.mark.parametrize("ranks", [2, 4])
def test_its_cut_of_slots_is_ours(ranks, transformer_engine, monkeypatch):
    row = row_of([13, 30, 6], SlotRule.for_parallel(layout="mirrored", context=ranks, precision="fp8"))
    partition = Partition(segments=row.segments, ranks=ranks, layout="mirrored")
    theirs = cut_by_megatron(row, ranks, row.segments.cu_seqlens_padded(), monkeypatch)
    assert all(torch.equal(theirs[rank], partition.cut(row.input_ids, rank)) for rank in range(ranks))
    assert torch.equal(partition.join(theirs), row.input_ids)


@pytest.mark.parametrize(
    ("stride", "total", "twice", "lost"),
    [([0, 6], 6, {4}, {6}), ([0, 7, 18], 20, {4, 16}, {6, 20}), ([0, 8], 16, {7, 8, 9, 10}, {13, 14, 15, 16})],
    ids=["slots that no rank can halve", "real boundaries of a row with gaps", "a tail in no slot"],
)
def test_its_cut_holds_tokens_twice_and_loses_others_where_ours_refuses(
    stride, total, twice, lost, transformer_engine, monkeypatch
):
    assert stride in [case["stride"] for case in CUTS["must_raise"]]
    row = row_of([total])
    held = torch.cat(cut_by_megatron(row, 2, torch.tensor(stride).int(), monkeypatch), 1)[0].tolist()
    assert {token for token in held if held.count(token) > 1} == twice
    assert set(row.input_ids[0].tolist()) - set(held) == lost
    with pytest.raises(LayoutError):
        Partition(segments=Segments.from_boundaries(stride, total=total), ranks=2, layout="mirrored")
