"""LengthCache: what decides lengths is the key, nothing else; and no accident makes it tell anything wrong."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import chat, picture, processor_of, tokenised
from clips import clip_bytes
from measured import conversations, encoded
from PIL import ExifTags, Image

from vlmpack.collate import VLMCollator
from vlmpack.data.images import ImageLimits
from vlmpack.errors import ConfigError
from vlmpack.store import LengthCache, measure_lengths
from vlmpack.store import measure as measure_module
from vlmpack.store.content import sample_key, settings_key
from vlmpack.store.measure import Entry
from vlmpack.testing import tiny_processor
from vlmpack.testing.processors import CHAT_TEMPLATE

COLLATOR = VLMCollator(processor_of())
LIMITS = ImageLimits()
SAMPLES = conversations(100)


def key(sample: Any) -> bytes | None:
    return sample_key(sample, b"settings", COLLATOR)


def entries_in(path: Path) -> int:
    with LengthCache(path) as cache:
        return len(cache)


@pytest.fixture
def outlined(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The samples that were measured, and not found in the cache."""
    samples: list[Any] = []
    outline = VLMCollator.measure

    def noted(self: VLMCollator, feature: Any, *more: Any, **options: Any) -> Any:
        samples.append(feature)
        return outline(self, feature, *more, **options)

    monkeypatch.setattr(VLMCollator, "measure", noted)
    return samples


def in_a_fork(work: Callable[[], None]) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# ---------------------------------------------------------------------- found again


def test_a_second_run_measures_nothing_and_tells_the_same(tmp_path: Path, outlined: list[Any]) -> None:
    first = measure_lengths(SAMPLES, COLLATOR, cache=tmp_path / "lengths")
    assert len(outlined) == len(SAMPLES) == entries_in(tmp_path / "lengths")
    outlined.clear()
    assert measure_lengths(SAMPLES, COLLATOR, cache=tmp_path / "lengths") == first
    assert outlined == []
    assert first.refused
    assert {one.sample_id for one in first.refused} > {None}


def test_only_what_is_new_is_measured(tmp_path: Path, outlined: list[Any]) -> None:
    measure_lengths(SAMPLES[:60], COLLATOR, cache=tmp_path / "lengths")
    outlined.clear()
    table = measure_lengths(SAMPLES[::-1], COLLATOR, cache=tmp_path / "lengths")
    assert outlined == SAMPLES[:59:-1]
    assert table == measure_lengths(SAMPLES[::-1], COLLATOR)


def test_a_refusal_found_again_has_the_samples_own_name(tmp_path: Path) -> None:
    for name in ("a", "b"):
        sample = {"messages": [{"role": "user", "content": "?"}], "id": name}
        (refused,) = measure_lengths([sample], COLLATOR, cache=tmp_path / "lengths").refused
        assert (refused.sample_id, refused.reason) == (name, "no_targets")


def test_an_image_of_the_same_size_is_found_again_wherever_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    sources = [
        picture(90, 60),
        encoded(90, 60, seed=1),
        {"bytes": encoded(90, 60, "PNG"), "path": None},
        path,
        str(path),
    ]
    path.write_bytes(encoded(90, 60, "WEBP"))
    os.utime(path, (0, 0))
    assert len({key(chat("?", "a", source)) for source in sources}) == 1


def test_an_image_that_was_replaced_is_measured_again_even_if_its_file_looks_the_same(tmp_path: Path) -> None:
    path, cache = tmp_path / "a.png", tmp_path / "lengths"
    tokens = []
    for size in ((90, 60), (200, 60)):
        path.write_bytes(encoded(*size, "PNG").ljust(100_000, b"\0"))
        os.utime(path, (0, 0))
        tokens.append(int(measure_lengths([chat("?", "a", path)], COLLATOR, cache=cache).image_tokens[0]))
    assert tokens == [6, 12]


# ---------------------------------------------------------------------- the key of a sample


def turned(orientation: int, height: int = 60) -> Image.Image:
    image = picture(90, height)
    image.getexif()[ExifTags.Base.Orientation] = orientation
    return image


