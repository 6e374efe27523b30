"""Llama 4: chunks of a sample, queries that are scaled by the place in it, and a head inside the text part.

Chunks by themselves are in `tests/attention/test_patterns.py`."""

import functools
import inspect
from typing import Any

import pytest
import torch
from cases import slow
from equality import alone_through, check_outputs, limits_of
from parts import parts_of

from vlmpack.attention.patterns import LayerMask
from vlmpack.errors import ConfigError, FamilyError
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import Segments, SlotRule, pack
from vlmpack.model import PackedStep, StepConfig, disable_packing, enable_packing
from vlmpack.model.forward import pack_backbone
from vlmpack.model.mechanisms import attention, llama4
from vlmpack.model.mechanisms.attention import layer_masks
from vlmpack.testing import mixed_samples, padded, tiny_model

pytestmark = pytest.mark.skipif("llama4" not in FAMILIES, reason="this transformers has another Llama 4")
CHUNK = 7


def fresh(family: str = "llama4_text", **sizes: Any) -> Any:
    return tiny_model(family, seed=3, **{"layers": 2, **sizes})


@functools.cache
def truth(family: str = "llama4_text") -> Any:
    model = fresh(family)
    kinds = ("text", "image", "text") if family == "llama4" else ("text",) * 3
    return alone_through(model, mixed_samples(model.config, seed=5, kinds=kinds, text=(3, 7), side=(1, 2)))


@pytest.mark.parametrize("chunk", [2, *slow(8192)])
def test_chunks_of_any_length_are_measured_without_a_mask(chunk: int) -> None:
    model = fresh(layers=3)
    assert layer_masks(parts_of(model)) == {0: LayerMask(chunk=CHUNK), 1: LayerMask(), 2: LayerMask(chunk=CHUNK)}
    model.config.attention_chunk_size = chunk
    assert layer_masks(parts_of(model))[0] == LayerMask(chunk=chunk)


def test_a_layer_that_does_not_read_its_places_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh()
    attention_class = type(model.model.layers[1].self_attn)
    plain = attention_class.forward
    monkeypatch.setattr(
        attention_class, "forward", lambda self, *args, past_key_values=None, **more: plain(self, *args, **more)
    )
    with pytest.raises(FamilyError, match="scales queries by their place and did not read it"):
        layer, hidden = model.model.layers[1].self_attn, torch.zeros(1, 3, 64)
        inspect.unwrap(llama4.placed_class)(attention_class.forward, layer, hidden, None, None, **row_of_layer())


def row_of_layer() -> dict[str, Any]:
    row = attention.RowContext(
        segments=Segments.from_lengths([3]),
        entries={"query_scale": torch.zeros(3, dtype=torch.int64), "attention": attention.RowAttention("auto")},
    )
    return {attention.CONTEXT: row}


def test_routers_choose_for_real_tokens_alone_and_are_counted() -> None:
    model, chosen, routed = fresh(experts=5, experts_per_token=3), [], []
    for layer in model.model.layers:
        block = layer.feed_forward
        block.router.register_forward_hook(lambda _, args, output: chosen.append((output[0] > 0).sum(0).tolist()))
        block.experts.register_forward_pre_hook(lambda _, args: routed.append(len(args[0])))
    row = pack(padded(truth().samples), rule=SlotRule(multiple=8))
    result = PackedStep(model, StepConfig(z_loss_coef=0.1))(row)
    assert row.segments.has_padding
    assert routed == [5 * row.segments.num_tokens] * 2
    assert result.expert_counts is not None
    assert result.expert_counts.tolist() == chosen
    assert result.expert_counts.sum(1).tolist() == [3 * row.segments.num_tokens] * 2
    assert result.aux_loss is None


def test_chunks_of_one_token_are_no_windows() -> None:
    models = fresh(), fresh()
    for model in models:
        model.config.attention_chunk_size = 1
    alone = alone_through(models[0], mixed_samples(models[0].config, seed=5, kinds=("text", "text")))
    result = PackedStep(models[1])(pack(padded(alone.samples)), logits=True)
    check_outputs(alone, result, limits_of("llama4_text"))
    assert result.work.window_pairs == sum(alone.lengths)


def test_the_inner_head_computes_labelled_positions_alone() -> None:
    model, seen = fresh("llama4"), []
    head = model.language_model.lm_head
    head.register_forward_hook(lambda module, args, output: seen.append(output.shape[-2]))
    result = PackedStep(model)(padded(truth("llama4").samples))
    assert seen == [result.num_targets]
    seen.clear()
    disable_packing(model)(input_ids=torch.ones(1, 5, dtype=torch.int64))
    assert seen == [5]


def test_a_trainer_that_calls_the_model_without_its_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="the head of llama4 is inside its text part"):
        pack_backbone(enable_packing(fresh("llama4")))
