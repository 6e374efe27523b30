"""Optimizers and ways to save memory: three steps with each are those of every sample alone with the same."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from moe import decoder_layers
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from training import distance, loss_sums, receipts, weights

from vlmpack.errors import ConfigError
from vlmpack.layout import pack
from vlmpack.model import PackedStep, enable_packing
from vlmpack.testing import padded, tiny_model

MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def as_it_is(model: Any) -> Any:
    return model


def wrap_layers(model: Any, wrapper: Callable[[nn.Module], nn.Module]) -> Any:
    """A model whose layers, those of the tower too, are inside wrappers."""
    for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for n, layer in enumerate(layers):
            layers[n] = wrapper(layer)
    return model


def keep_products(context: Any, operation: Any, *arguments: Any, **settings: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in MATMULS else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = partial(checkpoint_wrapper, context_fn=partial(create_selective_checkpoint_contexts, keep_products))


def adapt(model: Any) -> Any:
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, target_modules=r".*language_model.*\.(q|v|up)_proj"))


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def muon(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for layer in decoder_layers(model) for p in layer.parameters() if p.ndim == 2], lr=0.02)


def lora_plus(model: Any) -> torch.optim.Optimizer:
    return create_loraplus_optimizer(model, torch.optim.SGD, lr=0.1, loraplus_lr_ratio=16)


Case = tuple[Callable[..., Any], Callable[..., torch.optim.Optimizer], Callable[[], AbstractContextManager], float]
CASES: dict[str, Case] = {
    "activation offload around the step": (as_it_is, sgd, save_on_cpu, 1e-4),
    "activation offload of layers": (partial(wrap_layers, wrapper=offload_wrapper), sgd, nullcontext, 1e-4),
    "selective checkpointing": (partial(wrap_layers, wrapper=SELECTIVE), sgd, nullcontext, 1e-4),
    "Muon": (as_it_is, muon, nullcontext, 1e-2),  # it makes matrices orthogonal in bfloat16
    "LoRA+": (adapt, lora_plus, nullcontext, 1e-4),
}
"""What is done to the model, the optimizer, what is around the forward, and the difference of weights allowed."""


@pytest.mark.parametrize("name", CASES)
def test_three_steps_are_those_of_samples_alone_with_the_same(name: str) -> None:
    change, make_optimizer, around, allowed = CASES[name]
    plain, packed = (tiny_model("qwen3_5", layers=4, vision_depth=1) for _ in range(2))
    plain.config.text_config.use_cache = False  # transformers' own layers, computed again, would extend the cache
    samples, (plain, packed) = receipts(plain), (change(plain), change(packed))
    start, optimizers, step = weights(plain), [make_optimizer(model) for model in (plain, packed)], PackedStep(packed)
    for n in range(3):
        batch = samples[2 * n : 2 * n + 2]
        with around():
            sums, counts = loss_sums(plain, batch)
            losses = [sums.sum() / counts.sum(), step(pack(padded(batch))).loss]
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=allowed / 10)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert distance(weights(plain), weights(packed)) < allowed
    assert distance(weights(plain), start) > 5 * allowed, "nothing was trained"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torchao, as it is imported
def test_fp8_with_a_scale_for_each_token_is_that_of_samples_alone() -> None:
    """torchao's products of 8 bits, emulated in bfloat16. One scale for all tokens would differ with the neighbors."""
    float8 = pytest.importorskip("torchao.float8", reason="needs torchao: pip install torchao")

    def divides(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and name.startswith("model.language_model") and not module.in_features % 16

    losses = {}
    for recipe in ("rowwise", "tensorwise"):
        config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        plain, packed = (tiny_model("qwen3_vl").bfloat16() for _ in range(2))
        for model in (plain, packed):
            float8.convert_to_float8_training(model, config=config, module_filter_fn=divides)
            assert sum(isinstance(module, float8.float8_linear.Float8Linear) for module in model.modules()) >= 14
        samples = receipts(plain)[:4]
        sums, counts = loss_sums(plain, samples)
        result = PackedStep(packed)(pack(padded(samples)))
        (sums.sum() / counts.sum()).backward()
        result.loss.backward()
        losses[recipe] = [sums / counts, result.sample_losses]
        if recipe == "rowwise":
            for (name, p), q in zip(plain.named_parameters(), packed.parameters(), strict=True):
                assert (p.grad - q.grad).abs().max() <= 0.03 * p.grad.abs().max(), name
    torch.testing.assert_close(*losses["rowwise"], rtol=1e-5, atol=0)
    assert (losses["tensorwise"][0] - losses["tensorwise"][1]).abs().max() > 1e-3


def test_adapters_that_do_not_fit_a_row_are_refused() -> None:
    adapted = adapt(tiny_model("qwen3_vl"))
    row = pack(padded(receipts(adapted)))
    with pytest.raises(ConfigError, match=r"adapter_names has an adapter for each entry .*set_adapter"):
        PackedStep(adapted)(row, adapter_names=["default"] * row.segments.num_samples)
    prompted = get_peft_model(tiny_model("qwen3_vl"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ConfigError, match="prompt tuning gives the model embeddings and no token ids"):
        PackedStep(prompted)
    with pytest.raises(ConfigError, match="inputs_embeds cannot be combined with a packed row; use LoRA"):
        enable_packing(prompted)(**row.to_hf())
