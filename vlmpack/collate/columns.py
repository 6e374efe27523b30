"""The columns of a sample: the media in them and their placeholders, and errors of missing or unread columns."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
from PIL import Image

from vlmpack.collate.vision_keys import misspelt_key
from vlmpack.data.branches import ANSWER_COLUMN, BRANCH_COLUMN, PAIRS_COLUMN
from vlmpack.errors import Refusal

CONVERSATION_COLUMNS = ("messages", "conversations", "conversation", "prompt")
"""A feature with none of these and no `input_ids` is not a sample."""
TURN_COLUMNS = (*CONVERSATION_COLUMNS, "completion", PAIRS_COLUMN)
"""Columns of turns."""
MEDIA_COLUMNS = ("image", "images", "video", "videos")
AUDIO_COLUMNS = ("audio", "audios")
LABEL_COLUMNS = ("labels", "completion_mask", "assistant_masks", "loss_mask")
"""Columns from which labels are made; the masks are TRL's and SeqPacker's, 0 where nothing is trained on."""
WEIGHT_COLUMN = "loss_weights"
"""The weight of each label of a tokenised sample, not shifted."""
CHANNEL_COLUMN = "channel"
"""The data set of a sample, by whose name its loss is logged: ms-swift's name."""
SECONDS_COLUMNS = ("second_per_grid_ts", "video_second_per_grid")
"""Names of the seconds from one grid of each video to the next, of Qwen2.5-VL and of Qwen-Omni."""
BOUNDARY_COLUMNS = ("cu_seqlens_q", "cu_seqlens", "cu_seq_lens_q", "seq_lengths", "seq_idx")
"""Columns of a row of several samples; as one sample it would let them attend to each other."""
MISSPELT_COLUMNS = ("shift_labels", "label_mask", "labels_mask", "loss_masks", "completion_masks", "assistant_mask")
"""Names that look like one of labels, and that no library writes."""
_TEXT_COLUMNS = ("input_ids", *CONVERSATION_COLUMNS, "completion")
_TURNS = (BRANCH_COLUMN, ANSWER_COLUMN)
_NAMES = ("id", "sample_id", CHANNEL_COLUMN)
_READ = {*_TEXT_COLUMNS, *MEDIA_COLUMNS, "system", "tools", "chat_template_kwargs", *_NAMES, *_TURNS}
_OF_TOKENS = (
    *("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"),
    *("input_features", "feature_attention_mask", SECONDS_COLUMNS[1]),
    *LABEL_COLUMNS[1:],
    WEIGHT_COLUMN,
)
"""Of samples that were tokenised before, which no conversation has."""
_KNOWN = {*_READ, *_OF_TOKENS, *AUDIO_COLUMNS, *SECONDS_COLUMNS, "labels", "attention_mask", "mm_token_type_ids"}
_KEPT = {*MEDIA_COLUMNS, "id", "sample_id", "length", "label", "labels", "label_ids", "attention_mask", "position_ids"}
"""The columns that HF Trainer or TRL may leave of a sample whose text they dropped."""
_NOTES = {"length", "lengths", "index", "idx", "source", "dataset", "split", "attention_mask", "token_type_ids"}
"""Columns that nothing reads and that would change nothing."""
_PREFERENCE = re.compile(r"(chosen|rejected)(_.*)?|(loss|sample)_(scale|weight)s?")
"""Names of columns that say how much, or against what, a sample is trained on."""
_NAMED_MEDIA = re.compile(
    r"(images?|imgs?|pictures?|pics?|photos?|videos?|clips?)(_?(paths?|files?|urls?|bytes|file_?names?|data|base64))?"
)
"""Names of columns that hold images or videos; `image_id` and `num_images` do not."""
_NAMED_AUDIO = re.compile(
    r"(audios?|sounds?|speech|wavs?)(_?(paths?|files?|urls?|bytes|file_?names?|data|base64|array))?"
)
"""Names of columns that hold audio."""
_FILE_COLUMN = re.compile(r"(file_?names?|files?|file_?paths?|paths?|media|media_paths?|attachments?|frames)")
"""Names of columns that hold files of any kind."""
_FILE = re.compile(r"(?i)\S.*\.(png|jpe?g|webp|gif|bmp|tiff?|mp4|avi|mkv|mov|webm)")
_AUDIO_FILE = re.compile(r"(?i)\S.*\.(wav|mp3|flac|ogg|m4a|opus)")
_VIDEOS = (".mp4", ".m4v", ".avi", ".mkv", ".mov", ".webm")
"""Ends of the paths of videos' files."""
_ENCODED = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF")
"""First bytes of encoded images."""
_GROUNDING = ("<bbox>", "<ref-object>", "<quad>")
"""Places in a text that ms-swift fills from its column `objects`."""


