"""Two commits are run in turn, and each figure of the later one is divided by that of the earlier one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.compare_commits import main

CASE = """
import json, sys
from pathlib import Path
figures = [{{"family": None, "name": name, "value": value}} for name, value in {figures}.items()]
Path(sys.argv[3].removeprefix("--json=")).write_text(json.dumps({{"figures": figures}}))
with Path({log!r}).open("a") as log:
    print({commit!r}, sys.argv[1], *sys.argv[4:], file=log)
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of two commits, tagged a and b, whose benchmarks write what they are asked to this file."""
    log, repository = tmp_path / "log", tmp_path / "repository"
    (repository / "benchmarks").mkdir(parents=True)
    (repository / "benchmarks/__init__.py").touch()
    monkeypatch.chdir(repository)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x"]
    subprocess.run([*git, "init", "-q"], check=True)
    for commit, figures in (("a", {"time": 2.0, "gone": 1.0}), ("b", {"time": 3.0})):
        Path("benchmarks/__main__.py").write_text(CASE.format(figures=figures, log=str(log), commit=commit))
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-q", "-m", commit], check=True)
        subprocess.run([*git, "tag", commit], check=True)
    return log


def test_commits_run_in_turn_and_ratios_are_later_over_earlier(log, capfd):
    main(["a", "b", "pack", "--rounds", "2", "--threads=1"])
    assert log.read_text().split("\n")[:-1] == [f"{commit} pack --threads=1" for commit in "abba"]
    printed = capfd.readouterr().out
    assert "pack: time: 1.500 (1.500 to 1.500)" in printed
    assert "pack: gone: not compared" in printed
    worktrees = subprocess.run(["git", "worktree", "list"], capture_output=True, text=True, check=True).stdout
    assert len(worktrees.splitlines()) == 1  # the checkouts are removed
    Path("benchmarks/__main__.py").write_text("raise ValueError('broken')")
    with pytest.raises(SystemExit, match="broken"):
        main(["a", ".", "pack"])
