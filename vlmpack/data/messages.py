"""Convert a row in any format to one conversation: messages with roles, parts and weights, and its media in order.

    TRL        {"messages": [...], "images": [...]}   {"prompt": ..., "completion": ..., "images": [...]}
    Qwen       {"conversations": [{"from": "human", "value": "<image>\\n..."}, ...], "image": path or list}
    NeMo       {"conversation": [{"role": ..., "content": [{"type": "image", "image": PIL}, ...]}]}
    others     as converted by `formats.as_messages`

A message's content is a string or a list of parts. A part is a text, image, video or audio. A media part holds its
source (`{"type": "image", "image": PIL | path | bytes | {"bytes", "path"}}`), or it is empty and takes the next medium
from the column of its kind (`images` / `image`, `videos` / `video`, `audios` / `audio`). If no message has such a part,
`<image>`, `<video>` and `<audio>` in users' texts are the placeholders of the column's media, provided the numbers
match. Keys whose value is None or a struct of Nones count as absent, because Arrow writes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache, partial
from itertools import pairwise
from numbers import Number
from operator import index
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from vlmpack.data.formats import (
    ANSWER_COLUMN,
    BRANCH_COLUMN,
    CALLING,
    CHANNEL_COLUMN,
    ENDS,
    FACTORS,
    FLAGS,
    KINDS,
    MEDIA,
    PAIRS,
    TURNS,
    Kind,
    as_messages,
    bad_row,
    calls_in,
    is_absent,
    is_empty,
    read_tools,
    with_arguments,
    without_nulls,
)
from vlmpack.errors import SampleError
from vlmpack.layout.batch import TEACHER

ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    "human": "user",
    "gpt": "assistant",
    "developer": "system",
    **dict.fromkeys(("observation", "function", "tool_response"), "tool"),
    **dict.fromkeys(CALLING, "assistant"),
}
"""Roles of turns -> their roles in a chat template. Qwen's templates have no developer role, and some templates leave
such a turn out."""
RANGES = "train_detail"
"""Key of the ranges of characters of an answer that are trained on, in axolotl's format."""
_UNWRITTEN = (*FLAGS, RANGES)
"""Keys of a turn that a chat template does not get."""
SPEAKING = ("tool_calls", "reasoning_content")
"""Keys that make a turn's content optional."""
Markers = Literal["auto", "places", "text"]
"""The meaning of `<image>`, `<video>` and `<audio>` in a text; see `marked_kinds`."""
Weights = tuple[tuple[str, float], ...]
"""The consecutive texts of an answer, each with its weight; ("", weight) if the whole answer has one weight."""
_ONE: Weights = (("", 1.0),)
_LARGEST = float(np.finfo(np.float32).max)

# ---------------------------------------------------------------------- names of columns and keys

_TEXT_COLUMNS = ("input_ids", *TURNS)
LABEL_COLUMNS = ("labels", "completion_mask", "assistant_masks", "loss_mask")
"""Columns from which labels are made. The masks come from TRL and SeqPacker; 0 means not trained on."""
WEIGHT_COLUMN = "loss_weights"
"""Column with the weight of each label of a tokenized sample, not shifted."""
SECONDS_COLUMNS = ("second_per_grid_ts", "video_second_per_grid")
"""Columns with the seconds from one grid of each video to the next: Qwen2.5-VL's name and Qwen-Omni's."""
READ_COLUMNS = (
    *(*_TEXT_COLUMNS, *MEDIA, "system", "tools", "chat_template_kwargs", "id", "sample_id", CHANNEL_COLUMN),
    *(BRANCH_COLUMN, ANSWER_COLUMN, "objects", *TEACHER),
)
"""Columns that a conversation may have."""
_OF_TOKENS = (
    *("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"),
    *("input_features", "feature_attention_mask", SECONDS_COLUMNS[1], *LABEL_COLUMNS[1:], WEIGHT_COLUMN),
)
"""Columns that only tokenized samples have."""
_KNOWN = {*READ_COLUMNS, *_OF_TOKENS, *SECONDS_COLUMNS, "labels", "attention_mask", "mm_token_type_ids"}
_KEPT = {*MEDIA, "id", "sample_id", "length", "label", "labels", "label_ids", "attention_mask", "position_ids"}
"""Columns that HF Trainer or TRL may keep of a sample after dropping its text."""
_NOTES = {"length", "lengths", "index", "idx", "source", "dataset", "split", "attention_mask", "token_type_ids"}
"""Columns that nothing reads and that would change nothing."""
_PREFERENCE = re.compile(r"(chosen|rejected)(_.*)?|(loss|sample)_(scale|weight)s?")
"""Names of columns that say how strongly, or against which alternative, a sample is trained on."""
_MEDIA_NAMES = re.compile(
    r"(images?|imgs?|pictures?|pics?|photos?|videos?|clips?|audios?|sounds?|speech|wavs?)"
    r"_?(paths?|files?|urls?|bytes|file_?names?|data|base64|array)?"
)
"""Names of columns that hold media; `image_id` and `num_images` do not match."""
_FILE_COLUMN = re.compile(r"(file_?names?|files?|file_?paths?|paths?|media|media_paths?|attachments?|frames)")
"""Names of columns that hold files of any kind."""
_ENDS = tuple(end for ends in ENDS.values() for end in ends)
_ENCODED = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF")
"""First bytes of encoded images (and RIFF files)."""
GROUNDING: tuple[str, ...] = ("<ref-object>", "<bbox>")
"""Placeholders in a text for the names and boxes of ms-swift's column `objects`."""

