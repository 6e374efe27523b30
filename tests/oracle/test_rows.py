"""Rows that are planned, streamed or written ahead: every sample is in one row, whole, and trained as if alone.

An epoch's gradients are compared as a sum, so that the order of the rows does not matter: it has to be the gradient of
all samples alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.oracle.packed import MIN_SHARED, collator_of
from tests.oracle.plain import (
    CASES,
    Case,
    Outcome,
    assistant,
    conversations,
    encoded,
    gradient_differences,
    gradients_of,
    picture,
    questions_about_one_image,
    run_alone,
    user,
)
from vlmpack import PackedBatchSampler, PackedStep, PackedStream, enable_packing, plan_bins
from vlmpack.lengths import measure_lengths
from vlmpack.loading import RowSettings
from vlmpack.plan import PrefixGroups
from vlmpack.rows import PackedDataset, StoreSettings, write_rows

QWEN, TEXT = CASES[1], CASES[7]
CAPACITY = 120
"""Tokens of a row: two or three samples."""


@lru_cache
def talks(case: Case = QWEN) -> list[dict[str, Any]]:
    """Nine samples with nought to two images each (seven texts), no two of which have the same tokens."""
    more = [
        {"messages": [user("Say it. " * n), assistant("Yes, five times. " * n)], "id": f"text {n}"} for n in range(1, 4)
    ]
    if case.has_images:
        more += [{"messages": [user(picture(20, 64, 64), "Which one?"), assistant("This one.")]}]
        more += [{"messages": [user(picture(21, 96, 128), "Which one?"), assistant("That other one.")]}]
    return conversations(case) + more


@lru_cache
def samples_of(case: Case = QWEN) -> list[dict[str, torch.Tensor]]:
    return [encoded(case, talk) for talk in talks(case)]


@lru_cache
def lengths(case: Case = QWEN) -> list[int]:
    return [sample["input_ids"].shape[1] for sample in samples_of(case)]


@lru_cache
def alone(case: Case = QWEN) -> Outcome:
    return run_alone(case.model(), samples_of(case))


def gradients_of_epoch(rows: Iterable[Any], case: Case = QWEN, truth: Outcome | None = None) -> dict[str, torch.Tensor]:
    """Of all rows' losses over one count, added up."""
    model = case.model()
    step = PackedStep(model)
    for row in rows:
        step(row, num_items_in_batch=sum((truth or alone(case)).targets)).loss.backward()
    return gradients_of(model)


# ---------------------------------------------------------------------- lengths, read without decoding


@pytest.mark.parametrize("case", CASES, ids=str)
def test_measured_lengths_are_the_processors(case: Case) -> None:
    """From the headers of images; the processor itself decodes, resizes and tokenizes."""
    table = measure_lengths(conversations(case), collator_of(case))
    assert list(table.tokens) == [encoded(case, talk)["input_ids"].shape[1] for talk in conversations(case)]


# ---------------------------------------------------------------------- plans


