"""The command as a whole: light to import, helpful, clear when it refuses, and at a real terminal."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
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
    from vlmpack.plan.plan import STRATEGIES

    annotations = {name: get_args(option.annotation)[0] for name, option in signature(pack).parameters.items()}
    words = {name: get_args(each) for name, each in annotations.items() if get_origin(each) is Literal}
    assert words == {
        "overlength": get_args(collator.Overlength),
        "train_on": get_args(collator.TrainOn),
        "on_bad": get_args(collator.OnBad),
        "branches": get_args(open.Branches),
        "strategy": tuple(STRATEGIES),
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
    assert done.stderr.startswith("vlmpack: processor nowhere") and "Traceback" not in done.stderr


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
    monkeypatch.setattr("vlmpack.cli.options.torch_device", interrupted)
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
    printed = json_of("analyze", *data, "--rows", 1, "--memory", 1)
    check_keys("analyze", printed)
    left_out = ("--on-bad", "skip", "--max-bad-fraction", 1, "--overlength", "drop")
    packed = json_of("pack", data[0], tmp_path / "rows", *data[1:], *left_out)
    check_keys("pack", packed)
    assert set(packed["reasons"]) == {"row_unreadable", "overlength"} and Path(packed["left_out"]).is_file()
    with pytest.raises(AssertionError):
        check_keys("analyze", {**printed, "more": 1})
    with pytest.raises(AssertionError):
        check_keys("analyze", {name: part for name, part in printed.items() if name != "rows"})


def test_the_page_lists_the_keys_that_train_prints(tmp_path: Path) -> None:
    settings = ("model=tiny", "data=synthetic", "num=3", f"output_dir={tmp_path}", "max_new_tokens=0", "-q")
    check_keys("train", json_of("train", *settings))


# ---------------------------------------------------------------------- Ctrl-C, and a terminal


@pytest.mark.slow
def test_pack_goes_on_after_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vlmpack.cli", "pack", "synthetic", "out", "--num", "96", *TINY]
    command += ["--capacity", "1500", "--shard-rows", "1"]
    settings: dict[str, Any] = {"cwd": tmp_path, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    settings["env"] = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, start_new_session=True, **settings) as process:
        while not [*tmp_path.rglob("rows-*.parquet")] and process.poll() is None:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == INTERRUPTED and "vlmpack: interrupted; " in said

    written = {path.name: path.stat().st_mtime_ns for path in tmp_path.rglob("rows-*.parquet")}
    done = subprocess.run([*command, "--quiet"], check=False, **settings)
    assert (done.returncode, done.stderr) == (0, "") and re.search(r"^samples +96$", done.stdout, re.MULTILINE)
    files = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("rows-*.parquet")}
    assert 0 < len(written) < len(files) and written.items() <= files.items()


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
