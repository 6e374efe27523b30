"""Padding between samples reaches no expert, padding behind them no statistic, and everything else stays exact."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import families, slow
from moe import EXPERTS, LAYERS, MOE, TOP_K, before_experts, block_of, decoder_layers, fresh, rule_for, samples_of
from training import distance, gradients, loss_sums
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from vlmpack.layout import SlotRule, pack
from vlmpack.model import PackedStep, StepConfig, enable_packing
from vlmpack.testing import alone, padded, tiny_config

EXACT = 1e-5
"""Gradients: the largest difference, as a part of each parameter's largest entry."""
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
every_family = pytest.mark.parametrize("family", families(lambda family: family.model_type in MOE))
few = pytest.mark.parametrize("family", ["qwen3_5_moe", *slow("qwen3_vl_moe", "gpt_oss")])


def row_of(model, share=68, *, seed=3):
    samples = samples_of(model, seed=seed)
    return pack(padded(samples), rule=rule_for(samples, share))


@functools.cache
def truth(family):
    """(loss, gradients) of the samples alone."""
    model = fresh(family)
    sums, counts = loss_sums(model, samples_of(model))
    loss = sums.sum() / counts.sum()
    loss.backward()
    return loss.detach(), gradients(model)


def dispatched(model):
    """A list that grows by the number of tokens of every call of experts."""
    calls = []
    for layer in decoder_layers(model):
        block_of(layer).experts.register_forward_pre_hook(lambda module, args: calls.append(args[1].numel()))
    return calls


@pytest.mark.parametrize(
    ("implementation", "share", "recomputed"),
    [("eager", 0, "reentrant"), ("grouped_mm", 20, None), ("batched_mm", 68, "non_reentrant")],
)
@every_family
def test_only_real_tokens_go_to_experts_and_everything_is_exact(family, implementation, share, recomputed):
    model = fresh(family, implementation=implementation)
    if recomputed is not None:
        settings = {"use_reentrant": recomputed == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
        model.enable_input_require_grads()
    calls, row = dispatched(model), row_of(model, share)
    result = PackedStep(model)(row)
    result.loss.backward()

    loss, expected = truth(family)
    assert torch.isclose(result.loss, loss, rtol=1e-6, atol=0)
    assert distance(expected, gradients(model)) <= EXACT
    real = row.segments.num_tokens
    assert round(100 * (1 - real / row.segments.total)) == share
    assert calls == [real * TOP_K] * LAYERS * (1 if recomputed is None else 2)


@few
def test_padding_behind_the_samples_does_not_go_to_experts_and_counts_nowhere(family):
    model, found = fresh(family), []
    calls = dispatched(model)
    for rule in (SlotRule(), SlotRule(row_multiple=64)):
        row = pack(padded(samples_of(model)), rule=rule)
        result = PackedStep(model, StepConfig(z_loss_coef=0.1))(row, output_router_logits=True)
        result.loss.backward()
        found.append((result, gradients(model)))
        model.zero_grad()
    (tight, expected), (tail, actual) = found
    assert tail.work.physical_tokens > tail.work.real_tokens == tight.work.physical_tokens
    assert calls == [tight.work.real_tokens * TOP_K] * LAYERS * 2
    for name in ("loss", "aux_loss", "z_loss", "router_logits"):
        torch.testing.assert_close(getattr(tail, name), getattr(tight, name), rtol=1e-5, atol=1e-6)
    assert torch.equal(tail.expert_counts, tight.expert_counts)
    assert distance(expected, actual) <= EXACT


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_next"])  # every layer of Qwen3.5-MoE has experts
def test_layers_without_experts_are_left_alone(family):
    config = tiny_config(family, layers=LAYERS, experts=EXPERTS, experts_per_token=TOP_K)
    (config if family == "qwen3_next" else config.text_config).mlp_only_layers = [1]
    kind = AutoModelForCausalLM if family == "qwen3_next" else AutoModelForImageTextToText
    model = kind.from_config(config).train()
    row = row_of(model)
    result = PackedStep(model)(row, output_router_logits=True)
    assert [len(logits) for logits in result.router_logits] == [row.segments.num_tokens] * 2
    assert result.expert_counts.sum(1).tolist() == [row.segments.num_tokens * TOP_K] * 2


@few
def test_a_block_inside_another_module_gets_and_counts_the_same_tokens(family):
    """Routers of such a block are recorded too."""
    found = []
    for wrap in (lambda block: block, torch.nn.Sequential):
        model = fresh(family)
        layer = decoder_layers(model)[1]
        layer.mlp = wrap(layer.mlp)
        row = pack(padded(samples_of(model)), rule=SlotRule(row_multiple=64))
        result = PackedStep(model)(row, output_router_logits=True)
        found.append((result.loss, result.aux_loss, result.expert_counts))
    for plain, wrapped in zip(*found, strict=True):
        assert torch.equal(plain, wrapped)


def threads_row(model, seed):
    """A row with gaps, which its experts do not compute."""
    return pack(padded(samples_of(model, seed=seed)), rule=SlotRule(multiple=16)).to_hf()


@pytest.mark.parametrize("family", ["qwen3_5_moe", *slow("qwen3_vl_moe", "qwen4_exp")])
def test_rows_and_a_plain_call_in_three_threads_are_what_they_are_one_after_the_other(family):
    """No thread enters the experts of a layer before every one has left its mixer."""
    model = enable_packing(fresh(family))
    sample = alone(samples_of(model, seed=7)[0])
    calls = [
        lambda: model(**threads_row(model, 1)).loss.detach(),
        lambda: model(**threads_row(model, 2)).loss.detach(),
        lambda: model(**sample).loss.detach(),
    ]
    expected = [call() for call in calls]
    assert len({float(loss) for loss in expected}) == len(calls)
    barrier = threading.Barrier(len(calls), timeout=60)

    def meet(*_):
        barrier.wait()

    for layer in decoder_layers(model):
        before_experts(layer).register_forward_hook(meet)
    with ThreadPoolExecutor(len(calls)) as threads:
        assert [*threads.map(lambda call: call(), calls)] == expected
