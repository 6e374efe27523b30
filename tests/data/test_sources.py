"""Which files of a folder are of a split, and which are refused; and what the file system does not let be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vlmpack.data import open_dataset
from vlmpack.data.archive import ImageFolder
from vlmpack.data.images import ImageError, load_image
from vlmpack.data.open import OpenDataset
from vlmpack.errors import ConfigError, SampleError

CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = pytest.importorskip("datasets", reason="waits for the datasets library (extra [data])")
    monkeypatch.setattr(module.config, "HF_DATASETS_CACHE", tmp_path / ".cache")
    module.disable_progress_bars()
    return module


def write(datasets: Any, folder: Path, *names: str) -> None:
    """Parquet files of one sample each, whose tokens are the place of its name."""
    for at, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list([{"input_ids": [at]}]).to_parquet(folder / name)


def places(dataset: OpenDataset) -> list[int]:
    return [sample["input_ids"][0] for sample in dataset]


class TestSplitsOfAFolder:
    """As `datasets.load_dataset` reads a folder, except that nothing is left out without a word."""

    @pytest.mark.parametrize(
        ("names", "split", "expected"),
        [
            (["0000.parquet", "0001.parquet"], "train", [0, 1]),
            (["deep/a.parquet", "deep/er/b.parquet"], "train", [0, 1]),
            (["0000.parquet", "test.parquet"], "train", [0]),
            (["0000.parquet", "test.parquet"], "test", [1]),
            (["train/0000.parquet", "validation/0000.parquet"], "validation", [1]),
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
        self, names: list[str], split: str, expected: list[int], datasets: Any, tmp_path: Path
    ) -> None:
        write(datasets, tmp_path / "mine", *names)
        assert places(open_dataset(tmp_path / "mine", split=split)) == expected

    def test_datasets_reads_the_same(self, datasets: Any, tmp_path: Path) -> None:
        names = ["receipts-train-0.parquet", "receipts-dev-0.parquet", "my_eval.parquet"]
        write(datasets, tmp_path / "mine", *names)
        for split in ("train", "validation", "test"):
            table = datasets.load_dataset("parquet", data_dir=str(tmp_path / "mine"), split=split)
            assert [row["input_ids"][0] for row in table] == places(open_dataset(tmp_path / "mine", split=split))

    @pytest.mark.parametrize(
        ("names", "split", "message"),
        [
            (
                ["test.parquet"],
                "train",
                r"no parquet file of split 'train' .* are of 'test': test.parquet; pass one of",
            ),
            (["0000.parquet"], "test", r"no parquet file of split 'test' .* are of 'train': 0000.parquet; pass one of"),
            (
                ["train.parquet", "more.parquet"],
                "train",
                r"holds train.parquet, named after split 'train', and more.pa",
            ),
            (["train-test.parquet"], "train", "train-test.parquet is named after splits test and train; give a list"),
            (
                ["data/train_sft-00000-of-00001.parquet", "data/train_gen-00000-of-00001.parquet"],
                "train",
                r"its files are of 'train_gen', 'train_sft': data/train_gen-00000.*; pass one of these as split",
            ),
        ],
    )
    def test_what_may_be_meant_otherwise_is_refused(
        self, names: list[str], split: str, message: str, datasets: Any, tmp_path: Path
    ) -> None:
        write(datasets, tmp_path / "mine", *names)
        with pytest.raises(ConfigError, match=message):
            open_dataset(tmp_path / "mine", split=split)

    @pytest.mark.parametrize("name", ["more.jsonl", "more.ndjson", "more.json"])
    def test_json_beside_parquet_is_not_left_out_silently(self, name: str, datasets: Any, tmp_path: Path) -> None:
        write(datasets, tmp_path / "mine", "0000.parquet")
        (tmp_path / "mine" / name).write_text(json.dumps([{"messages": CHAT}]))
        with pytest.raises(ConfigError, match=rf"holds parquet files and {name}: which of them are samples is not kn"):
            open_dataset(tmp_path / "mine")
        assert places(open_dataset([tmp_path / "mine" / "0000.parquet"])) == [0]

    def test_json_that_describes_the_data_set_is_no_rows(self, datasets: Any, tmp_path: Path) -> None:
        write(datasets, tmp_path / "mine", "0000.parquet")
        (tmp_path / "mine" / "dataset_infos.json").write_text(json.dumps({"default": {}}, indent=2))
        assert places(open_dataset(tmp_path / "mine")) == [0]


class TestNamedFiles:
    @pytest.mark.parametrize("name", ["0000.parquet", "test.parquet", "validation-00000-of-00001.parquet"])
    def test_they_are_read_whatever_they_are_called(self, name: str, datasets: Any, tmp_path: Path) -> None:
        write(datasets, tmp_path, name)
        assert places(open_dataset(tmp_path / name)) == places(open_dataset([tmp_path / name])) == [0]

    def test_a_split_that_their_names_contradict_is_refused(self, datasets: Any, tmp_path: Path) -> None:
        write(datasets, tmp_path, "train.parquet", "test.parquet")
        assert places(open_dataset(tmp_path / "test.parquet", split="test")) == [1]
        with pytest.raises(
            ConfigError, match=r"named after split 'train' was given for split 'test'; .* leave split= o"
        ):
            open_dataset(tmp_path / "train.parquet", split="test")


class TestWhatMayNotBeRead:
    """The tests may run as root, who may read everything: what opens a file refuses instead."""

    @pytest.fixture
    def closed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A file of samples, an image and a folder that the file system does not let be opened."""
        (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
        Image.new("RGB", (4, 4)).save(tmp_path / "0.png")
        denied = PermissionError(13, "Permission denied")

        def refuse(*_: Any, **__: Any) -> None:
            raise denied

        for call in ("open", "read_text", "iterdir"):
            monkeypatch.setattr(Path, call, refuse)
        return tmp_path

    @pytest.mark.parametrize("source", ["rows.jsonl", "."])
    def test_a_source_is_named(self, source: str, closed: Path) -> None:
        with pytest.raises(ConfigError, match=r"cannot be read: \[Errno 13\] Permission denied; check that this user"):
            open_dataset(closed / source)

    def test_so_is_a_list(self, closed: Path) -> None:
        with pytest.raises(ConfigError, match=r"^the list of 1 files cannot be read: \[Errno 13\] Permission denied"):
            open_dataset([closed / "rows.jsonl"])

    def test_so_is_an_image(self, closed: Path) -> None:
        with pytest.raises(ImageError, match=r"the image file .*0.png' cannot be read: \[Errno 13\]") as caught:
            load_image(closed / "0.png")
        assert caught.value.reason == "image_missing"

    def test_an_annotation_is_a_bad_sample(self, closed: Path) -> None:
        rows = ImageFolder(images=(closed / "image" / "receipt_0.png",))
        with pytest.raises(SampleError, match=r"receipt_0.json cannot be read as a CORD annotation"):
            rows[0]

    def test_a_file_that_goes_while_it_is_read_is_bad_samples(self, tmp_path: Path) -> None:
        (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
        dataset = open_dataset(tmp_path / "rows.jsonl")
        (tmp_path / "rows.jsonl").unlink()
        (error,) = dataset.__getitems__([0])
        assert isinstance(error, SampleError)
        assert error.reason == "row_unreadable"
        assert "cannot be read any more" in error.detail

    def test_a_cache_that_cannot_be_written_is_named(self, datasets: Any, tmp_path: Path, monkeypatch) -> None:
        write(datasets, tmp_path, "0000.parquet")

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr(datasets.Dataset, "from_parquet", refuse)
        with pytest.raises(
            ConfigError, match=r"copied into the cache of datasets: .*Read-only.*; HF_DATASETS_CACHE na"
        ):
            open_dataset(tmp_path / "0000.parquet")
