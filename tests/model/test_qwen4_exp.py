"""Qwen4-exp, packed equals alone: what its sparse attention chooses among tokens, what its n-gram layers look up, its
streams, experts and vision tower included.

The tiny model chooses 8 tokens of those that a query sees, in blocks of 2, so every sample here has to choose.
"""

import copy
import functools
import pickle
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from parts import parts_of

from vlmpack.errors import ConfigError
from vlmpack.layout import Segments, SlotRule, pack
from vlmpack.model import PackedStep, StepConfig, disable_packing, enable_packing
from vlmpack.model.mechanisms import per_sample
from vlmpack.model.mechanisms.gated_delta import GatedDelta
from vlmpack.model.mechanisms.recurrent_rows import Buckets
from vlmpack.testing import alone, build_sample, mixed_samples, padded, tiny_model

BATCHES = {
    "pair": ("image", "text"),
    "text": ("text", "text", "text"),
    "mixed": ("image", "text", "images", "image", "text"),
    "video": ("video", "image", "images_and_video", "text"),
}
LOGITS, LOSS, GRADIENT, COSINE = 5e-6, 1e-6, 1e-4, 1 - 1e-6
"""Largest differences allowed in float32: of logits; of the loss, relative; of gradients, of their largest entry;
least cosine of a parameter's gradients."""


pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")


@functools.cache
def tiny(attention="sdpa"):
    return tiny_model("qwen4_exp", seed=3, layers=4, attn_implementation=attention)


@pytest.fixture(autouse=True)
def disabled_afterwards():
    yield
    for model in (tiny(), tiny("eager")):
        disable_packing(model).zero_grad()


@functools.cache
def reference(batch, attention="sdpa"):
    """(samples, logits of each, loss, gradients) of every sample on its own, losses summed."""
    model = tiny(attention)
    samples = mixed_samples(model.config, seed=5, kinds=BATCHES[batch], text=(1, 12))
    logits = [model(**{**alone(sample), "labels": None}).logits[0] for sample in samples]
    labels = torch.cat([sample["labels"][1:] for sample in samples])
    loss = F.cross_entropy(torch.cat([x[:-1] for x in logits]), labels)
    loss.backward()
    gradients = gradients_of(model)
    return samples, [x.detach() for x in logits], loss.detach(), gradients


def gradients_of(model):
    """Of every parameter, None where there is none; and the model forgets them."""
    found = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def assert_equal(result, found, truth):
    _, logits, loss, gradients = truth
    assert torch.isclose(result.loss, loss, rtol=LOSS, atol=0)
    for (start, stop), theirs in zip(result.segments.spans, logits, strict=True):
        assert (result.row_logits[0, start:stop] - theirs).abs().max() <= LOGITS
    for name, theirs in gradients.items():
        if theirs is None:
            assert found[name] is None, name
            continue
        assert (found[name] - theirs).abs().max() <= GRADIENT * theirs.abs().max(), name
        assert F.cosine_similarity(found[name].flatten(), theirs.flatten(), 0) >= COSINE or not theirs.any(), name


@pytest.mark.parametrize("given", ["padded", "left padded", "row"])
@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("batch", BATCHES)
def test_packed_equals_alone(batch, multiple, given):
    model, truth = tiny(), reference(batch)
    rule = SlotRule(multiple=multiple)
    inputs = padded(truth[0], "left" if given == "left padded" else "right", metadata=given != "left padded")
    if given == "row":
        inputs = pack(inputs, rule=rule, pad_token_id=17)
    result = PackedStep(model, StepConfig(slots=rule))(inputs, logits=True)
    result.loss.backward()
    assert_equal(result, gradients_of(model), truth)


def test_every_parameter_has_a_gradient_but_the_indexers_which_only_choose():
    *_, gradients = reference("mixed")
    dead = {name for name, gradient in gradients.items() if gradient is None or not gradient.any()}
    assert dead
    assert all(".indexer." in name for name in dead)


def test_eager_attention_adds_its_mask():
    model, truth = tiny("eager"), reference("mixed", "eager")
    result = PackedStep(model)(padded(truth[0]), logits=True)
    result.loss.backward()
    assert_equal(result, gradients_of(model), truth)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_computes_the_same(reentrant):
    model, truth = copy.deepcopy(tiny()), reference("mixed")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    calls = []
    model.model.language_model.layers[0].ple.register_forward_pre_hook(lambda *_: calls.append(1))
    result = PackedStep(model, StepConfig(slots=SlotRule(multiple=4)))(padded(truth[0]), logits=True)
    result.loss.backward()
    assert len(calls) == 2
    assert_equal(result, gradients_of(model), truth)


def test_evaluation_gives_the_same_logits():
    model, (samples, logits, loss, _) = tiny(), reference("mixed")
    enable_packing(model.eval())
    with torch.no_grad():
        found = model(**padded(samples).to_hf(), output_logits=True)
    disable_packing(model.train())
    assert torch.isclose(found.loss, loss, rtol=LOSS, atol=0)
    for row, theirs in zip(found.logits, logits, strict=True):
        assert (row[: len(theirs)] - theirs).abs().max() <= LOGITS


