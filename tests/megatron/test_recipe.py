"""Whole recipes, looked at before the first step."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlmpack.context_parallel import Parallel
from vlmpack.context_parallel.partition import Partition
from vlmpack.errors import ConfigError, LayoutError
from vlmpack.layout import PackedRow, Segments, SlotRule
from vlmpack.megatron import rules, validate
from vlmpack.megatron.recipe import Recipe

CUTS = json.loads((Path(__file__).parents[1] / "vectors" / "context_parallel.json").read_text())


def recipe(**changes: Any) -> Recipe:
    """One rank, in-batch packing, nothing wrong; with changes."""
    return Recipe(**{"sequence_length": 4096, "micro_batch_size": 4, "packing": "in_batch", **changes})


def problems(of: Recipe, *row: Any, **more: Any) -> list[str]:
    """What `validate` says, one problem an entry."""
    try:
        validate(of, *row, **more)
    except ConfigError as error:
        return str(error).split("\n- ")[1:]
    return []


# ---------------------------------------------------------------------- recipes that are right

MIRRORED = SlotRule.for_parallel(context=4, layout="mirrored")
CP = {"context": 4, "per_token_loss": True, "layout": "mirrored", "slots": MIRRORED}
FIXED = SlotRule(pad_to=4096, max_segments=16)

RIGHT = {
    "one rank": {},
    "two samples, the fewest that share a row": {"micro_batch_size": 2},
    "stored rows": {"packing": "offline", "micro_batch_size": 1},
    "streamed rows": {"packing": "stream", "micro_batch_size": 1, "per_token_loss": True},
    "context parallel, mirrored": CP,
    "context parallel, as vlmpack cuts": {"context": 4, "per_token_loss": True, "slots": SlotRule(row_multiple=4)},
    "context parallel, as Megatron cuts": {**CP, "engine": "megatron", "layout": None},
    "context and tensor parallel in fp8": {
        **CP,
        "tensor": 2,
        "sequence_parallel": True,
        "precision": "fp8",
        "slots": SlotRule.for_parallel(context=4, tensor=2, sequence_parallel=True, precision="fp8", layout="mirrored"),
    },
    "slots wider than they must be": {**CP, "slots": SlotRule(multiple=24, row_multiple=8)},
    "pretraining": {"context": 2, "finetuning": False, "slots": SlotRule.for_parallel(context=2)},
    "rows of one width that fp8 can read": {"precision": "fp8", "slots": SlotRule(pad_to=4096)},
    "pipeline": {"pipeline": 2, "expert": 4, "slots": SlotRule(pad_to=4096)},
    "graphs of everything": {"slots": FIXED, "cuda_graphs": ("full_iteration",)},
    "graphs without attention": {"slots": SlotRule(pad_to=4096), "cuda_graphs": ("mlp",)},
    "fixed boundaries of stored rows": {
        "packing": "offline",
        "micro_batch_size": 1,
        "slots": FIXED,
        "fullest_row": 16,
    },
    "prediction of several tokens": {"engine": "megatron", "mtp_depth": 2},
    "the same on slots": {"engine": "megatron", "mtp_depth": 2, "boundaries": "slots", **CP},
    "the same by vlmpack": {"mtp_depth": 2, **CP},
    "a tail that Megatron gets as a slot": {
        **CP,
        "engine": "megatron",
        "slots": SlotRule(multiple=8, pad_to=4096),
    },
    "a known family": {"family": "qwen3_vl"},
    "gated delta layers": {"family": "qwen3_5"},
}


@pytest.mark.parametrize("changes", RIGHT.values(), ids=RIGHT)
def test_a_recipe_that_is_right_passes(changes):
    validate(recipe(**changes))


# ---------------------------------------------------------------------- one problem each

WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "a length that ranks cannot share": (
        "_row_length",
        {**CP, "sequence_length": 4100},
        "sequence_length=4100 is not a multiple of 8, .* over context=4 in bf16: set sequence_length=4104",
    ),
    "a length that evaluation cannot share": (
        "_row_length",
        {"eval_context": 3, "slots": SlotRule.for_parallel(context=3)},
        "not a multiple of 3, .* over context=1 and eval_context=3 in bf16: set sequence_length=4098",
    ),
    "a length that fp8 cannot share": (
        "_row_length",
        {"precision": "fp8", "sequence_length": 100, "slots": SlotRule(row_multiple=16)},
        "sequence_length=100 is not a multiple of 16, .*: set sequence_length=112",
    ),
    "slots that ranks cannot halve": (
        "_slot_multiple",
        {**CP, "slots": SlotRule(multiple=4, row_multiple=8, tail_in_slot=True)},
        r"slots are a multiple of 4, not of 8, .*: set SlotRule\(multiple=8\), .* layout='mirrored'\)",
    ),
    "rows that fp8 cannot read": (
        "_row_multiple",
        {"precision": "fp8", "slots": SlotRule(row_multiple=24)},
        r"rows are a multiple of 24, not of 16, .*: set SlotRule\(row_multiple=48\)",
    ),
    "rows of another width than they have room for": (
        "_row_width",
        {"slots": SlotRule(pad_to=2048)},
        r"padded to 2048 tokens but sequence_length=4096: set SlotRule\(pad_to=4096\)",
    ),
    "a tail that a mirrored cut would lose": (
        "_tail",
        {**CP, "slots": SlotRule(multiple=8, pad_to=4096)},
        r"tail lies behind its last boundary, .* set SlotRule\(tail_in_slot=True\), or layout='contiguous'",
    ),
    "a cut that Megatron does not know": (
        "_cut",
        {**CP, "engine": "megatron", "layout": "contiguous"},
        "layout='contiguous', but Megatron-Core cuts packed rows mirrored: set layout='mirrored'",
    ),
    "averages of averages": (
        "_loss",
        {**CP, "per_token_loss": False},
        "per_token_loss=False averages .* under context parallelism, where a rank may hold no target .* set it to True",
    ),
    "averages in the collective": (
        "_loss",
        {**CP, "average_in_collective": True},
        "average_in_collective=True divides .* under context parallelism.*: set it to False",
    ),
    "averages of averages of streamed rows": (
        "_loss",
        {"packing": "stream", "micro_batch_size": 1},
        "per_token_loss=False averages .* while data are read, .*: set it to True",
    ),
    "several stored rows at once": (
        "_micro_batch",
        {"packing": "offline", "micro_batch_size": 4},
        "micro_batch_size=4, but each of the offline rows .*: set micro_batch_size=1, and sequence_length=16384",
    ),
    "several streamed rows at once": (
        "_micro_batch",
        {"packing": "stream", "micro_batch_size": 2, "per_token_loss": True},
        "micro_batch_size=2, but each of the stream rows .*: set micro_batch_size=1",
    ),
    "one sample to pack": (
        "_micro_batch",
        {"micro_batch_size": 1},
        "micro_batch_size=1 leaves nothing to pack, .*: set it to 2 or more, or packing='offline'",
    ),
    "stages and rows of any width": (
        "_fixed_width",
        {"pipeline": 2},
        r"pipeline=2: stages .* any width: set SlotRule\(pad_to=4096\) \(pad_to_max_length\)",
    ),
    "experts and rows of any width": (
        "_fixed_width",
        {"expert": 2},
        r"expert=2: ranks .* set SlotRule\(pad_to=4096\)",
    ),
    "graphs and rows of any width": (
        "_fixed_width",
        {"cuda_graphs": ("mlp",)},
        r"cuda_graphs=\('mlp',\): a graph replays one shape, .* set SlotRule\(pad_to=4096\)",
    ),
    "fixed boundaries and rows of any width": (
        "_fixed_width",
        {"slots": SlotRule(max_segments=16)},
        r"max_segments=16 \(pad_cu_seqlens\): .* set SlotRule\(pad_to=4096\)",
    ),
    "graphs of attention and any number of boundaries": (
        "_fixed_boundaries",
        {"slots": SlotRule(pad_to=4096), "cuda_graphs": ("attn", "mlp")},
        r"capture attention \(attn\), .* set SlotRule\(max_segments=...\) \(pad_cu_seqlens\)",
    ),
    "fixed boundaries and no manifest": (
        "_fixed_boundaries",
        {"packing": "offline", "micro_batch_size": 1, "slots": FIXED},
        r"max_segments=16 \(pad_cu_seqlens\) needs the manifest .*: set fullest_row",
    ),
    "more stored samples than boundaries": (
        "_fixed_boundaries",
        {"packing": "offline", "micro_batch_size": 1, "slots": FIXED, "fullest_row": 17},
        r"max_segments=16, but a row can hold 17 samples: set SlotRule\(max_segments=17\)",
    ),
    "more samples in a batch than boundaries": (
        "_fixed_boundaries",
        {"slots": SlotRule(pad_to=4096, max_segments=3)},
        r"max_segments=3, but a row can hold 4 samples: set SlotRule\(max_segments=4\)",
    ),
    "a graph of the router": (
        "_router_graphs",
        {"slots": FIXED, "cuda_graphs": ("mlp", "moe_router")},
        r"capture the router \(moe_router\), .*: set cuda_graphs=\('mlp',\)",
    ),
    "a graph of layers with a router": (
        "_router_graphs",
        {"slots": FIXED, "cuda_graphs": ("layer",), "family": "qwen3_vl_moe"},
        r"capture the router \(layer\), .*: set cuda_graphs=\(\)",
    ),
    "streamed rows and several tokens": (
        "_streamed_megatron",
        {"engine": "megatron", "packing": "stream", "micro_batch_size": 1, "per_token_loss": True, "mtp_depth": 1},
        "mtp_depth=1 does not go with rows that Megatron-Bridge packs while it reads: set mtp_depth=0",
    ),
    "streamed rows and graphs": (
        "_streamed_megatron",
        {
            "engine": "megatron",
            "packing": "stream",
            "micro_batch_size": 1,
            "per_token_loss": True,
            "slots": FIXED,
            "cuda_graphs": ("mlp",),
        },
        r"cuda_graphs=\('mlp',\) does not go with .*: set cuda_graphs=\(\)",
    ),
    "streamed rows and stages": (
        "_streamed_megatron",
        {
            "engine": "megatron",
            "packing": "stream",
            "micro_batch_size": 1,
            "per_token_loss": True,
            "slots": FIXED,
            "pipeline": 2,
        },
        "pipeline=2 does not go with .*: set pipeline=1, or store rows",
    ),
    "several tokens across gaps": (
        "_mtp",
        {**CP, "engine": "megatron", "mtp_depth": 1},
        "mtp_depth=1 on slots that are a multiple of 8: .* rolls targets into other samples: set boundaries='slots'",
    ),
    "several tokens in a graph": (
        "_mtp",
        {"engine": "megatron", "mtp_depth": 1, "slots": FIXED, "cuda_graphs": ("full_iteration",)},
        "mtp_depth=1 does not go with a graph of the full iteration, .*: leave 'full_iteration' out of cuda_graphs",
    ),
    "a family that would leak": (
        "_family",
        {"family": "qwen2_5_omni"},
        r"family: qwen2_5_omni cannot be packed exactly yet: .* \(supported: qwen2_vl",
    ),
    "a family that nobody knows": ("_family", {"family": "mamba"}, "family: mamba: unknown family"),
}


@pytest.mark.parametrize(("rule", "changes", "message"), WRONG.values(), ids=WRONG)
def test_a_recipe_that_is_wrong_is_told_what_to_set(rule, changes, message):
    found = problems(recipe(**changes))
    assert len(found) == 1, found
    assert re.search(message, found[0])
    assert list(rules.__dict__[rule](recipe(**changes))) == found


def test_every_rule_has_a_case():
    assert {rule.__name__ for rule in rules.RULES} == {rule for rule, *_ in WRONG.values()}


@pytest.mark.parametrize(("version", "refused"), [((0, 16), True), ((0, 18), False), (None, False)])
def test_gated_delta_layers_of_an_old_megatron_are_refused(version, refused, monkeypatch):
    monkeypatch.setattr(rules, "installed_version", lambda: version)
    found = problems(recipe(engine="megatron", family="qwen3_5"))
    assert bool(found) == refused
    assert all("megatron-core 0.16 refuse packed rows, and qwen3_5" in problem for problem in found)


def test_everything_wrong_is_said_at_once():
    found = problems(
        recipe(
            sequence_length=4099,
            packing="offline",
            context=2,
            layout="mirrored",
            average_in_collective=True,
            pipeline=2,
        ),
        [0, 6, 4099],
    )
    for name in ("sequence_length=4099", "slots are", "rows are", "per_token", "average_in", "micro_batch", "pipeline"):
        assert len([problem for problem in found if problem.startswith(name)]) == 1, name
    assert any("segment 0 has 6 slots" in problem for problem in found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 0}, "sequence_length must be a whole number of at least 1, got 0"),
        ({"micro_batch_size": 1.5}, "micro_batch_size must be a whole number of at least 1, got 1.5"),
        ({"context": None}, "context must be a whole number of at least 1, got None"),
        ({"eval_context": 0}, "eval_context must be a whole number of at least 1, got 0"),
        ({"mtp_depth": -1}, "mtp_depth must be a whole number of at least 0, got -1"),
        ({"packing": "online"}, "packing must be one of in_batch, offline, stream, got 'online'"),
        ({"engine": "nemo"}, "engine must be one of vlmpack, megatron, got 'nemo'"),
        ({"layout": "zigzag"}, "layout must be one of mirrored, contiguous, got 'zigzag'"),
        ({"precision": "int4"}, "precision must be one of fp32, bf16, fp16, fp8, mxfp8, nvfp4, got 'int4'"),
        ({"boundaries": "padded"}, "boundaries must be one of real, slots, got 'padded'"),
        ({"cuda_graphs": ("router",)}, "cuda_graphs may hold full_iteration, layer, .* got 'router'"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        recipe(**changes)


# ---------------------------------------------------------------------- rows


def row_of(segments: Segments) -> PackedRow:
    return PackedRow(input_ids=torch.zeros(1, segments.total, dtype=torch.int64), segments=segments)


CP2 = {**CP, "context": 2, "slots": SlotRule.for_parallel(context=2, layout="mirrored")}


@pytest.mark.parametrize("case", CUTS["must_raise"], ids=lambda case: case["why"])
def test_boundaries_that_ranks_cannot_share_are_refused(case):
    assert problems(recipe(**CP2), case["stride"], total=case["total"])


@pytest.mark.parametrize("case", CUTS["must_accept"], ids=lambda case: case["why"])
def test_repeated_boundaries_pass(case):
    stride = case["stride"]
    validate(recipe(**CP2), stride, total=case["total"])
    validate(recipe(**CP2), torch.tensor(stride), total=case["total"])
    validate(recipe(**CP2), Segments.from_boundaries(stride, total=case["total"]))


@pytest.mark.parametrize(
    ("stride", "total", "message"),
    [
        ([2, 10], 10, r"must start at 0, got \[2, 10\]: set the first one to 0"),
        ([0, 8, 4, 12], 12, "must never decrease, but segment 1 runs from 8 to 4: give cumulative counts"),
        ([0, 8], 16, r"end at 8 but the row is 16 tokens wide, .* \(SlotRule\(tail_in_slot=True\)\)"),
        ([0, 16], 12, "end at 16 but the row is 12 tokens wide"),
        ([0, 8, 14, 20], 20, r"segment 1 has 6 slots of the row \(and 1 more like it\), not a multiple of 4, .* pack"),
        ([0, 6], 6, "the row is 6 tokens wide, not a multiple of 4, .* over context=2 in bf16: pack it with SlotRule"),
    ],
)
def test_boundaries_that_are_wrong_are_told_what_to_set(stride, total, message):
    found = problems(recipe(**CP2), stride, total=total)
    assert [problem for problem in found if re.search(message, problem)], found


def test_a_decrease_is_told_as_such_and_not_as_a_slot_too():
    found = problems(recipe(**CP2), [0, 8, 6, 14], total=14)
    assert [problem for problem in found if "segment 1" in problem] == [
        "boundaries must never decrease, but segment 1 runs from 8 to 6: give cumulative counts"
    ]


def test_boundaries_alone_end_where_the_longest_row_does():
    validate(recipe(), [0, 1000, 4096])
    assert "end at 4000" in problems(recipe(), [0, 1000, 4000])[0]


def test_no_boundaries_at_all_are_refused():
    assert problems(recipe(), [], total=4) == ["boundaries must start at 0, got []: set the first one to 0"]


@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=9), context=st.sampled_from([1, 2, 3, 4]))
def test_rows_packed_by_the_recipes_own_slots_pass(lengths, context):
    slots = SlotRule.for_parallel(context=context, precision="fp8")
    length = slots.row_multiple * 200
    of = recipe(sequence_length=length, context=context, precision="fp8", per_token_loss=True, slots=slots)
    segments = Segments.from_lengths(lengths, slots)
    validate(of, segments)
    validate(of, row_of(segments))


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any),
    ranks=st.sampled_from([2, 3]),
    multiple=st.sampled_from([1, 4, 12]),
    row_multiple=st.sampled_from([1, 3, 24]),
    layout=st.sampled_from(["mirrored", "contiguous"]),
)
def test_rows_pass_exactly_where_they_can_be_cut(lengths, ranks, multiple, row_multiple, layout):
    slots = SlotRule.for_parallel(context=ranks, layout=layout)
    of = recipe(sequence_length=4080, context=ranks, layout=layout, per_token_loss=True, slots=slots)
    segments = Segments.from_lengths(lengths, SlotRule(multiple=multiple, row_multiple=row_multiple))
    try:
        Partition(segments=segments, ranks=ranks, layout=layout)
    except LayoutError:
        assert problems(of, segments)
    else:
        assert problems(of, segments) == []


def test_a_tail_is_no_problem_where_nothing_cuts_it_or_megatron_gets_it_as_a_slot():
    tail = Segments.from_lengths([8, 8], SlotRule(pad_to=32))
    validate(recipe(), tail)
    validate(recipe(**CP2, engine="megatron"), tail)
    assert "end at 16 but the row is 32" in problems(recipe(**CP2), tail)[0]


def test_a_row_wider_than_the_recipe_or_of_another_width_is_refused():
    assert "8192 tokens wide but sequence_length=4096" in problems(recipe(), Segments.from_lengths([8192]))[0]
    fixed = recipe(slots=SlotRule(pad_to=4096))
    assert "4000 tokens wide but pad_to=4096" in problems(fixed, Segments.from_lengths([4000]))[0]


def test_the_slots_that_a_recipe_needs_serve_training_and_evaluation():
    ranks = {"context": 2, "eval_context": 3}
    assert recipe(**ranks).needed_slots == SlotRule(row_multiple=6)
    mirrored = SlotRule(multiple=12, row_multiple=12, tail_in_slot=True)
    assert recipe(**ranks, engine="megatron").needed_slots == mirrored


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_an_enabled_model_is_given_no_more_room_than_it_takes_itself(ranks):
    parallel = Parallel()
    parallel.collectives.size = ranks
    assert SlotRule.for_parallel(context=ranks) == parallel.slots(SlotRule()) == recipe(context=ranks).needed_slots
