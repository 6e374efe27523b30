"""Padding is kept out of a model's experts: nothing of it is dispatched, and everything else stays exact."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from samples import padded
from training import checkpointing, collator, distance, gradients, loss_sums, receipts, train
from transformers import AutoModelForImageTextToText

from vlmpack.families.tiny import tiny_config, tiny_model
from vlmpack.layout import SlotRule, pack
from vlmpack.step import PackedStep, StepConfig, attach, disable_packing, enable_packing
from vlmpack.step.context import CONTEXT

FAMILY, TOP_K, LAYERS = "qwen3_vl_moe", 3, 2
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
KINDS = ("image", "text", "images")
RULES = {
    "no gaps": SlotRule(),
    "4": SlotRule(multiple=4),
    "8": SlotRule(multiple=8),
    "64": SlotRule(multiple=64, row_multiple=256),
}
EXACT = 1e-5
"""Gradients: the largest difference, as a part of each parameter's largest entry."""
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")


def fresh(seed=3, **settings):
    return tiny_model(FAMILY, seed=seed, layers=LAYERS, experts=5, experts_per_token=TOP_K, **settings)


def row_of(model, rule="64", *, seed=3):
    return pack(padded(receipts(model, seed=seed, kinds=KINDS)), rule=RULES[rule])


@functools.cache
def truth():
    """(loss, gradients) of the samples alone."""
    model = fresh()
    sums, counts = loss_sums(model, receipts(model, kinds=KINDS))
    loss = sums.sum() / counts.sum()
    loss.backward()
    return loss.detach(), gradients(model)


def dispatched(model):
    """A list that grows by the number of tokens of every call of experts."""
    calls = []
    for layer in model.model.language_model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda experts, args: calls.append(args[1].numel()))
    return calls


