"""One call for every data set: samples for the collator, images still encoded, paths where the file means them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import json_lines
from measured import encoded
from PIL import Image
from torch.utils.data import DataLoader

from vlmpack.collate import VLMCollator
from vlmpack.data import open_dataset
from vlmpack.data.open import OpenDataset
from vlmpack.data.readers import json_rows
from vlmpack.errors import ConfigError, SampleError
from vlmpack.testing import receipt_conversations, tiny_processor

CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
SEEN = [{"role": "user", "content": [{"type": "image", "image": "pictures/0.png"}, {"type": "text", "text": "?"}]}]
ROWS = [{"id": "a", "messages": CHAT}, {"id": "ä ✓", "messages": CHAT}, {"id": "c", "messages": SEEN}]


def lines(rows: list[dict[str, Any]], *, ascii_only: bool = False, end: str = "\n") -> bytes:
    return "".join(json.dumps(row, ensure_ascii=ascii_only) + end for row in rows).encode()


def written(tmp_path: Path, data: bytes | list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
    """A file of these bytes or rows, beside a folder with a picture."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    (path.parent / "pictures").mkdir(exist_ok=True)
    (path.parent / "pictures" / "0.png").write_bytes(encoded(40, 40, "PNG"))
    path.write_bytes(data if isinstance(data, bytes) else lines(data))
    return path


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
        rows = json_rows(written(tmp_path, FORMS[form]))
        assert [rows[at] for at in range(len(rows))] == ROWS

    def test_a_bad_line_is_a_bad_sample(self, tmp_path: Path) -> None:
        deep = b"[" * 100_000 + b"]" * 100_000
        dataset = open_dataset(written(tmp_path, lines(ROWS) + b'{"messages": \n[]\n' + deep + b"\n" + lines(ROWS)))
        assert len(dataset) == 9
        for at, fault in ((3, r"the text at byte \d+ of .* is no JSON"), (4, "is a list"), (5, "nested too deeply")):
            with pytest.raises(SampleError, match=f"^sample {at}: .*{fault}") as seen:
                dataset[at]
            assert (seen.value.index, seen.value.reason) == (at, "row_unreadable")
        assert dataset[6]["id"] == "a"

    def test_so_are_media_in_too_many_lists(self) -> None:
        deep: list = []
        for _ in range(5000):
            deep = [deep]
        with pytest.raises(SampleError, match=r"^sample 0: it is nested too deeply"):
            OpenDataset(files=([{"messages": CHAT, "images": deep}],), folders=(Path(),), name="rows")[0]

    def test_so_is_a_file_that_goes_while_it_is_read(self, tmp_path: Path) -> None:
        dataset = open_dataset(path := written(tmp_path, ROWS))
        path.unlink()
        (error,) = dataset.__getitems__([0])
        assert isinstance(error, SampleError)
        assert error.reason == "row_unreadable"
        assert "cannot be read any more" in error.detail

    def test_a_loader_hands_it_to_the_collator_which_skips_it(self, tmp_path: Path) -> None:
        torn = {"texts": [{"user": "?", "assistant": 3}], "id": "r7"}
        rows = lines([{"messages": CHAT, "id": "whole"}]) + b'{"messages": \n' + lines([torn])
        dataset, log = open_dataset(written(tmp_path, rows)), tmp_path / "bad.jsonl"
        (batch,) = DataLoader(
            dataset, batch_size=3, collate_fn=VLMCollator(tiny_processor(), on_bad="skip", skip_log=log)
        )
        assert batch["vlmpack"].sample_ids == ("whole",)
        bad = [(line["index"], line["id"], line["reason"]) for line in json_lines(log)]
        assert bad == [(1, 1, "row_unreadable"), (2, "r7", "bad_row")]
        loader = DataLoader(dataset, batch_size=1, sampler=[1], collate_fn=VLMCollator(tiny_processor()))
        with pytest.raises(SampleError, match=r"^sample 0 \(id 1\): the text at byte \d+ of .* is no JSON"):
            list(loader)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", "holds no samples"),
            ("[]", "holds no samples"),
            ("\n \n", "holds no samples"),
            ("messages,answer\n1,2\n", "is no JSON"),
            ("{\n  'data': 1\n}\n", "is no JSON"),
            ('[{"messages": []}, ', "the end of the array is missing"),
            ('[{"messages": []}]\n{}', "there is more at character 19"),
            ('[{"messages": []} {"messages": []}]', "a comma is missing, or one too many, before character 18"),
            ('[{"messages": [}]', "begins like a JSON array but is not one"),
            ("[1, 2]", "is a int: '1'; a sample is a JSON object"),
            (
                '{"text": "x", "label": 1}',
                "rows.jsonl, it has none of the columns input_ids, messages, .* it has: label, text. Rename",
            ),
            ("[" * 100_000 + "]" * 100_000, "holds a sample that is nested too deeply to be read"),
            (json.dumps({"data": ROWS}), "the list under its key 'data', write that list alone"),
            (json.dumps({"data": ROWS}, indent=2), "the list under its key 'data', write that list alone"),
        ],
    )
    def test_a_file_without_samples_is_refused(self, text: str, expected: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=expected):
            open_dataset(written(tmp_path, text.encode()))


