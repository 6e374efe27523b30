"""The turns of a conversation, however a dataset writes them: role, content, and whether an answer is to be learnt.

{"role": "user", "content": "Hi"}      {"role": "assistant", "content": [{"type": "text", "text": "5"}], "weight": 0}
{"from": "human", "value": "Hi"}       {"from": "gpt", "value": "5", "loss": False}
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache, partial
from typing import Any, final

from vlmpack.collate.absent import is_absent, is_empty
from vlmpack.collate.refusal import Refusal

ROLES = ("system", "user", "assistant", "tool")
"""What a chat template is given."""
ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function": "tool",
    "developer": "system",
}
"""Other names of the same roles. Qwen's templates know no developer, and some leave such a turn out."""
FLAGS = ("weight", "loss", "train")
"""Keys by which an assistant's turn says whether it is learnt: of OpenAI, ms-swift and axolotl."""
SPEAKING = ("tool_calls", "reasoning_content")
"""Keys with which a turn needs no content."""
_PAYLOADS = {
    "text": ("text",),
    "image": ("image", "images", "image_url"),
    "video": ("video", "videos", "video_url"),
    "audio": ("audio", "audios", "audio_url", "input_audio"),
}
"""Keys that hold what a part says or shows, by its kind."""


@final
@dataclass(frozen=True, kw_only=True)
class Turn:
    """One message, and whether it is learnt if it is the assistant's."""

    message: dict[str, Any]
    """Role, content (a string or a list of parts, media parts still with their payload), and what else there is."""
    learnt: bool = True
    """False: its own flag says that it is only to be read."""


def read_turns(value: Any, column: str, marked: Collection[str] = ()) -> list[Turn]:
    """The turns of a column: messages with role and content, or Qwen's turns with from and value.

    In the texts of the latter, `<image>` and `<video>` are holes if they are among the kinds that are `marked`.

    Raises:
        Refusal: `bad_row`: they are no turns, one of them says nothing, or its role or its flag is not known.
    """
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        raise Refusal("bad_row", f"{column} must be a non-empty list of messages, got {short(value)}")
    is_qwen = isinstance(value[0], Mapping) and "from" in value[0]
    read = partial(_qwen_turn, marked=marked) if is_qwen else _turn
    turns = [read(item, f"{column}[{i}]") for i, item in enumerate(value)]
    return _with_known_roles(turns, column)


def with_system(turns: list[Turn], system: Any) -> list[Turn]:
    """The turns after the text of a column `system`, as LLaMA-Factory writes it.

    Raises:
        Refusal: `bad_row`: the column is no text, or the turns have a system message that says something else.
    """
    if not isinstance(system, str):
        raise Refusal("bad_row", f"the column system must be a text, got {short(system)}; give it as a message")
    said = [text_of(turn.message).strip() for turn in turns if turn.message["role"] == "system"]
    if not system.strip() or system.strip() in said:
        return turns
    if said:
        raise Refusal(
            "bad_row",
            f"the column system says {system[:40]!r} and the system message {said[0][:40]!r}; keep one of them",
        )
    return [Turn(message={"role": "system", "content": system}), *turns]


