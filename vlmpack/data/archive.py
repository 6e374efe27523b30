"""The CORD archive, unpacked: a folder of images beside a folder of annotations, and no library needed to read it.

train/image/receipt_00000.png
train/json/receipt_00000.json
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmpack.data.receipts import SPLITS, parse_lines
from vlmpack.errors import ConfigError, SampleError

ALIASES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Names of splits in files and folders, and the splits that they mean; as `datasets` reads them."""


def archive_in(folder: Path, split: str) -> ImageFolder | None:
    """The split in an unpacked archive; None: the folder holds none.

    Raises:
        ConfigError: it holds another split, or images without annotations.
    """
    places = [folder / name for name in (split, in_files(split), ".")]
    found = next((place for place in places if (place / "image").is_dir() and (place / "json").is_dir()), None)
    return None if found is None else _image_rows(found, split)


def in_files(split: str) -> str:
    """What CORD's own files call the split."""
    return SPLITS.get(split, split)


@dataclass(frozen=True, kw_only=True)
class ImageFolder:
    """The layout of the CORD archive: `image/receipt_00000.png` beside `json/receipt_00000.json`."""

    images: tuple[Path, ...]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The archive of version 0 has no `gt_parse`; it is then computed from the annotated lines."""
        image = self.images[index]
        try:
            text = _json_beside(image).read_text(encoding="utf-8")
            truth = json.loads(text)
            if "gt_parse" not in truth and "valid_line" in truth:
                text = json.dumps({"gt_parse": parse_lines(truth["valid_line"]), **truth})
        except (OSError, ValueError, KeyError, TypeError) as error:  # UnicodeDecodeError is a ValueError
            message = (
                f"{_json_beside(image)} cannot be read as a CORD annotation ({error!r}); download it again or remove "
                "the pair"
            )
            raise SampleError(message, index=index, reason="ground_truth_unreadable", sample_id=image.stem) from error
        return {"image": image, "ground_truth": text}


def _image_rows(folder: Path, split: str) -> ImageFolder:
    images = sorted(path for path in (folder / "image").iterdir() if path.suffix.lower() in (".png", ".jpg", ".jpeg"))
    alone = [image.name for image in images if not _json_beside(image).is_file()]
    if alone:
        raise ConfigError(
            f"{len(alone)} images in {folder / 'image'} have no annotation, first {alone[0]}; add it to json/"
        )
    if not images:
        raise ConfigError(f"no .png or .jpg in {folder / 'image'}; unpack the CORD archive there")
    rows = ImageFolder(images=tuple(images))
    written = _written_split(rows[0]["ground_truth"])
    name = ALIASES.get(written, split)
    if name != split:
        raise ConfigError(
            f"{folder} holds split {name!r} (its files say {written!r}), not {split!r}; pass split={name!r}"
        )
    return rows


def _written_split(ground_truth: str) -> str:
    """What `meta.split` says; nothing where there is no such entry."""
    truth = json.loads(ground_truth)
    meta = truth.get("meta") if isinstance(truth, dict) else None
    return str(meta.get("split", "")) if isinstance(meta, dict) else ""


def _json_beside(image: Path) -> Path:
    return image.parent.parent / "json" / f"{image.stem}.json"
