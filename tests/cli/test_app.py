"""The command as a whole: light to import, helpful, and clear when it refuses."""

from __future__ import annotations

import errno
import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from vlmpack import __version__
from vlmpack.cli import app, main

HEAVY = ("torch", "transformers", "numpy", "matplotlib", "PIL")


def test_help_names_every_verb() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for verb in ("analyze", "show", "pack", "demo", "serve", "doctor", "schema", "completion"):
        assert verb in result.stdout


def test_the_version_is_the_packages() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"vlmpack {__version__}\n"


def loaded_by(code: str) -> set[str]:
    """Which heavy packages a fresh interpreter has loaded after running `code`."""
    ask = f"{code}; import sys; print(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_command_loads_nothing_heavy() -> None:
    assert loaded_by("import vlmpack.cli") == set()


def test_the_test_above_would_notice() -> None:
    assert "numpy" in loaded_by("import vlmpack.cli, numpy")


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec

    def without_accelerate(name: str, *args: Any) -> Any:
        return None if name == "accelerate" else find_spec(name, *args)

    monkeypatch.setattr("vlmpack.errors.find_spec", without_accelerate)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 2
    assert "`vlmpack demo` needs accelerate, not installed here: pip install 'vlmpack[demo]'" in result.stderr
    assert "Traceback" not in result.output


def test_the_module_can_be_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vlmpack.cli", "demo", "--dtype", "int8"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.strip() == "vlmpack: --dtype int8: choose float32 or bfloat16"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_what_the_system_refuses_is_one_line_and_a_bug_is_not(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refused(source: Path) -> bool:
        raise OSError(code, os.strerror(code), "a/folder")

    monkeypatch.setattr("vlmpack.store.manifest.is_store", refused)
    result = CliRunner().invoke(app, ["show", "rows"])
    (line,) = result.stderr.splitlines()
    assert result.exit_code == 2
    assert line.startswith(f"vlmpack: a/folder: {os.strerror(code)}; get the right")

    code = errno.EBADF
    assert isinstance(CliRunner().invoke(app, ["show", "rows"]).exception, OSError)


def test_help_is_wrapped_by_the_terminal_alone() -> None:
    """Paragraphs have no line ends of the source in them."""
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    texts = [verb.help or "" for verb in group.commands.values()]
    assert len(texts) == 8
    assert all(text and "\n" not in text.replace("\n\n", "") for text in texts)


def run_on_a_terminal(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, whose terminal has some other encoding."""
    return subprocess.run(
        [sys.executable, "-m", "vlmpack.cli", *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=folder,
        env={**os.environ, "COLUMNS": "200", **environment},
    )


ASCII = {"PYTHONIOENCODING": "ascii"}
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""}


@pytest.mark.full
@pytest.mark.parametrize(
    ("environment", "told", "arguments"),
    [
        pytest.param(
            ASCII, r"(id '\u1f85\u03b4\u03b7\u03c2'): bad_text", ("analyze", "rows.jsonl"), marks=pytest.mark.exhaustive
        ),
        (C_LOCALE, r"a \u03bc\u1fc6\u03bd\u03b9\u03bd: ", ("show", "rows.jsonl")),
        pytest.param(
            ASCII,
            r"(id '\u1f85\u03b4\u03b7\u03c2')",
            ("pack", "rows.jsonl", "out", "--on-bad", "skip", "--max-bad-fraction", "1"),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["analyze", "show", "pack"],
)
def test_letters_that_the_terminal_lacks_are_escaped(
    environment: dict[str, str], told: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """What is packed, shown and refused here has Greek names, and a text with half a character."""
    rows = [
        {"id": "μῆνιν", "prompt": "ἄειδε", "completion": "θεά"},
        {"id": "ᾅδης", "prompt": "a\ud83d", "completion": "b"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run_on_a_terminal(tmp_path, *arguments, "--processor", "tiny", "--capacity", "64", **environment)
    assert done.returncode == 0, done.stderr
    assert told in done.stdout


@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "after"),
    [("strict", "backslashreplace"), ("surrogateescape", "backslashreplace"), ("replace", "replace")],
)
def test_a_way_to_write_other_letters_that_was_asked_for_is_kept(
    before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors=before)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "argv", ["vlmpack", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert stream.errors == after
