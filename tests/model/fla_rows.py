"""Gated delta layers with flash-linear-attention: one call a layer for the whole row, and packed equals alone.

transformers binds its layers to fla when they are imported, so `test_delta_fla.py` runs these tests in a process in
which stand-ins in plain PyTorch (`stand_ins`) for fla and causal-conv1d are on the path.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch
from equality import Alone, alone_through, check_gradients, check_step, limits_of, poisoned
from fla.ops.gated_delta_rule import CALLS  # pyright: ignore[reportMissingImports]
from parts import gated_delta_layers
from trees import DEEP, STRANGER, samples_of, shared

from vlmpack.errors import BackendError, ConfigError
from vlmpack.families import family_named
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import PaddedBatch, SlotRule, pack
from vlmpack.model import PackedStep, StepConfig, StepResult, disable_packing
from vlmpack.model.mechanisms import gated_delta
from vlmpack.model.mechanisms.gated_delta_fla import FlaCall, uses_fla
from vlmpack.testing import build_sample, mixed_samples, padded, tiny_model
from vlmpack.testing.comparison import logits_by_sample
from vlmpack.testing.samples import kinds_of

GATED = [name for name in ("qwen3_5", "qwen3_next", "qwen4_exp") if name in FAMILIES]
"""One of each kind of gated delta layer: in Qwen3.5 with and without experts it is the same."""
RULE = SlotRule(multiple=4, row_multiple=23)
GPU = FlaCall(device="cuda", chip=8, fla="0.6.0", triton="3.7.1", tilelang=False, training=True)
"""A machine that fla serves; this one plays it."""
TAPS, LAYERS = 3, 3
"""Tokens before its own that the tiny models' convolution reads; their gated delta layers."""


@pytest.fixture(scope="module", params=GATED)
def model(request: pytest.FixtureRequest) -> Any:
    assert uses_fla(family_named(request.param))
    return tiny_model(request.param, seed=3, layers=4).train()


@pytest.fixture(autouse=True)
def disabled_afterwards(model: Any) -> Iterator[None]:
    yield
    disable_packing(model).zero_grad()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlaCall, "of", lambda *args, **kwargs: GPU)


@pytest.fixture(scope="module")
def alone(model: Any) -> Alone:
    kinds = ("image", "text", "images") if len(kinds_of(model.config)) > 1 else ("text", "text", "text")
    samples = mixed_samples(model.config, seed=9, kinds=kinds)
    samples += [build_sample(model.config, stretches=[n]) for n in (2, 70)]  # less than the taps, more than a chunk
    return alone_through(model, samples)


@pytest.fixture(scope="module")
def branches(model: Any) -> Alone:
    """Samples that begin alike, and one that does not."""
    return alone_through(model, samples_of(model.config, DEEP, STRANGER))


def check(own: Alone, model: Any, result: StepResult) -> None:
    """A norm near zero enlarges rounding up to a hundredfold; what reads a poisoned gap is off by 1e-2 and more."""
    limits = replace(limits_of(model.config.model_type), logits=1e-4, loss=1e-5, gradient=1e-3, cosine=1e-5)
    check_step(own, model, result, limits)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_row_goes_through_a_layer_in_one_call_and_equals_alone_with_poison_in_every_gap(
    model: Any, alone: Alone, checkpointed: bool
) -> None:
    row, step = pack(padded(alone.samples), rule=RULE), PackedStep(model, StepConfig(slots=RULE))
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    CALLS.clear()
    with poisoned(model, row.segments, RULE) as poison:
        result = step(row, logits=True)
        check(alone, model, result)
    model.gradient_checkpointing_disable()
    assert poison
    *others, last = row.segments.without_gaps(RULE).lengths
    edges = [*accumulate((n + TAPS for n in others), initial=0)]
    edges.append(edges[-1] + last)  # nothing comes after the last one, so it needs no zeros
    assert [call["cu_seqlens"] for call in CALLS] == [edges] * LAYERS * (1 + checkpointed)
    assert {tuple(call["shape"][:2]) for call in CALLS} == {(1, edges[-1])}
    assert result.work.delta_tokens == edges[-1]
    assert sys.modules["causal_conv1d"].CALLS


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("owner", "part", "nothing"),
    [(gated_delta, "conv_taps", 0), (gated_delta, "fla_boundaries", {})],
    ids=["zeros", "boundaries"],
)
def test_a_row_leaks_without(model: Any, alone: Alone, owner: Any, part: str, nothing: Any) -> None:
    with mock.patch.object(owner, part, return_value=nothing), torch.no_grad():
        result = PackedStep(model, StepConfig(slots=RULE))(pack(padded(alone.samples), rule=RULE), logits=True)
    assert furthest(result, alone) > 0.1


