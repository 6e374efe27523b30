"""Layers that are compiled one by one: the same step, and rows of other lengths find what is compiled already."""

from __future__ import annotations

import copy

import pytest
import torch
from moe import samples_of
from samples import padded
from torch._dynamo import config
from torch._dynamo.utils import counters
from training import distance, gradients

from vlmpack.families import family_named
from vlmpack.families.tiny import tiny_model
from vlmpack.layout import SlotRule, pack
from vlmpack.step import PackedStep, compile_layers, disable_packing, enable_packing

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]
ROWS = [
    (("image", "text", "image"), 1),
    (("image", "image", "text", "image"), 8),
    (("text", "text"), 8),
    (("text", "image"), 1),
    (("image",) * 5, 4),
    (("text", "image", "image"), 1),
]
"""Kinds of samples and a multiple for their slots: other numbers of samples and images, with gaps and without."""


def small(family):
    sizes = {"layers": 2} | ({"vision_depth": 1} if family_named(family).has_vision else {})
    return tiny_model(family, **sizes)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5", "qwen4_exp"])
@config.patch(fail_on_recompile_limit_hit=True)  # PyTorch would go on without a word
def test_every_row_is_what_it_is_without_and_rows_of_kinds_that_were_seen_compile_nothing(family):
    model, plain = small(family), small(family)
    step, reference = PackedStep(compile_layers(model, backend="aot_eager")), PackedStep(plain)
    graphs = []
    for seed, (kinds, multiple) in enumerate(ROWS * 2):
        row = pack(padded(samples_of(model, seed=seed, kinds=kinds)), rule=SlotRule(multiple=multiple))
        ours, theirs = step(row), reference(row)
        assert torch.isclose(ours.loss, theirs.loss, rtol=1e-6, atol=0)
        ours.loss.backward()
        theirs.loss.backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert distance(gradients(plain), gradients(model)) <= 1e-5
    assert graphs[0] > 0, "nothing was compiled"
    assert set(graphs[len(ROWS) :]) == {graphs[len(ROWS) - 1]}


def test_names_of_parameters_stay_and_copies_are_plain():
    model = small("qwen3_vl")
    names = list(model.state_dict())
    assert compile_layers(enable_packing(model), backend="aot_eager") is model
    assert list(model.state_dict()) == names
    layers = [*model.model.language_model.layers, *model.model.visual.blocks]
    assert all(layer._compiled_call_impl is not None for layer in layers)
    assert copy.deepcopy(model).model.language_model.layers[0]._compiled_call_impl is None
    disable_packing(model)
    assert list(model.state_dict()) == names


def test_settings_are_those_of_torch_compile():
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph

    model = small("qwen3")
    row = pack(padded(samples_of(model)))
    PackedStep(compile_layers(model, backend=backend))(row)
    assert seen
