"""What to say where a column is not there, is called something else, or is one too many."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image

from vlmpack.errors import Refusal

CONVERSATION_COLUMNS = ("messages", "conversations", "conversation", "prompt")
"""A feature with none of these and no `input_ids` is not a sample."""

MEDIA_COLUMNS = ("image", "images", "video", "videos")
_RECEIPT_COLUMNS = ("image", "ground_truth")
_TEXT_COLUMNS = ("input_ids", *CONVERSATION_COLUMNS, "completion")
_READ = {*_TEXT_COLUMNS, *MEDIA_COLUMNS, "system", "tools", "chat_template_kwargs", "id", "sample_id"}
_NOTES = {"length", "lengths", "index", "idx", "source", "dataset", "split", "attention_mask", "token_type_ids"}
"""Columns that nothing reads and that would change nothing."""
_PREFERENCE = re.compile(r"(chosen|rejected)(_.*)?|(loss|sample)_(scale|weight)s?")
"""Names of columns that say how much, or against what, a sample is learnt."""
_NAMED_MEDIA = re.compile(
    r"(images?|imgs?|pictures?|pics?|photos?|videos?|clips?)(_?(paths?|files?|urls?|bytes|file_?names?|data|base64))?"
)
"""Names of columns that hold images or videos; `image_id` and `num_images` do not."""
_FILE_COLUMN = re.compile(r"(file_?names?|files?|file_?paths?|paths?|media|media_paths?|attachments?|frames)")
"""Names of columns that hold files of any kind."""
_FILE = re.compile(r"(?i)\S.*\.(png|jpe?g|webp|gif|bmp|tiff?|mp4|avi|mkv|mov|webm)")
_ENCODED = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF")
"""How the bytes of encoded images begin."""
_GROUNDING = ("<bbox>", "<ref-object>", "<quad>")
"""Places in a text that ms-swift fills from its column `objects`."""
_KEPT = {*MEDIA_COLUMNS, "id", "sample_id", "length", "label", "labels", "label_ids", "attention_mask", "position_ids"}
"""All that HF Trainer or TRL may leave of a sample whose text they dropped."""
_OF_TOKENS = (
    *("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"),
    *("completion_mask", "assistant_masks", "loss_mask"),
)
"""Of samples that were tokenised before."""
_KNOWN = {*_READ, *_OF_TOKENS, "labels", "attention_mask", "mm_token_type_ids", "second_per_grid_ts", "audio", "audios"}
_MANY = 12
"""Columns that are named in an error."""


def is_absent(value: Any) -> bool:
    """None, or a struct with nothing in it: Arrow gives every part of a column the keys of all of them."""
    return value is None or (isinstance(value, Mapping) and all(inner is None for inner in value.values()))


def is_empty(value: Any) -> bool:
    """Absent, or a text or list with nothing in it."""
    return is_absent(value) or (isinstance(value, str | list | tuple) and not value)


def check_columns_filled(feature: Mapping[str, Any]) -> None:
    """A column that is there but None is this sample's fault; one that is not there at all is the setup's.

    Raises:
        Refusal: `bad_row`, with the columns that are None.
    """
    empty = [name for name in _TEXT_COLUMNS if feature.get(name, "") is None]
    if empty:
        raise Refusal("bad_row", f"its {' and '.join(empty)} is None; fill it, or leave the sample out of the data set")


def check_one_form(forms: Sequence[str], present: Mapping[str, Any]) -> None:
    """Refuse a sample that is written down twice, or has columns that nothing reads with its conversation.

    Raises:
        Refusal: `bad_row`, with the names of both.
    """
    if len(forms) > 1:
        raise Refusal("bad_row", f"it has {' and '.join(forms)}, of which one would be read; keep that one")
    if found := next((name for name in _OF_TOKENS if forms and not is_empty(present.get(name))), None):
        raise Refusal(
            "bad_row",
            f"it has {found}, which belongs to input_ids, and {forms[0]}, of which its tokens are made; leave one out",
        )
    if found := next((name for name in ("audio", "audios") if not is_empty(present.get(name))), None):
        raise Refusal("bad_row", f"it has {found}, which these models cannot hear; leave the column out")


def check_unread(feature: Mapping[str, Any], *, has_media: bool, texts: Sequence[str]) -> tuple[str, ...]:
    """The columns of a sample that nothing reads, of which none holds something that the sample would lack.

    Args:
        feature: the sample's columns.
        has_media: whether it has images or videos; a column of file names is then a note.
        texts: what it says.

    Raises:
        Refusal: `unread_column`: one of them holds media and the sample has none, or preferences or weights, or it is
            ms-swift's `objects` and the text has places for them.
    """
    unread = {str(name): value for name, value in feature.items() if name not in _KNOWN and not is_empty(value)}
    for name, value in unread.items():
        if _is_preference(name.lower(), value):
            raise Refusal(
                "unread_column",
                f"it has a column {name}, which says what is learnt, and which nothing reads: preferences and weights "
                "are not what this collator trains on; leave the column out",
            )
        if not has_media and _is_media(name.lower(), value):
            raise Refusal(
                "unread_column",
                f"it has a column {name}, which looks like its image or video and which nothing reads, and it has no "
                "other; rename it image or images (or video, videos), or leave it out if the sample is text",
            )
        if name == "objects" and (found := next((one for one in _GROUNDING if any(one in t for t in texts)), None)):
            raise Refusal(
                "unread_column",
                f"its text holds {found!r} and it has a column objects, from which ms-swift fills it and which nothing "
                "reads here; write the boxes and names into the text",
            )
    return tuple(name for name in unread if name not in _NOTES)


def _is_preference(name: str, value: Any) -> bool:
    """Weights of 1 change nothing; a label that is true or false is KTO's."""
    if name == "label":
        return isinstance(value, bool)
    values = np.asarray(value, dtype=object).reshape(-1).tolist()
    return _PREFERENCE.fullmatch(name) is not None and any(one != 1 for one in values)