def is_absent(value: Any) -> bool:
    """None, or a struct with nothing in it: Arrow gives every part of a column the keys of all of them."""
    return value is None or (isinstance(value, Mapping) and all(map(is_absent, value.values())))


def is_empty(value: Any) -> bool:
    """Absent, or a text or list with nothing in it, such as `[{"bytes": None, "path": None}]`."""
    if isinstance(value, list | tuple):
        return all(map(is_empty, value))
    return is_absent(value) or (isinstance(value, str) and not value)


def holds_pairs(value: Any) -> bool:
    """Questions with their answers, and not a column of notes of that name."""
    first = value[0] if isinstance(value, list | tuple) and value else None
    return isinstance(first, Mapping) and {"user", "assistant"} <= first.keys()


def check_one_form(forms: Sequence[str], present: Mapping[str, Any], *, has_audio: bool = False) -> None:
    """Refuse a sample that is written down twice, or has columns that nothing reads with its conversation.

    Raises:
        Refusal: `bad_row`, with the names of both.
    """
    if len(forms) > 1:
        raise Refusal("bad_row", f"it has {' and '.join(forms)}, of which one would be read; keep that one")
    if match := next((name for name in _OF_TOKENS if forms and not is_empty(present.get(name))), None):
        raise Refusal("bad_row", f"it has {match}, which belongs to input_ids, and {forms[0]}; leave one of them out")
    if match := next((name for name in AUDIO_COLUMNS if not has_audio and not is_empty(present.get(name))), None):
        raise Refusal("bad_row", f"it has {match}, which these models do not take; leave the sample or the column out")


