"""Which files of a folder are of a split, and which are refused; and what the file system does not let be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vlmpack.data import open_dataset
from vlmpack.data.images import load_image
from vlmpack.data.open import OpenDataset
from vlmpack.errors import ConfigError, SampleError

CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


def write(datasets: Any, folder: Path, *names: str) -> Path:
    """Parquet files of one sample each, whose tokens are the place of its name."""
    for at, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list([{"input_ids": [at]}]).to_parquet(folder / name)
    return folder


def places(dataset: OpenDataset) -> list[int]:
    return [sample["input_ids"][0] for sample in dataset]


# ---------------------------------------------------------------------- splits, as `datasets.load_dataset` reads them


@pytest.mark.parametrize(
    ("names", "split", "expected"),
    [
        (["deep/a.parquet", "deep/er/b.parquet"], "train", [0, 1]),
        (["0000.parquet", "test.parquet"], "train", [0]),
        (["0000.parquet", "test.parquet"], "test", [1]),
        (["training_set/0.parquet", "val/0.parquet", "eval/0.parquet"], "validation", [1]),
        (["training_set/0.parquet", "val/0.parquet", "eval/0.parquet"], "test", [2]),
        (["receipts-train-0.parquet", "receipts-dev-0.parquet"], "train", [0]),
        (["receipts.train1.parquet", "receipts.valid1.parquet"], "validation", [1]),
        (["train/test_of_taste.parquet"], "train", [0]),
        (["data/train-00000-of-00001-0a1b.parquet", "data/test-00000-of-00001.parquet"], "train", [0]),
        (["data/train_sft-00000-of-00001.parquet", "data/train_gen-00000-of-00001.parquet"], "train_gen", [1]),
        (["latest.parquet", "contrains.parquet"], "train", [1, 0]),  # words, not letters; in the order of names
        (["0000.parquet", ".cache/1.parquet", "__pycache__/2.parquet"], "train", [0]),
        (["0000.parquet", "dev.parquet"], "dev", [1]),
    ],
)
def test_the_split_is_a_word_of_a_folder_or_a_file(
    names: list[str], split: str, expected: list[int], datasets: Any, tmp_path: Path
) -> None:
    assert places(open_dataset(write(datasets, tmp_path / "mine", *names), split=split)) == expected


def test_datasets_reads_the_same(datasets: Any, tmp_path: Path) -> None:
    write(datasets, tmp_path / "mine", "receipts-train-0.parquet", "receipts-dev-0.parquet", "my_eval.parquet")
    for split in ("train", "validation", "test"):
        table = datasets.load_dataset("parquet", data_dir=str(tmp_path / "mine"), split=split)
        assert [row["input_ids"][0] for row in table] == places(open_dataset(tmp_path / "mine", split=split))


@pytest.mark.parametrize(
    ("names", "split", "message"),
    [
        (["test.parquet"], "train", r"no parquet file of split 'train' .* are of 'test': test.parquet; pass one of"),
        (["0000.parquet"], "test", r"no parquet file of split 'test' .* are of 'train': 0000.parquet; pass one of"),
        (["train.parquet", "more.parquet"], "train", r"holds train.parquet, named after split 'train', and more.pa"),
        (["train-test.parquet"], "train", "train-test.parquet is named after splits test and train; give a list"),
        (
            ["data/train_sft-00000-of-00001.parquet", "data/train_gen-00000-of-00001.parquet"],
            "train",
            r"its files are of 'train_gen', 'train_sft': data/train_gen-00000.*; pass one of these as split",
        ),
    ],
)
def test_what_may_be_meant_otherwise_is_refused(
    names: list[str], split: str, message: str, datasets: Any, tmp_path: Path
) -> None:
    write(datasets, tmp_path / "mine", *names)
    with pytest.raises(ConfigError, match=message):
        open_dataset(tmp_path / "mine", split=split)


@pytest.mark.parametrize("name", ["more.jsonl", "more.ndjson", "more.json"])
def test_json_beside_parquet_is_not_left_out_silently(name: str, datasets: Any, tmp_path: Path) -> None:
    folder = write(datasets, tmp_path / "mine", "0000.parquet")
    (folder / "dataset_infos.json").write_text(json.dumps({"default": {}}, indent=2))  # which describes the data set
    assert places(open_dataset(folder)) == [0]
    (folder / name).write_text(json.dumps([{"messages": CHAT}]))
    with pytest.raises(ConfigError, match=rf"holds parquet files and {name}, and either may be the samples"):
        open_dataset(folder)
    assert places(open_dataset([folder / "0000.parquet"])) == [0]


@pytest.mark.parametrize("name", ["0000.parquet", "test.parquet", "validation-00000-of-00001.parquet"])
def test_files_that_are_named_are_read_whatever_they_are_called(name: str, datasets: Any, tmp_path: Path) -> None:
    write(datasets, tmp_path, name)
    assert places(open_dataset(tmp_path / name)) == places(open_dataset([tmp_path / name])) == [0]


def test_a_saved_data_set_has_its_own_splits(datasets: Any, tmp_path: Path) -> None:
    tables = {name: datasets.Dataset.from_list([{"input_ids": [at]}]) for at, name in enumerate(("train", "test"))}
    datasets.DatasetDict(tables).save_to_disk(tmp_path / "both")
    assert [places(open_dataset(tmp_path / "both", split=split)) for split in tables] == [[0], [1]]
    with pytest.raises(ConfigError, match=r"no split 'validation' in .*both; it holds train, test"):
        open_dataset(tmp_path / "both", split="validation")
    assert places(open_dataset(tmp_path / "both", split="eval")) == [1]
    datasets.Dataset.from_list([{"input_ids": [7]}], split="test").save_to_disk(tmp_path / "one")
    with pytest.raises(ConfigError, match=r"no split 'train' in .*one; it holds test"):
        open_dataset(tmp_path / "one")
    tables["train"].save_to_disk(tmp_path / "none")
    assert places(open_dataset(tmp_path / "none")) == [0]


# ---------------------------------------------------------------------- what cannot be read


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("nowhere", "'nowhere' is no file or folder here and no hub id"),
        ("data/rows.jsonl", "'data/rows.jsonl' is no file or folder here and no hub id"),
        ("a/b/c", "'a/b/c' is no file or folder here and no hub id"),
        (Path("nobody/nothing"), "is no file or folder here and no hub id"),
        ("nobody/nothing-at-all", r"and the hub did not give its split 'train' \(check the id, the split and the net"),
        ("", r"no table for split 'train' \(it holds: notes.md, rows.jsonl.gz, table.csv\); .* write train.jsonl wi"),
        ("rows.jsonl.gz", r"is a .gz file; give .json, .jsonl, .ndjson, .parquet or .tar, unpacked"),
        ("table.csv", r"is a .csv file; .*datasets.load_dataset\('csv', data_files=...\)"),
        ("/nowhere/a.parquet", "no such file: /nowhere/a.parquet; check the path"),
        ([], "no such file: the list is empty"),
        (None, r"got a NoneType\. Samples that are in memory, .* give them to VLMCollator, to a"),
        ([{"messages": CHAT}], r"got a list of dict\. Samples that are in memory"),
        (b"rows.jsonl", r"got a bytes\. Samples"),
        ({"train": "rows.jsonl"}, r"got a dict\. Samples"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of the hub's client, about a network that is not there
def test_what_is_no_data_set_is_refused(
    source: Any, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, datasets: Any
) -> None:
    del datasets
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("rows.jsonl.gz", "table.csv", "notes.md"):
        Path(name).write_bytes(b"")
    with pytest.raises(ConfigError, match=expected):
        open_dataset(source)


def test_a_folder_of_json_is_read_by_the_names_of_its_files(tmp_path: Path) -> None:
    def save(name: str, *ids: str, indent: int | None = None) -> None:
        rows = [{"id": name, "messages": CHAT} for name in ids]
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(rows if len(rows) > 1 else rows[0], indent=indent))

    save("a/1.json", "one", indent=2)  # an object a file
    save("b.jsonl", "two")
    save("more.json", "three", "four")
    save("test.json", "five")
    (tmp_path / "dataset_infos.json").write_text("{}")
    assert [sample["id"] for sample in open_dataset(tmp_path)] == ["one", "two", "three", "four"]
    assert [sample["id"] for sample in open_dataset(tmp_path, split="test")] == ["five"]
    with pytest.raises(ConfigError, match=r"split 'test' of .*b.jsonl: a file given by name is one split"):
        open_dataset([tmp_path / "b.jsonl"], split="test")
    save("train.json", "six")
    with pytest.raises(ConfigError, match=r"holds train.json, named after split 'train', and a/1.json, .* no split"):
        open_dataset(tmp_path)


def test_broken_tables_are_named(datasets: Any, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError, match=r"a.parquet cannot be read as parquet"):
        open_dataset(tmp_path / "a.parquet")
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read as a saved dataset; save it again"):
        open_dataset(tmp_path)


def test_a_missing_library_is_named_with_its_extra(hide_package: Any) -> None:
    hide_package("datasets")
    with pytest.raises(ConfigError, match=r"reading hub id 'a/b' needs datasets, not installed here: pip install 'vl"):
        open_dataset("a/b")


def test_files_that_may_not_be_opened_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    Image.new("RGB", (4, 4)).save(tmp_path / "0.png")

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    for call in ("open", "read_text", "iterdir"):
        monkeypatch.setattr(Path, call, refuse)
    for source, name in (("rows.jsonl", "rows.jsonl"), (".", ""), (["rows.jsonl"], "1 files")):
        sources = [tmp_path / each for each in source] if isinstance(source, list) else tmp_path / source
        with pytest.raises(ConfigError, match=rf"{name} cannot be read: \[Errno 13\] .*; check the permissions"):
            open_dataset(sources)
    with pytest.raises(SampleError, match=r"the image file .*0.png' cannot be read: \[Errno 13\]") as caught:
        load_image(tmp_path / "0.png")
    assert caught.value.reason == "image_missing"