def text_of(message: Mapping[str, Any]) -> str:
    """What a message says, its parts joined as a template joins them."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(p["text"] for p in content if p["type"] == "text")


def short(value: Any) -> str:
    """A value in an error: its type, and its start if it is text."""
    shown = f" {value[:40]!r}" if isinstance(value, str) else ""
    return f"{type(value).__name__}{shown}"


# ---------------------------------------------------------------------- role and content


def _turn(message: Any, where: str) -> Turn:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise Refusal("bad_row", f"{where} must be a mapping with a role and a content, got {_with_keys(message)}")
    content = message.get("content")
    if isinstance(content, Mapping):
        content = [content]
    if content is None:
        content = _no_content(message, where)
    if not isinstance(content, str | list | tuple):
        raise Refusal("bad_row", f"{where}.content must be a string or a list of parts, got {short(content)}")
    if not isinstance(content, str):
        content = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    _check_no_payload(message, where, but=())
    rest = {key: value for key, value in message.items() if value is not None and key not in FLAGS}
    return Turn(message={**rest, "content": content}, learnt=_learnt(message, message["role"], where))


def _no_content(message: Mapping[str, Any], where: str) -> str:
    """An answer may be all tool calls or thoughts; any other turn without a content would be an empty one."""
    if any(not is_empty(message.get(key)) for key in SPEAKING):
        return ""
    raise Refusal(
        "bad_row",
        f"{where} ({message['role']}) has no content, and would be an empty turn; it has the keys {_keys(message)}: "
        "write what it says under 'content', or leave the turn out",
    )


def _part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise Refusal("bad_row", f"{where} must be a mapping with a type, got {short(part)}")
    part = {key: value for key, value in part.items() if not is_absent(value)}
    kind = part.get("type") or next((k for k in ("image", "image_url", "video", "text") if k in part), "")
    if not isinstance(kind, str):
        raise Refusal("bad_row", f"{where}.type must be a text, such as 'image', got {short(kind)}")
    kind = {"image_url": "image", "video_url": "video", "input_image": "image", "input_text": "text"}.get(kind, kind)
    if kind not in ("text", "image", "video"):
        raise Refusal("bad_row", f"{where} is of type {kind!r}; only text, image and video parts can be used")
    if kind == "text" and not isinstance(part.get("text"), str):
        raise Refusal("bad_row", f"{where} is a text part without a text, got {short(part)}")
    _check_no_payload(part, where, but=_PAYLOADS[kind])
    return {**part, "type": kind}


def _check_no_payload(holder: Mapping[str, Any], where: str, *, but: tuple[str, ...]) -> None:
    """A part is one thing, and a message has parts: whatever else they hold is read by nobody."""
    keys = [key for names in _PAYLOADS.values() for key in names if key not in but]
    if found := next((key for key in keys if key in holder and not is_empty(holder[key])), None):
        raise Refusal(
            "bad_row",
            f"{where} holds {found!r} where no template looks for it; give each text, image and video a part of its "
            "own in the content, or images and videos in the columns images and videos",
        )


def _qwen_turn(turn: Any, where: str, marked: Collection[str]) -> Turn:
    """Qwen's fine-tuning rows: markers in a turn's text are holes, where their kind is; user text is stripped."""
    if not isinstance(turn, Mapping) or not isinstance(turn.get("value"), str) or not isinstance(turn.get("from"), str):
        raise Refusal("bad_row", f"{where} must have a from and a value, got {_with_keys(turn)}")
    _check_no_payload(turn, where, but=())
    if lost := [key for key in ("content", *SPEAKING) if not is_empty(turn.get(key))]:
        raise Refusal("bad_row", f"{where} has {lost[0]!r} beside its value, which nothing reads; keep one of them")
    role = turn["from"]
    content = turn["value"] if _canonical(role) == "assistant" else _split_markers(turn["value"], marked)
    return Turn(message={"role": role, "content": content}, learnt=_learnt(turn, role, where))


def _split_markers(text: str, kinds: Collection[str]) -> str | list[dict[str, Any]]:
    """As Qwen's own fine-tuning code does it: text between markers is stripped, and left out when empty."""
    markers = [f"<{kind}>" for kind in kinds]
    pieces = [piece.strip() for piece in (re.split(f"({'|'.join(markers)})", text) if markers else [text])]
    if len(pieces) == 1:
        return pieces[0]
    return [{"type": piece[1:-1]} if piece in markers else {"type": "text", "text": piece} for piece in pieces if piece]


def _with_known_roles(turns: list[Turn], column: str) -> list[Turn]:
    seen = list(dict.fromkeys(turn.message["role"] for turn in turns))
    known = (*ROLES, *ALIASES)
    if unknown := next((role for role in seen if role not in known), None):
        raise Refusal(
            "bad_row",
            f"{column} has a turn of the role {unknown!r}, which is not known{_did_you_mean(unknown)}; its roles are "
            f"{', '.join(seen)}, and those that can be used {', '.join(known)}: rename it",
        )
    return [replace(turn, message={**turn.message, "role": _canonical(turn.message["role"])}) for turn in turns]


def _canonical(role: str) -> str:
    return ALIASES.get(role, role)


@lru_cache(maxsize=1024)
def _did_you_mean(role: str) -> str:
    near = get_close_matches(role.lower(), (*ROLES, *ALIASES), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


# ---------------------------------------------------------------------- what is learnt


def _learnt(message: Mapping[str, Any], role: str, where: str) -> bool:
    """What the flags of an answer say; a turn without any is learnt. Those of other turns say nothing: none is."""
    if _canonical(role) != "assistant":
        return True
    given = {name: message[name] for name in FLAGS if message.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise Refusal(
                "bad_row",
                f"{where}.{name} is {value!r}; it says whether the turn is learnt, so it must be true or false, 1 or 0",
            )
    if len({bool(value) for value in given.values()}) > 1:
        raise Refusal("bad_row", f"{where} has {given}, which contradict each other; keep one of them")
    return all(given.values())


def _with_keys(value: Any) -> str:
    return f"{short(value)} with the keys {_keys(value)}" if isinstance(value, Mapping) else short(value)


def _keys(message: Mapping[str, Any]) -> str:
    """Those with None beside those without."""
    return ", ".join(f"{key} (None)" if value is None else str(key) for key, value in message.items()) or "none"
