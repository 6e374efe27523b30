"""Images and videos belong to the placeholders that they come in the order of: whatever disagrees is refused.

transformers refuses the same batches, but for the totals that it compares, when its positions are computed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import slow

from vlmpack.errors import LayoutError
from vlmpack.layout import Media, PaddedBatch, SlotRule, pack
from vlmpack.model import enable_packing
from vlmpack.testing import build_sample, padded, tiny_model

FOUR, EIGHT = (1, 4, 4), (1, 4, 8)
FAMILIES = ("qwen3_vl", *slow("qwen2_vl", "qwen2_5_vl", "qwen3_5"))
FORMS = ("batch", "batch without metadata", "row", "row with gaps", "row without metadata")


def turned(media: Media) -> Media:
    """The two images exchanged, pixels and grids."""
    assert media.pixel_values is not None
    assert media.image_grid_thw is not None
    first, second = media.pixel_values.split(media.image_grid_thw.prod(1).tolist())
    return replace(media, pixel_values=torch.cat([second, first]), image_grid_thw=media.image_grid_thw.flip(0))


def inputs_of(batch: PaddedBatch, form: str) -> dict:
    if "without metadata" in form and form.startswith("batch"):
        return replace(batch, metadata=None).to_hf()
    if form == "batch":
        return batch.to_hf()
    inputs = pack(batch, rule=SlotRule(multiple=16 if "gaps" in form else 1)).to_hf()
    return {name: value for name, value in inputs.items() if form == "row" or name != "vlmpack"}


@pytest.fixture(scope="module", params=FAMILIES)
def models(request):
    return tiny_model(request.param, patch_size=4).eval(), enable_packing(
        tiny_model(request.param, patch_size=4).eval()
    )


@pytest.mark.parametrize("form", FORMS)
def test_images_of_two_samples_exchanged_are_refused(models, form):
    plain, model = models
    batch = padded([build_sample(plain.config, stretches=[2, 3], image_grids=[grid]) for grid in (FOUR, EIGHT)])
    assert torch.isfinite(model(**inputs_of(batch, form)).loss)
    other = replace(batch, media=turned(batch.media), metadata=replace(batch.metadata, image_grids=(EIGHT, FOUR)))
    with pytest.raises(RuntimeError, match="shape mismatch"):
        plain(**replace(other, metadata=None).to_hf())
    with pytest.raises(LayoutError, match=r"sample 0: a run of 4 image placeholders .* makes 8 tokens"):
        model(**inputs_of(other, form))
