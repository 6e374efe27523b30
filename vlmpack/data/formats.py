"""Convert rows in other libraries' formats to `messages`, with media inside the messages or in media columns.

    Alpaca            {"instruction", "input", "output", "history"}          ─┐
    ms-swift          {"query", "response", "history"}                        │
                      {"conversation": [{"human", "assistant"}, ...]}         │
    Cauldron          {"texts": [{"user", "assistant"}, ...]}                 │
    VQA sets          {"question", "answer" or "answers"}                     ├─▶ {"messages": [...], ...}
    captions          {"response"} or {"txt"}, beside an image                │
    CORD              {"image", "ground_truth"}                               │
    MiniCPM-V         {"image": {"<image_00>": path}, "conversations"}        │
    LLaMA-Factory v1  {"content": [{"type": "text", "value"}], "loss_weight"} │
    Anthropic         {"content": [{"type": "tool_use"}, ...]}               ─┘

Each format has one function here. It takes a row and returns it with `messages` if the row has that format. `READERS`
lists these functions. Datasets and collators only call `as_messages`; they know nothing else about other libraries.

Tools and tool calls may be JSON text: `{"from": "function_call", "value": ...}` (LLaMA-Factory), `{"role":
"tool_call"}` (ms-swift), `{"function": {"arguments": ...}}` (OpenAI), and the column `tools` of all of them.

The argument `columns=` takes a mapping, ms-swift's `--columns`, or LLaMA-Factory's `dataset_info.json`:

    {"question": "query", "answer": "response"}            column of the dataset -> the name that vlmpack reads
    '{"text1": "query", "text2": "response"}'              the same as JSON, as in ms-swift's command line
    "data/dataset_info.json"                               the source's entry in it: columns, tags, formatting

`branch_turns` makes one sample of each answer in a conversation:

    record     {"images": [...], "messages": [user Q0, assistant A0, user Q1, assistant A1], "id": "r"}
    turns      {..., "branch_turn": 0, "id": "r/0"}      {..., "branch_turn": 1, "id": "r/1"}     Q0 A0      Q1 A1
    answers    {..., "answer_turn": 0, "id": "r/0"}      {..., "answer_turn": 1, "id": "r/1"}     Q0 A0      Q0 A0 Q1 A1

Each sample is the whole record, with its images and the number of one answer; nothing is copied. For "turns", the
collator reads that question and its answer, so answers do not see each other. For "answers", it reads the conversation
up to that answer and trains on that answer alone. The template then renders earlier turns as it does at inference, and
the last answer with its reasoning, which a template may drop once another turn follows.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeGuard

import numpy as np

from vlmpack.data.cord import to_conversation
from vlmpack.errors import ConfigError, SampleError

Kind = Literal["image", "video", "audio"]
KINDS: tuple[Kind, ...] = ("image", "video", "audio")
"""The kinds of media."""
TURNS = ("messages", "conversations", "conversation", "prompt", "completion")
"""Columns that hold turns."""
CHAT = (*TURNS, "input_ids")
"""Columns with a sample's text that the collator reads."""
SHAPES = (
    *(("query", "response"), ("instruction", "output"), ("question", "multiple_choice_answer")),
    *(("question", "answer"), ("question", "answers"), ("response",), ("txt",)),
)
"""Columns of a question and its answer, or of a text for an image, that are converted to messages."""
PAIRS = {"conversation": ("human", "assistant"), "texts": ("user", "assistant")}
"""Columns of question–answer pairs, with the pair's keys: ms-swift; The Cauldron and FineVision."""
MEDIA = tuple(name for kind in KINDS for name in (kind, f"{kind}s"))
SOURCES = (*MEDIA, "image_url", "video_url", "audio_url", "url", "path")
"""Keys of a row or of a part that may hold a medium's path, URL or data."""
CHANNEL_COLUMN = "channel"
"""Column that names a sample's dataset, under which its loss is logged. ms-swift uses the same name."""
BRANCH_COLUMN = "branch_turn"
"""Column with the number of a sample's question in its conversation."""
ANSWER_COLUMN = "answer_turn"
"""Column with the number of the answer that ends a sample."""
FACTORS = ("weight", "loss_scale", "loss_weight")
"""Keys for the weight of an answer, or of a text in it: OpenAI, ms-swift and LLaMA-Factory."""
FLAGS = (*FACTORS, "loss", "loss_mask", "train", "training", "trainable")
"""The weight keys, and keys that turn training on or off: ms-swift, axolotl and Tinker."""
CALLING = ("function_call", "tool_call")
"""Roles of assistant turns whose text is the JSON of tool calls: LLaMA-Factory and ms-swift."""
_ANSWERING = ("assistant", "gpt", *CALLING)
"""Roles whose turns are not searched for media."""
_BESIDE = ("system", "history", "input", "tools", *MEDIA, "id", "sample_id", "labels")
TARGETS = (*CHAT, "texts", *dict.fromkeys(name for shape in SHAPES for name in shape), *_BESIDE, "ground_truth")
"""Names that `columns=` can map a column to."""
ENDS = {
    "image": (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm"),
    "video": (".mp4", ".m4v", ".avi", ".mkv", ".mov", ".webm"),
    "audio": (".wav", ".mp3", ".flac", ".ogg", ".m4a", ".opus"),
}
"""File name extensions, by kind of medium."""


def is_absent(value: Any) -> bool:
    """Return whether a value is None or a struct of Nones: Arrow gives every struct in a column the keys of all."""
    return value is None or (isinstance(value, Mapping) and all(map(is_absent, value.values())))


def is_empty(value: Any) -> bool:
    """Return whether a value is absent, or an empty text or list, such as `[{"bytes": None, "path": None}]`."""
    if isinstance(value, str):
        return not value
    return all(map(is_empty, value)) if isinstance(value, list | tuple) else is_absent(value)


def bad_row(fault: str) -> SampleError:
    """Return the refusal of a sample that contradicts itself, or has another form than its format."""
    return SampleError(fault, "bad_row")


def id_column(sample: Mapping[str, Any]) -> str | None:
    """Return the column that holds a sample's id, `id` or `sample_id`; None: it has none."""
    return next((name for name in ("id", "sample_id") if sample.get(name) is not None), None)


def sample_id_of(feature: Any) -> int | str | None:
    """Return the id in a sample's columns, or None if it has none."""
    if not isinstance(feature, Mapping) or (column := id_column(feature)) is None:
        return None
    value = feature[column]
    return value if isinstance(value, int | str) else str(value)


def channel_of(feature: Any) -> str | None:
    """Return the name of a sample's dataset from its column `channel`, or None if it has none."""
    channel = feature.get(CHANNEL_COLUMN) if isinstance(feature, Mapping) else None
    return channel if isinstance(channel, str) else None


def as_messages(row: Mapping[str, Any], *, inline: bool = True) -> dict[str, Any]:
    """Convert a row in any format above to `messages`. Copy a row in any other format unchanged.

    Args:
        row: the columns of a sample.
        inline: read `<img>dog.jpg</img>` in a user's text as an image; False: as text.

    Raises:
        SampleError: the row has a format above and contradicts itself, or the ground truth of a receipt cannot be read.
    """
    written = dict(row.items())
    for read in (*READERS, *((_inline_media,) if inline else ()), _from_data_path):
        written = read(written)
    return written


# ---------------------------------------------------------------------- a question and its answer in columns


def _pairs(row: dict[str, Any]) -> dict[str, Any]:
    """Convert a list of question–answer pairs."""
    for name, keys in PAIRS.items():
        pairs = row.get(name)
        if not _is_list(pairs) or not pairs or not isinstance(pairs[0], Mapping) or not {*keys} <= pairs[0].keys():
            continue  # the column may mean something else: `texts` may hold notes
        if more := next((other for other in TURNS if other != name and row.get(other) is not None), None):
            raise bad_row(f"it has {name} and {more}, of which only one would be read; keep one")
        messages = []
        for at, pair in enumerate(pairs):
            if not isinstance(pair, Mapping) or not all(isinstance(pair.get(key), str) for key in keys):
                raise bad_row(f"it has {name}[{at}], which needs a text for {' and '.join(keys)}: {pair!r:.60}")
            rest = {key: value for key, value in pair.items() if key not in (*keys, "source")}
            question, answer = ({"role": role, "content": pair[key]} for role, key in zip(_ROLES, keys, strict=True))
            messages += [question, {**rest, **answer}]
        return {**{other: value for other, value in row.items() if other != name}, "messages": messages}
    return row


def _questions(row: dict[str, Any]) -> dict[str, Any]:
    """Convert a question, its answer and the history, or a caption, which answers a user who shows the row's media."""
    present = {name for name, value in row.items() if value is not None}
    shape = next((shape for shape in SHAPES if present.issuperset(shape)), None)
    if shape is None or present & set(CHAT):
        return row
    rest = {name: value for name, value in row.items() if name not in (*shape, "input", "history")}
    answer = _answer(row[shape[-1]], shape[-1])
    if len(shape) == 1:
        if unread := next((name for name in ("input", "history") if not is_empty(row.get(name))), None):
            fault = f"it has {unread} and {shape[0]}, but no question that they belong to"
            raise bad_row(f"{fault}; name it: columns={{{unread!r}: 'query'}}, or remove {unread}")
        return {**rest, "messages": [*_media_turn(rest), {"role": "assistant", "content": answer}]}
    question = _text(row[shape[0]], shape[0])
    if choices := next((name for name in ("choices", "options") if row.get(name)), None):
        raise bad_row(f"it has {choices}, which its question does not show; write them, and the answer, as texts")
    if not is_empty(more := row.get("input")):
        question = f"{question}\n{_text(more, 'input')}" if question else _text(more, "input")
    history = row.get("history") or []
    if not _is_list(history) or not all(_is_list(pair) and len(pair) == 2 for pair in history):
        raise bad_row(f"it has a history that is no list of [question, answer]: {history!r:.60}")
    pairs = ((role, text) for pair in (*history, (question, answer)) for role, text in zip(_ROLES, pair, strict=True))
    return {**rest, "messages": [{"role": role, "content": _text(text, role)} for role, text in pairs]}


_ROLES = ("user", "assistant")


def _receipts(row: dict[str, Any]) -> dict[str, Any]:
    """Convert an image and its ground truth, as in CORD v2."""
    if not {"image", "ground_truth"} <= row.keys() or any(row.get(name) is not None for name in CHAT):
        return row
    return {**{name: row[name] for name in ("id", "sample_id") if name in row}, **to_conversation(row)}


def _media_turn(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a user turn that shows the row's media without any text, or no turn if the row has no media."""
    parts = []
    for kind in KINDS:
        media = next((row[name] for name in (kind, f"{kind}s") if row.get(name) is not None), [])
        parts += [{"type": kind}] * (len(media) if _is_many(media) else 1)
    return [{"role": "user", "content": parts}] if parts else []


def _is_many(media: Any) -> bool:
    """Return whether a value is a list of media, rather than one medium, such as an audio as a list of floats."""
    return _is_list(media) and not (media and isinstance(media[0], float))


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise bad_row(f"it has no text for {name}, but {value!r:.60}; write a text, or leave the sample out")
    return value


def _answer(value: Any, name: str) -> str:
    """Return a text, or a number as text. Of several answers, return the most frequent one (the first in a tie)."""
    if _is_list(value) and value:
        texts = [_answer(item.get("answer") if isinstance(item, Mapping) else item, name) for item in value]
        return Counter(texts).most_common(1)[0][0]
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and value == value
    return str(value) if is_number else _text(value, name)


# ---------------------------------------------------------------------- media inside texts

_NUMBERED = re.compile(r"<image(_\d+)?>")
_INLINE = re.compile(
    r"<(?P<tag>img|image|video|audio)>\s*(?P<source>(?:data:|file://)[^<>]+|[^<>\n]+\.(?:"
    + "|".join(end[1:] for ends in ENDS.values() for end in ends)
    + r"))\s*</(?P=tag)>",
    re.IGNORECASE,
)


def _numbered_images(row: dict[str, Any]) -> dict[str, Any]:
    """Convert MiniCPM-V's numbered images, `{"<image_00>": path, ...}`, which the text places by their names."""
    images = row.get("image")
    if not isinstance(images, Mapping) or not images or not all(_NUMBERED.fullmatch(str(name)) for name in images):
        return row
    empty = {name for name, image in images.items() if is_empty(image)}  # Arrow adds the keys of all rows
    images = {name: image for name, image in images.items() if name not in empty}
    placed = set[str]()

    def medium(match: re.Match[str]) -> dict[str, Any] | None:
        placed.add(match[0])
        if match[0] in empty:
            raise bad_row(
                f"its text places {match[0]}, but that image is None or empty; give it, or take the marker out"
            )
        return _medium("image", images[match[0]]) if match[0] in images else None

    rest = {name: value for name, value in row.items() if name != "image"}
    row = _with_media_of_texts(rest, "<image", _NUMBERED, medium)
    if unused := sorted(images.keys() - placed):
        raise bad_row(f"it has images {', '.join(unused)}, which no user's text places; write the marker there")
    return row


def _inline_media(row: dict[str, Any]) -> dict[str, Any]:
    """Convert ms-swift's inline media: paths inside users' texts, `<img>dog.jpg</img>`."""

    def medium(match: re.Match[str]) -> dict[str, Any]:
        return _medium(match["tag"].lower().replace("img", "image"), match["source"])

    return _with_media_of_texts(row, "</", _INLINE, medium)


def _with_media_of_texts(
    row: dict[str, Any],
    sign: str,
    pattern: re.Pattern[str],
    medium: Callable[[re.Match[str]], dict[str, Any] | None],
) -> dict[str, Any]:
    """Split texts that are not the assistant's at matches of which `medium` makes a part; None: the match is text.

    A text without the `sign` has no match, which is faster to see.
    """

    def holds_media(turn: Any) -> bool:
        text = turn.get("content", turn.get("value")) if isinstance(turn, Mapping) else None
        if not isinstance(text, str) or sign not in text or turn.get("role", turn.get("from")) in _ANSWERING:
            return False
        return pattern.search(text) is not None

    def split(turn: Any) -> list[Any]:
        message, at, parts = _renamed(turn), 0, list[dict[str, Any]]()
        text = message["content"]
        for match in pattern.finditer(text):
            if part := medium(match):
                before = [{"type": "text", "text": text[at : match.start()]}] if at < match.start() else []
                parts, at = [*parts, *before, part], match.end()
        rest = [{"type": "text", "text": text[at:]}] if at < len(text) else []
        return [{**message, "content": [*parts, *rest] if parts else text}]

    return _with_turns(row, holds_media, split)


def _from_data_path(row: dict[str, Any]) -> dict[str, Any]:
    """Apply Qwen's `data_path`, the folder of a sample's media."""
    if not isinstance(folder := row.get("data_path"), str):
        return row
    return from_folder({name: value for name, value in row.items() if name != "data_path"}, Path(folder))


# ---------------------------------------------------------------------- parts of messages

_BOOKKEEPING = ("cache_control", "signature", "citations", "annotations")
"""Keys beside a part that a service uses for billing, signing or citing; no model sees them."""
_KINDS = {f"{kind}{end}": kind for kind in ENDS for end in ("", "_url")}
_SPOKEN = ("tool_use", "tool_result", "tool_call", "thinking", "reasoning", "output_text", "input_audio")
"""Part types of other libraries."""
_FOREIGN = ("value", "base64", "source", *_BOOKKEEPING)
"""Keys of other libraries' parts."""


def _parts(row: dict[str, Any]) -> dict[str, Any]:
    """Convert the parts of LLaMA-Factory v1, Anthropic, OpenAI and transformers."""
    return _with_turns(row, _is_foreign, _turn)


def _with_turns(
    row: dict[str, Any], is_meant: Callable[[Any], bool], read: Callable[[Any], list[Any]]
) -> dict[str, Any]:
    """Replace the turns that `is_meant` selects by the messages that `read` makes of them.

    The other turns in the same list get the keys `role` and `content` too.
    """
    for name in TURNS:
        turns = row.get(name)
        if _is_list(turns) and any(map(is_meant, turns)):
            written = (message for turn in turns for message in (read(turn) if is_meant(turn) else (turn,)))
            row = {**row, name: [*map(_renamed, written)]}
    return row


def _renamed(turn: Any) -> Any:
    if not isinstance(turn, Mapping) or "from" not in turn:
        return turn
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return {"role": turn["from"], "content": turn["value"], **rest}


def _turn(turn: Any) -> list[Any]:
    """Convert the parts of a turn to messages. Tool results become separate messages before it."""
    said, results, calls, thoughts = list[Any](), list[Any](), list[Any](), list[str]()
    for part in _parts_of(turn):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if (calls and kind not in ("tool_use", "tool_call")) or (said and kind == "tool_result"):
            raise bad_row(f"it has a part of type {kind!r} where its place among others would be lost; reorder them")
        if kind == "tool_result":
            results.append({"role": "tool", "tool_call_id": part.get("tool_use_id"), **_result(part)})
        elif kind == "tool_use":
            function = {"name": part.get("name"), "arguments": part.get("input") or {}}
            calls.append({"id": part.get("id"), "type": "function", "function": function})
        elif kind == "tool_call":
            calls += calls_in(_text(part.get("value"), "a part of type tool_call"))
        elif kind in ("thinking", "reasoning"):
            thoughts.append(_text(part.get("value") or part.get(kind) or part.get("text"), f"a part of type {kind}"))
        else:
            said.append(_part(part) if isinstance(part, Mapping) else part)
    message = {key: value for key, value in turn.items() if value is not None and key != "loss_weight"}
    if turn.get("loss_weight") is not None:
        message["weight"] = turn["loss_weight"]
    more = {"tool_calls": calls} if calls else {}
    more |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    if clash := next((key for key in more if message.get(key)), None):
        raise bad_row(f"it has {clash} beside the message and in its parts; keep one of them")
    return [*results, *([{**message, "content": said or "", **more}] if said or more else [])]


def _parts_of(turn: Any) -> Sequence[Any]:
    content = turn.get("content") if isinstance(turn, Mapping) else None
    return [content] if isinstance(content, Mapping) else content if _is_list(content) else ()


def _is_foreign(turn: Any) -> bool:
    parts = (part for part in _parts_of(turn) if isinstance(part, Mapping))
    return any(part.get("type") in _SPOKEN or any(part.get(key) is not None for key in _FOREIGN) for part in parts)


def _result(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool's result. Keep `is_error`, so that the template has to write it."""
    content = part.get("content")
    parts = [_part(item) if isinstance(item, Mapping) else item for item in content] if _is_list(content) else content
    return {"content": "" if parts is None else parts, **({"is_error": True} if part.get("is_error") else {})}


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a text or media part."""
    kind = str(part.get("type"))
    medium = "audio" if kind == "input_audio" else _KINDS.get(kind)
    source = _source(part, medium) if medium else None
    read = (*_BOOKKEEPING, *(("input_audio", "source", "base64", "value") if source is not None else ()))
    rest = {key: value for key, value in part.items() if key not in read}
    if medium and source is not None:
        return {**rest, **_medium(medium, source)}
    if kind == "text" and rest.get("value") is not None:
        rest["text"] = rest.pop("value")
    return {**rest, "type": "text"} if kind == "output_text" else rest


def _source(part: Mapping[str, Any], medium: str) -> Any:
    """Return the path, URL or data URI of a medium; None: another key of the part holds it, or none."""
    held = part.get("input_audio", part.get("source"))
    if not isinstance(held, Mapping):
        return f"data:{medium};base64,{part['base64']}" if part.get("base64") is not None else part.get("value")
    if held.get("data") is None:
        return held.get("url")
    return f"data:{held.get('media_type') or medium + '/' + str(held.get('format'))};base64,{held['data']}"


def _medium(kind: str, source: Any) -> dict[str, Any]:
    return {"type": kind, kind: source}


def _beside(row: dict[str, Any]) -> dict[str, Any]:
    """Convert Anthropic's `system` in parts, and its tools."""
    system = row.get("system")
    if _is_list(system) and all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in system):
        row = {**row, "system": "\n".join(part["text"] for part in system)}
    tools = row.get("tools")
    return {**row, "tools": [*map(_tool, tools)]} if _is_list(tools) else row


def _tool(tool: Any) -> Any:
    if not isinstance(tool, Mapping) or tool.get("input_schema") is None:
        return tool
    rest = {key: value for key, value in tool.items() if key not in ("input_schema", "type", *_BOOKKEEPING)}
    return {"type": "function", "function": {**rest, "parameters": tool["input_schema"]}}


READERS: Sequence[Callable[[dict[str, Any]], dict[str, Any]]] = (
    _pairs,
    _questions,
    _receipts,
    _numbered_images,
    _parts,
    _beside,
)
"""The readers, in the order in which they are applied. Several may apply to one row."""


# ---------------------------------------------------------------------- paths of media


def from_folder(row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Resolve the relative media paths in a row against `folder`. Texts and tool arguments stay unchanged."""
    changed = {name: _placed(row[name], folder) for name in SOURCES if name in row}
    changed |= {name: [_placed_in(turn, folder) for turn in row[name]] for name in TURNS if _is_list(row.get(name))}
    return {**row, **changed}


def _placed_in(turn: Any, folder: Path) -> Any:
    def placed(part: Any) -> Any:
        return _placed(part, folder) if isinstance(part, Mapping) and part.get("type") != "text" else part

    parts = _parts_of(turn)
    return {**turn, "content": [*map(placed, parts)]} if parts else turn


def _placed(media: Any, folder: Path) -> Any:
    """Resolve a path, or paths in lists and under the keys of `SOURCES`, against `folder`."""
    if isinstance(media, str):
        if "://" in media[:32] or media.startswith("data:") or not media:
            return media
        return str(folder / (Path(media).expanduser() if media.startswith("~/") else media))
    if isinstance(media, Mapping):
        return {key: _placed(value, folder) if key in SOURCES else value for key, value in media.items()}
    return [_placed(item, folder) for item in media] if _is_many(media) else media


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple)


# ---------------------------------------------------------------------- columns=


@dataclass(frozen=True, kw_only=True)
class ColumnMap:
    """How the columns of a dataset map to the names that vlmpack reads."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Column of the dataset -> the name that vlmpack reads."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """The dataset's role names -> the roles of messages; {}: turns have `role` and `content`, or `from` and `value`."""
    role_key: str = "from"
    """Key of a turn's role in the dataset, if there are `roles`."""
    content_key: str = "value"
    """Key of a turn's text, if there are `roles`."""
    required: tuple[str, ...] = ()
    """Columns that must exist."""
    folder: Path | None = None
    """Folder where relative media paths start; None: the source decides."""

    def apply(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row with renamed columns, and its turns or pairs as messages.

        Raises:
            SampleError: two columns map to one name, or turns or pairs are malformed.
        """
        renamed: dict[str, Any] = {}
        if "chosen" in self.names:  # only chosen answers are trained on; rejected ones are left out on purpose
            row = {name: value for name, value in row.items() if not name.startswith("rejected")}
        for name, value in row.items():
            target = self.names.get(name, name)
            if target in renamed and value is not None and renamed[target] is not None:
                raise bad_row(f"it has two columns that would be read as {target!r}; leave {name!r} out, or rename it")
            if renamed.get(target) is None:
                renamed[target] = value
        if self.roles and renamed.get("messages") is not None:
            renamed["messages"] = [*map(self._message, renamed["messages"])]
        return as_messages(renamed)

    def _message(self, turn: Any) -> dict[str, Any]:
        keys = (self.role_key, self.content_key)
        if not isinstance(turn, Mapping) or not {*keys} <= turn.keys():
            raise bad_row(f"it has a turn without {keys[0]!r} and {keys[1]!r}: {turn!r:.60}; correct the tags")
        role, content = (turn[key] for key in keys)
        if role not in self.roles:
            raise bad_row(f"it has a turn of the role {role!r}, which the tags do not name ({', '.join(self.roles)})")
        rest = {key: value for key, value in turn.items() if key not in keys}
        return {**rest, "role": self.roles[role], "content": content}


Columns = Mapping[str, str] | str | os.PathLike[str]
"""A mapping from columns of the dataset to names that vlmpack reads, its JSON, or a `dataset_info.json` path."""

INFO = "dataset_info.json"
"""File name of LLaMA-Factory's dataset descriptions; `datasets` uses the same name for another file."""
_WHERE = ("file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
"""Keys of a description that say where the data is."""
_EXAMPLE = "a column of yours and the name it is read as, such as {'question': 'query', 'answer': 'response'}"


def read_columns(columns: Columns, source: Any) -> ColumnMap:
    """Read `columns=`: a mapping, ms-swift's `--columns` as JSON, or LLaMA-Factory's `dataset_info.json`.

    Args:
        columns: the mapping, its JSON text, or the path of a file.
        source: the dataset to open; its entry is looked up in a `dataset_info.json`.

    Raises:
        ConfigError: it is none of these, a target name is unknown, or the file does not describe the source.
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
        if target not in TARGETS:
            near = get_close_matches(target, TARGETS, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            fault = f"columns= reads a column as {target!r}, which nothing reads{hint}"
            raise ConfigError(f"{fault}; use {', '.join(TARGETS)} (for preferences: PackedDPOTrainer)")
    return ColumnMap(names=dict(columns), required=tuple(columns))


def _from_file(path: Path, source: Any) -> ColumnMap:
    """Return the entry of a `dataset_info.json` that names the source."""
    described = _descriptions(path)
    if described is None:
        raise ConfigError(f"{path} is no {INFO} of LLaMA-Factory, which maps names to descriptions of datasets")
    matches = {name: entry for name, entry in described.items() if _describes(entry, source, path.parent)}
    if not matches:
        raise ConfigError(f"{path} describes {', '.join(described) or 'nothing'}, and none of them is {source}")
    maps = [_described(name, entry, path.parent) for name, entry in matches.items()]
    if any(other != maps[0] for other in maps[1:]):
        raise ConfigError(f"{path} describes {source} as {', '.join(matches)}, in different ways; keep one of them")
    return maps[0]


def _descriptions(path: Path) -> Mapping[str, Mapping[str, Any]] | None:
    """Read the datasets that a `dataset_info.json` describes, by name. None: the file is something else.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read ({error}); give a {INFO}, or {_EXAMPLE}") from error
    is_named = isinstance(described, dict) and all(isinstance(entry, dict) for entry in described.values())
    return described if is_named and any(entry.keys() & _WHERE for entry in described.values()) else None


@dataclass(frozen=True, kw_only=True)
class Described:
    """A dataset as described in a `dataset_info.json`."""

    source: str
    """The dataset's file or folder, or its hub id."""
    columns: ColumnMap
    """How its columns map to the names that vlmpack reads."""
    split: str | None
    """Its split on the hub; None: not given."""


def described_in(source: Any) -> Described | None:
    """Find the dataset behind `data/dataset_info.json#name` or `data#name`. None: the source is something else.

    Raises:
        ConfigError: the file has no dataset of that name, or has several and no name is given (the error lists them);
            or the dataset's file is missing.
    """
    if not isinstance(source, str | os.PathLike) or (Path(source).is_file() and Path(source).name != INFO):
        return None
    text, _, name = os.fspath(source).partition("#")
    path = Path(text).expanduser().absolute()
    path = path / INFO if path.is_dir() else path
    if path.name != INFO or not path.is_file() or (entries := _descriptions(path)) is None:
        return None
    name = next(iter(entries)) if not name and len(entries) == 1 else name
    if name not in entries:
        lacks = f", and no {name!r}" if name else ""
        raise ConfigError(
            f"{path} describes {', '.join(entries)}{lacks}; choose one of them, such as '{text}#{next(iter(entries))}'"
        )
    entry = entries[name]
    file = path.parent / str(entry.get("file_name"))
    if not file.exists() and not isinstance(entry.get("hf_hub_url"), str):
        raise ConfigError(f"dataset {name!r} of {path} is at {file}, which does not exist; download it")
    at = str(file) if file.exists() else entry["hf_hub_url"]
    return Described(source=at, columns=_described(name, entry, path.parent), split=entry.get("split"))


def _describes(entry: Mapping[str, Any], source: Any, folder: Path) -> bool:
    names = [entry[key] for key in ("hf_hub_url", "file_name") if isinstance(entry.get(key), str)]
    if not isinstance(source, str | os.PathLike) or not names:
        return False
    return str(source) in names or Path(source).expanduser().absolute().resolve() == (folder / names[-1]).resolve()


_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
"""LLaMA-Factory's column key -> the default column name in the dataset."""
_TAGS = {
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call", "function_call"),
    "system_tag": ("system", "system"),
}
"""Tag -> its default value, and the role it stands for."""


def _described(name: str, entry: Mapping[str, Any], folder: Path) -> ColumnMap:
    """Read one entry, following LLaMA-Factory's data/README.md."""
    columns, tags = dict(entry.get("columns") or {}), dict(entry.get("tags") or {})
    formatting = entry.get("formatting", "alpaca")
    unknown = [key for key in columns if key not in (*_ALPACA, *_BESIDE, "messages")]
    faults = {
        "preferences (ranking, chosen, rejected or kto_tag), which are not trained on here; describe its chosen "
        "answers as response": entry.get("ranking") or {"chosen", "rejected", "kto_tag"} & columns.keys(),
        "a subset, folder or num_samples, which nothing reads; open that part itself, with num=": entry.keys()
        & {"subset", "folder", "num_samples"},
        f"columns {', '.join(unknown)}, which nothing reads; leave them out": unknown,
        f"formatting {formatting!r}; alpaca, sharegpt and openai are read": formatting
        not in ("alpaca", "sharegpt", "openai"),
        "no response, as those for pre-training: answers are trained on here": formatting == "alpaca"
        and columns
        and "response" not in columns,
    }
    if fault := next((fault for fault, is_so in faults.items() if is_so), None):
        raise ConfigError(f"dataset {name!r} has {fault}")
    if formatting == "alpaca":
        names = {theirs: _ALPACA.get(ours, ours) for ours, theirs in (columns or _ALPACA).items() if theirs}
        return ColumnMap(names=names, required=tuple(names) if columns else (), folder=folder)
    columns = columns or {"messages": "conversations"}
    roles = {tags.get(tag, default): role for tag, (default, role) in _TAGS.items()}
    names = {theirs: ours for ours, theirs in columns.items() if theirs}
    keys = {"role_key": tags.get("role_tag", "from"), "content_key": tags.get("content_tag", "value")}
    return ColumnMap(names=names, required=tuple(names), folder=folder, roles=roles, **keys)


# ---------------------------------------------------------------------- tools and calls as JSON text


def without_nulls(value: Any) -> Any:
    """Copy a nested value without keys whose value is None, at every depth. List items stay.

    Needed because Arrow gives every struct in a column the keys of all of them.
    """
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def read_tools(value: Any) -> list[Any]:
    """Read a `tools` column: a list, or the JSON of a list. A tool in the list may be JSON text too.

    Raises:
        SampleError: the column is neither.
    """
    if isinstance(value, str):
        value = _parsed(value, "tools") if value.strip() else []
    value = [value] if isinstance(value, Mapping) else [] if value is None else value
    if not isinstance(value, list | tuple):
        raise bad_row(f"it has tools that are no list, and no JSON of one: {type(value).__name__} {value!r:.40}")
    return [_parsed(tool, "tools") if isinstance(tool, str) else tool for tool in value]


def calls_in(text: str) -> list[dict[str, Any]]:
    """Read the tool calls in the text of a turn: JSON of a name and its arguments, or a list of these.

    The arguments stay JSON text, because nulls count in a text, and not in a mapping (`without_nulls`).

    Raises:
        SampleError: the text is something else.
    """
    try:
        calls = json.loads(text)
        calls = calls if isinstance(calls, list) else [calls]
        functions = [{"name": call["name"], "arguments": json.dumps(_arguments(call["arguments"]))} for call in calls]
        if not functions:
            raise ValueError("no call")
    except (ValueError, TypeError, KeyError) as error:
        fault = f"it has a function call that is no JSON of a name and its arguments: {text!r:.60}"
        raise bad_row(f"{fault}; a turn of the role assistant may say anything") from error
    return [{"type": "function", "function": function} for function in functions]


def with_arguments(calls: Any) -> Any:
    """Parse tool calls whose `arguments` are JSON text (OpenAI's format); some templates would quote them again.

    Raises:
        SampleError: the arguments are not a JSON object.
    """
    if isinstance(calls, str):
        calls = _parsed(calls, "tool_calls") if calls.strip() else []
    if not isinstance(calls, Sequence):
        return calls
    return [_with_arguments(call) for call in calls]


def _with_arguments(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(function := call.get("function"), Mapping):
        return {**call, "function": _with_arguments(function)}
    return {**call, "arguments": _arguments(call["arguments"])} if "arguments" in call else call


def _arguments(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    arguments = _parsed(value, "arguments of a tool call") if value.strip() else {}
    if not isinstance(arguments, dict):
        raise bad_row(f"it has arguments of a tool call that are the JSON of no object: {value!r:.60}")
    return arguments


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise bad_row(f"it has {name} that are no JSON: {text!r:.60} ({error}); write JSON, or an object") from error


# ---------------------------------------------------------------------- a sample for each answer

Branches = Literal["conversation", "turns", "answers"]
"""One sample per conversation, per question with its answer, or per answer with everything before it."""


def branch_turns(record: Mapping[str, Any], *, branches: Branches = "turns") -> list[dict[str, Any]]:
    """Return one sample for each answer of a record. A record with one answer or none is returned as it is.

    Args:
        record: a conversation that `VLMCollator` takes; for "turns", questions and answers must alternate.
        branches: "turns" or "answers" (see the module docstring). With "answers", an answer whose own flag turns off
            training makes no sample.
    """
    answers = _answers(record, branches)
    numbers = [at for at, is_sample in enumerate(answers) if is_sample]
    if len(answers) < 2 or not numbers:
        return [dict(record)]
    column = BRANCH_COLUMN if branches == "turns" else ANSWER_COLUMN
    name = id_column(record)
    ids = [{} if name is None else {name: f"{record[name]}/{turn}"} for turn in numbers]
    return [{**record, **own_id, column: turn} for turn, own_id in zip(numbers, ids, strict=True)]


def num_branches(record: Mapping[str, Any], branches: Branches) -> int:
    """Count the answers of a record that become samples; 0 if there is no conversation."""
    return sum(_answers(record, branches))


def _answers(record: Mapping[str, Any], branches: Branches) -> list[bool]:
    """For each answer of a record, return whether it becomes a sample."""
    row = _pairs(dict(record))
    turns = next((row[name] for name in TURNS[:3] if row.get(name) is not None), ())
    answers, before = [], None
    for turn in (turn for turn in (turns if _is_list(turns) else ()) if isinstance(turn, Mapping)):
        role = turn.get("role", turn.get("from"))
        is_call = branches == "answers" and role in CALLING and before not in _ANSWERING
        if role in ("assistant", "gpt") or is_call:
            answers.append(branches == "turns" or all(turn.get(flag) not in (0, False) for flag in FLAGS))
        before = role
    return answers
