"""One call for every data set: samples for the collator, images still encoded, paths where the file means them."""

from __future__ import annotations

import io
import json
import pickle
import sys
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import DataLoader

from vlmpack.collate import VLMCollator
from vlmpack.data import open_dataset, to_conversation
from vlmpack.data.open import OpenDataset
from vlmpack.data.readers import JsonRows, json_rows
from vlmpack.errors import ConfigError, SampleError
from vlmpack.testing import SyntheticReceipts, receipt_conversations, tiny_processor

CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
SEEN = [{"role": "user", "content": [{"type": "image", "image": "pictures/0.png"}, {"type": "text", "text": "?"}]}]
ROWS = [{"id": "a", "messages": CHAT}, {"id": "ä ✓", "messages": CHAT}, {"id": "c", "messages": SEEN}]


def png(side: int = 40) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), "red").save(buffer, "PNG")
    return buffer.getvalue()


def lines(rows: list[dict[str, Any]], *, ascii_only: bool = False, end: str = "\n") -> bytes:
    return "".join(json.dumps(row, ensure_ascii=ascii_only) + end for row in rows).encode()


def found(path: Path) -> list[dict[str, Any]]:
    rows = json_rows(path)
    return [rows[at] for at in range(len(rows))]


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = pytest.importorskip("datasets", reason="waits for the datasets library (extra [data])")
    monkeypatch.setattr(module.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    module.disable_progress_bars()
    return module


FORMS = {
    "lines": lines(ROWS),
    "escaped": lines(ROWS, ascii_only=True),
    "windows": lines(ROWS, end="\r\n"),
    "blank lines": b"\n\n" + lines(ROWS, end="\n  \n\n"),
    "no last newline": lines(ROWS).rstrip(),
    "byte order mark": b"\xef\xbb\xbf" + lines(ROWS),
    "array": json.dumps(ROWS).encode(),
    "pretty array": json.dumps(ROWS, indent=2, ensure_ascii=False).encode(),
    "windows array": json.dumps(ROWS, indent=2, ensure_ascii=False).replace("\n", "\r\n").encode(),
    "marked array": b"\xef\xbb\xbf  " + json.dumps(ROWS, ensure_ascii=False).encode() + b"\n",
}


class TestJson:
    @pytest.mark.parametrize("form", FORMS)
    def test_every_form_gives_the_same_rows(self, form: str, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(FORMS[form])
        assert found(path) == ROWS

    def test_lines_are_found_across_chunks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("vlmpack.data.readers.CHUNK", 10)
        path = tmp_path / "rows.jsonl"
        path.write_bytes(FORMS["blank lines"])
        assert found(path) == ROWS

    def test_a_sent_file_is_its_offsets_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(lines([{"messages": CHAT, "long": "x" * 50_000}] * 20))
        sent = pickle.dumps(open_dataset(path))
        assert len(sent) < 2000
        assert pickle.loads(sent)[19]["messages"] == CHAT

    def test_a_bad_line_is_a_bad_sample(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(lines(ROWS) + b'{"messages": \n[]\n')
        dataset = open_dataset(path)
        assert len(dataset) == 5
        with pytest.raises(SampleError, match=r"^sample 3: the text at byte \d+ of .* is no JSON") as seen:
            dataset[3]
        assert (seen.value.index, seen.value.reason) == (3, "row_unreadable")
        with pytest.raises(SampleError, match=r"sample 4: .* is a list"):
            dataset[4]

    @pytest.mark.parametrize("name", [{"id": "a"}, {"sample_id": 7}, {"id": None, "sample_id": "b"}])
    def test_samples_keep_their_names(self, name: dict[str, object], tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(lines([{"messages": CHAT, **name}]))
        assert open_dataset(path)[0] == {"messages": CHAT, **name}

    def test_a_loader_hands_it_to_the_collator_which_skips_it(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(lines([{"messages": CHAT, "id": "whole"}]) + b'{"messages": \n')
        dataset = open_dataset(path)
        skipping = VLMCollator(tiny_processor(), on_bad="skip")
        (batch,) = DataLoader(dataset, batch_size=2, collate_fn=skipping)
        assert batch["vlmpack"].sample_ids == ("whole",)
        assert skipping.skip_log.reasons == {"row_unreadable": 1}
        loader = DataLoader(dataset, batch_size=1, sampler=[1], collate_fn=VLMCollator(tiny_processor()))
        with pytest.raises(SampleError, match=r"^sample 0 \(id 1\): the text at byte \d+ of .* is no JSON") as seen:
            list(loader)
        assert seen.value.reason == "row_unreadable"

    def test_a_line_that_is_nested_too_deeply_is_a_bad_sample(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(lines(ROWS) + b"[" * 100_000 + b"]" * 100_000 + b"\n" + lines(ROWS))
        dataset = open_dataset(path)
        with pytest.raises(SampleError, match=r"^sample 3: .* is nested too deeply to be read: '\[\[") as seen:
            dataset[3]
        assert (seen.value.index, seen.value.reason) == (3, "row_unreadable")
        assert dataset[4]["id"] == "a"

    def test_so_are_media_that_json_can_just_hold(self, tmp_path: Path) -> None:
        deep: list[Any] = []
        for _ in range(sys.getrecursionlimit()):
            deep = [deep]
        rows = [{"messages": CHAT, "images": deep}]
        dataset = OpenDataset(files=(rows,), folders=(tmp_path,), name="mine")
        with pytest.raises(SampleError, match=r"^sample 0: its images or videos, in mine, are nested too dee") as seen:
            dataset[0]
        assert seen.value.reason == "row_unreadable"

    def test_an_array_with_such_a_sample_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.json"
        path.write_bytes(b"[" * 100_000 + b"]" * 100_000)
        with pytest.raises(
            ConfigError, match=r"rows.json holds a sample that is nested too deeply to be read; write a"
        ):
            open_dataset(path)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", "holds no samples"),
            ("[]", "holds no samples"),
            ("\n \n", "holds no samples"),
            ("messages,answer\n1,2\n", "is no JSON"),
            ("{\n  'data': 1\n}\n", "is no JSON"),
            ('[{"messages": []} {"messages": []}]', "a comma or the end of the array is missing at character 18"),
            ('[{"messages": []}]\n[1]', "there is more at character 19"),
            ('[{"messages": [}]', "begins like a JSON array and is none"),
            ("[1, 2]", "is a int: '1'; a sample is a JSON object"),
            ('{"text": "x", "label": 1}', "holds text, label, and none of input_ids, messages"),
        ],
    )
    def test_a_file_without_samples_is_refused(self, text: str, expected: str, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_text(text)
        with pytest.raises(ConfigError, match=expected):
            open_dataset(path)


class TestPaths:
    def opened(self, tmp_path: Path, row: dict[str, Any]) -> dict[str, Any]:
        path = tmp_path / "rows.json"
        path.write_text(json.dumps([row]))
        return open_dataset(path)[0]

    def test_they_start_where_the_file_is(self, tmp_path: Path) -> None:
        there = str(tmp_path / "0.png")
        assert self.opened(tmp_path, {"messages": CHAT, "image": "0.png"})["image"] == there
        images = [
            "0.png",
            "/1.png",
            {"path": "0.png", "min_pixels": 9},
            {"image": "0.png"},
            {"bytes": None, "path": "0.png"},
        ]
        assert self.opened(tmp_path, {"prompt": "", "completion": "", "images": images})["images"] == [
            there, "/1.png", {"path": there, "min_pixels": 9}, {"image": there}, {"bytes": None, "path": there}
        ]  # fmt: skip

    def test_in_messages_they_do_too(self, tmp_path: Path) -> None:
        there = str(tmp_path / "0.png")
        parts = [
            {"type": "image", "image": "0.png"},
            {"type": "image_url", "image_url": {"url": "0.png"}},
            {"type": "video", "video": ["0.png", "0.png"], "fps": 2},
        ]
        row = self.opened(tmp_path, {"conversation": [{"role": "user", "content": parts}]})
        assert row["conversation"][0]["content"] == [
            {"type": "image", "image": there},
            {"type": "image_url", "image_url": {"url": there}},
            {"type": "video", "video": [there, there], "fps": 2},
        ]

    def test_a_message_may_be_one_part(self, tmp_path: Path) -> None:
        message = {"role": "user", "content": {"type": "image", "image": "0.png"}}
        row = self.opened(tmp_path, {"messages": [message]})
        assert row["messages"][0]["content"] == {"type": "image", "image": str(tmp_path / "0.png")}

    def test_addresses_texts_and_arguments_of_tools_stay_as_they_are(self, tmp_path: Path) -> None:
        row = {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "0.png", "path": "0.png"}, "0.png"]},
                {"role": "assistant", "content": "0.png", "tool_calls": [{"function": {"arguments": {"path": "a"}}}]},
            ],
            "images": ["data:image/png;base64,AAAA", "http://a/0.png", "file:///a/0.png"],
            "url": 3,
        }
        assert self.opened(tmp_path, row) == {**row, "id": 0}

    def test_a_collator_finds_the_image(self, tmp_path: Path) -> None:
        (tmp_path / "pictures").mkdir()
        (tmp_path / "pictures" / "0.png").write_bytes(png())
        answered = [*SEEN, CHAT[1]]
        batch = VLMCollator(tiny_processor())([self.opened(tmp_path, {"messages": answered})])
        assert len(batch["image_grid_thw"]) == 1

    def test_they_may_start_elsewhere(self, tmp_path: Path) -> None:
        path = tmp_path / "annotations" / "rows.jsonl"
        path.parent.mkdir()
        path.write_bytes(lines([{"messages": SEEN, "image": "0.png"}, {"messages": CHAT, "image": "/1.png"}]))
        (tmp_path / "coco").mkdir()
        for root in (tmp_path / "coco", str(tmp_path / "coco")):
            first, second = open_dataset(path, image_root=root)
            assert first["image"] == str(tmp_path / "coco" / "0.png")
            assert first["messages"][0]["content"][0]["image"] == str(tmp_path / "coco" / "pictures" / "0.png")
            assert second["image"] == "/1.png"
            assert open_dataset([path, path], image_root=root)[2] == {**first, "id": 2}

    @pytest.mark.parametrize(
        ("root", "expected"),
        [("nowhere", r"image_root='.*nowhere' is no folder"), (3, "has to be the path of a folder, got a int")],
    )
    def test_elsewhere_has_to_be_a_folder(self, root: Any, expected: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=expected):
            open_dataset(tmp_path / "rows.jsonl", image_root=tmp_path / root if isinstance(root, str) else root)

    def test_receipts_in_a_file_of_json_name_them_too(self, tmp_path: Path) -> None:
        (tmp_path / "pictures").mkdir()
        (tmp_path / "pictures" / "0.png").write_bytes(png())
        receipt = {"image": "pictures/0.png", "ground_truth": json.dumps({"gt_parse": {"total": {"cash": "5"}}})}
        sample = self.opened(tmp_path, receipt)
        assert sample == to_conversation({**receipt, "image": str(tmp_path / "pictures" / "0.png")})
        assert len(VLMCollator(tiny_processor())([sample])["image_grid_thw"]) == 1


class TestSeveralFiles:
    def files(self, tmp_path: Path) -> list[Path]:
        """Two rows that name an image, in a folder each; the second file has a broken one too."""
        paths = [tmp_path / name / "rows.jsonl" for name in ("a", "b")]
        for path in paths:
            path.parent.mkdir()
            path.write_bytes(lines([{"messages": CHAT, "image": "0.png"}, {"messages": CHAT, "id": "named"}]))
        paths[1].write_bytes(paths[1].read_bytes() + b"{\n")
        return paths

    def test_they_follow_each_other_and_each_names_its_own_images(self, tmp_path: Path) -> None:
        dataset = pickle.loads(pickle.dumps(open_dataset(self.files(tmp_path))))
        assert len(dataset) == 5
        assert [row["id"] for row in dataset[:4]] == [0, "named", 2, "named"]
        assert [row["image"] for row in dataset[:4:2]] == [str(tmp_path / name / "0.png") for name in ("a", "b")]
        assert repr(dataset) == "OpenDataset(5 samples of 2 files)"

    def test_a_bad_row_is_called_by_its_place_among_all(self, tmp_path: Path) -> None:
        with pytest.raises(SampleError, match=r"^sample 4: the text at byte \d+ of .*b/rows.jsonl is no JSON") as seen:
            open_dataset(self.files(tmp_path))[4]
        assert (seen.value.index, seen.value.reason) == (4, "row_unreadable")

    def test_many_files_cost_as_much_as_their_number(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = {"len": 0, "eq": 0}
        length, equal = JsonRows.__len__, PurePath.__eq__

        def counted_length(rows: JsonRows) -> int:
            calls["len"] += 1
            return length(rows)

        def counted_equal(path: PurePath, other: object) -> bool:
            calls["eq"] += 1
            return equal(path, other)

        paths = [tmp_path / f"{at}.jsonl" for at in range(50)]
        for path in paths:
            path.write_bytes(lines([{"messages": CHAT}] * 2))
        monkeypatch.setattr(JsonRows, "__len__", counted_length)
        monkeypatch.setattr(PurePath, "__eq__", counted_equal)
        dataset = open_dataset(paths)
        assert calls["eq"] <= 2 * len(paths)
        assert [sample["id"] for sample in dataset] == list(range(100))
        assert calls["len"] <= 4 * len(paths)  # not for each sample anew

    def test_files_that_do_not_belong_together_are_refused(self, tmp_path: Path) -> None:
        first, _ = self.files(tmp_path)
        receipts = tmp_path / "receipts.json"
        receipts.write_text(json.dumps([{"image": "0.png", "ground_truth": "{}"}]))
        with pytest.raises(ConfigError, match="of 2 files, some hold receipts and the others do not; open them apart"):
            open_dataset([first, receipts])
        with pytest.raises(ConfigError, match=r"a list holds rows.jsonl and x.parquet; give files of JSON, or parquet"):
            open_dataset([first, tmp_path / "x.parquet"])
        with pytest.raises(ConfigError, match=r"no such file: .*gone.jsonl; check the path"):
            open_dataset([first, tmp_path / "gone.jsonl"])


class TestTables:
    def rows(self) -> list[dict[str, Any]]:
        """Images in a column, and images inside messages, as Arrow stores them."""
        part = {"type": "image", "image": {"bytes": png(), "path": None}}
        said = [
            {"role": "user", "content": [part]},
            {"role": "assistant", "content": [{"type": "text", "text": "red"}]},
        ]
        return [{"messages": said, "images": [{"bytes": png(50), "path": None}]}]

    def table(self, datasets: Any) -> Any:
        image, text = datasets.Image(), datasets.Value("string")
        content = {"type": text, "image": image, "text": text}
        messages = [{"role": text, "content": [content]}]
        features = datasets.Features({"messages": messages, "images": [image]})
        return datasets.Dataset.from_list(self.rows(), features=features)

    def check(self, row: dict[str, Any]) -> None:
        assert row["messages"][0]["content"][0]["image"] == {"bytes": png(), "path": None}
        assert row["images"] == [{"bytes": png(50), "path": None}]

    def test_no_image_is_decoded_however_deep_it_lies(self, datasets: Any, tmp_path: Path) -> None:
        table = self.table(datasets)
        assert isinstance(table[0]["images"][0], Image.Image)
        table.to_parquet(tmp_path / "mine.parquet")
        table.save_to_disk(tmp_path / "saved")
        (tmp_path / "hub" / "data").mkdir(parents=True)
        table.to_parquet(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet")
        for source in ("mine.parquet", "saved", "hub"):
            self.check(pickle.loads(pickle.dumps(open_dataset(tmp_path / source)))[0])

    def test_several_files_follow_each_other(self, datasets: Any, tmp_path: Path) -> None:
        paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
        for at, path in enumerate(paths):
            datasets.Dataset.from_list([{"input_ids": [1, 2, at]}]).to_parquet(path)
        assert [row["input_ids"] for row in open_dataset(paths)] == [[1, 2, 0], [1, 2, 1]]

    def test_receipts_become_conversations(self, datasets: Any, tmp_path: Path) -> None:
        record = SyntheticReceipts(num=1, scale=0.25)[0]
        rows = [
            {"image": {"bytes": png(), "path": None}, "ground_truth": record["ground_truth"]},
            {"image": None, "ground_truth": "{}"},
        ]
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "cord.parquet")
        dataset = open_dataset(tmp_path / "cord.parquet")
        assert dataset[0] == to_conversation(rows[0])
        with pytest.raises(SampleError, match="sample 1: the record has no image"):
            dataset[1]


class TestOpening:
    def test_the_first_so_many_are_taken(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(lines(ROWS))
        dataset = open_dataset(path, num=2)
        assert [row["id"] for row in dataset] == ["a", "ä ✓"]
        with pytest.raises(IndexError, match=r"sample 2 of 2 in .*rows.jsonl"):
            dataset[2]
        with pytest.raises(ConfigError, match=r"num is 4, but .*rows.jsonl holds 3; take at most that many"):
            open_dataset(path, num=4)

    def test_a_slice_is_a_list_of_samples(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(lines(ROWS))
        dataset = open_dataset(path, num=2)
        assert dataset[0:9] == [dataset[0], dataset[1]]
        assert dataset[::-1] == [dataset[-1], dataset[-2]]
        assert dataset[np.int64(-1)] == dataset[1]

    @pytest.mark.parametrize("index", ["messages", [0, 1], 1.0, None])
    def test_samples_are_taken_by_their_place_alone(self, index: Any) -> None:
        with pytest.raises(
            TypeError, match=r"samples are taken by their place, dataset\[0\] or dataset\[0:2\], not by"
        ):
            receipt_conversations(num=2, scale=0.25)[index]

    def test_nor_is_a_table(self, datasets: Any) -> None:
        with pytest.raises(ConfigError, match=r"got a Dataset\. Samples that are in memory"):
            open_dataset(datasets.Dataset.from_list([{"input_ids": [1]}]))

    @pytest.mark.parametrize("indent", [None, 2])
    def test_of_a_list_under_a_key_the_key_is_named(self, indent: int | None, tmp_path: Path) -> None:
        path = tmp_path / "rows.json"
        path.write_text(json.dumps({"data": ROWS}, indent=indent))
        with pytest.raises(ConfigError, match=r"the list under its key 'data'.* write that list alone"):
            open_dataset(path)
