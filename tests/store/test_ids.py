"""Ids of samples in a store: whatever a string can hold."""

from __future__ import annotations

import json

from chats import chat
from store.stores import packing, store, texts

from vlmpack.collate import SkipLimit
from vlmpack.store import PackedDataset

BROKEN = {"messages": [{"role": "user", "content": "?"}]}
"""Nothing to learn."""


def test_half_of_a_surrogate_pair_in_an_id_is_kept(tmp_path):
    half = json.loads('"\\ud83d"')
    samples = [*texts(4), chat("?", "a", id=f"sum {half}"), chat("?", "a", id="Größe 👍"), {**BROKEN, "id": half}]
    manifest = store(tmp_path, samples, packing(on_bad="skip", skip_limit=SkipLimit(max_bad_fraction=0.5)))
    dataset = PackedDataset(tmp_path)
    ids = {sample.sample_id for row in range(len(dataset)) for sample in dataset.measured(row)}
    assert {f"sum {half}", "Größe 👍"} < ids
    (listed,) = (json.loads(line) for line in (tmp_path / "left_out.jsonl").read_text().splitlines())
    assert (listed["sample_id"], manifest.reasons) == (half, {"no_targets": 1})


def test_other_letters_are_stored_as_they_are(tmp_path):
    import pyarrow.parquet as pq

    store(
        tmp_path,
        [chat("?", "a", id="Größe 👍"), {**BROKEN, "id": "合計"}],
        packing(on_bad="skip", skip_limit=SkipLimit(max_bad_fraction=1)),
    )
    (row,) = pq.read_table(next(tmp_path.glob("rows-*"))).to_pylist()
    assert row["sample_ids"] == ['"Größe 👍"']
    assert "合計" in (tmp_path / "left_out.jsonl").read_text(encoding="utf-8")
