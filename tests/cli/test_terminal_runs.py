"""The command at a real terminal: progress of 80 columns, and the end by Ctrl-C."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiers import tiers
from typer.testing import CliRunner

from vlmpack.cli import app
from vlmpack.cli.app import INTERRUPTED, VERBS
from vlmpack.cli.progress import pace, waiting

SECONDS = 120.0
WIDTH = 80
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
TINY = ("--processor", "tiny")
LONG: dict[str, tuple[tuple[str, ...], str, str]] = {
    "analyze": (("analyze", "synthetic", "--num", "5000", *TINY), "measuring samples", "--cache FILE"),
    "analyze, workers": (
        ("analyze", "synthetic", "--num", "5000", *TINY, "--workers", "2"), "measuring samples", "--cache FILE",
    ),
    "show": (("show", "synthetic", "--num", "5000", *TINY), "measuring samples", "--cache FILE"),
    "pack": (
        ("pack", "synthetic", "out", "--num", "5000", *TINY, "--capacity", "3000"),
        "measuring samples", "run the same command again",
    ),
    "demo": (("demo", "--steps", "50", "--out", "out"), "training, padded", "nothing was written"),
    "doctor": (("doctor",), "importing what is installed", "nothing was changed"),
    "doctor --probe": (("doctor", "--probe"), "each sample alone", "vlmpack doctor --probe tiny:qwen3_vl"),
    "serve": (("serve", "--demo", "--port", "0", "--state", "out"), "reading the model", "in the journal"),
}  # fmt: skip
"""Arguments, what is drawn while it works, and how to go on."""


def at_terminal(
    arguments: tuple[str, ...], folder: Path, act: Callable[[int, str], bool] | None
) -> tuple[int, str, str]:
    """Run the command in a session of its own; status, standard output, and what was drawn.

    `act` gets the process and what is drawn so far, until it returns True.
    """
    drawn, terminal = "", pty.openpty()
    fcntl.ioctl(terminal[1], termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDTH, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "VLMPACK_API_KEY": "tml-x", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-m", "vlmpack.cli", *arguments], stdout=subprocess.PIPE,
        stderr=terminal[1], stdin=subprocess.DEVNULL, text=True, cwd=folder, env=environment, start_new_session=True,
    ) as process:  # fmt: skip
        os.close(terminal[1])
        acted, end = act is None, time.monotonic() + SECONDS
        while time.monotonic() < end:
            if not select.select([terminal[0]], [], [], 1.0)[0]:
                continue
            try:
                part = os.read(terminal[0], 65536).decode(errors="replace")
            except OSError:  # the last process has closed it
                break
            drawn += part
            acted = acted or (act is not None and act(process.pid, CONTROL.sub("", drawn)))
        else:
            os.killpg(process.pid, signal.SIGKILL)
        assert process.stdout is not None
        printed = process.stdout.read()
    os.close(terminal[0])
    assert acted, drawn
    return process.returncode, printed, CONTROL.sub("", drawn)


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize("case", tiers(LONG, [], exhaustive=["analyze", "show", "pack", "doctor"]))
def test_ctrl_c_ends_a_verb_without_a_traceback_and_says_how_to_go_on(case: str, tmp_path: Path) -> None:
    arguments, title, remedy = LONG[case]

    def interrupt(process: int, drawn: str) -> bool:
        if title in drawn:
            os.killpg(process, signal.SIGINT)
        return title in drawn

    status, printed, drawn = at_terminal(arguments, tmp_path, interrupt)
    assert "Traceback" not in drawn + printed
    assert status == INTERRUPTED
    last = drawn.replace("\r", "").rstrip("\n").splitlines()[-1]
    assert last.startswith("vlmpack: interrupted; ") and remedy in last


@pytest.mark.full
def test_pack_draws_its_pace_and_goes_on_after_ctrl_c(tmp_path: Path) -> None:
    arguments = ("pack", "synthetic", "out", "--num", "96", *TINY, "--capacity", "1500", "--shard-rows", "1")

    def interrupt(process: int, drawn: str) -> bool:
        if is_writing := re.search(r"writing files[^\r\n]* left", drawn) is not None:
            os.killpg(process, signal.SIGINT)
        return is_writing

    status, _, drawn = at_terminal(arguments, tmp_path, interrupt)
    assert status == INTERRUPTED
    lines = [line for line in re.split(r"[\r\n]+", drawn.partition("vlmpack: interrupted")[0]) if line.strip()]
    assert max(map(len, lines)) <= WIDTH
    paces = [line for line in lines if re.search(r"(/s| s each)  \d+:\d\d:\d\d left$", line.rstrip())]
    assert {line.split()[0] for line in paces} >= {"measuring", "writing"}

    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("rows-*.parquet")}
    status, printed, drawn = at_terminal((*arguments, "--quiet"), tmp_path, None)
    assert (status, drawn) == (0, "") and "96  of 96" in printed
    files = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("rows-*.parquet")}
    assert written and all(files[path.name] == time for path, time in written.items())


@pytest.mark.parametrize(
    ("speed", "left", "passed", "formatted"),
    [
        (170.2, 2.9, 9.0, "170/s  0:00:02 left"),
        (1.25, 3661.0, 9.0, "1.2/s  1:01:01 left"),
        (0.2, 61.0, 9.0, "5.0 s each  0:01:01 left"),
        (None, None, 3.5, "0:00:03"),
        (12.0, None, 3.5, "0:00:03"),
        (0.0, None, None, "0:00:00"),
    ],
)
def test_a_pace_is_short(speed: float | None, left: float | None, passed: float | None, formatted: str) -> None:
    assert pace(speed, left, passed) == formatted


def test_results_that_are_printed_under_progress_stay_in_their_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is drawn at a terminal, results go to a file."""
    pipe, terminal = io.StringIO(), io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", pipe)
    monkeypatch.setattr(sys, "stderr", terminal)
    with waiting("working", quiet=False) as progress:
        progress("still working", 1)
        sys.stdout.write("a result\n")
    assert pipe.getvalue() == "a result\n"
    assert "working" in terminal.getvalue() and "a result" not in terminal.getvalue()


@pytest.mark.parametrize("verb", [verb.__name__ for verb in VERBS])
def test_every_verb_ends_by_ctrl_c_in_one_line(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*values: object, **named: object) -> None:
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("vlmpack.cli.options.check_word", interrupted)
    monkeypatch.setattr("vlmpack.errors.find_spec", interrupted)
    monkeypatch.setattr("vlmpack.store.manifest.is_store", interrupted)
    arguments = {
        "analyze": ["synthetic", "--processor", "tiny", "--out", "x"],
        "show": ["synthetic"],
        "pack": ["synthetic", "x", "--processor", "tiny", "--capacity", "9"],
        "doctor": ["--attention", "x", "--probe"],
        "schema": ["pack"],
        "completion": ["bash"],
    }
    try:
        done = CliRunner().invoke(app, [verb, *arguments.get(verb, [])])
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.exit_code == INTERRUPTED, done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("vlmpack: interrupted; ") and len(line) > 30
