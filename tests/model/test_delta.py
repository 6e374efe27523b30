"""Gated delta layers see one sample at a time: convolution and recurrence are each cut, at every boundary of a row."""

import copy
import pickle

import pytest
import torch
from equality import (
    NAN,
    alone_through,
    check_gradients,
    check_low_precision,
    check_outputs,
    gradients,
    limits_of,
    poisoned,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from parts import gated_delta_layers

from vlmpack.errors import ConfigError
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import PackedRow, Segments, SlotRule, pack
from vlmpack.model import PackedStep, StepConfig, disable_packing, enable_packing, is_packing
from vlmpack.model.mechanisms import gated_delta
from vlmpack.model.mechanisms.recurrent_rows import Buckets
from vlmpack.model.row import CONTEXT, RowContext
from vlmpack.testing import build_sample, mixed_samples, padded, tiny_model

HYBRID = [name for name, family in FAMILIES.items() if family.has("gated_delta")]
FREE, DEAR = 0.0, 1e9
"""What a call costs: samples go one by one, or as many together as `recurrent_rows.MAX_STRETCH` allows."""
TAPS, CHUNK = 4, 64
"""Tokens that a convolution reads, its own included; tokens that the recurrence takes at a time."""
LENGTHS = {
    "shorter than the convolution": (1, 2, 3, 1, 2, 4, 3),
    "around a chunk": (63, 64, 65, 64, 66),
    "two chunks and one token": (128, 1, 127, 129),
}
every_hybrid = pytest.mark.parametrize("family", HYBRID)
LAYER = 2e-5
"""Largest difference of an output of one layer, float32."""


@pytest.fixture(params=[FREE, DEAR], ids=["one by one", "together"])
def call_cost(request, monkeypatch):
    monkeypatch.setitem(gated_delta.CALL_COST, "cpu", request.param)
    return request.param


def fresh(family, **sizes):
    return tiny_model(family, seed=7, **{"layers": 3, **sizes})


def texts(model, lengths):
    """A text of each of these lengths."""
    return [build_sample(model.config, stretches=[n], seed=i) for i, n in enumerate(lengths)]


def layer_of(model):
    return gated_delta_layers(model)[0]


# ---------------------------------------------------------------------- the whole model


@pytest.mark.pairwise
@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("lengths", LENGTHS)
@every_hybrid
def test_samples_of_any_length_are_what_they_are_alone(family, lengths, multiple, call_cost):
    model = fresh(family)
    own = alone_through(model, texts(model, LENGTHS[lengths]))
    row = pack(padded(own.samples), rule=SlotRule(multiple=multiple))
    step = PackedStep(model)
    with poisoned(model, row.segments):
        result = step(row, logits=True)
        result.loss.backward()
    check_outputs(own, result, limits_of(family))
    check_gradients(own, gradients(model), limits_of(family))
    waste = result.work.delta_tokens - sum(own.lengths)
    assert (waste == 0) if call_cost == FREE else (0 < waste <= 0.25 * sum(own.lengths))


@pytest.mark.each_value
@every_hybrid
def test_in_bfloat16_they_are_as_close_to_float32_as_alone(family, call_cost):
    full, model = fresh(family), fresh(family, dtype=torch.bfloat16)
    full.load_state_dict({name: x.float() for name, x in model.state_dict().items()})
    samples = texts(model, (1, 3, 20, 22, 65, 66))
    truth, plain = alone_through(full, samples), alone_through(model, samples)
    result = PackedStep(model)(pack(padded(samples), rule=SlotRule(multiple=4)), logits=True)
    result.loss.backward()
    check_low_precision(truth, plain, result, gradients(model))


@every_hybrid
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
    assert fixed.work.delta_tokens == result.work.delta_tokens


@every_hybrid
def test_a_row_of_padding_alone_gives_zero_and_keeps_every_parameter_in_the_graph(family, call_cost):
    model = fresh(family)
    row = PackedRow(input_ids=torch.zeros(1, 8, dtype=torch.long), segments=Segments.from_boundaries([0, 0], [0, 8]))
    result = PackedStep(model)(row)
    result.loss.backward()
    assert result.loss == 0
    assert result.work.delta_tokens == 0
    parameters = dict(layer_of(model).named_parameters())
    assert len(parameters) > 5
    assert [name for name, p in parameters.items() if p.grad is None or p.grad.any()] == []


# ---------------------------------------------------------------------- one layer


def on_row(layer, segments, hidden_1TD, call_cost):
    buckets = Buckets.cheapest(segments, call_cost=call_cost)
    row = RowContext(segments=segments, entries={"gated_delta": buckets, "experts": None})
    return layer(hidden_1TD, **{CONTEXT: row})


def hidden_of(segments, *, gaps=0.0):
    hidden_1TD = torch.randn(1, segments.total, 64, generator=torch.Generator().manual_seed(segments.total))
    hidden_1TD[:, segments.padding_mask()] = gaps
    return hidden_1TD.requires_grad_()


@pytest.fixture(scope="module")
def layers():
    """One enabled layer of each family; hypothesis needs them to outlive an example."""
    return {family: layer_of(enable_packing(fresh(family))).requires_grad_(False) for family in HYBRID}


lengths_lists = st.lists(st.one_of(st.integers(0, 6), st.sampled_from([31, 63, 64, 65])), min_size=1, max_size=5)


@every_hybrid
@settings(max_examples=12)
@given(
    lengths=lengths_lists.filter(sum),
    rule=st.builds(SlotRule, multiple=st.integers(1, 5), row_multiple=st.sampled_from([1, 7])),
    cost=st.sampled_from([FREE, 16.0, DEAR]),
)
def test_a_layer_is_what_it_is_on_each_sample_and_reads_no_gap(family, layers, lengths, rule, cost):
    segments = Segments.from_lengths(lengths, rule)
    hidden_1TD, own_1TD = hidden_of(segments, gaps=NAN), hidden_of(segments)
    out_1TD = on_row(layers[family], segments, hidden_1TD, cost)
    out_1TD.sin().sum().backward()
    for start, stop in segments.spans:
        if start < stop:
            own = layers[family](own_1TD[:, start:stop])
            own.sin().sum().backward()
            assert (out_1TD[:, start:stop] - own).abs().max() <= LAYER
    pad = segments.padding_mask()
    assert (out_1TD[:, pad] == 0).all()
    assert (hidden_1TD.grad[:, pad] == 0).all()
    scale = own_1TD.grad.abs().max()
    assert (hidden_1TD.grad - own_1TD.grad).abs().max() <= LAYER * scale


@every_hybrid
def test_one_by_one_a_layer_is_what_it_is_on_each_sample_bit_for_bit(family, layers):
    segments = Segments.from_lengths([5, 64, 1, 70], SlotRule(multiple=4))
    hidden_1TD = hidden_of(segments)
    out_1TD = on_row(layers[family], segments, hidden_1TD, FREE)
    for start, stop in segments.spans:
        assert torch.equal(out_1TD[:, start:stop], layers[family](hidden_1TD[:, start:stop]))


def forget_at_once(layer):
    """Nothing of the state is left at the next token: what still comes over a boundary came by the convolution."""
    layer.A_log.fill_(torch.tensor(1e6).log())


def read_own_token_only(layer):
    """The convolution looks at no token but its own: what still comes over a boundary came by the state."""
    layer.conv1d.weight[..., :-1] = 0


@pytest.mark.parametrize(("left", "reach"), [(forget_at_once, TAPS - 1), (read_own_token_only, None)])
@every_hybrid
@torch.no_grad()
def test_convolution_and_recurrence_are_each_cut(family, left, reach):
    """Each by itself, the other one made harmless: uncut it leaks, as far as it reaches, and cut it does not."""
    layer = layer_of(enable_packing(fresh(family)))
    left(layer)
    segments = Segments.from_lengths([9, 11])
    hidden_1TD = hidden_of(segments)
    own_1TD = layer(hidden_1TD[:, 9:])
    uncut = (layer(hidden_1TD)[:, 9:] - own_1TD).abs().amax(-1)[0]
    assert uncut[:TAPS].max() > 0.01
    if reach is not None:
        assert (uncut[:reach] > 1e-3).all()
        assert uncut[reach:].max() <= LAYER
    else:
        assert (uncut > 1e-4).all()
    for cost in (FREE, DEAR):
        assert (on_row(layer, segments, hidden_1TD, cost)[:, 9:] - own_1TD).abs().max() <= LAYER


# ---------------------------------------------------------------------- the work


def tokens_into(layer):
    """A list that grows by the tokens of every call of the layer's first projection."""
    calls = []
    projection = next(child for name, child in layer.named_children() if name.startswith("in_proj"))
    projection.register_forward_pre_hook(lambda module, args: calls.append(args[0].shape[:-1].numel()))
    return calls


@pytest.mark.pairwise
@pytest.mark.parametrize("multiple", [1, 8])
@every_hybrid
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


@pytest.mark.parametrize("cost", [FREE, 4.0, 16.0, 256.0, 65536.0, DEAR])
def test_at_lengths_of_5_to_1_less_than_30_percent_are_wasted(cost, monkeypatch):
    monkeypatch.setitem(gated_delta.CALL_COST, "cpu", cost)
    model = fresh("qwen3_5", layers=2)
    calls = tokens_into(layer_of(model))
    lengths = (16, 80, 32, 48, 64, 20, 76)
    result = PackedStep(model)(pack(padded(texts(model, lengths)), rule=SlotRule(multiple=16)))
    assert sum(lengths) <= sum(calls) == result.work.delta_tokens < 1.3 * sum(lengths)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in HYBRID])
