"""Where the tokens of a picture are: every token once, in the place that the layout gives it."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmpack.layout import HostMetadata, PaddedBatch, SlotRule, pack
from vlmpack.plots.rows import Piece, packed_pieces, padded_pieces


def batch_of(lengths: list[int], *, left: bool = False, image: tuple[int, int] = (1, 3)) -> PaddedBatch:
    """Samples whose tokens `image[0]` to `image[1]` are an image's."""
    width = max(lengths)
    mask, types = torch.zeros(2, len(lengths), width, dtype=torch.long).unbind(0)
    for row, length in enumerate(lengths):
        start = width - length if left else 0
        mask[row, start : start + length] = 1
        types[row, start + min(image[0], length) : start + min(image[1], length)] = 1
    return PaddedBatch(input_ids=mask.clone(), attention_mask=mask, mm_token_type_ids=types)


def drawn(pieces: list[Piece]) -> list[tuple[int, int, int, str, int | None]]:
    return [(piece.line, piece.start, piece.stop, piece.kind, piece.sample) for piece in pieces]


def test_each_row_of_a_padded_batch_is_a_line():
    assert drawn(padded_pieces(batch_of([5, 2]))) == [
        (0, 0, 1, "text", 0),
        (0, 1, 3, "image", 0),
        (0, 3, 5, "text", 0),
        (1, 0, 1, "text", 1),
        (1, 1, 2, "image", 1),
        (1, 2, 5, "padding", None),
    ]


def test_padding_may_be_on_the_left_as_the_mask_or_the_host_s_metadata_say():
    batch = batch_of([3, 1], left=True)
    assert drawn(padded_pieces(batch)) == [
        (0, 0, 1, "text", 0),
        (0, 1, 3, "image", 0),
        (1, 0, 2, "padding", None),
        (1, 2, 3, "text", 1),
    ]
    metadata = HostMetadata(lengths=(3, 1), offsets=(0, 2))
    known = PaddedBatch(**{**vars(batch), "metadata": metadata})
    assert padded_pieces(known) == padded_pieces(batch)


def test_a_row_goes_on_in_the_next_line_where_one_is_full():
    row = pack(batch_of([5, 2]), rule=SlotRule(multiple=4))
    assert drawn(packed_pieces(row, width=5)) == [
        (0, 0, 1, "text", 0),
        (0, 1, 3, "image", 0),
        (0, 3, 5, "text", 0),
        (1, 0, 3, "padding", None),
        (1, 3, 4, "text", 1),
        (1, 4, 5, "image", 1),
        (2, 0, 2, "padding", None),
    ]


def test_without_token_types_all_is_text():
    batch = batch_of([3, 1])
    plain = PaddedBatch(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
    assert {piece.kind for piece in padded_pieces(plain)} == {"text", "padding"}
    assert {piece.kind for piece in packed_pieces(pack(plain), width=3)} == {"text"}


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 17), min_size=1, max_size=5),
    multiple=st.integers(1, 5),
    width=st.integers(1, 23),
    left=st.booleans(),
)
def test_every_token_is_drawn_once_in_its_place(lengths, multiple, width, left):
    batch = batch_of(lengths, left=left, image=(2, 5))
    row = pack(batch, rule=SlotRule(multiple=multiple))
    for pieces, line_width, total in (
        (padded_pieces(batch), max(lengths), len(lengths) * max(lengths)),
        (packed_pieces(row, width=width), width, row.segments.total),
    ):
        cells = [(piece.line, column) for piece in pieces for column in range(piece.start, piece.stop)]
        assert sorted(cells) == [divmod(i, line_width) for i in range(total)]
        by_sample = [sum(p.stop - p.start for p in pieces if p.sample == i) for i in range(len(lengths))]
        assert by_sample == lengths
        images = sum(p.stop - p.start for p in pieces if p.kind == "image")
        assert images == sum(min(max(n - 2, 0), 3) for n in lengths)
