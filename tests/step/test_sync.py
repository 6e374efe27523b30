"""A packed step never makes the host wait for the device on its own account."""

import sys
from pathlib import Path

import pytest
import torch
from samples import VISION, mixed_samples, padded
from torch.utils._python_dispatch import TorchDispatchMode
from waiting import waits_are_errors

import vlmpack
from vlmpack.families import FAMILIES
from vlmpack.families.tiny import tiny_model
from vlmpack.layout import SlotRule, nothing_on_host, pack, unpack
from vlmpack.step import StepConfig, disable_packing, enable_packing
from vlmpack.step.rotary import rope_segments

HOME = str(Path(vlmpack.__file__).parent)
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "unique_consecutive")


class Waits(TorchDispatchMode):
    """Counts operations whose result the host has to wait for, and says who asked: vlmpack or the model's own code."""

    def __init__(self):
        super().__init__()
        self.ours, self.others = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.removeprefix("aten::") in WAITS:
            asker = self._asker()
            if asker.startswith(HOME):
                self.ours.append(f"{func._schema.name} in {asker}")
            else:
                self.others += 1
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _asker():
        frame = sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            if "/torch/" not in file and not file.startswith("<") and file != __file__:
                return file
            frame = frame.f_back
        return ""


@pytest.fixture
def as_on_a_device():
    """Take the paths of an accelerator, where nothing may be read."""
    with nothing_on_host():
        yield


@pytest.mark.parametrize("more", ["nothing more", "positions and restarts"])
@pytest.mark.parametrize("given", ["padded", "row"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_wait_in_a_whole_step(family, given, more, as_on_a_device):
    model = enable_packing(tiny_model(family, layers=3), StepConfig(slots=SlotRule(multiple=4)))
    kinds = ("image", "text", "images", "video") if family in VISION else ("text",) * 3
    batch = padded(mixed_samples(model.config, kinds=kinds))
    row = pack(batch, rule=SlotRule(multiple=4))
    inputs = batch.to_hf() if given == "padded" else row.to_hf()
    if more == "positions and restarts":
        inputs |= positions_and_restarts(model, row, inputs["input_ids"].shape)
    if FAMILIES[family].experts:
        inputs["output_router_logits"] = True
    with Waits() as seen:
        model(**inputs, num_items_in_batch=7).loss.backward()
    assert seen.ours == []
    assert seen.others > 0 or family not in VISION  # the counter works: the models' own vision towers do wait


def positions_and_restarts(model, row, shape):
    """What is right for every sample: its positions, and one more restart at the second sample's fourth token."""
    segments, family = row.segments, FAMILIES[model.config.model_type]()
    restarts = sorted({*segments.real, segments.real[1] + 3})
    types = family.media_types(row.input_ids, model.config)
    media = {"image_grids": row.facts.image_grids, "video_grids": row.facts.video_grids}
    if row.facts.seconds_per_grid:
        media["seconds_per_grid"] = row.facts.seconds_per_grid
    positions = family.positions(types, rope_segments(restarts, segments), config=model.config, **media)
    given = family.rotary_ids(positions)
    if shape[0] > 1:
        given = unpack(given, segments, token_dim=given.ndim - 1, width=shape[1])
    return {"position_ids": given, "rope_cu_seqlens": restarts}


def test_the_counter_sees_our_own_waits(as_on_a_device):
    """Without host facts the lengths, grids and targets have to be read, which is what the facts are for."""
    model = enable_packing(tiny_model("qwen3_vl"))
    batch = padded(mixed_samples(model.config), facts=False)
    with Waits() as seen:
        model(**batch.to_hf())
    assert any("nonzero" in wait for wait in seen.ours)
    disable_packing(model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="waits for a CUDA device")
def test_no_wait_on_a_gpu():
    model = enable_packing(tiny_model("qwen3_vl", head_dim=64, hidden=256, dtype=torch.bfloat16).cuda())
    batch = padded(mixed_samples(model.config, kinds=("text", "text", "text")))
    inputs = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in batch.to_hf().items()}
    model(**inputs, num_items_in_batch=7).loss.backward()
    with waits_are_errors():
        model(**inputs, num_items_in_batch=7).loss.backward()
