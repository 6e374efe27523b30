"""The examples run as a user would run them, and what they save can be used without them."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from PIL import Image
from transformers import AutoModelForImageTextToText

from vlmpack import VLMCollator
from vlmpack.data import load_processor, open_dataset
from vlmpack.testing import tiny_model

EXAMPLES = Path(__file__).parents[1] / "examples"


DEPRECATED = "`gradient_checkpointing` is deprecated"


def run(example: str, *args: object, folder: Path) -> list[str]:
    """Run an example in this process, which has imported most of what it needs; return the lines that it prints."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), redirect_stdout(printed):
        patch.chdir(folder)
        patch.syspath_prepend(str(EXAMPLES))
        patch.setattr(sys, "argv", [example, *map(str, args)])
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", DEPRECATED, FutureWarning)
        runpy.run_path(str(EXAMPLES / example), run_name="__main__")
    return printed.getvalue().strip().splitlines()


def run_on_two_ranks(example: str, *args: object, folder: Path) -> list[str]:
    """Run an example under torchrun."""
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": f"error:{DEPRECATED}:FutureWarning"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launch, str(EXAMPLES / example), *map(str, args)],
        capture_output=True, text=True, timeout=300, cwd=folder, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout.strip().splitlines()


def write_chats(folder: Path, *, broken: bool = True, scale: int = 1) -> None:
    """Conversations as a user has them, about images in a folder and about none; an image and a line are broken."""
    (folder / "images").mkdir()
    lines = []
    for n in range(30):
        size = (scale * (96 + 8 * (n % 5)), scale * 64)
        Image.new("RGB", size, (8 * n, 90, 200)).save(folder / "images" / f"{n}.jpg")
        asked = {"role": "user", "content": "<image>\nWhat is the total?" if n % 5 else "Say a number."}
        sample = {"messages": [asked, {"role": "assistant", "content": f"Rp {n}.000"}]}
        lines.append(json.dumps({**sample, "images": [f"images/{n}.jpg"]} if n % 5 else sample))
    if broken:
        lines.append(lines[1].replace("images/1.jpg", "images/missing.jpg"))
        lines.insert(7, '{"messages": broken')
    (folder / "chats.jsonl").write_text("\n".join([*lines, ""]))


def losses_of(lines: list[str]) -> list[float]:
    """Of the held-out samples, before and after."""
    return [float(loss) for loss in re.findall(r"^\w+: loss of the held-out samples (\S+),", "\n".join(lines), re.M)]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT reads it
@pytest.mark.slow
@pytest.mark.dist
def test_from_chats_to_a_merged_lora_on_two_processes_and_on_from_there_in_full(tmp_path: Path) -> None:
    write_chats(tmp_path)
    common = ("--data", "chats.jsonl", "--capacity", 300)
    before, after = losses_of(
        run_on_two_ranks("finetune.py", "--model", "tiny", *common, "--learning-rate", "1e-2", folder=tmp_path)
    )
    assert after < before - 0.5
    saved = tmp_path / "results" / "finetuned"
    processor = load_processor(saved / "merged")
    batch = VLMCollator(processor)([open_dataset(str(tmp_path / "chats.jsonl"))[1]])
    batch = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    merged = AutoModelForImageTextToText.from_pretrained(saved / "merged").eval()
    adapted = PeftModel.from_pretrained(tiny_model(processor=processor), saved).eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(**batch).logits, adapted(**batch).logits, rtol=1e-4, atol=1e-4)

    full = ("--model", saved / "merged", "--full", "--learning-rate", "1e-3", "--output", "full", "--held-out", 0.1)
    first, second = losses_of(run("finetune.py", *full, *common, folder=tmp_path))
    assert second < first < before - 0.5  # it began with the merged weights
    assert type(AutoModelForImageTextToText.from_pretrained(tmp_path / "full")).__name__ == type(merged).__name__


@pytest.mark.slow
def test_receipts_are_trained_on_without_any_file(tmp_path: Path) -> None:
    before, after = losses_of(run("finetune.py", "--model", "tiny", "--data", "synthetic", folder=tmp_path))
    assert after < before


@pytest.mark.slow
def test_a_custom_loop_continues_where_it_was(tmp_path: Path) -> None:
    first = run("own_loop.py", "--output", tmp_path, "--accumulation", 3, folder=tmp_path)
    losses = [float(line.rsplit(maxsplit=1)[1]) for line in first[:-1]]
    assert losses[-1] < losses[0]
    assert first[-1].startswith("held out: loss ")
    again = run("own_loop.py", "--output", tmp_path, "--accumulation", 3, folder=tmp_path)
    assert again == first[-1:]  # nothing is left to train, and the weights are those


@pytest.mark.slow
@pytest.mark.dist
def test_two_ranks_train_on_rows_that_they_share(tmp_path: Path) -> None:
    words = ("--context", 2, "--steps", 2, "--samples", 2)
    lines = run_on_two_ranks("train_shared_rows.py", *words, folder=tmp_path)
    first, second = [float(loss) for loss in re.findall(r"^step \d+  loss (\S+)$", "\n".join(lines), re.MULTILINE)]
    assert second < first


@pytest.mark.slow
@pytest.mark.dist
def test_a_mesh_of_data_and_context_ranks_trains(tmp_path: Path) -> None:
    lines = run_on_two_ranks("parallel/train.py", "--steps", 2, "--mesh", "fsdp=2", "--context", 2, folder=tmp_path)
    first, second = [float(loss) for loss in re.findall(r"loss (\S+)", "\n".join(lines))]
    assert second < first
