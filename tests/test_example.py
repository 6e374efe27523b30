"""The examples run as a user would run them, and what they save can be gone on with."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForImageTextToText

EXAMPLE = Path(__file__).parents[1] / "examples" / "finetune_cord.py"
OWN_LOOP = EXAMPLE.with_name("own_loop.py")


def run(example: Path, *args: str) -> list[str]:
    """The lines that it prints."""
    done = subprocess.run(
        [sys.executable, str(example), *args],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()


def run_example(*args: str) -> float:
    """The final loss that it prints."""
    last = run(EXAMPLE, *args)[-1]
    assert last.startswith("final loss ")
    return float(last.removeprefix("final loss "))


@pytest.mark.slow
def test_a_tiny_model_is_trained_saved_and_trained_on(tmp_path: Path) -> None:
    first = run_example("--steps", "3", "--output", str(tmp_path / "first"))
    assert math.isfinite(first)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "first")
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    second = run_example("--model", str(tmp_path / "first"), "--steps", "1", "--output", str(tmp_path / "second"))
    assert second < first + 1.0  # it went on from the trained weights: a random model starts above 7


@pytest.mark.slow
def test_a_loop_of_one_s_own_goes_on_where_it_was(tmp_path: Path) -> None:
    first = run(OWN_LOOP, "--output", str(tmp_path), "--accumulation", "3")
    losses = [float(line.rsplit(maxsplit=1)[1]) for line in first[:-1]]
    assert losses[-1] < losses[0]
    assert first[-1].startswith("held out: loss ")
    again = run(OWN_LOOP, "--output", str(tmp_path), "--accumulation", "3")
    assert again == first[-1:]  # nothing is left to train, and the weights are those
