"""How tensors of samples are joined, and placeholders compared with tiles and images: small rows, written out."""

from __future__ import annotations

import pytest
import torch
from cases import families

from vlmpack.errors import LayoutError
from vlmpack.families.registry import FAMILIES
from vlmpack.families.tiles import Join, check_tiles
from vlmpack.layout import HostMetadata, Media, Segments


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


def metadata(tokens: tuple[int, ...], per_sample: tuple[int, ...] = ()) -> HostMetadata:
    return HostMetadata(lengths=(6, 4), image_tokens=tokens, images_per_sample=per_sample)


@pytest.mark.parametrize(
    ("tokens", "per_sample"), [((3, 3), (1, 1)), ((2, 1, 3), (2, 1)), ((2, 1, 3), ()), ((1, 1, 1, 1, 1, 1), ())]
)
def test_images_that_end_where_samples_do_fit(tokens: tuple[int, ...], per_sample: tuple[int, ...]) -> None:
    check_tiles(ROW, SEGMENTS, metadata(tokens, per_sample))


@pytest.mark.parametrize(
    ("tokens", "per_sample", "message"),
    [
        ((2, 4), (), "sample 0 ends in the middle of an image: the row has 6 image placeholders"),
        ((2, 4), (1, 1), "sample 0 has 3 image placeholders, but its images make 2 tokens"),
        ((2, 1, 3), (1, 2), "sample 0 has 3 image placeholders, but its images make 2 tokens"),
        ((3, 3, 1), (), "the row has 6 image placeholders, but its 3 images or tiles make 7"),
        ((3,), (), "sample 1 has 3 image placeholders and ends where no image does: the row has 6"),
        ((2, 3), (1, 1), "sample 0 has 3 image placeholders, but its images make 2 tokens: the row has 6"),
    ],
)
def test_images_that_do_not_fit_are_refused(tokens: tuple[int, ...], per_sample: tuple[int, ...], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        check_tiles(ROW, SEGMENTS, metadata(tokens, per_sample))


@pytest.mark.parametrize("family", families(lambda family: family.has_vision))
def test_media_that_are_no_floats_are_refused(family: str) -> None:
    names = FAMILIES[family].pixel_names + ("input_features",) * FAMILIES[family].has_audio
    for name in names:
        for wrong in (torch.uint8, torch.int64, torch.complex64):
            media = Media.from_hf({name: torch.ones(2, 3, dtype=wrong)}, names=names)
            with pytest.raises(LayoutError, match=f"{name} is {wrong}, but the model reads rescaled and normalised"):
                FAMILIES[family].check_floats(media)
    floats = {name: torch.ones(2, 3, dtype=torch.bfloat16) for name in names}
    FAMILIES[family].check_floats(Media.from_hf(floats | {"image_sizes": torch.ones(1, 2).long()}, names=[*names]))


def test_placeholders_on_padding_are_refused() -> None:
    row = ROW.clone()
    row[0, -1] = 1
    with pytest.raises(LayoutError, match="padding of the row has 1 image placeholders"):
        check_tiles(row, SEGMENTS, metadata((3, 3)))
