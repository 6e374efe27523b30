"""Images dealt to ranks, their pixels moved there and their features sent to their tokens; without processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlmpack.context_parallel.collectives import Transfers
from vlmpack.context_parallel.vision import RowMedia, StepMedia, deal
from vlmpack.errors import LayoutError

WORLD = 8
RECEIPTS, ANYTHING = ((24, 40), (36, 60)), ((8, 48), (8, 48))
"""Ranges of the sides of images in patches: photographs of receipts as in CORD; icons, figures and pages."""


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("sides", "images_of_rows"),
    [(RECEIPTS, (4, 9, 6, 5, 7, 4, 8, 6)), (ANYTHING, (0, 1, 10, 3, 0, 12, 2, 8)), (ANYTHING, (40, *[0] * 7))],
    ids=["CORD", "mixed", "one row has all"],
)
def test_the_longest_rank_has_few_patches_more_than_the_mean(sides: Any, images_of_rows: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    patches = np.prod([rng.integers(least, most, sum(images_of_rows)) for least, most in sides], axis=0)
    homes = np.repeat(np.arange(WORLD), images_of_rows)
    before = np.bincount(homes, patches, WORLD)
    assert before.max() > 1.2 * before.mean()
    rank_of = deal(patches.tolist(), homes[:, None].tolist(), WORLD)
    assert np.bincount(rank_of, patches, WORLD).max() <= 1.05 * before.mean()
    fewest = np.maximum(before - before.mean(), 0).sum()
    assert patches[rank_of != homes].sum() <= fewest + patches.sum() / 3, "what need not move stays, or nearly so"


@given(costs=st.lists(st.integers(0, 99), max_size=12), ranks=st.integers(1, 6))
def test_no_rank_has_more_than_the_mean_and_one_image(costs: list[int], ranks: int) -> None:
    rank_of = deal(costs, [range(ranks)] * len(costs), ranks)
    assert np.bincount(rank_of, costs, ranks).max() <= sum(costs) / ranks + max(costs, default=0)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[RowMedia], np.ndarray]:
    """Rows with images of so many tokens, and the ranks that hold parts of the rows, in any order."""
    rows, parts = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    of_row = st.lists(st.integers(1, 5), max_size=4)
    media = []
    for tokens in draw(st.lists(of_row, min_size=rows, max_size=rows)):
        held = draw(st.lists(st.integers(0, parts - 1), min_size=sum(tokens), max_size=sum(tokens)))
        media.append(
            RowMedia(
                costs=tuple(tokens),
                entries=tuple(3 * count for count in tokens),
                tokens=tuple(tokens),
                grids=tuple((1, 1, 3 * count) for count in tokens),
                parts_F=None if parts == 1 else np.asarray(held, np.int16),
                pixels=(torch.float32, (1,)) if tokens else None,
            )
        )
    return media, np.asarray(draw(st.permutations(range(rows * parts)))).reshape(rows, parts)


def exchanged(transfers: Transfers, own: list[np.ndarray]) -> list[np.ndarray]:
    """What each rank has after the exchange, in the order of the transfers."""
    routes = [transfers.route(rank) for rank in range(len(own))]
    sent = [
        np.split(x[route.send.numpy()], np.cumsum(route.send_counts)[:-1]) for x, route in zip(own, routes, strict=True)
    ]
    arrived = [np.concatenate([parts[rank] for parts in sent]) for rank in range(len(own))]
    return [x[np.argsort(transfers.arriving(rank))] for rank, x in enumerate(arrived)]


@given(drawn=steps())
def test_every_feature_gets_to_its_token(drawn: tuple[list[RowMedia], np.ndarray]) -> None:
    """Entries of pixels and features have numbers, counted over all rows; a tower makes a feature of three entries."""
    rows, holders = drawn
    step = StepMedia(rows, holders)
    features = np.split(np.arange(sum(sum(row.tokens) for row in rows)), np.cumsum([sum(r.tokens) for r in rows])[:-1])
    row_of = {int(rank): row for row, ranks in enumerate(holders) for rank in ranks}
    pixels = [np.repeat(features[row_of[rank]], 3) for rank in range(step.ranks)]
    computed = [x[::3] for x in exchanged(step.send_pixels, pixels)]
    for rank, own in enumerate(computed):
        assert len(own) * 3 == sum(columns for _, _, columns in step.grids(rank))
    for rank, arrived in enumerate(exchanged(step.send_features, computed)):
        parts = rows[row_of[rank]].parts_F
        part = int(np.flatnonzero(holders[row_of[rank]] == rank)[0])
        expected = features[row_of[rank]] if parts is None else features[row_of[rank]][parts == part]
        assert arrived.tolist() == expected.tolist()


def test_pixels_of_two_kinds_in_one_step_are_refused() -> None:
    one = RowMedia(costs=(1,), entries=(4,), tokens=(1,), grids=((1, 2, 2),), pixels=(torch.float32, (8,)))
    other = RowMedia(costs=(1,), entries=(4,), tokens=(1,), grids=((1, 2, 2),), pixels=(torch.bfloat16, (8,)))
    with pytest.raises(LayoutError, match=r"pixels of torch.float32 \[8\] and of torch.bfloat16 \[8\]"):
        StepMedia([one, RowMedia(), other], np.arange(3)[:, None])
