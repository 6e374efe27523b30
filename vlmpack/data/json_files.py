"""Files of JSON as rows: one a line, or one array of all. Where each begins and ends is kept, and nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, final

import numpy as np

from vlmpack.errors import ConfigError, SampleError

JSON_FILES = (".json", ".jsonl", ".ndjson")
"""Ends of the names of such files."""
CHUNK = 2**24
"""Bytes of a JSONL file that are read together."""
HEAD = 256
"""Bytes of a file by which its kind is recognised."""
NEWLINE, BRACE = ord("\n"), ord("{")
WHITE = " \t\r\n"
MARK = b"\xef\xbb\xbf"
"""The byte-order mark that some editors put in front of UTF-8."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class JsonRows:
    """Rows of one file. Opened anew for each row, so that it can be sent to any number of processes."""

    path: Path
    """The file."""
    spans: np.ndarray
    """int64 [N, 2]: first byte of each row, and the one after its last."""

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One row.

        Raises:
            SampleError: it is no JSON object, or the file cannot be read any more.
        """
        start, stop = self.spans[index].tolist()
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                text = file.read(stop - start)
        except OSError as error:
            message = f"{self.path} cannot be read any more: {error}; put it back, or open the data set again"
            raise SampleError(message, index=int(index), reason="row_unreadable") from error
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
            is_deep = isinstance(error, RecursionError)
            fault = "is nested too deeply to be read" if is_deep else f"is no JSON ({error})"
            raise self._unreadable(index, fault, text) from error
        if not isinstance(row, dict):
            raise self._unreadable(index, f"is a {type(row).__name__}", text)
        return row

    def _unreadable(self, index: int, fault: str, text: bytes) -> SampleError:
        start = text.strip()[:40].decode(errors="replace")
        return SampleError(
            f"the text at byte {self.spans[index, 0]} of {self.path} {fault}: {start!r}; a sample is a JSON object, "
            "with a line of its own or in one array with all others",
            index=int(index),
            reason="row_unreadable",
        )


def json_rows(path: Path) -> JsonRows:
    """Find the rows of a file, and read the first one.

    Raises:
        ConfigError: the file holds no rows, is not JSON, or its first row is no object.
    """
    with path.open("rb") as file:
        head = _head(file)
        spans = _array_spans(path) if head.startswith(b"[") else _line_spans(file)
    rows = JsonRows(path=path, spans=spans)
    if not len(rows):
        raise ConfigError(f"{path} holds no samples; expected a JSON object a line, or one array of objects")
    try:
        rows[0]
    except SampleError as error:
        raise ConfigError(f"{error.detail}{_hint(head)}") from error
    return rows


def is_array(path: Path) -> bool:
    """Return whether a file of JSON begins as a list of rows does."""
    with path.open("rb") as file:
        return _head(file).startswith(b"[")


def _head(file: BinaryIO) -> bytes:
    return file.read(HEAD).removeprefix(MARK).lstrip()


def _hint(head: bytes) -> str:
    """Where a file begins like an object of several lines: it is one sample, or all of them under a key."""
    key = re.match(rb'\{\s*"([^"]+)"\s*:\s*\[', head)
    if key is None:
        return ""
    name = key.group(1).decode(errors="replace")
    return f". If all samples are the list under its key {name!r}, write that list alone; if it is one, give it a line"


def _line_spans(file: BinaryIO) -> np.ndarray:
    """Every line that is not blank; whole lines at a time, and only those without a brace are read one by one."""
    spans, at = [np.zeros((0, 2), np.int64)], 0
    file.seek(0)
    while chunk := file.read(CHUNK) + file.readline():
        ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == NEWLINE) + 1
        if not len(ends) or ends[-1] < len(chunk):
            ends = np.append(ends, len(chunk))
        starts = np.concatenate([[0], ends[:-1]])
        odd = np.flatnonzero(np.frombuffer(chunk, np.uint8)[starts] != BRACE)
        blank = [i for i in odd.tolist() if not chunk[starts[i] : ends[i]].strip()]
        spans.append(np.delete(np.stack([starts, ends], 1) + at, blank, axis=0))
        at += len(chunk)
    return np.concatenate(spans)


def _array_spans(path: Path) -> np.ndarray:
    """The items of one JSON array: each is parsed once to find its end, and none is kept."""
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
        spans = _item_spans(text)
    except RecursionError as error:
        message = f"{path} holds a sample that is nested too deeply to be read; write a sample a line, or leave it out"
        raise ConfigError(message) from error
    except ValueError as error:
        raise ConfigError(f"{path} begins like a JSON array and is none ({error}); write it again") from error
    edges = spans.reshape(-1)
    if not text.isascii():
        pieces = (text[a:b] for a, b in zip([0, *edges[:-1]], edges, strict=True))
        edges = np.cumsum([len(piece.encode()) for piece in pieces], dtype=np.int64)
    return edges.reshape(-1, 2) + (len(MARK) if data.startswith(MARK) else 0)


def _item_spans(text: str) -> np.ndarray:
    """int64 [N, 2], in characters."""
    decoder, spans = json.JSONDecoder(), []
    at = _after_white(text, text.index("[") + 1)
    while not text.startswith("]", at):
        _, stop = decoder.raw_decode(text, at)
        spans.append((at, stop))
        at = _after_white(text, stop)
        if text.startswith(",", at):
            at = _after_white(text, at + 1)
        elif not text.startswith("]", at):
            raise ValueError(f"a comma or the end of the array is missing at character {at}")
    if (rest := _after_white(text, at + 1)) < len(text):
        raise ValueError(f"the array has ended, but there is more at character {rest}")
    return np.asarray(spans, np.int64).reshape(-1, 2)


def _after_white(text: str, at: int) -> int:
    while at < len(text) and text[at] in WHITE:
        at += 1
    return at
