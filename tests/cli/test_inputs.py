"""What the command line names becomes a data set, or a mix of them, a processor, and a collator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures.processors import tiny_processor
from typer.testing import CliRunner, Result

from vlmpack.cli import app
from vlmpack.cli.inputs import Inputs, columns_by_source, open_inputs, short_names
from vlmpack.cli.models import named_processor
from vlmpack.cli.options import DataOptions
from vlmpack.data import mix_datasets, open_dataset, save_processor
from vlmpack.errors import ConfigError, FamilyError, SampleError
from vlmpack.rows import PackedDataset
from vlmpack.testing import tiny_config

CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
TEXT = ("--processor", "tiny:qwen3")


def opened(dataset: str, **options: Any) -> Inputs:
    return open_inputs(DataOptions(dataset=dataset, **options))


def vlmpack(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})


@pytest.fixture
def chats(tmp_path: Path) -> str:
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{json.dumps({'messages': CHAT})}\n" * 3)
    return str(path)


# ---------------------------------------------------------------------- data sets and processors


def test_receipts_for_a_processor_made_here_are_small_and_take_no_options_of_files() -> None:
    inputs = opened("synthetic", processor="tiny", num=2, seed=5)
    assert len(inputs.dataset) == 2
    assert inputs.dataset[0]["conversation"][0]["content"][0]["image"].width < 500
    assert inputs.collator.measure(inputs.dataset[0]).num_tokens > 100
    for option in ({"image_root": Path()}, {"columns": ["{}"]}, {"branches": "turns"}):
        with pytest.raises(ConfigError, match=r"--\S+ does not apply to synthetic receipts: they have fixed"):
            opened("synthetic", processor="tiny", **option)


def test_a_processor_is_that_of_a_family_or_of_a_folder(tmp_path: Path) -> None:
    assert type(named_processor("tiny:qwen2_5_vl")).__name__ == "Qwen2_5_VLProcessor"
    processor = tiny_processor()
    for name in ("vision", "text"):
        (tmp_path / name).mkdir()
    tiny_config("qwen3_vl", processor=processor).save_pretrained(tmp_path / "vision")
    save_processor(processor, tmp_path / "vision")
    tiny_config("qwen3").save_pretrained(tmp_path / "text")
    named_processor("tiny:qwen3").save_pretrained(tmp_path / "text")
    assert type(named_processor(str(tmp_path / "vision"))) is type(processor)
    (tmp_path / "vision" / "config.json").unlink()
    assert type(named_processor(str(tmp_path / "vision"))) is type(processor)
    assert "<|im_start|>assistant" in named_processor(str(tmp_path / "text")).apply_chat_template(CHAT, tokenize=False)


def test_what_is_not_there_is_refused(chats: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"processor .*nowhere cannot be read"):
        opened(chats, processor=str(tmp_path / "nowhere"))
    with pytest.raises(FamilyError, match="mamba: unknown family"):
        named_processor("tiny:mamba")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"processor .*config.json is a file; give its folder: {tmp_path}$"):
        named_processor(str(tmp_path / "config.json"))


def test_limits_of_a_sample_reach_the_collator(chats: str, tmp_path: Path) -> None:
    inputs = opened(chats, processor="tiny", max_length=5)
    with pytest.raises(SampleError, match="max_length=5"):
        inputs.collator.measure(inputs.dataset[0])
    save_processor(tiny_processor("glm4v"), tmp_path)
    file, glm = tmp_path / "more.jsonl", str(tmp_path)
    file.write_text(json.dumps({"messages": [{**turn, "at": "noon"} for turn in CHAT]}))
    with pytest.raises(SampleError, match=r"has at, which the chat template does not write"):
        (refusing := opened(str(file), processor=glm)).collator.measure(refusing.dataset[0])
    inputs = opened(str(file), processor=glm, ignored_keys=["at"], add_stop="<|user|>")
    measured = inputs.collator.measure(inputs.dataset[0])
    stop = inputs.collator.processor.tokenizer.convert_tokens_to_ids("<|user|>")
    assert measured.labels[-1] == measured.input_ids[-1] == stop


def test_the_largest_area_of_an_image_is_the_processors_own_or_the_one_given(chats: str) -> None:
    """64 squares of 32 x 32 pixels; what is measured is what is cut."""
    free, bound = (opened("synthetic", processor="tiny", num=1, max_pixels=area) for area in (None, 64 * 32**2))
    tokens = [int((one.collator.measure(one.dataset[0]).types != 0).sum()) for one in (free, bound)]
    assert tokens[1] <= 64 < tokens[0]
    pixels = bound.collator.collate([bound.dataset[0]]).media.pixel_values
    assert pixels is not None
    assert len(pixels) == 4 * tokens[1]
    with pytest.raises(ConfigError, match="--max-pixels 9: the processor enlarges images to at least 4096 pixels"):
        opened(chats, processor="tiny", max_pixels=9)
    with pytest.raises(ConfigError, match="--max-pixels 9: a text model has no images"):
        opened(chats, processor="tiny:qwen3", max_pixels=9)


# ---------------------------------------------------------------------- mixes


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Twelve samples of one, four of the other."""
    for name, num in (("receipts", 12), ("chats", 4)):
        rows = [{"id": at, "prompt": f"{name} " * (1 + at % 3), "completion": "yes"} for at in range(num)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name: tmp_path / f"{name}.jsonl" for name in ("receipts", "chats")}


