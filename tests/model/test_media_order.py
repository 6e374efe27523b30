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


@pytest.mark.parametrize("form", FORMS)
def test_placeholders_moved_to_another_sample_are_refused(models, form):
    plain, model = models
    batch = padded([build_sample(plain.config, stretches=[n, 5 - n], image_grids=[FOUR]) for n in (2, 3)])
    image = plain.config.image_token_id
    ids, types = batch.input_ids.clone(), batch.mm_token_type_ids.clone()
    ids[0, 7:9], types[0, 7:9] = image, 1  # six of them now, and two
    ids[1, 4:6], types[1, 4:6] = 9, 0
    other = replace(batch, input_ids=ids, mm_token_type_ids=types, labels=None)
    assert int((ids == image).sum()) == 8
    with pytest.raises(RuntimeError, match="shape mismatch"):
        plain(**replace(other, metadata=None).to_hf())
    with pytest.raises(LayoutError, match=r"sample 0: a run of 6 image placeholders"):
        model(**inputs_of(other, form))


def test_a_boundary_of_samples_inside_an_image_is_refused(models):
    """`rope_cu_seqlens` cannot restart there either."""
    _, model = models
    sample = build_sample(model.config, stretches=[2, 3], image_grids=[FOUR])
    ids, media = sample["input_ids"][None], {name: sample[name] for name in ("pixel_values", "image_grid_thw")}
    first = int((ids[0] == model.config.image_token_id).nonzero()[0])
    assert model(input_ids=ids, cu_seqlens_q=[0, first, ids.shape[1]], **media).logits.isfinite().all()
    for inside in (first + 1, first + 3):
        with pytest.raises(LayoutError, match="image 0 of the row is cut in two where sample 1 starts, at place"):
            model(input_ids=ids, cu_seqlens_q=[0, inside, ids.shape[1]], **media)
