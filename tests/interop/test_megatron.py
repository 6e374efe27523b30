"""Rows to Megatron's THD batch and back, in the installed megatron-core's own roll and cut, and the check of a row that
others packed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import field, fields, make_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron_models import import_megatron

from vlmpack.context_parallel.partition import Partition
from vlmpack.errors import ConfigError, LayoutError
from vlmpack.interop import megatron
from vlmpack.interop.megatron import from_megatron, packed_seq_fields, packed_seq_params, to_megatron, validate
from vlmpack.layout import METADATA_KEY, HostMetadata, Media, PackedRow, Segments, SlotRule, roll_left
from vlmpack.layout.batch import IGNORE

CUTS = json.loads((Path(__file__).parents[1] / "vectors" / "context_parallel.json").read_text())

lengths_lists = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)
full_lengths = st.lists(st.integers(1, 9), min_size=1, max_size=6)
rules = st.builds(SlotRule, multiple=st.integers(1, 5), row_multiple=st.integers(1, 13))


@pytest.fixture(scope="module", autouse=True)
def megatron_core() -> None:
    import_megatron()


FIRST = ("qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")
LATER = ("cu_seqlens_q_padded", "cu_seqlens_kv_padded", "total_tokens", "seq_idx", "pad_between_seqs", "computed")


def params_class(*names: str) -> Any:
    """A `PackedSeqParams` with these fields; those after 0.16 compute `seq_idx` where they are made with a total."""

    def computes(params: Any) -> None:
        if getattr(params, "total_tokens", None) is not None:
            params.computed = "seq_idx, with a wait for the device"

    fields_of = [(name, Any, field(default=None)) for name in names]
    return make_dataclass("PackedSeqParams", fields_of, namespace={"__post_init__": computes})


def row_of(lengths, rule=None, *, targets=True, **more) -> PackedRow:
    """Ids from 1, a target (the next id) on every real token but the last of its segment and every third."""
    segments = Segments.from_lengths(lengths, rule)
    ids = torch.arange(1, segments.total + 1)[None].masked_fill(segments.padding_mask(), 0)
    labels = roll_left(ids, segments, fill=IGNORE).masked_fill(ids % 3 == 0, IGNORE)
    return PackedRow(input_ids=ids, segments=segments, shift_labels=labels if targets else None, **more)


def same(a: PackedRow, b: PackedRow) -> bool:
    tensors = ("input_ids", "shift_labels", "position_ids", "mm_token_type_ids")
    pairs = [(getattr(a, name), getattr(b, name)) for name in tensors]
    return a.segments == b.segments and all(x is y is None or torch.equal(x, y) for x, y in pairs)


# ---------------------------------------------------------------------- the fields


@pytest.mark.parametrize(
    ("rule", "boundaries", "attended", "padded", "widest"),
    [
        (SlotRule(), "real", [0, 3, 5], None, 3),
        (SlotRule(multiple=4), "real", [0, 3, 5], [0, 4, 8], 4),
        (SlotRule(pad_to=8), "real", [0, 3, 5], [0, 3, 8], 5),  # the tail is the last slot's
        (SlotRule(multiple=4), "slots", [0, 4, 8], None, 4),
    ],
)
def test_boundaries_as_megatron_takes_them(rule, boundaries, attended, padded, widest):
    params = packed_seq_params(Segments.from_lengths([3, 2], rule), boundaries=boundaries)
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q.tolist() == attended
    assert params.cu_seqlens_q is params.cu_seqlens_kv
    assert params.cu_seqlens_q_padded is params.cu_seqlens_kv_padded
    assert (None if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded.tolist()) == padded
    assert (params.max_seqlen_q, params.max_seqlen_kv) == (widest, widest)


@given(lengths=lengths_lists, rule=rules, boundaries=st.sampled_from(["real", "slots"]))
def test_fields_have_the_types_that_kernels_want(lengths, rule, boundaries):
    segments = Segments.from_lengths(lengths, rule)
    found = packed_seq_fields(segments, boundaries=boundaries)
    tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    assert {"cu_seqlens_q", "cu_seqlens_kv", "seq_idx"} <= tensors.keys()
    assert {tensor.dtype for tensor in tensors.values()} == {torch.int32}
    assert [type(found[name]) for name in ("max_seqlen_q", "max_seqlen_kv", "total_tokens")] == [int] * 3
    assert ("cu_seqlens_q_padded" in found) == found["pad_between_seqs"]
    assert found["pad_between_seqs"] == (boundaries == "real" and segments.has_padding)

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
    assert [name for name in told - {"seq_idx"} if getattr(params, name) is not found[name]] == []


def test_a_newer_version_gets_all_fields_and_does_not_compute_them_again(monkeypatch):
    monkeypatch.setattr(megatron, "_params_class", lambda: params_class(*FIRST, *LATER))
    params = packed_seq_params(Segments.from_lengths([5, 2, 4], SlotRule(pad_to=16)))
    assert params.total_tokens == 16
    assert params.seq_idx.tolist() == [[0] * 5 + [1] * 2 + [2] * 9]
    assert params.pad_between_seqs is True
    assert params.computed is None


def test_a_version_that_would_attend_elsewhere_is_refused(monkeypatch):
    monkeypatch.setattr(megatron, "_params_class", lambda: params_class(*FIRST))
    assert packed_seq_params(Segments.from_lengths([3, 2])).cu_seqlens_q.tolist() == [0, 3, 5]
    with pytest.raises(
        ConfigError, match=r"has no cu_seqlens_kv_padded, cu_seqlens_q_padded, without which .* install -U"
    ):
        packed_seq_params(Segments.from_lengths([3, 2], SlotRule(multiple=4)))


def test_without_megatron_core_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "megatron.core.packed_seq_params", None)
    megatron._params_class.cache_clear()
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


@pytest.mark.parametrize(("shape", "kept"), [((4, 1, 5), 3), ((3, 1, 5), 3), ((1, 5), 1)])
def test_positions_of_vision_models_are_time_height_width(shape, kept):
    positions = torch.rand(shape)
    assert torch.equal(to_megatron(row_of([3, 2], position_ids=positions))["position_ids"], positions[-kept:])


def on_fake_device(row: PackedRow) -> PackedRow:
    """The row on the meta device: reading any value fails, as waiting for an accelerator would cost."""
    return PackedRow(**{k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in vars(row).items()})


def test_neither_direction_waits_for_the_device(monkeypatch):
    monkeypatch.setattr(torch, "_assert_async", lambda *_: None)
    row = on_fake_device(row_of([3, 2], SlotRule(multiple=4, row_multiple=16)))
    assert from_megatron(to_megatron(row)).segments == row.segments
    weighed = replace(row, shift_labels=row.input_ids, shift_weights=torch.ones(row.input_ids.shape, device="meta"))
    with pytest.raises(LayoutError, match="the row has shift_weights, and Megatron's loss_mask is of zeros and ones"):
        to_megatron(weighed)


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
    assert (back.segments.lengths, back.segments.slots) == (row.segments.lengths, row.segments.without_tail().slots)


def test_media_extras_and_metadata_travel_along():
    metadata = HostMetadata(lengths=(3, 2), prefixes=(1, 0), sample_ids=("a", "b"))
    media = Media(pixel_values=torch.rand(4, 3), image_grid_thw=torch.tensor([[1, 2, 2]]))
    row = row_of([3, 2], media=media, metadata=metadata, extras={"advantages": torch.rand(1, 5)})
    back = from_megatron(to_megatron(row), extras=("advantages",))
    assert back.media is not row.media
    assert torch.equal(back.media.pixel_values, media.pixel_values)
    assert torch.equal(back.extras["advantages"], row.extras["advantages"])
    assert back.metadata == metadata


def test_a_batch_that_megatron_made_itself():
    params = params_class(*FIRST, *LATER)(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 3, 5]).int(), max_seqlen_q=5)
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


# ---------------------------------------------------------------------- a row that others packed

CP2 = SlotRule.for_parallel(context=2, layout="mirrored")


@pytest.mark.parametrize("case", CUTS["must_accept"], ids=lambda case: case["why"])
@pytest.mark.parametrize("form", [list, torch.tensor, Segments.from_boundaries], ids=["list", "tensor", "segments"])
def test_repeated_boundaries_pass(case, form: Callable[[list[int]], Any]):
    validate(form(case["stride"]), CP2, total=case["total"])


@pytest.mark.parametrize(
    ("stride", "total", "message"),
    [
        ([2, 10], 10, r"must start at 0, got \[2, 10\]: set the first one to 0"),
        ([], 4, r"must start at 0, got \[\]"),
        ([0, 8, 4, 12], 12, "must never decrease, but segment 1 runs from 8 to 4"),
        ([0, 8], 16, r"end at 8 but the row is 16 tokens wide, .* \(SlotRule\(tail_in_slot=True\)\)"),
        ([0, 16], 12, "end at 16 but the row is 12 tokens wide"),
        ([0, 8, 14, 20], 20, r"segment 1 has a slot of 6 tokens \(and 1 more like it\), .* SlotRule\(multiple=4\)"),
        ([0, 6], 6, r"it is 6 tokens wide: pack it with SlotRule\(row_multiple=4\)"),
    ],
)
def test_boundaries_that_are_wrong_are_told_what_to_set(stride, total, message):
    with pytest.raises(LayoutError, match=message):
        validate(stride, CP2, total=total)


def test_everything_that_is_wrong_is_said_at_once():
    with pytest.raises(LayoutError) as error:
        validate([0, 8, 6, 13], CP2, total=14)
    assert len(str(error.value).splitlines()) == 5
    with pytest.raises(LayoutError, match="8 tokens wide but pad_to=16"):
        validate(Segments.from_lengths([8]), SlotRule(pad_to=16))


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any),
    ranks=st.sampled_from([2, 3]),
    multiple=st.sampled_from([1, 4, 12]),
    row_multiple=st.sampled_from([1, 3, 24]),
    layout=st.sampled_from(["mirrored", "contiguous"]),
)
def test_rows_pass_exactly_where_they_can_be_cut(lengths, ranks, multiple, row_multiple, layout):
    rule = SlotRule.for_parallel(context=ranks, layout=layout)
    row = row_of(lengths, SlotRule(multiple=multiple, row_multiple=row_multiple))
    try:
        Partition(segments=row.segments, ranks=ranks, layout=layout)
    except LayoutError:
        with pytest.raises(LayoutError):
            validate(row, rule)
    else:
        validate(row, rule)


# ---------------------------------------------------------------------- megatron-core's own roll


def roll_of_megatron(tensor: torch.Tensor, params: Any, cp_group: Any = None) -> torch.Tensor:
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    return roll_tensor(tensor, shifts=-1, dims=-1, packed_seq_params=params, cp_group=cp_group)[0]


@given(lengths=full_lengths, rule=rules, depth=st.integers(1, 3))
def test_told_slots_alone_it_rolls_targets_right_on_rows_with_gaps(lengths, rule, depth):
    row = row_of(lengths, rule)
    batch = to_megatron(row, boundaries="slots")
    labels, loss_mask = batch["labels"], batch["loss_mask"]
    for _ in range(depth):
        labels = roll_of_megatron(labels, batch["packed_seq_params"])
        loss_mask = roll_of_megatron(loss_mask, batch["packed_seq_params"])
    ours = roll_left(row.shift_labels, row.segments, depth=depth, fill=IGNORE)
    assert torch.equal(labels.masked_fill(loss_mask == 0, IGNORE), ours)


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


def cut_by_megatron(row: PackedRow, ranks: int, rank: int) -> torch.Tensor:
    """The tokens that megatron-core gives to a rank: by 0.16's function, or by that of later versions."""
    from megatron.core import utils

    slots, longest = row.segments.cu_seqlens_padded(), torch.tensor([max(row.segments.slots)])
    batch, real = {"tokens": row.input_ids}, row.segments.cu_seqlens()
    if hasattr(utils, "get_thd_batch_on_this_cp_rank"):
        where = {"cp_size": ranks, "cp_rank": rank}
        return utils.get_thd_batch_on_this_cp_rank(batch, real, slots, longest, **where)[0]["tokens"]
    known = {"cu_seqlens": real[None], "cu_seqlens_padded": slots[None], "max_seqlen": longest}
    group = SimpleNamespace(size=lambda: ranks, rank=lambda: rank)
    return utils.get_batch_on_this_cp_rank({**batch, **known}, is_hybrid_cp=False, cp_group=group)["tokens"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_its_cut_of_slots_is_ours(ranks, monkeypatch):
    from megatron.core import utils

    monkeypatch.setattr(utils, "tex", SimpleNamespace(thd_get_partitioned_indices=transformer_engines_cut))
    monkeypatch.setattr(utils, "is_te_min_version", lambda version: True)
    row = row_of([13, 30, 6], SlotRule.for_parallel(layout="mirrored", context=ranks, precision="fp8"))
    partition = Partition(segments=row.segments, ranks=ranks, layout="mirrored")
    theirs = [cut_by_megatron(row, ranks, rank) for rank in range(ranks)]
    assert all(torch.equal(theirs[rank], partition.cut(row.input_ids, rank)) for rank in range(ranks))
    assert torch.equal(partition.join(theirs), row.input_ids)