def test_a_plan_holds_every_sample_once_and_no_row_exceeds_the_capacity() -> None:
    drawn = np.random.default_rng(0).integers(1, 700, 500).tolist()
    plan = plan_bins(drawn, capacity=1000)
    assert sorted(i for row in plan.bins for i in row) == list(range(500))
    assert max(sum(drawn[i] for i in row) for row in plan.bins) <= 1000
    assert -(-sum(drawn) // 1000) <= len(plan) <= 1.02 * sum(drawn) / 1000


def test_rows_of_a_plan_are_the_planned_samples_without_padding() -> None:
    plan = plan_bins(measure_lengths(talks(), collator_of(QWEN)), CAPACITY)
    loader = DataLoader(talks(), batch_sampler=PackedBatchSampler(plan, seed=0), collate_fn=collator_of(QWEN).collate)
    rows = list(loader)
    for row, chosen in zip(rows, PackedBatchSampler(plan, seed=0), strict=True):
        assert row.input_ids.equal(torch.cat([samples_of()[i]["input_ids"] for i in chosen], 1))
        assert row.input_ids.shape[1] <= CAPACITY
    assert 1 < len(rows) < 9


def test_an_epoch_of_planned_rows_trains_as_the_samples_alone() -> None:
    plan = plan_bins(measure_lengths(talks(), collator_of(QWEN)), CAPACITY)
    rows = DataLoader(talks(), batch_sampler=PackedBatchSampler(plan, seed=3), collate_fn=collator_of(QWEN).collate)
    assert gradient_differences(gradients_of_epoch(rows), alone().gradients) == []


def test_ranks_get_as_many_rows_and_together_every_sample_once() -> None:
    plan = plan_bins(lengths(), CAPACITY)
    ranks = [list(PackedBatchSampler(plan, ranks=2, rank=rank, seed=1)) for rank in range(2)]
    assert len(ranks[0]) == len(ranks[1]) > 1
    assert sorted(i for rows in ranks for row in rows for i in row) == list(range(9))


def test_an_epoch_continues_in_its_middle() -> None:
    plan = plan_bins(lengths(), CAPACITY)
    whole = list(PackedBatchSampler(plan, seed=5))
    stopped = PackedBatchSampler(plan, seed=5)
    first = next(iter(stopped))
    continued = PackedBatchSampler(plan, seed=5)
    continued.load_state_dict({**stopped.state_dict(), "rows": 1})
    assert [first, *continued] == whole


def test_a_plan_of_shared_prefixes_counts_each_prefix_once() -> None:
    """Eight answers of 10 to 17 tokens to two questions of 100 tokens: a row computes a question once."""
    keys, shared = [0] * 4 + [1] * 4, [100] * 8
    of_samples = [100 + 10 + i for i in range(8)]
    plan = plan_bins(of_samples, 170, groups=PrefixGroups.of_keys(keys, shared))
    assert sorted(sorted(row) for row in plan.bins) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert sorted(plan.tree_tokens.tolist()) == [100 + 10 + 11 + 12 + 13, 100 + 14 + 15 + 16 + 17]


def test_measured_prefixes_bring_answers_to_one_question_together() -> None:
    case_talks = questions_about_one_image(QWEN)
    samples = [encoded(QWEN, talk) for talk in case_talks]
    truth = run_alone(QWEN.model(), samples)
    collator = collator_of(QWEN, "tree")
    table = measure_lengths(case_talks, collator, min_shared=MIN_SHARED)
    capacity = max(table.tokens) + 40
    plan = plan_bins(table, capacity, groups=table.groups)
    rows = [collator.collate([case_talks[i] for i in row]) for row in plan.bins]
    assert sum(row.tree.num_tokens for row in rows if row.tree) < sum(table.tokens) - max(table.tokens)
    assert gradient_differences(gradients_of_epoch(rows, truth=truth), truth.gradients) == []


# ---------------------------------------------------------------------- streams


def test_a_stream_packs_every_sample_once() -> None:
    collator = collator_of(QWEN)
    stream = PackedStream(talks(), RowSettings(capacity=CAPACITY), length=collator.length)
    rows = list(DataLoader(stream, batch_size=None, collate_fn=collator.collate))
    assert sorted(length for row in rows for length in row.segments.lengths) == sorted(lengths())
    assert max(row.input_ids.shape[1] for row in rows) <= CAPACITY
    assert len(rows) < 9


def test_an_epoch_of_a_stream_trains_as_the_samples_alone() -> None:
    collator = collator_of(QWEN)
    stream = PackedStream(talks(), RowSettings(capacity=CAPACITY), length=collator.length)
    rows = DataLoader(stream, batch_size=None, collate_fn=collator.collate)
    assert gradient_differences(gradients_of_epoch(rows), alone().gradients) == []


# ---------------------------------------------------------------------- rows written ahead


@pytest.mark.parametrize("case", [QWEN, CASES[5], CASES[6], TEXT], ids=str)
def test_stored_rows_are_the_processors_tokens_and_pixels(case: Case, tmp_path: Path) -> None:
    manifest = write_rows(talks(case), tmp_path, collator_of(case), StoreSettings(capacity=2 * CAPACITY))
    stored = PackedDataset(tmp_path, case.processor)
    place_of = {tuple(sample["input_ids"][0].tolist()): place for place, sample in enumerate(samples_of(case))}
    seen = []
    for i in range(len(stored)):
        row = stored.row(i)
        places = [place_of[tuple(ids.tolist())] for ids in row.input_ids[0].split(list(row.segments.lengths))]
        pixels = [samples_of(case)[place].get("pixel_values") for place in places]
        if any(one is not None for one in pixels):
            assert stored[i]["pixel_values"].equal(torch.cat([one for one in pixels if one is not None]))
        seen += places
    assert len(place_of) == len(talks(case)), "samples are told apart by their tokens"
    assert sorted(seen) == list(range(len(talks(case))))
    assert manifest.counts.rows == len(stored) < len(seen)


def test_an_epoch_of_stored_rows_trains_as_the_samples_alone(tmp_path: Path) -> None:
    write_rows(talks(), tmp_path, collator_of(QWEN), StoreSettings(capacity=CAPACITY))
    stored = PackedDataset(tmp_path, QWEN.processor)
    rows = [stored.row(i) for i in range(len(stored))]
    assert gradient_differences(gradients_of_epoch(rows), alone().gradients) == []


def test_a_stored_row_goes_straight_into_the_model(tmp_path: Path) -> None:
    write_rows(talks(), tmp_path, collator_of(QWEN), StoreSettings(capacity=sum(lengths())))
    stored = PackedDataset(tmp_path, QWEN.processor)
    assert len(stored) == 1
    loss = enable_packing(QWEN.model())(**stored[0]).loss
    assert loss.item() == pytest.approx(alone().loss, rel=2e-6)
