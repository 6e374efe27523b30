"""`vlmpack analyze` from end to end on small data: lengths, recipes, shared prefixes, rows, refusals."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from vlmpack.cli import app
from vlmpack.cli.analyze import row_numbers
from vlmpack.collate.encoded import Encoded
from vlmpack.layout import PrefixTree, Segments

CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
LONG = [{"role": "user", "content": "again and " * 60}, {"role": "assistant", "content": "4"}]
SEEN = [{"role": "user", "content": [{"type": "image", "image": "0.png"}]}, {"role": "assistant", "content": "red"}]


def write_rows(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps({"messages": row} if isinstance(row, list) else row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def chats(tmp_path: Path) -> str:
    """Four samples, one with an image, and two that cannot be used."""
    Image.new("RGB", (128, 64), "red").save(tmp_path / "0.png")
    lost = [{**SEEN[0], "content": [{"type": "image", "image": "lost.png"}]}, SEEN[1]]
    path = write_rows(tmp_path / "chats.jsonl", [CHAT, LONG, SEEN, lost, CHAT])
    with Path(path).open("a") as file:
        file.write("no JSON\n")
    return path


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "100"})


def analyze(*arguments: Any) -> Result:
    return run("analyze", *arguments, "--processor", "tiny")


def numbers(*arguments: Any) -> dict[str, Any]:
    return json.loads(analyze(*arguments, "--json").stdout)


# ---------------------------------------------------------------------- lengths and recipes


def test_json_is_one_object_of_all_numbers(chats: str) -> None:
    found = numbers(chats, "--capacity", 100, "--capacity", 500, "--world-size", 2)
    assert (found["samples"], found["images"]) == (4, 1)
    assert found["refused"]["reasons"] == {"image_missing": 1, "row_unreadable": 1}
    assert [one["index"] for one in found["refused"]["listed"]] == [3, 5]
    assert found["columns"]["image"]["total"] == 8  # 128 x 64 pixels, 32 x 32 a token
    assert found["columns"]["patches"]["total"] == 32
    assert [(one["capacity"], one["rows"]) for one in found["packed"]] == [(100, 1), (500, 1)]
    assert [one["sample"] for one in found["packed"][0]["dropped"]] == [1]
    assert found["padded"]["samples_per_update"] == 16
    found = numbers(chats, "--world-size", 2, "--per-device-batch", 4, "--samples-per-update", 32)
    assert found["padded"]["accumulation"] == 4
    assert [one["capacity"] for one in numbers(chats)["packed"]] == [12_000, 16_000, 20_000]


def test_options_reach_the_collator_and_the_plan(chats: str, tmp_path: Path) -> None:
    answers, everything = (numbers(chats, "--train-on", train_on) for train_on in ("assistant", "all"))
    totals = [each["columns"]["targets"]["total"] for each in (answers, everything)]
    assert 0 < totals[0] < totals[1] <= everything["columns"]["text"]["total"]
    assert numbers(chats, "--strategy", "rolling_fill")["packed"][0]["strategy"] == "rolling_fill"
    assert numbers(chats, "--max-length", 100)["refused"]["reasons"]["overlength"] == 1
    assert numbers(chats, "--cache", tmp_path / "lengths") == numbers(chats, "--cache", tmp_path / "lengths")
    assert (tmp_path / "lengths").stat().st_size > 0
    (tmp_path / "apart").mkdir()
    Image.new("RGB", (64, 64), "red").save(tmp_path / "apart" / "0.png")  # half as wide as the other 0.png
    assert numbers(chats, "--image-root", tmp_path / "apart")["columns"]["image"]["total"] == 4


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--strategy", "typo"], "Invalid value for '--strategy'"),
        (["--overlength", "drp"], "Invalid value for '--overlength'"),
        (["--overlength", "truncate"], "vlmpack: overlength='truncate' needs max_length=, the most tokens"),
        (["--overlength", "own_row", "--max-length", "9"], "vlmpack: --overlength own_row keeps samples whole"),
        (["--split", "test"], "a file given by name is one split"),
        (["--image-root", "nowhere"], "vlmpack: image_root='nowhere' is not a folder"),
        (["--add-stop", "<stop>"], "add_stop='<stop>' is no special token of the tokenizer"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_measured(
    arguments: list[str], told: str, chats: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    importlib.import_module("vlmpack.rows")  # with its own measure_lengths
    monkeypatch.setattr("vlmpack.lengths.measure_lengths", None)
    monkeypatch.chdir(Path(chats).parent)
    refused = analyze(chats, *arguments)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert told in " ".join(refused.stderr.replace("│", "").split())


def test_where_no_sample_can_be_used_it_fails(tmp_path: Path) -> None:
    failed = analyze(write_rows(tmp_path / "bad.jsonl", [[]]), "--rows", 1)
    assert failed.exit_code == 1
    assert "1 of 1 samples cannot be used: bad_row 1" in failed.stdout


# ---------------------------------------------------------------------- shared prefixes


@pytest.fixture
def questions(tmp_path: Path) -> str:
    """Three questions about each of two images of one size."""
    rows = []
    for name, color in (("0.png", "red"), ("1.png", "blue")):
        Image.new("RGB", (256, 256), color).save(tmp_path / name)
        for question in ("Which colour?", "How bright is it?", "What is it?"):
            parts = [{"type": "image", "image": name}, {"type": "text", "text": question}]
            rows.append([{"role": "user", "content": parts}, {"role": "assistant", "content": color}])
    return write_rows(tmp_path / "questions.jsonl", rows)


def test_savings_are_those_of_the_plans_with_and_without_sharing(questions: str) -> None:
    found = numbers(questions, "--capacity", 1000)["shared_prefixes"]
    assert (found["groups"], found["samples"], found["min_shared"]) == (2, 6, 64)
    (packed,) = found["packed"]
    assert packed["shared"]["patches"] * 3 == packed["plain"]["patches"]
    assert packed["shared"]["tokens"] < packed["plain"]["tokens"]
    assert packed["saved"]["patches"] == pytest.approx(2 / 3)
    told = analyze(questions, "--capacity", 1000).stdout
    assert "6 samples share a prefix of at least 64 tokens with others, in 2 groups." in told
    assert ["1,000:", "patches", "1,536", "512", "66.7%"] in [line.split() for line in told.splitlines()]


def test_nothing_to_share_is_said_and_not_looking_is_silent(questions: str) -> None:
    assert "No samples share a prefix of at least 500 tokens" in analyze(questions, "--min-shared", 500).stdout
    assert "Shared prefixes" not in analyze(questions, "--min-shared", 0).stdout
    assert numbers(questions, "--min-shared", 0)["shared_prefixes"] is None


def test_of_audio_it_says_that_it_did_not_look_and_refuses_to(questions: str) -> None:
    asked = ["analyze", questions, "--processor", "tiny:qwen2_5_omni_thinker"]
    found = run(*asked)
    assert found.exit_code == 0
    assert "Did not look for shared prefixes" in found.stdout
    assert "Qwen2_5OmniProcessor may have audio" in found.stdout
    refused = run(*asked, "--min-shared", 64)
    assert refused.exit_code == 2
    assert "Qwen2_5OmniProcessor may have audio" in refused.output


# ---------------------------------------------------------------------- rows


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    """Tokenized samples of 6, 4, 3 and 7 tokens, one of them with a name; the last two of each are trained on."""
    rows: list[Any] = [{"input_ids": [5] * n, "labels": [-100] * (n - 2) + [5] * 2} for n in (6, 4, 3, 7)]
    rows[1]["id"] = "second"
    return write_rows(tmp_path / "tokens.jsonl", rows)


def rows_of(result: Result) -> list[list[str]]:
    """The words of each line from the first row on."""
    assert result.exit_code == 0, result.output
    return [line.split() for line in result.stdout.partition("\nRow ")[2].splitlines() if line]


def test_the_first_rows_of_the_plan_are_printed(tokens: str) -> None:
    lines = [
        ["0:", "10", "tokens", "of", "2", "samples"],
        ["sample", "tokens", "of", "media", "trained", "on"],
        ["0", "6", "0", "2"],
        ["second", "4", "0", "2"],
    ]
    capacity = ("--capacity", 10, "--capacity", 20)
    assert rows_of(analyze(tokens, *capacity, "--rows", 1)) == lines
    told = rows_of(analyze(tokens, *capacity, "--rows", 9))
    assert told[:4] == lines and told[4:6] == [["Row", "1:", "10", "tokens", "of", "2", "samples"], lines[1]]
    assert len(told) == 8


def test_a_tree_is_printed_with_branches_below_what_they_share() -> None:
    """Samples P A, P B C, P B and Q: P of 6 tokens has an image of 4; one sample ends in an inner node."""
    lengths = (9, 12, 10, 5)
    tree = PrefixTree(
        segments=Segments.from_lengths(lengths), parents=(-1, 0, 0, 2, -1), lengths=(6, 3, 4, 2, 5),
        leaves=(1, 3, 2, 4),
    )  # fmt: skip
    samples = []
    for name, length in zip("abcq", lengths, strict=True):
        types, labels = np.zeros(length, np.int64), np.full(length, -100)
        types[2:6], labels[-1] = int(name != "q"), 7
        samples.append(Encoded(input_ids=np.arange(length), labels=labels, types=types, sample_id=name))
    row = row_numbers(3, samples, tree)
    assert (row["row"], row["tokens"], row["computed"]) == (3, 36, 20)
    assert [tuple(part.values()) for part in row["parts"]] == [
        ("3 samples", 0, 6, 4, 0),
        ("a", 1, 3, 0, 1),
        ("2 samples, c ends here", 1, 4, 0, 0),
        ("b", 2, 2, 0, 1),
        ("q", 0, 5, 0, 1),
    ]


@pytest.mark.parametrize("is_packed", [False, True])
def test_rows_share_prefixes_if_that_is_asked_for(questions: str, is_packed: bool, tmp_path: Path) -> None:
    options = ("--processor", "tiny", "--capacity", 1000, "--min-shared", 64)
    source, more = questions, options
    if is_packed:
        source, more = str(tmp_path / "rows"), ()
        assert run("pack", questions, source, *options).exit_code == 0
    told = run("analyze", source, *more, "--rows", 1)
    assert told.stdout.count("3 samples ") == 2
    (row,) = json.loads(run("analyze", source, *more, "--rows", 1, "--json").stdout)["rows"]
    assert (row["samples"], len(row["parts"])) == (6, 8)
    assert row["computed"] == sum(part["tokens"] for part in row["parts"]) < row["tokens"]
    assert numbers(questions, "--capacity", 1000, "--rows", 1)["rows"][0]["computed"] == row["tokens"]


def test_packed_rows_are_printed_without_their_processor(tokens: str, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    assert run("pack", tokens, folder, "--processor", "tiny", "--capacity", 12, "--pad-seq-to-mult", 4).exit_code == 0
    told = rows_of(run("analyze", folder, "--rows", 1))
    assert told[2:] == [["0", "6", "0", "2"], ["second", "4", "0", "2"]]
    found = json.loads(run("analyze", folder, "--json").stdout)
    assert (found["counts"]["rows"], found["capacity"], found["rows"]) == (2, 12, [])
    refused = run("analyze", folder, "--num", 3, "--image-root", "x")
    assert "is packed already, so --num, --image-root would have no effect; leave it out" in refused.stderr


def test_a_data_set_needs_a_processor(tokens: str) -> None:
    refused = run("analyze", tokens)
    assert refused.exit_code == 2
    assert "tokens.jsonl is not packed yet, so it needs a --processor" in refused.stderr
    refused = analyze("lost.jsonl")
    assert "lost.jsonl' is no file or folder here and no hub id" in " ".join(refused.stderr.split())


def test_the_memory_of_a_rank_adds_up_and_its_mesh_is_printed(chats: str) -> None:
    told = numbers(chats, "--memory", 1, "--gpus", 2, "--method", "full")["memory"]
    assert told["fits"] and told["needed"] == sum(told["parts"].values()) < 0.9 * 2**30
    assert (told["mesh"]["replicate"], told["capacity"]) == (2, 20_000)
    assert "Use replicate=2, rows of 20,000 tokens." in analyze(chats, "--memory", 1, "--gpus", 2).stdout
