"""The shapes in which datasets write down a conversation, read into one: `Row`.

    TRL        {"messages": [...], "images": [...]}   {"prompt": ..., "completion": ..., "images": [...]}
    Qwen       {"conversations": [{"from": "human", "value": "<image>\\n..."}, ...], "image": path or list}
    NeMo       {"conversation": [{"role": ..., "content": [{"type": "image", "image": PIL}, ...]}]}

A message's content is a string or a list of parts; a part is a text, or an image or video with its source inside
(`{"type": "image", "image": PIL | path | bytes | {"bytes", "path"}}`) or without one, which then comes from the
`images` / `image` / `videos` / `video` column, in order. Where no message has such a part, `<image>` and `<video>` in
the text of users are the places of the column's media, if there are as many. Keys that are None, or structs of None,
count as absent: Arrow writes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from vlmpack.collate.holes import MediaRef, column_media, fill_holes
from vlmpack.collate.refusal import Refusal
from vlmpack.errors import ConfigError

CONVERSATION_COLUMNS = ("messages", "conversations", "conversation", "prompt")
"""A feature with none of these and no `input_ids` is not a sample."""

_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool", "function": "tool"}
_MARKERS = re.compile("(<image>|<video>)")


@final
@dataclass(frozen=True, kw_only=True)
class Row:
    """One sample as text with holes for its media."""

    messages: tuple[Mapping[str, Any], ...] = ()
    """For the chat template: parts are {"type": "text", "text": ...}, {"type": "image"} or {"type": "video"}."""
    images: tuple[MediaRef, ...] = ()
    """In the order of their holes."""
    videos: tuple[MediaRef, ...] = ()
    """In the order of their holes."""
    plain: tuple[str, str] | None = None
    """(prompt, completion) as strings, to be used without a chat template; `messages` is empty then."""
    trained_turns: int | None = None
    """Only the last so many assistant turns are learnt; None: all of them."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments for the chat template: tools, and what `chat_template_kwargs` holds."""

    def texts(self) -> Iterator[str]:
        """Every string that a template writes: contents (parts joined, as it joins them), roles, tool calls, tools."""
        for message in self.messages:
            content = message["content"]
            yield content if isinstance(content, str) else "".join(p["text"] for p in content if p["type"] == "text")
            yield from _strings([value for key, value in message.items() if key != "content"])
        yield from _strings(self.template_options.get("tools"))


