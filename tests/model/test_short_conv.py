"""Short convolutions see one sample at a time: their taps end where a sample of a row begins."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from equality import (
    Alone,
    alone_through,
    check_gradients,
    check_low_precision,
    check_outputs,
    gradients,
    limits_of,
    poisoned,
)
from parts import parts_of
from peft import LoraConfig, get_peft_model
from trees import STRANGER, Piece, samples_of, shared

from vlmpack.errors import ConfigError
from vlmpack.layout import PackedRow, Segments, SlotRule, pack
from vlmpack.model import PackedStep, disable_packing, enable_packing
from vlmpack.model.mechanisms.recurrent_rows import Spaced
from vlmpack.model.mechanisms.short_conv import ShortConv
from vlmpack.probing import probe
from vlmpack.testing import build_sample, padded, tiny_model

FAMILY = "lfm2"
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")
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


def packed(model: Any, *, multiple: int = 4, bias: bool = False) -> Any:
    """One step on a row with poison in its gaps, compared with its samples alone."""
    alone = truth(bias=bias)
    row = pack(padded(alone.samples), rule=SlotRule(multiple=multiple))
    step = PackedStep(model)
    with poisoned(model, row.segments):
        result = step(row, logits=True)
        result.loss.backward()
    check_outputs(alone, result, limits_of(FAMILY))
    check_gradients(alone, gradients(model), limits_of(FAMILY))
    return result


# ---------------------------------------------------------------------- the whole model


@pytest.mark.parametrize("multiple", [1, 4])
def test_samples_shorter_than_the_taps_are_what_they_are_alone(multiple: int) -> None:
    work = packed(fresh(), multiple=multiple).work
    assert work.conv_tokens == sum(LENGTHS) + (TAPS - 1) * (len(LENGTHS) - 1)


def test_biases_that_would_fill_the_zeros_are_computed_sample_by_sample() -> None:
    work = packed(fresh(bias=True), bias=True).work
    assert sum(LENGTHS) <= work.conv_tokens <= 1.25 * sum(LENGTHS)


def test_biases_between_samples_would_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    truth(bias=True)
    monkeypatch.setattr(ShortConv, "prepare", lambda self, setup: Spaced(segments=setup.row.segments, reach=TAPS - 1))
    with pytest.raises(AssertionError):
        packed(fresh(bias=True), bias=True)


@pytest.mark.parametrize("reach", [0, 1])
def test_fewer_zeros_than_taps_before_a_token_leak(reach: int, monkeypatch: pytest.MonkeyPatch) -> None:
    truth()
    monkeypatch.setattr(ShortConv, "prepare", lambda self, setup: Spaced(segments=setup.row.segments, reach=reach))
    with pytest.raises(AssertionError):
        packed(fresh())


def test_plain_transformers_runs_on_from_sample_to_sample() -> None:
    alone, model = truth(), fresh().eval()
    ids = torch.cat([sample["input_ids"] for sample in alone.samples])[None]
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    with torch.no_grad():
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
    assert (logits - torch.cat(alone.logits)).abs().max() > 0.1


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_computed_again_have_their_row(reentrant: bool) -> None:
    model = fresh()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    packed(model)


def test_in_bfloat16_they_are_as_close_to_float32_as_alone() -> None:
    model = fresh(dtype=torch.bfloat16)
    full = fresh()
    full.load_state_dict({name: x.float() for name, x in model.state_dict().items()})
    samples = truth().samples
    exact, plain = alone_through(full, samples), alone_through(model, samples)
    result = PackedStep(model)(pack(padded(samples), rule=SlotRule(multiple=4)), logits=True)
    result.loss.backward()
    check_low_precision(exact, plain, result, gradients(model))


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
    result.loss.backward()
    check_outputs(own, result, limits_of(FAMILY))
    check_gradients(own, gradients(model), limits_of(FAMILY))
    assert any("conv.in_proj.lora_A" in name for name in own.gradients)


def test_a_row_of_padding_alone_gives_zero_and_keeps_every_parameter_in_the_graph() -> None:
    model = fresh()
    row = PackedRow(input_ids=torch.zeros(1, 8, dtype=torch.long), segments=Segments.from_boundaries([0, 0], [0, 8]))
    result = PackedStep(model)(row)
    result.loss.backward()
    assert (result.loss, result.work.conv_tokens) == (0, 0)
    parameters = dict(conv_layers(model)[0].named_parameters())
    assert len(parameters) == 3
    assert [name for name, p in parameters.items() if p.grad is None or p.grad.any()] == []


# ---------------------------------------------------------------------- prefix trees


@pytest.mark.parametrize("bias", [False, True])
def test_each_node_of_a_tree_reads_the_last_tokens_of_its_path(bias: bool) -> None:
    alone, model = truth_of_tree(bias=bias), fresh(bias=bias)
    row = shared(alone.samples)
    result = PackedStep(model)(row, logits=True)
    result.loss.backward()
    check_outputs(alone, result, limits_of(FAMILY))
    check_gradients(alone, gradients(model), limits_of(FAMILY))
    tree, work = row.tree, result.work
    assert tree is not None
    assert min(tree.lengths[parent] for parent in tree.parents if parent >= 0) < TAPS - 1
    repeated = (TAPS - 1) * len(tree.lengths)
    if bias:
        assert work.conv_tokens >= row.segments.num_tokens
    else:
        assert work.conv_tokens == tree.num_tokens + repeated < row.segments.num_tokens


# ---------------------------------------------------------------------- the probe


def test_a_convolution_that_runs_on_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShortConv, "prepare", lambda self, setup: Spaced(segments=setup.row.segments, reach=0))
    report = probe(fresh(), share_prefixes=False)
    assert (report.verdict, report.causes) == ("leaks", ("conv taps",))


@pytest.mark.full
def test_a_model_is_exact_and_plain_transformers_is_not() -> None:
    report = probe(fresh(), share_prefixes=False)
    assert (report.verdict, report.causes) == ("exact", ())
    (plain,) = [one for one in report.plain if one.name.startswith("one row")]
    assert plain.verdict == "leaks"
    assert "conv taps" in plain.causes


# ---------------------------------------------------------------------- attached, and taken back


def test_disabling_leaves_nothing_behind_and_copies_are_enabled() -> None:
    model = fresh()
    plain = type(conv_layers(model)[0])
    enable_packing(model)
    assert all(type(layer) is not plain for layer in conv_layers(model))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        packed(twin)
    disable_packing(model)
    assert all(type(layer) is plain for layer in conv_layers(model))


def test_boundaries_that_pass_the_forward_by_are_an_error() -> None:
    (layer, *_) = conv_layers(enable_packing(fresh()))
    with pytest.raises(ConfigError, match="without passing through the packed forward"):
        layer(torch.zeros(1, 4, 64), cu_seqlens_q=torch.tensor([0, 2, 4]))
