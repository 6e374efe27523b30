"""Rows of other libraries as samples: their columns renamed, their turns and pairs written as messages.

    Alpaca            {"instruction", "input", "output", "history"}         ─┐
    ms-swift          {"query", "response", "history"}                       ├─▶ {"messages": [...], ...}
                      {"conversation": [{"human", "assistant"}, ...]}        │
    captions          {"response"} or {"txt"}, beside an image              ─┘

The argument `columns=` is a mapping, ms-swift's `--columns`, or LLaMA-Factory's `dataset_info.json`:

    {"question": "query", "answer": "response"}            column of the data set -> the name that is read
    '{"text1": "query", "text2": "response"}'              the same as JSON, as ms-swift's command has it
    "data/dataset_info.json"                               its entry of the source: columns, tags, formatting
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, final

from vlmpack.data.tool_calls import CALLING, calls_in
from vlmpack.errors import ConfigError

CHAT = ("messages", "conversations", "conversation", "texts", "prompt", "completion", "input_ids")
"""Columns of a sample's text, as the collator reads them."""
SHAPES = (("query", "response"), ("instruction", "output"), ("response",), ("txt",))
"""Columns of a question and its answer, or of a text for an image, that are written as messages."""
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_BESIDE = ("system", "history", "input", "tools", *MEDIA, "id", "sample_id", "labels")
TARGETS = (*CHAT, *dict.fromkeys(name for shape in SHAPES for name in shape), *_BESIDE, "ground_truth")
"""Names that a column can be read as."""
_PREFERENCES = ("chosen", "rejected", "rejected_response", "kto_tag", "label", "ranking")


@final
@dataclass(frozen=True, kw_only=True)
class TurnTags:
    """Keys and roles of the turns in a foreign `messages` column."""

    role: str = "from"
    """Key of a turn's role."""
    content: str = "value"
    """Key of its text."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Roles as the data set names them -> the roles of messages."""


