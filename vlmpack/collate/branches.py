"""One question and its answer out of a conversation about the same images: `branch_of`.

    conversation     system   user: image, Q0   A0   user: Q1   A1   user: image 2, Q2   A2
    branch 0         system   user: image, Q0   A0
    branch 1         system   user: image, Q1   A1
    branch 2         system   user: image, image 2, Q2   A2

Answers do not see each other. The first question stays as it is written; its images stand in front of every other one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import index
from typing import TYPE_CHECKING, Any

from vlmpack.collate.columns import Kind, MediaRef
from vlmpack.data.branches import BRANCH_COLUMN
from vlmpack.errors import Refusal

if TYPE_CHECKING:
    from vlmpack.collate.conversation import Conversation

Parts = list[tuple[Mapping[str, Any], MediaRef | None]]
"""Parts of a message, with the medium that each stands for."""


def branch_of(conversation: Conversation, turn: Any) -> Conversation:
    """Return the conversation of one question and its answer, after the system messages.

    Args:
        conversation: of system messages, then questions and answers in turn.
        turn: number of the question, from 0.

    Raises:
        Refusal: `bad_row`: the conversation is of another form, or has no such question.
    """
    roles = [message["role"] for message in conversation.messages]
    first = next((at for at, role in enumerate(roles) if role != "system"), len(roles))
    pairs, rest = divmod(len(roles) - first, 2)
    if rest or roles[first:] != ["user", "assistant"] * pairs:
        raise Refusal(
            "bad_row",
            f"it has the column {BRANCH_COLUMN}, but its turns are {', '.join(roles) or 'plain strings'}: only "
            "questions and answers in turn, after system messages, can be told apart; open the data set with "
            "branches='conversation', or leave the sample out",
        )
    try:
        number = index(turn)
    except TypeError:
        number = -1
    if not 0 <= number < pairs:
        raise Refusal("bad_row", f"its {BRANCH_COLUMN} is {turn!r}, but it has {pairs} questions, counted from 0")
    parts = _with_media(conversation)
    question = first + 2 * number
    if number:
        parts[question] = [part for part in parts[first] if part[1] is not None] + parts[question]
    kept = [*range(first), question, question + 1]
    learnt = conversation.trained_turns
    return replace(
        conversation,
        messages=tuple(_message(conversation.messages[at], parts[at]) for at in kept),
        images=_media([parts[at] for at in kept], "image"),
        videos=_media([parts[at] for at in kept], "video"),
        audios=_media([parts[at] for at in kept], "audio"),
        trained_turns=None if learnt is None else (learnt[number],),
    )


def _with_media(conversation: Conversation) -> list[Parts]:
    """The parts of every message, each image, video and audio with its reference."""
    media = {
        "image": iter(conversation.images),
        "video": iter(conversation.videos),
        "audio": iter(conversation.audios),
    }
    messages: list[Parts] = []
    for message in conversation.messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        messages.append([(part, next(media[part["type"]]) if part["type"] in media else None) for part in parts])
    return messages


def _message(message: Mapping[str, Any], parts: Parts) -> Mapping[str, Any]:
    """The message with these parts; a text stays a text."""
    if isinstance(message["content"], str) and all(ref is None for _, ref in parts):
        return message
    return {**message, "content": [part for part, _ in parts]}


def _media(messages: Sequence[Parts], kind: Kind) -> tuple[MediaRef, ...]:
    return tuple(ref for parts in messages for part, ref in parts if ref is not None and part["type"] == kind)
