"""Receipts in, a trained model out: a real processor, VLMCollator and HF Trainer, with nothing else to know."""

from __future__ import annotations

import json
from functools import lru_cache

import numpy as np
import pytest
import torch
from cases import slow
from chats import CHATTING, chat, picture, processor_of
from training import LAYOUTS, arguments, logged
from transformers import Trainer

from vlmpack.collate import SkipLimit, VLMCollator
from vlmpack.data import to_conversation
from vlmpack.families.registry import FAMILIES as DESCRIPTORS
from vlmpack.lengths import measure_lengths
from vlmpack.model import enable_packing
from vlmpack.plan import plan_bins
from vlmpack.testing import SyntheticReceipts, tiny_model, tiny_processor
from vlmpack.trainer import PackedTrainer

AS_WEIGHTS = {"pixel_dtype": torch.float32}
"""Pixels in the type of the weights: Llama 4's processor makes bfloat16."""
BEYOND = CHATTING
"""Families beyond Qwen whose processors can chat."""
PROMPTED = tuple(family for family in ("deepseek_ocr2",) if family in DESCRIPTORS)
"""Families without a chat template: samples are prompts with their answers."""
SETTINGS = {"remove_unused_columns": False, "train_sampling_strategy": "sequential"}


@lru_cache
def small_receipts():
    """Six receipts as conversations, their pictures made small so that a tiny model has little to look at."""
    rows = []
    for record in SyntheticReceipts(num=6, seed=1):
        record = {**record, "image": record["image"].resize((96, 128))}
        rows.append(to_conversation(record))
    return rows


def prompts():
    """Four pictures, of which two are cut into tiles, as prompts with their answers."""
    sizes, answers = ((90, 61), (200, 90), (40, 80), (90, 170)), ("75,000", "Nothing", "4", "A receipt")
    return [
        {"prompt": "<image>Total?", "completion": answer, "images": [picture(*size)]}
        for size, answer in zip(sizes, answers, strict=True)
    ]


def alone(model, collate, rows):
    """(loss sums, target counts), both [B]: each row collated and computed on its own by the untouched model."""
    sums, counts = [], []
    for row in rows:
        batch = {name: value for name, value in collate([row]).items() if name != "vlmpack"}
        types, named = batch.pop("mm_token_type_ids"), DESCRIPTORS[model.config.model_type].token_types
        batch |= {} if named is None else {named: types}
        count = int((batch["labels"][:, 1:] != -100).sum())
        sums.append(model(**batch).loss * count)
        counts.append(count)
    return torch.stack(sums).detach(), torch.tensor(counts)


def trained_and_evaluated_as_alone(family, processor, rows, room, tmp_path):
    """One step over planned rows of `room` times the longest sample sees all of them."""
    model, collate = tiny_model(family, processor=processor), VLMCollator(processor, layout="packed", **AS_WEIGHTS)
    sums, counts = alone(model, VLMCollator(processor, **AS_WEIGHTS), rows)
    exact = float(sums.sum() / counts.sum())
    table = measure_lengths(rows, collate)
    plan = plan_bins(table, room * max(table.tokens))
    assert len(plan) > 1
    steps = {"gradient_accumulation_steps": len(plan), "max_steps": 1}
    args = arguments(tmp_path, dataloader_pin_memory=False, **steps, **SETTINGS)
    run = PackedTrainer(enable_packing(model), args, collate, train_dataset=rows, eval_dataset=rows, plan=plan)
    assert run.evaluate()["eval_loss"] == pytest.approx(exact, rel=1e-6)
    assert run.evaluation.sample_losses == pytest.approx((sums / counts).numpy(), rel=2e-6)
    run.train()
    assert logged(run) == [pytest.approx(exact, rel=1e-6)]
    assert run.evaluate()["eval_loss"] < exact - 0.1


@pytest.mark.parametrize("family", slow(*BEYOND, *PROMPTED))
def test_planned_rows_of_other_families_are_trained_and_evaluated_as_alone(family, tmp_path):
    rows, room = (prompts(), 1) if family in PROMPTED else (small_receipts(), 2)
    trained_and_evaluated_as_alone(family, processor_of(family), rows, room, tmp_path)


@pytest.mark.parametrize("family", slow("qwen3_omni_moe_thinker", "qwen2_5_omni_thinker"))
def test_planned_rows_with_audio_are_trained_and_evaluated_as_alone(family, tmp_path):
    noise, rows = np.random.default_rng(0), small_receipts()[:2]
    for at, samples in enumerate((9_000, 33_000, 20_000, 5_000)):
        sound = noise.normal(scale=0.1, size=samples).astype(np.float32)
        question = [{"type": "audio", "audio": sound}, {"type": "text", "text": "What is it?"}]
        answer = {"role": "assistant", "content": "coffee " * (at + 1)}
        rows.append({"messages": [{"role": "user", "content": question}, answer]})
    trained_and_evaluated_as_alone(family, tiny_processor(family), rows, 1, tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_trainer_counts_the_targets_that_the_collator_counted(layout, side, tmp_path):
    """Also when everything is learnt and padding is on the left, where the first token of a sample is labelled."""
    processor = processor_of()
    collate = VLMCollator(processor, layout=layout, train_on="all")
    rows = [chat("short", "yes"), chat("a longer question", "a longer answer", picture())]
    before = processor.tokenizer.padding_side
    processor.tokenizer.padding_side = side
    try:
        batch = collate(rows)
        run = Trainer(enable_packing(tiny_model(processor=processor)), arguments(tmp_path), collate)
        counted = run._get_num_items_in_batch([batch, batch], torch.device("cpu"))
    finally:
        processor.tokenizer.padding_side = before
    assert int(counted) == 2 * batch["vlmpack"].num_targets


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_whose_samples_were_all_refused_costs_a_step_of_nothing(layout, tmp_path):
    """The good batch beside it in the same step counts as if it were alone."""
    processor = processor_of()
    good = [chat("What?", "This.", picture()), chat("And?", "That.")]
    bad = [{"messages": [{"role": "user", "content": "no answer"}]}] * 2
    skip = {"on_bad": "skip", "skip_log": tmp_path / "refused.jsonl", "skip_limit": SkipLimit(max_bad_fraction=1.0)}
    losses = []
    for rows, accumulate in ((good, 1), (good + bad, 2)):
        collate = VLMCollator(processor, layout=layout, **skip)
        model = enable_packing(tiny_model(processor=processor))
        args = arguments(tmp_path, gradient_accumulation_steps=accumulate, max_steps=1, **SETTINGS)
        run = Trainer(model, args, collate, rows)
        run.train()
        losses += logged(run)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert len([json.loads(line) for line in skip["skip_log"].read_text().splitlines()]) == 2
