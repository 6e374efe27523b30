"""One call for every source of receipts: the same records come out, and what does not fit is refused with a remedy."""

from __future__ import annotations

import io
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vlmpack.data.cord import CordDataset, load_cord
from vlmpack.errors import ConfigError, SampleError
from vlmpack.testing import SyntheticReceipts

SCALE = 0.25
RECORDS = list(SyntheticReceipts(num=5, scale=SCALE))
"""What is stored in every form below."""


def png(image: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **options)
    return buffer.getvalue()


def same(dataset: CordDataset, records: list[dict[str, Any]]) -> bool:
    """Whether both hold the same pixels and the same truths, in order."""
    found = [(record["image"].tobytes(), record["ground_truth"]) for record in dataset]
    return found == [(record["image"].tobytes(), record["ground_truth"]) for record in records]


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = pytest.importorskip("datasets", reason="waits for the datasets library (extra [data])")
    monkeypatch.setattr(module.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    module.disable_progress_bars()
    return module


@pytest.fixture
def table(datasets: Any) -> Any:
    """A table with the features of the hub's CORD v2: an Image column and a string column."""
    features = datasets.Features({"image": datasets.Image(), "ground_truth": datasets.Value("string")})
    return datasets.Dataset.from_list(RECORDS, features=features)


def write_archive(folder: Path, *, gt_parse: bool = True, split: str = "train") -> Path:
    """The layout of the CORD archive."""
    (folder / "image").mkdir(parents=True)
    (folder / "json").mkdir()
    for at, record in enumerate(RECORDS):
        truth = json.loads(record["ground_truth"])
        truth["meta"]["split"] = split
        if not gt_parse:
            del truth["gt_parse"]
        (folder / "image" / f"receipt_{at:05}.png").write_bytes(png(record["image"]))
        (folder / "json" / f"receipt_{at:05}.json").write_text(json.dumps(truth))
    return folder


class TestArchiveAsMap:
    @pytest.fixture
    def stored(self, tmp_path: Path) -> CordDataset:
        write_archive(tmp_path / "train")
        return load_cord(tmp_path, num=3)

    def test_it_is_a_map(self, stored: CordDataset) -> None:
        assert len(stored) == len(list(stored)) == 3
        assert stored[-1]["ground_truth"] == stored[2]["ground_truth"]
        with pytest.raises(IndexError, match="sample 3 of 3 in"):
            stored[3]

    @pytest.mark.parametrize("index", [np.int64(1), np.int64(-2)])
    def test_an_index_may_be_numpy_s(self, index: np.int64, stored: CordDataset) -> None:
        assert stored[index]["ground_truth"] == RECORDS[1]["ground_truth"]

    def test_it_travels_to_a_worker_process(self, stored: CordDataset) -> None:
        assert same(pickle.loads(pickle.dumps(stored)), RECORDS[:3])

    def test_it_needs_neither_datasets_nor_network(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "datasets", None)
        assert len(load_cord(write_archive(tmp_path / "train").parent)) == len(RECORDS)


class TestParquet:
    def test_one_file(self, table: Any, tmp_path: Path) -> None:
        table.to_parquet(tmp_path / "mine.parquet")
        assert same(load_cord(tmp_path / "mine.parquet"), RECORDS)
        assert same(load_cord(str(tmp_path / "mine.parquet"), num=2), RECORDS[:2])

    def test_several_files_in_their_order(self, table: Any, tmp_path: Path) -> None:
        paths = [tmp_path / "b.parquet", tmp_path / "a.parquet"]
        table.select([0, 1]).to_parquet(paths[0])
        table.select([2, 3, 4]).to_parquet(paths[1])
        assert same(load_cord(paths), RECORDS)

    def test_a_folder_as_the_hub_keeps_it(self, table: Any, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        table.select([0, 1]).to_parquet(tmp_path / "data" / "train-00000-of-00002-b4aaeceff1d90ecb.parquet")
        table.select([2, 3]).to_parquet(tmp_path / "data" / "train-00001-of-00002-7dbbe248962764c5.parquet")
        table.select([4]).to_parquet(tmp_path / "data" / "validation-00000-of-00001-cc3c5779fe22e8ca.parquet")
        assert same(load_cord(tmp_path), RECORDS[:4])
        assert same(load_cord(tmp_path, split="validation"), RECORDS[4:])

    def test_a_folder_for_each_split(self, table: Any, tmp_path: Path) -> None:
        (tmp_path / "dev").mkdir()
        table.to_parquet(tmp_path / "dev" / "0000.parquet")
        assert same(load_cord(tmp_path, split="validation"), RECORDS)

    @pytest.mark.parametrize("form", ["struct", "binary", "path"])
    def test_images_without_the_image_feature(self, datasets: Any, form: str, tmp_path: Path) -> None:
        rows = []
        for at, record in enumerate(RECORDS):
            path = tmp_path / f"{at}.png"
            path.write_bytes(png(record["image"]))
            data = path.read_bytes()
            image = {"struct": {"bytes": data, "path": None}, "binary": data, "path": str(path)}[form]
            rows.append({"image": image, "ground_truth": record["ground_truth"]})
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "mine.parquet")
        assert same(load_cord(tmp_path / "mine.parquet"), RECORDS)

    def test_a_rotated_photo_is_turned_exactly_once(self, datasets: Any, tmp_path: Path) -> None:
        exif = Image.Exif()
        exif[0x0112] = 6
        data = png(Image.new("RGB", (23, 11)), exif=exif)
        features = datasets.Features({"image": datasets.Image(), "ground_truth": datasets.Value("string")})
        rows = [{"image": {"bytes": data, "path": None}, "ground_truth": '{"gt_parse": {}}'}]
        datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "mine.parquet")
        image = load_cord(tmp_path / "mine.parquet")[0]["image"]
        assert image.size == (11, 23)
        assert not dict(image.getexif())


