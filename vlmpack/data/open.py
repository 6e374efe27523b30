"""Any data set for fine-tuning, as samples for `VLMCollator`: nothing is decoded, and nothing but the index is kept.

    "synthetic"           receipts drawn here                                    ─┐ CORD: image and ground_truth
    CORD from anywhere    hub id, folder, parquet: `sources`                     ─┴──▶ to_conversation ──┐
    file of JSON, JSONL   messages, conversations, prompt + completion, input_ids ─┐                     ├──▶ samples
    the same, stored      parquet, `save_to_disk` folder, hub id: `sources`       ─┴──▶ as it stands ────┘

Paths of images and videos that are not absolute are meant from the folder of the file that names them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from vlmpack.data.conversation import to_conversation
from vlmpack.data.json_rows import json_rows
from vlmpack.data.receipts import SyntheticReceipts
from vlmpack.data.sources import COLUMNS, JSON_FILES, ImageFolder, Rows, Source, StoredRows, complete_row, find_stored
from vlmpack.errors import ConfigError, SampleError

CONVERSATIONS = ("messages", "conversations", "conversation", "prompt", "completion")
"""Columns that hold a sample's text; a tokenised one has `input_ids` instead."""
MEDIA = ("image", "images", "video", "videos", "image_url", "video_url", "url", "path")
"""Keys that may hold where an image or a video is."""


def open_dataset(
    source: Source, *, split: str = "train", num: int | None = None, seed: int = 0, scale: float = 1.0
) -> OpenDataset:
    """Samples as a map-style data set: `len()`, and `[i]` -> a mapping that `VLMCollator` takes.

    Args:
        source: `"synthetic"`, a file of JSON or JSONL, parquet files or a folder of them, a folder written by
            `save_to_disk`, an unpacked CORD archive, or a hub id.
        split: of a source that has several. A JSON file is one split, whatever it is called.
        num: the first so many samples; None: all of them.
        seed: of synthetic receipts. Stored samples keep their order.
        scale: of the text of synthetic receipts; 0.35 draws small pictures.

    Raises:
        ConfigError: the source, split or number do not fit what is there; it holds no samples; or an extra is missing.
    """
    if isinstance(source, str) and source == "synthetic":
        receipts = SyntheticReceipts(split=split, num=num, seed=seed, scale=scale)
        return OpenDataset(rows=receipts, name=source, are_receipts=True)
    rows, name, folder = _find(source, split)
    if num is not None and not 0 <= num <= len(rows):
        raise ConfigError(f"num is {num}, but {name} holds {len(rows)} samples; ask for at most that many")
    return OpenDataset(rows=rows, name=name, folder=folder, num=num, are_receipts=_are_receipts(rows, name))


@final
@dataclass(frozen=True, kw_only=True)
class OpenDataset:
    """Rows of any source, made samples when they are asked for. Cheap to send to a worker process."""

    rows: Rows
    """The raw rows."""
    name: str
    """Where they come from, for messages."""
    are_receipts: bool
    """Whether a row is an image and its ground truth, and not a conversation."""
    folder: Path | None = None
    """Where paths in the rows start; None: where the process runs."""
    num: int | None = None
    """Use the first so many; None: all."""

    def __len__(self) -> int:
        return len(self.rows) if self.num is None else self.num

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One sample; where it brings no `id` or `sample_id`, its id is its place in the data set.

        Raises:
            IndexError: there is no such sample.
            SampleError: its row cannot be read, or is no receipt where all others are.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self.name}")
        at = int(index) % len(self)
        row = self.rows[at]
        if self.are_receipts:
            return to_conversation(complete_row(row, self.name, index=at), index=at)
        try:
            sample = _from_folder(row, self.folder) if self.folder is not None else dict(row)
        except RecursionError as error:  # JSON is read a little deeper than Python calls itself
            message = f"its images or videos, in {self.name}, are nested too deeply; give a list of paths"
            raise SampleError(message, index=at, reason="row_unreadable") from error
        has_name = sample.get("id") is not None or sample.get("sample_id") is not None
        return sample if has_name else {**sample, "id": at}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any] | SampleError]:
        """What a DataLoader takes for a batch: a row that cannot be read is its error, for the collator to refuse.

        Raises:
            IndexError: there is no such sample.
        """
        return [self._sample_or_error(index) for index in indices]

    def _sample_or_error(self, index: int) -> dict[str, Any] | SampleError:
        try:
            return self[index]
        except SampleError as error:
            return error.with_traceback(None)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"OpenDataset({len(self)} samples of {self.name})"


def _find(source: Source, split: str) -> tuple[Rows, str, Path | None]:
    """(rows, their name, the folder in which their paths start)."""
    if not isinstance(source, str | os.PathLike):
        rows, name = find_stored(source, split)
        return rows, name, Path(source[0]).expanduser().absolute().parent
    path = Path(source).expanduser().absolute()
    if path.suffix in JSON_FILES and path.is_file():
        return json_rows(path), str(source), path.parent
    if path.is_file() and path.suffix not in ("", ".parquet"):
        raise ConfigError(f"{source} is a {path.suffix} file; give {', '.join(JSON_FILES)} or .parquet, unpacked")
    rows, name = find_stored(source, split)
    return rows, name, path if path.is_dir() else path.parent if path.is_file() else None


def _are_receipts(rows: Rows, name: str) -> bool:
    if isinstance(rows, ImageFolder):
        return True
    if not len(rows):
        raise ConfigError(f"{name} holds no samples")
    columns = rows.columns if isinstance(rows, StoredRows) else list(rows[0])
    if {"input_ids", *CONVERSATIONS} & set(columns):
        return False
    if set(COLUMNS) <= set(columns):
        return True
    raise ConfigError(
        f"{name} holds {', '.join(map(str, columns)) or 'nothing'}, and none of input_ids, {', '.join(CONVERSATIONS)}; "
        f"rename the column with the conversation, or give receipts as {' and '.join(COLUMNS)}"
    )


# ---------------------------------------------------------------------- paths


def _from_folder(row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The row with its media's paths starting at `folder`; texts and the arguments of tools are left alone."""
    changed = {name: _placed(row[name], folder) for name in MEDIA if name in row}
    changed |= {name: [_message(m, folder) for m in row[name]] for name in CONVERSATIONS if _is_list(row.get(name))}
    return {**row, **changed}


def _message(message: Any, folder: Path) -> Any:
    if not isinstance(message, Mapping) or not _is_list(message.get("content")):
        return message
    return {**message, "content": [_part(part, folder) for part in message["content"]]}


def _part(part: Any, folder: Path) -> Any:
    return part if not isinstance(part, Mapping) or part.get("type") == "text" else _placed(part, folder)


def _placed(media: Any, folder: Path) -> Any:
    """A path, or paths in lists and under the keys of `MEDIA`, starting at `folder`."""
    if isinstance(media, str):
        is_address = "://" in media[:32] or media.startswith("data:")
        return media if is_address else str(folder / media)
    if isinstance(media, Mapping):
        return {key: _placed(value, folder) if key in MEDIA else value for key, value in media.items()}
    return [_placed(one, folder) for one in media] if _is_list(media) else media


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)
