"""Which datums share a row: budgets, rows of like size, prefixes counted once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from step_service import chunks_with_images, processor_for, text, tiny_engine

from vlmpack.service.datums import EncodedSequence
from vlmpack.service.rows import RowSettings, plan_rows


def texts_of(*lengths: int) -> list[EncodedSequence]:
    """Texts that share nothing."""
    return [EncodedSequence(input_ids=np.arange(length) + 1000 * at) for at, length in enumerate(lengths)]


def sizes(rows: list[list[int]], lengths: tuple[int, ...]) -> list[int]:
    return sorted(sum(lengths[at] for at in row) for row in rows)


def test_rows_are_as_few_as_the_budget_allows_and_of_like_size() -> None:
    lengths = (60, 60, 8, 7, 9, 8, 10)
    rows = plan_rows(texts_of(*lengths), RowSettings(tokens=130, patches=1))
    assert sorted(at for row in rows for at in row) == list(range(7))
    assert len(rows) == 2
    assert max(sizes(rows, lengths)) <= 90


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_has_rows(ranks: int) -> None:
    lengths = (20, 21, 22, 20, 21, 22)
    rows = plan_rows(texts_of(*lengths), RowSettings(tokens=200, patches=1), ranks=ranks)
    assert len(rows) == ranks
    assert max(sizes(rows, lengths)) <= 1.05 * sum(lengths) / ranks


def test_a_text_beyond_the_budget_has_a_row_of_its_own() -> None:
    assert plan_rows(texts_of(10, 50, 10), RowSettings(tokens=30, patches=1)) in ([[0, 2], [1]], [[1], [0, 2]])


# ---------------------------------------------------------------------- prefixes


def sequences(*lengths: int, prefix: int) -> list[EncodedSequence]:
    """Texts that share their first tokens."""
    beginning = np.arange(prefix)
    return [
        EncodedSequence(input_ids=np.concatenate([beginning, np.arange(length - prefix) + 1000 * at]))
        for at, length in enumerate(lengths, 1)
    ]


def test_a_row_is_full_of_computed_tokens() -> None:
    texts = sequences(*[30] * 6, prefix=20)  # 20 + 6 * 10 computed tokens
    assert plan_rows(texts, RowSettings(tokens=80, patches=1, min_shared=8)) == [[0, 1, 2, 3, 4, 5]]
    assert len(plan_rows(texts, RowSettings(tokens=80, patches=1))) == 3


def test_prefixes_lie_in_prefixes() -> None:
    """Two prompts behind one system prompt."""
    system, prompts = np.arange(30), (np.arange(40) + 100, np.arange(40) + 200)
    texts = [
        EncodedSequence(input_ids=np.concatenate([system, prompts[at % 2], np.arange(10) + 1000 * at]))
        for at in range(1, 5)
    ]
    assert len(plan_rows(texts, RowSettings(tokens=150, patches=1, min_shared=8))) == 1  # 30 + 2 * 40 + 4 * 10
    assert plan_rows(texts, RowSettings(tokens=149, patches=1, min_shared=8)) == [[0, 2], [1, 3]]


def test_patches_of_a_shared_image_count_once() -> None:
    engine = tiny_engine()
    prompt = chunks_with_images(np.random.default_rng(0), processor_for("qwen3_vl"), length=20, images=[(64, 96)])
    texts = [engine.encode_chunks((*prompt, text(*answer))) for answer in ((31,), (32, 33), (34,))]
    patches = texts[0].patches
    settings = RowSettings(tokens=1000, patches=patches, min_shared=8, image_token=engine.model.config.image_token_id)
    assert len(plan_rows(texts, settings)) == 1
    assert len(plan_rows(texts, replace(settings, min_shared=None))) == 3
