"""`vlmpack completion`: every verb, option and word, in three shells."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from vlmpack.cli import app
from vlmpack.cli.completion import SHELLS, read_verbs
from vlmpack.cli.options import STRATEGIES


def script(shell: str) -> str:
    done = CliRunner().invoke(app, ["completion", shell])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_names_every_verb_option_and_word(shell: str) -> None:
    written = script(shell)
    verbs = read_verbs(get_command(app))
    assert len(verbs) == 8 and len([option for verb in verbs for option in verb.options]) > 100
    for verb in verbs:
        assert verb.name in written
        for value in (*verb.options, *verb.arguments):
            assert all(word in written for word in value.words)
            for name in value.names if value in verb.options else ():
                assert (f"-l {name[2:]} " if shell == "fish" and name.startswith("--") else name[2:]) in written


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_can_read_it(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"waits for a machine with {shell}")
    (tmp_path / "script").write_text(script(shell))
    done = subprocess.run([shell, "-n", tmp_path / "script"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def completed(typed: str, tmp_path: Path) -> set[str]:
    """What bash offers where a line ends."""
    (tmp_path / "script").write_text(script("bash"))
    words = typed.split(" ")
    setting = f"COMP_WORDS=({' '.join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}"
    code = f'source {tmp_path / "script"}; {setting}; _vlmpack; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="waits for a machine with bash")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("vlmpack s", {"show", "serve", "schema"}),
        ("vlmpack --v", {"--version"}),
        ("vlmpack pack rows.jsonl out --overl", {"--overlength"}),
        ("vlmpack pack rows.jsonl --oversize ", {"error", "drop", "own_row"}),
        ("vlmpack analyze rows.jsonl --strategy ", set(STRATEGIES)),
        ("vlmpack completion ", set(SHELLS)),
        ("vlmpack serve --no", {"--no-share-prefixes"}),
        ("vlmpack pack rows.jsonl --capacity ", set()),  # a number
        ("vlmpack pack ", set()),  # bash completes files itself
    ],
)
def test_bash_offers_what_fits_there(typed: str, offered: set[str], tmp_path: Path) -> None:
    assert completed(typed, tmp_path) == offered


def test_another_shell_is_refused() -> None:
    done = CliRunner().invoke(app, ["completion", "tcsh"])
    assert (done.exit_code, done.stderr) == (2, "vlmpack: SHELL tcsh: choose bash, zsh or fish\n")
