"""Columns of `datasets.Json`: what `load_dataset("json")` makes of contents that are now a text, now a list of parts.

Arrow stores them as JSON text. Every way from such a data set to the collator gives the values, never that text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import says, text, user
from PIL import Image

from vlmpack.collate import VLMCollator
from vlmpack.data import mix_datasets, open_dataset
from vlmpack.errors import SampleError
from vlmpack.lengths import measure_lengths
from vlmpack.testing import tiny_processor

datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.skipif(not hasattr(datasets, "Json"), reason="datasets.Json came with datasets 4.7")

PROCESSOR = tiny_processor()
COLLATOR = VLMCollator(PROCESSOR, layout="packed")


def chat(picture: Path, at: int) -> list[dict[str, Any]]:
    question = [{"type": "image", "image": str(picture)}, text(f"What is it, {at}?")]
    return [{"role": "system", "content": "Be brief."}, user(question), says("A receipt.")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`mixed`, whose contents are JSON, and `calls`, whose messages are: as Parquet and as `save_to_disk` writes it."""
    folder = tmp_path_factory.mktemp("json")
    picture = folder / "a.png"
    Image.new("RGB", (64, 64), "red").save(picture)
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    other = {"type": "function", "function": {"name": "g", "arguments": {"y": ["z"]}}}
    mixed = [chat(picture, at) for at in range(3)]
    calls = [[user("Go."), says("", tool_calls=[each])] for each in (call, other)]
    for name, rows in {"mixed": mixed, "calls": calls}.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
        loaded = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(folder / "cache"))
        loaded.save_to_disk(str(folder / name))
        loaded.to_parquet(str(folder / f"{name}.parquet"))
    return folder


def saved(folder: Path, name: str = "mixed") -> Any:
    return datasets.load_from_disk(str(folder / name))


def streamed(folder: Path) -> Any:
    files = str(folder / "mixed.parquet")
    return list(datasets.load_dataset("parquet", data_files=files, split="train", streaming=True))


SOURCES: dict[str, Callable[[Path], Any]] = {
    "parquet": lambda folder: open_dataset(folder / "mixed.parquet"),
    "save_to_disk": lambda folder: open_dataset(folder / "mixed"),
    "renamed": lambda folder: open_dataset(folder / "mixed", columns={"messages": "messages"}),
    "turns": lambda folder: open_dataset(folder / "mixed", branches="turns"),
    "mixed": lambda folder: mix_datasets({"a": open_dataset(folder / "mixed")}, seed=None),
    "datasets.Dataset": saved,
    "select": lambda folder: saved(folder).select([2, 1, 0]),
    "map": lambda folder: saved(folder).map(lambda row: row),
    "iterable": lambda folder: list(saved(folder).to_iterable_dataset()),
    "streaming": streamed,
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_conversation_is_what_transformers_makes_of_it(name: str, folder: Path) -> None:
    plain = PROCESSOR.apply_chat_template(
        chat(folder / "a.png", 1), tokenize=True, return_dict=True, return_tensors="pt"
    )
    row = COLLATOR.collate([SOURCES[name](folder)[1]])
    assert torch.equal(row.input_ids, plain["input_ids"])


def test_a_data_set_in_memory_is_measured_as_it_is_collated(folder: Path) -> None:
    dataset = saved(folder).select([1])
    assert measure_lengths(dataset, COLLATOR).tokens == [COLLATOR.collate([dataset[0]]).input_ids.shape[1]]


def test_a_hub_id_is_decoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: saved(folder))
    assert open_dataset("someone/chats")[1]["messages"] == chat(folder / "a.png", 1)


def test_whole_messages_may_be_json(folder: Path) -> None:
    assert [row["messages"] for row in open_dataset(folder / "calls.parquet")] == [
        row["messages"] for row in open_dataset(folder / "calls.jsonl")
    ]


def test_other_columns_stay_as_arrow_has_them(tmp_path: Path) -> None:
    features = datasets.Features({"messages": datasets.List(datasets.Json()), "image": datasets.Image()})
    rows = [{"messages": [user("Q")], "image": {"bytes": b"encoded", "path": None}}]
    datasets.Dataset.from_list(rows, features=features).save_to_disk(str(tmp_path / "rows"))
    assert open_dataset(tmp_path / "rows")[0] == {**rows[0], "id": 0}


def test_what_is_no_json_is_a_bad_sample(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    good = ['{"role": "user", "content": "Q"}', '{"role": "assistant", "content": "A"}']
    texts = pyarrow.array([*good, "{"]).cast(pyarrow.json_())
    table = pyarrow.table({"messages": pyarrow.ListArray.from_arrays([0, 2, 3], texts)})
    datasets.Dataset(table).save_to_disk(str(tmp_path / "rows"))
    for dataset in (open_dataset(tmp_path / "rows"), open_dataset(tmp_path / "rows", branches="turns")):
        with pytest.raises(SampleError, match=r"^sample 1: a column of the feature Json cannot be decoded") as seen:
            dataset[1]
        assert seen.value.reason == "row_unreadable"


@pytest.mark.parametrize("text", ["42", "true", '{"total": 5}', '[{"box": [1, 2]}]', "[1, 2]"])
def test_a_text_that_is_json_itself_is_refused_with_its_cause(text: str, tmp_path: Path) -> None:
    """`datasets` stores it without quotes, so that it comes back as a number, a mapping or a list."""
    turns = [[user(content), says(text)] for content in ("?", ["?"])]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    loaded = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))
    with pytest.raises(SampleError, match=r"a text that is JSON itself, .* is no text any more in a column"):
        COLLATOR.collate([loaded[0]])
    assert COLLATOR.collate([open_dataset(file)[0]]).metadata is not None


def test_messages_that_are_json_text_are_refused_with_the_way_to_read_them() -> None:
    messages = json.dumps([user("Q"), says("A")])
    with pytest.raises(SampleError, match=r"which is JSON text; .*cast the column"):
        COLLATOR.collate([{"messages": messages}])
    table = datasets.Dataset.from_dict({"messages": [messages]}).cast_column("messages", datasets.Json())
    assert COLLATOR.collate([table[0]]).metadata is not None