class TestPaths:
    @pytest.mark.parametrize(
        "columns",
        [
            {"image": "@/0.png", "audio": "@/0.wav"},
            {"audios": ["@/0.wav", [0.5, 0.25]], "video": ""},
            {"images": ["@/0.png", "/1.png", {"path": "@/0.png", "min_pixels": 9}, {"image": "@/0.png"}]},
            {"images": [{"bytes": None, "path": "@/0.png"}]},
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "@/0.png"}}]}]},
            {"messages": [{"role": "user", "content": [{"type": "video", "video": ["@/0.png", "@/1.png"], "fps": 2}]}]},
        ],
    )
    def test_they_start_where_the_file_is(self, columns: Any, tmp_path: Path) -> None:
        text = json.dumps({"messages": CHAT, "id": 7, **columns})
        sample = open_dataset(written(tmp_path, text.replace("@/", "").encode()))[0]
        assert sample == json.loads(text.replace("@", str(tmp_path)))

    def test_addresses_texts_and_arguments_of_tools_stay_as_they_are(self, tmp_path: Path) -> None:
        row = {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "0.png", "path": "0.png"}, "0.png"]},
                {"role": "assistant", "content": "0.png", "tool_calls": [{"function": {"arguments": {"path": "a"}}}]},
            ],
            "images": ["data:image/png;base64,AAAA", "http://a/0.png", "file:///a/0.png"],
            "url": 3,
        }
        assert open_dataset(written(tmp_path, [row]))[0] == {**row, "id": 0}

    def test_they_may_start_elsewhere(self, tmp_path: Path) -> None:
        path = written(tmp_path, [{"messages": SEEN, "image": "0.png"}, {"messages": CHAT, "image": "/1.png"}])
        (root := tmp_path / "coco").mkdir()
        first, second = open_dataset(path, image_root=root)
        assert first["image"] == str(root / "0.png")
        assert first["messages"][0]["content"][0]["image"] == str(root / "pictures" / "0.png")
        assert second["image"] == "/1.png"
        home = written(tmp_path, [{"messages": CHAT, "image": "~/1.png"}], "home.jsonl")
        assert open_dataset(home)[0]["image"] == str(Path.home() / "1.png")
        assert open_dataset([path, path], image_root=str(root))[2] == {**first, "id": 2}
        with pytest.raises(ConfigError, match="nowhere' is not a folder"):
            open_dataset(path, image_root=tmp_path / "nowhere")


class TestSeveralFiles:
    def test_they_follow_each_other_and_each_names_its_own_images(self, tmp_path: Path) -> None:
        rows = [{"messages": CHAT, "image": "0.png"}, {"messages": CHAT, "id": "named"}]
        paths = [written(tmp_path, rows, "a/rows.jsonl"), written(tmp_path, lines(rows) + b"{\n", "b/rows.jsonl")]
        dataset = pickle.loads(pickle.dumps(open_dataset(paths)))
        assert repr(dataset) == "OpenDataset(5 samples of 2 files)"
        assert [row["id"] for row in dataset[:4]] == [0, "named", 2, "named"]
        assert [row["image"] for row in dataset[:4:2]] == [str(tmp_path / name / "0.png") for name in ("a", "b")]
        with pytest.raises(SampleError, match=r"^sample 4: the text at byte \d+ of .*b/rows.jsonl is no JSON") as seen:
            dataset[4]
        assert (seen.value.index, seen.value.reason) == (4, "row_unreadable")

    def test_files_that_do_not_belong_together_are_refused(self, tmp_path: Path) -> None:
        first = written(tmp_path, ROWS)
        for others, expected in (
            (tmp_path / "x.parquet", "a list holds rows.jsonl .JSON., x.parquet .parquet.; give files of one kind"),
            (tmp_path / "gone.jsonl", "no such file: .*gone.jsonl; check the path"),
        ):
            with pytest.raises(ConfigError, match=expected):
                open_dataset([first, others])


class TestTables:
    def test_no_image_is_decoded_however_deep_it_lies(self, datasets: Any, tmp_path: Path) -> None:
        text, image = datasets.Value("string"), {"bytes": encoded(40, 40, "PNG"), "path": None}
        messages = [{"role": text, "content": [{"type": text, "image": datasets.Image(), "text": text}]}]
        features = datasets.Features({"messages": messages, "images": [datasets.Image()]})
        said = [{"role": "user", "content": [{"type": "image", "image": image, "text": None}]}]
        table = datasets.Dataset.from_list([{"messages": said, "images": [image]}], features=features)
        assert isinstance(table[0]["images"][0], Image.Image)
        table.to_parquet(tmp_path / "mine.parquet")
        table.save_to_disk(tmp_path / "saved")
        for source in ("mine.parquet", "saved"):
            dataset = pickle.loads(pickle.dumps(open_dataset(tmp_path / source)))
            assert dataset[0] == {"messages": said, "images": [image], "id": 0}


def test_the_first_so_many_are_taken(tmp_path: Path) -> None:
    dataset = open_dataset(written(tmp_path, ROWS), num=2)
    assert [row["id"] for row in dataset] == ["a", "ä ✓"]
    assert dataset[0:9] == [dataset[0], dataset[1]]
    assert dataset[::-1] == [dataset[-1], dataset[-2]]
    assert dataset[np.int64(-1)] == dataset[1]
    with pytest.raises(IndexError, match=r"sample 2 of 2 in .*rows.jsonl"):
        dataset[2]
    with pytest.raises(ConfigError, match=r"num is 4, but .*rows.jsonl holds 3; take at most that many"):
        open_dataset(tmp_path / "rows.jsonl", num=4)


@pytest.mark.parametrize("index", ["messages", [0, 1], 1.0, None])
def test_samples_are_taken_by_their_place_alone(index: Any) -> None:
    with pytest.raises(TypeError, match=r"index samples by position, dataset\[0\] or dataset\[0:2\], not by"):
        receipt_conversations(num=2, scale=0.25)[index]