@pytest.mark.parametrize("recomputed", [None, "reentrant", "non_reentrant"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_only_real_tokens_go_to_experts_and_everything_is_exact(implementation, rule, recomputed):
    model = fresh()
    model.set_experts_implementation(implementation)
    if recomputed is not None:
        settings = {"use_reentrant": recomputed == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
        model.enable_input_require_grads()
    calls, row = dispatched(model), row_of(model, rule)
    result = PackedStep(model)(row)
    result.loss.backward()

    loss, expected = truth()
    assert torch.isclose(result.loss, loss, rtol=1e-6, atol=0)
    assert distance(expected, gradients(model)) <= EXACT
    real = row.segments.num_tokens
    assert (real < row.segments.total) == (rule != "no gaps")
    assert calls == [real * TOP_K] * LAYERS * (1 if recomputed is None else 2)


def test_without_the_gate_padding_is_dispatched(monkeypatch):
    """The guard of the test above."""
    monkeypatch.setattr(attach.experts, "install", lambda family, core: ())
    model = fresh()
    calls, row = dispatched(model), row_of(model)
    PackedStep(model)(row)
    assert calls == [row.segments.total * TOP_K] * LAYERS


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_stands_in_gaps_does_not_matter(implementation):
    """1e4 in the place of every pad: not a bit of loss, router statistics or any gradient changes."""
    model = fresh()
    model.set_experts_implementation(implementation)
    row, step = row_of(model), PackedStep(model)
    assert (row.input_ids[row.moe_padding_mask] == 0).all()
    assert (row.input_ids[~row.moe_padding_mask] != 0).all()
    results, found = [], []
    for poison in (0.5, 1e4):
        with torch.no_grad():
            model.model.language_model.embed_tokens.weight[0] = poison
        results.append(step(row, output_router_logits=True))
        results[-1].loss.backward()
        found.append(gradients(model))
        model.zero_grad()
    assert torch.equal(results[0].loss, results[1].loss)
    assert torch.equal(results[0].aux_loss, results[1].aux_loss)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_in_gaps_reaches_no_loss_and_no_expert(implementation):
    """NaN in a pad is NaN in the gradient of the layer's norms, experts or not: theirs are looked at here."""
    model = fresh()
    model.set_experts_implementation(implementation)
    row, step = row_of(model), PackedStep(model)
    clean = step(row, output_router_logits=True)
    with torch.no_grad():
        model.model.language_model.embed_tokens.weight[0] = float("nan")
    poisoned = step(row, output_router_logits=True)
    poisoned.loss.backward()
    assert torch.equal(poisoned.loss, clean.loss)
    assert torch.equal(poisoned.aux_loss, clean.aux_loss)
    assert all(logits.isfinite().all() for logits in poisoned.router_logits)
    moe = {name: p.grad for name, p in model.named_parameters() if ".mlp.experts." in name or ".mlp.gate." in name}
    assert len(moe) == 3 * LAYERS
    assert all(gradient.isfinite().all() for gradient in moe.values())


@pytest.mark.parametrize(("rule", "gated"), [("no gaps", False), ("8", True)])
def test_a_row_without_gaps_is_handed_to_the_experts_as_it_is(rule, gated):
    model = enable_packing(fresh())
    layer, seen = model.model.language_model.layers[0], []
    layer.self_attn.register_forward_pre_hook(lambda m, args, kwargs: seen.append(kwargs[CONTEXT]), with_kwargs=True)
    layer.post_attention_layernorm.register_forward_hook(lambda m, args, output: seen.append(output))
    layer.mlp.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    model(**row_of(model, rule).to_hf())
    context, before, given = seen
    assert (context.experts is not None) == gated
    assert (given is not before) == gated


def test_two_models_and_two_rows_are_recomputed_each_with_its_own_row():
    models = [fresh(seed) for seed in (1, 2)]
    steps = [PackedStep(model) for model in models]
    rows = [row_of(models[0], "64", seed=1), row_of(models[0], "8", seed=2)]
    expected = []
    for step in steps:
        sum(step(row).loss for row in rows).backward()
        expected.append(gradients(step.model))
        step.model.zero_grad()
        step.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    losses = [step(row).loss for row in rows for step in steps]
    for loss in losses:
        loss.backward()
    for model, theirs in zip(models, expected, strict=True):
        assert distance(theirs, gradients(model)) <= EXACT


def hooks(model):
    """Every hook of every module, by kind: the dictionaries are copied, they would change under our hands."""
    return {
        (name, kind): dict(value)
        for name, module in model.named_modules()
        for kind, value in vars(module).items()
        if "hooks" in kind and isinstance(value, dict) and value
    }


def test_after_disable_no_hook_is_left():
    model = fresh()
    batch = {name: value for name, value in padded(receipts(model)).to_hf().items() if name != "vlmpack"}
    model(**batch)  # transformers hooks its routers once, when first used
    before = hooks(model)
    enable_packing(model)
    first = hooks(model)
    assert first != before
    enable_packing(model, StepConfig(slots=SlotRule(multiple=8)))
    assert {key: len(found) for key, found in hooks(model).items()} == {key: len(x) for key, x in first.items()}
    model(**batch)
    disable_packing(model)
    assert hooks(model) == before


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_keeps_padding_from_its_own_experts(duplicate):
    model = enable_packing(fresh())
    twin, plain = duplicate(model), hooks(fresh())
    disable_packing(model)
    assert hooks(model) == plain
    calls, row = dispatched(twin), row_of(model)
    loss = PackedStep(twin)(row).loss
    assert calls == [row.segments.num_tokens * TOP_K] * LAYERS
    assert torch.isclose(loss, truth()[0], rtol=1e-6)
    left = hooks(disable_packing(twin))
    assert {name.rpartition(".")[2] for name, _ in left} <= {"experts", "gate", "visual"}, "only dispatched's"


def test_a_block_that_was_left_half_way_is_as_before():
    """Checkpointing leaves a layer by an exception once it has seen enough; a block called by itself is not gated."""
    model = enable_packing(fresh())
    block = model.model.language_model.layers[0].mlp

    def stop(module, args):
        raise RuntimeError("enough")

    handle = block.experts.register_forward_pre_hook(stop)
    with pytest.raises(RuntimeError, match="enough"):
        model(**row_of(model).to_hf())
    handle.remove()
    hidden = torch.randn(1, 9, 64)
    assert torch.equal(block(hidden), fresh().model.language_model.layers[0].mlp(hidden))


def test_layers_without_experts_are_left_alone():
    config = tiny_config(FAMILY, layers=3)
    config.text_config.mlp_only_layers = [1]
    model = AutoModelForImageTextToText.from_config(config).train()
    row = row_of(model)
    result = PackedStep(model)(row, output_router_logits=True)
    assert [len(logits) for logits in result.router_logits] == [row.segments.num_tokens] * 2
    assert not [name for name, _ in hooks(model) if name.startswith("model.language_model.layers.1.mlp")]


def test_plain_forwards_of_an_enabled_model_are_untouched():
    model, untouched = enable_packing(fresh()).eval(), fresh().eval()
    model(**row_of(model).to_hf())
    ids = receipts(model, kinds=("text",))[0]["input_ids"][None]
    assert torch.equal(model(input_ids=ids).logits, untouched(input_ids=ids).logits)


@pytest.mark.parametrize("recomputed", [True, False])
def test_trainer_on_rows_with_gaps(recomputed, tmp_path):
    """One step of HF Trainer on padded batches that are packed into slots, against the samples alone."""
    reference, model = fresh(), enable_packing(fresh(), StepConfig(slots=SlotRule(multiple=16)))
    samples = receipts(model)[:4]
    sums, counts = loss_sums(reference, samples)
    loss = sums.sum() / counts.sum()
    loss.backward()
    settings = checkpointing(use_reentrant=False) if recomputed else {}
    run = train(model, samples, tmp_path, "padded", max_steps=1, per_device_train_batch_size=4, **settings)
    assert run.losses == [pytest.approx(loss.item(), rel=1e-6)]
    assert distance(gradients(reference), run.gradients[0]) <= EXACT


def test_collators_rows_and_padded_batches_are_the_same():
    model = enable_packing(fresh(), StepConfig(slots=SlotRule(multiple=8)))
    samples = receipts(model, kinds=KINDS)
    losses = [model(**collator(layout)(samples), output_router_logits=True).loss for layout in ("padded", "packed")]
    assert torch.isclose(*losses, rtol=1e-6)
