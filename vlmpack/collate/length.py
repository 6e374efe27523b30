"""What happens to a sample that is longer than `max_length`: an error, left out, or cut where nothing is torn."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from vlmpack.collate.checks import runs, tokens_of
from vlmpack.collate.encoded import Encoded, Visual
from vlmpack.collate.holes import Kind
from vlmpack.collate.processor import ProcessorFacts
from vlmpack.collate.refusal import Refusal
from vlmpack.layout import TEXT

Overlength = Literal["error", "drop", "truncate"]

OVERLENGTH = "overlength"
"""The reason under which samples that are too long are counted."""


def fit(sample: Encoded, facts: ProcessorFacts, *, max_length: int | None, overlength: Overlength) -> Encoded:
    """The sample itself if it fits `max_length` tokens, or what the policy makes of it.

    Raises:
        Refusal: it does not fit (reason "overlength"), or nothing to learn would be left of it ("truncated_away").
    """
    if max_length is None or sample.num_tokens <= max_length:
        return sample
    if overlength == "truncate":
        return truncate(sample, facts, max_length=max_length)
    media = int((sample.types != TEXT).sum())
    raise Refusal(
        OVERLENGTH,
        f"it has {sample.num_tokens} tokens ({media} of them for {len(sample.images)} image(s) and "
        f"{len(sample.videos)} video(s)) but max_length={max_length}; raise max_length, lower the processor's "
        "max_pixels, or choose overlength='drop' or overlength='truncate'",
    )


def truncate(sample: Encoded, facts: ProcessorFacts, *, max_length: int) -> Encoded:
    """The longest beginning of at most `max_length` tokens that ends between messages or beside an image.

    Images that were cut off are left out with their pixels. No image or video is ever cut in two.

    Raises:
        Refusal: no such beginning has anything to learn in it.
    """
    cut = max((c for c in boundaries(sample, facts) if c <= max_length), default=0)
    ids = sample.input_ids[:cut]
    images = _whole(sample.images, ids, facts, kind="image")
    videos = _whole(sample.videos, ids, facts, kind="video")
    shorter = replace(
        sample, input_ids=ids, labels=sample.labels[:cut], types=sample.types[:cut], images=images, videos=videos
    )
    if shorter.num_targets == 0:
        raise Refusal(
            "truncated_away",
            f"cut at the last message or image boundary within max_length={max_length} (token {cut} of "
            f"{sample.num_tokens}), nothing to learn is left of it; raise max_length, or choose overlength='drop'",
        )
    return shorter


def boundaries(sample: Encoded, facts: ProcessorFacts) -> list[int]:
    """Where the sample may be cut, in tokens: after a message, before and after an image; never inside a video."""
    ids = sample.input_ids
    cuts = [_after_newline(ids, end + 1, facts) for end in np.flatnonzero(ids == facts.turn_end_id).tolist()]
    for start, stop in runs(ids, facts.image_token_id):
        before = start - 1 if start and ids[start - 1] == facts.vision_start_id else start
        after = stop + 1 if stop < len(ids) and ids[stop] == facts.vision_end_id else stop
        cuts += [before, after]
    return sorted({*cuts, len(ids)})


def _after_newline(ids: np.ndarray, position: int, facts: ProcessorFacts) -> int:
    """ChatML puts a newline after `<|im_end|>`; it belongs to the message before it."""
    newline = position < len(ids) and int(ids[position]) in facts.newline_ids
    return position + 1 if newline else position


def _whole(visuals: tuple[Visual, ...], ids: np.ndarray, facts: ProcessorFacts, *, kind: Kind) -> tuple[Visual, ...]:
    """The leading images (or videos) whose placeholders are all among `ids`."""
    left = len(runs(ids, facts.token_id(kind)))
    kept = []
    for visual in visuals:
        left -= len(tokens_of(visual, facts, kind=kind))
        if left < 0:
            break
        kept.append(visual)
    return tuple(kept)
