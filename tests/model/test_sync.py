"""A packed step never makes the host wait for the device on its own account."""

from unittest import mock

import pytest
import torch
from cases import one_of_each, slow
from equality import VISION, checkpointed
from host_syncs import own_lines, recorded_syncs, towers_get_boundaries_of_the_host

from vlmpack.families.registry import FAMILIES
from vlmpack.layout import SlotRule, pack, unpack
from vlmpack.model import PackedStep, StepConfig, disable_packing, enable_packing
from vlmpack.model.engine import rope_segments
from vlmpack.model.mechanisms import attention
from vlmpack.testing import mixed_samples, padded, tiny_model
from vlmpack.testing.samples import kinds_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(("given", "more"), [("padded", "positions and restarts"), ("row", "nothing more")])
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen2_5_vl", "qwen3", *slow("qwen3_vl_moe", "qwen4_exp")])
def test_no_wait_in_a_whole_step(family, given, more):
    model = enable_packing(tiny_model(family, layers=3), StepConfig(slots=SlotRule(multiple=4)))
    kinds = ("image", "text", "images", "video") if family in VISION else ("text",) * 3
    batch = padded(mixed_samples(model.config, kinds=kinds))
    row = pack(batch, rule=SlotRule(multiple=4))
    inputs = batch.to_hf() if given == "padded" else row.to_hf()
    if more == "positions and restarts":
        inputs |= positions_and_restarts(model, row, inputs["input_ids"].shape)
    if FAMILIES[family].has("experts"):
        inputs["output_router_logits"] = True
    with recorded_syncs(CPU) as waits:
        model(**inputs, num_items_in_batch=7).loss.backward()
    assert own_lines(waits) == []


READ_SIZES = ("qwen2_5_omni_thinker", "glm_ocr", "mistral3", "minicpmv4_6")
"""Families whose own code reads kinds of tokens, or sizes of images, on the host."""
WITH_VISION = one_of_each(lambda family: family.has_vision, always=READ_SIZES)


@pytest.mark.parametrize("family", WITH_VISION)
def test_no_medium_is_waited_for(family):
    """Several images, videos and audios: whatever the family takes; not when layers are computed again, either."""
    model = checkpointed(enable_packing(tiny_model(family)).train())
    inputs = pack(padded(mixed_samples(model.config, kinds=kinds_of(model.config) * 2))).to_hf()
    model(**inputs, num_items_in_batch=7)  # the first step of a family may try transformers out
    with recorded_syncs(CPU) as waits, towers_get_boundaries_of_the_host():
        model(**inputs, num_items_in_batch=7).loss.backward()
    assert own_lines(waits) == []


@pytest.mark.parametrize("family", WITH_VISION)
def test_a_tower_calls_attention_as_often_for_many_images_as_for_one(family):
    """One call of each of its layers, by the back-end that was chosen."""
    model = enable_packing(tiny_model(family), StepConfig(attention="eager_mask"))
    tower, calls = FAMILIES[family].vision_tower(model), []
    layers = [] if tower is None else [module for module in tower.modules() if "is_causal" in vars(module)]
    assert tower is None or layers
    honest = attention.packed_attention

    def counted(*args, vision=None, **more):
        calls.append(vision)
        return honest(*args, vision=vision, **more)

    for kinds in (("image",), ("images", "image", "images")):
        with mock.patch.object(attention, "packed_attention", counted):
            PackedStep(model)(padded(mixed_samples(model.config, kinds=kinds)))
        assert sum(vision is not None for vision in calls) == len(layers)
        calls.clear()


def positions_and_restarts(model, row, shape):
    """What is right for every sample: its positions, and one more restart at the second sample's fourth token."""
    segments, family = row.segments, FAMILIES[model.config.model_type]
    restarts = sorted({*segments.real, segments.real[1] + 3})
    table, cut = row.metadata.media, rope_segments(restarts, segments)
    positions = family.positions(table, segments, config=model.config, restarts=cut)
    given = family.rotary_ids(positions)
    if shape[0] > 1:
        given = unpack(given, segments, token_dim=given.ndim - 1, width=shape[1])
    return {"position_ids": given, "rope_cu_seqlens": restarts}


def test_the_counter_sees_our_own_waits():
    """Without host metadata the lengths, grids and targets have to be read, which is what the metadata are for."""
    model = enable_packing(tiny_model("qwen3_vl"))
    batch = padded(mixed_samples(model.config), metadata=False)
    with recorded_syncs(CPU) as waits:
        model(**batch.to_hf())
    assert own_lines(waits)
    disable_packing(model)