TOOL = {"type": "function", "function": {"name": "add", "description": "adds"}}
PLAIN = {"prompt": "2 + 3 = ", "completion": "5"}
BASE = chat("Total?", "75,000", picture(90, 60), tools=[TOOL], chat_template_kwargs={"think": True})
CHANGED = {
    "question": {**BASE, "messages": chat("Total ?", "75,000", picture(90, 60))["messages"]},
    "answer": {**BASE, "messages": chat("Total?", "75,001", picture(90, 60))["messages"]},
    "role": {**BASE, "messages": [BASE["messages"][0], {**BASE["messages"][1], "role": "user"}]},
    "a name": {**BASE, "messages": [{**BASE["messages"][0], "name": "Ann"}, BASE["messages"][1]]},
    "another turn": {**BASE, "messages": [*BASE["messages"], {"role": "user", "content": "thanks"}]},
    "two texts": {**BASE, "messages": [{"role": "user", "content": ["Total", "?"]}, BASE["messages"][1]]},
    "tools": {**BASE, "tools": [TOOL, TOOL]},
    "order in a tool": {**BASE, "tools": [dict(reversed(TOOL.items()))]},
    "template options": {**BASE, "chat_template_kwargs": {"think": False}},
    "width": {**BASE, "images": [picture(91, 60)]},
    "height": {**BASE, "images": [picture(90, 61)]},
    "sides swapped": {**BASE, "images": [picture(60, 90)]},
    "turned": {**BASE, "images": [turned(6, height=50)]},
    "keys": {**BASE, "images": [{"image": picture(90, 60), "max_pixels": 5000}]},
    "other keys": {**BASE, "images": [{"image": picture(90, 60), "max_pixels": 5001}]},
    "plain": PLAIN,
    "plain prompt": {**PLAIN, "prompt": "2 + 3 ="},
    "both its answers are a target": {**BASE, "messages": 2 * BASE["messages"], "images": 2 * [picture(90, 60)]},
    "only its last answer is a target": {
        **BASE,
        "messages": None,
        "prompt": (2 * BASE["messages"])[:3],
        "completion": BASE["messages"][1:],
        "images": 2 * [picture(90, 60)],
    },
    "a video": {**chat("?", "a"), "video": [picture(90, 60)]},
    "a longer video": {**chat("?", "a"), "video": [picture(90, 60)] * 2},
    "a faster video": {**chat("?", "a"), "video": [{"video": [picture(90, 60)], "sample_fps": 4}]},
}


def test_each_part_that_decides_lengths_changes_the_key() -> None:
    keys = {name: key(sample) for name, sample in {"base": BASE, **CHANGED}.items()}
    assert None not in keys.values()
    assert len(set(keys.values())) == len(CHANGED) + 1 > 20


@pytest.mark.parametrize(
    "more", [{"id": "r1"}, {"ground_truth": object()}, {"labels": None}, {"images": [turned(1)]}, {"videos": None}]
)
def test_what_does_not_decide_lengths_is_no_part_of_the_key(more: dict[str, Any]) -> None:
    assert key({**BASE, **more}) == key(copy.deepcopy(BASE))


def test_numbers_of_numpy_have_a_place_in_a_key() -> None:
    options = [{"scale": value} for value in (np.int64(1), np.float32(1.0), np.array([1, 2]), np.array([1, 3]))]
    keys = {key({**BASE, "chat_template_kwargs": one}) for one in options}
    assert len(keys) == 4
    assert None not in keys


@pytest.mark.parametrize(
    "sample",
    [
        tokenised("qwen3_vl", "<|im_start|>assistant\n5<|im_end|>"),
        chat("?", "a", b"no image"),
        chat("?", "a", video="film.mp4"),
        chat("?", "a", video=clip_bytes(num_frames=4)),
        chat("?", "a", chat_template_kwargs={"now": object()}),
        {"messages": []},
        7,
    ],
)
def test_samples_without_a_key_are_measured_every_time(tmp_path: Path, sample: Any, outlined: list[Any]) -> None:
    assert key(sample) is None
    tables = [measure_lengths([sample], COLLATOR, cache=tmp_path / "lengths") for _ in range(2)]
    assert tables[0] == tables[1]
    assert len(outlined) == 2
    assert entries_in(tmp_path / "lengths") == 0


