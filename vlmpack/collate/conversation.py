"""The shapes in which datasets write down a conversation, read into one: `Conversation`.

    TRL        {"messages": [...], "images": [...]}   {"prompt": ..., "completion": ..., "images": [...]}
    Qwen       {"conversations": [{"from": "human", "value": "<image>\\n..."}, ...], "image": path or list}
    NeMo       {"conversation": [{"role": ..., "content": [{"type": "image", "image": PIL}, ...]}]}
    Cauldron   {"texts": [{"user": ..., "assistant": ...}, ...], "images": [...]}

A message's content is a string or a list of parts; a part is a text, or an image, video or audio with its source inside
(`{"type": "image", "image": PIL | path | bytes | {"bytes", "path"}}`) or without one, which then comes from the
column of its kind (`images` / `image`, `videos` / `video`, `audios` / `audio`), in order. Where no message has such a
part, `<image>`, `<video>` and `<audio>` in users' texts are the places of the column's media, if there are as many.
Keys that are None, or structs of None, count as absent: Arrow writes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from math import inf
from numbers import Number
from operator import index
from typing import Any, final

import numpy as np

from vlmpack.collate.columns import (
    KINDS,
    SOURCE_KEYS,
    TURN_COLUMNS,
    Kind,
    Markers,
    MediaRef,
    check_inline_media,
    check_markers,
    check_one_form,
    column_media,
    fill_placeholders,
    holds_pairs,
    is_absent,
    is_empty,
    marked_kinds,
    no_columns,
    parts_in,
    split_at_markers,
)
from vlmpack.collate.vision_keys import KNOWN_KEYS, misspelt_key
from vlmpack.data.branches import ANSWER_COLUMN, BRANCH_COLUMN, FACTORS, FLAGS, PAIRS_COLUMN
from vlmpack.data.tool_calls import CALLING, calls_in, read_tools, with_arguments, without_nulls
from vlmpack.errors import Refusal

ROLES = ("system", "user", "assistant", "tool")
"""Roles of the messages that go into a chat template."""
ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
    "function": "tool",
    "tool_response": "tool",
    "developer": "system",
}
"""Other names of the same roles. Qwen's templates have no developer, and some leave such a turn out."""
Weights = tuple[tuple[str, float], ...]
"""Texts of an answer, one after the other, and the weight of each; ("", weight) if it has one weight."""
_ONE: Weights = (("", 1.0),)
SPEAKING = ("tool_calls", "reasoning_content")
"""Keys with which a turn needs no content."""
_READ_AS_JSON = (
    "; a text that is JSON itself, such as '42' or '{\"total\": 5}', is no text any more in a column of datasets.Json: "
    "open the file of JSON that it came from with open_dataset"
)
_PAYLOADS = {
    "text": ("text",),
    "image": ("image", "images", "image_url"),
    "video": ("video", "videos", "video_url"),
    "audio": ("audio", "audios", "audio_url", "input_audio"),
}
"""Keys that hold the content of a part, by its kind."""


@final
@dataclass(frozen=True, kw_only=True)
class Turn:
    """One message, and its weight in the loss if it is the assistant's."""

    message: dict[str, Any]
    """Role, content (a string or a list of parts, media parts still with their payload), and what else there is."""
    weight: float = 1.0
    """Of its targets; a text part may have another one under `weight`. 0: it is only read."""

    @property
    def weights(self) -> Weights:
        """The weights of its texts."""
        content = self.message["content"]
        texts = [] if isinstance(content, str) else [part for part in content if part["type"] == "text"]
        pieces = [(part["text"], part.get("weight", self.weight)) for part in texts]
        if len({weight for _, weight in pieces}) < 2:
            return (("", pieces[0][1] if pieces else self.weight),)
        return tuple(pieces)


