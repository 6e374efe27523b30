"""LengthCache: what was measured is found again, and no accident makes it give anything wrong."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chats import chat, processor_of
from measured import conversations, encoded

from vlmpack import lengths
from vlmpack.collate import VLMCollator
from vlmpack.errors import ConfigError
from vlmpack.lengths import Entry, LengthCache, measure_lengths

COLLATOR = VLMCollator(processor_of())
SAMPLES = conversations(100)


@pytest.fixture
def outlined(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The samples that were measured, and not found in the cache."""
    samples: list[Any] = []
    measure = VLMCollator.measure

    def noted(self: VLMCollator, feature: Any, *more: Any, **options: Any) -> Any:
        samples.append(feature)
        return measure(self, feature, *more, **options)

    monkeypatch.setattr(VLMCollator, "measure", noted)
    return samples


def in_a_fork(work: Callable[[], Any]) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_only_what_is_new_is_measured(tmp_path: Path, outlined: list[Any]) -> None:
    first = measure_lengths(SAMPLES[:60], COLLATOR, cache=tmp_path / "lengths")
    assert len(outlined) == 60
    outlined.clear()
    assert measure_lengths(SAMPLES[:60], COLLATOR, cache=tmp_path / "lengths") == first
    assert outlined == [] and {one.sample_id for one in first.refused} == {None}
    table = measure_lengths(SAMPLES[::-1], COLLATOR, cache=tmp_path / "lengths")
    assert outlined == SAMPLES[:59:-1]
    assert table == measure_lengths(SAMPLES[::-1], COLLATOR)


def test_a_refusal_found_again_has_the_samples_own_name(tmp_path: Path) -> None:
    for name in ("a", "b"):
        sample = {"messages": [{"role": "user", "content": "?"}], "id": name}
        (refused,) = measure_lengths([sample], COLLATOR, cache=tmp_path / "lengths").refused
        assert (refused.sample_id, refused.reason) == (name, "no_targets")


def test_an_image_that_was_replaced_is_measured_again_even_if_its_file_looks_the_same(tmp_path: Path) -> None:
    path, cache = tmp_path / "a.png", tmp_path / "lengths"
    tokens = []
    for size in ((90, 60), (200, 60)):
        path.write_bytes(encoded(*size, "PNG").ljust(100_000, b"\0"))
        os.utime(path, (0, 0))
        tokens.append(int(measure_lengths([chat("?", "a", path)], COLLATOR, cache=cache).image_tokens[0]))
    assert tokens == [6, 12]


def test_a_sample_without_a_key_is_measured_every_time(tmp_path: Path, outlined: list[Any]) -> None:
    tables = [measure_lengths([{"messages": []}], COLLATOR, cache=tmp_path / "lengths") for _ in range(2)]
    assert tables[0] == tables[1]
    assert len(outlined) == 2


# ---------------------------------------------------------------------- accidents


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_that_is_killed_loses_little_and_breaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outlined: list[Any]
) -> None:
    cache = tmp_path / "lengths"
    monkeypatch.setattr(lengths, "WRITE_EVERY", 0.0)
    process = in_a_fork(lambda: measure_lengths(SAMPLES, COLLATOR, cache=cache, progress=lambda done, total: kill()))
    process.join()
    assert process.exitcode == -signal.SIGKILL
    table = measure_lengths(SAMPLES, COLLATOR, cache=cache)
    assert len(outlined) == len(SAMPLES) - lengths.PART
    assert table == measure_lengths(SAMPLES, COLLATOR)


def cut_short(path: Path) -> None:
    measure_lengths(SAMPLES, COLLATOR, cache=path)
    path.write_bytes(path.read_bytes()[:-5000])


def overwritten(path: Path) -> None:
    measure_lengths(SAMPLES, COLLATOR, cache=path)
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xa5" * (len(data) - 4096)
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no database": (lambda path: path.write_text("lengths\n" * 999), "is damaged, or no cache of lengths"),
    "a folder": (lambda path: path.mkdir(), "cannot be used"),
    "cut short": (cut_short, "is damaged"),
    "overwritten": (overwritten, "is damaged"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_no_sound_cache_is_told_and_left_alone(tmp_path: Path, name: str) -> None:
    make, told = DAMAGE[name]
    path = tmp_path / "lengths"
    make(path)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(ConfigError, match=told):
        measure_lengths(SAMPLES, COLLATOR, cache=path)
    assert (path.read_bytes() if path.is_file() else b"") == before


def test_a_folder_for_it_is_made_and_it_can_be_sent_to_workers(tmp_path: Path) -> None:
    path = tmp_path / "far" / "away" / "lengths"
    LengthCache(path).put({b"k": Entry(images=2)})
    cache = pickle.loads(pickle.dumps(LengthCache(path)))
    assert cache.get([b"k", b"none"]) == {b"k": Entry(images=2)}
    assert cache.get([]) == {}
