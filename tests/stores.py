"""Small data sets, and folders of their rows, for the tests of rows written ahead."""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from chats import chat, picture, processor_of
from PIL import Image

from vlmpack.collate import VLMCollator
from vlmpack.layout import PackedRow
from vlmpack.rows import Manifest, PackedDataset, StoreSettings, write_rows

CAPACITY = 96


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    """An image as its file has it."""
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


class Counting:
    """A data set that counts how often each sample is read."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples, self.reads = samples, Counter[int]()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        return self.samples[index]


def texts(count: int = 12) -> list[dict]:
    """Questions of unlike length, without images."""
    return [chat(f"{'why ' * (1 + n % 5)}{n}?", "because " * (1 + 3 * n % 7), id=f"text-{n}") for n in range(count)]


def frames(count: int = 3, *, seed: int = 0) -> list[Image.Image]:
    """A video."""
    return [picture(40, 36, seed=seed + n) for n in range(count)]


def asked(media: dict, answer: str = "yes", **more: Any) -> dict:
    """A question about a medium that stands in the message itself, with its keys."""
    parts = [media, {"type": "text", "text": "What is it?"}]
    return {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}], **more}


def mixed(folder: Path | None = None) -> list[dict]:
    """One sample of every kind; images of every source, as files in `folder` if one is given."""
    turned = Image.Exif()
    turned[0x0112] = 6
    on_its_side = io.BytesIO()
    picture(70, 40, seed=9).save(on_its_side, "JPEG", exif=turned, quality=95)
    samples = [
        chat("Total?", "75,000", encoded(picture(90, 61, seed=1), "JPEG"), id="receipt"),
        chat("Which is larger?", "The second", picture(40, 99, seed=2), picture(120, 70, seed=3), sample_id=77),
        chat("2 + 2?", "4", id=0),
        {"prompt": "2 + 3 = ", "completion": "5", "id": "plain"},
        asked({"type": "video", "video": frames(), "min_pixels": 2048, "max_pixels": 20000}, id="film"),
        asked({"type": "image", "image": picture(100, 60), "resized_height": 64, "resized_width": 96}, id="sized"),
        asked(
            {"type": "video", "video": frames(2, seed=8), "min_pixels": 1024, "total_pixels": 9000, "sample_fps": 4.0},
            id="fast film",
        ),
        chat("Which way up?", "Up", {"bytes": on_its_side.getvalue(), "path": None}, id="on its side"),
        chat("And this?", "A hole", picture(50, 50).convert("L"), id="gray"),
    ]
    if folder is not None:
        file = folder / "file.webp"
        file.write_bytes(encoded(picture(64, 80, seed=4), "WEBP"))
        samples += [chat("A file?", "yes", str(file), id="file"), chat("A path?", "yes", {"path": file}, id="path")]
    return samples


def packing(family: str = "qwen3_vl", **settings: Any) -> VLMCollator:
    """A collator whose rows can be stored."""
    return VLMCollator(processor_of(family), layout="packed", **settings)


def store(folder: Path, samples: Any, collator: VLMCollator | None = None, **settings: Any) -> Manifest:
    """Write rows, two a file."""
    made = StoreSettings(**{"capacity": CAPACITY, "shard_rows": 2, **settings})
    return write_rows(samples, folder, collator or packing(), made)


def places(dataset: PackedDataset) -> list[list[int]]:
    """The samples of each row, by their places in the data set."""
    return [[place for place, _ in dataset._read(row)] for row in range(len(dataset))]


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a store, by name."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def check_same(row: PackedRow, other: PackedRow) -> None:
    """Two rows are equal bit for bit, pixels and metadata included."""
    one, two = row.step_inputs(), other.step_inputs()
    assert one.keys() == two.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == two[name].dtype and torch.equal(value, two[name]), name
        else:
            assert value == two[name], name
