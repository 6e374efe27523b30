"""Several data sets on the command line: `--mix SOURCE=WEIGHT`, counted, seeded, named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from vlmpack.cli import app
from vlmpack.cli.inputs import InputOptions, open_inputs
from vlmpack.cli.mixing import MixOptions, columns_by_source, mix_lines, mix_numbers, mixed_sources, short_names
from vlmpack.data import mix_datasets, open_dataset
from vlmpack.errors import ConfigError
from vlmpack.store import PackedDataset


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Twelve samples of one, four of the other."""
    for name, num in (("receipts", 12), ("chats", 4)):
        rows = [{"id": at, "prompt": f"{name} " * (1 + at % 3), "completion": "yes"} for at in range(num)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name: tmp_path / f"{name}.jsonl" for name in ("receipts", "chats")}


def vlmpack(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})


TEXT = ("--processor", "tiny:qwen3")


def test_packed_samples_are_those_of_the_same_mix_in_python(files: dict[str, Path], tmp_path: Path) -> None:
    options = ("--mix", f"{files['chats']}=0.5", "--capacity", 40, "--seed", 3, "--epoch", 1)
    done = vlmpack("pack", files["receipts"], tmp_path / "rows", *TEXT, *options, "--json")
    assert done.exit_code == 0, done.output
    datasets = {name: open_dataset(str(path)) for name, path in files.items()}
    mix = mix_datasets(datasets, {"receipts": 1, "chats": 0.5}, seed=3).at_epoch(1)
    rows = PackedDataset(tmp_path / "rows")
    packed = [sample.sample_id for row in range(len(rows)) for sample in rows.measured(row)]
    assert sorted(map(str, packed)) == sorted(sample["id"] for sample in mix)
    assert json.loads(done.stdout)["mix"] == {
        "receipts": {"weight": 1.0, "size": 12, "samples": mix.counts["receipts"], "passes": mix.passes["receipts"]},
        "chats": {"weight": 0.5, "size": 4, "samples": mix.counts["chats"], "passes": mix.passes["chats"]},
    }
    assert abs(mix.counts["chats"] - len(mix) / 3) <= 1


def test_tables_count_every_data_set(files: dict[str, Path]) -> None:
    mix = ("--mix", f"{files['chats']}=2", "--stopping-strategy", "all_exhausted")
    done = vlmpack("analyze", files["receipts"], *TEXT, *mix, "--num", 9)
    assert done.exit_code == 0, done.output
    assert f"{files['receipts']} + {files['chats']}=2: 9 samples" in done.stdout
    assert "3 of receipts (12 samples, 0.25 passes)" in done.stdout
    assert "6 of chats (4 samples, 1.50 passes)" in done.stdout
    shown = vlmpack("show", files["receipts"], *TEXT, *mix)
    assert f"{files['receipts']} + {files['chats']}=2: 35 samples" in shown.stdout


def test_without_weights_every_sample_comes_once(files: dict[str, Path]) -> None:
    mix = MixOptions(sources=(str(files["chats"]), "synthetic"))
    inputs = open_inputs(InputOptions(dataset=str(files["receipts"]), processor="tiny", mix=mix))
    numbers = mix_numbers(inputs.dataset)
    assert numbers is not None and list(numbers) == ["receipts", "chats", "synthetic"]
    assert {of["passes"] for of in numbers.values()} == {1.0}
    assert len(list(mix_lines(numbers))) == 3
    assert mix_numbers(open_dataset(str(files["chats"]))) is None


def test_names_are_the_ends_of_paths_that_differ() -> None:
    assert short_names(["a/train.jsonl", "naver/cord-v2", "chats.v2.jsonl.gz"]) == ["train", "cord-v2", "chats"]
    assert short_names(["x/a/train.jsonl", "x/b/train.jsonl"]) == ["a/train", "b/train"]
    assert short_names(["train.jsonl", "b/train.jsonl"]) == ["train", "b/train"]
    assert short_names(["train.json", "train.jsonl"]) == ["train.json", "train.jsonl"]


def test_a_file_whose_name_has_an_equals_sign_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lr=3"
    path.write_text("")
    assert [each.weight for each in mixed_sources("a", [str(path)])] == [None, None]
    assert [each.weight for each in mixed_sources("a", [f"{path}=4"])] == [1.0, 4.0]


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        (["--mix", "b.jsonl=much"], r"--mix b.jsonl=much: a weight is a number above 0.*: --mix b.jsonl=2"),
        (["--mix", "b.jsonl=0"], "a weight is a number above 0"),
        (["--mix", "b.jsonl=inf"], "a weight is a number above 0"),
        (["--mix", "b.jsonl=2", "--mix", "c.jsonl"], "--mix c.jsonl: others have a weight; give it one too"),
        (["--mix", "synthetic=2"], "--mix synthetic: it is in the mix already; name it once, and weigh it"),
        (["--epoch", "1"], "--epoch is of a mix; name its other data sets with --mix SOURCE=WEIGHT"),
        (["--stopping-strategy", "all_exhausted"], "--stopping-strategy is of a mix"),
        (["--stopping-strategy", "sometime"], "--stopping-strategy sometime: choose first_exhausted or all_exhausted"),
        (["--mix", "nowhere.jsonl=2"], "nowhere.jsonl"),
    ],
)
def test_what_makes_no_mix_is_refused(options: list[str], seen: str) -> None:
    done = vlmpack("analyze", "synthetic", "--num", 2, *TEXT, *options)
    assert done.exit_code == 2
    with pytest.raises(ConfigError, match=seen):
        raise ConfigError(" ".join(done.stderr.split()))