@final
@dataclass(frozen=True, kw_only=True)
class ColumnMap:
    """Foreign columns as those that are read."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Column of the data set -> the name that is read."""
    tags: TurnTags | None = None
    """Of the turns in `messages`; None: they have `role` and `content`, or `from` and `value`."""
    required: tuple[str, ...] = ()
    """Columns that have to be there."""
    folder: Path | None = None
    """Where paths of media start; None: where the source says."""

    def apply(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row with its columns renamed, and its turns or pairs as messages.

        Raises:
            ValueError: two columns have one name, or turns or pairs are none.
        """
        renamed: dict[str, Any] = {}
        if "chosen" in self.names:  # the answers that are trained on: the others are left out on purpose
            row = {name: value for name, value in row.items() if not name.startswith("rejected")}
        for name, value in row.items():
            target = self.names.get(name, name)
            if target in renamed and value is not None and renamed[target] is not None:
                raise ValueError(f"has two columns that would be read as {target!r}; leave {name!r} out, or rename it")
            if renamed.get(target) is None:
                renamed[target] = value
        if self.tags is not None and renamed.get("messages") is not None:
            renamed["messages"] = [_tagged(turn, self.tags) for turn in renamed["messages"]]
        return _as_messages(renamed)


def _tagged(turn: Any, tags: TurnTags) -> dict[str, Any]:
    """A turn as a message; LLaMA-Factory's function calls are JSON in its text."""
    if not isinstance(turn, Mapping) or not {tags.role, tags.content} <= turn.keys():
        raise ValueError(f"has a turn without {tags.role!r} and {tags.content!r}: {turn!r:.60}; correct the tags")
    role = turn[tags.role]
    if tags.roles and role not in tags.roles:
        raise ValueError(f"has a turn of the role {role!r}, which the tags do not name ({', '.join(tags.roles)})")
    message = {key: value for key, value in turn.items() if key not in (tags.role, tags.content)}
    message |= {"role": tags.roles.get(role, role), "content": turn[tags.content]}
    if message["role"] not in CALLING:
        return message
    try:
        return {**message, "role": "assistant", "content": "", "tool_calls": calls_in(message["content"])}
    except ValueError as error:
        raise ValueError(f"has {error}") from error


def _as_messages(row: dict[str, Any]) -> dict[str, Any]:
    """Write a question and its answer, those before them, or ms-swift's pairs as `messages`; another row is returned.

    Raises:
        ValueError: a text is none, or the history is no list of pairs.
    """
    pairs = row.get("conversation")
    if isinstance(pairs, Sequence) and pairs and all(
        isinstance(pair, Mapping) and {"human", "assistant"} <= pair.keys() for pair in pairs
    ):  # fmt: skip
        rest = {name: value for name, value in row.items() if name != "conversation"}
        return {**rest, "messages": _turns([(pair.get("human"), pair.get("assistant")) for pair in pairs])}
    present = {name for name, value in row.items() if value is not None}
    shape = next((shape for shape in SHAPES if present.issuperset(shape)), None)
    if shape is None or present & set(CHAT):
        return row
    rest = {name: value for name, value in row.items() if name not in (*shape, "input", "history")}
    answer = row[shape[-1]]
    if len(shape) == 1:
        return {**rest, "messages": [*_media_turn(rest), {"role": "assistant", "content": _text(answer, shape[-1])}]}
    question = _text(row[shape[0]], shape[0])
    if more := row.get("input"):
        question = f"{question}\n{_text(more, 'input')}" if question else _text(more, "input")
    history = row.get("history") or []
    if not isinstance(history, Sequence) or isinstance(history, str) or not all(map(_is_pair, history)):
        raise ValueError(f"has a history that is no list of [question, answer]: {history!r:.60}")
    return {**rest, "messages": _turns([*map(tuple, history), (question, answer)])}


def _turns(pairs: Sequence[tuple[Any, Any]]) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": r, "content": _text(text, r)} for pair in pairs for r, text in zip(roles, pair, strict=True)]


def _media_turn(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A user who shows the media of the row and says nothing; a row without any has no such turn."""
    parts = []
    for kind in ("image", "video", "audio"):
        media = next((row[name] for name in (kind, f"{kind}s") if row.get(name) is not None), [])
        is_list = isinstance(media, list | tuple) and not (media and isinstance(media[0], float))  # of one audio
        parts += [{"type": kind}] * (len(media) if is_list else 1)
    return [{"role": "user", "content": parts}] if parts else []


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"has no text for {name}, but {value!r:.60}; write a text, or leave the sample out")
    return value


def _is_pair(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2


# ---------------------------------------------------------------------- columns=

Columns = Mapping[str, str] | str | os.PathLike[str]
"""Columns of the data set -> the names that are read; the same as JSON; or the path of a `dataset_info.json`."""

_EXAMPLE = "a column of yours and the name it is read as, such as {'question': 'query', 'answer': 'response'}"


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
        if target in _PREFERENCES:
            raise ConfigError(
                f"columns= reads a column as {target!r}: preferences are not trained on here; leave it out, and read "
                "the chosen answers: {'chosen': 'completion'} (pairs: PackedDPOTrainer of vlmpack.trainer.trl)"
            )
        if target not in TARGETS:
            near = get_close_matches(target, TARGETS, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ConfigError(
                f"columns= reads a column as {target!r}, which nothing reads{hint}; use {', '.join(TARGETS)}"
            )
    if double := [name for name in columns.values() if list(columns.values()).count(name) > 1]:
        raise ConfigError(f"columns= reads two columns as {double[0]!r}; keep one of them")
    return ColumnMap(names=dict(columns), required=tuple(columns))


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
    formatting = entry.get("formatting", "alpaca")
    unknown = [key for key in columns if key not in (*_ALPACA, *_BESIDE, "messages")]
    faults = {
        "preferences (ranking, chosen, rejected or kto_tag), which are not trained on here; describe its chosen "
        "answers as response": entry.get("ranking") or {"chosen", "rejected", "kto_tag"} & columns.keys(),
        f"columns {', '.join(unknown)}, which nothing reads; leave them out": unknown,
        f"formatting {formatting!r}; alpaca, sharegpt and openai are read": formatting
        not in ("alpaca", "sharegpt", "openai"),
        "no response, as those for pre-training: answers are trained on here": formatting == "alpaca"
        and columns
        and "response" not in columns,
    }
    if fault := next((fault for fault, is_so in faults.items() if is_so), None):
        raise ConfigError(f"the data set {name!r} has {fault}")
    if formatting == "alpaca":
        names = {theirs: _ALPACA.get(ours, ours) for ours, theirs in (columns or _ALPACA).items() if theirs}
        return ColumnMap(names=names, required=tuple(names) if columns else ())
    columns = columns or {"messages": "conversations"}
    roles = {tags.get(tag, default): role for tag, (default, role) in _TAGS.items()}
    read = TurnTags(role=tags.get("role_tag", "from"), content=tags.get("content_tag", "value"), roles=roles)
    names = {theirs: ours for ours, theirs in columns.items() if theirs}
    return ColumnMap(names=names, tags=read, required=tuple(names))
