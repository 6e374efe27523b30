"""SlotRule: how much room segments and rows take up, also where a row is cut over ranks."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout.naive import naive_pack

from vlmpack.errors import ConfigError, LayoutError
from vlmpack.layout import Segments, SlotRule

VECTORS = Path(__file__).parents[1] / "vectors" / "context_parallel.json"
CASES = json.loads(VECTORS.read_text())["alignment"]["cases"]
BLOCKS = {"fp32": 1, "bf16": 1, "fp16": 1, "fp8": 16, "mxfp8": 32, "nvfp4": 128}

lengths_lists = st.lists(st.integers(0, 40), min_size=1, max_size=9)
ranks = st.fixed_dictionaries(
    {
        "context": st.sampled_from([1, 2, 3, 4]),
        "tensor": st.sampled_from([1, 2, 3, 8]),
        "sequence_parallel": st.booleans(),
        "precision": st.sampled_from(sorted(BLOCKS)),
        "layout": st.sampled_from(["mirrored", "contiguous"]),
    }
)


def naive_multiple(context, tensor, sequence_parallel, layout):
    """The smallest slot that every cut divides, found by trying."""
    slot = 1
    while layout == "mirrored" and (
        (context > 1 and slot % (2 * context)) or (sequence_parallel and tensor > 1 and slot % (context * tensor))
    ):
        slot += 1
    return slot


def tokens_on_a_rank(row, context, tensor, sequence_parallel):
    return row / context / (tensor if sequence_parallel else 1)


# ---------------------------------------------------------------------- the multiple


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"tp{c['tp']} cp{c['cp']}{' sp' * c['sp']}")
def test_slots_are_the_multiple_of_the_vectors(case):
    ranks = {"context": case["cp"], "tensor": case["tp"], "sequence_parallel": case["sp"]}
    rule = SlotRule.for_parallel(**ranks, layout="mirrored")
    assert rule.multiple == case["multiple"]


@given(lengths=lengths_lists, setting=ranks)
def test_slots_and_rows_are_the_least_that_can_be_cut(lengths, setting):
    block = BLOCKS[setting["precision"]]
    cut = {name: setting[name] for name in ("context", "tensor", "sequence_parallel")}
    multiple = naive_multiple(**cut, layout=setting["layout"])
    row = naive_pack([[0] * n for n in lengths], [[0] * n for n in lengths], multiple=multiple)
    width = len(row.input_ids)
    while tokens_on_a_rank(width, **cut) % block:
        width += 1

    segments = Segments.from_lengths(lengths, SlotRule.for_parallel(**setting))
    assert segments.total == width
    assert segments.real == tuple(row.real)
    assert segments.stride[:-1] == tuple(row.stride[:-1])


@given(lengths=lengths_lists, spare=st.integers(0, 99), more=st.integers(0, 3), context=st.sampled_from([2, 3, 4]))
def test_the_slots_of_a_mirrored_cut_cover_the_row(lengths, spare, more, context):
    block = 2 * context
    width = sum(-(-n // block) * block for n in lengths) + spare * block
    most = len(lengths) + more
    rule = SlotRule.for_parallel(context=context, layout="mirrored", pad_to=width or None, max_segments=most)
    segments = Segments.from_lengths(lengths, rule)
    free = Segments.from_lengths(lengths, SlotRule(multiple=block, pad_to=width or None))
    assert segments.stride[-1] == segments.total
    assert all(slot % block == 0 for slot in segments.slots)
    assert segments.slots[: len(lengths) - 1] == free.slots[:-1]
    assert segments.padding_mask().tolist() == free.padding_mask().tolist()


def test_a_tail_goes_into_the_last_samples_slot_before_repeated_boundaries():
    segments = Segments.from_boundaries([0, 3, 5, 5, 5], total=8)
    assert segments.without_tail().stride == (0, 3, 8, 8, 8)
    assert segments.without_tail().real == segments.real


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlotRule.for_parallel(context=0), "context must be a whole number of at least 1, got 0"),
        (lambda: SlotRule.for_parallel(tensor=2.0), "tensor must be a whole number of at least 1, got 2.0"),
        (lambda: SlotRule.for_parallel(precision="int8"), "precision must be one of fp32, bf16, .*, got 'int8'"),
        (lambda: SlotRule.for_parallel(layout="striped"), "layout must be one of mirrored, contiguous, got 'striped'"),
        (lambda: SlotRule.for_parallel(context=4, pad_to=10), "pad_to=10 is not a multiple .* use pad_to=12"),
    ],
)
def test_a_rule_that_cannot_be_is_refused_with_what_to_set(make, message):
    with pytest.raises((ConfigError, LayoutError), match=message):
        make()
