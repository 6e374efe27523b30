"""An engine on two gloo processes: equal to one, in results, steps, failures and files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from service.two_ranks import LIMITS, scenario
from step_service import tiny_engine, weights

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.full]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both ranks left what they saw."""
    folder = tmp_path_factory.mktemp("ranks")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    script = Path(__file__).with_name("two_ranks.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*launch, str(script), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[str, Any]:
    """What rank 0 saw."""
    return json.loads((folder / "seen.json").read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
    """The same calls of one engine: what came of them, and its weights."""
    engine = tiny_engine(limits=LIMITS)
    found = scenario(engine, engine, tmp_path_factory.mktemp("alone"))
    return found, {name: weights(engine, name) for name in engine.models()}


def test_there_are_rows_for_both_ranks(seen: dict[str, Any]) -> None:
    assert seen["rows"] > 2


def test_two_ranks_see_what_one_sees(seen: dict[str, Any], alone: tuple) -> None:
    expected, _ = alone
    for name in ("losses", "norms"):
        assert seen.pop(name) == pytest.approx(expected[name], rel=1e-5)
    for ours, theirs in zip(seen.pop("logprobs"), expected["logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert {name: seen[name] for name in expected if name in seen} == {
        name: value for name, value in expected.items() if name in seen
    }
    assert {"rows", "failure", "nothing", "refused", "cancelled", "models"} <= seen.keys()


def test_both_ranks_have_the_same_weights_as_one(folder: Path, alone: tuple) -> None:
    first, second = (torch.load(folder / f"weights{rank}.pt") for rank in (0, 1))
    _, expected = alone
    assert first.keys() == second.keys() == expected.keys()
    for model, tensors in expected.items():
        for name, tensor in tensors.items():
            assert torch.equal(first[model][name], second[model][name])
            torch.testing.assert_close(first[model][name], tensor, rtol=1e-4, atol=1e-4)