# ---------------------------------------------------------------------- the key of the settings


def with_token() -> Any:
    processor = tiny_processor()
    processor.tokenizer.add_tokens(["<box>"])
    return processor


def unresized() -> Any:
    processor = tiny_processor()
    processor.image_processor.do_resize = False
    return processor


SETTINGS: dict[str, Callable[[], VLMCollator]] = {
    "max_length": lambda: VLMCollator(tiny_processor(), max_length=99),
    "drop": lambda: VLMCollator(tiny_processor(), max_length=99, overlength="drop"),
    "truncate": lambda: VLMCollator(tiny_processor(), max_length=99, overlength="truncate"),
    "train_on": lambda: VLMCollator(tiny_processor(), train_on="all"),
    "vocab_size": lambda: VLMCollator(tiny_processor(), vocab_size=2000),
    "limits": lambda: VLMCollator(tiny_processor(), limits=replace(LIMITS, max_pixels=10**6)),
    "max_pixels": lambda: VLMCollator(tiny_processor(max_pixels=10**5)),
    "min_pixels": lambda: VLMCollator(tiny_processor(min_pixels=10**4)),
    "do_resize": lambda: VLMCollator(unresized()),
    "family": lambda: VLMCollator(tiny_processor("qwen2_5_vl")),
    "template": lambda: VLMCollator(tiny_processor(chat_template=CHAT_TEMPLATE + " ")),
    "vocabulary": lambda: VLMCollator(tiny_processor(vocab_size=700)),
    "a token": lambda: VLMCollator(with_token()),
    "a tokenizer": lambda: VLMCollator(tiny_processor().tokenizer),
}


def test_each_setting_that_decides_lengths_changes_the_key() -> None:
    keys = {name: settings_key(make()) for name, make in SETTINGS.items()}
    keys |= {"base": settings_key(COLLATOR), "marks": settings_key(COLLATOR, has_marks=True)}
    assert len(set(keys.values())) == len(SETTINGS) + 2


def test_settings_that_do_not_decide_lengths_are_no_part_of_the_key(tmp_path: Path) -> None:
    other = VLMCollator(tiny_processor(), layout="packed", on_bad="skip", skip_log=tmp_path / "bad.jsonl")
    other.processor.tokenizer("some text", truncation=True, max_length=1)  # which the tokenizer remembers
    assert settings_key(other) == settings_key(COLLATOR)


# ---------------------------------------------------------------------- accidents


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_that_is_killed_loses_little_and_breaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outlined: list[Any]
) -> None:
    cache = tmp_path / "lengths"
    monkeypatch.setattr(measure_module, "WRITE_EVERY", 0.0)
    process = in_a_fork(lambda: measure_lengths(SAMPLES, COLLATOR, cache=cache, progress=lambda done, total: kill()))
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert entries_in(cache) == measure_module.PART
    table = measure_lengths(SAMPLES, COLLATOR, cache=cache)
    assert len(outlined) == len(SAMPLES) - measure_module.PART
    assert table == measure_lengths(SAMPLES, COLLATOR)


@pytest.mark.slow
@pytest.mark.dist
def test_several_runs_may_share_a_cache_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "lengths"
    monkeypatch.setattr(measure_module, "WRITE_EVERY", 0.0)
    monkeypatch.setattr(measure_module, "PART", 5)
    expected = measure_lengths(SAMPLES, COLLATOR)

    def run() -> None:
        assert measure_lengths(SAMPLES, COLLATOR, cache=cache) == expected

    processes = [in_a_fork(run) for _ in range(3)]
    run()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert entries_in(cache) == len(SAMPLES)


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


def test_a_folder_for_it_is_made_and_workers_get_it_without_its_connection(tmp_path: Path) -> None:
    path = tmp_path / "far" / "away" / "lengths"
    with LengthCache(path) as cache:
        cache.put({b"k": Entry(images=2)})
        with pickle.loads(pickle.dumps(cache)) as sent:
            assert sent._connection is None
            assert sent.get([b"k"]) == {b"k": Entry(images=2)}
    with LengthCache(path) as cache:
        assert cache.get([b"k", b"none"]) == {b"k": Entry(images=2)}
        assert cache.get([]) == {}
