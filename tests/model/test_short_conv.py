"""Short convolutions see one sample at a time: their taps end where a sample of a row begins."""

import copy
import functools
from typing import Any

import pytest
import torch
from equality import Alone, alone_through, check_packed, check_step, limits_of
from parts import parts_of
from peft import LoraConfig, get_peft_model
from trees import STRANGER, Piece, samples_of, shared

from vlmpack.layout import SlotRule, pack
from vlmpack.model import PackedStep
from vlmpack.testing import build_sample, padded, tiny_model

FAMILY = "lfm2"
LENGTHS = (1, 2, 3, 1, 17, 2, 4)
"""Most of them shorter than the three taps."""
TAPS = 3
TREE = Piece(text=6, children=(Piece(text=4), Piece(text=1, children=(Piece(text=2), Piece(text=3))), Piece(text=1)))
"""A parent of one token, which does not follow its own parent in the tree: taps reach past it."""


def fresh(*, bias: bool = False, **settings: Any) -> Any:
    """A tiny model; `bias`: its convolutions and their projections have biases, none of them zero."""
    model = tiny_model(FAMILY, seed=7, layers=3, **settings)
    if bias:
        config = copy.deepcopy(model.config)
        config.conv_bias = True
        weights = model.state_dict()
        model = type(model)(config).to(model.dtype).train()
        model.load_state_dict(weights, strict=False)
        for layer in conv_layers(model):
            for part in (layer.in_proj, layer.conv, layer.out_proj):
                torch.nn.init.constant_(part.bias, 0.5)
    return model


def conv_layers(model: Any) -> list[Any]:
    return parts_of(model).layer_parts("short_conv")


@functools.cache
def truth(*, bias: bool = False) -> Alone:
    model = fresh(bias=bias)
    return alone_through(model, [build_sample(model.config, stretches=[n], seed=i) for i, n in enumerate(LENGTHS)])


@functools.cache
def truth_of_tree(*, bias: bool) -> Alone:
    model = fresh(bias=bias)
    return alone_through(model, samples_of(model.config, TREE, STRANGER))


def test_samples_shorter_than_the_taps_are_what_they_are_alone() -> None:
    check_packed(truth(), fresh())
    work = check_packed(truth(), fresh(), given="row").work
    assert work.conv_tokens == sum(LENGTHS) + (TAPS - 1) * (len(LENGTHS) - 1)


def test_biases_that_would_fill_the_zeros_are_computed_sample_by_sample() -> None:
    check_packed(truth(bias=True), fresh(bias=True))
    work = check_packed(truth(bias=True), fresh(bias=True), given="row").work
    assert sum(LENGTHS) <= work.conv_tokens <= 1.25 * sum(LENGTHS)


@pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed but the targeted layer")
@pytest.mark.parametrize("lora_bias", [False, True])
def test_adapters_of_projections_learn_what_they_learn_alone(lora_bias: bool) -> None:
    def adapted() -> Any:
        settings = LoraConfig(r=4, target_modules=["in_proj", "out_proj"], lora_bias=lora_bias, init_lora_weights=False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return get_peft_model(fresh(), settings).get_base_model()

    own = alone_through(adapted(), truth().samples)
    model = adapted()
    result = PackedStep(model)(pack(padded(own.samples), rule=SlotRule(multiple=4)), logits=True)
    check_step(own, model, result, limits_of(FAMILY))
    assert any("conv.in_proj.lora_A" in name for name in own.gradients)


@pytest.mark.parametrize("bias", [False, True])
def test_each_node_of_a_tree_reads_the_last_tokens_of_its_path(bias: bool) -> None:
    alone, model = truth_of_tree(bias=bias), fresh(bias=bias)
    row = shared(alone.samples)
    result = PackedStep(model)(row, logits=True)
    check_step(alone, model, result, limits_of(FAMILY))
    tree, work = row.tree, result.work
    assert tree is not None
    assert min(tree.lengths[parent] for parent in tree.parents if parent >= 0) < TAPS - 1
    repeated = (TAPS - 1) * len(tree.lengths)
    if bias:
        assert work.conv_tokens >= row.segments.num_tokens
    else:
        assert work.conv_tokens == tree.num_tokens + repeated < row.segments.num_tokens
