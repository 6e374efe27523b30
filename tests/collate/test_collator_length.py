"""VLMCollator.length: what a stream is told of a sample, and what a collator tells of itself."""

from __future__ import annotations

from typing import Any

import pytest
from chats import chat, picture, processor_of

from vlmpack.collate import VLMCollator
from vlmpack.errors import SampleError
from vlmpack.layout import PackedRow, SlotRule

SAMPLE = chat("Which is larger?", "The second", picture(40, 99), picture(120, 70))
LONG = chat("why?", "because " * 40)
BROKEN = {"messages": [{"role": "user", "content": "?"}], "id": "broken"}
"""Nothing to learn."""


def packing(**settings: Any) -> VLMCollator:
    return VLMCollator(processor_of(), layout="packed", **settings)


@pytest.mark.parametrize("sample", [SAMPLE, LONG])
@pytest.mark.parametrize("multiple", [1, 7])
@pytest.mark.parametrize("cut", [{}, {"max_length": 35, "overlength": "truncate", "train_on": "all"}])
def test_a_length_is_the_room_that_the_sample_takes_up_in_a_row(sample: Any, multiple: int, cut: Any) -> None:
    collator = packing(slots=SlotRule(multiple=multiple), **cut)
    row = collator.collate([sample])
    assert isinstance(row, PackedRow)
    assert collator.length(sample) == row.segments.total
    assert collator.skip_log.received == 1, "a length is not counted"


def test_a_sample_that_cannot_be_used_is_refused_where_the_collator_raises() -> None:
    with pytest.raises(SampleError, match=r"sample 'broken': .*none of its") as caught:
        packing().length(BROKEN)
    assert caught.value.reason == "no_targets"


@pytest.mark.parametrize(
    ("sample", "settings"), [(BROKEN, {"on_bad": "skip"}), (LONG, {"max_length": 9, "overlength": "drop"})]
)
def test_a_sample_that_is_left_out_takes_up_one_slot_and_is_counted_by_collate(sample: Any, settings: Any) -> None:
    collator = packing(slots=SlotRule(multiple=4), **settings)
    assert collator.length(sample) == 4
    assert collator.skip_log.received == 0
    collator.collate([sample])
    assert collator.skip_log.refused == 1


def test_a_collator_tells_its_settings_and_its_skip_log_in_one_line() -> None:
    collator = packing(on_bad="skip", slots=SlotRule(multiple=8), max_length=64, skip_log=None)
    collator.collate([SAMPLE, BROKEN])
    assert repr(collator) == (
        f"VLMCollator(Qwen3VLProcessor, layout='packed', slots={SlotRule(multiple=8)}, max_length=64, "
        "overlength='error', train_on='assistant', on_bad='skip', skip_log=SkipLog(2 received, 1 used, 1 refused, "
        "no_targets 1))"
    )
    assert repr(VLMCollator(processor_of())) == (
        "VLMCollator(Qwen3VLProcessor, layout='padded', overlength='error', train_on='assistant', on_bad='raise', "
        "skip_log=SkipLog(0 received, 0 used, 0 refused))"
    )
