"""Which image or video goes into which hole of a conversation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

from vlmpack.collate.columns import also_has, is_absent
from vlmpack.collate.vision_keys import misspelt_key
from vlmpack.errors import Refusal

Kind = Literal["image", "video"]
KINDS: tuple[Kind, ...] = ("image", "video")
Markers = Literal["auto", "places", "text"]
"""What `<image>` and `<video>` in a text are: see `marked_kinds`."""

_SOURCE_KEYS: dict[Kind, tuple[str, ...]] = {
    "image": ("image", "image_url", "url", "path", "bytes"),
    "video": ("video", "video_url", "url", "path"),
}


@final
@dataclass(frozen=True, kw_only=True)
class MediaRef:
    """One image or video: where it comes from, and how it wants to be resized."""

    source: Any
    """PIL image, path, bytes, or {"bytes", "path"}; for a video a path or a list of frames."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The keys of qwen-vl-utils that stood beside it: min_pixels, resized_height, fps, ..."""


def marked_kinds(feature: Mapping[str, Any], markers: Markers) -> tuple[Kind, ...]:
    """The kinds of media whose markers in a text are places of media; those of the others are text.

    "auto": a kind that the sample has a column of. Where that is empty, the marker's medium was lost, and the sample is
    refused; without such a column nothing says that `<image>` is more than a word. "places": both. "text": none.
    """
    if markers != "auto":
        return KINDS if markers == "places" else ()
    return tuple(kind for kind in KINDS if kind in feature or f"{kind}s" in feature)


def fill_holes(
    messages: list[dict[str, Any]], present: Mapping[str, Any], kind: Kind, *, is_marked: bool
) -> tuple[MediaRef, ...]:
    """The media of one kind in the order of their holes, from the parts themselves and from the columns.

    Without any hole in the messages, which are changed in place, text markers (`<image>`, `<video>`) outside the
    assistant's turns are the holes if `is_marked` and there is one for each of the column's media; if there is none at
    all, the media are put in front of the first user message.

    Raises:
        Refusal: holes and media differ in number, or it is not clear where the media go.
    """
    column = column_media(present, kind)
    holes = [part for message in messages for part in _parts(message) if part["type"] == kind]
    if column and not holes:
        if not (is_marked and _split_at_markers(messages, kind, len(column))):
            _insert_holes(messages, kind, len(column))
        return column
    return _fill(holes, column, present, kind)


def check_markers(texts: Iterable[str], feature: Mapping[str, Any], *, missing: Iterable[Kind]) -> None:
    """Refuse markers in users' texts of the kinds of media that are `missing`, though they are places of them.

    Raises:
        Refusal: there is one; it would be learnt as text.
    """
    whole = "\n".join(texts)
    for kind in missing:
        marker = f"<{kind}>"
        if marker in whole:
            raise Refusal(
                "media_count_mismatch",
                f"the user's text holds {marker!r} {whole.count(marker)} time(s), but the sample has no {kind} to put "
                f"there ({_columns_of(kind, feature)}){also_has(feature)}; give it in a column {kind} or {kind}s, "
                "or take the marker out; where it is meant as text, leave the column out, or choose markers='text'",
            )


def _columns_of(kind: Kind, feature: Mapping[str, Any]) -> str:
    """Why the columns of a kind hold nothing."""
    there = [name for name in (kind, f"{kind}s") if name in feature]
    said = [f"its {name} is {'None' if feature[name] is None else 'empty'}" for name in there]
    return " and ".join(said) or f"it has no column {kind} or {kind}s"


def column_media(present: Mapping[str, Any], kind: Kind) -> tuple[MediaRef, ...]:
    """The media of the `images` / `image` (or `videos` / `video`) column."""
    one, many = (None if is_absent(present.get(name)) else present[name] for name in (kind, f"{kind}s"))
    if one is not None and many is not None:
        raise Refusal("ambiguous_media", f"the sample has both a column {kind} and a column {kind}s; keep one of them")
    value = one if many is None else many
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or (kind == "video" and many is None and _is_one_video(value)):
        value = [value]
    return tuple(_reference(item, kind) or MediaRef(source=item) for item in value)


