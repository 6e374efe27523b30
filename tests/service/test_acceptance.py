"""The whole service, driven by the unmodified client alone: newest and oldest, through a bad network.

client_program.py (a process) ──▶ FaultyProxy (this process) ──▶ vlmpack serve --demo (a process)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.faulty_proxy import FaultyProxy
from tests.service.server_process import KEY, Server

PROGRAM = Path(__file__).parent / "client_program.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "tinker_client.py"
OLDEST_CLIENT = Path(sys.prefix) / "tinker-0.25.0"
CHECKS = 4
FINISHED_WITHIN = 500.0

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.version_info < (3, 11), reason="the client needs Python 3.11")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("served") / "state")
    yield server
    if server.process.poll() is None:
        assert server.stop() == 0, server.printed()


def run_client(port: int, *, client: Path | None = None) -> None:
    """Run all checks; one that does not hold fails."""
    folders = [str(client)] if client else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(PROGRAM), f"http://127.0.0.1:{port}", KEY]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=FINISHED_WITHIN)
    results = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"check"')]
    broken = [f"{r['check']}:\n{r['seen']}" for r in results if not r["holds"]]
    assert not broken, "\n".join(broken)
    assert len(results) == CHECKS, ended.stderr[-4000:]


def test_a_network_that_loses_and_doubles(server: Server) -> None:
    with FaultyProxy(server.port) as proxy:
        run_client(proxy.port)
        assert min(proxy.done[fault] for fault in ("doubled", "reply lost", "lost")) >= 5, proxy.done


def test_the_oldest_client_is_served(server: Server) -> None:
    if not OLDEST_CLIENT.exists():
        pytest.skip(f"needs tinker 0.25.0 in {OLDEST_CLIENT}, where `make test` installs it")
    run_client(server.port, client=OLDEST_CLIENT)


def test_the_example_trains_on_receipts(server: Server) -> None:
    command = [sys.executable, "-W", "ignore", str(EXAMPLE), "--url", f"http://127.0.0.1:{server.port}"]
    command += ["--receipts", "4", "--epochs", "4", "--rounds", "2", "--group", "4"]
    environment = {**os.environ, "TINKER_API_KEY": KEY}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=FINISHED_WITHIN)
    assert ended.returncode == 0, ended.stderr[-4000:]
    losses = [float(line.split()[3]) for line in ended.stdout.splitlines() if line.startswith("supervised")]
    assert losses[-1] < losses[0] / 1.5
    assert ended.stdout.count("mean reward") == 2
    assert "saved: tinker://" in ended.stdout
