"""The texts of a conversation, probes in their place, and where a template writes them.

    messages   system "Be short."   user "Total?"   assistant "5"
    probes     system P0            user P1         assistant P2        rendered once for each shape of conversation
    written    <|im_start|>system\nP0<|im_end|>...P1...P2...            a probe that is not there: its text is refused
    texts      "Be short.", "Total?", "5"                               are looked for in the order of their probes

A probe holds a line break and both quotation marks. It does not occur in a list of parts that a template writes as
Python shows it, though the words of a text do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vlmpack.data.formats import is_empty
from vlmpack.errors import Refusal

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant's thoughts, which templates may leave out of all answers but the last."""
_LINKS = ("id", "type", "index")
"""Keys inside calls and the like that say nothing themselves."""
_TAGS = re.compile(r"(</?think>)")
"""Marks around thoughts inside the content of an answer."""
_THOUGHT = "thought"
"""Path of a text between such marks."""


class Leaf(NamedTuple):
    """One text of a conversation that has more than blanks in it."""

    message: int
    """Number of its message."""
    path: str
    """Where it stands in the message: "content", "content[1]", "tool_calls[0].function.name", ..."""
    text: str
    """The text."""

    @property
    def key(self) -> str:
        """The key of the message under which it stands."""
        return re.split(r"[.\[]", self.path, maxsplit=1)[0]

    @property
    def is_content(self) -> bool:
        """Return whether it is a text of the content, and not of another key."""
        return self.path in ("content", _THOUGHT) or self.path.startswith("content[")

    @property
    def is_thought(self) -> bool:
        """Return whether it is a thought, which templates may leave out of all answers but the last."""
        return self.path == _THOUGHT or (not self.is_content and self.key in THOUGHTS)


class Shape(NamedTuple):
    """What a template writes of all conversations that have texts in the same places."""

    places: tuple[int, ...]
    """Place of each leaf's probe in the text; -1: the template does not write it."""
    order: tuple[int, ...]
    """Numbers of the written leaves in the order in which they stand in the text."""
    unread: tuple[tuple[int, str], ...]
    """(message, key) of keys without a text that change nothing."""


class Spot(NamedTuple):
    """A text inside another one."""

    start: int
    """Its first character."""
    stop: int
    """The character after its last."""
    form: int
    """0: as it is, 1: as JSON, 2: as Python shows it."""


Mark = tuple[int, int]
"""A place in a text: number of a written leaf, 0: none, and the characters behind it, or else from the beginning."""


class Layout(NamedTuple):
    """Where a template writes the texts and answers of all conversations that differ in their texts alone."""

    order: tuple[int, ...]
    """Numbers of the w written leaves in the order in which they stand in the text."""
    forms: tuple[int, ...]
    """How each of them is written: see `Spot`."""
    literals: tuple[str, ...]
    """The w + 1 texts before each of them and behind the last."""
    answers: tuple[tuple[Mark, Mark] | str, ...]
    """Start and stop of each answer, or why it has none."""

    def ends(self, leaves: Sequence[Leaf], text: str) -> list[int] | None:
        """Find the ends of the written leaves in a text, after a 0; None: it is not of this layout.

        A template may take blanks around a leaf away.
        """
        ends, at = [0], len(self.literals[0])
        if not text.startswith(self.literals[0]):
            return None
        for number, form, literal in zip(self.order, self.forms, self.literals[1:], strict=True):
            said = leaves[number].text.strip() if form == 0 else _forms(leaves[number].text)[form]
            start = text.find(said, at)
            is_last = len(ends) == len(self.order)
            stop = len(text) - len(literal) if is_last else text.find(literal, start + len(said))
            if start < 0 or stop < start + len(said) or (is_last and not text.endswith(literal)):
                return None
            if text[at:start].strip() or text[start + len(said) : stop].strip():
                return None
            ends.append(stop)
            at = stop + len(literal)
        return ends


def probe(number: int) -> str:
    """A text that stands in what a template writes only if the template writes it as it is."""
    return f'probe {number}:\n"it\'s" {number}.'


def is_written(text: str, number: int = 0) -> bool:
    """Return whether a probe stands in a text as it is."""
    return probe(number) in text


def find_spot(leaf: Leaf, role: str, text: str) -> Spot | None:
    """Find a probe; what tools return or are called with may be written as JSON or Python has it too."""
    forms = _forms(leaf.text)[: 1 if leaf.is_content and role != "tool" else None]
    found = ((text.find(form), number, len(form)) for number, form in enumerate(forms))
    return next((Spot(at, at + length, number) for at, number, length in found if at >= 0), None)