def _parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _split_at_markers(messages: list[dict[str, Any]], kind: Kind, count: int) -> bool:
    """As LLaMA-Factory and ms-swift do it: a marker is a hole, the text around it stays. False: nothing was changed.

    Raises:
        Refusal: there are markers, but not one for each medium, or one in an assistant's turn.
    """
    marker = f"<{kind}>"
    found = [sum(part.get("text", "").count(marker) for part in _parts(message)) for message in messages]
    if not any(found):
        return False
    answers = sum(n for n, message in zip(found, messages, strict=True) if message["role"] == "assistant")
    if answers or sum(found) != count:
        raise Refusal(
            "ambiguous_media",
            f"the messages hold the text {marker!r} {sum(found)} time(s), {answers} of them in the assistant's turns, "
            f"for {count} {kind}(s) of the column, so it is not clear where these go; write one {marker!r} for each "
            f"outside the assistant's turns, or {{'type': {kind!r}}} parts",
        )
    for n, message in zip(found, messages, strict=True):
        if n:
            message["content"] = [piece for part in _parts(message) for piece in _pieces(part, marker, kind)]
    return True


def _pieces(part: dict[str, Any], marker: str, kind: Kind) -> list[dict[str, Any]]:
    if part["type"] != "text" or marker not in part["text"]:
        return [part]
    first, *rest = part["text"].split(marker)
    pieces = [{"type": "text", "text": first}]
    for text in rest:
        pieces += [{"type": kind}, {"type": "text", "text": text}]
    return [piece for piece in pieces if piece.get("text") != ""]


def _insert_holes(messages: list[dict[str, Any]], kind: Kind, count: int) -> None:
    """As TRL does it: without any placeholder, all media go in front of the first user message's text."""
    for message in messages:
        if message["role"] == "user":
            message["content"] = [{"type": kind} for _ in range(count)] + _parts(message)
            return
    raise Refusal("media_count_mismatch", f"{count} {kind}(s), but no user message to put them in")


def _fill(
    holes: list[dict[str, Any]], column: tuple[MediaRef, ...], present: Mapping[str, Any], kind: Kind
) -> tuple[MediaRef, ...]:
    own = [_reference(part, kind) for part in holes]
    missing = own.count(None)
    if missing != len(column):
        remedy = (
            f"give each placeholder its {kind}{also_has(present) if missing > len(column) else ''}"
            if missing
            else f"every {kind} is in its message already: remove the column"
        )
        raise Refusal(
            "media_count_mismatch",
            f"the messages have {missing} {kind} placeholder(s) without a source of their own, but the columns hold "
            f"{len(column)} {kind}(s); {remedy}",
        )
    rest = iter(column)
    return tuple(_merge(next(rest), part) if ref is None else ref for part, ref in zip(holes, own, strict=True))


def _merge(medium: MediaRef, hole: Mapping[str, Any]) -> MediaRef:
    """A medium of the column, resized by the keys of the hole that it goes into."""
    return MediaRef(source=medium.source, options={**medium.options, **_options(hole)})


def _is_one_video(value: Sequence[Any]) -> bool:
    """A `video` column that holds pictures is one video by its frames; one that holds paths is several videos."""
    first = value[0] if value else ""
    is_element = isinstance(first, Mapping) and first.get("video") is not None
    return not isinstance(first, str | list | tuple) and not is_element


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
    if isinstance(source, Mapping):
        _check_is_encoded(source, kind)
    return MediaRef(source=source, options=_options(item))


def _check_is_encoded(source: Mapping[str, Any], kind: Kind) -> None:
    """`Dataset.map` writes a PIL image that is nested in messages down as JSON of its attributes, without pixels."""
    if {"mode", "size"} <= set(source) and not {"bytes", "path"} & set(source):
        raise Refusal(
            f"{kind}_source",
            f"its {kind} is a dict of the attributes of a PIL image, without its pixels, as datasets.map stores an "
            "image inside messages; make conversations when a sample is asked for (dataset.with_transform), or keep "
            "images in a column of their own",
        )


def _options(item: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that say how the medium wants to be resized or sampled.

    Raises:
        Refusal: one of them is nearly a known key, and would change nothing.
    """
    taken = {"type", "text", "bytes", *_SOURCE_KEYS["image"], *_SOURCE_KEYS["video"]}
    options = {name: value for name, value in item.items() if name not in taken and value is not None}
    for name in options:
        if meant := misspelt_key(str(name)):
            raise Refusal(
                "vision_key",
                f"beside an image or video stands the key {name!r}, which is not known; did you mean {meant!r}?",
            )
    return options
