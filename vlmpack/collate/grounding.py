"""Write the names and boxes of ms-swift's column `objects` into a sample's texts, as Qwen's models write them.

    text      "<ref-object><bbox> on a beach"      objects   {"ref": ["a dog"], "bbox": [[331.5, 761.4, 853.5, 1594.8]]}
    written   "<|object_ref_start|>a dog<|object_ref_end|><|box_start|>(170,390),(437,817)<|box_end|> on a beach"

Names and boxes fill their placeholders in order, separately. A box is a point (x, y) or two corners, in pixels of image
`image_id` (default 0) or, with `bbox_type="norm1"`, in fractions of its sides. Models take coordinates in thousandths
of the image's sides, or in pixels of the image that the processor has resized.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vlmpack.collate.chat_template import map_texts
from vlmpack.collate.encoded import Visual
from vlmpack.collate.processor_metadata import ProcessorMetadata
from vlmpack.data.formats import bad_row, without_nulls
from vlmpack.data.images import ImageLimits, read_size
from vlmpack.data.messages import GROUNDING, Conversation, Weights
from vlmpack.errors import SampleError

THOUSANDTHS = ("Qwen2VLProcessor", "Qwen3VLProcessor", "Qwen3OmniMoeProcessor")
"""Classes of processors whose models take thousandths of an image's sides."""
RESIZED = ("Qwen2_5_VLProcessor", "Qwen2_5OmniProcessor")
"""Classes of processors whose models take pixels of the resized image."""


def with_objects(
    conversation: Conversation, images: Sequence[Visual], *, name: str, metadata: ProcessorMetadata, limits: ImageLimits
) -> Conversation:
    """Return a conversation with the names and boxes of its `objects` in place of their placeholders.

    Args:
        conversation: the sample.
        images: its images, as encoded or measured.
        name: the class name of its processor, whose `metadata` follow.
        metadata: the metadata of the processor.
        limits: size limits of images, whose headers are read again.

    Raises:
        SampleError: it is not known how the model writes boxes (`unread_column`), or the objects do not match the
            placeholders or the images (`bad_row`).
    """
    if name not in (*THOUSANDTHS, *RESIZED):
        fault = f"it has a column objects and {' or '.join(GROUNDING)} in its text, but how models with a {name} write"
        raise SampleError(f"{fault} them is not known here; write names and boxes into the text", "unread_column")
    if not isinstance(objects := without_nulls(conversation.objects), Mapping):
        raise bad_row(f"its column objects is no mapping of ref, bbox, bbox_type and image_id: {objects!r:.60}")
    kind, boxes = objects.get("bbox_type") or "real", objects.get("bbox") or []
    numbers = objects.get("image_id") or [0] * len(boxes)
    if kind not in ("real", "norm1") or len(numbers) != len(boxes):
        fault = f"its objects have the bbox_type {kind!r} and {len(numbers)} image_id for {len(boxes)} bbox"
        raise bad_row(f"{fault}; the types are real and norm1, and each box has an image, or none has")

    def written(box: Any, number: Any) -> str:
        if number not in range(len(images)):
            raise bad_row(f"its objects have a bbox in image {number!r}, but it has {len(images)} image(s)")
        _, rows, columns = images[number].patch_grid
        final = np.array([columns, rows]) * metadata.patch_size if name in RESIZED else 1000
        size = (1, 1) if kind == "norm1" else read_size(conversation.media["image"][number].source, limits=limits)[::-1]
        try:
            points = np.sort(np.asarray(box, np.float64).reshape(-1, 2), axis=0)  # corners may be swapped
            is_inside = bool(((points >= 0) & (points <= np.add(size, kind == "real"))).all())  # to a pixel
        except (ValueError, TypeError):
            points, is_inside = np.empty((0, 2)), False
        if len(points) not in (1, 2) or not is_inside:
            seen = f"its objects have the bbox {box!r:.60} ({kind}) in image {number} of {size[0]} x {size[1]}"
            raise bad_row(f"{seen} (width x height); give x, y or x1, y1, x2, y2 inside of it")
        scaled = np.rint(points / size * final).astype(int).tolist()
        return f"<|box_start|>{','.join(f'({x},{y})' for x, y in scaled)}<|box_end|>"

    names = [f"<|object_ref_start|>{ref}<|object_ref_end|>" for ref in objects.get("ref") or []]
    given = dict(zip(GROUNDING, (names, [*map(written, boxes, numbers)]), strict=True))
    values, counts = {mark: iter(texts) for mark, texts in given.items()}, dict.fromkeys(GROUNDING, 0)

    def fill(match: re.Match[str]) -> str:
        counts[match[0]] += 1
        return next(values[match[0]], "")

    def filled(text: str) -> str:
        return re.sub("|".join(GROUNDING), fill, text)

    messages = tuple(map_texts(m, at, lambda *where: filled(where[2])) for at, m in enumerate(conversation.messages))
    plain = conversation.plain and (filled(conversation.plain[0]), filled(conversation.plain[1]))
    if odd := next((mark for mark in GROUNDING if counts[mark] != len(given[mark])), None):
        fault = f"its texts hold {odd!r} {counts[odd]} time(s), and its objects fill {len(given[odd])}"
        raise bad_row(f"{fault}; give as many")
    weights = conversation.turn_weights and _of_texts(conversation.turn_weights, messages)
    return replace(conversation, messages=messages, plain=plain, turn_weights=weights)


def _of_texts(weights: Sequence[Weights], messages: Sequence[Mapping[str, Any]]) -> tuple[Weights, ...]:
    """Return the weights of answers whose texts have changed."""
    answers = (message["content"] for message in messages if message["role"] == "assistant")
    texts = ([p["text"] for p in each if p["type"] == "text"] if isinstance(each, list) else [""] for each in answers)
    return tuple(
        tuple((text if len(pieces) > 1 else "", weight) for text, (_, weight) in zip(said, pieces, strict=False))
        for said, pieces in zip(texts, weights, strict=True)
    )
