"""What a picture of rows is made of, as plain numbers: stretches of tokens, cut into lines of one width."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, final

import numpy as np
import torch

from vlmpack.layout import MaskSpans, PackedRow, PaddedBatch, lengths_from_mask

Kind = Literal["text", "image", "padding"]


@final
@dataclass(frozen=True, kw_only=True)
class Piece:
    """Neighbouring tokens of one sample and one kind, on one line."""

    line: int
    """Line of the picture, from the top."""
    start: int
    """First column, in tokens."""
    stop: int
    """Column after the last one."""
    kind: Kind
    """What the tokens are; videos count as images."""
    sample: int | None = None
    """The sample that they belong to; None: padding."""


def padded_pieces(batch: PaddedBatch) -> list[Piece]:
    """Every row of the batch on a line of its own."""
    spans = _spans(batch)
    width = batch.input_ids.shape[1]
    types = _types(batch.mm_token_type_ids, (len(spans.lengths), width))
    pieces = []
    for row, (offset, length) in enumerate(zip(spans.offsets, spans.lengths, strict=True)):
        stop = offset + length
        pieces += _padding(row, 0, offset)
        pieces += _sample(row, row, offset, types[row, offset:stop])
        pieces += _padding(row, stop, width)
    return pieces


def packed_pieces(row: PackedRow, *, width: int) -> list[Piece]:
    """The row from left to right, continued on the next line wherever `width` tokens are full."""
    types = _types(row.mm_token_type_ids, (1, row.segments.total))[0]
    pieces, at = [], 0
    for sample, (start, stop) in enumerate(row.segments.spans[: row.segments.num_samples]):
        pieces += [*_padding(0, at, start), *_sample(0, sample, start, types[start:stop])]
        at = stop
    pieces += _padding(0, at, row.segments.total)
    return [part for piece in pieces for part in _wrapped(piece, width)]


def _spans(batch: PaddedBatch) -> MaskSpans:
    return lengths_from_mask(batch.attention_mask) if batch.metadata is None else batch.metadata.spans


def _types(types: torch.Tensor | None, shape: tuple[int, int]) -> np.ndarray:
    return np.zeros(shape, np.int64) if types is None else types.cpu().numpy()


def _padding(line: int, start: int, stop: int) -> list[Piece]:
    return [Piece(line=line, start=start, stop=stop, kind="padding")] if stop > start else []


def _sample(line: int, sample: int, start: int, types: np.ndarray) -> Iterator[Piece]:
    """The sample's runs of text and of image tokens."""
    is_image = types != 0
    edges = np.flatnonzero(is_image[1:] != is_image[:-1]) + 1
    for a, b in pairwise([0, *edges.tolist(), len(types)]):
        if b > a:
            kind: Kind = "image" if is_image[a] else "text"
            yield Piece(line=line, start=start + a, stop=start + b, kind=kind, sample=sample)


def _wrapped(piece: Piece, width: int) -> Iterator[Piece]:
    """The piece, cut where a line of `width` tokens ends."""
    for line in range(piece.start // width, (piece.stop - 1) // width + 1):
        first = line * width
        yield replace(piece, line=line, start=max(piece.start - first, 0), stop=min(piece.stop - first, width))
