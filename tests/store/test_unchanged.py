"""A store is of one data set: samples that were changed since they were packed are found, however alike they are."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import chat, picture
from clips import clip_bytes
from store.stores import asked, digests, encoded, mixed, packing, store, texts

from vlmpack.collate import SkipLimit
from vlmpack.errors import ConfigError, SampleError
from vlmpack.plan import Plan
from vlmpack.store.content import sample_digest

REFUSED = "holds other samples than the data set"


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


def answers(word: str, count: int = 100) -> list[dict]:
    """Samples that have the same lengths, whichever word they are of."""
    return [chat(f"{n}?", f"{word} " * (1 + n % 5), id=n) for n in range(count)]


def replaced(before: list[dict], after: list[dict], *, kept: set[int]) -> list[dict]:
    return [before[at] if at in kept else after[at] for at in range(len(before))]


# ---------------------------------------------------------------------- a whole data set


@pytest.mark.parametrize("written", [20, 47])
def test_samples_of_equal_length_do_not_go_into_a_store_that_was_interrupted(tmp_path, written):
    before = answers("5")
    changed = replaced(before, answers("6"), kept={at * 99 // 7 for at in range(8)})
    with pytest.raises(Stopped):
        store(tmp_path, Stopping(before, 100 + written))
    files = digests(tmp_path)
    assert any(name.startswith("rows-") for name in files)
    with pytest.raises(ConfigError, match=rf"{REFUSED}: \d+ were changed .* or remove this one"):
        store(tmp_path, changed)
    assert {name: digests(tmp_path)[name] for name in files} == files
    store(tmp_path, before)
    store(tmp_path.with_name("whole"), before)
    assert digests(tmp_path) == digests(tmp_path.with_name("whole"))


def test_samples_that_were_not_written_yet_may_change(tmp_path):
    """The store is of the data set as it is now."""
    before = answers("5", 30)
    with pytest.raises(Stopped):
        store(tmp_path / "a", Stopping(before, 30 + 20))
    last = Plan.load(tmp_path / "a" / "plan.zip").bins[-1][0]
    changed = replaced(answers("6", 30), before, kept={last})
    assert store(tmp_path / "a", changed) == store(tmp_path / "b", changed)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_a_sample_that_stopped_the_run_may_be_corrected(tmp_path):
    broken = {"messages": [{"role": "user", "content": "?"}], "id": "broken"}
    with pytest.raises(SampleError, match="broken"):
        store(tmp_path, [*texts(5), broken])
    assert store(tmp_path, [*texts(5), chat("?", "corrected", id="broken")]).counts.samples == 6


def test_a_sample_that_was_left_out_is_compared_too(tmp_path):
    lenient = {"on_bad": "skip", "skip_limit": SkipLimit(max_bad_fraction=0.5)}
    bad = [{"messages": [{"role": "user", "content": text}], "id": "bad"} for text in ("?", "??")]
    long = [chat("?", f"{word} " * 200, id="long") for word in ("a", "b")]
    store(tmp_path, [*texts(5), bad[0], long[0]], packing(**lenient), oversize="drop")
    for at, other in ((5, bad[1]), (6, long[1])):
        samples = [*texts(5), bad[0], long[0]]
        samples[at] = other
        with pytest.raises(ConfigError, match=rf"{REFUSED}: 1 were .*\(at {at}\)"):
            store(tmp_path, samples, packing(**lenient), oversize="drop")


def test_a_store_and_its_images_may_be_moved_and_copied(tmp_path):
    (tmp_path / "here").mkdir()
    samples = mixed(tmp_path / "here")
    store(tmp_path / "store", samples)
    shutil.move(tmp_path / "store", tmp_path / "elsewhere")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    before = digests(tmp_path / "elsewhere")
    store(tmp_path / "elsewhere", mixed(tmp_path / "there"))
    assert digests(tmp_path / "elsewhere") == before


def test_an_image_that_was_changed_under_its_old_name_size_and_date_is_found(tmp_path):
    path = tmp_path / "a.bmp"
    path.write_bytes(encoded(picture(64, 64, seed=1), "BMP"))
    samples = [*texts(3), chat("?", "a", path)]
    store(tmp_path / "store", samples)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=rf"{REFUSED}: 1 were .*\(at 3\)"):
        store(tmp_path / "store", samples)


# ---------------------------------------------------------------------- one sample


BASE = chat("Total?", "75,000", picture(40, 30, seed=1), id="a", chat_template_kwargs={"think": True})
IDS = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
VIDEO = chat("?", "a", video=[picture(40, 30, seed=n) for n in range(2)])
CHANGED: dict[str, Any] = {
    "question": {**BASE, "messages": chat("Totals?", "75,000", picture(40, 30))["messages"]},
    "answer": {**BASE, "messages": chat("Total?", "75,001", picture(40, 30))["messages"]},
    "id": {**BASE, "id": "b"},
    "pixels": {**BASE, "images": [picture(40, 30, seed=2)]},
    "file": {**BASE, "images": [encoded(picture(40, 30, seed=1))]},
    "keys": {**BASE, "images": [{"image": picture(40, 30, seed=1), "max_pixels": 5000}]},
    "template options": {**BASE, "chat_template_kwargs": {"think": False}},
    "video": VIDEO,
    "frames swapped": {**VIDEO, "video": VIDEO["video"][::-1]},
    "ids": IDS,
    "labels": {**IDS, "labels": [-100, -100, 7]},
    "an array": {**IDS, "input_ids": np.array([5, 6, 7])},
    "other numbers": {**IDS, "input_ids": np.array([5, 7, 6])},
    "tensor": {**IDS, "pixel_values": torch.ones(2, 3)},
    "bfloat16": {**IDS, "pixel_values": torch.ones(2, 3, dtype=torch.bfloat16)},
    "no sample": None,
    "a refusal": SampleError("no", index=0, reason="bad_line"),
    "another refusal": SampleError("no", index=0, reason="bad_row"),
    "nested": {"messages": [[[["deep"]]]]},
    "nested otherwise": {"messages": [[["deep"]]]},
    "missing image": {**BASE, "images": [Path("none.png")]},
}


def test_whatever_is_read_of_a_sample_changes_its_digest() -> None:
    collator = packing()
    found = {name: sample_digest(sample, collator) for name, sample in {"base": BASE, **CHANGED}.items()}
    assert len(set(found.values())) == len(CHANGED) + 1
    assert {len(digest) for digest in found.values()} == {32}
    assert sample_digest(copy.deepcopy(BASE), collator) == found["base"]
    assert sample_digest({**BASE, "difficulty": 3}, collator) == found["base"]  # which nothing reads


def test_a_file_counts_by_its_bytes_wherever_they_are(tmp_path: Path) -> None:
    data = encoded(picture(40, 30), "JPEG")
    (tmp_path / "a.jpg").write_bytes(data)
    sources = [data, {"bytes": data, "path": None}, tmp_path / "a.jpg", str(tmp_path / "a.jpg")]
    assert len({sample_digest(chat("?", "a", source), packing()) for source in sources}) == 1
    clip, path = clip_bytes(), tmp_path / "clip.mp4"
    path.write_bytes(clip)
    one, two, other = (
        sample_digest(asked({"type": "video", "video": video}), packing())
        for video in (clip, {"path": str(path), "bytes": None}, clip_bytes(num_frames=21))
    )
    assert one == two != other


def test_a_list_without_end_has_a_digest() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert sample_digest({"messages": endless}, packing()) != sample_digest({"messages": []}, packing())