def furthest(result: StepResult, alone: Alone) -> float:
    return max(float((x - own).abs().max()) for x, own in zip(logits_by_sample(result), alone.logits, strict=True))


@pytest.mark.usefixtures("gpu")
def test_a_bias_that_would_turn_the_zeros_into_something_else_is_refused(model: Any, alone: Alone) -> None:
    layer = gated_delta_layers(model)[0]
    projection = next(child for name, child in layer.named_children() if name.startswith("in_proj_qkv"))
    projection.bias = torch.nn.Parameter(torch.ones(projection.out_features))
    with pytest.raises(ConfigError, match=r"a projection before the convolution.*lora_bias=False"):
        PackedStep(model)(padded(alone.samples))
    projection.bias = None


def test_a_model_on_the_cpu_is_refused_before_triton_fails(model: Any, alone: Alone) -> None:
    with pytest.raises(BackendError, match=r"computes the gated delta layers with fla 0\.6\.0.*move the model"):
        PackedStep(model)(padded(alone.samples))


@pytest.mark.usefixtures("gpu")
def test_a_row_of_padding_alone_keeps_every_parameter_in_the_graph(model: Any) -> None:
    nothing = torch.zeros(2, 5, dtype=torch.long)
    batch = PaddedBatch(input_ids=nothing, attention_mask=nothing, labels=nothing - 100)
    result = PackedStep(model, StepConfig(keep_empty=True, slots=SlotRule(pad_to=12)))(batch)
    result.loss.backward()
    assert result.loss == result.work.real_tokens == 0
    found = [p.grad for name, p in model.named_parameters() if ".linear_attn." in name]
    assert all(gradient is not None and not gradient.any() for gradient in found)


# ---------------------------------------------------------------------- prefix trees


def of_tree(model: Any, branches: Alone) -> tuple[Any, StepResult]:
    row = shared(branches.samples)
    PackedStep(model)(row)  # states are tried out once a process
    CALLS.clear()
    return row, PackedStep(model)(row, logits=True)


@pytest.mark.usefixtures("gpu")
def test_a_prefix_tree_is_computed_in_one_call_a_level_each_node_from_its_parents_state(
    model: Any, branches: Alone
) -> None:
    row, result = of_tree(model, branches)
    assert len(CALLS) == LAYERS * (max(row.tree.depths) + 1)
    assert result.work.delta_tokens == row.tree.num_tokens + TAPS * len(row.tree.lengths) < row.segments.num_tokens
    check(branches, model, result)


@pytest.mark.usefixtures("gpu")
def test_a_group_in_pieces_starts_each_piece_from_the_kept_state(model: Any, branches: Alone) -> None:
    group = PackedStep(model).group(shared(branches.samples), capacity=40 if "image" in kinds_of(model.config) else 16)
    result = group.backward()
    assert {piece.kept > 0 for piece in group.cut.pieces if piece.is_kept} == {False, True}, "pieces nest"
    assert torch.isclose(result.loss, branches.loss, rtol=1e-5)
    limits = replace(limits_of(model.config.model_type), gradient=1e-3, cosine=1e-5)
    check_gradients(branches, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, limits)