VIDEO_KEYS = ("min_pixels", "max_pixels", "resized_height", "resized_width", "total_pixels")
"""Keys beside a medium that set its size. The first four also apply to images."""
FILE_KEYS = ("fps", "nframes", "min_frames", "max_frames", "video_start", "video_end")
"""Keys that choose the frames of a video file."""
FRAME_KEYS = ("timestamps", "frames_indices")
"""Keys beside a list of frames: each frame's time in seconds, or its index in a video of `fps` frames per second."""
RATES = ("sample_fps", "raw_fps")
"""Keys beside a list of frames: their rate, and the rate for Qwen3-VL's timestamps."""
TIMES = ("frame_indices", "total_num_frames", "duration", "video_metadata")
"""Further keys with which other libraries give the times of frames. Beside a video they are refused."""
KNOWN_KEYS = (*VIDEO_KEYS, *RATES, *FILE_KEYS, *FRAME_KEYS)
"""All keys that are read beside a medium, from qwen-vl-utils and transformers' `VideoMetadata`."""
_SOURCE_KEYS: dict[str, tuple[str, ...]] = {
    "image": ("image", "image_url", "url", "path", "bytes"),
    "video": ("video", "video_url", "url", "path", "bytes"),
    "audio": ("audio",),
}
"""Keys of a part that may hold the source of its medium, by kind."""
_SOURCES = frozenset(key for keys in _SOURCE_KEYS.values() for key in keys)


@lru_cache(maxsize=1024)
def misspelt_key(name: str) -> str | None:
    """Return the known key that a name nearly spells. None: it is a known key, or resembles none (`height`)."""
    near = get_close_matches(name.lower().replace("-", "_"), KNOWN_KEYS, n=1, cutoff=0.85)
    return near[0] if near and name not in KNOWN_KEYS else None