def read_turns(value: Any, column: str, marked: Collection[Kind] = (), *, has_audio: bool = False) -> list[Turn]:
    """The turns of a column: messages with role and content, Qwen's turns with from and value, or Cauldron's pairs.

    In the texts of the latter, `<image>`, `<video>` and `<audio>` are placeholders of the kinds that are `marked`.
    `has_audio`: parts may be audio.

    Raises:
        Refusal: `bad_row`: they are no turns, one of them is empty, or its role or its flag is not known.
    """
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        if isinstance(value, str) and value.lstrip().startswith("["):
            hint = ", which is JSON text; parse it, or cast the column (dataset.cast_column(name, datasets.Json()))"
        elif isinstance(value, np.ndarray):
            hint = ", as pandas and a numpy format give rows; give lists (dataset.with_format(None), value.tolist())"
        else:
            hint = ", of lists, as datasets.Sequence stores turns; zip them" if isinstance(value, Mapping) else ""
        raise Refusal("bad_row", f"{column} must be a non-empty list of messages, got {short(value)}{hint}")
    if column == PAIRS_COLUMN:
        value = [turn for at, pair in enumerate(value) for turn in _pair(pair, f"{column}[{at}]")]
    is_qwen = isinstance(value[0], Mapping) and "from" in value[0]
    read = partial(_qwen_turn, marked=marked) if is_qwen else partial(_turn, has_audio=has_audio)
    turns = [read(item, f"{column}[{i}]") for i, item in enumerate(value)]
    return _with_known_roles(turns, column)


def with_system(turns: list[Turn], system: Any) -> list[Turn]:
    """The turns after the text of a column `system`, as LLaMA-Factory writes it.

    Raises:
        Refusal: `bad_row`: the column is no text, or the turns have another system message.
    """
    if not isinstance(system, str):
        raise Refusal("bad_row", f"the column system must be a text, got {short(system)}; give it as a message")
    systems = [text_of(turn.message).strip() for turn in turns if turn.message["role"] == "system"]
    if not system.strip() or system.strip() in systems:
        return turns
    if systems:
        fault = f"the column system says {system[:40]!r} and the system message {systems[0][:40]!r}; keep one of them"
        raise Refusal("bad_row", fault)
    return [Turn(message={"role": "system", "content": system}), *turns]


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message, its parts joined as a template joins them."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(p["text"] for p in content if p["type"] == "text")


def short(value: Any) -> str:
    """Describe a value in an error: its type, and the start of a string or the keys of a mapping."""
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with the keys {_keys(value)}"
    return f"{type(value).__name__} {value[:40]!r}" if isinstance(value, str) else type(value).__name__


def _keys(message: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} (None)" if value is None else str(key) for key, value in message.items()) or "none"


# ---------------------------------------------------------------------- role and content


def _turn(message: Any, where: str, *, has_audio: bool) -> Turn:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise Refusal("bad_row", f"{where} must be a mapping with a role and a content, got {short(message)}")
    content = message.get("content")
    if content is None:
        if all(is_empty(message.get(key)) for key in SPEAKING):
            fault = f"{where} ({message['role']}) has no content; it has the keys {_keys(message)}"
            raise Refusal("bad_row", f"{fault}: write what it says there")
        content = ""
    if isinstance(content, Mapping):
        content = [content]
    if isinstance(content, list | tuple):
        kinds = ("text", "image", "video", "audio")[: 4 if has_audio else 3]
        role = message["role"]
        content = [_part(part, f"{where}.content[{i}]", kinds, role) for i, part in enumerate(content)]
    elif not isinstance(content, str):
        hint = _READ_AS_JSON if isinstance(content, Number) else ""
        raise Refusal("bad_row", f"{where}.content must be a string or a list of parts, got {short(content)}{hint}")
    _check_no_payload(message, where, but=())
    rest = {key: value for key, value in message.items() if value is not None and key not in FLAGS}
    return Turn(message={**rest, "content": content}, weight=_weight(message, message["role"], where))


def _pair(pair: Any, where: str) -> list[dict[str, Any]]:
    """A question and its answer, as The Cauldron and FineVision write them."""
    if not isinstance(pair, Mapping) or not all(isinstance(pair.get(role), str) for role in ("user", "assistant")):
        raise Refusal("bad_row", f"{where} must have a user and an assistant, both texts, got {short(pair)}")
    rest = {key: value for key, value in pair.items() if key not in ("user", "assistant", "source")}
    return [{"role": "user", "content": pair["user"]}, {**rest, "role": "assistant", "content": pair["assistant"]}]


