"""Tar shards as WebDataset documents them: samples, splits, and what is refused."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from chats import gpt, human, says, text, user
from measured import encoded

from vlmpack.data import open_dataset
from vlmpack.data.images import load_image
from vlmpack.data.readers import expand
from vlmpack.errors import ConfigError, SampleError

TURNS = [human("<image>\nWhat is it?"), gpt("A kitten.")]


def picture(side: int = 40) -> bytes:
    return encoded(side, 40, "PNG")


def shard(path: Path, files: dict[str, Any], *, mode: Any = "w") -> Path:
    """A tar file; what is neither bytes nor text is written as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:
        for name, content in files.items():
            data = content if isinstance(content, bytes) else str(content).encode()
            data = json.dumps(content).encode() if isinstance(content, dict | list) else data
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def captions(*numbers: int) -> dict[str, Any]:
    """Energon, data_prep.md: an image captioning data set."""
    parts = (("jpg", picture), ("txt", lambda: "This is some caption"), ("detail.json", lambda: {"width": 40}))
    return {f"sample_{number:04d}.{part}": made() for number in numbers for part, made in parts}


def test_captions_are_answers_to_their_image(tmp_path: Path) -> None:
    samples = open_dataset(shard(tmp_path / "shard_0000.tar", captions(0, 1)))
    assert [sample["id"] for sample in samples] == ["sample_0000", "sample_0001"]
    sample = samples[1]
    user, assistant = sample["messages"]
    assert user == {"role": "user", "content": [{"type": "image"}]}
    assert assistant == says("This is some caption")
    assert load_image(sample["image"]).size == (40, 40)
    assert sample["detail.json"] == {"width": 40}


SEEN = [user([{"type": "image", "image": "1.png"}, text("1.png")])]


@pytest.mark.parametrize(
    ("files", "widths"),
    [
        ({"G_1.jpg": picture(), "G_1.json": TURNS}, {"image": 40}),  # Megatron's convert_llava_pretrain_to_wds.py
        (
            {
                "s_2.b.jpg": picture(),
                "s_2.json": {"messages": [], "images": ["a.jpg", "b.jpg"]},
                "s_2.a.jpg": picture(60),
            },
            {"images": [60, 40]},
        ),
        ({"s.1.png": picture(60), "s.2.png": picture(), "s.json": {"conversations": TURNS}}, {"images": [60, 40]}),
        ({"s/2.1.png": picture(60), "s/2.json": {"messages": SEEN}}, {"messages": 60}),
    ],
    ids=["turns alone", "in the order of the JSON", "in their own order", "where they are named"],
)
def test_images_are_where_the_json_means_them(files: dict[str, Any], widths: dict[str, Any], tmp_path: Path) -> None:
    sample = open_dataset(shard(tmp_path / "a.tar", files))[0]
    for name, width in widths.items():
        held = sample[name]
        if name == "messages":
            assert held[0]["content"][1] == text("1.png")
            held = held[0]["content"][0]["image"]
        sizes = [load_image(image).size[0] for image in (held if isinstance(held, list) else [held])]
        assert sizes == (width if isinstance(width, list) else [width])
    assert sample.get("conversations", TURNS) == TURNS


class TestSplits:
    def test_a_pattern_and_a_list_are_all_of_their_shards(self, tmp_path: Path) -> None:
        for at in range(12):
            shard(tmp_path / f"shard_{at:03d}.tar", captions(2 * at, 2 * at + 1))
        pattern = str(tmp_path / "shard_{000..011}.tar")
        assert expand("a{1..2}-{08..10}") == ["a1-08", "a1-09", "a1-10", "a2-08", "a2-09", "a2-10"]
        assert [sample["id"] for sample in open_dataset(pattern)] == [f"sample_{at:04d}" for at in range(24)]
        assert len(open_dataset([pattern.replace("011", "001"), str(tmp_path / "shard_005.tar")])) == 6

    @pytest.mark.parametrize("layout", ["{}_shard_0000.tar", "{}/shard_0000.tar"])
    def test_folders_by_the_names_of_shards(self, layout: str, tmp_path: Path) -> None:
        """Energon, data_prep.md: presplit shards by prefix, and by folder."""
        shard(tmp_path / "shards" / layout.format("train"), captions(0, 1, 2))
        shard(tmp_path / "shards" / layout.format("val"), captions(3))
        assert len(open_dataset(tmp_path)) == 3
        assert [sample["id"] for sample in open_dataset(tmp_path, split="validation")] == ["sample_0003"]
        with pytest.raises(ConfigError, match="no tar file of split 'test'"):
            open_dataset(tmp_path, split="test")


class TestRefused:
    def test_a_compressed_shard(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"is compressed.*gunzip"):
            open_dataset(shard(tmp_path / "a.tar.gz", captions(0), mode="w:gz"))
        with pytest.raises(ConfigError, match="is not an uncompressed tar file"):
            open_dataset(shard(tmp_path / "a.tar", captions(0), mode="w:gz"))

    def test_a_folder_that_energon_prepared(self, tmp_path: Path) -> None:
        """Its splits are not those of the names of shards."""
        shard(tmp_path / "shard_0000.tar", captions(0))
        (tmp_path / ".nv-meta").mkdir()
        with pytest.raises(ConfigError, match="was prepared by Energon, whose splits and fields are not read here"):
            open_dataset(tmp_path)

    def test_a_sample_in_two_places(self, tmp_path: Path) -> None:
        files = {"0.jpg": picture(), "1.jpg": picture(), "0.txt": "a", "1.txt": "b"}
        with pytest.raises(ConfigError, match=r"holds files of '0' in two places.*tar --sort=name"):
            open_dataset(shard(tmp_path / "a.tar", files))

    def test_a_first_sample_that_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"the first sample of .* cannot be read: .*0.json is no JSON"):
            open_dataset(shard(tmp_path / "a.tar", {"0.json": b"{"}))

    def test_a_shard_of_no_samples_and_one_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="holds no samples"):
            open_dataset(shard(tmp_path / "a.tar", {"README": "x", "__meta__.json": {}}))
        with pytest.raises(ConfigError, match="no such file"):
            open_dataset(tmp_path / "b.tar")
        with pytest.raises(ConfigError, match="give files of one kind, and mix the data sets"):
            open_dataset([tmp_path / "a.tar", tmp_path / "b.parquet"])

    @pytest.mark.parametrize(
        ("files", "expected"),
        [
            ({"1.json": b"{"}, "1.json is no JSON"),
            ({"1.json": "3"}, "its JSON is a int"),
            ({"1.jpg": b"", "1.json": {"messages": [], "image": "2.jpg"}}, "names another image than its parts jpg"),
            ({"1.txt": "a", "1.json": {"txt": "b"}}, "has the key 'txt'"),
        ],
    )
    def test_a_bad_sample_is_one_sample(self, files: dict[str, Any], expected: str, tmp_path: Path) -> None:
        samples = open_dataset(shard(tmp_path / "a.tar", {**captions(0), **files}))
        assert samples[0]["id"] == "sample_0000"
        with pytest.raises(SampleError, match=expected) as caught:
            samples[1]
        assert (caught.value.index, caught.value.reason) == (1, "row_unreadable")
