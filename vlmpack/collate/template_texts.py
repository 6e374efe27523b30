"""What a chat template writes of a conversation: every text of every message, or the sample is refused.

    messages   system "Be short."   user "Total?"   assistant "5"
    probes     system P0            user P1         assistant P2        rendered once for each shape of conversation
    written    <|im_start|>system\\nP0<|im_end|>...P1...P2...            a probe that is not there: its text is refused
    texts      "Be short.", "Total?", "5"                               are looked for in the order of their probes

A probe holds a line break and both quotation marks. It does not occur in a list of parts that a template writes as
Python shows it, though the words of a text do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import numpy as np

from vlmpack.collate.columns import is_empty
from vlmpack.errors import Refusal

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant's thoughts, which templates may leave out of all answers but the last."""
_LINKS = ("id", "type", "index")
"""Keys inside calls and the like that say nothing themselves."""
_TAGS = re.compile(r"(</?think>)")
"""Marks around thoughts inside the content of an answer."""
_THOUGHT = "thought"
"""Path of a text between such marks."""
_SHAPES_KEPT = 4096
"""Shapes of conversations whose probes are kept."""


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


@final
@dataclass(frozen=True, kw_only=True)
class TextCheck:
    """Insists that a chat template writes every text of a conversation."""

    write: Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], str]
    """Writes messages with options; may raise whatever a template raises."""
    shapes: dict[Any, Shape | None] = field(default_factory=dict)
    """By shape; None: the template cannot write its probes."""

    def check(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], text: str) -> None:
        """Refuse a conversation of which a text is not in `text`, as the template wrote it, or a key is not read.

        Templates may strip blanks around a text, leave out the thoughts of all answers but the last, and write what
        tools return or are called with as JSON or Python has it.

        Raises:
            Refusal: `template_ignores`.
        """
        leaves, key = _leaves(messages, options)
        shape = self._shape(key, messages, options)
        if shape is not None:
            _check_shape(shape, leaves, messages)
        at = 0
        for number in range(len(leaves)) if shape is None else shape.order:
            leaf = leaves[number]
            if not leaf.is_content or messages[leaf.message]["role"] == "tool" or (shape is None and leaf.is_thought):
                continue
            said = leaf.text.strip()
            if (found := text.find(said, at)) < 0:
                raise _refusal(leaf, messages)
            at = found + len(said)

    def _shape(self, key: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Shape | None:
        try:
            return self.shapes[key]
        except KeyError:
            if len(self.shapes) >= _SHAPES_KEPT:
                self.shapes.clear()
            return self.shapes.setdefault(key, self._tried(messages, options))

    def _tried(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Shape | None:
        probes: list[Leaf] = []

        def insert(message: int, path: str, text: str) -> str:
            probes.append(Leaf(message, path, probe(len(probes))))
            return text.replace(text.strip(), probes[-1].text, 1)

        tried = [map_texts(message, at, insert) for at, message in enumerate(messages)]
        try:
            text = self.write(tried, options)
        except Exception:  # a template can fail in any way on what it does not expect
            return None
        places = tuple(_place(leaf, messages[leaf.message]["role"], text) for leaf in probes)
        order = tuple(sorted((at for at, place in enumerate(places) if place >= 0), key=places.__getitem__))
        spoken = {(leaf.message, leaf.key) for leaf in probes}
        unread = [
            (at, key)
            for at, message in enumerate(messages)
            for key in _extra(message)
            if (at, key) not in spoken and self._writes_without(tried, at, key, options) == text
        ]
        return Shape(places, order, tuple(unread))

    def _writes_without(
        self, messages: Sequence[Mapping[str, Any]], at: int, key: str, options: Mapping[str, Any]
    ) -> str | None:
        without = {name: value for name, value in messages[at].items() if name != key}
        try:
            return self.write([*messages[:at], without, *messages[at + 1 :]], options)
        except Exception:  # as above: then the key is needed
            return None


def probe(number: int) -> str:
    """A text that stands in what a template writes only if the template writes it as it is."""
    return f'probe {number}:\n"it\'s" {number}.'


def is_written(text: str, number: int = 0) -> bool:
    """Return whether a probe stands in a text as it is."""
    return probe(number) in text


def _place(leaf: Leaf, role: str, text: str) -> int:
    """Find a probe; what tools return or are called with may be written as JSON or Python has it too."""
    forms = [leaf.text]
    if not leaf.is_content or role == "tool":
        forms += [json.dumps(leaf.text, ensure_ascii=False)[1:-1], repr(leaf.text)[1:-1]]
    return next((place for form in forms if (place := text.find(form)) >= 0), -1)


def _check_shape(shape: Shape, leaves: Sequence[Leaf], messages: Sequence[Mapping[str, Any]]) -> None:
    if len(shape.order) < len(leaves):
        last = max((at for at, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        for leaf, place in zip(leaves, shape.places, strict=True):
            if place < 0 and not (leaf.is_thought and leaf.message < last):
                raise _refusal(leaf, messages)
    for at, key in shape.unread:
        raise _refusal(Leaf(at, key, ""), messages)


def _refusal(leaf: Leaf, messages: Sequence[Mapping[str, Any]]) -> Refusal:
    where = f"messages[{leaf.message}] ({messages[leaf.message]['role']})"
    if leaf.is_content:
        verb = "thinks" if leaf.path == _THOUGHT else "says"
        return Refusal(
            "template_ignores",
            f"{where} {verb} {leaf.text.strip()[:40]!r}, which the chat template does not write; compare the message's "
            "role, its place and its content with what the template expects",
        )
    without = "" if leaf.key == "tool_calls" else f" (VLMCollator(ignored_keys=({leaf.key!r},)) leaves it out)"
    return Refusal(
        "template_ignores",
        f"{where} has {leaf.path}, which the chat template does not write, so the model would not see it; write it "
        f"into the content, give the processor a chat template that writes it, or take it out{without}",
    )


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
        copy |= {key: nested(key, message[key]) for key in _extra(message)}
    return copy


def _extra(message: Mapping[str, Any]) -> list[str]:
    """The keys of a message that hold something, beside role, content, and what ties a result to its call."""
    known = ("role", "content", *(("name", "tool_call_id") if message["role"] == "tool" else ()))
    return [key for key, value in message.items() if key not in known and not is_empty(value)]


def _leaves(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> tuple[list[Leaf], Any]:
    """(texts of a conversation, its shape: where they stand, and what else may change how they are written)."""
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
            shape.append(tuple((key, _kind(message[key])) for key in _extra(message)))
    if options:
        shape.append(tuple((name, bool(value) if name == "tools" else repr(value)) for name, value in options.items()))
    return leaves, tuple(shape)


def _kind(value: Any) -> str:
    return repr(value) if isinstance(value, bool) else type(value).__name__
