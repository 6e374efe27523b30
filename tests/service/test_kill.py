"""A server that is killed 24 times under the official client, against one that is left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

pytest.importorskip("tinker", reason="waits for the official client, which needs Python 3.11")
pytestmark = pytest.mark.full

LIVES = 24
SCRIPT = Path(__file__).with_name("killed_servers.py")
MINUTES = 15


def train(folder: Path, *, lives: int, steps: int) -> dict[str, Any]:
    """What a client saw of servers that were killed."""
    folder.mkdir()
    environment = {**os.environ, "TINKER_TELEMETRY": "0", "PYTHONPATH": str(SCRIPT.parents[2])}
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, SCRIPT, "serve", folder, str(lives), "16"], env=environment, stdout=log, stderr=log
        )
        try:
            while not (folder / "port").exists():
                assert server.poll() is None, (folder / "log").read_text()
                time.sleep(0.1)
            subprocess.run(
                [sys.executable, SCRIPT, "train", folder, str(steps), str(lives)],
                env=environment,
                check=True,
                stderr=log,
                timeout=60 * MINUTES,
            )
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0, (folder / "log").read_text()
        finally:
            server.kill()
    return json.loads((folder / "seen.json").read_text())


def weights(folder: Path, path: str) -> dict[str, np.ndarray]:
    """Tensors of a checkpoint, its optimiser's too."""
    abouts = (folder / "state" / "weights").glob("*/vlmpack_checkpoint.json")
    (found,) = [about.parent for about in abouts if _is(json.loads(about.read_text()), path)]
    files = sorted(found.glob("*.safetensors"))
    assert len(files) == 2
    return {f"{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


def _is(about: dict[str, str], path: str) -> bool:
    return path == f"tinker://{about['model']}/{about['kind']}/{about['name']}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("kills")
    killed = train(folder / "killed", lives=LIVES, steps=10)
    alone = train(folder / "alone", lives=0, steps=killed["steps"])
    for name, seen in (("killed", killed), ("alone", alone)):
        seen["weights"] = [weights(folder / name, path) for path in seen["ends"]]
        seen["lives"] = [json.loads(line) for line in (folder / name / "lives").read_text().splitlines()]
    return killed, alone


def test_the_servers_were_killed_at_many_moments(runs: tuple[dict[str, Any], dict[str, Any]]) -> None:
    deaths = Counter(life["death"][0] for life in runs[0]["lives"][:-1])
    assert sum(deaths.values()) == LIVES
    assert min(deaths["m"], deaths["t"]) >= 5
    assert runs[0]["steps"] >= 10


def test_a_client_that_waits_for_each_step_gets_the_same_bits(runs: tuple[dict[str, Any], dict[str, Any]]) -> None:
    killed, alone = runs
    assert killed["patient"] == alone["patient"]
    assert killed["tokens"] == alone["tokens"]
    assert killed["weights"][0].keys() == alone["weights"][0].keys()
    for name, tensor in killed["weights"][0].items():
        assert np.array_equal(tensor, alone["weights"][0][name]), name


def test_a_client_that_never_waits_gets_the_same_steps(runs: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """A kill between its requests changes which of them share rows, and so the rounding; a step more would show."""
    killed, alone = runs
    np.testing.assert_allclose(killed["hasty"], alone["hasty"], rtol=1e-4)
    for name, tensor in killed["weights"][1].items():
        expected = alone["weights"][1][name]
        assert np.abs(tensor - expected).max() <= 1e-3 * np.abs(expected).max(), name
