"""How tensors of samples are joined, and placeholders compared with tiles and images: small rows, written out."""

from typing import Any

import pytest
import torch
from cases import families

from vlmpack.errors import LayoutError
from vlmpack.families.registry import FAMILIES
from vlmpack.families.tiles import Join
from vlmpack.layout import Media, Segments
from vlmpack.layout.media import IMAGE, Expected, MediaTable, Medium, place


def test_samples_follow_each_other_along_the_axis() -> None:
    one, two = torch.ones(2, 3), torch.zeros(1, 3)
    assert Join()([one, two]).tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
    assert Join(axis=1)([one[:1], two]).tolist() == [[1, 1, 1, 0, 0, 0]]


def test_other_axes_are_padded_where_the_descriptor_says_so() -> None:
    wide, high = torch.ones(1, 1, 3), torch.full((1, 2, 2), 2.0)
    assert Join(pad=True)([wide, high]).tolist() == [[[1, 1, 1], [0, 0, 0]], [[2, 2, 0], [2, 2, 0]]]
    assert Join(axis=2, pad=True)([wide, high]).tolist() == [[[1, 1, 1, 2, 2], [0, 0, 0, 2, 2]]]
    with pytest.raises(LayoutError, match=r"\[1, 1, 3\], \[1, 2, 2\], which cannot follow each other along axis 0"):
        Join()([wide, high])


ROW = torch.tensor([[0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0]])
"""Samples of 6 and 4 tokens with 3 and 3 placeholders; 2 tokens of padding."""
SEGMENTS = Segments(lengths=(6, 4), slots=(6, 6), total=12, num_samples=2)


def placed(types: torch.Tensor, *tokens: int) -> MediaTable:
    """Images of so many tokens, found in a row of these types."""
    expected = [Expected(medium=Medium(kind=IMAGE), tokens=(count,)) for count in tokens]
    return place(expected, types[0].numpy(), SEGMENTS, counted=[IMAGE])


@pytest.mark.parametrize(
    ("tokens", "runs"),
    [
        ((3, 3), [(0, ((1, 3), (4, 5))), (1, ((1, 4),))]),
        ((2, 1, 3), [(0, ((1, 3),)), (0, ((4, 5),)), (1, ((1, 4),))]),
        ((1, 2, 1, 2), [(0, ((1, 2),)), (0, ((2, 3), (4, 5))), (1, ((1, 2),)), (1, ((2, 4),))]),
    ],
)
def test_images_that_end_where_samples_do_are_found(tokens: tuple[int, ...], runs: list[Any]) -> None:
    assert [(image.sample, image.runs) for image in placed(ROW, *tokens).media] == runs


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ((2, 4), "sample 0 ends at place 6 of the row, in the middle of image 1; the row has 6 image placeholders"),
        ((3, 3, 1), "1 placeholders of image 2 .* the row has 6 image placeholders, and its 3 images make 7"),
        ((3,), "sample 1 has a run of 3 image placeholders, but no image is left; the row has 6"),
        ((), "sample 0 has a run of 2 image placeholders, but no image is left; .* 0 images make 0 tokens"),
    ],
)
def test_images_that_do_not_fit_are_refused(tokens: tuple[int, ...], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        placed(ROW, *tokens)


@pytest.mark.parametrize("family", families(lambda family: family.has_vision))
def test_media_that_are_no_floats_are_refused(family: str) -> None:
    names = FAMILIES[family].pixel_names + ("input_features",) * FAMILIES[family].has_audio
    for name in names:
        for wrong in (torch.uint8, torch.int64, torch.complex64):
            media = Media.from_hf({name: torch.ones(2, 3, dtype=wrong)}, names=names)
            with pytest.raises(LayoutError, match=f"{name} is {wrong}, but the model reads rescaled and normalized"):
                FAMILIES[family].check_floats(media)
    floats = {name: torch.ones(2, 3, dtype=torch.bfloat16) for name in names}
    FAMILIES[family].check_floats(Media.from_hf(floats | {"image_sizes": torch.ones(1, 2).long()}, names=[*names]))


def test_placeholders_on_padding_are_refused() -> None:
    row = ROW.clone()
    row[0, -1] = 1
    with pytest.raises(LayoutError, match="padding of the row has 1 image placeholders"):
        placed(row, 3, 3)
