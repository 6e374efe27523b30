"""A packed step never makes the host wait for the device on its own account."""

import sys
from pathlib import Path

import pytest
import torch
from moe import MOE, batch_of, fresh
from samples import mixed_samples, padded
from torch.utils._python_dispatch import TorchDispatchMode

import vlmpack
from vlmpack.families.tiny import tiny_model
from vlmpack.layout import SlotRule, device, pack
from vlmpack.step import StepConfig, disable_packing, enable_packing

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
def as_on_a_device(monkeypatch):
    """Take the paths of an accelerator, where nothing may be read."""
    monkeypatch.setattr(device, "on_host", lambda tensor: False)
    for module in [m for name, m in sys.modules.items() if name.startswith("vlmpack.") and "on_host" in vars(m)]:
        monkeypatch.setattr(module, "on_host", lambda tensor: False)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
@pytest.mark.parametrize("given", ["padded", "row"])
def test_no_wait_in_a_whole_step(family, given, as_on_a_device):
    model = enable_packing(tiny_model(family, layers=3), StepConfig(slots=SlotRule(multiple=4)))
    batch = padded(mixed_samples(model.config, kinds=("image", "text", "images", "video")))
    inputs = batch.to_hf() if given == "padded" else pack(batch, rule=SlotRule(multiple=4)).to_hf()
    if model.config.model_type == "qwen3_vl_moe":
        inputs["output_router_logits"] = True
    with Waits() as seen:
        model(**inputs, num_items_in_batch=7).loss.backward()
    assert seen.ours == []
    assert seen.others > 0  # the counter works: the models' own vision towers do wait


@pytest.mark.parametrize("per", ["row", "sample"])
@pytest.mark.parametrize("family", MOE)
def test_no_wait_for_router_statistics(family, per, as_on_a_device):
    rule = SlotRule(multiple=4)
    model = enable_packing(fresh(family), StepConfig(slots=rule, aux_loss=per, z_loss_coef=0.1))
    inputs = pack(batch_of(model), rule=rule).to_hf()
    with Waits() as seen:
        output = model(**inputs, num_items_in_batch=7, output_router_logits=True)
        output.loss.backward()
    assert output.expert_counts is not None
    assert seen.ours == []


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
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(**inputs, num_items_in_batch=7).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
