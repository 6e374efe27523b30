"""`vlmpack serve` as a process, or as several, and the processes that belong to it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

KEY = "tml-acceptance"


class Server:
    """`vlmpack serve` on a port and a state folder of its own.

    Args:
        state: its state folder.
        options: further ones of the command.
        model: what it serves.
        launcher: what runs the module `vlmpack.cli`.
    """

    started_within = 90.0

    def __init__(
        self, state: Path, *options: str, model: str = "--demo", launcher: Sequence[str] = (sys.executable,)
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.state = state
        self.command = self.command_of(model, *options, launcher=launcher)
        self.log = (state.parent / "server.log").open("ab")
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def command_of(self, *options: str, launcher: Sequence[str]) -> list[str]:
        where = ["--port", str(self.port), "--state", str(self.state)]
        return [*launcher, "-m", "vlmpack.cli", "serve", *where, *options]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        environment = {**os.environ, "VLMPACK_API_KEY": KEY, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(self.command, env=environment, stdout=self.log, stderr=self.log)
        until(self.answers, self.started_within, self.printed)

    def answers(self) -> bool:
        assert self.process.poll() is None, self.printed()
        request = urllib.request.Request(f"{self.url}/api/v1/healthz", headers={"X-API-Key": KEY})
        try:
            with urllib.request.urlopen(request, timeout=5) as reply:
                return json.load(reply) == {"status": "ok"}
        except OSError:
            return False

    def ranks(self) -> dict[int, int]:
        """Process ids of the ranks of the service by rank, launchers left out."""
        ranks = {}
        for folder in Path("/proc").iterdir():
            try:
                command = (folder / "cmdline").read_bytes().decode().split("\0")
                variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            except (OSError, ValueError):
                continue
            if str(self.state) in command and "torch.distributed.run" not in command:
                rank = [int(value.partition("=")[2]) for value in variables if value.startswith("RANK=")]
                ranks[rank[0] if rank else 0] = int(folder.name)
        return ranks

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def printed(self) -> str:
        return (self.state.parent / "server.log").read_text(errors="replace")[-4000:]

    def stop(self) -> int:
        """SIGTERM to the process that was started; returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        finally:
            self.close()

    def close(self) -> None:
        """Leave no process behind, whatever became of the test."""
        self.process.kill()
        self.process.wait()
        for process in self.ranks().values():
            os.kill(process, signal.SIGKILL)
        self.log.close()


def until(holds: Callable[[], Any], seconds: float, text: Callable[[], str]) -> None:
    """Wait until something holds; `text` is what to say if it never does."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s\n{text()}"
        time.sleep(0.1)
