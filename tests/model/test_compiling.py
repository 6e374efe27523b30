"""Layers that are compiled part by part: the same step, and rows of other lengths find what is compiled already."""

import copy
from typing import Any

import pytest
import torch
from equality import checkpointed
from moe import samples_of
from torch._dynamo import config
from torch._dynamo.utils import counters
from training import apart, distance, gradients

from vlmpack.errors import ConfigError, FamilyError
from vlmpack.families import family_named
from vlmpack.layout import SlotRule, pack
from vlmpack.model import PackedStep, StepConfig, compile_layers, disable_packing, enable_packing
from vlmpack.model.mechanisms.tensor_parallel import sum_over
from vlmpack.testing import padded, tiny_model

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]
ROWS = [
    (("image", "text", "image"), 1),
    (("text",), 1),
    (("image",), 8),
    (("image", "image", "text", "image"), 8),
]
"""Kinds of samples and a multiple for their slots: other numbers of samples and images, with gaps and without."""


DEEP = 10
"""Layers: PyTorch compiles one function in eight ways at most."""


def small(family, *, layers=2):
    vision: dict[str, Any] = {"vision_depth": 1} if family_named(family).has_vision else {}
    return tiny_model(family, layers=layers, **vision)


def row_of(model, *, seed=3, kinds=("text", "image"), multiple=8):
    return pack(padded(samples_of(model, seed=seed, kinds=kinds)), rule=SlotRule(multiple=multiple))


def graphs_so_far():
    return counters["stats"]["unique_graphs"]


@pytest.mark.slow
@config.patch(fail_on_recompile_limit_hit=True)  # PyTorch would go on without a word
@pytest.mark.parametrize(
    ("family", "backend"),
    [("qwen3_5", "aot_eager"), ("gemma3", "eager"), ("llama4_text", "eager"), ("gpt_oss", "inductor")],
)
def test_every_row_is_what_it_is_without_and_after_one_row_nothing_is_compiled(family, backend):
    """And no graph breaks off. inductor uses memory again that the graph no longer needs."""
    model, plain = small(family), small(family)
    step, reference = PackedStep(compile_layers(model, backend=backend)), PackedStep(plain)
    graphs = []
    for seed, (kinds, multiple) in enumerate(ROWS):
        row = row_of(model, seed=seed, kinds=kinds, multiple=multiple)
        ours, theirs = step(row), reference(row)
        assert torch.isclose(ours.loss, theirs.loss, rtol=1e-6, atol=0)
        ours.loss.backward()
        theirs.loss.backward()
        graphs.append(graphs_so_far())
    assert apart(gradients(plain), gradients(model)) <= 1e-5
    assert graphs[0] > 0, "nothing was compiled"
    assert set(graphs) == {graphs[0]}
    assert not counters["graph_break"]


@pytest.mark.slow
def test_layers_that_change_their_numbers_or_lose_what_they_saved_are_refused():
    model = enable_packing(small("gemma2"))
    step, row = PackedStep(compile_layers(model, backend="aot_eager")), row_of(model, kinds=("text", "text"))
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        loss = step(row).loss
    with pytest.raises(ConfigError, match="set pin_memory=False"):
        loss.backward()
    model.model.layers[0], model.model.layers[1] = model.model.layers[1], model.model.layers[0]
    with pytest.raises(FamilyError, match="its layers were reordered"):
        step(row)


@pytest.mark.slow
@config.patch(fail_on_recompile_limit_hit=True)
@pytest.mark.parametrize("divided", [False, True])
def test_layers_share_what_is_compiled_however_many_they_are(divided):
    """With experts, and with norms of heads whose gradients tensor ranks sum."""
    graphs = []
    for model in (small("qwen3_moe", layers=layers) for layers in (2, DEEP)):
        torch.compiler.reset()
        counters.clear()
        for layer in model.model.layers if divided else ():
            sum_over(layer.self_attn.q_norm, group=None)
        with torch.no_grad():
            PackedStep(compile_layers(model, backend="eager"))(row_of(model, kinds=("text", "text")))
        graphs.append(graphs_so_far())
    assert graphs[0] == graphs[1] > 0


@pytest.mark.slow
def test_a_compiled_step_is_the_step_and_rows_of_other_lengths_and_gaps_are_not_compiled_anew():
    """Nothing is compiled after one row without gaps and one with, and one of another length of each."""
    config = StepConfig(z_loss_coef=0.25)
    model, plain = (small("qwen3_moe", layers=1) for _ in range(2))
    step, reference = PackedStep(torch.compile(model, backend="eager"), config), PackedStep(plain, config)
    graphs = []
    for seed, multiple in ((1, 1), (2, 8), (3, 1), (4, 8), (5, 16)):
        row = row_of(model, seed=seed, kinds=("text",) * 3, multiple=multiple)
        ours, theirs = (each(row, output_router_logits=True) for each in (step, reference))
        for each in (ours, theirs):
            each.loss.backward()
        assert torch.isclose(ours.loss, theirs.loss, rtol=1e-6, atol=0)
        assert torch.isclose(ours.aux_loss, theirs.aux_loss, rtol=1e-6, atol=0)
        assert torch.equal(ours.expert_counts, theirs.expert_counts)
        assert [len(logits) for logits in ours.router_logits] == [row.segments.num_tokens]
        graphs.append(graphs_so_far())
    assert graphs[0] > 0, "nothing was compiled"
    assert graphs[3] == graphs[4]
    assert distance(gradients(plain), gradients(model)) <= 1e-5


@pytest.mark.slow
@config.patch(fail_on_recompile_limit_hit=True)
def test_checkpointing_may_be_switched_on_later_and_off_again():
    model, plain = small("qwen3_vl"), small("qwen3_vl")
    row = row_of(model)
    PackedStep(plain)(row).loss.backward()
    calls, counted = [], []

    def backend(graph, inputs):
        return lambda *args: calls.append(graph) or graph(*args)

    step = PackedStep(compile_layers(model, backend=backend))
    for switch in (lambda: None, lambda: checkpointed(model), model.gradient_checkpointing_disable):
        switch()
        model.zero_grad()
        calls.clear()
        step(row).loss.backward()
        counted.append((len(calls), graphs_so_far()))
        assert distance(gradients(plain), gradients(model)) <= 1e-5
    (once, graphs), (twice, _), _ = counted
    assert once > 0
    assert twice > 1.5 * once, "layers are computed again, all but what comes after the last tensor that is kept"
    assert counted == [(once, graphs), (twice, graphs), (once, graphs)]


def test_names_of_parameters_stay_and_copies_are_plain():
    model = small("qwen3_vl")
    names = list(model.state_dict())
    assert compile_layers(enable_packing(model), backend="aot_eager") is model
    assert list(model.state_dict()) == names
    layers = [*model.model.language_model.layers, *model.model.visual.blocks]
    assert all(part._compiled_call_impl is not None for layer in layers for part in layer.children())
    assert copy.deepcopy(model).model.language_model.layers[0].mlp._compiled_call_impl is None
    disable_packing(model)
    assert list(model.state_dict()) == names
