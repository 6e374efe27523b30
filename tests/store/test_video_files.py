"""Rows with files of videos, written ahead: kept as bytes or referred to, and read back as they were collated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from chats import processor_of
from clips import clip_bytes
from store.stores import asked, packing, texts

from vlmpack.collate import FrameSampling
from vlmpack.data import open_dataset
from vlmpack.errors import ConfigError
from vlmpack.store import PackedDataset, StoreSettings, write_rows
from vlmpack.store.content import sample_digest

KEYS = {"min_pixels": 1024, "max_pixels": 6144, "fps": 3, "video_end": 1.5}


def films(folder: Path) -> list[dict]:
    path = folder / "clip.mp4"
    path.write_bytes(clip_bytes())
    film = asked({"type": "video", "video": str(path), **KEYS}, id="film")
    return [film, *texts(4)]


def stored(samples: list[dict], out: Path, **options: Any) -> PackedDataset:
    write_rows(samples, out, packing(**options), StoreSettings(capacity=400))
    return PackedDataset(out, processor_of("qwen3_vl"))


def test_rows_are_those_that_the_collator_makes(tmp_path: Path) -> None:
    samples = films(tmp_path)
    dataset = stored(samples, tmp_path / "rows")
    rows = [dataset.row(at) for at in range(len(dataset))]
    by_id = {sample["id"]: sample for sample in samples}
    videos = 0
    for row in rows:
        expected = packing().collate([by_id[name] for name in row.metadata.sample_ids])
        assert torch.equal(row.input_ids, expected.input_ids)
        if row.media.pixel_values_videos is not None:
            assert torch.equal(row.media.pixel_values_videos, expected.media.pixel_values_videos)
            videos += 1
    assert videos == 1


def test_the_frames_that_are_taken_are_decided_when_rows_are_packed(tmp_path: Path) -> None:
    samples = [asked({"type": "video", "video": clip_bytes(), "min_pixels": 1024, "max_pixels": 6144}), *texts(2)]
    dataset = stored(samples, tmp_path / "rows", sampling=FrameSampling(fps=None, num_frames=6))
    grids = [grid for at in range(len(dataset)) for grid in dataset.row(at).metadata.video_grids]
    assert [grid[0] for grid in grids] == [3]
    with pytest.raises(ConfigError, match="sampling: decided when the rows were packed"):
        PackedDataset(tmp_path / "rows", processor_of("qwen3_vl"), sampling=FrameSampling())


def test_a_file_its_bytes_and_its_path_have_one_digest_and_another_file_another(tmp_path: Path) -> None:
    clip, collator = clip_bytes(), packing()
    path = tmp_path / "clip.mp4"
    path.write_bytes(clip)
    one, two, other = (
        sample_digest(asked({"type": "video", "video": video}), collator)
        for video in (clip, {"path": str(path), "bytes": None}, clip_bytes(num_frames=21))
    )
    assert one == two != other


def test_paths_of_videos_start_at_the_folder_of_the_file_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(clip_bytes())
    (tmp_path / "data.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "<video>?"}, {"role": "assistant", "content": "!"}], '
        '"videos": ["clip.mp4"]}\n'
    )
    row = packing().collate([open_dataset(tmp_path / "data.jsonl")[0]])
    assert len(row.metadata.video_grids) == 1
