"""DDP and FSDP2 around an enabled model: the same step, on two ranks, in mixed precision too."""

from pathlib import Path

import pytest
import torch
from cases import one_of_each
from equality import alone_through, check_gradients, limits_of
from model.two_ranks import CASES, fresh, samples_of
from ranks import on_ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from vlmpack.families.registry import FAMILIES
from vlmpack.layout import SlotRule, pack
from vlmpack.model import PackedStep, enable_packing
from vlmpack.testing import mixed_samples, padded, tiny_model

pytestmark = pytest.mark.dist
RULE = SlotRule(multiple=4)


def sharded(mesh, *, head_apart=True, **policy):
    """`head_apart`: as accelerate's FSDP2 cuts a model, the embedding by itself, and the head with the last norm."""
    model = enable_packing(tiny_model("qwen3_vl", layers=3))
    text = model.model.language_model
    apart = [text.embed_tokens, [text.norm, model.lm_head]] if head_apart else []
    for part in (*model.model.visual.blocks, *text.layers, *apart, model):
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
    return model


@pytest.mark.parametrize("head_apart", [False, True])
@pytest.mark.parametrize("given", ["padded", "row"])
def test_a_sharded_step_is_the_step(mesh, given, head_apart):
    model, reference = sharded(mesh, head_apart=head_apart), enable_packing(tiny_model("qwen3_vl", layers=3))
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


@pytest.mark.parametrize("family", one_of_each())
def test_a_model_sharded_on_the_meta_device_is_loaded_afterwards(mesh, family):
    """The order of docs/parallelism.md."""
    source = enable_packing(tiny_model(family))
    with torch.device("meta"):
        model = enable_packing(tiny_model(family, lively=False))
    for part in (*FAMILIES[family].language_model(model).layers, model):
        fully_shard(part, mesh=mesh)
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.fill_(99)  # memory is empty only by chance
    set_model_state_dict(model, source.state_dict(), options=StateDictOptions(full_state_dict=True))
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    model.init_weights()
    batch = padded(mixed_samples(source.config, seed=2))
    assert torch.equal(PackedStep(model)(batch).loss, PackedStep(source)(batch).loss)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where rank 0 left the gradients of every case."""
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(Path(__file__).with_name("two_ranks.py"), folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_step_on_two_ranks_is_that_of_all_samples_alone(folder, case):
    """Gradients are the mean over the ranks; targets were counted over both."""
    family = case[0]
    model = fresh(family)
    own = alone_through(model, samples_of(model, case[2]))
    found = {name: 2 * gradient for name, gradient in torch.load(folder / f"{' '.join(case)}.pt").items()}
    check_gradients(own, {name: gradient for name, gradient in found.items() if gradient.any()}, limits_of(family))
