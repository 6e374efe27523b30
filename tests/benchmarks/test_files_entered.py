"""The files that one forward enters are listed once each, in order of first entry."""

from __future__ import annotations

import sys

import pytest

from benchmarks.files_entered import PACKAGE, files_entered, files_of_forward, main
from vlmpack.layout import Segments


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3"])
def test_a_forward_packs_attends_and_computes_a_loss(family: str) -> None:
    files = files_of_forward(family)
    assert len(set(files)) == len(files)
    assert all((PACKAGE / file).is_file() for file in files)
    assert {"layout/pack.py", "attention/sdpa_segments.py"} <= set(files)
    assert files.index("layout/pack.py") < files.index("attention/sdpa_segments.py")


def test_only_what_a_call_enters_is_listed() -> None:
    assert files_entered(lambda: None) == []
    assert "layout/segments.py" in files_entered(lambda: Segments.from_lengths([3, 5]))


def test_profiling_ends_with_the_call() -> None:
    def breaks() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        files_entered(breaks)
    assert sys.getprofile() is None


def test_the_command_prints_a_line_a_file_and_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--family", "qwen3"]) == 0
    *files, last = capsys.readouterr().out.splitlines()
    assert last == f"{len(files)} files"
    assert "layout/pack.py" in files
