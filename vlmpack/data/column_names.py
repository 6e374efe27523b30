"""The argument `columns=`: a mapping, ms-swift's `--columns`, or LLaMA-Factory's `dataset_info.json`.

{"question": "query", "answer": "response"}            column of the data set -> the name that is read
'{"text1": "query", "text2": "response"}'              the same as JSON, as ms-swift's command has it
"data/dataset_info.json"                               its entry of the source: columns, tags, formatting
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from vlmpack.data.foreign import CHAT, SHAPES, ColumnMap, TurnTags
from vlmpack.errors import ConfigError

Columns = Mapping[str, str] | str | os.PathLike[str]
"""Columns of the data set -> the names that are read; the same as JSON; or the path of a `dataset_info.json`."""

_BESIDE = (
    "system",
    "history",
    "input",
    "tools",
    "image",
    "images",
    "video",
    "videos",
    "audio",
    "audios",
    "id",
    "sample_id",
    "labels",
)
TARGETS = (*CHAT, *dict.fromkeys(name for shape in SHAPES for name in shape), *_BESIDE, "ground_truth")
"""Names that a column can be read as."""
_PREFERENCES = ("chosen", "rejected", "rejected_response", "kto_tag", "label", "ranking")


def read_columns(columns: Columns, source: Any) -> ColumnMap:
    """Read `columns=`: a mapping, ms-swift's `--columns` as JSON, or LLaMA-Factory's `dataset_info.json`.

    Args:
        columns: the mapping, its text, or the path of a file.
        source: the data set that is opened: of a `dataset_info.json` its entry is taken.

    Raises:
        ConfigError: it is none of these, a name is none that can be read, or the file does not describe the source.
    """
    if isinstance(columns, str) and columns.lstrip().startswith("{"):
        try:
            columns = json.loads(columns)
        except ValueError as error:
            raise ConfigError(f"columns={columns!r:.80} is no JSON: {error}; write {_EXAMPLE}") from error
    if isinstance(columns, str | os.PathLike):
        return _from_file(Path(columns).expanduser().absolute(), source)
    if not isinstance(columns, Mapping) or not all(isinstance(x, str) for pair in columns.items() for x in pair):
        raise ConfigError(f"columns has to be a mapping of names, got {columns!r:.80}; write {_EXAMPLE}")
    for target in columns.values():
        _check_target(target)
    if double := [name for name in columns.values() if list(columns.values()).count(name) > 1]:
        raise ConfigError(f"columns= reads two columns as {double[0]!r}; keep one of them")
    return ColumnMap(names=dict(columns), required=tuple(columns))


_EXAMPLE = "a column of yours and the name it is read as, such as {'question': 'query', 'answer': 'response'}"


def _check_target(target: str) -> None:
    if target in TARGETS:
        return
    if target in _PREFERENCES:
        raise ConfigError(
            f"columns= reads a column as {target!r}: preferences are not trained on here; leave it out, and read the "
            "chosen answers: {'chosen': 'completion'} (pairs: PackedDPOTrainer of vlmpack.trainer.trl)"
        )
    near = get_close_matches(target, TARGETS, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ConfigError(f"columns= reads a column as {target!r}, which nothing reads{hint}; use {', '.join(TARGETS)}")


def _from_file(path: Path, source: Any) -> ColumnMap:
    """The entry of a `dataset_info.json` that names the source."""
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"columns={str(path)!r} cannot be read ({error}); give a dataset_info.json, or {_EXAMPLE}"
        ) from error
    if not isinstance(described, dict) or not all(isinstance(entry, dict) for entry in described.values()):
        raise ConfigError(f"{path} is no dataset_info.json of LLaMA-Factory: a mapping of names to descriptions")
    matches = {name: entry for name, entry in described.items() if _describes(entry, source, path.parent)}
    if not matches:
        raise ConfigError(f"{path} describes {', '.join(described) or 'nothing'}, and none of them is {source}")
    maps = [replace(_described(name, entry), folder=path.parent) for name, entry in matches.items()]
    if any(other != maps[0] for other in maps[1:]):
        raise ConfigError(f"{path} describes {source} as {', '.join(matches)}, each in another way; keep one of them")
    return maps[0]


def _describes(entry: Mapping[str, Any], source: Any, folder: Path) -> bool:
    names = [entry[key] for key in ("hf_hub_url", "file_name") if isinstance(entry.get(key), str)]
    if not isinstance(source, str | os.PathLike) or not names:
        return False
    return str(source) in names or Path(source).expanduser().absolute().resolve() == (folder / names[-1]).resolve()


_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
"""LLaMA-Factory's name of a column, and the name of its default in the data set."""
_TAGS = {
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call", "function_call"),
    "system_tag": ("system", "system"),
}
"""Tag -> its default, and the role that it stands for."""


def _described(name: str, entry: Mapping[str, Any]) -> ColumnMap:
    """One entry, as LLaMA-Factory's data/README.md explains it."""
    columns, tags = dict(entry.get("columns") or {}), dict(entry.get("tags") or {})
    if entry.get("ranking") or {"chosen", "rejected", "kto_tag"} & columns.keys():
        raise ConfigError(
            f"the data set {name!r} has preferences (ranking, chosen, rejected or kto_tag), which are not trained on "
            "here; describe its chosen answers as response"
        )
    if unknown := [key for key in columns if key not in (*_ALPACA, *_BESIDE, "messages")]:
        raise ConfigError(
            f"the data set {name!r} has columns {', '.join(unknown)}, which nothing reads; leave them out"
        )
    formatting = entry.get("formatting", "alpaca")
    if formatting == "alpaca":
        if columns and "response" not in columns:
            raise ConfigError(
                f"the data set {name!r} has no response, as those for pre-training: answers are trained on here"
            )
        names = {theirs: _ALPACA.get(ours, ours) for ours, theirs in (columns or _ALPACA).items() if theirs}
        return ColumnMap(names=names, required=tuple(names) if columns else ())
    if formatting not in ("sharegpt", "openai"):
        raise ConfigError(f"the data set {name!r} has formatting {formatting!r}; alpaca, sharegpt and openai are read")
    columns = columns or {"messages": "conversations"}
    roles = {tags.get(tag, default): role for tag, (default, role) in _TAGS.items()}
    read = TurnTags(role=tags.get("role_tag", "from"), content=tags.get("content_tag", "value"), roles=roles)
    names = {theirs: ours for ours, theirs in columns.items() if theirs}
    return ColumnMap(names=names, tags=read, required=tuple(names))
