"""The shapes in which datasets write down a conversation, read into one: `Conversation`.

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

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from numbers import Number
from typing import Any, final

import numpy as np

from vlmpack.collate.absent import check_columns_filled, check_one_form, is_empty, no_columns
from vlmpack.collate.holes import Kind, Markers, MediaRef, check_markers, column_media, fill_holes, marked_kinds
from vlmpack.collate.refusal import Refusal
from vlmpack.collate.turns import Turn, read_turns, short, text_of, with_system


@final
@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One sample as text with holes for its media."""

    messages: tuple[Mapping[str, Any], ...] = ()
    """For the chat template: parts are {"type": "text", "text": ...}, {"type": "image"} or {"type": "video"}."""
    images: tuple[MediaRef, ...] = ()
    """In the order of their holes."""
    videos: tuple[MediaRef, ...] = ()
    """In the order of their holes."""
    plain: tuple[str, str] | None = None
    """(prompt, completion) as strings, to be used without a chat template; `messages` is empty then."""
    trained_turns: tuple[bool, ...] | None = None
    """Whether each of the assistant's turns is learnt; None: all of them are."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments for the chat template: tools, and what `chat_template_kwargs` holds."""

    def texts(self) -> Iterator[str]:
        """Every string that a template can write: contents (parts joined, as it joins them), and all else it is given.

        Of what is nested, such as the arguments of tool calls, the keys too: a template writes them as JSON or XML.
        """
        for message in self.messages:
            yield text_of(message)
            yield from _strings({key: value for key, value in message.items() if key not in ("role", "content")})
        yield from _strings(self.template_options)


def _strings(value: Any) -> Iterator[str]:
    """The strings inside nested values, keys included; of what is neither nested nor a number, its text."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from _strings(inner)
    elif value is not None and not isinstance(value, Number):
        yield str(value)


def read_conversation(
    feature: Mapping[str, Any], *, has_vision: bool = True, markers: Markers = "auto"
) -> Conversation:
    """Read one sample of any of the shapes above.

    Args:
        feature: the sample's columns.
        has_vision: whether the model has; to one that has not, `<image>` in a user's text is text.
        markers: whether it is text to the others, or the place of an image: see `marked_kinds`.

    Raises:
        Refusal: none of the known columns is there (`no_columns`), its conversation is None, or it contradicts itself
            (`bad_row`, `media_count_mismatch`, `ambiguous_media`), or a key beside an image is misspelt
            (`vision_key`).
    """
    present = {name: value for name, value in feature.items() if value is not None}
    marked = marked_kinds(feature, markers if has_vision else "text")
    conversation = _read(present, feature, marked)
    users = [text_of(message) for message in conversation.messages if message["role"] == "user"]
    found = {"image": conversation.images, "video": conversation.videos}
    check_markers(
        users if conversation.plain is None else [conversation.plain[0]],
        feature,
        missing=[kind for kind in marked if not found[kind]],
    )
    return conversation


def _read(present: Mapping[str, Any], feature: Mapping[str, Any], marked: Collection[Kind]) -> Conversation:
    columns = [name for name in ("messages", "conversation", "conversations") if name in present]
    is_pair = "prompt" in present and "completion" in present
    check_one_form([*columns, "prompt and completion"] if is_pair else columns, present)
    if columns:
        return _conversation(read_turns(present[columns[0]], columns[0], marked), present, marked)
    if is_pair:
        return _prompt_and_completion(present, marked)
    check_columns_filled(feature)
    raise Refusal("no_columns", no_columns(feature), of_all=True)


def _template_options(present: Mapping[str, Any]) -> dict[str, Any]:
    options, tools = present.get("chat_template_kwargs", {}), present.get("tools", [])
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise Refusal("bad_row", f"chat_template_kwargs must be a mapping of names, got {short(options)}")
    if not isinstance(tools, list | tuple):
        raise Refusal("bad_row", f"tools must be a list of tools, got {short(tools)}")
    if tools and not is_empty(options.get("tools")):
        raise Refusal("bad_row", "it has tools in a column and in chat_template_kwargs; keep the column")
    set_ones = {name: value for name, value in options.items() if value is not None}  # Arrow writes every row's names
    return {**set_ones, **({"tools": list(tools)} if tools else {})}


# ---------------------------------------------------------------------- conversations


def _conversation(turns: list[Turn], present: Mapping[str, Any], marked: Collection[Kind]) -> Conversation:
    if "system" in present:
        turns = with_system(turns, present["system"])
    learnt = tuple(turn.learnt for turn in turns if turn.message["role"] == "assistant")
    return _with_media(
        [turn.message for turn in turns],
        present,
        marked,
        trained_turns=None if all(learnt) else learnt,
        template_options=_template_options(present),
    )


def _prompt_and_completion(present: Mapping[str, Any], marked: Collection[Kind]) -> Conversation:
    prompt, completion = present["prompt"], present["completion"]
    if isinstance(prompt, str) != isinstance(completion, str):
        raise Refusal("bad_row", "prompt and completion must both be strings or both be lists of messages")
    if isinstance(prompt, str):
        return _plain(prompt, completion, present)
    asked = [replace(turn, learnt=False) for turn in read_turns(prompt, "prompt", marked)]
    return _conversation([*asked, *read_turns(completion, "completion", marked)], present, marked)


def _plain(prompt: str, completion: str, present: Mapping[str, Any]) -> Conversation:
    if present.get("system"):
        raise Refusal(
            "bad_row",
            f"it has a column system, {short(present['system'])}, which has no place in plain strings; write it into "
            "the prompt, or give prompt and completion as lists of messages",
        )
    images, videos = column_media(present, "image"), column_media(present, "video")
    return Conversation(plain=(prompt, completion), images=images, videos=videos)


# ---------------------------------------------------------------------- media


def _with_media(
    messages: list[dict[str, Any]], present: Mapping[str, Any], marked: Collection[Kind], **settings: Any
) -> Conversation:
    """Take the media out of the messages, and fill the holes that have none from the columns."""
    videos = fill_holes(messages, present, "video", is_marked="video" in marked)
    images = fill_holes(messages, present, "image", is_marked="image" in marked)
    return Conversation(messages=tuple(map(_without_payload, messages)), images=images, videos=videos, **settings)


def _without_payload(message: Mapping[str, Any]) -> dict[str, Any]:
    """Only what a chat template needs: pixels in its variables would be copied, or printed."""
    if isinstance(message["content"], str):
        return dict(message)
    return {**message, "content": [_hole(part) for part in message["content"]]}


def _hole(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part["type"]
    return {"type": "text", "text": part["text"]} if kind == "text" else {"type": kind}
