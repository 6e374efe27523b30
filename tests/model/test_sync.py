"""A packed step never makes the host wait for the device on its own account."""

from pathlib import Path

import pytest
import torch
from waiting import waits_are_errors

import vlmpack
from vlmpack.families import FAMILIES
from vlmpack.layout import HostSync, SlotRule, pack, recorded_syncs, unpack
from vlmpack.model import StepConfig, disable_packing, enable_packing
from vlmpack.model.positions import rope_segments
from vlmpack.testing import VISION, mixed_samples, padded, tiny_model

CPU = torch.device("cpu")
HOME = Path(vlmpack.__file__).parent


def ours(waits: list[HostSync]) -> list[str]:
    """Those of vlmpack's own code; the rest are the model's."""
    return [wait.place for wait in waits if Path(wait.file).is_relative_to(HOME)]


@pytest.mark.pairwise
@pytest.mark.parametrize("more", ["nothing more", "positions and restarts"])
@pytest.mark.parametrize("given", ["padded", "row"])
@pytest.mark.parametrize("family", FAMILIES)
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
    assert ours(waits) == []
    assert waits or family not in VISION  # the counter works: the models' own vision towers do wait


@pytest.mark.parametrize("attention", ["sdpa_segments", "eager_mask"])
def test_no_wait_in_any_attention(attention):
    model = enable_packing(tiny_model("qwen3"), StepConfig(attention=attention, slots=SlotRule(multiple=4)))
    batch = padded(mixed_samples(model.config, kinds=("text",) * 3))
    with recorded_syncs(CPU) as waits:
        model(**batch.to_hf(), num_items_in_batch=7).loss.backward()
    assert waits == []


def positions_and_restarts(model, row, shape):
    """What is right for every sample: its positions, and one more restart at the second sample's fourth token."""
    segments, family = row.segments, FAMILIES[model.config.model_type]
    restarts = sorted({*segments.real, segments.real[1] + 3})
    types = family.media_types(row.input_ids, model.config)
    media = {"image_grids": row.metadata.image_grids, "video_grids": row.metadata.video_grids}
    if row.metadata.seconds_per_grid:
        media["seconds_per_grid"] = row.metadata.seconds_per_grid
    positions = family.positions(types, rope_segments(restarts, segments), config=model.config, **media)
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
    assert ours(waits)
    disable_packing(model)


@pytest.mark.gpu
@pytest.mark.full
def test_no_wait_on_a_gpu():
    model = enable_packing(tiny_model("qwen3_vl", head_dim=64, hidden=256, dtype=torch.bfloat16).cuda())
    batch = padded(mixed_samples(model.config, kinds=("text", "text", "text")))
    inputs = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in batch.to_hf().items()}
    model(**inputs, num_items_in_batch=7).loss.backward()
    with waits_are_errors():
        model(**inputs, num_items_in_batch=7).loss.backward()