def test_other_families_report_no_such_tokens(family):
    model = fresh(family)
    assert PackedStep(model)(padded(mixed_samples(model.config))).work.delta_tokens == 0


# ---------------------------------------------------------------------- attached and detached


@every_hybrid
def test_after_disable_the_layers_are_what_they_were(family):
    model = fresh(family).eval()
    classes = [type(module) for module in model.modules()]
    enable_packing(model)
    assert [type(module) for module in model.modules()] != classes
    enable_packing(model, StepConfig(slots=SlotRule(multiple=4)))
    disable_packing(model)
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@every_hybrid
def test_a_copy_cuts_its_own_layers(family, duplicate):
    model = enable_packing(fresh(family))
    batch = padded(mixed_samples(model.config))
    expected = PackedStep(model)(batch).loss
    twin = duplicate(model)
    disable_packing(model)
    assert torch.equal(PackedStep(twin)(batch).loss, expected)
    assert type(layer_of(disable_packing(twin))) is type(layer_of(model))


@every_hybrid
def test_generation_goes_through_the_layers_as_before(family):
    model, untouched = enable_packing(fresh(family)).eval(), fresh(family).eval()
    ids = texts(model, [9])[0]["input_ids"][None]
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **settings), untouched.generate(ids, **settings))


def test_a_forward_replaced_on_a_layer_is_refused_and_noticed():
    model = fresh("qwen3_5")
    layer = layer_of(model)
    layer.forward = layer.forward
    with pytest.raises(ConfigError, match="the forward of a Qwen3_5GatedDeltaNet was replaced on the object itself"):
        enable_packing(model)
    del layer.forward
    assert not is_packing(model)
    enable_packing(model)
    layer.forward = layer.forward
    with pytest.raises(ConfigError, match="a Qwen3_5GatedDeltaNet no longer computes rows by their boundaries"):
        model(**padded(mixed_samples(model.config)).to_hf())


def test_boundaries_that_bypass_the_packed_forward_are_refused_by_the_first_layer():
    model = enable_packing(fresh("qwen3_5"))
    row = pack(padded(texts(model, [5, 6]))).to_hf()
    with pytest.raises(ConfigError, match="without passing through the packed forward"):
        model.model(input_ids=row["input_ids"], cu_seqlens_q=row["cu_seqlens_q"])
