"""Arguments of a wrong kind are refused where they are given, with what to give instead; objects tell what they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chats import chat, processor_of
from torch.utils.data import DataLoader

from vlmpack.collate import VLMCollator
from vlmpack.data import open_dataset
from vlmpack.errors import ConfigError, SampleError
from vlmpack.loading import PackedBatchSampler, PackedStream, RowSettings, StreamPacker
from vlmpack.loading.stream_packer import token_count
from vlmpack.plan import LengthTable

ROWS = RowSettings(capacity=10)
SAMPLES = [{"length": 3}, {"length": 4}]
OPEN = r"'.*chats\.jsonl' is a path: open it with vlmpack\.data\.open_dataset\(path\)"
SETTINGS = r"settings has to be a RowSettings, such as RowSettings\(capacity=4096\), got a "
PLAN = r"plan has to be a Plan, such as plan_bins\(lengths, capacity=4096\), got a "


def table() -> LengthTable:
    return LengthTable.from_rows([])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PackedStream("data/chats.jsonl", ROWS), OPEN),
        (lambda: PackedStream(Path("data/chats.jsonl"), ROWS), OPEN),
        (lambda: PackedStream(b"chats.jsonl", ROWS), OPEN),  # type: ignore[arg-type]
        (lambda: PackedStream({"train": SAMPLES}, ROWS), "got a dict with the keys 'train'; if they are splits"),
        (lambda: PackedStream(SAMPLES, 1500), SETTINGS + "int"),
        (lambda: StreamPacker(1500), SETTINGS + "int"),
        (lambda: RowSettings(capacity=10, limits=3), "limits has to be a Mapping, such as .*, got a int"),
        (
            lambda: StreamPacker(ROWS).pack({"length": 3}),
            r"pack takes a list of samples, got a dict; of one give \[sam",
        ),
        (lambda: StreamPacker(ROWS).pack("chats.jsonl"), "pack takes a list of samples, got a str"),
        (
            lambda: StreamPacker(ROWS).add([{"length": 3}]),
            "a sample is a list, and not a dict; count its tokens by `len",
        ),
        (lambda: token_count(3), "a sample is a int, and not a dict; .* `length`: length=collator.length"),
        (
            lambda: token_count({"messages": []}),
            r"only \['messages'\]; .* `length`: length=collator.length of the VLMC",
        ),
        (
            lambda: next(iter(PackedStream([{"messages": []}], ROWS))),
            "count its tokens by `length`: length=collator.leng",
        ),
        (lambda: PackedBatchSampler([[0, 1]]), PLAN + "list"),
        (lambda: PackedBatchSampler(table()), PLAN + "LengthTable"),
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
