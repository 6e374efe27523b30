"""Qwen4-exp: what its sparse attention chooses among tokens, and what its n-gram layers look up (packed equals alone:
`test_equality.py`).

The tiny model chooses 8 tokens of those that a query sees, in blocks of 2, so every sample here has to choose.
"""

import copy
import functools
from collections import Counter

import pytest
import torch
from equality import alone_through
from parts import parts_of

from vlmpack.errors import ConfigError
from vlmpack.layout import Segments, SlotRule
from vlmpack.model import PackedStep, StepConfig, disable_packing, enable_packing
from vlmpack.model.mechanisms import per_sample
from vlmpack.testing import alone, mixed_samples, padded, tiny_model


@functools.cache
def tiny():
    return tiny_model("qwen4_exp", seed=3, layers=4)


@pytest.fixture(autouse=True)
def disabled_afterwards():
    yield
    disable_packing(tiny()).zero_grad()


@functools.cache
def samples():
    return mixed_samples(tiny().config, seed=5, kinds=("image", "text", "images", "image", "text"), text=(1, 12))


def test_every_parameter_has_a_gradient_but_the_indexers_which_only_choose():
    dead = {name for name, _ in tiny().named_parameters()} - alone_through(tiny(), samples()).gradients.keys()
    assert dead
    assert all(".indexer." in name for name in dead)


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
    model = tiny()
    truth = choices(model, lambda: [model(**alone(sample)) for sample in samples()])
    enable_packing(model)
    found = choices(model, lambda: model(**padded(samples()).to_hf()))
    disable_packing(model)
    lengths = [len(sample["input_ids"]) for sample in samples()]
    assert len(set(lengths)) == len(lengths)  # so each is found by its width
    assert {mask.shape[-1]: mask.tolist() for mask in found} == {mask.shape[-1]: mask.tolist() for mask in truth}
    assert any(mask.sum() < n * (n + 1) // 2 for n, mask in zip(lengths, truth, strict=True)), "nothing was left out"


@pytest.mark.parametrize("multiple", [1, 8])
def test_work_is_the_pairs_that_were_chosen_and_every_token_once(multiple):
    model = tiny()
    tokens, results = Counter(), []
    layers = per_sample.ngram_layers(parts_of(model))
    hooks = [
        layer.key_proj.register_forward_hook(lambda m, args, out: tokens.update({id(m): out.shape[:-1].numel()}))
        for layer in layers
    ]
    step = PackedStep(model, StepConfig(slots=SlotRule(multiple=multiple)))
    found = choices(model, lambda: results.append(step(padded(samples()))))
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


def test_a_text_model_that_no_longer_tells_its_n_gram_layers_is_noticed():
    model = enable_packing(copy.deepcopy(tiny()))
    batch = padded(samples()).to_hf()
    loss = model(**batch).loss
    model.model.language_model._forward_pre_hooks.clear()
    with pytest.raises(
        ConfigError, match="a Qwen4ExpTextModel no longer gets the row: it was exchanged or lost its hooks"
    ):
        model(**batch)
    assert torch.equal(enable_packing(model)(**batch).loss, loss)