class TestSavedDataset:
    def test_with_splits(self, datasets: Any, table: Any, tmp_path: Path) -> None:
        saved = datasets.DatasetDict({"train": table.select([0, 1]), "test": table.select([2])})
        saved.save_to_disk(tmp_path / "saved")
        assert same(load_cord(tmp_path / "saved"), RECORDS[:2])
        assert same(load_cord(tmp_path / "saved", split="test"), RECORDS[2:3])
        with pytest.raises(ConfigError, match=r"no split 'validation' in .*saved; it holds train, test"):
            load_cord(tmp_path / "saved", split="validation")

    def test_without_splits(self, table: Any, tmp_path: Path) -> None:
        table.save_to_disk(tmp_path / "saved")
        assert same(load_cord(tmp_path / "saved"), RECORDS)

    def test_of_another_split(self, datasets: Any, tmp_path: Path) -> None:
        rows = [{"image": "a.png", "ground_truth": "{}"}]
        datasets.Dataset.from_list(rows, split="test").save_to_disk(tmp_path / "saved")
        with pytest.raises(ConfigError, match="holds split 'test', not 'train'; pass split='test'"):
            load_cord(tmp_path / "saved")

    def test_a_broken_one(self, datasets: Any, tmp_path: Path) -> None:
        (tmp_path / "dataset_info.json").write_text("{}")
        with pytest.raises(ConfigError, match="cannot be read as a saved dataset"):
            load_cord(tmp_path)


class TestArchive:
    def test_images_beside_annotations(self, tmp_path: Path) -> None:
        folder = write_archive(tmp_path / "CORD" / "train")
        assert same(load_cord(tmp_path / "CORD"), RECORDS)
        assert same(load_cord(folder), RECORDS)

    def test_validation_is_called_dev_there(self, tmp_path: Path) -> None:
        write_archive(tmp_path / "dev", split="dev")
        assert len(load_cord(tmp_path, split="validation")) == len(RECORDS)

    def test_version_0_has_no_parse_and_gets_one(self, tmp_path: Path) -> None:
        dataset = load_cord(write_archive(tmp_path / "train", gt_parse=False))
        parses = [json.loads(record["ground_truth"])["gt_parse"] for record in dataset]
        assert parses == [json.loads(record["ground_truth"])["gt_parse"] for record in RECORDS]

    def test_a_folder_of_another_split_is_noticed(self, tmp_path: Path) -> None:
        folder = write_archive(tmp_path / "somewhere", split="dev")
        message = r"holds split 'validation' \('dev' in its files\), not 'train'; pass split='validation'"
        with pytest.raises(ConfigError, match=message):
            load_cord(folder)

    def test_an_image_without_annotation(self, tmp_path: Path) -> None:
        folder = write_archive(tmp_path / "train")
        (folder / "json" / "receipt_00003.json").unlink()
        with pytest.raises(ConfigError, match=r"1 images in .* have no annotation, first receipt_00003.png; add it"):
            load_cord(tmp_path)

    def test_no_images(self, tmp_path: Path) -> None:
        (tmp_path / "image").mkdir()
        (tmp_path / "json").mkdir()
        with pytest.raises(ConfigError, match=r"no .png or .jpg in .*image; unpack the CORD archive there"):
            load_cord(tmp_path)

    @pytest.mark.parametrize(
        "text",
        [
            b"{broken",
            b'{"valid_line": [{"words": 3}]}',
            b'{"valid_line": ["x"]}',
            '{"gt_parse": "ä"}'.encode("latin-1"),
        ],
    )
    def test_a_broken_annotation_names_its_file(self, text: bytes, tmp_path: Path) -> None:
        folder = write_archive(tmp_path / "train")
        (folder / "json" / "receipt_00002.json").write_bytes(text)
        with pytest.raises(
            SampleError, match=r"sample 2 \(id 'receipt_00002'\): .* cannot be read as a CORD annotation"
        ):
            load_cord(folder)[2]