def _part(part: Any, where: str, kinds: Sequence[str], role: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        hint = _READ_AS_JSON if isinstance(part, Number) else ""
        raise Refusal("bad_row", f"{where} must be a mapping with a type, got {short(part)}{hint}")
    part = {key: value for key, value in part.items() if not is_absent(value)}
    kind = part.get("type") or next((k for k in ("image", "image_url", "video", "audio", "text") if k in part), "")
    if not isinstance(kind, str):
        raise Refusal("bad_row", f"{where}.type must be a text, such as 'image', got {short(kind)}")
    kind = {"image_url": "image", "video_url": "video", "input_image": "image", "input_text": "text"}.get(kind, kind)
    if kind not in kinds:
        usable, hint = f"{', '.join(kinds[:-1])} and {kinds[-1]}", "" if kind else _READ_AS_JSON
        raise Refusal("bad_row", f"{where} is of type {kind!r}; only {usable} parts can be used{hint}")
    if kind == "text" and not isinstance(part.get("text"), str):
        raise Refusal("bad_row", f"{where} is a text part without a text, got {short(part)}")
    _check_no_payload(part, where, but=_PAYLOADS[kind])
    known = ("text", *FLAGS) if kind == "text" else ("index", "sampling_rate", *SOURCE_KEYS, *KNOWN_KEYS)
    for key, value in part.items():
        # beside a medium, a key that is nearly known is refused later, with what is meant
        if key not in ("type", *known) and not is_empty(value) and (kind == "text" or not misspelt_key(str(key))):
            fault = f"{where} has {key!r} beside its {kind}, which nothing reads; take it out, or leave it out with"
            raise Refusal("bad_row", f"{fault} VLMCollator(ignored_keys=({key!r},))")
    if kind != "text" or not part.keys() & {*FLAGS}:
        return {**part, "type": kind}
    rest = {key: value for key, value in part.items() if key not in FLAGS}
    return {**rest, "type": kind, "weight": _weight(part, role, where)}


def _check_no_payload(holder: Mapping[str, Any], where: str, *, but: tuple[str, ...]) -> None:
    """Refuse media or text outside of the parts, or a second one in a part: nothing reads them."""
    keys = (key for names in _PAYLOADS.values() for key in names if key not in but)
    if media := next((key for key in keys if not is_empty(holder.get(key))), None):
        fault = f"{where} holds {media!r} where no template looks for it; give each text and medium a part of its own"
        raise Refusal("bad_row", f"{fault} in the content, or images and videos in columns of these names")


def _qwen_turn(turn: Any, where: str, marked: Collection[Kind]) -> Turn:
    """Read a turn of Qwen's fine-tuning rows: markers of these kinds are placeholders; user text is stripped."""
    if not isinstance(turn, Mapping) or not isinstance(turn.get("value"), str) or not isinstance(turn.get("from"), str):
        raise Refusal("bad_row", f"{where} must have a from and a value, got {short(turn)}")
    _check_no_payload(turn, where, but=())
    if unread := [key for key in ("content", *SPEAKING) if not is_empty(turn.get(key))]:
        raise Refusal("bad_row", f"{where} has {unread[0]!r} beside its value, which nothing reads; keep one of them")
    role = turn["from"]
    content = turn["value"]
    if _canonical(role) != "assistant":  # split as Qwen's own fine-tuning code does
        parts = split_at_markers(content, marked, strip=True)
        content = content.strip() if all(part["type"] == "text" for part in parts) else parts
    read = ("from", "value", *FLAGS)
    rest = {key: value for key, value in turn.items() if key not in read and not is_empty(value)}
    return Turn(message={**rest, "role": role, "content": content}, weight=_weight(turn, role, where))


def _with_known_roles(turns: list[Turn], column: str) -> list[Turn]:
    roles = list(dict.fromkeys(turn.message["role"] for turn in turns))
    usable = (*ROLES, *ALIASES, *CALLING)
    if unknown := next((role for role in roles if role not in usable), None):
        near = get_close_matches(unknown.lower(), (*ROLES, *ALIASES), n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise Refusal(
            "bad_row",
            f"{column} has a turn of the role {unknown!r}, which is not known{hint}; its roles are "
            f"{', '.join(roles)}, and those that can be used {', '.join(usable)}: rename it",
        )
    read: list[Turn] = []
    for turn in turns:
        role = turn.message["role"]
        message = {**turn.message, "role": _canonical(role)}
        is_call = role in CALLING and is_empty(message.get("tool_calls"))
        read = _with_call(read, replace(turn, message=message)) if is_call else [*read, replace(turn, message=message)]
    return read


def _with_call(turns: list[Turn], turn: Turn) -> list[Turn]:
    """Add a turn whose text is the JSON of calls: to the assistant's turn before it, as ms-swift does, or as its own.

    Raises:
        Refusal: `bad_row`: it is no such JSON.
    """
    message, before = turn.message, turns[-1] if turns else None
    parts = [] if isinstance(message["content"], str) else message["content"]
    if medium := next((part["type"] for part in parts if part["type"] != "text"), None):
        raise Refusal("bad_row", f"it has a function call with a part of type {medium!r}; a call is JSON text alone")
    is_more = before is not None and before.message["role"] == "assistant" and before.weight == turn.weight
    is_more = is_more and message.keys() == {"role", "content"}
    try:
        calls = calls_in(text_of(message))
        if before is not None and is_more:
            calls = [*with_arguments(before.message.get("tool_calls") or []), *calls]
            return [*turns[:-1], replace(before, message={**before.message, "tool_calls": calls})]
    except ValueError as error:
        raise Refusal("bad_row", f"it has {error}; a turn of the role assistant may say anything") from error
    return [*turns, replace(turn, message={**message, "content": "", "tool_calls": calls})]


def _canonical(role: str) -> str:
    return "assistant" if role in CALLING else ALIASES.get(role, role)


# ---------------------------------------------------------------------- weights of turns


def _weight(holder: Mapping[str, Any], role: str, where: str) -> float:
    """Read the weight of an answer, or of a text in it: 1 without any. Nothing of another turn is weighed."""
    flags = {name: holder[name] for name in FLAGS if holder.get(name) is not None}
    is_answer = _canonical(role) == "assistant"
    for name, value in flags.items():
        is_factor = name in FACTORS and is_answer
        fits = isinstance(value, int | float) and (0 <= value < inf if is_factor else value in (0, 1))
        if fits:
            continue
        usual = "a weight is a number from 0, which is not trained on" if name in FACTORS else "a flag is true or false"
        if not is_answer:
            usual = "only the assistant's turns have weights: leave it out"
        raise Refusal("bad_row", f"{where}.{name} is {value!r}; {usual}")
    factors = {float(value) for name, value in flags.items() if name in FACTORS}
    if len(factors) > 1 or len({bool(value) for value in flags.values()}) > 1:
        raise Refusal("bad_row", f"{where} has {flags}, which contradict each other; keep one of them")
    return next(iter(factors), float(all(flags.values()))) if is_answer else 1.0


def is_trained(pieces: Weights) -> bool:
    """Return whether anything of an answer is trained on."""
    return any(weight for _, weight in pieces)


@final
@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One sample as text with placeholders for its media."""

    messages: tuple[Mapping[str, Any], ...] = ()
    """For the chat template: parts are {"type": "text", "text": ...}, or {"type": "image"}, "video" or "audio"."""
    images: tuple[MediaRef, ...] = ()
    """In the order of their placeholders."""
    videos: tuple[MediaRef, ...] = ()
    """In the order of their placeholders."""
    audios: tuple[MediaRef, ...] = ()
    """In the order of their placeholders."""
    plain: tuple[str, str] | None = None
    """(prompt, completion) as strings, to be used without a chat template; `messages` is empty then."""
    turn_weights: tuple[Weights, ...] | None = None
    """Of each of the assistant's turns; None: all are 1."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments for the chat template: tools, and what `chat_template_kwargs` holds."""

    @property
    def media(self) -> Mapping[Kind, tuple[MediaRef, ...]]:
        """Its images, videos and audios by kind."""
        return {"image": self.images, "video": self.videos, "audio": self.audios}

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
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from _strings(inner)
    elif value is not None and not isinstance(value, Number):
        yield str(value)


def read_conversation(
    feature: Mapping[str, Any],
    *,
    has_vision: bool = True,
    has_audio: bool = False,
    markers: Markers = "auto",
    ignored_keys: Collection[str] = (),
) -> Conversation:
    """Read one sample of any of the shapes above; with a column `branch_turn`, one question and answer of it.

    Args:
        feature: the sample's columns.
        has_vision: whether the model has; to one that has not, `<image>` in a user's text is text.
        has_audio: whether the model takes audio; other models refuse it.
        markers: whether it is text to the others, or the place of an image: see `marked_kinds`.
        ignored_keys: keys of messages and their parts that are left out.

    Raises:
        Refusal: none of the known columns is there (`no_columns`), its conversation is None, or it contradicts itself
            (`bad_row`, `media_count_mismatch`, `ambiguous_media`), or a key beside an image is misspelt
            (`vision_key`).
    """
    present = {name: value for name, value in feature.items() if value is not None}
    if ignored_keys:
        present |= {name: _without_keys(present[name], ignored_keys) for name in TURN_COLUMNS if name in present}
    if has_vision and markers != "text":
        check_inline_media(_raw_questions(present))
    marked = marked_kinds(feature, markers if has_vision else "text")
    conversation = _read(present, feature, marked, has_audio=has_audio)
    missing: list[Kind] = [kind for kind in marked if not conversation.media[kind]]
    check_markers(_questions(conversation), feature, missing=missing)
    if (turn := present.get(BRANCH_COLUMN)) is not None:
        conversation = branch_of(conversation, turn)
    return conversation if (turn := present.get(ANSWER_COLUMN)) is None else up_to_answer(conversation, turn)


def _without_keys(turns: Any, keys: Collection[str]) -> Any:
    """Copy turns without some keys of theirs and of their parts."""
    if isinstance(turns, Mapping):
        kept = {name: value for name, value in turns.items() if name not in keys}
        return {**kept, "content": _without_keys(kept["content"], keys)} if "content" in kept else kept
    return [_without_keys(turn, keys) for turn in turns] if isinstance(turns, list | tuple) else turns


def unplaced_marker(conversation: Conversation, feature: Mapping[str, Any]) -> Kind | None:
    """Return the kind of medium whose marker a user's text holds, of a sample without such media and their column."""
    marked = marked_kinds(feature, "auto")
    missing: list[Kind] = [kind for kind in KINDS if kind not in marked and not conversation.media[kind]]
    texts = list(_questions(conversation)) if missing else []
    return next((kind for kind in missing if any(f"<{kind}>" in text for text in texts)), None)


def check_answered(conversation: Conversation) -> None:
    """Refuse a conversation that would teach the end of a turn alone; an empty answer beside one with text is kept.

    Raises:
        Refusal: `no_targets`: no answer that is trained on has more than blanks, a tool call or a thought in it.
    """
    if conversation.plain is not None:
        texts, which = [conversation.plain[1]], "its completion is"
    else:
        answers = [message for message in conversation.messages if message["role"] == "assistant"]
        weights = conversation.turn_weights or (_ONE,) * len(answers)
        trained = [(message, pieces) for message, pieces in zip(answers, weights, strict=True) if is_trained(pieces)]
        if any(not is_empty(message.get(key)) for message, _ in trained for key in SPEAKING):
            return
        texts = [
            text_of(message) if len(pieces) == 1 else "".join(text for text, weight in pieces if weight)
            for message, pieces in trained
        ]
        which = "its answer is" if len(texts) == 1 else f"all its {len(texts)} answers are"
    if texts and not any(text.strip() for text in texts):
        raise Refusal(
            "no_targets",
            f"{which} empty ({texts[-1]!r:.40}), so only the end of a turn would be trained on; write the answer, "
            "leave the sample out, or choose train_on='all'",
        )


def _raw_questions(present: Mapping[str, Any]) -> Iterator[str]:
    """Yield what users say, as it is written in the sample's columns."""
    for name in ("messages", "conversation", "conversations", "prompt", PAIRS_COLUMN):
        turns = present.get(name)
        if name == "prompt" and isinstance(turns, str):
            yield turns
        for turn in turns if isinstance(turns, list | tuple) else ():
            if not isinstance(turn, Mapping):
                continue
            role = turn.get("role", turn.get("from"))
            is_question = isinstance(role, str) and _canonical(role) == "user"
            said = turn.get("content", turn.get("value")) if is_question else turn.get("user")
            parts = said if isinstance(said, list | tuple) else [said]
            texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
            yield from (text for text in texts if isinstance(text, str))


def _questions(conversation: Conversation) -> Iterator[str]:
    """Yield what users say, or the prompt."""
    if conversation.plain is not None:
        yield conversation.plain[0]
    yield from (text_of(message) for message in conversation.messages if message["role"] == "user")


def _read(
    present: Mapping[str, Any], feature: Mapping[str, Any], marked: Collection[Kind], *, has_audio: bool
) -> Conversation:
    columns = [name for name in ("messages", "conversation", "conversations") if name in present]
    if holds_pairs(present.get(PAIRS_COLUMN)):
        columns.append(PAIRS_COLUMN)
    is_pair = "prompt" in present and "completion" in present
    check_one_form([*columns, "prompt and completion"] if is_pair else columns, present, has_audio=has_audio)
    if columns:
        turns = read_turns(present[columns[0]], columns[0], marked, has_audio=has_audio)
        return _conversation(turns, present, marked)
    if is_pair:
        return _prompt_and_completion(present, marked, has_audio=has_audio)
    raise no_columns(feature)


def _template_options(present: Mapping[str, Any]) -> dict[str, Any]:
    options, tools = without_nulls(present.get("chat_template_kwargs", {})), without_nulls(present.get("tools", []))
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise Refusal("bad_row", f"chat_template_kwargs must be a mapping of names, got {short(options)}")
    try:
        tools = read_tools(tools)
    except ValueError as error:
        raise Refusal("bad_row", str(error)) from error
    if tools and not is_empty(options.get("tools")):
        raise Refusal("bad_row", "it has tools in a column and in chat_template_kwargs; keep the column")
    return {**options, **({"tools": tools} if tools else {})}


# ---------------------------------------------------------------------- conversations


def _conversation(turns: list[Turn], present: Mapping[str, Any], marked: Collection[Kind]) -> Conversation:
    if "system" in present:
        turns = with_system(turns, present["system"])
    messages = [turn.message for turn in turns]
    kinds: tuple[Kind, ...] = ("video", "image", "audio")  # media without placeholders: images in front
    media: dict[str, Any] = {f"{k}s": fill_placeholders(messages, present, k, is_marked=k in marked) for k in kinds}
    weights = tuple(turn.weights for turn in turns if turn.message["role"] == "assistant")
    return Conversation(
        messages=tuple(map(_for_template, messages)),
        turn_weights=None if all(pieces == _ONE for pieces in weights) else weights,
        template_options=_template_options(present),
        **media,
    )


def _prompt_and_completion(present: Mapping[str, Any], marked: Collection[Kind], *, has_audio: bool) -> Conversation:
    prompt, completion = present["prompt"], present["completion"]
    if isinstance(prompt, str) != isinstance(completion, str):
        raise Refusal("bad_row", "prompt and completion must both be strings or both be lists of messages")
    if isinstance(prompt, str):
        if present.get("system"):
            raise Refusal("bad_row", f"it has a column system, {short(present['system'])}; write it into the prompt")
        media: dict[str, Any] = {f"{kind}s": column_media(present, kind) for kind in KINDS}
        return Conversation(plain=(prompt, completion), **media)
    read = partial(read_turns, marked=marked, has_audio=has_audio)
    prompt_turns = [_untrained(turn) for turn in read(prompt, "prompt")]
    return _conversation([*prompt_turns, *read(completion, "completion")], present, marked)


def _untrained(turn: Turn) -> Turn:
    content = turn.message["content"]
    if not isinstance(content, str):
        content = [{key: value for key, value in part.items() if key != "weight"} for part in content]
    return Turn(message={**turn.message, "content": content}, weight=0.0)


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Keep only what a chat template needs: pixels in its variables would be copied, or printed.

    Raises:
        Refusal: `bad_row`: the arguments of a tool call are a text that is no JSON.
    """
    if not isinstance(message["content"], str):
        kept = {"text": ("type", "text")}
        content = [{key: part[key] for key in kept.get(part["type"], ("type",))} for part in message["content"]]
        message = {**message, "content": content}
    written: dict[str, Any] = without_nulls(message)
    if "tool_calls" in written:
        try:
            written["tool_calls"] = with_arguments(written["tool_calls"])
        except ValueError as error:
            raise Refusal("bad_row", f"it has {error}; write them as an object") from error
    return written


# ---------------------------------------------------------------------- one answer of a conversation


def last_alone(conversation: Conversation) -> Conversation:
    """Return a conversation of whose answers the last alone is trained on, by its own weights."""
    count = sum(message["role"] == "assistant" for message in conversation.messages)
    weights = conversation.turn_weights or (_ONE,) * count
    unread: tuple[Weights, ...] = ((("", 0.0),),) * (count - 1)
    return replace(conversation, turn_weights=(*unread, weights[-1])) if count else conversation


def up_to_answer(conversation: Conversation, turn: Any) -> Conversation:
    """Return a conversation up to one of its answers, which alone is trained on.

    Args:
        conversation: of messages.
        turn: number of the answer, from 0.

    Raises:
        Refusal: `bad_row`: it has no such answer.
    """
    answers = [at for at, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    number = _number(ANSWER_COLUMN, turn, len(answers), "answers")
    messages, weights = conversation.messages[: answers[number] + 1], conversation.turn_weights
    kinds = [part["type"] for message in messages for part in parts_in(message)]
    media: dict[str, Any] = {f"{kind}s": refs[: kinds.count(kind)] for kind, refs in conversation.media.items()}
    kept = None if weights is None else weights[: number + 1]
    return last_alone(replace(conversation, messages=messages, turn_weights=kept, **media))


def _number(column: str, turn: Any, count: int, named: str) -> int:
    """Read the number of a question or an answer.

    Raises:
        Refusal: `bad_row`: there is none of this number.
    """
    try:
        number = index(turn)
    except TypeError:
        number = -1
    if not 0 <= number < count:
        raise Refusal("bad_row", f"its {column} is {turn!r}, but it has {count} {named}, counted from 0")
    return number


def branch_of(conversation: Conversation, turn: Any) -> Conversation:
    """Return the conversation of one question and its answer, after the system messages.

        conversation     system   user: image, Q0   A0   user: Q1   A1   user: image 2, Q2   A2
        branch 0         system   user: image, Q0   A0
        branch 1         system   user: image, Q1   A1
        branch 2         system   user: image, image 2, Q2   A2

    Answers do not see each other. The first question stays as it is written; its images stand in front of every other
    one.

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
        fault = f"it has the column {BRANCH_COLUMN}, but its turns are {', '.join(roles) or 'plain strings'}; branches"
        raise Refusal(
            "bad_row",
            f"{fault} need questions and answers in turn, after any system messages; open the data set with "
            "branches='conversation', or leave the sample out",
        )
    number = _number(BRANCH_COLUMN, turn, pairs, "questions")
    refs: dict[str, Iterator[MediaRef]] = {kind: iter(media) for kind, media in conversation.media.items()}
    parts = [
        [(part, next(refs[part["type"]]) if part["type"] in refs else None) for part in parts_in(message)]
        for message in conversation.messages
    ]
    question = first + 2 * number
    if number:
        parts[question] = [part for part in parts[first] if part[1] is not None] + parts[question]
    kept = [*range(first), question, question + 1]
    messages = [conversation.messages[at] for at in kept]
    if not isinstance(messages[-2]["content"], str) or len(parts[question]) > 1:  # a text stays a text
        messages[-2] = {**messages[-2], "content": [part for part, _ in parts[question]]}
    taken = [part for at in kept for part in parts[at]]
    weights = conversation.turn_weights
    media: dict[str, Any] = {
        f"{kind}s": tuple(ref for part, ref in taken if ref is not None and part["type"] == kind) for kind in KINDS
    }
    return replace(
        conversation, messages=tuple(messages), turn_weights=None if weights is None else (weights[number],), **media
    )
