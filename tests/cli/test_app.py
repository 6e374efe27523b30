"""The command as a whole: light to import, helpful, clear when it refuses, and at a real terminal."""

from __future__ import annotations

import errno
import fcntl
import io
import json
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
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from vlmpack import __version__
from vlmpack.cli import app, main
from vlmpack.cli.app import INTERRUPTED, VERBS
from vlmpack.cli.pack import pack
from vlmpack.terminal import progress_lines

HEAVY = ("torch", "transformers", "numpy", "matplotlib", "PIL")
PAGE = Path(__file__).parents[2] / "docs" / "command.md"
TINY = ("--processor", "tiny")
GROUP = get_command(app)
assert isinstance(GROUP, TyperGroup)


def test_help_names_every_verb_in_paragraphs_without_the_line_ends_of_the_source() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert [verb for verb in ("analyze", "pack", "train", "demo", "doctor", "serve") if verb not in result.stdout] == []
    texts = [verb.help or "" for verb in GROUP.commands.values()]
    assert len(texts) == 6 and all(text and "\n" not in text.replace("\n\n", "") for text in texts)
    assert CliRunner().invoke(app, ["--version"]).stdout == f"vlmpack {__version__}\n"


def test_the_words_of_options_are_those_of_the_library() -> None:
    from vlmpack.collate import collator
    from vlmpack.data import open
    from vlmpack.plan import lengths, planner

    annotations = {name: get_args(option.annotation)[0] for name, option in signature(pack).parameters.items()}
    words = {name: get_args(each) for name, each in annotations.items() if get_origin(each) is Literal}
    assert words == {
        "overlength": get_args(collator.Overlength),
        "train_on": get_args(collator.TrainOn),
        "on_bad": get_args(collator.OnBad),
        "branches": get_args(open.Branches),
        "strategy": tuple(planner.STRATEGIES),
        "oversize": lengths.OVERSIZE,
    }


def loaded_by(code: str) -> set[str]:
    """Which heavy packages a fresh interpreter has loaded after running `code`."""
    ask = f"{code}; import sys; print(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_command_loads_nothing_heavy_and_this_test_would_notice() -> None:
    assert loaded_by("import vlmpack.cli") == set()
    assert "numpy" in loaded_by("import vlmpack.cli, numpy")


# ---------------------------------------------------------------------- refusals


def test_a_refusal_prints_no_json_and_the_module_can_be_run() -> None:
    command = [sys.executable, "-m", "vlmpack.cli", "analyze", "synthetic", "--processor", "nowhere", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("vlmpack: --processor nowhere") and "Traceback" not in done.stderr


def test_what_the_system_refuses_is_one_line_and_a_bug_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(source: Path) -> bool:
        raise OSError(code, os.strerror(code), "a/folder")

    monkeypatch.setattr("vlmpack.rows.is_packed", refused)
    for code in (errno.EACCES, errno.EROFS, errno.ENOSPC):
        result = CliRunner().invoke(app, ["analyze", "rows"])
        assert result.exit_code == 2
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"vlmpack: a/folder: {os.strerror(code)}; check the permissions")
    code = errno.EBADF
    assert isinstance(CliRunner().invoke(app, ["analyze", "rows"]).exception, OSError)


@pytest.mark.parametrize("verb", [verb.__name__ for verb in VERBS])
def test_every_verb_ends_by_ctrl_c_in_one_line(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*values: object, **named: object) -> None:
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("vlmpack.errors.find_spec", interrupted)
    monkeypatch.setattr("vlmpack.cli.options.refuse_file", interrupted)
    monkeypatch.setattr("vlmpack.rows.is_packed", interrupted)
    arguments = {
        "analyze": ["synthetic", *TINY],
        "pack": ["synthetic", "x", *TINY, "--capacity", "9"],
        "doctor": ["x", "--probe"],
    }
    try:
        done = CliRunner().invoke(app, [verb, *arguments.get(verb, [])])
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.exit_code == INTERRUPTED, done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("vlmpack: interrupted; ") and len(line) > 30


