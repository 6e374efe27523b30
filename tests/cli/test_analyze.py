"""`vlmpack analyze` from end to end on small data: what it tells, what it writes, what it refuses."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner, Result

from vlmpack.cli import app
from vlmpack.cli.analyze import Analysis, Packing, histogram_bars, print_analysis
from vlmpack.plan import LengthTable, PaddedRecipe
from vlmpack.plan.length_table import Refused

CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
LONG = [{"role": "user", "content": "again and " * 60}, {"role": "assistant", "content": "4"}]
SEEN = [{"role": "user", "content": [{"type": "image", "image": "0.png"}]}, {"role": "assistant", "content": "red"}]


@pytest.fixture
def chats(tmp_path: Path) -> str:
    """Four samples, one with an image, and two that cannot be used."""
    Image.new("RGB", (128, 64), "red").save(tmp_path / "0.png")
    lost = [{**SEEN[0], "content": [{"type": "image", "image": "lost.png"}]}, SEEN[1]]
    rows = [CHAT, LONG, SEEN, lost, CHAT]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows) + "no JSON\n")
    return str(path)


def analyze(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["analyze", *arguments, "--processor", "tiny"], env={"COLUMNS": "100"})


def numbers(*arguments: str) -> dict[str, Any]:
    return json.loads(analyze(*arguments, "--json").stdout)


def table_of(lengths: list[int], refused: tuple[Refused, ...] = ()) -> LengthTable:
    text, zeros = np.array(lengths, np.int64), np.zeros(len(lengths), np.int64)
    columns = dict.fromkeys(("image_tokens", "video_tokens", "images", "videos", "patches"), zeros)
    ids = np.arange(len(text))
    return LengthTable(sample_ids=ids, text_tokens=text, targets=text // 2, refused=refused, **columns)


def printed(table: LengthTable, *, source: str = "mine", width: int = 80) -> str:
    packing = Packing(capacities=(20,), recipe=PaddedRecipe(per_device_batch=2))
    analysis = Analysis(table=table, packing=packing, source=source)
    file = io.StringIO()
    print_analysis(analysis, Console(file=file, width=width, force_terminal=True, color_system=None))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


class TestCommand:
    def test_it_tells_lengths_and_a_recipe(self, chats: str) -> None:
        told = " ".join(analyze(chats, "--capacity", "500").stdout.split())
        assert "chats.jsonl: 4 samples," in told
        assert "2 of 6 samples cannot be used: image_missing 1, row_unreadable 1" in told
        assert "Gradient accumulation ceil(8 / (4.00 x 1 x 1)) = 2 keeps them: 8.0 samples an update" in told

    def test_a_row_without_known_columns_is_one_bad_sample(self, tmp_path: Path) -> None:
        path = tmp_path / "chats.jsonl"
        path.write_text("".join(json.dumps({name: CHAT}) + "\n" for name in ("messages", "messages", "massages")))
        result = analyze(str(path))
        assert result.exit_code == 0
        told = " ".join(result.stdout.split())
        assert "1 of 3 samples cannot be used: no_columns 1" in told
        assert [each["index"] for each in numbers(str(path))["refused"]["listed"]] == [2]

    def test_json_is_one_object_of_all_numbers(self, chats: str) -> None:
        found = numbers(chats, "--capacity", "100", "--capacity", "500", "--world-size", "2")
        assert (found["samples"], found["images"]) == (4, 1)
        assert found["refused"]["reasons"] == {"image_missing": 1, "row_unreadable": 1}
        assert [one["index"] for one in found["refused"]["listed"]] == [3, 5]
        assert found["columns"]["image"]["total"] == 8  # 128 x 64 pixels, 32 x 32 a token
        assert found["columns"]["patches"]["total"] == 32
        assert [(one["capacity"], one["rows"]) for one in found["packed"]] == [(100, 1), (500, 1)]
        assert [one["sample"] for one in found["packed"][0]["oversize"]] == [1]
        assert found["padded"]["samples_per_update"] == 16

    def test_targets_are_those_that_are_trained_on(self, chats: str) -> None:
        answers, everything = (numbers(chats, "--train-on", train_on) for train_on in ("assistant", "all"))
        totals = [each["columns"]["targets"]["total"] for each in (answers, everything)]
        assert 0 < totals[0] < totals[1] <= everything["columns"]["text"]["total"]

    def test_an_added_stop_is_counted(self, chats: str) -> None:
        one, other = (numbers(chats, *stop) for stop in ((), ("--add-stop", "<|endoftext|>", "--ignored-key", "note")))
        assert one["columns"]["targets"] == other["columns"]["targets"]  # the template ends its answers itself
        refused = analyze(chats, "--add-stop", "<stop>")
        assert refused.exit_code == 2
        assert "add_stop='<stop>' is no special token of the tokenizer" in " ".join(refused.stderr.split())

    def test_by_default_three_capacities_are_tried(self, chats: str) -> None:
        assert [one["capacity"] for one in numbers(chats)["packed"]] == [12_000, 16_000, 20_000]

    def test_samples_per_update_stand_for_the_accumulation(self, chats: str) -> None:
        found = numbers(chats, "--world-size", "2", "--per-device-batch", "4", "--samples-per-update", "32")
        assert found["padded"]["accumulation"] == 4
        refused = analyze(chats, "--samples-per-update", "32", "--accumulation", "4")
        assert refused.exit_code == 2
        assert "--samples-per-update determines --accumulation; give one of them" in refused.stderr

    def test_samples_are_placed_as_asked(self, chats: str) -> None:
        assert numbers(chats, "--strategy", "nf")["packed"][0]["strategy"] == "next_fit"

    def test_an_estimate_says_so(self, tmp_path: Path) -> None:
        """1000 x 500 pixels are 32 x 16 squares, begun ones included; the built-in processor allows for 256."""
        Image.new("RGB", (1000, 500), "red").save(tmp_path / "0.png")
        (tmp_path / "one.jsonl").write_text(json.dumps({"messages": SEEN}))
        path = str(tmp_path / "one.jsonl")
        assert numbers(path, "--estimate")["columns"]["image"]["total"] == 512
        assert 200 < numbers(path)["columns"]["image"]["total"] <= 256
        assert "(image tokens are estimated)" in analyze(path, "--estimate").stdout

    def test_images_may_lie_in_another_folder(self, chats: str, tmp_path: Path) -> None:
        """The chats name `0.png` and `lost.png`; there is one that is 64 pixels wide in place of 128."""
        (tmp_path / "apart").mkdir()
        Image.new("RGB", (64, 64), "red").save(tmp_path / "apart" / "0.png")
        assert numbers(chats, "--image-root", str(tmp_path / "apart"))["columns"]["image"]["total"] == 4
        refused = analyze(chats, "--image-root", str(tmp_path / "nowhere"))
        assert f"vlmpack: --image-root {tmp_path / 'nowhere'} is no folder here" in refused.stderr

    def test_longer_samples_are_counted(self, chats: str) -> None:
        assert numbers(chats, "--max-length", "100")["refused"]["reasons"]["overlength"] == 1

    def test_lengths_are_kept_in_a_file(self, chats: str, tmp_path: Path) -> None:
        cache = tmp_path / "lengths"
        first = numbers(chats, "--cache", str(cache))
        assert cache.stat().st_size > 0
        assert numbers(chats, "--cache", str(cache)) == first

    def test_a_folder_gets_the_numbers_and_a_picture(self, chats: str, tmp_path: Path) -> None:
        told = analyze(chats, "--out", str(tmp_path / "new" / "out")).stdout
        written = json.loads((tmp_path / "new" / "out" / "analysis.json").read_text())
        assert written["samples"] == 4
        with Image.open(tmp_path / "new" / "out" / "lengths.png") as image:
            assert image.width > 1000
        assert "lengths.png" in told

    @pytest.mark.parametrize("place", ["a file", "a file/below"])
    def test_a_folder_that_cannot_be_is_refused_before_anything_is_measured(
        self, place: str, chats: str, tmp_path: Path
    ) -> None:
        (tmp_path / "a file").write_text("")
        refused = analyze(chats, "--out", str(tmp_path / place))
        assert refused.exit_code == 2
        assert refused.stdout == ""
        assert f"vlmpack: --out {tmp_path / place} cannot be a folder (" in refused.stderr
        assert "Traceback" not in refused.stderr

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (["--strategy", "typo"], "vlmpack: there is no strategy 'typo'; choose from exact_fill, "),
            (
                ["--strategy", "nf", "--max-images", "2"],
                "vlmpack: next_fit packs by tokens only, not by images; ",
            ),
            (["--overlength", "drp"], "vlmpack: --overlength drp: choose error, drop or truncate"),
            (["--overlength", "drop"], "vlmpack: --overlength drop needs --max-length, the most tokens"),
            (["--split", "test"], "vlmpack: --split test: "),
        ],
    )
    def test_what_cannot_be_asked_for_is_refused_before_anything_is_measured(
        self, arguments: list[str], told: str, chats: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("vlmpack.store.measure.measure_lengths", None)
        refused = analyze(chats, *arguments)
        assert refused.exit_code == 2
        assert refused.stderr.startswith(told)

    def test_a_json_file_has_no_splits(self, chats: str) -> None:
        assert "a JSON file, which is one split, whatever it is called" in analyze(chats, "--split", "test").stderr

    def test_what_is_said_of_samples_is_what_the_library_says(self, chats: str) -> None:
        said = " ".join(analyze(chats, "--max-length", "100").stdout.split())
        assert "but max_length=100; raise max_length, lower the processor's max_pixels, or choose" in said

    def test_where_no_sample_can_be_used_it_fails(self, tmp_path: Path) -> None:
        path = tmp_path / "bad.jsonl"
        path.write_text('{"messages": []}\n')
        failed = analyze(str(path), "--out", str(tmp_path / "out"))
        assert failed.exit_code == 1
        assert "1 of 1 samples cannot be used: bad_row 1" in failed.stdout
        assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["analysis.json"]

    def test_a_mistake_is_one_line(self, tmp_path: Path) -> None:
        refused = analyze(str(tmp_path / "nowhere.jsonl"))
        assert refused.exit_code == 2
        assert "nowhere.jsonl' is no file or folder here and no hub id" in " ".join(refused.stderr.split("\n"))
        assert "Traceback" not in refused.output


class TestWords:
    def test_padded_and_packed_side_by_side(self) -> None:
        lines = printed(table_of([5, 15, 10, 8, 2])).splitlines()
        found = [line.split() for line in lines if line.startswith((" padded to", " packed"))]
        assert found == [
            ["padded", "to", "batch", "5", "23.1%", "1", "1", "2", "3", "0"],
            ["padded", "to", "max", "5", "46.7%", "1", "1", "2", "3", "0"],
            ["packed,", "20", "2", "0.0%", "2.50", "1", "2.5", "2", "0"],
        ]

    def test_nothing_is_cut_on_80_columns(self) -> None:
        told = printed(table_of([1_234_567] * 9))
        assert "…" not in told
        assert "1,234,567" in told
        assert max(map(len, told.splitlines())) <= 80

    def test_refused_samples_are_counted_and_the_first_are_told(self) -> None:
        refused = tuple(
            Refused(index=at, sample_id=f"r{at}", reason="image_missing", detail="[red] it is lost") for at in range(8)
        )
        told = printed(table_of([5], refused), source="[mine].jsonl")
        assert told.startswith("[mine].jsonl: 1 samples, 5 tokens")
        assert "8 of 9 samples cannot be used: image_missing 8" in told
        assert [line for line in told.splitlines() if "it is lost" in line] == [
            f"  {at} (id 'r{at}'): image_missing: [red] it is lost" for at in range(5)
        ]
        assert "  and 3 more (--out writes them all)" in told


class TestBars:
    def lines(self, lengths: list[int], *, ascii_only: bool = False) -> list[str]:
        file = io.StringIO()
        Console(file=file, width=60).print(histogram_bars("tokens", np.array(lengths), ascii_only=ascii_only))
        return [line.rstrip() for line in file.getvalue().splitlines()]

    def test_the_longest_bar_is_full_and_a_single_sample_can_be_seen(self) -> None:
        assert self.lines([10] * 400 + [11] * 100 + [12]) == [
            "tokens",
            "10  ████████████████████ 400",
            "11  █████                100",
            "12+ ▏                    1",
            "",
        ]

    def test_there_are_terminals_without_blocks(self) -> None:
        assert self.lines([10] * 4 + [11], ascii_only=True)[1:3] == [
            "10  #################### 4",
            "11  #####                1",
        ]