def test_packed_samples_are_those_of_the_same_mix_in_python(files: dict[str, Path], tmp_path: Path) -> None:
    options = ("--mix", f"{files['chats']}=0.5", "--capacity", 40, "--seed", 3)
    done = vlmpack("pack", files["receipts"], tmp_path / "rows", *TEXT, *options, "--json")
    assert done.exit_code == 0, done.output
    datasets = {name: open_dataset(str(path)) for name, path in files.items()}
    mix = mix_datasets(datasets, {"receipts": 1, "chats": 0.5}, seed=3)
    rows = PackedDataset(tmp_path / "rows")
    packed = [sample.sample_id for row in range(len(rows)) for sample in rows.measured(row)]
    assert sorted(map(str, packed)) == sorted(sample["id"] for sample in mix)
    assert json.loads(done.stdout)["mix"] == {
        "receipts": {"weight": 1.0, "size": 12, "samples": mix.counts["receipts"], "passes": mix.passes["receipts"]},
        "chats": {"weight": 0.5, "size": 4, "samples": mix.counts["chats"], "passes": mix.passes["chats"]},
    }
    assert abs(mix.counts["chats"] - len(mix) / 3) <= 1
    for verb in (["analyze"], ["analyze", *TEXT, "--mix", f"{files['receipts']}=1"]):
        done = vlmpack(*verb, tmp_path / "rows", "--mix", f"{files['receipts']}=1")
        assert done.exit_code == 2
        assert "is packed already" in " ".join(done.stderr.split())


def test_names_are_the_ends_of_paths_that_differ() -> None:
    assert short_names(["a/train.jsonl", "naver/cord-v2", "chats.v2.jsonl.gz"]) == ["train", "cord-v2", "chats"]
    assert short_names(["x/a/train.jsonl", "x/b/train.jsonl"]) == ["a/train", "b/train"]
    assert short_names(["train.jsonl", "b/train.jsonl"]) == ["train", "b/train"]
    assert short_names(["train.json", "train.jsonl"]) == ["train.json", "train.jsonl"]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--mix", "b.jsonl=much"], r"--mix b.jsonl=much: the weight must be a number.*: --mix b.jsonl=2"),
        (["--mix", "b.jsonl=0"], "the weight of 'b' is 0.0; it must be above 0"),
        (["--mix", "b.jsonl=inf"], "the weight of 'b' is inf; it must be above 0"),
        (
            ["--mix", "b.jsonl=2", "--mix", "c.jsonl"],
            "weights are of synthetic, b, but the datasets are synthetic, b, c",
        ),
        (["--mix", "synthetic=2"], "--mix synthetic: it is already in the mix; name it once, with a weight"),
        (["--mix", "nowhere.jsonl=2"], "nowhere.jsonl"),
    ],
)
def test_what_makes_no_mix_is_refused(
    options: list[str], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.jsonl", "c.jsonl"):
        Path(name).write_text('{"query": "x", "response": "y"}')
    done = vlmpack("analyze", "synthetic", "--num", 2, *TEXT, *options)
    assert done.exit_code == 2
    with pytest.raises(ConfigError, match=fault):
        raise ConfigError(" ".join(done.stderr.split()))


QUESTIONS, CAPTIONS = '{"q": "query", "a": "response"}', '{"text": "response"}'


def test_each_data_set_of_a_mix_has_names_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = {
        "asked": {"q": "How much?", "a": "9"},
        "said": {"text": "a receipt"},
        "known": {"query": "x", "response": "y"},
    }
    for name, row in rows.items():
        Path(f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    maps = ("--columns", f"asked={QUESTIONS}", "--columns", f"said.jsonl={CAPTIONS}")
    done = vlmpack("analyze", "asked.jsonl", *TEXT, "--mix", "said.jsonl", "--mix", "known.jsonl", *maps, "--json")
    assert done.exit_code == 0, done.output
    numbers = json.loads(done.stdout)
    assert (numbers["samples"], numbers["refused"]["samples"]) == (3, 0)
    others = [f"asked={QUESTIONS}", CAPTIONS]  # that of all others
    inputs = opened("asked.jsonl", processor="tiny:qwen3", columns=others, mix=["said.jsonl=2"])
    assert {sample["messages"][-1]["content"] for sample in inputs.dataset} == {"9", "a receipt"}


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        (("said={}", "said={}"), "--columns said={}: said.jsonl already has a map; write all names in one"),
        ((QUESTIONS, CAPTIONS), r"every data set already has a map; .* SOURCE=MAP \(SOURCE: b, said\)"),
    ],
)
def test_maps_that_no_data_set_has_or_one_twice_are_refused(columns: tuple[str, ...], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        columns_by_source(columns, ["b.jsonl", "said.jsonl"])
