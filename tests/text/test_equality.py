"""Packed columns against every sample alone: loss, logits and every gradient, in plain and in enabled models."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import Alone, alone_through, check_gradients, check_outputs, gradients, limits_of
from text.naive import seqpacker_columns
from torch.utils.data import DataLoader
from training import Gradients, arguments, logged
from transformers import Trainer, default_data_collator

from vlmpack.errors import ConfigError
from vlmpack.model import PackedStep, enable_packing
from vlmpack.testing import tiny_model
from vlmpack.text import RowCollator, pack_dataset, pack_result_to_tensors, pack_sequences, packed_collate_fn
from vlmpack.trainer import loss_metrics

CAPACITY = 16
LENGTHS = (7, 5, 3, 11, 2, 8, 6)


@cache
def fresh(family: str = "qwen3") -> Any:
    return tiny_model(family)


def model_of(family: str = "qwen3") -> Any:
    """An untouched model, the same each time."""
    return copy.deepcopy(fresh(family))


@cache
def samples() -> tuple[dict[str, torch.Tensor], ...]:
    """Of unlike length; some tokens of each are not to be learnt."""
    rng = torch.Generator().manual_seed(5)
    ids = [torch.randint(6, 90, (n,), generator=rng) for n in LENGTHS]
    masks = [torch.rand(n, generator=rng) < 0.7 for n in LENGTHS]
    return tuple({"input_ids": i, "labels": i.masked_fill(~m, -100)} for i, m in zip(ids, masks, strict=True))


IDS = [sample["input_ids"].tolist() for sample in samples()]
LABELS = [sample["labels"].tolist() for sample in samples()]


@cache
def truth(family: str = "qwen3") -> Alone:
    return alone_through(model_of(family), samples())


def rows() -> Any:
    return pack_dataset(IDS, CAPACITY, labels=LABELS)


def check_loss_and_gradients(model: Any, loss: torch.Tensor, family: str = "qwen3") -> None:
    loss.backward()
    assert torch.isclose(loss, truth(family).loss, rtol=2e-6, atol=0)
    check_gradients(truth(family), gradients(model), limits_of(family))


# ---------------------------------------------------------------------- a model with packing enabled


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_an_enabled_model_trains_the_rows_of_a_data_set_exactly(family) -> None:
    model = model_of(family)
    result = PackedStep(model)(RowCollator()(list(rows())), logits=True)
    result.loss.backward()
    assert result.work.physical_tokens == result.work.real_tokens == sum(LENGTHS)
    by_length = sorted(zip(LENGTHS, truth(family).logits, strict=True), key=lambda pair: pair[0])
    assert result.row_logits is not None
    own = result.row_logits[0].split(list(result.segments.lengths))
    for (_, alone), packed in zip(by_length, sorted(own, key=len), strict=True):
        assert (packed - alone).abs().max() <= limits_of(family).logits
    check_gradients(truth(family), gradients(model), limits_of(family))


def test_an_enabled_model_trains_a_collated_batch_exactly() -> None:
    model = enable_packing(model_of())
    batch = packed_collate_fn(CAPACITY)(samples())
    check_loss_and_gradients(model, model(**batch.to_hf()).loss)


def test_a_result_keeps_the_order_of_its_samples() -> None:
    model = model_of()
    batch = pack_result_to_tensors(pack_sequences(LENGTHS, sum(LENGTHS), "nf"), IDS, labels=LABELS)
    result = PackedStep(model)(batch.to_hf(), logits=True)
    result.loss.backward()
    check_outputs(truth(), result, limits_of("qwen3"))


@pytest.mark.parametrize("position_rows", [0, 4])
def test_text_rows_train_an_enabled_vision_language_model_too(position_rows) -> None:
    model = enable_packing(model_of("qwen3_vl"))
    batch = RowCollator(position_rows=position_rows)(list(rows()))
    check_loss_and_gradients(model, model(**batch).loss, "qwen3_vl")


def test_an_enabled_model_refuses_padded_rows_that_no_boundaries_came_with() -> None:
    model = enable_packing(model_of())
    with pytest.raises(ConfigError, match="give a packed row its boundaries"):
        model(**default_data_collator(list(rows())))


# ---------------------------------------------------------------------- a plain model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_plain_model_trains_the_columns_as_they_are(attention) -> None:
    model = model_of()
    model.set_attn_implementation(attention)
    model.config.use_cache = False  # as HF Trainer sets it
    check_loss_and_gradients(model, model(**default_data_collator(list(rows()))).loss)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_plain_model_trains_seqpackers_loop_as_it_is(attention) -> None:
    model = model_of()
    model.set_attn_implementation(attention)
    assert model.config.use_cache  # which alone would mix samples that are told apart by positions
    loader = DataLoader(samples(), batch_size=len(LENGTHS), collate_fn=packed_collate_fn(capacity=CAPACITY))  # pyright: ignore
    (batch,) = loader
    outputs = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        labels=batch.labels,
        position_ids=batch.position_ids,
    )
    check_loss_and_gradients(model, outputs.loss)


def test_a_plain_model_trains_a_collated_row_exactly() -> None:
    model = model_of()
    assert model.config.use_cache
    check_loss_and_gradients(model, model(**RowCollator()(list(rows()))).loss)


def test_a_loss_of_ones_own_takes_shift_labels() -> None:
    model = model_of()
    batch = packed_collate_fn(CAPACITY)(samples())
    logits = model(**{name: vars(batch)[name] for name in ("input_ids", "position_ids")}, use_cache=False).logits
    check_loss_and_gradients(model, F.cross_entropy(logits.flatten(0, 1), batch.shift_labels.flatten()))


def test_seqpackers_columns_train_something_else() -> None:
    """The mask alone mixes samples; labels that are shifted twice are the token after the next one."""
    model = model_of()
    model.config.use_cache = False
    bins = pack_sequences(LENGTHS, CAPACITY).bins
    with_mask = pack_dataset(IDS, CAPACITY, labels=LABELS, attention_mask="padding")
    theirs = {name: torch.tensor(column) for name, column in seqpacker_columns(bins, IDS, CAPACITY).items()}
    assert torch.equal(theirs["attention_mask"], torch.tensor(with_mask["attention_mask"][:]))
    batches = {
        "theirs": theirs,
        "masked": default_data_collator(list(with_mask)),
        "ours": default_data_collator(list(rows())),
    }
    errors = {name: float((model(**batch).loss - truth().loss).abs().detach()) for name, batch in batches.items()}
    assert errors["theirs"] > 0.05
    assert errors["masked"] > 0.05
    assert errors["ours"] < 1e-5


# ---------------------------------------------------------------------- HF Trainer


@pytest.mark.parametrize(
    ("with_packing", "collator"),
    [(True, RowCollator()), (False, RowCollator()), (False, default_data_collator)],
    ids=["enabled", "plain", "plain, with its own collator"],
)
def test_trainer_trains_the_rows_of_a_data_set_exactly(collator, with_packing, tmp_path) -> None:
    model = enable_packing(model_of()) if with_packing else model_of()
    data = rows()
    assert len(data) == 3
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "max_steps": 1}
    run, seen = Trainer(model, arguments(tmp_path, **settings), collator, data), Gradients()
    run.add_callback(seen)
    run.train()
    assert logged(run) == [pytest.approx(truth().loss.item(), rel=1e-6)]
    check_gradients(truth(), {name: g for name, g in seen.steps[0].items() if g.any()}, limits_of("qwen3"))


def test_trainer_evaluates_row_by_row_exactly(tmp_path) -> None:
    args = arguments(tmp_path, per_device_eval_batch_size=1)
    model = enable_packing(model_of())
    run = Trainer(model, args, RowCollator(), eval_dataset=rows(), compute_metrics=loss_metrics(model))
    metrics = run.evaluate()
    assert metrics["eval_token_loss"] == pytest.approx(truth().loss.item(), rel=1e-6)
    assert metrics["eval_num_targets"] == sum(int((sample["labels"][1:] != -100).sum()) for sample in samples())


def test_trainer_packs_samples_of_a_batch_exactly(tmp_path) -> None:
    model = enable_packing(model_of())
    data = [{"input_ids": ids, "labels": labels} for ids, labels in zip(IDS, LABELS, strict=True)]
    settings = {"per_device_train_batch_size": 7, "max_steps": 1}
    collator = RowCollator(bare_row="one_sample")
    run = Trainer(model, arguments(tmp_path, **settings), collator, data)  # pyright: ignore[reportArgumentType]
    run.train()
    assert logged(run) == [pytest.approx(truth().loss.item(), rel=1e-6)]