# ---------------------------------------------------------------------- what the sparse attention chooses


def choices(model, run):
    """What every call of an indexer selected, [n, 1, W, W] each, while `run` ran."""
    found = []
    layers = per_sample.attention_layers(parts_of(model))
    hooks = [
        layer.indexer.register_forward_hook(lambda *call: found.append(call[-1] & call[1][2].bool()))
        for layer in layers
    ]
    run()
    for hook in hooks:
        hook.remove()
    return [mask for masks in found for mask in masks]


def test_a_sample_chooses_the_same_tokens_in_a_row_as_alone():
    model, (samples, *_) = tiny(), reference("mixed")
    truth = choices(model, lambda: [model(**alone(sample)) for sample in samples])
    enable_packing(model)
    found = choices(model, lambda: model(**padded(samples).to_hf()))
    disable_packing(model)
    lengths = [len(sample["input_ids"]) for sample in samples]
    assert len(set(lengths)) == len(lengths)  # so each is found by its width
    assert {mask.shape[-1]: mask.tolist() for mask in found} == {mask.shape[-1]: mask.tolist() for mask in truth}
    assert any(mask.sum() < n * (n + 1) // 2 for n, mask in zip(lengths, truth, strict=True)), "nothing was left out"


@pytest.mark.parametrize("multiple", [1, 8])
def test_work_is_the_pairs_that_were_chosen_and_every_token_once(multiple):
    model, (samples, *_) = tiny(), reference("mixed")
    tokens, results = Counter(), []
    layers = per_sample.ngram_layers(parts_of(model))
    hooks = [
        layer.key_proj.register_forward_hook(lambda m, args, out: tokens.update({id(m): out.shape[:-1].numel()}))
        for layer in layers
    ]
    step = PackedStep(model, StepConfig(slots=SlotRule(multiple=multiple)))
    found = choices(model, lambda: results.append(step(padded(samples))))
    disable_packing(model)
    for hook in hooks:
        hook.remove()
    assert results[0].work.attended_pairs == sum(int(mask.sum()) for mask in found)
    assert len(tokens) == len(layers) == 3
    assert set(tokens.values()) == {results[0].work.real_tokens}


def test_short_samples_leave_no_token_out():
    model = tiny()
    config = model.config
    segments = Segments.from_lengths([1, 7, 8, 9])
    assert (
        per_sample.selected_pairs(segments, config.text_config) == segments.attended_pairs
    )  # 4 blocks of 2, and 1 more
    assert per_sample.selected_pairs(Segments.from_lengths([10]), config.text_config) == 55 - 2


def test_samples_of_one_length_go_together_and_others_alone():
    segments = Segments.from_lengths([5, 3, 5, 4, 0, 3])
    buckets = per_sample.PerSample().prepare(SimpleNamespace(row=SimpleNamespace(segments=segments)))
    assert sorted(bucket.members for bucket in buckets.buckets) == [(0, 2), (1, 5), (3,)]
    assert buckets.tokens == segments.num_tokens


def test_samples_of_one_length_equal_themselves_alone():
    model = tiny()
    samples = [build_sample(model.config, stretches=[n], seed=i) for i, n in enumerate((15, 22, 15, 15, 22))]
    result = PackedStep(model)(padded(samples), logits=True)
    disable_packing(model)
    for (start, stop), sample in zip(result.segments.spans, samples, strict=True):
        theirs = model(input_ids=sample["input_ids"][None]).logits[0]
        assert (result.row_logits[0, start:stop] - theirs).abs().max() <= LOGITS


# ---------------------------------------------------------------------- padding


def test_what_stands_in_gaps_does_not_matter():
    model, (samples, *_) = tiny(), reference("mixed")
    step = PackedStep(model)
    losses = []
    for pad_token_id in (0, 99):
        row = pack(padded(samples), rule=SlotRule(multiple=8, row_multiple=64), pad_token_id=pad_token_id)
        losses.append(step(row).loss)
    disable_packing(model)
    assert torch.equal(*losses)


def test_routers_see_real_tokens_only():
    model, (samples, *_) = tiny(), reference("mixed")
    batch = padded(samples).to_hf()
    theirs = model(**{name: x for name, x in batch.items() if name != "vlmpack"}, output_router_logits=True)
    enable_packing(model, StepConfig(slots=SlotRule(multiple=8)))
    ours = model(**batch, output_router_logits=True)
    disable_packing(model)
    real = sum(len(sample["input_ids"]) for sample in samples)
    assert [x.shape[0] for x in ours.router_logits] == [real] * 4
    assert torch.isclose(ours.aux_loss, theirs.aux_loss, rtol=1e-6, atol=0)


def test_a_row_of_padding_alone_keeps_every_parameter_in_the_graph():
    model, (samples, *_) = tiny(), reference("text")
    row = pack(padded(samples)).to_hf()
    row = {"input_ids": row["input_ids"]}
    row |= {"cu_seqlens_q": [0, 0], "cu_seqlens_q_padded": [0, row["input_ids"].shape[1]]}
    row["shift_labels"] = torch.full_like(row["input_ids"], -100)
    enable_packing(model)
    loss = model(**row).loss
    disable_packing(model)
    loss.backward()
    untouched = {name for name, gradient in gradients_of(model).items() if gradient is None}
    assert loss == 0
    assert all(".indexer." in name or ".visual." in name for name in untouched)


# ---------------------------------------------------------------------- each cut is needed


def largest_difference(model, samples, logits):
    result = PackedStep(model)(padded(samples), logits=True)
    disable_packing(model)
    spans = result.segments.spans
    return max((result.row_logits[0, a:b] - x).abs().max() for (a, b), x in zip(spans, logits, strict=True))


def whole(segments):
    """The row as if it were one sample."""
    return Buckets.cheapest(Segments.from_lengths([segments.total]), call_cost=0)


def test_without_its_cut_sparse_attention_leaks(monkeypatch):
    model = tiny_model("qwen4_exp", seed=3, layers=1)  # nothing else in it mixes tokens
    assert [layer.layer_type for layer in model.model.language_model.layers] != ["linear_attention"]
    samples = mixed_samples(model.config, seed=5, kinds=("text", "image"))
    logits = [model(**{**alone(sample), "labels": None}).logits[0] for sample in samples]
    assert largest_difference(model, samples, logits) <= LOGITS
    monkeypatch.setattr(per_sample.PerSample, "prepare", lambda self, setup: whole(setup.row.segments))
    assert largest_difference(model, samples, logits) > 0.1


def test_without_their_cut_n_gram_layers_leak(monkeypatch):
    model, (samples, logits, *_) = tiny(), reference("pair")
    monkeypatch.setattr(per_sample, "_add_row", lambda *ids_module_and_arguments: None)
    assert largest_difference(model, samples, logits) > 0.1


def test_without_their_cut_gated_delta_layers_leak(monkeypatch):
    model, (samples, logits, *_) = tiny(), reference("pair")
    monkeypatch.setattr(GatedDelta, "prepare", lambda self, setup: whole(setup.row.segments))
    assert largest_difference(model, samples, logits) > 0.1


# ---------------------------------------------------------------------- the model stays a model


def test_disabled_it_is_what_it_was():
    model = tiny()
    classes = [type(module) for module in model.modules()]
    hooks = [dict(module._forward_pre_hooks) for module in model.modules()]
    enable_packing(enable_packing(model))
    assert [type(module) for module in model.modules()] != classes
    assert len(model.model.language_model._forward_pre_hooks) == 1  # also when enabled twice
    disable_packing(model)
    assert [type(module) for module in model.modules()] == classes
    assert [dict(module._forward_pre_hooks) for module in model.modules()] == hooks


def test_enabled_it_still_generates():
    model, (samples, *_) = tiny(), reference("pair")
    prompt = {name: x for name, x in alone(samples[0]).items() if name != "labels"}
    model.eval()
    theirs = model.generate(**prompt, max_new_tokens=5, do_sample=False)
    enable_packing(model)
    ours = model.generate(**prompt, max_new_tokens=5, do_sample=False)
    disable_packing(model)
    model.train()
    assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_packs_too(copied):
    samples, logits, *_ = reference("pair")
    model = tiny_model("qwen4_exp", seed=3, layers=4)  # one that has run does not pickle, packed or not
    other = copied(enable_packing(model))
    assert largest_difference(other, samples, logits) <= LOGITS


def test_autocast_costs_no_more_than_it_does_a_sample_alone():
    model, (samples, logits, *_) = tiny(), reference("pair")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = [model(**{**alone(sample), "labels": None}).logits[0] for sample in samples]
        result = PackedStep(model)(padded(samples), logits=True)
    disable_packing(model)
    alone_error = max((x.float() - y).abs().mean() for x, y in zip(theirs, logits, strict=True))
    spans = result.segments.spans
    error = max((result.row_logits[0, a:b].float() - y).abs().mean() for (a, b), y in zip(spans, logits, strict=True))
    assert 0 < error <= 2 * alone_error


@pytest.mark.parametrize("name", ["ple", "self_attn"])
def test_a_layer_whose_forward_was_replaced_is_refused(name):
    model = copy.deepcopy(tiny())
    layer = next(part for part in (vars(x)["_modules"].get(name) for x in model.model.language_model.layers) if part)
    layer.forward = layer.forward
    with pytest.raises(ConfigError, match="replaced on the object itself, so samples would leak"):
        enable_packing(model)
    del layer.forward
    enable_packing(model)
    layer.forward = layer.forward
    with pytest.raises(ConfigError, match="no longer computes rows by their boundaries"):
        model(**padded(reference("pair")[0]).to_hf())


def test_a_text_model_that_no_longer_tells_its_n_gram_layers_is_noticed():
    model = enable_packing(copy.deepcopy(tiny()))
    batch = padded(reference("pair")[0]).to_hf()
    loss = model(**batch).loss
    model.model.language_model._forward_pre_hooks.clear()
    with pytest.raises(ConfigError, match="n-gram layers no longer get the row"):
        model(**batch)
    assert torch.equal(enable_packing(model)(**batch).loss, loss)
