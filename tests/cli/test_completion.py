"""`vlmpack completion`: every verb, option and word, in three shells."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
from contextlib import suppress
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


def of_bash(typed: str, file: Path) -> set[str]:
    """What bash offers where a line ends."""
    words = typed.split(" ")
    setting = f"COMP_WORDS=({' '.join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}"
    code = f'source {file}; {setting}; _vlmpack; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return set(done.stdout.split())


def of_fish(typed: str, file: Path) -> set[str]:
    """The same of fish."""
    code = f"source {file}; complete -C '{typed}'"
    done = subprocess.run(["fish", "-c", code], capture_output=True, text=True, check=True, cwd=file.parent)
    assert done.stderr == ""
    return {line.partition("\t")[0] for line in done.stdout.splitlines()}


ZSH = """
autoload -Uz compinit && compinit -D -u
source {file}
compadd() {{
    local -a matches
    [[ ${{@[1,(i)(-|--)]}} == *-[OAD]\\ * ]] || {{ builtin compadd -A matches "$@"; print -rl -- $matches >> {out} }}
    builtin compadd "$@"
}}
complete-and-end() {{ _main_complete; exit }}
zle -C complete-and-end complete-word complete-and-end
bindkey '^I' complete-and-end
cd {folder}
print ready
"""
"""Writes every match of the first tab to a file, and ends."""


def of_zsh(typed: str, file: Path) -> set[str]:
    """The same of zsh, which completes at a terminal alone."""
    out = file.with_name("matches")
    out.touch()
    (file.with_name(".zshrc")).write_text(ZSH.format(file=file, out=out, folder=file.parent))
    shell, terminal = pty.fork()
    if not shell:
        os.environ |= {"ZDOTDIR": str(file.parent), "TERM": "dumb"}
        os.execlp("zsh", "zsh", "-d", "-i")
    shown = b""
    while b"ready" not in shown:
        shown += os.read(terminal, 1024)
    os.write(terminal, f"{typed}\t".encode())
    with suppress(OSError):  # when the shell has ended
        while os.read(terminal, 1024):
            pass
    os.waitpid(shell, 0)
    os.close(terminal)
    return set(out.read_text().split())


COMPLETED = {"bash": of_bash, "zsh": of_zsh, "fish": of_fish}
LINES = {
    "vlmpack s": {"show", "serve", "schema"},
    "vlmpack --v": {"--version"},
    "vlmpack pack rows.jsonl out --overl": {"--overlength"},
    "vlmpack pack rows.jsonl --oversize ": {"error", "drop", "own_row"},
    "vlmpack analyze rows.jsonl --strategy ": set(STRATEGIES),
    "vlmpack completion ": set(SHELLS),
    "vlmpack serve --no": {"--no-share-prefixes"},
    "vlmpack pack show --row": {"--rows-multiple"},  # a file with the name of a verb
    "vlmpack pack rows.jsonl --capacity ": set(),  # a number
}


@pytest.mark.parametrize("typed", LINES)
@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_offers_what_fits_there(shell: str, typed: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"waits for a machine with {shell}")
    (tmp_path / "script").write_text(script(shell))
    assert COMPLETED[shell](typed, tmp_path / "script") == LINES[typed]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_offers_files_for_data_and_folders(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"waits for a machine with {shell}")
    (tmp_path / "script").write_text(script(shell))
    (tmp_path / "rows.jsonl").touch()
    offered = {"rows.jsonl"} if shell != "bash" else set()  # bash completes files itself
    assert COMPLETED[shell]("vlmpack pack ro", tmp_path / "script") == offered
    assert COMPLETED[shell]("vlmpack analyze x --cache ro", tmp_path / "script") == offered


def test_another_shell_is_refused() -> None:
    done = CliRunner().invoke(app, ["completion", "tcsh"])
    assert (done.exit_code, done.stderr) == (2, "vlmpack: SHELL tcsh: choose bash, zsh or fish\n")
