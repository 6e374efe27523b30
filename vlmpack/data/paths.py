"""Where a sample's media lie: paths that are not absolute start at a folder, wherever they stand in the row.

    {"image": "0.png", "messages": [{"role": "user", "content": [{"type": "image", "image": "1.png"}]}]}
               └─ folder/0.png                                                             └─ folder/1.png

Texts and the arguments of tools are never taken for paths.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONVERSATIONS = ("messages", "conversations", "conversation", "prompt", "completion")
"""Columns that hold a sample's text; a tokenised one has `input_ids` instead."""
MEDIA = ("image", "images", "video", "videos", "image_url", "video_url", "url", "path")
"""Keys that may hold where an image or a video is."""


def from_folder(row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The row with its media's paths starting at `folder`; texts and the arguments of tools are left alone."""
    changed = {name: _placed(row[name], folder) for name in MEDIA if name in row}
    changed |= {name: [_message(m, folder) for m in row[name]] for name in CONVERSATIONS if _is_list(row.get(name))}
    return {**row, **changed}


def _message(message: Any, folder: Path) -> Any:
    has_content = isinstance(message, Mapping) and "content" in message
    return {**message, "content": _content(message["content"], folder)} if has_content else message


def _content(content: Any, folder: Path) -> Any:
    """A list of parts, or one part alone."""
    return [_part(part, folder) for part in content] if _is_list(content) else _part(content, folder)


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