def _forms(text: str) -> tuple[str, str, str]:
    """A text as it is, as JSON, and as Python shows it."""
    return text, json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1]


def check_shape(shape: Shape, leaves: Sequence[Leaf], messages: Sequence[Mapping[str, Any]]) -> None:
    if len(shape.order) < len(leaves):
        last = max((at for at, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        for leaf, place in zip(leaves, shape.places, strict=True):
            if place < 0 and not (leaf.is_thought and leaf.message < last):
                raise refusal_of(leaf, messages)
    for at, key in shape.unread:
        raise refusal_of(Leaf(at, key, ""), messages)


def refusal_of(leaf: Leaf, messages: Sequence[Mapping[str, Any]]) -> Refusal:
    where = f"messages[{leaf.message}] ({messages[leaf.message]['role']})"
    fault = f"{where} has {leaf.path}, which the chat template does not write, so the model would not see it"
    remedy = "write it into the content, give the processor a chat template that writes it, or take it out"
    if leaf.is_content:
        said = f"{'thinks' if leaf.path == _THOUGHT else 'says'} {leaf.text.strip()[:40]!r}"
        fault = f"{where} {said}, which the chat template does not write"
        remedy = "compare the message's role, its place and its content with what the template expects"
        if leaf.path == _THOUGHT:
            remedy = "use one that does, such as trl.chat_template_utils.get_training_chat_template(processor) returns"
    elif leaf.key != "tool_calls":
        remedy += f" (VLMCollator(ignored_keys=({leaf.key!r},)) leaves it out)"
    return Refusal("template_ignores", f"{fault}; {remedy}")


# ---------------------------------------------------------------------- texts of messages


def map_texts(message: Mapping[str, Any], at: int, visit: Callable[[int, str, str], str]) -> dict[str, Any]:
    """Copy a message, each text that has more than blanks in it replaced by what `visit` makes of its place and itself.

    Numbers and kinds of calls, and the keys of a tool's result that name its call, are left as they are.
    """

    def seen(path: str, text: str) -> str:
        return visit(at, path, text) if text.strip() else text

    def content(path: str, text: str) -> str:
        if message["role"] != "assistant" or "</think>" not in text:
            return seen(path, text)
        pieces = _TAGS.split(text)
        end = len(pieces) - 1 - pieces[::-1].index("</think>")
        return "".join(
            piece if number % 2 else seen(path if number > end else _THOUGHT, piece)
            for number, piece in enumerate(pieces)
        )

    def nested(path: str, value: Any) -> Any:
        if isinstance(value, str):
            return seen(path, value)
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if isinstance(value, Mapping):
            return {k: v if k in _LINKS else nested(f"{path}.{k}", v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [nested(f"{path}[{number}]", inner) for number, inner in enumerate(value)]
        return value

    copy = dict(message)
    given = message["content"]
    if isinstance(given, str):
        copy["content"] = content("content", given)
    else:
        copy["content"] = [
            {**part, "text": content(f"content[{number}]", part["text"])} if part["type"] == "text" else part
            for number, part in enumerate(given)
        ]
    if len(message) > 2:
        copy |= {key: nested(key, message[key]) for key in extra_keys(message)}
    return copy


def extra_keys(message: Mapping[str, Any]) -> list[str]:
    """The keys of a message that hold something, beside role, content, and what ties a result to its call."""
    known = ("role", "content", *(("name", "tool_call_id") if message["role"] == "tool" else ()))
    return [key for key, value in message.items() if key not in known and not is_empty(value)]


def leaves_of(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> tuple[list[Leaf], Any]:
    """Return the texts of a conversation, and its shape: where the texts are, and what else changes the rendering."""
    leaves: list[Leaf] = []

    def take(message: int, path: str, text: str) -> str:
        leaves.append(Leaf(message, path, text))
        return text

    shape: list[Any] = []
    for at, message in enumerate(messages):
        count = len(leaves)
        map_texts(message, at, take)
        content = message["content"]
        shape.append(message["role"])
        shape.append(None if isinstance(content, str) else tuple(part["type"] for part in content))
        shape.append(tuple(leaf.path for leaf in leaves[count:]))
        if len(message) > 2:
            others = ((key, message[key]) for key in extra_keys(message))
            shape.append(tuple((key, repr(x) if isinstance(x, bool) else type(x).__name__) for key, x in others))
    if options:
        shape.append(tuple((name, bool(value) if name == "tools" else repr(value)) for name, value in options.items()))
    return leaves, tuple(shape)
