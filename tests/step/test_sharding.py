"""FSDP2 around an enabled model: the same step, in mixed precision too."""

import pytest
import torch
from samples import mixed_samples, padded
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from vlmpack.families.tiny import tiny_model
from vlmpack.layout import SlotRule, pack
from vlmpack.step import PackedStep, enable_packing

pytestmark = pytest.mark.dist
RULE = SlotRule(multiple=4)


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(mesh, **policy):
    model = enable_packing(tiny_model("qwen3_vl", layers=3))
    for part in (*model.model.visual.blocks, *model.model.language_model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
    return model


@pytest.mark.parametrize("given", ["padded", "row"])
def test_a_sharded_step_is_the_step(mesh, given):
    model, reference = sharded(mesh), enable_packing(tiny_model("qwen3_vl", layers=3))
    batch = padded(mixed_samples(reference.config))
    for each in (model, reference):
        PackedStep(each)(pack(batch, rule=RULE) if given == "row" else batch).loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=name)


@pytest.mark.parametrize("given", ["padded", "row"])
def test_mixed_precision_rebuilds_the_inputs_and_the_step_stands_it(mesh, given):
    """FSDP takes every dataclass apart to cast its tensors, boundaries among them."""
    model = sharded(mesh, param_dtype=torch.bfloat16)
    batch = padded(mixed_samples(model.config))
    loss = PackedStep(model)(pack(batch, rule=RULE) if given == "row" else batch).loss
    loss.backward()
    exact = PackedStep(tiny_model("qwen3_vl", layers=3))(batch).loss
    assert torch.isclose(loss, exact, rtol=2e-2)
    assert not torch.equal(loss, exact), "nothing was cast"