def check_unread(feature: Mapping[str, Any], *, has_media: bool, texts: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of a sample that nothing reads, of which none holds something that the sample would lack.

    Args:
        feature: the sample's columns.
        has_media: whether it has images or videos; a column of file names is then a note.
        texts: of the sample.

    Raises:
        Refusal: `unread_column`: one of them holds media and the sample has none, or preferences or weights, or it is
            ms-swift's `objects` and the text has places for them.
    """
    known = {*_KNOWN, PAIRS_COLUMN} if holds_pairs(feature.get(PAIRS_COLUMN)) else _KNOWN
    unread = {str(name): value for name, value in feature.items() if name not in known and not is_empty(value)}
    for name, value in unread.items():
        fault = ""
        if _is_preference(name.lower(), value):
            fault = "which says what is trained on: give each message its `weight`; preferences are not trained on"
        elif not has_media and (looks := _looks_like(name.lower(), value)):
            fault = f"which looks like its {looks}, and it has no other; rename it so, or leave it out if it needs none"
        elif name == "objects" and (match := next((x for x in _GROUNDING if any(x in text for text in texts)), None)):
            fault = f"from which ms-swift fills {match!r} in its text; write the boxes and names into the text"
        if fault:
            raise Refusal("unread_column", f"it has a column {name}, {fault}; nothing reads it")
    return tuple(name for name in unread if name not in _NOTES)


def _is_preference(name: str, value: Any) -> bool:
    """Weights of 1 change nothing; a label that is true or false is KTO's."""
    if name == "label":
        return isinstance(value, bool)
    values = np.asarray(value, dtype=object).reshape(-1).tolist()
    return _PREFERENCE.fullmatch(name) is not None and any(item != 1 for item in values)


def _looks_like(name: str, value: Any) -> str:
    """Name the medium that a column seems to hold, whatever it is called; "": none."""
    first = value[0] if isinstance(value, list | tuple) else value
    path = first if _FILE_COLUMN.fullmatch(name) and isinstance(first, str) else ""
    is_visual = (
        isinstance(first, Image.Image)
        or (isinstance(first, Mapping) and {"bytes", "path"} == set(first) and not is_absent(first))
        or (isinstance(first, str) and first.startswith(("data:image/", "data:video/")))
        or (isinstance(first, bytes) and first.startswith(_ENCODED))
        or (_NAMED_MEDIA.fullmatch(name) is not None and isinstance(first, str | bytes | Mapping))
    )
    if is_visual or _FILE.fullmatch(path):
        return "image or video"
    is_audio = _NAMED_AUDIO.fullmatch(name) and isinstance(first, str | bytes | Mapping | float)
    return "audio" if is_audio or _AUDIO_FILE.fullmatch(path) else ""


def no_columns(feature: Mapping[str, Any]) -> Refusal:
    """The refusal of a feature with none of the columns that hold a sample's text.

    A column that is there but None is this sample's fault; one that is not there at all is the setup's.
    """
    if empty := [name for name in _TEXT_COLUMNS if feature.get(name, "") is None]:
        fault = f"its {' and '.join(empty)} is None; fill it, or leave the sample out of the data set"
        return Refusal("bad_row", fault)
    known = f"input_ids, {', '.join(CONVERSATION_COLUMNS)} (with completion)"
    seen = f"it has none of the columns {known}; it has: {_listed(feature) or 'none at all'}"
    return Refusal("no_columns", f"{seen}. {_remedy(feature)}", of_all=True)


def also_has(feature: Mapping[str, Any]) -> str:
    """The end of an error: the columns that nothing reads, as one of them may be misspelt; "" where all are read."""
    unread = {name: value for name, value in feature.items() if name not in _READ and value is not None}
    return f"; it also has: {_listed(unread)}" if unread else ""


def _remedy(feature: Mapping[str, Any]) -> str:
    names = {str(name): get_close_matches(str(name).lower(), _TEXT_COLUMNS, n=1, cutoff=0.8) for name in feature}
    near = [f"{name!r}: did you mean {hit[0]!r}?" for name, hit in names.items() if hit and name not in _TEXT_COLUMNS]
    has_own = any(isinstance(feature[name], str | list | tuple | Mapping) for name in feature if name not in _KEPT)
    remedies = (
        (near, f"{' '.join(near)} Rename the column"),
        (
            {"chosen", "rejected"} <= feature.keys(),
            "A pair of answers is for PackedDPOTrainer of vlmpack.trainer.trl; to learn the chosen ones alone: "
            "open_dataset(..., columns={'chosen': 'completion'})",
        ),
        (
            "prompt" in feature or "completion" in feature,
            "A prompt comes with its completion: give both, or write them as messages",
        ),
        (
            not has_own,
            "HF Trainer drops dataset columns that the model's forward does not name: set "
            "TrainingArguments(remove_unused_columns=False). TRL's trainers keep only messages, prompt, completion, "
            "image and images even then: rename a `conversation` column to `messages`, and write videos into them",
        ),
    )
    other = "Rename the column with the conversation to messages, or make messages of your columns: a list of turns"
    return next((remedy for holds, remedy in remedies if holds), other)


def _listed(feature: Mapping[str, Any], most: int = 12) -> str:
    names = sorted(map(str, feature))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


Kind = Literal["image", "video", "audio"]
KINDS: tuple[Kind, ...] = ("image", "video", "audio")
"""The kinds of media that markers in a text may stand for."""
Markers = Literal["auto", "places", "text"]
"""The meaning of `<image>`, `<video>` and `<audio>` in a text: see `marked_kinds`."""
_INLINE = re.compile(r"<(img|image|video|audio)>[^<>\n]+</\1>")
"""A medium by its path inside a text, as ms-swift and the first Qwen-VL have it."""
_NUMBERED = re.compile(
    r"(?i)<\|?(image|img|video|audio)(?:\||[ _-]?(?:\d+|here|placeholder|token)\|?)>|"
    r"(?-i:<(IMAGE|Image|VIDEO|Video|AUDIO|Audio)>)"
)
"""Places of media as other libraries write them: `<image_1>`, `<|image_1|>`, `<ImageHere>`, `<|audio|>`, `<IMAGE>`."""

_SOURCE_KEYS: dict[Kind, tuple[str, ...]] = {
    "image": ("image", "image_url", "url", "path", "bytes"),
    "video": ("video", "video_url", "url", "path", "bytes"),
    "audio": ("audio",),
}
SOURCE_KEYS = frozenset(key for keys in _SOURCE_KEYS.values() for key in keys)
"""Keys of a part that hold the source of its medium."""


@final
@dataclass(frozen=True, kw_only=True)
class MediaRef:
    """One image, video or audio: its source, and the keys by which it is resized."""

    source: Any
    """PIL image, path, bytes, or {"bytes", "path"}; for a video its file in one of these forms, or a list of frames; an
    array of an audio, or {"array", "sampling_rate"}."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The keys of qwen-vl-utils that stood beside it: min_pixels, resized_height, fps, ..."""


def marked_kinds(feature: Mapping[str, Any], markers: Markers) -> tuple[Kind, ...]:
    """The kinds of media whose markers in a text are places of media; those of the others are text.

    "auto": a kind that the sample has a column of. Where that is empty, the marker's medium was lost, and the sample is
    refused; without such a column `<image>` is a word like any other. "places": both. "text": none.
    """
    if markers != "auto":
        return KINDS if markers == "places" else ()
    return tuple(kind for kind in KINDS if kind in feature or f"{kind}s" in feature)


def fill_placeholders(
    messages: list[dict[str, Any]], present: Mapping[str, Any], kind: Kind, *, is_marked: bool
) -> tuple[MediaRef, ...]:
    """The media of one kind in the order of their placeholders, from the parts themselves and from the columns.

    Without any placeholder in the messages, which are changed in place, text markers (`<image>`, `<video>`) outside the
    assistant's turns are the placeholders if `is_marked` and there is one for each of the column's media. Without any
    marker the media are put in front of the first user message. Placeholders with an `index` take the medium of that
    place in the column.

    Raises:
        Refusal: placeholders and media differ in number, or it is not clear where the media go.
    """
    column = column_media(present, kind)
    placeholders = [part for message in messages for part in parts_in(message) if part["type"] == kind]
    if column and not placeholders:
        if not (is_marked and _split_at_markers(messages, kind, len(column))):
            if is_marked:
                _check_numbered(messages, kind)
            asked = next((message for message in messages if message["role"] == "user"), None)
            if asked is None:
                fault = f"{len(column)} {kind}(s), but no user message to put them in"
                raise Refusal("media_count_mismatch", fault)
            asked["content"] = [{"type": kind} for _ in column] + parts_in(asked)
        return column
    refs = [_reference(part, kind) for part in placeholders]
    missing = refs.count(None)
    if missing != len(column):
        remedy = f"every {kind} is in its message already: remove the column"
        if missing:
            remedy = f"give each placeholder its {kind}{also_has(present) if missing > len(column) else ''}"
        seen = f"the messages have {missing} {kind} placeholder(s) without a source, but the columns hold {len(column)}"
        raise Refusal("media_count_mismatch", f"{seen} {kind}(s); {remedy}")
    rest = iter(_by_index(column, [part for part, ref in zip(placeholders, refs, strict=True) if ref is None], kind))
    return tuple(
        ref or MediaRef(source=(medium := next(rest)).source, options={**medium.options, **_options(part)})
        for part, ref in zip(placeholders, refs, strict=True)
    )


def _by_index(column: tuple[MediaRef, ...], placeholders: Sequence[Mapping[str, Any]], kind: Kind) -> list[MediaRef]:
    """The media of a column in the order of their placeholders, which may say which one each is by its `index`.

    Raises:
        Refusal: `ambiguous_media`: the indices are not those of the column's media.
    """
    indices: list[Any] = [part.get("index") for part in placeholders]
    if all(index is None for index in indices):
        return list(column)
    if sorted(indices, key=repr) != sorted(range(len(column)), key=repr):
        seen = f"its {kind} parts have the index {', '.join(map(repr, indices))}, but the column holds {len(column)}"
        raise Refusal("ambiguous_media", f"{seen} {kind}(s), counted from 0; name each once, or leave 'index' out")
    return [column[index] for index in indices]


def check_inline_media(texts: Iterable[str]) -> None:
    """Refuse media that are named inside users' texts: no path in a text is opened, and it would become words.

    Raises:
        Refusal: `media_in_text`.
    """
    if match := next(filter(None, map(_INLINE.search, texts)), None):
        kind = "image" if match[1] == "img" else match[1]
        remedy = f"write <{kind}> there and the path into a column {kind}s, or choose markers='text' if it is text"
        raise Refusal("media_in_text", f"the user's text holds {match[0]!r:.80}, the path of a medium; {remedy}")


def _check_numbered(messages: Sequence[Mapping[str, Any]], kind: Kind) -> None:
    """Refuse another library's places of media where these would go in front of the text, and the places be trained on.

    Raises:
        Refusal: `ambiguous_media`.
    """
    for message in messages:
        texts = [part["text"] for part in parts_in(message) if part["type"] == "text" and message["role"] == "user"]
        matches = (match for text in texts for match in _NUMBERED.finditer(text))
        if match := next((m for m in matches if (m[1] or m[2]).lower().replace("img", "image") == kind), None):
            fault = f"the user's text holds {match[0]!r}, which does not place the {kind}(s) of the sample's column"
            remedy = f"write <{kind}> for each in its place, or choose markers='text' if it is text"
            raise Refusal("ambiguous_media", f"{fault}; {remedy}")


def check_markers(texts: Iterable[str], feature: Mapping[str, Any], *, missing: Iterable[Kind]) -> None:
    """Refuse markers in users' texts of the kinds of media that are `missing`, though they are places of them.

    Raises:
        Refusal: there is one; it would be trained on as text.
    """
    whole = "\n".join(texts)
    if kind := next((kind for kind in missing if f"<{kind}>" in whole), None):
        columns = [name for name in (kind, f"{kind}s") if name in feature]
        reasons = [f"its {name} is {'None' if feature[name] is None else 'empty'}" for name in columns]
        raise Refusal(
            "media_count_mismatch",
            f"the user's text holds '<{kind}>' {whole.count(f'<{kind}>')} time(s), but the sample has no {kind} to put "
            f"there ({' and '.join(reasons) or f'it has no column {kind} or {kind}s'}){also_has(feature)}; give it in "
            f"a column {kind} or {kind}s, or take the marker out; where it is text, choose markers='text'",
        )


def column_media(present: Mapping[str, Any], kind: Kind) -> tuple[MediaRef, ...]:
    """The media of the `images` / `image` (or `videos` / `video`) column."""
    item, many = (None if is_absent(present.get(name)) else present[name] for name in (kind, f"{kind}s"))
    if item is not None and many is not None:
        raise Refusal("ambiguous_media", f"the sample has both a column {kind} and a column {kind}s; keep one of them")
    value = item if many is None else many
    if is_empty(value):
        return ()
    if not isinstance(value, list | tuple) or (many is None and _is_one(value[0], kind)):
        value = [value]
    if nothing := next((at for at, item in enumerate(value) if is_empty(item)), None):
        found = "an empty text" if value[nothing] == "" else "None"
        raise Refusal(f"{kind}_missing", f"{kind} {nothing} of the {len(value)} in its column is {found}; give it")
    return tuple(_reference(item, kind) or MediaRef(source=item) for item in value)


def parts_in(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _split_at_markers(messages: list[dict[str, Any]], kind: Kind, count: int) -> bool:
    """Split text at markers, as LLaMA-Factory and ms-swift do: each is a placeholder. False: nothing was changed.

    Raises:
        Refusal: there are markers, but not one for each medium, or one in an assistant's turn.
    """
    marker = f"<{kind}>"
    counts = [sum(part.get("text", "").count(marker) for part in parts_in(message)) for message in messages]
    if not any(counts):
        return False
    answers = sum(n for n, message in zip(counts, messages, strict=True) if message["role"] == "assistant")
    if answers or sum(counts) != count:
        raise Refusal(
            "ambiguous_media",
            f"the messages hold {marker!r} {sum(counts)} time(s), {answers} of them in the assistant's turns, for "
            f"{count} {kind}(s) of the column; write one {marker!r} for each outside the assistant's turns",
        )
    for n, message in zip(counts, messages, strict=True):
        if n:
            parts = (
                split_at_markers(p["text"], [kind]) if marker in p.get("text", "") else [p] for p in parts_in(message)
            )
            message["content"] = [piece for pieces in parts for piece in pieces]
    return True


def split_at_markers(text: str, kinds: Collection[Kind], *, strip: bool = False) -> list[dict[str, Any]]:
    """The parts of a text with markers of these kinds; empty texts between them are left out."""
    markers = [f"<{kind}>" for kind in kinds]
    pieces = re.split(f"({'|'.join(markers)})", text) if markers else [text]
    pieces = [piece.strip() if strip else piece for piece in pieces]
    return [{"type": piece[1:-1]} if piece in markers else {"type": "text", "text": piece} for piece in pieces if piece]


def _is_one(first: Any, kind: Kind) -> bool:
    """Whether a column that begins with this is one video by its frames, or one audio by its numbers.

    A `video` column of paths, or of elements with a video each, is several videos.
    """
    if kind == "audio":
        return isinstance(first, int | float)
    is_file = isinstance(first, Path) and first.suffix.lower() in _VIDEOS
    is_element = isinstance(first, Mapping) and first.get("video") is not None
    return kind == "video" and not (isinstance(first, str | list | tuple) or is_element or is_file)


def _reference(item: Any, kind: Kind) -> MediaRef | None:
    """The source inside a part, and the keys beside it; None if there is no source in it."""
    if not isinstance(item, Mapping):
        return None
    key = next((key for key in _SOURCE_KEYS[kind] if item.get(key) is not None), None)
    if key is None:
        return None
    source = {"bytes": item["bytes"], "path": item.get("path")} if item.get("bytes") is not None else item[key]
    if isinstance(source, Mapping) and "url" in source:
        source = source["url"]
    # `Dataset.map` writes a PIL image that is nested in messages down as JSON of its attributes, without pixels
    if isinstance(source, Mapping) and {"mode", "size"} <= set(source) and not {"bytes", "path"} & set(source):
        fault = f"its {kind} is a dict of the attributes of a PIL image, without its pixels, as datasets.map stores an"
        remedy = "make them as samples are read (dataset.with_transform), or give images a column of their own"
        raise Refusal(f"{kind}_source", f"{fault} image inside messages; {remedy}")
    return MediaRef(source=source, options=_options(item))


def _options(item: Mapping[str, Any]) -> dict[str, Any]:
    """The keys by which the medium is resized or sampled.

    Raises:
        Refusal: one of them is nearly a known key, and would change nothing.
    """
    known = {"type", "text", "index", *SOURCE_KEYS}
    options = {name: value for name, value in item.items() if name not in known and value is not None}
    for name in options:
        if key := misspelt_key(str(name)):
            fault = f"beside an image or video stands the key {name!r}, which is not known; did you mean {key!r}?"
            raise Refusal("vision_key", fault)
    return options
