"""The command as a whole: light to import, helpful, and clear when it refuses."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from vlmpack import __version__
from vlmpack.cli import app

HEAVY = ("torch", "transformers", "numpy", "matplotlib", "PIL")


def test_help_names_every_verb() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for verb in ("analyze", "show", "demo", "doctor", "probe", "bench"):
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

    monkeypatch.setattr(importlib.util, "find_spec", without_accelerate)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert "`vlmpack demo` needs accelerate, not installed here: pip install 'vlmpack[demo]'" in result.stderr
    assert "Traceback" not in result.output


def test_the_module_can_be_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vlmpack.cli", "demo", "--dtype", "int8"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.strip() == "vlmpack: --dtype int8: choose float32 or bfloat16"


def test_bench_is_handed_everything_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []

    def main(arguments: list[str]) -> int:
        given.append(arguments)
        return 7

    monkeypatch.setattr("vlmpack.bench.main", main)
    result = CliRunner().invoke(app, ["bench", "pack", "--json", "x.json", "--help"])
    assert result.exit_code == 7
    assert given == [["pack", "--json", "x.json", "--help"]]


def test_bench_shows_its_own_help() -> None:
    result = CliRunner().invoke(app, ["bench", "--help"])
    assert result.exit_code == 0
    assert "usage: vlmpack bench" in result.stdout
