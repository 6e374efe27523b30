"""`vlmpack serve` behind a bad network, killed, and on two ranks: equal to one that is left alone.

steps_program.py (a process: the unmodified client) ──▶ vlmpack serve --demo (a process, or several)
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.service.server_process import KEY, Server, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.dist,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="the client needs Python 3.11"),
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are found in /proc"),
]

PROGRAM = Path(__file__).with_name("steps_program.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
ROWS = ("--row-tokens", "40")
"""So that a batch is several rows: each rank has some."""
GONE_WITHIN = 30.0
EXAMPLE = Path(__file__).parents[3] / "examples" / "tinker_client.py"
OLDEST_CLIENT = Path(sys.prefix) / "tinker-0.25.0"
RUN = """
import os, runpy, sys
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
os._exit(0)  # the client's daemon thread still runs: an interpreter that ends below it may abort
"""
OPTIONS = {"one": (), "workers": ("--workers", "2"), "sharded": ("--workers", "2", "--shard")}


@contextmanager
def serving(folder: Path, way: str) -> Iterator[Server]:
    """A server of one process, or of two."""
    folder.mkdir()
    if way == "torchrun":
        server = Server(folder / "state", *ROWS, launcher=TORCHRUN)
    else:
        server = Server(folder / "state", *ROWS, *OPTIONS[way])
    try:
        yield server
    finally:
        server.close()


def run_client(server: Server, program: Path, *arguments: str, client: Path | None = None) -> str:
    """Run a program of the installed client, or of the one in a folder; returns what it printed."""
    path = os.pathsep.join([*([str(client)] if client else []), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TINKER_TELEMETRY": "0", "TINKER_API_KEY": KEY, "PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", "-c", RUN, str(program), *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-4000:] + server.printed()
    return ended.stdout


def trained(server: Server, *network: str, client: Path | None = None) -> dict[str, Any]:
    """What a client saw."""
    seen = server.state.parent / "seen.json"
    run_client(server, PROGRAM, server.url, KEY, str(seen), *network, client=client)
    return json.loads(seen.read_text())


def checkpoint(server: Server, path: str) -> dict[str, np.ndarray]:
    """Tensors of a checkpoint, its optimizer's too."""
    abouts = {about: json.loads(about.read_text()) for about in server.state.glob("weights/*/vlmpack_checkpoint.json")}
    (found,) = [
        f for f, about in abouts.items() if path == f"tinker://{about['model']}/{about['kind']}/{about['name']}"
    ]
    files = sorted(found.parent.glob("*.safetensors"))
    assert len(files) == 2
    return {f"{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of one process."""
    with serving(tmp_path_factory.mktemp("served") / "one", "one") as server:
        yield server
        assert server.stop() == 0, server.printed()


@pytest.fixture(scope="module")
def alone(server: Server) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What a client sees of one process, and its checkpoint."""
    seen = trained(server)
    return seen, checkpoint(server, seen["path"])


def check_equal(
    server: Server, expected: dict[str, Any], tensors: dict[str, np.ndarray], *network: str, client: Path | None = None
) -> dict[str, Any]:
    """Train, and compare results and checkpoint with those of one process; returns what the client saw."""
    seen = trained(server, *network, client=client)
    for name in ("losses", "norms"):
        assert seen[name] == pytest.approx(expected[name][: len(seen[name])], rel=1e-5)
    assert seen["prompt"] == pytest.approx(expected["prompt"], abs=1e-5)
    for ours, theirs in zip(seen["logprobs"], expected["logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert (seen["greedy"], seen["seeded"]) == (expected["greedy"], expected["seeded"])
    saved = checkpoint(server, seen["path"])
    assert saved.keys() == tensors.keys()
    for name, tensor in saved.items():
        close = 1e-5 * np.abs(tensors[name]).max()
        np.testing.assert_allclose(tensor, tensors[name], rtol=1e-4, atol=close, err_msg=name)
    return seen


def models(server: Server) -> int:
    """Number of models that the server has created."""
    with closing(sqlite3.connect(f"file:{server.state}/journal.sqlite3?mode=ro", uri=True)) as journal:
        return journal.execute("SELECT count(*) FROM models").fetchone()[0]


def test_a_network_that_loses_and_doubles(server: Server, alone: Any) -> None:
    faults = check_equal(server, *alone, "faulty")["faults"]
    assert min(faults[fault] for fault in ("doubled", "reply lost", "lost")) >= 2, faults


def test_the_oldest_client_is_served(server: Server, alone: Any) -> None:
    if not OLDEST_CLIENT.exists():
        pytest.skip(f"needs tinker 0.25.0 in {OLDEST_CLIENT}, where `make test` installs it")
    check_equal(server, *alone, client=OLDEST_CLIENT)


def test_a_server_that_is_killed_goes_on_to_the_same_bits(server: Server) -> None:
    """On one thread, with a client that waits for each call: otherwise time decides which requests share rows."""
    expected = trained(server, "awaited")
    tensors, before = checkpoint(server, expected.pop("path")), models(server)
    with ThreadPoolExecutor(1) as pool:
        trains = pool.submit(trained, server, "awaited")
        until(lambda: models(server) > before + 1, 60.0, server.printed)  # it tries to create each only so often
        time.sleep(random.Random(5).uniform(0.05, 0.8))
        assert not trains.done()
        server.kill()
        server.start()
        seen = trains.result()
    saved = checkpoint(server, seen.pop("path"))
    assert seen == expected
    assert saved.keys() == tensors.keys()
    assert all(np.array_equal(tensor, tensors[name]) for name, tensor in saved.items())


def test_the_example_trains_on_receipts(server: Server) -> None:
    options = ("--receipts", "4", "--epochs", "3", "--rounds", "1", "--group", "2")
    printed = run_client(server, EXAMPLE, "--url", server.url, *options)
    losses = [float(line.split()[3]) for line in printed.splitlines() if line.startswith("supervised")]
    assert losses[-1] < losses[0] / 1.2
    assert printed.count("mean reward") == 1
    assert "saved: tinker://" in printed


def test_two_ranks_are_one_service(tmp_path: Path, alone: Any) -> None:
    """Equal results and checkpoints; SIGTERM to rank 0 ends all with status 0."""
    with serving(tmp_path / "two", "sharded") as server:
        check_equal(server, *alone)
        ranks = server.ranks()
        assert sorted(ranks) == [0, 1]
        os.kill(ranks[0], signal.SIGTERM)
        assert server.process.wait(60) == 0, server.printed()
        until(lambda: not server.ranks(), GONE_WITHIN, server.printed)
        assert "rank 0 is gone" not in server.printed()


def test_a_rank_that_is_killed_takes_the_others_with_it(tmp_path: Path, alone: Any) -> None:
    with serving(tmp_path / "killed", "torchrun") as server:
        check_equal(server, *alone)
        os.kill(server.ranks()[0], signal.SIGKILL)
        assert server.process.wait(GONE_WITHIN) != 0
        until(lambda: not server.ranks(), GONE_WITHIN, server.printed)
