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
    """What every call of an indexer selected for each sample, [L, L], while `run` ran."""
    found = []

    def record(_, args, selected):
        for hidden, mask in zip(args[0], selected & args[2].bool(), strict=True):
            is_other = (hidden[1:] != hidden[:-1]).any(-1)  # padding repeats the last token
            length = int(is_other.nonzero()[-1]) + 2
            found.append(mask[0, :length, :length])

    hooks = [
        layer.indexer.register_forward_hook(record) for layer in parts_of(model).layer_parts("per_sample", "attention")
    ]
    run()
    for hook in hooks:
        hook.remove()
    return found


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
def test_work_is_the_pairs_that_were_chosen_and_few_tokens_are_padding(multiple):
    model = tiny()
    tokens, results = Counter(), []
    layers = parts_of(model).layer_parts("per_sample", "ngram")
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
    assert len(set(tokens.values())) == 1
    assert results[0].work.real_tokens <= max(tokens.values()) <= 1.25 * results[0].work.real_tokens


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_all_tokens_are_selected_for_at_once_as_one_by_one(device):
    """Scores that are equal, too: a score is 0 if all of its heads' products are negative. Padding changes nothing."""
    plain, left_out = type(parts_of(tiny()).layer_parts("per_sample", "attention")[0].indexer), 0
    for seed in range(12):
        torch.manual_seed(seed)
        config = copy.copy(tiny().config.text_config)
        config.indexer_n_heads, ratio, samples, width = 1 + seed % 3, 1 + seed % 4, 1 + seed % 2, 9 + 3 * seed
        config.indexer_compress_ratio, config.indexer_budget = ratio, ratio * (1 + seed % 5)
        indexer = plain(config, 0).to(device)
        hidden = torch.randn(samples, width, config.hidden_size, device=device)
        angles = torch.randn(samples, width, config.indexer_head_dim // 2, device=device).repeat(1, 1, 2)
        mask = torch.ones(samples, 1, width, width, dtype=torch.bool, device=device).tril()
        inputs = hidden, angles.cos(), angles.sin()
        with torch.no_grad():
            truth = mask & indexer(hidden, inputs[1:], mask, None)
        longer = [torch.cat([x, x[:, -1:].expand(-1, 7, -1)], 1) for x in inputs]
        for given in (inputs, longer):
            found = per_sample.select_blocks(indexer, *given)[..., :width, :width] & mask
            assert torch.equal(found, truth)
        left_out += int((truth != mask).sum())
    assert left_out


def test_short_samples_leave_no_token_out():
    model = tiny()
    config = model.config
    lengths = 1, 7, 8, 9  # 4 blocks of 2, and 1 more
    assert per_sample.selected_pairs(lengths, config.text_config) == Segments.from_lengths(lengths).attended_pairs
    assert per_sample.selected_pairs([10], config.text_config) == 55 - 2
