"""Gated delta layers see one sample at a time: convolution and recurrence are each cut, at every boundary of a row."""

import pytest
import torch
from cases import families, slow
from equality import alone_through, check_gradients, gradients, limits_of
from parts import gated_delta_layers

from vlmpack.layout import PackedRow, Segments, SlotRule, pack
from vlmpack.model import PackedStep, enable_packing
from vlmpack.model.mechanisms import recurrent_rows
from vlmpack.model.mechanisms.gated_delta import DeltaHeads
from vlmpack.model.mechanisms.recurrent_rows import Buckets
from vlmpack.model.row import CONTEXT, RowContext
from vlmpack.testing import build_sample, padded, tiny_model

FREE, DEAR = 0.0, 1e9
"""What a call costs: samples go one by one, or as many together as `recurrent_rows.MAX_OVERHEAD` allows."""
TAPS = 4
"""Tokens that a convolution reads, its own included."""
every_hybrid = pytest.mark.parametrize("family", families(lambda family: family.has("gated_delta")))
one_hybrid = pytest.mark.parametrize("family", ["qwen3_5_moe", *slow("qwen3_next")])
LAYER = 2e-5
"""Largest difference of an output of one layer, float32."""


@pytest.fixture(params=[FREE, DEAR], ids=["one by one", "together"])
def call_cost(request, monkeypatch):
    monkeypatch.setitem(recurrent_rows.CALL_COST, "cpu", request.param)
    return request.param


def fresh(family, **sizes):
    return tiny_model(family, seed=7, **{"layers": 3, **sizes})


def texts(model, lengths):
    """A text of each of these lengths."""
    return [build_sample(model.config, stretches=[n], seed=i) for i, n in enumerate(lengths)]


def layer_of(model):
    return gated_delta_layers(model)[0]


@one_hybrid
def test_segments_without_tokens_change_nothing(family, call_cost):
    model = fresh(family)
    samples = texts(model, (5, 7, 3))
    own = alone_through(model, samples)
    row = pack(padded(samples))
    between = Segments.from_lengths([5, 0, 7, 0, 0, 3, 0])
    result = PackedStep(model)(PackedRow(**{**vars(row), "segments": between, "metadata": None}), logits=True)
    result.loss.backward()
    assert torch.isclose(result.loss, own.loss, rtol=1e-6)
    check_gradients(own, gradients(model), limits_of(family))
    fixed = PackedStep(model)(pack(padded(samples), rule=SlotRule(max_segments=9, multiple=4, pad_to=64)))
    assert torch.isclose(fixed.loss, own.loss, rtol=1e-6)
    assert fixed.work.delta_tokens == result.work.delta_tokens  # the gaps are left out, and the width with them


def on_row(layer, segments, hidden_1TD, call_cost):
    buckets = Buckets.cheapest(segments, call_cost=call_cost)
    row = RowContext(segments=segments, entries={"gated_delta": buckets, "experts": None})
    return layer(hidden_1TD, **{CONTEXT: row})


def hidden_of(segments):
    generator = torch.Generator().manual_seed(segments.total)
    return torch.randn(1, segments.total, 64, generator=generator).requires_grad_()


def forget_at_once(layer):
    """Nothing of the state is left at the next token: what still comes over a boundary came by the convolution."""
    layer.A_log.fill_(torch.tensor(1e6).log())


def read_own_token_only(layer):
    """The convolution looks at no token but its own: what still comes over a boundary came by the state."""
    layer.conv1d.weight[..., :-1] = 0


@pytest.mark.parametrize(("left", "taps"), [(forget_at_once, TAPS - 1), (read_own_token_only, None)])
@every_hybrid
@torch.no_grad()
def test_convolution_and_recurrence_are_each_cut(family, left, taps):
    """Each by itself, the other one made harmless: uncut it leaks, as far as it reaches, and cut it does not."""
    layer = layer_of(enable_packing(fresh(family)))
    left(layer)
    segments = Segments.from_lengths([9, 11])
    hidden_1TD = hidden_of(segments)
    own_1TD = layer(hidden_1TD[:, 9:])
    uncut = (layer(hidden_1TD)[:, 9:] - own_1TD).abs().amax(-1)[0]
    assert uncut[:TAPS].max() > 0.01
    if taps is not None:
        assert (uncut[:taps] > 1e-3).all()
        assert uncut[taps:].max() <= LAYER
    else:
        assert (uncut > 1e-4).all()
    for cost in (FREE, DEAR):
        assert (on_row(layer, segments, hidden_1TD, cost)[:, 9:] - own_1TD).abs().max() <= LAYER


def tokens_into(layer):
    """A list that grows by the tokens of every call of the layer's first projection."""
    calls = []
    projection = next(child for name, child in layer.named_children() if name.startswith("in_proj"))
    projection.register_forward_pre_hook(lambda module, args: calls.append(args[0].shape[:-1].numel()))
    return calls


@pytest.mark.parametrize("multiple", [1, 8])
@one_hybrid
def test_the_tokens_reported_are_those_computed(family, multiple, call_cost):
    model = fresh(family)
    layers = gated_delta_layers(model)
    all_calls = [tokens_into(layer) for layer in layers]
    lengths = (20, 9, 21, 64, 19, 70, 1)
    result = PackedStep(model)(pack(padded(texts(model, lengths)), rule=SlotRule(multiple=multiple)))
    expected = [*lengths] if call_cost == FREE else [1, 4 * 21, 2 * 70]
    assert all_calls == [expected] * 2
    assert result.work.delta_tokens == sum(expected)
    assert result.work.real_tokens == sum(lengths)


def test_a_layer_with_projections_that_are_not_known_is_not_cut() -> None:
    layer, other = (layer_of(tiny_model("qwen3_5", kv_heads=2, heads=4)) for _ in range(2))
    assert DeltaHeads(layer, 2).is_possible
    layer.in_proj_gate = torch.nn.Linear(1, 1)
    assert not DeltaHeads(layer, 2).is_possible
    assert not DeltaHeads(other, 4).is_possible, "heads that ranks cannot share out"