QUESTIONS, CAPTIONS = '{"q": "query", "a": "response"}', '{"text": "response"}'


@pytest.fixture
def foreign(tmp_path: Path) -> dict[str, Path]:
    """Three data sets with names of their own; those of the last one are known."""
    rows = {
        "asked": {"q": "How much?", "a": "9"},
        "said": {"text": "a receipt"},
        "known": {"query": "x", "response": "y"},
    }
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    return {name: tmp_path / f"{name}.jsonl" for name in rows}


def test_each_data_set_of_a_mix_has_names_of_its_own(foreign: dict[str, Path]) -> None:
    mix = ("--mix", foreign["said"], "--mix", foreign["known"])
    maps = ("--columns", f"asked={QUESTIONS}", "--columns", f"{foreign['said']}={CAPTIONS}")
    done = vlmpack("analyze", foreign["asked"], *TEXT, *mix, *maps, "--json")
    assert done.exit_code == 0, done.output
    numbers = json.loads(done.stdout)
    assert (numbers["samples"], numbers["refused"]["samples"]) == (3, 0)
    inputs = open_inputs(
        InputOptions(
            dataset=str(foreign["asked"]),
            processor="tiny:qwen3",
            columns=[f"asked={QUESTIONS}", CAPTIONS],  # that of all others
            mix=MixOptions(sources=(f"{foreign['said']}=2",)),
        )
    )
    answers = {sample["messages"][-1]["content"] for sample in inputs.dataset}
    assert answers == {"9", "a receipt"}


def test_maps_are_dealt_out_by_names() -> None:
    sources = ["a/asked.jsonl", "hub/said", "known.jsonl"]
    of = columns_by_source
    assert of([], sources) == dict.fromkeys(sources)
    assert of([QUESTIONS], sources) == dict.fromkeys(sources, QUESTIONS)
    assert [*of([f"asked={QUESTIONS}"], sources).values()] == [QUESTIONS, None, None]
    assert [*of([f"hub/said={CAPTIONS}", "info.json"], sources).values()] == ["info.json", CAPTIONS, "info.json"]
    assert of(['{"a=b": "query"}'], ["a"]) == {"a": '{"a=b": "query"}'}  # JSON names no data set


def test_maps_that_no_or_several_data_sets_have_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("said=info.json").write_text("{}")
    assert columns_by_source(["said=info.json"], ["b.jsonl"]) == {"b.jsonl": "said=info.json"}
    refusals = {
        ("said={}", "said={}"): "--columns said={}: said.jsonl has a map already; write all names of a data set in one",
        (QUESTIONS, CAPTIONS): r"every data set has a map already; .* SOURCE=MAP \(SOURCE: b, said\)",
        (
            "chats={}",
        ): "no data set here is called chats; there are b, said, b.jsonl, said.jsonl, or leave the name out",
        (
            "b={}",
            "said={}",
            "info.json",
        ): "--columns info.json: every data set has a map of its own; leave this one out",
        ("said=info.json",): "it can be read in two ways",
    }
    for columns, fault in refusals.items():
        with pytest.raises(ConfigError, match=fault):
            columns_by_source(columns, ["b.jsonl", "said.jsonl"])


def test_receipts_that_are_drawn_have_no_map_in_a_mix(foreign: dict[str, Path]) -> None:
    mix = ("--mix", "synthetic", "--num", 4)
    done = vlmpack("analyze", foreign["asked"], *TEXT, *mix, "--columns", QUESTIONS)
    assert done.exit_code == 2
    assert "name the data set of a mix that it is of: --columns SOURCE=MAP" in " ".join(done.stderr.split())


def test_rows_that_are_packed_cannot_be_mixed_again(files: dict[str, Path], tmp_path: Path) -> None:
    assert vlmpack("pack", files["chats"], tmp_path / "rows", *TEXT, "--capacity", 40).exit_code == 0
    for verb in (["show"], ["analyze", *TEXT]):
        done = vlmpack(*verb, tmp_path / "rows", "--mix", f"{files['receipts']}=1")
        assert done.exit_code == 2
        assert "is packed already" in " ".join(done.stderr.split())