def _is_media(name: str, value: Any) -> bool:
    values = value if isinstance(value, list | tuple) else [value]
    if isinstance(values[0], Image.Image) or _is_stored_image(values[0]):
        return True
    if _NAMED_MEDIA.fullmatch(name):
        return isinstance(values[0], str | bytes | Mapping)
    return bool(_FILE_COLUMN.fullmatch(name)) and isinstance(values[0], str) and _FILE.fullmatch(values[0]) is not None


def _is_stored_image(value: Any) -> bool:
    """An image as Arrow stores it, {"bytes", "path"}, or encoded, whatever its column is called."""
    if isinstance(value, Mapping):
        return {"bytes", "path"} == set(value) and not is_absent(value)
    if isinstance(value, str):
        return value.startswith(("data:image/", "data:video/"))
    return isinstance(value, bytes) and value.startswith(_ENCODED)


def no_columns(feature: Mapping[str, Any]) -> str:
    """The error of a feature with none of the columns that hold a sample's text."""
    return (
        f"it has none of the columns input_ids, {', '.join(CONVERSATION_COLUMNS)} (with completion); it has: "
        f"{_listed(feature) or 'none at all'}. {_remedy(feature)}"
    )


def also_has(feature: Mapping[str, Any]) -> str:
    """The end of an error: the columns that nothing reads, as one of them may be misspelt; "" where all are read."""
    unread = {name: value for name, value in feature.items() if name not in _READ and value is not None}
    return f"; it also has: {_listed(unread)}" if unread else ""


def _remedy(feature: Mapping[str, Any]) -> str:
    if all(name in feature for name in _RECEIPT_COLUMNS):
        return (
            "These are receipts as CORD has them: make a conversation of each with vlmpack.data.to_conversation, or "
            "let open_dataset read them"
        )
    near = [f"{name!r}: did you mean {meant!r}?" for name in feature if (meant := _meant(str(name)))]
    if near:
        return f"{' '.join(near)} Rename the column"
    if "prompt" in feature or "completion" in feature:
        return "A prompt comes with its completion: give both, or write them as messages"
    if not any(_may_be_text(value) for name, value in feature.items() if name not in _KEPT):
        return (
            "HF Trainer drops dataset columns that the model's forward does not name before the collator sees "
            "them: set TrainingArguments(remove_unused_columns=False). TRL's trainers keep only messages, prompt, "
            "completion, image and images even then: rename a `conversation` column to `messages`, and write videos "
            "into the messages"
        )
    return "Rename the column with the conversation to messages, or make messages of your columns: a list of turns"


@lru_cache(maxsize=1024)
def _meant(name: str) -> str:
    """The column of a sample's text that a name nearly spells; "" where it spells one, or is like none."""
    near = get_close_matches(name.lower(), _TEXT_COLUMNS, n=1, cutoff=0.8)
    return near[0] if near and name not in _TEXT_COLUMNS else ""


def _may_be_text(value: Any) -> bool:
    return isinstance(value, str | list | tuple | Mapping)


def _listed(feature: Mapping[str, Any]) -> str:
    names = sorted(map(str, feature))
    return ", ".join(names[:_MANY]) + (f" and {len(names) - _MANY} more" if len(names) > _MANY else "")
