"""Rows that were begun are continued: after kill -9 at any moment with the same bytes, and never with other samples."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from cases import slow
from chats import chat, picture
from stores import Counting, digests, encoded, mixed, packing, store, texts

from vlmpack.collate import SkipLimit
from vlmpack.errors import ConfigError, SampleError
from vlmpack.plan import Plan

CHANGED = "holds other samples than the data set"
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def data() -> list[dict]:
    """Texts and images, in several files of two rows."""
    return [*(chat(f"{n}?", "yes", picture(64, 72, seed=n), id=f"image-{n}") for n in range(4)), *texts(9)]


def finished(folder: Path) -> dict[str, str]:
    """The files that have their final names."""
    return {name: digest for name, digest in digests(folder).items() if not name.startswith(".")}


def events(monkeypatch: pytest.MonkeyPatch, kill_at: int | None = None) -> list[str]:
    """List the rows that are written and the names that files get; the process kills itself before one of them."""
    seen: list[str] = []

    def counted(owner: Any, name: str) -> None:
        original = vars(owner)[name]

        def first(*args: Any, **kwargs: Any) -> Any:
            if len(seen) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            seen.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, first)

    counted(Path, "replace")
    counted(pq.ParquetWriter, "write_table")
    return seen


def in_a_fork(run: Callable[[], Any]) -> int:
    """Start a run; its process id."""
    child = os.fork()
    if not child:
        try:
            run()
        finally:
            os._exit(0)
    return child


def ended(child: int) -> int:
    """Wait for a run; its exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.dist
@pytest.mark.parametrize("kills", [3, *slow(99)])
def test_a_run_that_is_killed_is_continued_and_ends_with_the_same_bytes(tmp_path, monkeypatch, kills):
    """Before rows and names drawn at random; `slow`: before each of them."""
    with monkeypatch.context() as patch:
        moments = events(patch)
        store(tmp_path / "whole", data())
    whole, rows = digests(tmp_path / "whole"), moments.count("write_table")
    assert rows >= 5 and moments.count("replace") >= len(whole) >= 7
    lengths = set()
    for at in random.Random(0).sample(range(len(moments)), min(kills, len(moments))):
        out = tmp_path / f"killed-{at}"
        with monkeypatch.context() as patch:
            child = in_a_fork(lambda at=at, out=out, patch=patch: (events(patch, at), store(out, data())))
        assert ended(child) == -signal.SIGKILL
        left = finished(out)
        assert left.items() <= whole.items()  # no file that is not whole has its name
        lengths.add(len(left))
        is_planned, files = (out / ".work" / "manifest.json").is_file(), len(list(out.glob("rows-*")))
        samples = Counting(data())
        with monkeypatch.context() as patch:
            again = events(patch)
            store(out, samples)
        assert digests(out) == whole
        assert samples.reads.total() == len(samples) * (1 if is_planned else 2)  # what is finished is compared only
        assert again.count("write_table") <= rows - 2 * max(files - 1, 0)
    assert len(lengths) > 1  # the guard: kills left more and more


# ---------------------------------------------------------------------- samples that were changed


class Stopped(BaseException):
    """A run that is interrupted."""


class Stopping(list):
    """A data set of which so many samples can be read."""

    def __init__(self, samples: list[dict], reads: int) -> None:
        super().__init__(samples)
        self.left = reads

    def __getitem__(self, index: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise Stopped
        return super().__getitem__(index)


def answers(word: str, count: int = 30) -> list[dict]:
    """Samples that have the same lengths, whichever word they are of."""
    return [chat(f"{n}?", f"{word} " * (1 + n % 5), id=n) for n in range(count)]


def test_samples_of_equal_length_do_not_go_into_rows_that_were_interrupted(tmp_path):
    before = answers("5")
    with pytest.raises(Stopped):
        store(tmp_path / "a", Stopping(before, 30 + 20))
    files = digests(tmp_path / "a")
    assert any(name.startswith("rows-") for name in files)
    with pytest.raises(ConfigError, match=rf"{CHANGED}: \d+ were changed .* or remove this one"):
        store(tmp_path / "a", answers("6"))
    assert {name: digests(tmp_path / "a")[name] for name in files} == files
    last = Plan.load(tmp_path / "a" / "plan.zip").bins[-1][0]  # was not written yet, so it may change
    now = [sample if at != last else answers("6")[at] for at, sample in enumerate(before)]
    assert store(tmp_path / "a", now) == store(tmp_path / "b", now)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_a_sample_that_stopped_the_run_may_be_corrected(tmp_path):
    broken = {"messages": [{"role": "user", "content": "?"}], "id": "broken"}
    with pytest.raises(SampleError, match="broken"):
        store(tmp_path, [*texts(5), broken])
    assert store(tmp_path, [*texts(5), chat("?", "corrected", id="broken")]).counts.samples == 6


def test_a_sample_that_was_left_out_is_compared_too(tmp_path):
    collator = packing(on_bad="skip", skip_limit=SkipLimit(max_bad_fraction=0.5))
    bad = [{"messages": [{"role": "user", "content": text}], "id": "bad"} for text in ("?", "??")]
    long = [chat("?", f"{word} " * 200, id="long") for word in ("a", "b")]
    store(tmp_path, [*texts(5), bad[0], long[0]], collator, overlength="drop")
    for at, samples in ((5, [*texts(5), bad[1], long[0]]), (6, [*texts(5), bad[0], long[1]])):
        with pytest.raises(ConfigError, match=rf"{CHANGED}: 1 were .*\(at {at}\)"):
            store(tmp_path, samples, collator, overlength="drop")


def test_rows_and_their_images_may_be_moved_and_an_image_that_was_changed_in_place_is_found(tmp_path):
    (tmp_path / "here").mkdir()
    path = tmp_path / "here" / "a.bmp"
    path.write_bytes(encoded(picture(64, 64, seed=1), "BMP"))
    store(tmp_path / "rows", [*mixed(tmp_path / "here"), chat("?", "a", path)])
    shutil.move(tmp_path / "rows", tmp_path / "elsewhere")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    copied = [*mixed(tmp_path / "there"), chat("?", "a", tmp_path / "there" / "a.bmp")]
    before = digests(tmp_path / "elsewhere")
    store(tmp_path / "elsewhere", copied)
    assert digests(tmp_path / "elsewhere") == before
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "there" / "a.bmp").write_bytes(data)
    with pytest.raises(ConfigError, match=rf"{CHANGED}: 1 were .*\(at {len(copied) - 1}\)"):
        store(tmp_path / "elsewhere", copied)