@dataclass(frozen=True, kw_only=True)
class MediaRef:
    """One image, video or audio: its source, and the options that set its size or frames."""

    source: Any
    """A PIL image, path, bytes, or {"bytes", "path"}. For a video, its file in one of these forms, or a list of frames.
    For an audio, also an array, or {"array", "sampling_rate"}."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The keys of qwen-vl-utils beside the medium: min_pixels, resized_height, fps, ..."""
    kind: Kind = "image"
    """What it is."""
    index: int = 0
    """Its position among the media of its kind in the sample, which errors name."""

    def named(self, error: SampleError) -> SampleError:
        """Return a refusal of this medium that names it: by its position in the sample, and by its file."""
        path = self.source.get("path") if isinstance(self.source, Mapping) else self.source
        is_file = isinstance(path, str | Path) and len(str(path)) < 256 and not str(path).startswith("data:")
        file = f" ({path})" if is_file and Path(str(path)).name not in error.detail else ""
        return error.within(f"{self.kind} {self.index}{file}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Objects:
    """What fills the placeholders of names and boxes in a sample's texts: ms-swift's column `objects`."""

    names: Sequence[str]
    """A text for each `<ref-object>`."""
    boxes: Sequence[np.ndarray]
    """A point [1, 2], or two corners [2, 2], for each `<bbox>`: float64, x and y."""
    images: Sequence[int]
    """Index of the image of each box."""
    unit: str
    """"real": boxes are in pixels. "norm1": in fractions of the image's sides."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One sample as text with placeholders for its media."""

    messages: tuple[Mapping[str, Any], ...] = ()
    """Input of the chat template. Parts are {"type": "text", "text": ...}, or {"type": "image"}, "video" or "audio"."""
    media: Mapping[Kind, tuple[MediaRef, ...]]
    """Images, videos and audios by kind, in the order of their placeholders."""
    plain: tuple[str, str] | None = None
    """(prompt, completion) as strings, to be used without a chat template; `messages` is then empty."""
    turn_weights: tuple[Weights, ...] | None = None
    """The weights of each assistant turn; None: all are 1."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Extra arguments of the chat template: tools, and the contents of `chat_template_kwargs`."""
    unread: tuple[str, ...] = ()
    """Columns of the sample, and keys beside its media, that nothing reads."""
    unplaced: tuple[Kind, str] | None = None
    """A kind of media that the sample lacks, and a marker for it in a user's text; None: there is none."""
    objects: Objects | None = None
    """What fills the placeholders `GROUNDING` in the texts; None: there are none."""

    def contents(self) -> list[str]:
        """Return the text of each message, or prompt and completion."""
        return [*(self.plain or map(text_of, self.messages))]

    def other_texts(self) -> Iterator[str]:
        """Yield every other string that a template could write, such as names and arguments of tool calls.

        For nested values this includes the keys: a template writes them as JSON or XML.
        """
        for message in self.messages:
            yield from _strings({key: value for key, value in message.items() if key not in ("role", "content")})
        yield from _strings(self.template_options)
        yield from self.objects.names if self.objects else ()

    @property
    def weights(self) -> tuple[Weights, ...]:
        """The weights of each assistant turn."""
        count = sum(message["role"] == "assistant" for message in self.messages)
        return self.turn_weights or (_ONE,) * count

    def questions(self) -> list[str]:
        """Return the users' texts, or the prompt."""
        return [*(self.plain or ())[:1], *(text_of(m) for m in self.messages if m["role"] == "user")]


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message, with its parts joined as a template joins them."""
    return "".join(part["text"] for part in _parts_in(message) if part["type"] == "text")


def _strings(value: Any) -> Iterator[str]:
    """Yield the strings in nested values, keys included. Other values, except numbers, are converted to text."""
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from _strings(inner)
    elif value is not None and not isinstance(value, Number):
        yield str(value)


def is_trained(pieces: Weights) -> bool:
    """Return whether any part of an answer is trained on."""
    return any(weight for _, weight in pieces)


def read_conversation(
    feature: Mapping[str, Any],
    *,
    has_vision: bool = True,
    has_audio: bool = False,
    markers: Markers = "auto",
    ignored_keys: Collection[str] = (),
) -> Conversation:
    """Read one sample in any format. With a column `branch_turn` or `answer_turn`, read one question or answer of it.

    Args:
        feature: the sample's columns.
        has_vision: whether the model has vision; without it, `<image>` in a user's text is plain text.
        has_audio: whether the model takes audio; if not, audio is refused.
        markers: whether `<image>` is plain text or the placeholder of an image; see `marked_kinds`.
        ignored_keys: keys to drop from messages and their parts.

    Raises:
        SampleError: no known column exists (`no_columns`); the conversation is None or contradicts itself (`bad_row`,
            `media_count_mismatch`, `ambiguous_media`, `media_in_text`); a key beside an image is misspelled
            (`vision_key`); or an unread column holds something that the sample needs (`unread_column`).
    """
    reads_media = has_vision and markers != "text"
    if ignored_keys:
        turns = [name for name in (*TURNS, *PAIRS) if name in feature]
        feature = {**feature, **{name: _without(feature[name], ignored_keys) for name in turns}}
    row = as_messages(feature, inline=reads_media)
    present, marked = {k: v for k, v in row.items() if v is not None}, marked_kinds(row, markers if has_vision else "")
    conversation = _read(present, row, marked, has_audio=has_audio, reads_media=reads_media)
    said = "\n".join(conversation.questions())
    lost: dict[Kind, str] = {kind: marker for kind, marker in _markers_in(said).items() if not conversation.media[kind]}
    if placed := next((each for each in lost.items() if each[0] in marked), None):
        _refuse_marker(*placed, said.count(placed[1]), row)
    has_media = any(conversation.media.values()) or not has_vision
    objects = present.get("objects")
    held = [objects.get(key) for key in ("ref", "bbox")] if isinstance(objects, Mapping) else objects
    texts = () if is_empty(held) else (*conversation.contents(), *conversation.other_texts())
    is_grounded = any(mark in text for mark in GROUNDING for text in texts)
    unread = check_unread(row, has_media=has_media)
    pair = [name for name in TURNS[3:] if name in present]
    beside = [
        f"{name} beside {kind}s"
        for kind, media in conversation.media.items()
        for ref in media
        for name, value in ref.options.items()
        if name not in (*KNOWN_KEYS, *TIMES, "sampling_rate") and not is_empty(value)
    ]
    unplaced = next(iter(lost.items()), None) if reads_media and markers == "auto" else None
    unread = (*unread, *(pair if len(pair) == 1 else ()), *beside, *(["objects"] if texts and not is_grounded else ()))
    filling = _objects(objects) if is_grounded else None
    return replace(conversation, unread=unread, unplaced=unplaced, objects=filling)


def _objects(column: Any) -> Objects:
    """Read the column `objects`."""
    given = without_nulls(column)
    try:
        names, unit = given.get("ref", []), given.get("bbox_type", "real")
        boxes = [np.asarray(box, np.float64).reshape(-1, 2) for box in given.get("bbox", [])]
        images = [*map(index, given.get("image_id", []))] or [0] * len(boxes)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise TypeError
        if not {*map(len, boxes)} <= {1, 2} or len(images) != len(boxes) or unit not in ("real", "norm1"):
            raise ValueError
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        usual = "ref (texts), bbox (x, y or x1, y1, x2, y2 each), bbox_type (real or norm1) and image_id (one a box)"
        raise bad_row(f"its column objects is {given!r:.80}; it must hold {usual}") from error
    return Objects(names=names, boxes=boxes, images=images, unit=unit)


def _without(turns: Any, keys: Collection[str]) -> Any:
    """Copy turns without the given keys, in the turns and in their parts."""
    if isinstance(turns, Mapping):
        kept = {name: value for name, value in turns.items() if name not in keys}
        return {**kept, "content": _without(kept["content"], keys)} if "content" in kept else kept
    return [_without(turn, keys) for turn in turns] if isinstance(turns, list | tuple) else turns


def _read(
    present: Mapping[str, Any],
    feature: Mapping[str, Any],
    marked: Collection[Kind],
    *,
    has_audio: bool,
    reads_media: bool,
) -> Conversation:
    forms = [name for name in TURNS[:3] if name in present]
    if is_pair := TURNS[3] in present and TURNS[4] in present:
        forms.append("prompt and completion")
    if len(forms) > 1:
        raise bad_row(f"it has {' and '.join(forms)}, of which only one would be read; keep one")
    if match := next((name for name in _OF_TOKENS if forms and not is_empty(present.get(name))), None):
        raise bad_row(f"it has {match}, which belongs to input_ids, and {forms[0]}; keep one of them")
    if match := next((name for name in MEDIA[4:] if not has_audio and not is_empty(present.get(name))), None):
        raise bad_row(f"it has {match}, which these models do not take; leave the sample or the column out")
    if not forms:
        raise no_columns(feature)
    prompt, completion, turns = present.get("prompt"), present.get("completion"), list[dict[str, Any]]()
    if is_pair and isinstance(prompt, str) != isinstance(completion, str):
        raise bad_row("prompt and completion must both be strings or both be lists of messages")
    if is_pair and isinstance(prompt, str):
        for column, named in ((BRANCH_COLUMN, "questions"), (ANSWER_COLUMN, "answers")):
            if (number := present.get(column)) is not None:
                _number(column, number, 0, named)
        if present.get("system"):
            raise bad_row(f"it has a column system, {short(present['system'])}; write it into the prompt")
        if reads_media:
            _check_inline_media([prompt])
        return Conversation(plain=(prompt, str(completion)), media=_numbered(partial(_column_media, present)))
    for name in TURNS[3:] if is_pair else forms:
        read = _turns(present[name], name, marked, has_audio=has_audio)
        turns += map(_untrained, read) if name == "prompt" else read
    if reads_media:
        _check_inline_media(p["text"] for m in turns if m["role"] == "user" for p in _parts_in(m) if "text" in p)
    if "system" in present:
        turns = _with_system(turns, present["system"])
    for kind in ("video", "image", "audio"):  # each goes to the front, so images end up before videos
        _place_media(turns, present, kind, is_marked=kind in marked)
    if (number := present.get(BRANCH_COLUMN)) is not None:
        turns = _branch_of(turns, number)
    if (number := present.get(ANSWER_COLUMN)) is not None:
        answers = [at for at, message in enumerate(turns) if message["role"] == "assistant"]
        last = answers[_number(ANSWER_COLUMN, number, len(answers), "answers")]
        turns = [*map(_untrained, turns[:last]), turns[last]]
    weights = tuple(_weights_of(message) for message in turns if message["role"] == "assistant")
    return Conversation(
        messages=tuple(map(_for_template, turns)),
        media=_numbered(lambda kind: [p["medium"] for m in turns for p in _parts_in(m) if p["type"] == kind]),
        turn_weights=None if all(pieces == _ONE for pieces in weights) else weights,
        template_options=_template_options(present),
    )


def _numbered(media_of: Callable[[Kind], Iterable[MediaRef]]) -> dict[Kind, tuple[MediaRef, ...]]:
    """Return the media of each kind, with their positions."""
    return {kind: tuple(replace(ref, kind=kind, index=at) for at, ref in enumerate(media_of(kind))) for kind in KINDS}


def _template_options(present: Mapping[str, Any]) -> dict[str, Any]:
    options, tools = without_nulls(present.get("chat_template_kwargs", {})), without_nulls(present.get("tools", []))
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise bad_row(f"chat_template_kwargs must be a mapping of names, got {short(options)}")
    tools = read_tools(tools)
    if tools and not is_empty(options.get("tools")):
        raise bad_row("it has tools in a column and in chat_template_kwargs; keep the column")
    return {**options, **({"tools": tools} if tools else {})}


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Keep only what a chat template needs. Pixels among its variables would be copied or printed."""
    message = {key: value for key, value in message.items() if key != "weight"}
    if not isinstance(message["content"], str):
        parts = message["content"]
        message["content"] = [{key: part[key] for key in ("type", "text") if key in part} for part in parts]
    written: dict[str, Any] = without_nulls(message)
    if "tool_calls" in written:
        written["tool_calls"] = with_arguments(written["tool_calls"])
    return written


# ---------------------------------------------------------------------- turns

_READ_AS_JSON = (
    "; a text that is JSON itself, such as '42' or '{\"total\": 5}', is no text any more in a column of datasets.Json: "
    "open the file of JSON that it came from with open_dataset"
)


def short(value: Any) -> str:
    """Describe a value for an error: its type, and the start of a string or the keys of a mapping."""
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with the keys {_keys(value)}"
    about = f" {value[:40]!r}" if isinstance(value, str) else _READ_AS_JSON if isinstance(value, Number) else ""
    return f"{type(value).__name__}{about}"


def _keys(message: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} (None)" if value is None else str(key) for key, value in message.items()) or "none"


def _turns(value: Any, column: str, marked: Collection[Kind], *, has_audio: bool) -> list[dict[str, Any]]:
    """Read the messages of a column. Turns have a role and a content, or Qwen's `from` and `value`.

    In the texts of `from`/`value` turns, `<image>`, `<video>` and `<audio>` are placeholders if their kind is in
    `marked`. Text parts and answers may have a `weight`. A media part becomes a part with a `medium`, which is None if
    it has no source.
    """
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        if isinstance(value, str) and value.lstrip().startswith("["):
            hint = ", which is JSON text; parse it, or cast the column (dataset.cast_column(name, datasets.Json()))"
        elif isinstance(value, np.ndarray):
            hint = ", as pandas and a numpy format give rows; give lists (dataset.with_format(None), value.tolist())"
        else:
            hint = ", of lists, as datasets.Sequence stores turns; zip them" if isinstance(value, Mapping) else ""
        raise bad_row(f"{column} must be a non-empty list of messages, got {short(value)}{hint}")
    turns: list[dict[str, Any]] = []
    for at, item in enumerate(value):
        where = f"{column}[{at}]"
        item = _from_value(item, where, marked) if isinstance(item, Mapping) and "from" in item else item
        turn = _turn(item, where, ("text", *KINDS)[: 4 if has_audio else 3])
        if (given := turn["role"]) not in ROLES:
            near = get_close_matches(given.lower(), ROLES, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise bad_row(f"{column} has the unknown role {given!r}{hint}; known are {', '.join(ROLES)}")
        turn["role"] = ROLES[given]
        if given in CALLING and is_empty(turn.get("tool_calls")):
            turns = _with_call(turns, turn)
        else:
            turns.append(turn)
    return turns


def _parts_in(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _from_value(turn: Mapping[str, Any], where: str, marked: Collection[Kind]) -> dict[str, Any]:
    """Convert a turn of Qwen's fine-tuning format to a message. Split and strip its text as Qwen's own code does."""
    text, role = turn.get("value"), turn["from"]
    if not isinstance(text, str) or not isinstance(role, str):
        raise bad_row(f"{where} must have a from and a value that are texts, got {short(role)} and {short(text)}")
    if unread := [key for key in ("content", *SPEAKING) if not is_empty(turn.get(key))]:
        raise bad_row(f"{where} has {unread[0]!r} beside its value, which nothing reads; keep one of them")
    if marked and ROLES.get(role) == "user":
        _check_inline_media([text])
    content = text if ROLES.get(role) == "assistant" else _split_at_markers(text, marked, strip=True)
    if not isinstance(content, str) and all(part["type"] == "text" for part in content):
        content = text.strip()
    rest = {key: value for key, value in turn.items() if key not in ("from", "value") and not is_empty(value)}
    return {**rest, "role": role, "content": content}


def _turn(message: Any, where: str, kinds: Sequence[str]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(role := message.get("role"), str):
        raise bad_row(f"{where} must be a mapping with a role and a content, got {short(message)}")
    content = message.get("content")
    if content is None and all(is_empty(message.get(key)) for key in SPEAKING):
        raise bad_row(f"{where} ({role}) has no content; it has the keys {_keys(message)}")
    content = "" if content is None else [content] if isinstance(content, Mapping) else content
    if isinstance(content, list | tuple):
        content = [_part(part, f"{where}.content[{i}]", kinds, role) for i, part in enumerate(content)]
    elif not isinstance(content, str):
        raise bad_row(f"{where}.content must be a string or a list of parts, got {short(content)}")
    rest = {key: value for key, value in message.items() if value is not None and key not in _UNWRITTEN}
    weight = _weight(message, role, where)
    if not is_empty(ranges := message.get(RANGES)):
        content = _trained_in(content, ranges, role, where, weight)
    return {**rest, "content": content, "weight": weight}


def _trained_in(content: Any, ranges: Any, role: str, where: str, weight: float) -> list[dict[str, Any]]:
    """Split an answer into parts: the characters in `ranges` have this weight, and all others have weight 0.

    As in axolotl, a range ends with its last character, and ranges with `train: false` change nothing.
    """
    try:
        is_trained = np.zeros(len(content), bool)
        for each in ranges:
            first, last, is_on = index(each["begin_offset"]), index(each["end_offset"]), each["train"]
            if not (0 <= first <= last and isinstance(is_on, bool | int)):
                raise ValueError
            is_trained[first : last + 1] |= bool(is_on)
        if not isinstance(content, str) or ROLES.get(role) != "assistant":
            raise TypeError
    except (TypeError, ValueError, KeyError) as error:
        usual = "a list of begin_offset, end_offset (of the last character) and train, beside the text of an answer"
        raise bad_row(f"{where}.{RANGES} is {ranges!r:.80}; it must be {usual}") from error
    edges = [0, *(np.flatnonzero(is_trained[1:] != is_trained[:-1]) + 1).tolist(), len(content)]
    pieces = [(content[start:stop], float(is_trained[start])) for start, stop in pairwise(edges) if start < stop]
    return [{"type": "text", "text": text, "weight": weight * is_on} for text, is_on in pieces]


def _part(part: Any, where: str, kinds: Sequence[str], role: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise bad_row(f"{where} must be a mapping with a type, got {short(part)}")
    part = {key: value for key, value in part.items() if not is_absent(value)}
    kind = part.get("type") or next((k for k in ("image", "image_url", "video", "audio", "text") if k in part), "")
    if not isinstance(kind, str):
        raise bad_row(f"{where}.type must be a text, such as 'image', got {short(kind)}")
    kind = {"image_url": "image", "video_url": "video", "input_image": "image", "input_text": "text"}.get(kind, kind)
    if kind not in kinds:
        usable, hint = f"{', '.join(kinds[:-1])} and {kinds[-1]}", "" if kind else _READ_AS_JSON
        raise bad_row(f"{where} is of type {kind!r}; only {usable} parts can be used{hint}")
    if kind == "text" and not isinstance(part.get("text"), str):
        raise bad_row(f"{where} is a text part without a text, got {short(part)}")
    keys = {} if kind == "text" else _keys_beside(part)
    known = ("type", "text", *FLAGS) if kind == "text" else ("type", "index", "sampling_rate", *KNOWN_KEYS)
    for key, value in part.items():
        if key not in (*known, *_SOURCE_KEYS.get(kind, ())) and not is_empty(value):
            fault = f"{where} has {key!r} beside its {kind}, which nothing reads; remove it, or choose"
            raise bad_row(f"{fault} VLMCollator(ignored_keys=({key!r},))")
    if kind != "text":
        return {"type": kind, "medium": _medium(part, kind), "keys": keys, "index": part.get("index")}
    weight = {"weight": _weight(part, role, where)} if part.keys() & {*FLAGS} else {}
    return {"type": "text", "text": part["text"], **weight}


def _with_call(turns: list[dict[str, Any]], message: dict[str, Any]) -> list[dict[str, Any]]:
    """Add a turn of JSON calls: to the previous assistant turn, as ms-swift does, or as a separate turn."""
    before = turns[-1] if turns else None
    if medium := next((part["type"] for part in _parts_in(message) if part["type"] != "text"), None):
        raise bad_row(f"it has a function call with a part of type {medium!r}; a call is JSON text")
    calls = calls_in(text_of(message))
    is_own = message.keys() != {"role", "content", "weight"}
    if before and not is_own and (before["role"], before["weight"]) == ("assistant", message["weight"]):
        return [*turns[:-1], {**before, "tool_calls": [*read_tools(before.get("tool_calls")), *calls]}]
    return [*turns, {**message, "content": "", "tool_calls": calls}]


def _with_system(turns: list[dict[str, Any]], system: Any) -> list[dict[str, Any]]:
    """Put the text of a column `system` in front of the turns, as LLaMA-Factory does."""
    if not isinstance(system, str):
        raise bad_row(f"the column system must be a text, got {short(system)}; give it as a message")
    systems = [text_of(turn).strip() for turn in turns if turn["role"] == "system"]
    if not system.strip() or system.strip() in systems:
        return turns
    if systems:
        seen = f"the column system says {system[:40]!r}, the system message {systems[0][:40]!r}"
        raise bad_row(f"{seen}; keep one of them")
    return [{"role": "system", "content": system}, *turns]


def _weight(holder: Mapping[str, Any], role: str, where: str) -> float:
    """Read the weight of an answer, or of a text in it (default 1). Other turns must not have weights."""
    flags = {name: holder[name] for name in FLAGS if holder.get(name) is not None}
    is_answer = ROLES.get(role) == "assistant"
    for name, value in flags.items():
        is_factor = name in FACTORS and is_answer
        if not isinstance(value, int | float) or not (0 <= value <= _LARGEST if is_factor else value in (0, 1)):
            usual = "a weight is a number from 0 that float32 holds" if is_factor else "a flag is true or false"
            usual = usual if is_answer else "only the assistant's turns have weights"
            raise bad_row(f"{where}.{name} is {value!r}; {usual}")
    factors = {float(value) for name, value in flags.items() if name in FACTORS}
    if len(factors) > 1 or len({bool(value) for value in flags.values()}) > 1:
        raise bad_row(f"{where} has {flags}, which contradict each other")
    return next(iter(factors), float(all(flags.values()))) if is_answer else 1.0


def _weights_of(message: Mapping[str, Any]) -> Weights:
    """Return the weights of an answer's texts."""
    parts = [] if isinstance(message["content"], str) else [p for p in message["content"] if p["type"] == "text"]
    pieces = tuple((part["text"], part.get("weight", message["weight"])) for part in parts)
    if len({weight for _, weight in pieces}) < 2:
        return (("", pieces[0][1] if pieces else message["weight"]),)
    return pieces


def _untrained(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if not isinstance(content, str):
        content = [{key: value for key, value in part.items() if key != "weight"} for part in content]
    return {**message, "content": content, "weight": 0.0}


def _number(column: str, turn: Any, count: int, named: str) -> int:
    """Read and check the number of a question or an answer."""
    try:
        number = index(turn)
    except TypeError:
        number = -1
    if not 0 <= number < count:
        raise bad_row(f"its {column} is {turn!r}, but it has {count} {named}, numbered from 0")
    return number


def _branch_of(turns: list[dict[str, Any]], turn: Any) -> list[dict[str, Any]]:
    """Return the messages of one question and its answer, after the system messages.

        conversation     system   user: image, Q0   A0   user: Q1   A1   user: image 2, Q2   A2
        branch 0         system   user: image, Q0   A0
        branch 1         system   user: image, Q1   A1
        branch 2         system   user: image, image 2, Q2   A2

    The first question stays unchanged; its media are put in front of every other question.
    """
    roles = [message["role"] for message in turns]
    first = next((at for at, role in enumerate(roles) if role != "system"), len(roles))
    pairs, rest = divmod(len(roles) - first, 2)
    if rest or roles[first:] != ["user", "assistant"] * pairs:
        fault = f"it has the column {BRANCH_COLUMN}, but its turns are {', '.join(roles)}"
        raise bad_row(f"{fault}; questions and answers must alternate, or open with branches='conversation'")
    number = _number(BRANCH_COLUMN, turn, pairs, "questions")
    question, answer = turns[first + 2 * number : first + 2 * number + 2]
    shown = [part for part in _parts_in(turns[first]) if part["type"] != "text"]
    if number and shown:
        question = {**question, "content": [*shown, *_parts_in(question)]}
    return [*turns[:first], question, answer]


# ---------------------------------------------------------------------- media and their placeholders


def marked_kinds(feature: Mapping[str, Any], markers: str) -> tuple[Kind, ...]:
    """Return the kinds of media whose markers in a text are placeholders. Markers of other kinds are plain text.

    "auto": the kinds for which the sample has a column. If that column is empty, the marker has lost its medium, and
    the sample is refused. Without such a column, `<image>` is an ordinary word. "places": all kinds. Otherwise: none.
    """
    if markers != "auto":
        return KINDS if markers == "places" else ()
    return tuple(kind for kind in KINDS if kind in feature or f"{kind}s" in feature)


def _place_media(turns: list[dict[str, Any]], present: Mapping[str, Any], kind: Kind, *, is_marked: bool) -> None:
    """Fill the placeholders with the media of a column. Changes the turns in place.

    If no part is a placeholder and `is_marked` is set, markers (`<image>`) outside the assistant's turns become
    placeholders, provided there is one for each medium of the column. If there are no markers either, the media go in
    front of the first user message. A placeholder with an `index` takes the medium at that index in the column.
    """
    column = _column_media(present, kind)
    is_placed = not column or any(part["type"] == kind for turn in turns for part in _parts_in(turn))
    if not is_placed and not (is_marked and _split_turns(turns, kind, len(column))):
        if is_marked:
            _check_numbered(turns, kind)
        asked = next((turn for turn in turns if turn["role"] == "user"), None)
        if asked is None:
            raise SampleError(f"{len(column)} {kind}(s), but no user message to put them in", "media_count_mismatch")
        asked["content"] = [{"type": kind} for _ in column] + _parts_in(asked)
    parts = [part for turn in turns for part in _parts_in(turn) if part["type"] == kind]
    empty = [part for part in parts if part.get("medium") is None]
    if len(empty) != len(column):
        remedy = f"every {kind} is in its message already: remove the column"
        if empty:
            remedy = f"give each placeholder its {kind}{_also_has(present) if len(empty) > len(column) else ''}"
        seen = f"the messages have {len(empty)} {kind} placeholder(s) without a source, but the columns hold"
        raise SampleError(f"{seen} {len(column)} {kind}(s); {remedy}", "media_count_mismatch")
    indices: list[Any] = [part.get("index") for part in empty]
    if all(index is None for index in indices):
        indices = [*range(len(column))]
    elif sorted(indices, key=repr) != sorted(range(len(column)), key=repr):
        seen = f"its {kind} parts have the index {', '.join(map(repr, indices))}"
        raise SampleError(f"{seen} for {len(column)} {kind}(s), numbered from 0; name each once", "ambiguous_media")
    for part, at in zip(empty, indices, strict=True):
        part["medium"] = MediaRef(source=column[at].source, options={**column[at].options, **part.get("keys", {})})


def _check_inline_media(texts: Iterable[str]) -> None:
    """Refuse media that users' texts name in a form that is not read: they would become words."""
    if match := next(filter(None, map(_INLINE.search, texts)), None):
        kind = "image" if match[1] == "img" else match[1]
        remedy = f"write <{kind}> there and the path into a column {kind}s, or choose markers='text'"
        raise SampleError(f"the user's text holds {match[0]!r:.80}, the path of a medium; {remedy}", "media_in_text")


_INLINE = re.compile(r"<(img|image|video|audio)>[^<>\n]+</\1>")
_NUMBERED = re.compile(
    r"(?i)<\|?(image|img|video|audio)(?:\||[ _-]?(?:\d+|here|placeholder|token)\|?)>|"
    r"(?-i:<(IMAGE|Image|VIDEO|Video|AUDIO|Audio)>)"
)
"""Media placeholders of other libraries: `<image_1>`, `<|image_1|>`, `<ImageHere>`, `<|audio|>`."""


def _markers_in(text: str) -> dict[Kind, str]:
    """Return a placeholder for each kind of media that has one in a text, of this or else of another library."""
    found: dict[Kind, str] = {kind: f"<{kind}>" for kind in KINDS if f"<{kind}>" in text}
    for match in _NUMBERED.finditer(text) if "<" in text else ():
        named = (match[1] or match[2]).lower().replace("img", "image")
        found |= {kind: match[0] for kind in KINDS if kind == named and kind not in found}
    return found


def _check_numbered(turns: Sequence[Mapping[str, Any]], kind: Kind) -> None:
    """Refuse another library's placeholders: they would be trained on as text, with the media in front of the text."""
    if marker := _markers_in("\n".join(text_of(turn) for turn in turns if turn["role"] == "user")).get(kind):
        fault = f"the user's text holds {marker!r}, which does not place the {kind}(s) of its column"
        raise SampleError(f"{fault}; write <{kind}> for each, or choose markers='text'", "ambiguous_media")


def _refuse_marker(kind: Kind, marker: str, count: int, feature: Mapping[str, Any]) -> None:
    """Refuse markers in users' texts for media that the sample lacks: they would be trained on as text."""
    columns = [name for name in (kind, f"{kind}s") if name in feature]
    reasons = [f"its {name} is {'None' if feature[name] is None else 'empty'}" for name in columns]
    raise SampleError(
        f"the user's text holds {marker!r} {count} time(s), but the sample has no {kind} to put there "
        f"({' and '.join(reasons) or f'it has no column {kind} or {kind}s'}){_also_has(feature)}; give it in a column "
        f"{kind} or {kind}s, or take the marker out; where it is text, choose markers='text'",
        "media_count_mismatch",
    )


def _column_media(present: Mapping[str, Any], kind: Kind) -> tuple[MediaRef, ...]:
    """Return the media of the column for a kind: `images` or `image`, `videos` or `video`, `audios` or `audio`."""
    item, many = (None if is_absent(present.get(name)) else present[name] for name in (kind, f"{kind}s"))
    if item is not None and many is not None:
        raise SampleError(f"it has both a column {kind} and a column {kind}s; keep one of them", "ambiguous_media")
    value = item if many is None else many
    if is_empty(value):
        return ()
    if not isinstance(value, list | tuple) or (many is None and _is_one(value[0], kind)):
        value = [value]
    if (nothing := next((at for at, item in enumerate(value) if is_empty(item)), None)) is not None:
        raise SampleError(
            f"{kind} {nothing} of the {len(value)} in its column is {value[nothing]!r}; give it", f"{kind}_missing"
        )
    return tuple(_medium(item, kind) or MediaRef(source=item) for item in value)


def _is_one(first: Any, kind: Kind) -> bool:
    """Return whether a column with this first item is one video given as frames, or one audio given as numbers.

    A `video` column of paths, or of elements with a video each, holds several videos.
    """
    if kind == "audio":
        return isinstance(first, int | float)
    is_file = isinstance(first, Path) and first.suffix.lower() in ENDS["video"]
    is_element = isinstance(first, Mapping) and first.get("video") is not None
    return kind == "video" and not (isinstance(first, str | list | tuple) or is_element or is_file)


def _split_turns(turns: list[dict[str, Any]], kind: Kind, count: int) -> bool:
    """Split texts at markers into placeholders, as LLaMA-Factory and ms-swift do. False: nothing changed."""
    marker = f"<{kind}>"
    counts = [sum(part.get("text", "").count(marker) for part in _parts_in(turn)) for turn in turns]
    answers = sum(n for n, turn in zip(counts, turns, strict=True) if turn["role"] == "assistant")
    if any(counts) and (answers or sum(counts) != count):
        raise SampleError(
            f"the messages hold {marker!r} {sum(counts)} time(s), {answers} of them in the assistant's turns, for "
            f"{count} {kind}(s) of the column; write one {marker!r} for each outside the assistant's turns",
            "ambiguous_media",
        )
    for turn in (turn for n, turn in zip(counts, turns, strict=True) if n):
        pieces = (_split_at_markers(p["text"], [kind]) if marker in p.get("text", "") else [p] for p in _parts_in(turn))
        turn["content"] = [part for parts in pieces for part in parts]
    return any(counts)


def _split_at_markers(text: str, kinds: Collection[Kind], *, strip: bool = False) -> list[dict[str, Any]]:
    """Split a text at the markers of these kinds. Empty texts between markers are dropped."""
    markers = [f"<{kind}>" for kind in kinds]
    pieces = re.split(f"({'|'.join(markers)})", text) if markers else [text]
    pieces = [piece.strip() if strip else piece for piece in pieces]
    return [{"type": piece[1:-1]} if piece in markers else {"type": "text", "text": piece} for piece in pieces if piece]


def _medium(item: Any, kind: str) -> MediaRef | None:
    """Return the source in a part with the keys beside it, or None if the part has no source."""
    if not isinstance(item, Mapping):
        return None
    key = next((key for key in _SOURCE_KEYS[kind] if item.get(key) is not None), None)
    if key is None:
        return None
    source = {"bytes": item["bytes"], "path": item.get("path")} if item.get("bytes") is not None else item[key]
    if isinstance(source, Mapping) and "url" in source:
        source = source["url"]
    # `Dataset.map` stores a PIL image nested in messages as JSON of its attributes, without the pixels
    if isinstance(source, Mapping) and {"mode", "size"} <= set(source) and not {"bytes", "path"} & set(source):
        fault = f"its {kind} is a dict of the attributes of a PIL image, without its pixels, as datasets.map stores it"
        remedy = "make images when samples are read (dataset.with_transform), or put them in a column"
        raise SampleError(f"{fault}; {remedy}", f"{kind}_source")
    return MediaRef(source=source, options=_keys_beside(item))


def _keys_beside(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that set a medium's size or frames."""
    named = {name: value for name, value in item.items() if name not in ("type", "index", *_SOURCES)}
    # tables fill texts with ""
    options = {name: value for name, value in named.items() if value is not None and (name != "text" or value)}
    for name in options:
        if key := misspelt_key(str(name)):
            fault = f"the key {name!r} beside an image or video is unknown"
            raise SampleError(f"{fault}; did you mean {key!r}?", "vision_key")
    return options


# ---------------------------------------------------------------------- columns that nothing reads


def check_unread(feature: Mapping[str, Any], *, has_media: bool) -> tuple[str, ...]:
    """Return the unread columns of a sample, after checking that none of them holds something that the sample needs.

    Args:
        feature: the sample's columns.
        has_media: whether the sample has media; if so, a column of file names is harmless.

    Raises:
        SampleError: `unread_column`: an unread column holds media and the sample has none, or it holds preferences or
            weights.
    """
    unread = {str(name): value for name, value in feature.items() if name not in _KNOWN and not is_empty(value)}
    for name, value in unread.items():
        fault = ""
        if _is_preference(name.lower(), value):
            fault = (
                "which weights samples or lists preferences: give each message its `weight`, pairs to PackedDPOTrainer"
            )
        elif not has_media and _looks_like_media(name.lower(), value):
            fault = "which looks like its image, video or audio, and it has no other; rename or remove it"
        if fault:
            raise SampleError(f"it has a column {name}, {fault}; nothing reads it", "unread_column")
    return tuple(name for name in unread if name not in _NOTES)


def _is_preference(name: str, value: Any) -> bool:
    """Return whether a column holds preferences or weights. Weights of 1 change nothing; a boolean `label` is KTO's."""
    if name == "label":
        return isinstance(value, bool)
    values = np.asarray(value, dtype=object).reshape(-1).tolist()
    return _PREFERENCE.fullmatch(name) is not None and any(item != 1 for item in values)


def _looks_like_media(name: str, value: Any) -> bool:
    """Return whether a column seems to hold media, by its name or by its value."""
    first = value[0] if isinstance(value, list | tuple) else value
    if isinstance(first, Mapping) and {"bytes", "path"} == set(first):
        return not is_absent(first)
    if isinstance(first, str) and first.startswith(("data:image/", "data:video/")):
        return True
    if isinstance(first, str) and _FILE_COLUMN.fullmatch(name) and first.strip().lower().endswith(_ENDS):
        return True
    is_image = isinstance(first, Image.Image) or (isinstance(first, bytes) and first.startswith(_ENCODED))
    is_named = _MEDIA_NAMES.fullmatch(name) is not None and isinstance(first, str | bytes | Mapping | float)
    return is_image or is_named


def no_columns(feature: Mapping[str, Any]) -> SampleError:
    """Make the refusal of a sample without any of the columns that hold a sample's text.

    If a column exists but is None, the sample is at fault; if no column exists, the setup is.
    """
    if empty := [name for name in _TEXT_COLUMNS if feature.get(name, "") is None]:
        return bad_row(f"its {' and '.join(empty)} is None; fill it, or leave the sample out")
    seen = f"it has none of the columns input_ids, {', '.join(TURNS[:4])} (with completion); it has:"
    names = {str(name): get_close_matches(str(name).lower(), _TEXT_COLUMNS, n=1, cutoff=0.8) for name in feature}
    near = [f"{name!r}: did you mean {hit[0]!r}?" for name, hit in names.items() if hit and name not in _TEXT_COLUMNS]
    if near:
        remedy = f"{' '.join(near)} Rename the column"
    elif {"chosen", "rejected"} <= feature.keys():
        remedy = "PackedDPOTrainer of vlmpack.trainer.trl trains on pairs of answers; to train on the chosen ones: "
        meant = "completion" if "prompt" in feature else "messages"
        remedy += f"open_dataset(..., columns={{'chosen': {meant!r}}})"
    elif "prompt" in feature or "completion" in feature:
        remedy = "A prompt needs its completion: give both, or write messages"
    elif any(isinstance(feature[name], str | list | tuple | Mapping) for name in feature if name not in _KEPT):
        remedy = "Rename the column with the conversation to messages, or make messages of your columns: "
        remedy += "open_dataset(..., columns={'your column': 'messages'}), or query and response, prompt and completion"
    else:
        remedy = "HF Trainer drops dataset columns that the model's forward does not name: set TrainingArguments("
        remedy += "remove_unused_columns=False). TRL's trainers keep only messages, prompt, completion, image and "
        remedy += "images even then: rename a `conversation` column to `messages`, and write videos into them"
    return SampleError(f"{seen} {_listed(feature) or 'none at all'}. {remedy}", "no_columns")


def _also_has(feature: Mapping[str, Any]) -> str:
    """Return the end of an error message that lists the unread columns, as one may be misspelled; "": none."""
    unread = {name: value for name, value in feature.items() if name not in READ_COLUMNS and value is not None}
    return f"; it also has: {_listed(unread)}" if unread else ""


def _listed(feature: Mapping[str, Any], most: int = 12) -> str:
    names = sorted(map(str, feature))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
