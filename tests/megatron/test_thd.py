"""Rows to Megatron's THD batch and back, and what the installed megatron-core itself does with them."""

from __future__ import annotations

import json
import queue
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlmpack.context_parallel.partition import Partition
from vlmpack.errors import ConfigError, LayoutError
from vlmpack.layout import IGNORE, METADATA_KEY, HostMetadata, Media, PackedRow, Segments, SlotRule, roll_left
from vlmpack.megatron import thd as exchange
from vlmpack.megatron.thd import from_megatron, packed_seq_fields, packed_seq_params, to_megatron

VECTORS = Path(__file__).parents[1] / "vectors"
ROLLS = json.loads((VECTORS / "roll.json").read_text())["cases"]
CUTS = json.loads((VECTORS / "context_parallel.json").read_text())

lengths_lists = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)
rules = st.builds(SlotRule, multiple=st.integers(1, 5), row_multiple=st.integers(1, 13))


@pytest.fixture(scope="module", autouse=True)
def megatron_core() -> None:
    """Imported once: without Transformer Engine and Apex it warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in ("megatron.core", "megatron.core.transformer.multi_token_prediction"):
            pytest.importorskip(module, reason="needs megatron-core: pip install 'vlmpack[megatron]'")


@dataclass
class NewerParams:
    """The fields of `PackedSeqParams` after 0.16, and what it makes of `total_tokens`."""

    qkv_format: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_kv: Any = None
    cu_seqlens_q_padded: Any = None
    cu_seqlens_kv_padded: Any = None
    max_seqlen_q: Any = None
    max_seqlen_kv: Any = None
    local_cp_size: Any = None
    cp_group: Any = None
    total_tokens: Any = None
    seq_idx: Any = None
    tokens_per_sample: Any = None
    pad_between_seqs: Any = None
    computed: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.computed = None if self.total_tokens is None else "seq_idx, with a wait for the device"


@dataclass
class OlderParams:
    """Only one pair of boundaries."""

    qkv_format: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_kv: Any = None
    max_seqlen_q: Any = None
    max_seqlen_kv: Any = None


def row_of(lengths, rule=None, *, targets=True, **more) -> PackedRow:
    """Ids from 1, a target (the next id) on every real token but the last of its segment and every third."""
    segments = Segments.from_lengths(lengths, rule)
    ids = torch.arange(1, segments.total + 1)[None].masked_fill(segments.padding_mask(), 0)
    labels = roll_left(ids, segments, fill=IGNORE).masked_fill(ids % 3 == 0, IGNORE)
    return PackedRow(input_ids=ids, segments=segments, shift_labels=labels if targets else None, **more)


def same(a: PackedRow, b: PackedRow) -> bool:
    tensors = ("input_ids", "shift_labels", "position_ids", "mm_token_type_ids")
    pairs = [(a.__dict__[name], b.__dict__[name]) for name in tensors]
    return a.segments == b.segments and all(x is y is None or torch.equal(x, y) for x, y in pairs)


# ---------------------------------------------------------------------- the fields


def test_a_row_without_gaps_has_one_pair_of_boundaries():
    params = packed_seq_params(Segments.from_lengths([3, 2]))
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q.tolist() == [0, 3, 5]
    assert params.cu_seqlens_q is params.cu_seqlens_kv
    assert params.cu_seqlens_q_padded is params.cu_seqlens_kv_padded is None
    assert (params.max_seqlen_q, params.max_seqlen_kv) == (3, 3)


def test_a_row_with_gaps_has_real_and_padded_boundaries():
    params = packed_seq_params(Segments.from_lengths([3, 2], SlotRule(multiple=4)))
    assert params.cu_seqlens_q.tolist() == [0, 3, 5]
    assert params.cu_seqlens_q_padded.tolist() == [0, 4, 8]
    assert params.cu_seqlens_q_padded is params.cu_seqlens_kv_padded
    assert (params.max_seqlen_q, params.max_seqlen_kv) == (4, 4)


def test_the_tail_is_the_last_slots_as_megatron_pads_it():
    params = packed_seq_params(Segments.from_lengths([3, 2], SlotRule(pad_to=8)))
    assert (params.cu_seqlens_q.tolist(), params.cu_seqlens_q_padded.tolist()) == ([0, 3, 5], [0, 3, 8])
    assert params.max_seqlen_q == 5


def test_slots_alone_can_be_told():
    params = packed_seq_params(Segments.from_lengths([3, 2], SlotRule(multiple=4)), boundaries="slots")
    assert params.cu_seqlens_q.tolist() == [0, 4, 8]
    assert params.cu_seqlens_q_padded is None


@given(lengths=lengths_lists, rule=rules, boundaries=st.sampled_from(["real", "slots"]))
def test_fields_have_the_types_that_kernels_want(lengths, rule, boundaries):
    segments = Segments.from_lengths(lengths, rule)
    found = packed_seq_fields(segments, boundaries=boundaries)
    tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    assert {"cu_seqlens_q", "cu_seqlens_kv", "seq_idx"} <= tensors.keys()
    assert {tensor.dtype for tensor in tensors.values()} == {torch.int32}
    assert [type(found[name]) for name in ("max_seqlen_q", "max_seqlen_kv", "total_tokens")] == [int] * 3
    assert ("cu_seqlens_q_padded" in found) == found["pad_between_seqs"]
    assert found["pad_between_seqs"] == (boundaries == "real" and segments.has_gaps)

    physical = found.get("cu_seqlens_q_padded", found["cu_seqlens_q"])
    widths = physical.diff()
    assert physical[-1] == found["total_tokens"] == segments.total
    assert found["max_seqlen_q"] == widths.max()
    assert torch.equal(found["seq_idx"][0], torch.repeat_interleave(torch.arange(len(widths)).int(), widths))


def test_the_installed_version_gets_every_field_that_it_has():
    segments = Segments.from_lengths([3, 2], SlotRule(multiple=4))
    params, found = packed_seq_params(segments), packed_seq_fields(segments)
    told = {f.name for f in fields(params)} & found.keys()
    assert {"qkv_format", "cu_seqlens_q", "cu_seqlens_kv_padded", "max_seqlen_q"} <= told
    assert [name for name in told - {"seq_idx"} if params.__dict__[name] is not found[name]] == []


def test_a_newer_version_gets_all_fields_and_does_not_compute_them_again(monkeypatch):
    monkeypatch.setattr(exchange, "_params_class", lambda: NewerParams)
    params = packed_seq_params(Segments.from_lengths([5, 2, 4], SlotRule(pad_to=16)))
    assert params.total_tokens == 16
    assert params.seq_idx.tolist() == [[0] * 5 + [1] * 2 + [2] * 9]
    assert params.pad_between_seqs is True
    assert params.computed is None


def test_a_version_that_would_attend_elsewhere_is_refused(monkeypatch):
    monkeypatch.setattr(exchange, "_params_class", lambda: OlderParams)
    assert packed_seq_params(Segments.from_lengths([3, 2])).cu_seqlens_q.tolist() == [0, 3, 5]
    with pytest.raises(
        ConfigError, match=r"has no cu_seqlens_kv_padded, cu_seqlens_q_padded, without which .* install -U"
    ):
        packed_seq_params(Segments.from_lengths([3, 2], SlotRule(multiple=4)))


def test_without_megatron_core_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "megatron.core.packed_seq_params", None)
    exchange._params_class.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'vlmpack\[megatron\]'"):
        packed_seq_params(Segments.from_lengths([3]))


# ---------------------------------------------------------------------- a row to Megatron


def test_a_batch_in_megatrons_names():
    batch = to_megatron(row_of([3, 2], SlotRule(multiple=4)))
    assert batch["tokens"].tolist() == [[1, 2, 3, 0, 5, 6, 0, 0]]
    assert batch["labels"].tolist() == [[2, 3, -100, -100, 6, -100, -100, -100]]
    assert batch["loss_mask"].tolist() == [[1, 1, 0, 0, 1, 0, 0, 0]]
    assert batch["loss_mask"].dtype == torch.float32
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 0, 0]]
    assert batch["padding_mask"].tolist() == [[False, False, False, True, False, False, True, True]]
    assert batch["attention_mask"] is None


@pytest.mark.parametrize(("rows", "kept"), [(4, 3), (3, 3)])
def test_positions_are_time_height_width(rows, kept):
    positions = torch.arange(rows * 5).view(rows, 1, 5)
    batch = to_megatron(row_of([3, 2], position_ids=positions))
    assert torch.equal(batch["position_ids"], positions[-kept:])


def test_positions_of_a_text_model_stay_as_they_are():
    positions = torch.tensor([[7, 8, 9, 7, 8]])
    assert torch.equal(to_megatron(row_of([3, 2], position_ids=positions))["position_ids"], positions)


def test_without_labels_there_is_no_loss_mask():
    assert {"labels", "loss_mask"}.isdisjoint(to_megatron(row_of([3, 2], targets=False)))


def on_fake_device(row: PackedRow) -> PackedRow:
    """The row on the meta device: reading any value fails, as waiting for an accelerator would cost."""
    return PackedRow(**{k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in vars(row).items()})


def test_neither_direction_waits_for_the_device(monkeypatch):
    monkeypatch.setattr(torch, "_assert_async", lambda *_: None)
    row = on_fake_device(row_of([3, 2], SlotRule(multiple=4, row_multiple=16)))
    assert from_megatron(to_megatron(row)).segments == row.segments


def test_a_read_on_the_fake_device_does_fail():
    row = on_fake_device(row_of([3, 2]))
    batch = to_megatron(row)
    del batch[METADATA_KEY]
    with pytest.raises(Exception, match="meta"):
        from_megatron(batch)


# ---------------------------------------------------------------------- and back


@given(lengths=lengths_lists, rule=rules, boundaries=st.sampled_from(["real", "slots"]))
def test_there_and_back_is_the_same_row(lengths, rule, boundaries):
    row = row_of(lengths, rule)
    row = replace(row, position_ids=row.segments.position_in_segment()[None], mm_token_type_ids=row.input_ids % 2)
    assert same(from_megatron(to_megatron(row, boundaries=boundaries)), row)


@given(lengths=lengths_lists, rule=rules, boundaries=st.sampled_from(["real", "slots"]))
def test_without_host_metadata_only_the_tail_has_found_a_slot(lengths, rule, boundaries):
    row = row_of(lengths, rule)
    batch = to_megatron(row, boundaries=boundaries)
    del batch[METADATA_KEY]
    back = from_megatron(batch)
    assert torch.equal(back.input_ids, row.input_ids)
    assert torch.equal(back.shift_labels, row.shift_labels)
    assert (back.segments.lengths, back.segments.slots) == (
        row.segments.lengths,
        row.segments.without_tail().slots,
    )


def test_media_extras_and_metadata_travel_along():
    metadata = HostMetadata(lengths=(3, 2), image_grids=((1, 2, 2),), sample_ids=("a", "b"))
    media = Media(pixel_values=torch.rand(4, 3), image_grid_thw=torch.tensor([[1, 2, 2]]))
    row = row_of([3, 2], media=media, metadata=metadata, extras={"advantages": torch.rand(1, 5)})
    back = from_megatron(to_megatron(row), extras=("advantages",))
    assert back.media is not row.media
    assert torch.equal(back.media.pixel_values, media.pixel_values)
    assert torch.equal(back.extras["advantages"], row.extras["advantages"])
    assert back.metadata == metadata


def test_boundaries_come_from_the_tensors_where_metadata_has_none():
    batch = to_megatron(row_of([3, 2]))
    back = from_megatron({**batch, METADATA_KEY: HostMetadata(lengths=(3, 2), sample_ids=("a", "b"))})
    assert back.metadata == HostMetadata(lengths=(3, 2), sample_ids=("a", "b"))
    assert back.segments == Segments.from_lengths([3, 2])


def test_a_batch_that_megatron_made_itself():
    params = NewerParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 3, 5]).int(), max_seqlen_q=5)
    params.cu_seqlens_kv, params.cu_seqlens_q_padded = params.cu_seqlens_q, torch.tensor([0, 3, 8]).int()
    batch = {
        "tokens": torch.tensor([[1, 2, 3, 4, 5, 0, 0, 0]]),
        "labels": torch.tensor([[2, 3, 0, 5, 0, 0, 0, 0]]),
        "loss_mask": torch.tensor([[1.0, 1, 0, 1, 0, 0, 0, 0]]),
        "packed_seq_params": params,
    }
    row = from_megatron(batch)
    assert row.segments.lengths == (3, 2)
    assert row.shift_labels.tolist() == [[2, 3, -100, 5, -100, -100, -100, -100]]


def test_labels_without_a_loss_mask_count_where_they_are_set():
    batch = to_megatron(row_of([3, 2]))
    del batch["loss_mask"]
    assert torch.equal(from_megatron(batch).shift_labels, row_of([3, 2]).shift_labels)


def changed(**changes) -> dict[str, Any]:
    """A batch of lengths [3, 2] in slots of 4 as Megatron itself would hand it over, with some entries changed."""
    batch = to_megatron(row_of([3, 2], SlotRule(multiple=4)))
    del batch[METADATA_KEY]
    params = {name: changes.pop(name) for name in list(changes) if name in batch["packed_seq_params"].__dict__}
    return {**batch, "packed_seq_params": replace(batch["packed_seq_params"], **params), **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packed_seq_params": None}, "packed_seq_params is None, but only a thd batch"),
        ({"qkv_format": "sbhd"}, "is qkv_format='sbhd', but only a thd batch is a packed row"),
        ({"cu_seqlens_q": None}, "has no cu_seqlens_q, so samples have no ends"),
        ({"cu_seqlens_kv": torch.tensor([0, 2, 5]).int()}, "cu_seqlens_kv is not cu_seqlens_q"),
        ({"cu_seqlens_kv": torch.tensor([0, 5]).int()}, "cu_seqlens_kv is not cu_seqlens_q"),
        ({"tokens": torch.zeros(1, 4).long()}, "batch is 4 tokens wide but its boundaries end at 8, where the whole"),
        ({"padding_mask": torch.zeros(1, 8).bool()}, "padding_mask is not True exactly behind each segment's real"),
        ({"padding_mask": torch.zeros(1, 4).bool()}, r"padding_mask is \[1, 4\] but the batch is 8 tokens wide"),
        ({"loss_mask": torch.full((1, 8), 0.5)}, "holds other values than 0 and 1; give weights"),
        ({"labels": torch.ones(1, 8).long(), "loss_mask": torch.ones(1, 8)}, "padding has targets: the boundaries"),
        (
            {METADATA_KEY: HostMetadata(lengths=(2, 3), segments=Segments.from_lengths([2, 3]))},
            "has neither the real bound",
        ),
        ({METADATA_KEY: HostMetadata(lengths=(3, 2), segments=Segments.from_lengths([3, 2]))}, "nor the slots"),
        (
            {METADATA_KEY: HostMetadata(lengths=(5,), segments=Segments.from_lengths([5]))},
            "has neither the real boundaries",
        ),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(LayoutError, match=message):
        from_megatron(changed(**changes))


def test_only_what_was_changed_is_refused():
    assert from_megatron(changed()).segments.slots == (4, 4)


# ---------------------------------------------------------------------- megatron-core's own roll


def roll_of_megatron(tensor: torch.Tensor, params: Any, cp_group: Any = None) -> torch.Tensor:
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    return roll_tensor(tensor, shifts=-1, dims=-1, packed_seq_params=params, cp_group=cp_group)[0]


@given(lengths=lengths_lists)
def test_its_roll_and_ours_agree_on_rows_without_gaps(lengths):
    row = row_of([n for n in lengths if n])
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
    row = row_of([n for n in lengths if n], rule)
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
    [
        ([0, 6], 6, {4}, {6}),
        ([0, 7, 18], 20, {4, 16}, {6, 20}),
        ([0, 8], 16, {7, 8, 9, 10}, {13, 14, 15, 16}),
    ],
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


def test_its_cut_cannot_take_multimodal_positions_and_ours_does(transformer_engine, monkeypatch):
    group = Ranks(2, monkeypatch)
    row = row_of([8, 12], position_ids=torch.arange(60).view(3, 1, 20))
    slots, batch = row.segments.cu_seqlens(), {"tokens": row.input_ids, "position_ids": row.position_ids}
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        group.run(lambda rank: thd_cut_of(group)(batch, slots, slots, 12))
    partition = Partition(segments=row.segments, ranks=2, layout="mirrored")
    positions = partition.cut(batch["position_ids"], 0)
    assert torch.equal(positions, row.position_ids[..., partition.index(0)])


def cut_as_one_sample(row: PackedRow, ranks: int, monkeypatch) -> list[torch.Tensor]:
    """megatron-core's cut for batches that are not packed."""
    from megatron.core import utils

    group = Ranks(ranks, monkeypatch)
    kind = {} if hasattr(utils, "get_thd_batch_on_this_cp_rank") else {"is_hybrid_cp": False}
    cut = partial(utils.get_batch_on_this_cp_rank, cp_group=group, **kind)
    return group.run(lambda rank: cut({"tokens": row.input_ids})["tokens"])


def test_its_cut_of_one_sample_is_ours(monkeypatch):
    row = row_of([24])
    partition = Partition(segments=row.segments, ranks=3, layout="mirrored")
    theirs = cut_as_one_sample(row, 3, monkeypatch)
    assert all(torch.equal(theirs[rank], partition.cut(row.input_ids, rank)) for rank in range(3))


def test_its_cut_of_one_sample_takes_a_packed_row_for_one(monkeypatch):
    row = row_of([8, 16])
    partition = Partition(segments=row.segments, ranks=2, layout="mirrored")
    theirs = cut_as_one_sample(row, 2, monkeypatch)
    assert not torch.equal(theirs[0], partition.cut(row.input_ids, 0))
    firsts = [(part <= 8).sum().item() for part in theirs]
    assert firsts == [6, 2], "of the first segment one rank holds three quarters"
