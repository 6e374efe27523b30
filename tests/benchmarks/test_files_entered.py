"""The files that one forward enters are listed once each, in order of first entry."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.files_entered import PACKAGE, files_entered, files_of_forward, main
from vlmpack.attention import BACKENDS
from vlmpack.layout import Segments, pack


def file_of(code: type | Callable[..., object]) -> str:
    return str(Path(inspect.getfile(code)).relative_to(PACKAGE))


PACK, ATTENTION = file_of(pack), file_of(type(BACKENDS["sdpa_segments"]))


@pytest.mark.parametrize(("family", "most"), [("qwen3_vl", 20), ("qwen3", 20), ("qwen3_5_moe", 24)])
def test_a_forward_packs_attends_and_computes_a_loss(family: str, most: int) -> None:
    """A reader of the forward opens no more files; gated delta layers and experts add theirs."""
    files = files_of_forward(family)
    assert len(set(files)) == len(files) <= most
    assert all((PACKAGE / file).is_file() for file in files)
    assert files.index(PACK) < files.index(ATTENTION)


def test_only_what_a_call_enters_is_listed() -> None:
    assert files_entered(lambda: None) == []
    assert file_of(Segments) in files_entered(lambda: Segments.from_lengths([3, 5]))


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
    assert PACK in files
