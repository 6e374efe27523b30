"""StreamPacker: whole samples, exact rows, what does not fit waits, and nothing is lost on the way."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from chats import chat, processor_of
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from vlmpack.collate import VLMCollator
from vlmpack.data import open_dataset
from vlmpack.errors import ConfigError, SampleError
from vlmpack.loading import PackedBatchSampler, PackedStream, RowSettings, StreamPacker
from vlmpack.loading.stream_packer import token_count
from vlmpack.plan import LengthTable


def samples(lengths):
    return [{"id": at, "length": length} for at, length in enumerate(lengths)]


def ids(rows):
    return [[sample["id"] for sample in row] for row in rows]


def packed(packer, lengths):
    """All rows of a stream."""
    rows = []
    for sample in samples(lengths):
        packer.add(sample)
        rows += packer.rows()
    return rows + packer.flush()


def test_a_rollout_that_fits_no_other_does_not_hold_the_others_up():
    packer = StreamPacker(RowSettings(capacity=10, min_fill=0.8))
    assert ids(packer.pack(samples([7, 5, 4, 5, 4]))) == [[1, 3], [2, 4]]
    assert len(packer) == 1
    assert packer.tokens == 7


@given(calls=st.lists(st.lists(st.integers(1, 20), max_size=8), min_size=1, max_size=8), min_fill=st.floats(0, 1))
def test_nobody_waits_longer_than_for_one_call(calls, min_fill):
    packer = StreamPacker(RowSettings(capacity=20, min_fill=min_fill))
    given_out, number = {}, 0
    for call, lengths in enumerate([*calls, []]):
        batch = [{"id": number + at, "length": length, "call": call} for at, length in enumerate(lengths)]
        number += len(batch)
        for row in packer.pack(batch):
            tokens = sum(map(token_count, row))
            assert min_fill * 20 <= tokens <= 20 or min(sample["call"] for sample in row) < call
            given_out |= {sample["id"]: call - sample["call"] for sample in row}
    assert sorted(given_out) == list(range(number))
    assert max(given_out.values(), default=0) <= 1


@pytest.mark.parametrize("bad", [{"length": 30}, {"length": 0}, {"length": 2.5}, {"text": "three"}])
def test_a_call_with_a_bad_sample_changes_nothing(bad):
    packer = StreamPacker(RowSettings(capacity=10, min_fill=0.8))
    packer.pack(samples([6, 4, 3]))
    before = packer.state_dict()
    assert packer.buffered  # the guard: there is something that could change
    with pytest.raises((SampleError, ConfigError)):
        packer.pack([{"id": 3, "length": 7}, bad])
    assert packer.state_dict() == before
    assert packer.tokens == 3
    assert ids(packer.pack([{"id": 3, "length": 7}])) == [[2, 3]]


def test_a_sample_that_is_too_long_is_refused_dropped_or_alone_as_asked():
    with pytest.raises(SampleError, match="sample 1: has 30 tokens"):
        packed(StreamPacker(RowSettings(capacity=10)), [5, 30, 5])
    dropping = StreamPacker(RowSettings(capacity=10, overlength="drop"))
    assert ids(packed(dropping, [5, 30, 5])) == [[0, 2]]
    assert dropping.dropped == 1
    alone = StreamPacker(RowSettings(capacity=10, overlength="own_row"))
    alone.add({"id": "long", "length": 30})
    assert len(alone) == 1  # whoever flushes only while somebody waits loses nobody
    assert ids(alone.flush()) == [["long"]]
    assert len(alone) == 0
    assert ids(packed(alone, [5, 30, 5])) == [[1], [0, 2]]


@pytest.mark.parametrize("other", [{"capacity": 60}, {"min_fill": 0.5}, {"buffer_tokens": 9}])
def test_the_state_of_any_other_settings_is_refused_even_if_the_samples_would_fit(other):
    packer = StreamPacker(RowSettings(capacity=50))
    packer.add({"length": 40})
    with pytest.raises(ConfigError, match="the state is of RowSettings"):
        StreamPacker(RowSettings(**{"capacity": 50, **other})).load_state_dict(packer.state_dict(), packer.buffered)
    with pytest.raises(ConfigError, match=r"samples that are measured in another way: .*has 80 tokens"):
        longer = StreamPacker(RowSettings(capacity=50), length=lambda sample: 80)
        longer.load_state_dict(packer.state_dict(), packer.buffered)


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor])
def test_ids_with_a_batch_dimension_are_as_many_as_without(make):
    assert token_count({"input_ids": make([5, 6, 7])}) == token_count({"input_ids": make([[5, 6, 7]])}) == 3
    assert token_count({"input_ids": [make([5, 6, 7])]}) == 3
    assert token_count({"input_ids": make([])}) == 0
    packer = StreamPacker(RowSettings(capacity=10))
    packed = packer.pack({"input_ids": make([[1] * 6])} for _ in range(3))
    assert [len(row) for row in packed] == [1, 1, 1]  # 6 of 10: no two share a row


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        *(
            (make([[1, 2], [3, 4]]), r"shape \[2, 2\]; .* or a function `len")
            for make in (list, np.array, torch.tensor)
        ),
        *((make([[[1, 2]]]), r"shape \[1, 1, 2\]; .* or a function `len") for make in (list, np.array, torch.tensor)),
        *((ids, f"no shape, they are {ids!r}") for ids in (None, 3, "three")),
    ],
)
def test_ids_that_are_not_those_of_one_sample_are_refused_by_name(ids, told):
    packer = StreamPacker(RowSettings(capacity=10))
    packer.add({"input_ids": [1, 2]})
    with pytest.raises(SampleError, match=rf"sample 1: input_ids have {told}") as caught:
        packer.add({"input_ids": ids})
    assert caught.value.reason == "bad_shape"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"capacity": 0}, "the capacity of a row must be a whole number from"),
        ({"capacity": 5, "limits": {"images": 0}}, "the limit of 'images' must be a whole number from"),
        ({"capacity": 5, "buffer_tokens": -1}, "buffer_tokens must be at least 0"),
        ({"capacity": 5, "buffer_tokens": float("nan")}, "buffer_tokens must be at least 0"),
        ({"capacity": 5, "min_fill": 1.1}, "min_fill must lie between 0 and 1"),
        ({"capacity": 5, "overlength": "cut"}, "overlength must be one of error, drop, truncate"),
        ({"capacity": 5, "overlength": "truncate"}, "so the collator has to truncate: VLMCollator"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        RowSettings(**settings)


@pytest.mark.parametrize("overlength", ["error", "drop", "own_row"])
@pytest.mark.parametrize("length", [2.5, 10.5, float("nan"), float("inf"), None, "3"])
def test_a_length_that_is_no_whole_number_names_its_sample(length, overlength):
    packer = StreamPacker(RowSettings(capacity=10, overlength=overlength), length=lambda sample: sample)
    packer.add(4)
    with pytest.raises(SampleError, match=r"sample 1: has a length and costs of .* must be whole numbers") as caught:
        packer.add(length)
    assert caught.value.reason == "not_whole"
    assert packer.flush() == [[4]]
    assert packer.dropped == 0


# ---------------------------------------------------------------------- arguments of a wrong kind, here and beside it

ROWS = RowSettings(capacity=10)
OPEN = r"'.*chats\.jsonl' is a path: open it with vlmpack\.data\.open_dataset\(path\)"
SETTINGS = r"settings has to be a RowSettings, such as RowSettings\(capacity=4096\), got a "
PLAN = r"plan has to be a Plan, such as plan_bins\(lengths, capacity=4096\), got a "


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PackedStream("data/chats.jsonl", ROWS), OPEN),
        (lambda: PackedStream(Path("data/chats.jsonl"), ROWS), OPEN),
        (lambda: PackedStream(b"chats.jsonl", ROWS), OPEN),  # type: ignore[arg-type]
        (lambda: PackedStream({"train": []}, ROWS), "got a dict with the keys 'train'; if they are splits"),
        (lambda: PackedStream([], 1500), SETTINGS + "int"),
        (lambda: StreamPacker(1500), SETTINGS + "int"),
        (lambda: RowSettings(capacity=10, limits=3), "limits has to be a Mapping, such as .*, got a int"),
        (lambda: StreamPacker(ROWS).pack({"length": 3}), r"a list of samples, got a dict; of one give \[sample"),
        (lambda: StreamPacker(ROWS).pack("chats.jsonl"), "pack takes a list of samples, got a str"),
        (lambda: StreamPacker(ROWS).add([{"length": 3}]), "is a list, and not a dict; count its tokens by `length"),
        (lambda: token_count(3), "a sample is a int, and not a dict; .* `length`: length=collator.length"),
        (lambda: token_count({"messages": []}), r"only \['messages'\]; .* length=collator.length of the VLMC"),
        (lambda: next(iter(PackedStream([{"messages": []}], ROWS))), "its tokens by `length`: length=collator.length"),
        (lambda: PackedBatchSampler([[0, 1]]), PLAN + "list"),
        (lambda: PackedBatchSampler(LengthTable.from_rows([])), PLAN + "LengthTable"),
    ],
)
def test_an_argument_of_a_wrong_kind_is_refused_with_the_right_one(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_a_sample_that_cannot_be_read_comes_to_the_collator_too(tmp_path):
    lines = [json.dumps(chat("why?", "because", id=0)), '{"messages": [{"ro', json.dumps(chat("?", "so", id=2))]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    collator = VLMCollator(processor_of(), layout="packed", on_bad="skip")
    settings = RowSettings(capacity=120, limits={"images": 4})
    costs = {"length": collator.length, "costs": lambda sample: {"images": len(sample.get("images", []))}}
    stream = PackedStream(open_dataset(tmp_path / "chats.jsonl"), settings, **costs)
    batches = list(DataLoader(stream, batch_size=None, collate_fn=collator))
    assert [batch["vlmpack"].sample_ids for batch in batches] == [(0, 2)]
    assert (collator.skip_log.received, dict(collator.skip_log.reasons)) == (3, {"row_unreadable": 1})
    with pytest.raises(SampleError, match=r"sample 1 .* is no JSON"):
        list(DataLoader(stream, batch_size=None, collate_fn=VLMCollator(processor_of(), layout="packed")))