# ---------------------------------------------------------------------- other encodings


def test_a_way_to_write_other_letters_that_was_asked_for_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["vlmpack", "--version"])
    for errors in ("strict", "surrogateescape", "replace"):
        stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors=errors)
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit):
            main()
        assert stream.errors == ("replace" if errors == "replace" else "backslashreplace")


# ---------------------------------------------------------------------- JSON


def documented() -> dict[str, list[str]]:
    """The keys of each object, as the page lists them."""
    block = re.search(r"^## JSON.*?^```\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    objects: dict[str, list[str]] = {}
    for line in block[1].splitlines():
        path = line.split()[0] if not line.startswith(" ") else next(reversed(objects))
        objects.setdefault(path, []).extend(line.split()[not line.startswith(" ") :])
    return objects


def objects_in(value: Any, path: str) -> Iterator[tuple[str, list[str]]]:
    """Each object inside some JSON: its path, and its keys."""
    if isinstance(value, dict):
        is_mapping = f"{path}.*" in documented()
        if not is_mapping:
            yield path, list(value)
        for key, part in value.items():
            yield from objects_in(part, f"{path}.*" if is_mapping else f"{path}.{key}")
    elif isinstance(value, list):
        for part in value:
            yield from objects_in(part, f"{path}[]")


def check_keys(verb: str, printed: Any) -> None:
    """Compare what a verb printed with the page: every object of the verb that the page has, key by key."""
    found = dict(objects_in(printed, verb))
    expected = {path: keys for path, keys in documented().items() if re.split(r"[.\[]", path)[0] == verb}
    assert expected and {path: found.get(path) for path in expected} == expected


def json_of(*arguments: object) -> Any:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_the_page_lists_the_keys_that_analyze_and_pack_print(tmp_path: Path) -> None:
    """Of samples that share a prefix, one that is too long for a row, a line that cannot be read, and a mix."""
    answer, asked = {"role": "assistant", "content": "4"}, "The rules of the shop are long, and each asks of them. " * 4
    texts = [f"{asked} Why?", f"{asked} When?", "again " * 900]
    rows = [json.dumps({"messages": [{"role": "user", "content": text}, answer]}) for text in texts]
    (tmp_path / "chats.jsonl").write_text("\n".join([*rows, "no JSON"]))
    data = (tmp_path / "chats.jsonl", *TINY, "--mix", "synthetic=1", "--num", 8, "--min-shared", 16, "--capacity", 500)
    printed = json_of("analyze", *data, "--rows", 1)
    check_keys("analyze", printed)
    left_out = ("--on-bad", "skip", "--max-bad-fraction", 1, "--oversize", "drop")
    packed = json_of("pack", data[0], tmp_path / "rows", *data[1:], *left_out)
    check_keys("pack", packed)
    assert set(packed["reasons"]) == {"row_unreadable", "oversize"} and Path(packed["left_out"]).is_file()
    with pytest.raises(AssertionError):
        check_keys("analyze", {**printed, "more": 1})
    with pytest.raises(AssertionError):
        check_keys("analyze", {name: part for name, part in printed.items() if name != "rows"})


def test_the_page_lists_the_keys_that_train_prints(tmp_path: Path) -> None:
    settings = ("model=tiny", "data=synthetic", "num=3", f"output_dir={tmp_path}", "max_new_tokens=0", "-q")
    check_keys("train", json_of("train", *settings))


# ---------------------------------------------------------------------- a terminal

SECONDS = 120.0
WIDTH = 80
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


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


@pytest.mark.slow
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


def test_results_that_are_printed_under_progress_stay_in_their_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is drawn at a terminal, results go to a file."""
    pipe, terminal = io.StringIO(), io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", pipe)
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_lines("working", quiet=False) as progress:
        progress("working", 1, detail="still working")
        sys.stdout.write("a result\n")
    assert pipe.getvalue() == "a result\n"
    assert "still working" in terminal.getvalue() and "a result" not in terminal.getvalue()
