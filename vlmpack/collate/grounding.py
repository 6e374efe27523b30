"""Write the names and boxes of ms-swift's column `objects` into a sample's texts, as Qwen's models write them.

    text      "<ref-object><bbox> on a beach"      objects   {"ref": ["a dog"], "bbox": [[331.5, 761.4, 853.5, 1594.8]]}
    written   "<|object_ref_start|>a dog<|object_ref_end|><|box_start|>(170,390),(437,817)<|box_end|> on a beach"
    in JSON   {"bbox_2d": <bbox>, "label": "<ref-object>"}  ──▶  {"bbox_2d": [170, 390, 437, 817], "label": "a dog"}

Names and boxes fill their placeholders in order, separately. A box is a point (x, y) or two corners, in pixels of image
`image_id` (default 0) or, with `bbox_type="norm1"`, in fractions of its sides. Models take coordinates in thousandths
of the image's sides, or in pixels of the image that the processor has resized.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vlmpack.collate.chat_template import map_texts
from vlmpack.collate.encoded import Visual
from vlmpack.collate.processor_metadata import ProcessorMetadata
from vlmpack.data.formats import bad_row
from vlmpack.data.images import ImageLimits, read_size
from vlmpack.data.messages import GROUNDING, Conversation
from vlmpack.errors import SampleError

THOUSANDTHS = ("Qwen2VLProcessor", "Qwen3VLProcessor", "Qwen3OmniMoeProcessor")
"""Classes of processors whose models take thousandths of an image's sides."""
RESIZED = ("Qwen2_5_VLProcessor", "Qwen2_5OmniProcessor")
"""Classes of processors whose models take pixels of the resized image."""
_AS_JSON = re.compile(r'"\w+":\s*<bbox>')
"""A box as a value of JSON, the form of Qwen's own examples since Qwen2.5-VL."""


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
    if any(len(pieces) > 1 for pieces in conversation.turn_weights or ()):
        raise bad_row("texts of an answer have several weights, and a column objects changes them; give it one weight")
    objects, is_json = conversation.objects, any(_AS_JSON.search(text) for text in conversation.contents())
    assert objects is not None, "a conversation with objects"

    def written(box: np.ndarray, number: int) -> str:
        if number not in range(len(images)):
            raise bad_row(f"its objects have a bbox in image {number}, but it has {len(images)} image(s)")
        size, margin = np.ones(2, np.int64), 1e-3
        if objects.unit == "real":
            size = np.array(read_size(conversation.media["image"][number].source, limits=limits)[::-1])
            margin = 1.0  # rounding puts boxes up to a pixel outside
        if not ((box >= -margin) & (box <= size + margin)).all():
            seen = f"its objects have the bbox {box.ravel().tolist()} ({objects.unit}) in image {number} of"
            raise bad_row(f"{seen} {size[0]} x {size[1]} (width x height); give one inside of it")
        _, rows, columns = images[number].patch_grid
        final = np.array([columns, rows]) * metadata.patch_size if name in RESIZED else 1000
        points = np.rint(np.sort(box.clip(0, size), axis=0) / size * final).astype(int)  # corners may be swapped
        if is_json:
            return str(points.ravel().tolist())
        return f"<|box_start|>{','.join(f'({x},{y})' for x, y in points.tolist())}<|box_end|>"

    names = objects.names if is_json else [f"<|object_ref_start|>{x}<|object_ref_end|>" for x in objects.names]
    given = dict(zip(GROUNDING, (names, [*map(written, objects.boxes, objects.images)]), strict=True))
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
    return replace(conversation, messages=messages, plain=plain)