class TestHub:
    def test_an_id_asks_the_hub_for_that_split(
        self, datasets: Any, table: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []

        def load_dataset(name: str, *, split: str) -> Any:
            asked.append((name, split))
            return table

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        assert same(load_cord("naver-clova-ix/cord-v2", split="test"), RECORDS)
        assert asked == [("naver-clova-ix/cord-v2", "test")]

    def test_without_network_the_error_says_what_to_check(self, datasets: Any) -> None:
        message = (
            "'nobody/nothing-at-all' is no local folder, and the hub did not give its split 'train': .*check the id"
        )
        with pytest.raises(ConfigError, match=message):
            load_cord("nobody/nothing-at-all")

    def test_without_datasets_the_error_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(
            ConfigError, match=r"reading hub id 'a/b' needs datasets, not installed here: pip install 'vlmpack\[data\]'"
        ):
            load_cord("a/b")


class TestRefusals:
    def test_an_unknown_split(self) -> None:
        with pytest.raises(
            ConfigError, match=r"no split 'dev'; CORD has train, validation, test \(its files say 'dev'"
        ):
            load_cord("naver-clova-ix/cord-v2", split="dev")

    @pytest.mark.parametrize("source", ["nowhere", "./no/where", "a/b/c", "", Path("nobody/nothing")])
    def test_a_source_that_is_nothing(
        self, source: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "empty").mkdir()
        monkeypatch.chdir(tmp_path / "empty")
        expected = "holds no CORD data" if source == "" else "is no file or folder here and no hub id; give a folder"
        with pytest.raises(ConfigError, match=expected):
            load_cord(source)

    def test_a_folder_of_something_else(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("")
        with pytest.raises(
            ConfigError, match=r"holds no CORD data or table for split 'train' \(it holds: notes.txt\); expected"
        ):
            load_cord(tmp_path)

    def test_a_missing_parquet_file(self) -> None:
        with pytest.raises(ConfigError, match=r"no such parquet file: /nowhere/a.parquet; check the path"):
            load_cord("/nowhere/a.parquet")
        with pytest.raises(ConfigError, match="no such parquet file: the list is empty"):
            load_cord([])

    def test_a_broken_parquet_file(self, datasets: Any, tmp_path: Path) -> None:
        (tmp_path / "a.parquet").write_bytes(b"nothing of the kind")
        with pytest.raises(ConfigError, match=r"a.parquet cannot be read as parquet: .*download it again"):
            load_cord(tmp_path / "a.parquet")

    def test_missing_columns(self, table: Any, tmp_path: Path) -> None:
        table.rename_column("ground_truth", "label").to_parquet(tmp_path / "a.parquet")
        with pytest.raises(
            ConfigError, match=r"has no column ground_truth \(it has image, label\); rename yours to image"
        ):
            load_cord(tmp_path / "a.parquet")

    def test_a_missing_value(self, datasets: Any, tmp_path: Path) -> None:
        rows = [{"image": "a.png", "ground_truth": "{}"}, {"image": None, "ground_truth": "{}"}]
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
        dataset = load_cord(tmp_path / "a.parquet")
        with pytest.raises(
            SampleError, match=r"sample 1: image missing in .*a.parquet.*CORD records have an image"
        ) as caught:
            dataset[1]
        assert caught.value.reason == "missing_column"

    def test_a_truth_without_parse(self, datasets: Any, tmp_path: Path) -> None:
        datasets.Dataset.from_list([{"image": "a.png", "ground_truth": "{}"}]).to_parquet(tmp_path / "a.parquet")
        with pytest.raises(SampleError, match="sample 0: ground_truth holds no parse"):
            load_cord(tmp_path / "a.parquet")[0]

    def test_more_records_than_there_are(self, tmp_path: Path) -> None:
        folder = write_archive(tmp_path / "train")
        with pytest.raises(ConfigError, match=r"num is 6, but .* holds 5; take at most that many"):
            load_cord(folder, num=6)
        assert len(load_cord(folder, num=5)) == 5
