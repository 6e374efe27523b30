"""`vlmpack serve`: what it refuses, what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cli.test_app import check_keys
from typer.testing import CliRunner

from vlmpack.cli import app
from vlmpack.cli.serve import announce
from vlmpack.service.queue.checkpoints import StateFolder
from vlmpack.service.queue.journal import Journal, SessionRow
from vlmpack.testing import tiny_model

SECONDS = 120.0


def refused(*arguments: str, **environment: str) -> str:
    result = CliRunner().invoke(app, ["serve", *arguments], env={"VLMPACK_API_KEY": "", **environment})
    assert result.exit_code == 2
    return result.stderr


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Options for two ranks; a test fails if the second one is started."""
    monkeypatch.setattr("vlmpack.service.ranks.Launched", lambda *_: pytest.fail("a process was started"))
    return "--workers", "2"


def test_what_cannot_be_served_is_refused(tmp_path: Path, workers: tuple[str, str]) -> None:
    (tmp_path / "model").mkdir()
    state, key = ("--state", str(tmp_path / "state")), {"VLMPACK_API_KEY": "tml-x"}
    for arguments in ([], ["some/model", "--demo"]):
        assert "needs a MODEL, or --demo without one" in refused(*arguments)
    said = refused("--demo", *state, *workers, VLMPACK_API_KEY="secret")
    assert 'VLMPACK_API_KEY: the client takes keys that begin with "tml-"' in said
    (tmp_path / "key").write_text("secret")
    said = refused("--demo", *state, "--key-file", str(tmp_path / "key"))
    assert 'the client takes keys that begin with "tml-"' in said
    assert not (tmp_path / "state").exists()
    other = ("--state", str(tmp_path / "other"))
    assert "no model can be read there" in refused(str(tmp_path / "model"), *other, "--port", "0", **key)
    tiny_model("qwen3").save_pretrained(tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "model.safetensors", 1000)  # a copy that was interrupted
    assert "cut: no model can be read there" in refused(str(tmp_path / "cut"), *other, "--port", "0", **key)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        said = refused("--demo", *state, *workers, "--port", port, **key)
        assert f"127.0.0.1:{port} cannot be served" in said and not (tmp_path / "state").exists()


def test_a_state_folder_that_cannot_be_served_is_refused_before_anything_is_written_or_read(
    tmp_path: Path, workers: tuple[str, str]
) -> None:
    (tmp_path / "holiday.jpg").touch()
    said = refused("--demo", "--state", str(tmp_path), "--port", "0", *workers)
    assert "is no state folder, because it holds 'holiday.jpg'" in said
    said = refused("--demo", "--state", str(tmp_path / "holiday.jpg"), "--port", "0", *workers)
    assert "the state folder" in said and "holiday.jpg is a file" in said and "--key-file" not in said
    assert [entry.name for entry in tmp_path.iterdir()] == ["holiday.jpg"]
    state = tmp_path / "state"
    locked = StateFolder(state, base_model="no/model")
    assert "used by another server" in refused("no/model", "--state", str(state), "--port", "0")
    locked.close()
    (state / "journal.sqlite3").unlink()
    journal = Journal(state / "journal.sqlite3", base_model="other/model")
    journal.put(SessionRow(id="s", created=0.0))
    journal.close()
    assert "belongs to the base model 'other/model'" in refused("no/model", "--state", str(state), "--port", "0")


@contextmanager
def serving(state: Path, *arguments: str, **environment: str) -> Iterator[tuple[Any, str]]:
    """A process that serves the demo, and what it printed; killed at the end if it still runs."""
    command = [sys.executable, "-m", "vlmpack.cli", "serve", "--demo", "--port", "0", "--state", str(state), *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}, umask=0
    )
    assert process.stdout is not None
    lines: list[str] = []
    try:
        while not lines or not (lines[-1].startswith("training = ") or lines[-1] == "}\n"):
            line = process.stdout.readline()
            assert line, process.communicate()
            lines.append(line)
        yield process, "".join(lines)
    finally:
        process.kill()
        process.communicate()


def ended_by(signum: signal.Signals, process: Any) -> str:
    """The log of a service that answers, and ends by a signal with exit status 0."""
    process.send_signal(signum)
    _, log = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    return log


@pytest.mark.slow
def test_from_start_to_the_end_by_a_signal_the_key_is_printed_nowhere(tmp_path: Path) -> None:
    with serving(tmp_path, VLMPACK_API_KEY="") as (process, said):
        address, key_file = (re.search(rf"^{name} +(\S+)$", said, re.MULTILINE) for name in ("address", "key file"))
        assert address is not None and key_file is not None
        assert re.search(r"^model +vlmpack/tiny-qwen3-vl$", said, re.MULTILINE)
        assert f'tinker.ServiceClient(base_url="{address[1]}"' in said
        assert [entry for entry in (tmp_path, *tmp_path.rglob("*")) if entry.stat().st_mode & 0o077] == []
        with urllib.request.urlopen(f"{address[1]}/healthz") as reply:
            assert reply.read() == b'{"status": "ok"}'
        log, key = ended_by(signal.SIGTERM, process), Path(key_file[1]).read_text().strip()
    assert re.search(r"^\d\d:\d\d:\d\d GET /healthz 200 ", log, re.MULTILINE)
    assert "stopped" in log and key not in log + said
    with serving(tmp_path, "--json", "--quiet", VLMPACK_API_KEY="tml-from-outside") as (process, printed):
        facts = json.loads(printed)
        check_keys("serve", facts)
        assert facts["key_file"] is None and "tml-from-outside" not in printed
        assert ended_by(signal.SIGINT, process) == ""


def test_an_announcement_says_where_the_key_is(capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"address": "http://a", "model": "m", "limits": {"row_tokens": 9000}}
    announce({**facts, "key_file": "/k"})
    in_file = capsys.readouterr().out
    assert "key file    /k\n" in in_file and 'api_key=open("/k").read().strip()' in in_file
    assert "row tokens  9,000\n" in in_file
    announce({**facts, "key_file": None})
    outside = capsys.readouterr().out
    assert "key file    none: VLMPACK_API_KEY is set\n" in outside and 'os.environ["VLMPACK_API_KEY"]' in outside
