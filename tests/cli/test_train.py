"""`vlmpack train`: its keys, its plan, and a training with the losses of plain transformers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_example import write_chats
from transformers import AutoModelForImageTextToText, TrainingArguments
from typer.testing import CliRunner

from vlmpack import VLMCollator, plan_bins
from vlmpack.cli import app
from vlmpack.cli.config import ELSEWHERE, UNUSED, all_keys
from vlmpack.data import load_processor, open_dataset
from vlmpack.lengths import measure_lengths
from vlmpack.testing import tiny_model, tiny_processor

ROOT = Path(__file__).parents[2]
CHATS = ("model=tiny", "data=chats.jsonl", "capacity=300", "on_bad=skip", "--quiet")


@pytest.fixture
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_chats(tmp_path)
    return tmp_path


def run(*arguments: str) -> Any:
    done = CliRunner().invoke(app, ["train", *arguments, "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


# ---------------------------------------------------------------------- keys


def test_help_config_lists_every_key_and_every_name_elsewhere_leads_to_one() -> None:
    done = CliRunner().invoke(app, ["train", "--help-config"])
    listed = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    assert all_keys().keys() <= listed and len(all_keys()) > 140
    assert ELSEWHERE.keys() <= all_keys().keys() and UNUSED.keys() <= set(TrainingArguments.__dataclass_fields__)
    assert not {name for names in ELSEWHERE.values() for name in names.split()} & all_keys().keys()
    assert all(key.help for key in all_keys().values())
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    assert {"model", "data", "method", "capacity"} == set(re.findall(r"^\+(\w+): ", page, re.MULTILINE))
    theirs = set(re.findall(r"^-(\w+): ", page, re.MULTILINE))
    assert len(theirs) == 10 and theirs <= {name for names in ELSEWHERE.values() for name in names.split()}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("cutoff_len=4", "unknown key cutoff_len; the nearest is capacity: Tokens of a row"),
        ("model_name_or_path=a", "the nearest is model: Hub id"),
        ("lerning_rate=1", "unknown key lerning_rate; the nearest is learning_rate: "),
        ("learning_rate=fast", "learning_rate=fast: input should be a valid number"),
        ("capacity=1.5", "capacity=1.5: input should be a valid integer"),
        ("capacity=yes", "capacity=True: input should be a valid integer"),
        ("method=qlora", "method=qlora: input should be 'lora' or 'full'"),
        ("seed=", "seed=None: input should be a valid integer"),
        ("chats.jsonl", "chats.jsonl is not a setting KEY=VALUE; to read settings from a file: --config chats.jsonl"),
        ("--on-bad", "--on-bad is no option; write settings without dashes: on_bad=VALUE"),
        ("--num=4", "--num is no option; write settings without dashes: num=4"),
        ("data=[a", "data=[a cannot be read: while parsing"),
        ("eval_strategy=sometimes", "TrainingArguments refuses these keys: sometimes is not a valid"),
        ("model=nowhere", "nowhere"),
        ("lora_targets=nothing", "lora_targets nothing: No modules were targeted"),
        ("num=-1", "num=-1: input should be greater than or equal to 1"),
        ("val_size=30", "30 samples cannot be held out of 30; give a share below 1"),
        ("data=[a, b]", "data=['a', 'b']: input should be a valid string"),
        ("mix=[synthetic=0]", "the weight of 'synthetic' is 0.0; it must be above 0"),
        ("resume_from_checkpoint=nowhere", "nowhere cannot be resumed from: there is no such folder"),
        ("on_bad=raise", "2 of 32 samples of chats.jsonl cannot be used; on_bad='skip'"),
        ("capacity=20", "no sample of chats.jsonl can be used (overlength"),
        ("max_length=301", "max_length is above capacity=300"),
        ("val_size=.inf", "val_size=inf: input should be a finite number"),
        ("eval_data=bad.jsonl", "no sample of bad.jsonl can be used (image_missing 1)"),
        ("processor=tiny:qwen3", "the processor is of a text model, and tiny takes images"),
        ("lora_dropout=1", "lora_dropout=1: input should be less than or equal to 0.99"),
        ("lora_targets='(*'", "lora_targets (*: nothing to repeat"),
        ("lora_alpha=0", "lora_alpha=0: input should be greater than or equal to 1"),
        ("samples_per_update=99", "samples_per_update=99: there are only 28 samples; lower it"),
        ("max_steps=0", "nothing would be trained"),
        ("learning_rate=-1", "nothing would be trained"),
    ],
)
def test_what_a_key_cannot_be_is_refused_in_one_line(setting: str, said: str, chats: Path) -> None:
    Path("bad.jsonl").write_text(Path("chats.jsonl").read_text().splitlines()[-1])
    done = CliRunner().invoke(app, ["train", *CHATS, "--dry-run", setting])
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.stderr.split()) and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a", "has no keys; write lines such as `data: chats.jsonl`"),
        ("model: tiny", "data must be set"),
        ("a: [", "cannot be read"),
        ("seed: 1\nseed: 2", "seed is written twice"),
        (
            "{model: tiny, data: synthetic, num: 3, output_dir: '', push_to_hub: true, hub_token: x}",
            "Trainer refuses these keys: ",
        ),
        ("{model: tiny, data: synthetic, num: 3, adam_beta1: 2}", "Trainer refuses these keys: Invalid beta"),
        ("{model: tiny, data: synthetic, num: 3, max_patches: 1}", "synthetic: no sample can be used (2 are too large"),
        (
            "{model: tiny, data: synthetic, num: 9, capacity: 999, eval_strategy: epoch, metric_for_best_model: f1}",
            "metric_for_best_model=f1 is not in its evaluation: choose one of loss, num_refused,",
        ),
        ("{model: tiny, data: synthetic, num: 3, lr_scheduler_kwargs: {a: 1e-4}}", "Trainer refuses these keys: "),
        ("{model: tiny, data: synthetic, neftune_noise_alpha: 5}", "neftune_noise_alpha scales noise"),
    ],
)
def test_a_file_that_configures_no_training_is_refused(text: str, said: str, chats: Path) -> None:
    Path("train.yaml").write_text(text)
    done = CliRunner().invoke(app, ["train", "--config", "train.yaml"])
    assert (done.exit_code, said in done.stderr) == (2, True), done.output


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything(chats: Path) -> None:
    done = CliRunner().invoke(app, ["train", *CHATS, "output_dir=chats.jsonl"])
    assert done.exit_code == 2 and "chats.jsonl cannot be written: " in done.stderr


# ---------------------------------------------------------------------- the plan


def test_a_dry_run_prints_the_rows_that_the_library_plans_and_what_is_trained_on(chats: Path) -> None:
    keys = ("data: chats.jsonl", "mix: [synthetic=0.5]", "num: 24", "learning_rate: 1e-3", "capacity: 500")
    Path("train.yaml").write_text("\n".join(keys))
    settings = ("--config", "train.yaml", "val_size=0", "samples_per_update=12", "on_bad=skip", "model=tiny")
    unused = (
        "per_device_train_batch_size=4",
        "method=full",
        "lora_rank=8",
        "max_steps=3",
        "num_train_epochs=2",
        "fp16=true",
        "bf16=false",
        "use_cpu=true",
    )
    told = run(*settings, *unused, "--dry-run")
    assert (told["samples"] + told["left_out"], told["held_out"], told["result"]) == (24, 0, None)
    assert told["accumulation"] == -(-12 * told["rows"] // told["samples"]) and told["updates"] == 3
    assert told["ignored"].keys() == {"per_device_train_batch_size", "lora_rank", "num_train_epochs", "fp16"}
    sample = "".join(part["text"] for part in told["sample"] if part["trained_on"])
    assert sample.startswith("Rp ") and sample.endswith(".000<|im_end|>")

    told = run(*settings[:2], "num=100", "on_bad=skip", "model=tiny", "val_size=3", "--dry-run")
    assert told["samples"] + told["left_out"] < 97 and told["held_out"] == 3  # other passes over those are left out

    told = run(*CHATS, "val_size=0", "min_shared=0", "--dry-run")
    table = measure_lengths(open_dataset("chats.jsonl"), VLMCollator(tiny_processor(), max_length=300))
    plan = plan_bins(table, 300, overlength="drop")
    assert (told["rows"], told["samples"], told["left_out"]) == (len(plan), len(table), len(table.refused))
    assert told["targets"] == table.targets.sum() and told["fill"] == pytest.approx(plan.fill)
    printed = CliRunner().invoke(app, ["train", *CHATS, "val_size=0", "--dry-run"]).stdout
    assert "[[Rp " in printed and "(row_unreadable)" in printed and f"rows {len(plan)}" in " ".join(printed.split())


# ---------------------------------------------------------------------- a training


@pytest.mark.slow
def test_losses_are_those_of_samples_alone_and_the_merged_model_needs_nothing(chats: Path) -> None:
    result = run(*CHATS, "learning_rate=1e-2", "max_new_tokens=4", "val_size=5")["result"]
    assert result["after"]["loss"] < result["before"]["loss"] - 0.3
    rest = set(range(31)) - {7}  # its line is no JSON
    loss = {name: loss_alone(model, rest) for name, model in models().items()}
    told = run(*CHATS, "eval_data=chats.jsonl", "val_size=0", "model=results/merged", "output_dir=more", "max_steps=1")
    assert told["result"]["before"]["loss"] == pytest.approx(loss["merged"], rel=1e-4)
    told = run(*CHATS, "eval_data=chats.jsonl", "output_dir=other", "max_steps=1", "max_new_tokens=0", "merge=false")
    assert told["result"]["before"] == {"loss": pytest.approx(loss["first"], rel=1e-4), "answer": None}
    assert told["result"]["merged"] is None and Path("other/adapter_config.json").exists()


def models() -> dict[str, Any]:
    processor = load_processor("results/merged")
    return {
        "first": tiny_model(processor=processor),
        "merged": AutoModelForImageTextToText.from_pretrained("results/merged"),
    }


def loss_alone(model: Any, places: set[int]) -> float:
    """The mean loss of all targets, each sample by itself through plain transformers; a missing image is left out."""
    collate, data = VLMCollator(tiny_processor()), open_dataset("chats.jsonl")
    total, targets = 0.0, 0
    for at in sorted(places - {31}):
        batch = {name: value for name, value in collate([data[at]]).items() if isinstance(value, torch.Tensor)}
        count = int((batch["labels"][:, 1:] >= 0).sum())
        with torch.no_grad():
            total += float(model.eval()(**batch).loss) * count
        targets += count
    return total / targets


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("model=tiny:qwen3", "columns={q: query, a: response}", "data=text.jsonl", "val_size=1", "save_strategy=no"),
        ("model=tiny:qwen3_5_moe", "processor=tiny", "freeze_vision=false"),
        ("eval_data=chats.jsonl", "min_shared=8", "method=full", "freeze_vision=false", "dtype=bfloat16"),
    ],
    ids=lambda settings: settings[0],
)
def test_text_experts_and_shared_prefixes_are_trained_and_answer(settings: tuple[str, ...], chats: Path) -> None:
    Path("text.jsonl").write_text("".join(f'{{"q": "Say {n}", "a": "number {n}"}}\n' for n in range(9)))
    told = run(*CHATS, "max_steps=1", "max_new_tokens=3", "learning_rate=1e-2", *settings)
    assert told["result"]["after"]["loss"] < told["result"]["before"]["loss"] and not told["ignored"]
    assert told["result"]["after"]["answer"]


@pytest.mark.slow
@pytest.mark.dist
def test_two_processes_of_torchrun_train_as_one_that_accumulates(chats: Path) -> None:
    settings = (*CHATS, "max_steps=1", "max_new_tokens=0", "val_size=3", "learning_rate=1e-2", "merge=false")
    one = run(*settings, "gradient_accumulation_steps=2", "output_dir=one")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "vlmpack", "train"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command, *settings, "--json"], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    two = json.loads(done.stdout)  # of rank 0 alone
    assert (two["ranks"], two["accumulation"]) == (2, 1)
    losses = [[told["result"][when]["loss"] for when in ("before", "after")] for told in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][1] < losses[0][0] - 0.1


@pytest.mark.slow
def test_a_run_that_was_stopped_ends_as_one_that_was_not(chats: Path) -> None:
    settings = (*CHATS, "method=full", "learning_rate=1e-3", "max_new_tokens=0", "save_strategy=steps", "save_steps=2")
    whole = run(*settings, "max_steps=4", "output_dir=whole", "lr_scheduler_type=constant")
    run(*settings, "max_steps=2", "output_dir=halves", "lr_scheduler_type=constant")
    resumed = run(
        *settings, "max_steps=4", "output_dir=halves", "lr_scheduler_type=constant", "resume_from_checkpoint=true"
    )
    assert resumed["ignored"].keys() == {"learning_rate"}  # that of the checkpoint
    assert resumed["result"]["after"] == whole["result"]["after"] != whole["result"]["before"]
    lora = (*settings, "output_dir=adapters", "method=lora", "lora_targets=[q_proj, v_proj]")
    run(*lora, "max_steps=2")
    assert run(*lora, "max_steps=3", "resume_from_checkpoint=true")["result"]["before"] is None
    Path("other.jsonl").write_text(Path("chats.jsonl").read_text().replace("Rp 2", "Rp 4"))
    for folder, other, said in (
        ("halves", ("method=lora",), "of all weights, and this one is of adapters"),
        ("halves", ("capacity=299",), "plan"),
        ("halves", ("train_on=all",), 'train_on was "assistant" and is "all"'),
        ("halves", ("freeze_vision=false",), "trained_tensors was "),
        ("halves", ("data=other.jsonl",), "samples was "),  # of the same lengths
        (
            "adapters",
            ("method=lora", "lora_targets=[q_proj]"),
            'target_modules was ["q_proj", "v_proj"] and is ["q_proj"]',
        ),
        ("adapters", ("method=lora", "lora_targets=[q_proj, v_proj]", "lora_alpha=8"), "lora_alpha was 32 and is 8"),
    ):
        resumed = ("resume_from_checkpoint=true", f"output_dir={folder}", *other)
        done = CliRunner().invoke(app, ["train", *settings, *resumed])
        assert done.exit_code == 2 and said in done.stderr, (said, done.output)
