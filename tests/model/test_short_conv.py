"""Short convolutions see one sample at a time: their taps end where a sample of a row begins."""

import functools
from typing import Any

import pytest
import torch
from equality import Alone, alone_through, check_packed, check_step, limits_of
from parts import parts_of
from peft import LoraConfig, get_peft_model
from trees import STRANGER, Piece, samples_of, shared

from vlmpack.errors import ConfigError
from vlmpack.layout import SlotRule, pack
from vlmpack.model import PackedStep
from vlmpack.testing import build_sample, padded, tiny_model

FAMILY = "lfm2"
LENGTHS = (1, 2, 3, 1, 17, 2, 4)
"""Most of them shorter than the three taps."""
TAPS = 3
TREE = Piece(text=6, children=(Piece(text=4), Piece(text=1, children=(Piece(text=2), Piece(text=3))), Piece(text=1)))
"""A parent of one token, which does not follow its own parent in the tree: taps reach past it."""


def fresh(**settings: Any) -> Any:
    return tiny_model(FAMILY, seed=7, layers=3, **settings)


def conv_layers(model: Any) -> list[Any]:
    return parts_of(model).layer_parts("short_conv")


@functools.cache
def truth() -> Alone:
    model = fresh()
    return alone_through(model, [build_sample(model.config, stretches=[n], seed=i) for i, n in enumerate(LENGTHS)])


def test_samples_shorter_than_the_taps_are_what_they_are_alone() -> None:
    check_packed(truth(), fresh())
    work = check_packed(truth(), fresh(), given="row").work
    assert work.conv_tokens == sum(LENGTHS) + (TAPS - 1) * (len(LENGTHS) - 1)


def adapted(**settings: Any) -> Any:
    settings |= {"r": 4, "target_modules": ["in_proj", "out_proj"], "init_lora_weights": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return get_peft_model(fresh(), LoraConfig(**settings)).get_base_model()


@pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed but the targeted layer")
def test_biases_that_would_fill_the_zeros_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a projection before the convolution.*lora_bias=False"):
        PackedStep(adapted(lora_bias=True))(padded(truth().samples))


def test_adapters_of_projections_learn_what_they_learn_alone() -> None:
    own = alone_through(adapted(), truth().samples)
    model = adapted()
    result = PackedStep(model)(pack(padded(own.samples), rule=SlotRule(multiple=4)), logits=True)
    check_step(own, model, result, limits_of(FAMILY))
    assert any("conv.in_proj.lora_A" in name for name in own.gradients)


def test_each_node_of_a_tree_reads_the_last_tokens_of_its_path() -> None:
    model = fresh()
    alone = alone_through(model, samples_of(model.config, TREE, STRANGER))
    row = shared(alone.samples)
    result = PackedStep(model)(row, logits=True)
    check_step(alone, model, result, limits_of(FAMILY))
    tree, work = row.tree, result.work
    assert tree is not None
    assert min(tree.lengths[parent] for parent in tree.parents if parent >= 0) < TAPS - 1
    repeated = (TAPS - 1) * len(tree.lengths)
    assert work.conv_tokens == tree.num_tokens + repeated < row.segments.num_tokens
