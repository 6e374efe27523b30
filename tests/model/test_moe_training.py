"""LoRA on a model with experts: on attention and gated delta layers, on experts and on routers themselves.

Blocks of experts that are no longer the ones that `enable_packing` saw.
"""

from itertools import product

import pytest
import torch
from cases import slow
from moe import (
    batch_of,
    decoder_layers,
    fresh,
    naive_z_loss,
    plain_inputs,
    real_rows,
    rule_for,
    samples_of,
)
from peft import LoraConfig, get_peft_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from training import distance, gradients

from vlmpack.model import StepConfig, enable_packing

TEXT = r".*(language_model|model)\.layers\.\d+\."
QUERIES = r"self_attn\.(q|q_b)_proj"
BLOCKS = ("mlp", "feed_forward")
"""Names of blocks of experts."""
WAYS = {
    "mixers": {"target_modules": TEXT + r"(self_attn\.(q|v|q_b|kv_b)_proj|linear_attn\.(in_proj_\w+|out_proj))"},
    "experts": {
        "target_modules": TEXT + QUERIES,
        "target_parameters": [f"{block}.experts.{name}_proj" for block in BLOCKS for name in ("gate_up", "down")],
    },
    "routers": {
        "target_modules": TEXT + QUERIES,
        "target_parameters": ["mlp.gate.weight", "mlp.router.weight", "feed_forward.gate.weight"],
    },
    "routers in full": {"target_modules": TEXT + QUERIES, "modules_to_save": ["gate", "router"]},
    "blocks in full": {"target_modules": TEXT + QUERIES, "modules_to_save": [*BLOCKS]},
}
CASES = [*product(WAYS, ("enable, then adapt", "adapt, then enable"))]
few = pytest.mark.parametrize("family", ["qwen3_5_moe", *slow("gpt_oss")])
pytestmark = [
    pytest.mark.filterwarnings("ignore:Unsupported layer type.*Conv3d:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*target_parameters.*:UserWarning"),
]


def lora(model, way):
    """Adapters that change the output from the start."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **WAYS[way]))


def adapted(family, way, order, config):
    if order == "enable, then adapt":
        return lora(enable_packing(fresh(family), config), way)
    return enable_packing(lora(fresh(family), way), config)


@pytest.mark.parametrize(
    ("way", "order"), [*CASES[::2], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1::2])]
)
@few
def test_losses_and_gradients_are_those_of_the_padded_batch(family, way, order):
    reference = lora(fresh(family), way)
    batch = batch_of(reference.get_base_model())
    theirs = reference(**plain_inputs(batch), output_router_logits=True)
    expected = theirs.loss + 0.25 * naive_z_loss(real_rows(theirs.router_logits, batch))
    expected.backward()

    slots = rule_for(samples_of(reference.get_base_model()), 68)
    model = adapted(family, way, order, StepConfig(slots=slots, z_loss_coef=0.25))
    ours = model(**batch.to_hf(), output_router_logits=True)
    ours.loss.backward()
    assert torch.isclose(ours.loss, expected, rtol=1e-6, atol=0)
    assert torch.isclose(ours.aux_loss, theirs.aux_loss, rtol=1e-6, atol=0)
    assert len(gradients(model)) >= 6
    assert distance(gradients(reference), gradients(model)) <= 1e-5


@few
def test_blocks_that_are_wrapped_compute_the_same(family):
    """PyTorch's checkpointing of a block alone."""
    model = enable_packing(fresh(family))
    batch = batch_of(model).to_hf()
    loss = model(**batch).loss
    for layer in decoder_layers(model):
        name = next(name for name in BLOCKS if hasattr(layer, name))
        setattr(layer, name, checkpoint_wrapper(getattr(layer, name)))
    assert torch.equal(model(**batch).loss, loss)
