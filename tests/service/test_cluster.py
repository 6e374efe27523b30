"""The application of Ray Serve: its arguments; on a local Ray the service of one process, also after ranks died."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.service.ranks.test_workers import alone, check_equal, server  # noqa: F401 (fixtures)
from tests.service.server_process import Server, until
from vlmpack.errors import ConfigError
from vlmpack.service.cluster import ClusterSettings

ON_RAY = [
    pytest.mark.slow,
    pytest.mark.dist,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="the client needs Python 3.11"),
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are found in /proc"),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("ray", "grpc", "aiohttp_cors")),
        reason="ray.serve cannot be imported: it needs pip install 'ray[serve]'",
    ),
]
pytest.importorskip("pydantic", reason="comes with Ray Serve, and reads its arguments")
PROGRAM = Path(__file__).with_name("serve_on_ray.py")
BACK_WITHIN = 300.0
"""Ray starts a dozen processes."""


def test_arguments_are_read_from_texts() -> None:
    settings = ClusterSettings.parse({"model": "m", "state": "s", "workers": "4", "gpus": 1, "lora_only": "true"})
    assert (settings.workers, settings.gpus, settings.lora_only, settings.device) == (4, 1, True, "cuda")
    service = settings.with_key("tml-k")
    assert (service.key, service.lora_only, service.shard_on) == ("tml-k", True, None)
    sharded = ClusterSettings.parse(
        {"model": "m", "state": "s", "gpus": "1", "shard": "yes", "row_tokens": "512"}
    ).with_key("")
    assert (sharded.shard_on, sharded.limits.row_tokens) == ("cuda", 512)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "m"}, "state: absent or null; it is needed"),
        (
            {"model": "m", "state": "s", "worker": 2},
            "worker is not one. They are .*, cpus, .*, row_tokens, ",
        ),
        ({"model": "m", "state": "s", "workers": "two"}, "workers: .two.; Input should be a valid integer"),
        ({"model": "m", "state": "s", "shard": "perhaps"}, "shard: .perhaps.; Input should be a valid boolean"),
        ({"model": "m", "state": "s", "workers": 0}, "workers is 1 or more"),
        ({"model": "m", "state": "s", "gpus": 2}, "gpus is 0 or 1"),
        ({"model": "m", "state": "s", "sampler": "vllm"}, "sampler is exact or fast"),
    ],
)
def test_arguments_that_cannot_be_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterSettings.parse(arguments)


# ---------------------------------------------------------------------- on a local Ray


class OnRay(Server):
    """The same on Ray Serve, a replica and an actor."""

    started_within = BACK_WITHIN

    def command_of(self, *options: str, launcher: Sequence[str]) -> list[str]:
        _, workers = options  # the program has the demo's model anyway
        return [*launcher, str(PROGRAM), str(self.port), str(self.state), workers]

    def rank(self, title: str) -> int:
        """Process id of the rank that Ray has given a title that begins so; its grandparent was started here."""
        found = [
            int(folder.name)
            for folder in Path("/proc").iterdir()
            if folder.name.isdecimal()
            and _read(folder / "cmdline").startswith(title)
            and _parent(_parent(int(folder.name))) == self.process.pid
        ]
        return found[0] if found else 0

    def close(self) -> None:
        """SIGTERM, so that Ray stops what it started."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(120)
        super().close()


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:  # it has ended
        return ""


def _parent(pid: int) -> int:
    """Id of the process that started another; 0: that has ended."""
    lines = [line for line in _read(Path("/proc", str(pid), "status")).splitlines() if line.startswith("PPid:")]
    return int(lines[0].split()[1]) if lines else 0


@contextmanager
def serving(folder: Path, workers: int) -> Iterator[OnRay]:
    folder.mkdir(exist_ok=True)
    on_ray = OnRay(folder / "state", str(workers))
    try:
        yield on_ray
    finally:
        on_ray.close()


class TestOnRay:
    pytestmark = ON_RAY

    def test_a_replica_and_an_actor_are_one_service_again_after_either_is_killed(
        self,
        tmp_path: Path,
        alone: Any,  # noqa: F811
    ) -> None:
        with serving(tmp_path, workers=2) as server:  # noqa: F811
            check_equal(server, *alone)
            for title in ("ray::EngineActor", "ray::ServeReplica"):
                before = {name: server.rank(name) for name in ("ray::EngineActor", "ray::ServeReplica")}
                assert all(before.values())
                os.kill(before[title], signal.SIGKILL)
                others = list(before.values())
                until(lambda others=others: not any(map(_parent, others)), BACK_WITHIN, server.printed)
                until(server.answers, BACK_WITHIN, server.printed)
            assert len(list(server.state.glob("weights/*/vlmpack_checkpoint.json"))) == 1  # of the first run
            state = server.state
        with_another = Server(state, "--row-tokens", "40")
        try:
            assert with_another.answers()
        finally:
            with_another.close()
