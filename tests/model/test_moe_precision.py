"""Low precision around models with experts: router losses are no further off than those of a padded batch."""

from __future__ import annotations

import pytest
import torch
from moe import EXPERTS, LAYERS, MOE, TOP_K, batch_of, decoder_layers, fresh, naive_z_loss, real_rows, stock
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from vlmpack.layout import SlotRule
from vlmpack.model import PackedStep, StepConfig, enable_packing

CONFIG = StepConfig(slots=SlotRule(multiple=8), z_loss_coef=0.25)
every_family = pytest.mark.parametrize("family", MOE)


def of_the_padded_batch(family, **settings):
    """(load-balancing loss, z-loss) through an untouched model."""
    model = fresh(family, **settings)
    batch = batch_of(model)
    output = model(**stock(batch), output_router_logits=True)
    z_loss = naive_z_loss([x.float() for x in real_rows(output.router_logits, batch)])
    return torch.stack([output.aux_loss, z_loss]).detach()


def of_the_row(model):
    """The same of a packed row, after its backward pass; experts were sent what is counted."""
    sent = []
    for layer in decoder_layers(model):
        layer.mlp.experts.register_forward_pre_hook(lambda experts, args: sent.append(args[1].flatten()))
    batch = batch_of(model)
    found = PackedStep(model)(batch, output_router_logits=True)
    found.loss.backward()
    assert found.expert_counts.tolist() == [x.bincount(minlength=EXPERTS).tolist() for x in sent]
    assert found.expert_counts.sum(1).tolist() == [int(batch.attention_mask.sum()) * TOP_K] * LAYERS
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    return torch.stack([found.aux_loss, found.z_loss]).detach()


@pytest.mark.each_value
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@every_family
def test_autocast(family, weights):
    exact = of_the_padded_batch(family)
    with torch.autocast("cpu", torch.bfloat16):
        plain = of_the_padded_batch(family, dtype=weights)
        found = of_the_row(enable_packing(fresh(family, dtype=weights), CONFIG))
    assert (plain != exact).all(), "nothing was cast"
    assert ((found - exact).abs() <= 2 * (plain - exact).abs().max()).all()


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.dist
@every_family
def test_mixed_precision_of_fsdp2(mesh, family):
    exact = of_the_padded_batch(family)
    plain = of_the_padded_batch(family, dtype=torch.bfloat16)
    model = enable_packing(fresh(family), CONFIG)
    for part in (*decoder_layers(model), model):
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    found = of_the_row(model)
    assert (found != exact).all(), "nothing was cast"
    assert ((found - exact).abs() <= 2 * (plain - exact).abs().max()).all()
