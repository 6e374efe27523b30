"""Which tokens are learnt: found in token space, so that any chat template with ChatML turns will do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from vlmpack.collate.processor_metadata import ProcessorMetadata
from vlmpack.layout import IGNORE

TrainOn = Literal["assistant", "all"]


def assistant_spans(input_ids: np.ndarray, metadata: ProcessorMetadata) -> list[tuple[int, int]]:
    """(start, stop) of what the assistant says in each of its turns: from after the header to after `<|im_end|>`.

        <|im_start|> assistant \\n  It costs 5 . <|im_end|>  \\n <|im_start|> user ...
                                   ^start                   ^stop

    A last turn without its end (a cut sample) runs to the end of the sample.
    """
    if metadata.turn_start_id is None:
        return []
    starts = np.flatnonzero(input_ids == metadata.turn_start_id).tolist()
    spans = []
    for turn, limit in zip(starts, [*starts, len(input_ids)][1:], strict=True):
        start = _after_header(input_ids, turn, metadata)
        if start is not None:
            ends = np.flatnonzero(input_ids[start:limit] == metadata.turn_end_id)
            spans.append((start, start + int(ends[0]) + 1 if len(ends) else limit))
    return spans


def make_labels(
    input_ids: np.ndarray, metadata: ProcessorMetadata, *, spans: Sequence[tuple[int, int]] | None = None
) -> np.ndarray:
    """int64 [n], not shifted: the ids where they are learnt, -100 elsewhere, on all media and on the first token.

    Args:
        input_ids: int64 [n].
        metadata: of the processor.
        spans: (start, stop) pairs that are learnt; None: everything.
    """
    if spans is None:
        labels = input_ids.copy()
    else:
        labels = np.full_like(input_ids, IGNORE)
        for start, stop in spans:
            labels[start:stop] = input_ids[start:stop]
    return mask_media(labels, input_ids, metadata)


def mask_media(labels: np.ndarray, input_ids: np.ndarray, metadata: ProcessorMetadata) -> np.ndarray:
    """A copy of `labels` with -100 on placeholders, on the tokens around them, and on the first token."""
    labels = labels.copy()
    for token_id in metadata.media_ids:
        labels[input_ids == token_id] = IGNORE
    labels[:1] = IGNORE
    return labels


def _after_header(input_ids: np.ndarray, turn: int, metadata: ProcessorMetadata) -> int | None:
    """The position after `<|im_start|>assistant\\n` at `turn`; None: another role's turn."""
    newline = turn + 1 + len(metadata.assistant_ids)
    role = tuple(input_ids[turn + 1 : newline].tolist())
    if (
        role != metadata.assistant_ids
        or newline >= len(input_ids)
        or int(input_ids[newline]) not in metadata.newline_ids
    ):
        return None
    return newline + 1