def _strings(value: Any) -> Iterator[str]:
    """The strings inside nested lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(inner)


def read_row(feature: Mapping[str, Any]) -> Row:
    """Read one sample of any of the shapes above.

    Raises:
        ConfigError: none of the known columns is there, which is a mistake in the setup and not in one sample.
        Refusal: its conversation is None, or it contradicts itself (`bad_row`, `media_count_mismatch`,
            `ambiguous_media`).
    """
    present = {name: value for name, value in feature.items() if value is not None}
    options = _template_options(present)
    if "messages" in present or "conversation" in present:
        messages = _messages(present.get("messages", present.get("conversation")), "messages")
        return _with_media(messages, present, template_options=options)
    if "conversations" in present:
        return _with_media(_qwen_messages(present["conversations"]), present, template_options=options)
    if "prompt" in present and "completion" in present:
        return _prompt_and_completion(present, options)
    _check_columns_filled(feature)
    raise ConfigError(_no_columns(feature))


def _check_columns_filled(feature: Mapping[str, Any]) -> None:
    """A column that is there but None is this sample's fault; one that is not there at all is the setup's."""
    empty = [name for name in ("input_ids", *CONVERSATION_COLUMNS, "completion") if feature.get(name, "") is None]
    if empty:
        raise Refusal("bad_row", f"its {' and '.join(empty)} is None; fill it, or leave the sample out of the data set")


def _no_columns(feature: Mapping[str, Any]) -> str:
    seen = ", ".join(sorted(map(str, feature))) or "none at all"
    return (
        f"a feature has none of the columns input_ids, {', '.join(CONVERSATION_COLUMNS)} (with completion); it has: "
        f"{seen}. HF Trainer drops dataset columns that the model's forward does not name before the collator sees "
        "them: set TrainingArguments(remove_unused_columns=False). TRL's trainers keep only messages, prompt, "
        "completion, image and images even then: rename a `conversation` column to `messages`, and write videos into "
        "the messages"
    )


def _template_options(present: Mapping[str, Any]) -> dict[str, Any]:
    options, tools = present.get("chat_template_kwargs", {}), present.get("tools", [])
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise Refusal("bad_row", f"chat_template_kwargs must be a mapping of names, got {_short(options)}")
    if not isinstance(tools, list | tuple):
        raise Refusal("bad_row", f"tools must be a list of tools, got {_short(tools)}")
    return {**options, **({"tools": list(tools)} if tools else {})}


# ---------------------------------------------------------------------- messages


def _messages(value: Any, column: str) -> list[dict[str, Any]]:
    """A list of {"role", "content": str or list of parts}, media parts still with their payload."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        raise Refusal("bad_row", f"{column} must be a non-empty list of messages, got {_short(value)}")
    if isinstance(value[0], Mapping) and "from" in value[0]:
        return _qwen_messages(value)
    return [_message(message, f"{column}[{i}]") for i, message in enumerate(value)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise Refusal("bad_row", f"{where} must be a mapping with a role and a content, got {_short(message)}")
    content = message.get("content")
    rest = {key: value for key, value in message.items() if value is not None}
    if isinstance(content, Mapping):
        content = [content]
    if content is None:
        content = ""
    if not isinstance(content, str | list | tuple):
        raise Refusal("bad_row", f"{where}.content must be a string or a list of parts, got {_short(content)}")
    if not isinstance(content, str):
        content = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    return {**rest, "content": content}


def _part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise Refusal("bad_row", f"{where} must be a mapping with a type, got {_short(part)}")
    part = {key: value for key, value in part.items() if not _is_absent(value)}
    kind = part.get("type") or next((k for k in ("image", "image_url", "video", "text") if k in part), "")
    kind = {"image_url": "image", "video_url": "video", "input_image": "image", "input_text": "text"}.get(kind, kind)
    if kind not in ("text", "image", "video"):
        raise Refusal("bad_row", f"{where} is of type {kind!r}; only text, image and video parts can be used")
    if kind == "text" and not isinstance(part.get("text"), str):
        raise Refusal("bad_row", f"{where} is a text part without a text, got {_short(part)}")
    return {**part, "type": kind}


def _is_absent(value: Any) -> bool:
    """None, or a struct with nothing in it: Arrow gives every part of a column the keys of all of them."""
    return value is None or (isinstance(value, Mapping) and all(inner is None for inner in value.values()))


def _qwen_messages(value: Any) -> list[dict[str, Any]]:
    """Qwen's fine-tuning rows: `<image>` and `<video>` in a turn's text are holes; user text is stripped."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        raise Refusal("bad_row", f"conversations must be a non-empty list of turns, got {_short(value)}")
    if not isinstance(value[0], Mapping) or "from" not in value[0]:
        return _messages_or_refuse(value)
    messages = []
    for i, turn in enumerate(value):
        if not isinstance(turn, Mapping) or not isinstance(turn.get("value"), str) or "from" not in turn:
            raise Refusal("bad_row", f"conversations[{i}] must have a from and a value, got {_short(turn)}")
        role = _ROLES.get(turn["from"], turn["from"])
        content = turn["value"] if role == "assistant" else _split_markers(turn["value"])
        messages.append({"role": role, "content": content})
    return messages


def _messages_or_refuse(value: Sequence[Any]) -> list[dict[str, Any]]:
    return [_message(message, f"conversations[{i}]") for i, message in enumerate(value)]


def _split_markers(text: str) -> str | list[dict[str, Any]]:
    """As Qwen's own fine-tuning code does it: text between markers is stripped, and left out when empty."""
    pieces = [piece.strip() for piece in _MARKERS.split(text)]
    if len(pieces) == 1:
        return pieces[0]
    return [
        {"type": piece[1:-1]} if piece in ("<image>", "<video>") else {"type": "text", "text": piece}
        for piece in pieces
        if piece
    ]


# ---------------------------------------------------------------------- prompt and completion


def _prompt_and_completion(present: Mapping[str, Any], options: dict[str, Any]) -> Row:
    prompt, completion = present["prompt"], present["completion"]
    if isinstance(prompt, str) != isinstance(completion, str):
        raise Refusal("bad_row", "prompt and completion must both be strings or both be lists of messages")
    if isinstance(prompt, str):
        images, videos = column_media(present, "image"), column_media(present, "video")
        return Row(plain=(prompt, completion), images=images, videos=videos)
    answer = _messages(completion, "completion")
    turns = sum(message["role"] == "assistant" for message in answer)
    messages = [*_messages(prompt, "prompt"), *answer]
    return _with_media(messages, present, trained_turns=turns, template_options=options)


# ---------------------------------------------------------------------- media


def _with_media(messages: list[dict[str, Any]], present: Mapping[str, Any], **settings: Any) -> Row:
    """Take the media out of the messages, and fill the holes that have none from the columns."""
    videos = fill_holes(messages, present, "video")
    images = fill_holes(messages, present, "image")
    return Row(messages=tuple(map(_without_payload, messages)), images=images, videos=videos, **settings)


def _without_payload(message: Mapping[str, Any]) -> dict[str, Any]:
    """Only what a chat template needs: pixels in its variables would be copied, or printed."""
    if isinstance(message["content"], str):
        return dict(message)
    return {**message, "content": [_hole(part) for part in message["content"]]}


def _hole(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part["type"]
    return {"type": "text", "text": part["text"]} if kind == "text" else {"type": kind}


def _short(value: Any) -> str:
    """A value in an error: its type, and its start if it is text."""
    shown = f" {value[:40]!r}" if isinstance(value, str) else ""
    return f"{type(value).__name__}{shown}"
