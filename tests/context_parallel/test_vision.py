"""Images dealt to ranks, their pixels moved there and their features sent to their tokens; without processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlmpack.context_parallel.collectives import Transfers
from vlmpack.context_parallel.vision import Entry, Image, RowMedia, StepMedia, deal
from vlmpack.errors import LayoutError

WORLD = 8
RECEIPTS, ANYTHING, TILES = ((24, 40), (36, 60)), ((8, 48), (8, 48)), ((1, 6), (576, 577))
"""Ranges of the sides of images in patches: receipts as in CORD; icons, figures and pages; tiles, patches of one."""


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("sides", "images_of_rows"),
    [
        (RECEIPTS, (4, 9, 6, 5, 7, 4, 8, 6)),
        (ANYTHING, (0, 1, 10, 3, 0, 12, 2, 8)),
        (ANYTHING, (40, *[0] * 7)),
        (TILES, (4, 9, 6, 5, 7, 4, 8, 6)),
    ],
    ids=["CORD", "mixed", "one row has all", "images of 1 to 5 tiles"],
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
        calls = [draw(st.integers(0, 1)) for _ in tokens]
        images = [
            Image(cost=n, tokens=n, call=call, entries={f"pixel_values {call}": 3 * n})
            for n, call in zip(tokens, calls, strict=True)
        ]
        media.append(RowMedia(images=tuple(images), parts_F=None if parts == 1 else np.asarray(held, np.int16)))
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
    sizes = [sum(image.tokens for image in row.images) for row in rows]
    features = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    row_of = {int(rank): row for row, ranks in enumerate(holders) for rank in ranks}
    for call in (0, 1):
        of_call = [
            np.repeat([image.call == call for image in row.images], [image.tokens for image in row.images]).astype(bool)
            for row in rows
        ]
        own = [features[row][of_call[row]].repeat(3) for _, row in sorted(row_of.items())]
        computed = [pixels[::3] for pixels in exchanged(step.send(f"pixel_values {call}"), own)]
        assert [len(x) for x in computed] == [step.tokens(step.items(rank, call)) for rank in range(step.ranks)]
        for rank, arrived in enumerate(exchanged(step.send_features(call), computed)):
            row = row_of[rank]
            parts_F, part = rows[row].parts_F, int(np.flatnonzero(holders[row] == rank)[0])
            is_held = of_call[row] if parts_F is None else of_call[row] & (parts_F == part)
            assert arrived.tolist() == features[row][is_held].tolist()


@pytest.mark.parametrize(
    ("other", "fault"),
    [
        (Entry(dtype=torch.bfloat16, shape=(8,)), r"pixel_values of torch.float32 \[8\] and of torch.bfloat16 \[8\]"),
        (Entry(dtype=torch.float32, shape=(9,)), r"pixel_values of torch.float32 \[8\] and of torch.float32 \[9\]"),
        (Entry(dtype=torch.float32, shape=(8,)), "some have image_sizes, and some have none"),
    ],
)
def test_images_of_two_kinds_in_one_step_are_refused(other: Entry, fault: str) -> None:
    image = Image(cost=1, tokens=1, entries={"pixel_values": 4})
    first = {"images": (replace(image, told={"image_sizes": [(1, 4)]}),)}
    rows = [RowMedia(**first, tensors={"pixel_values": Entry(dtype=torch.float32, shape=(8,))}), RowMedia()]
    with pytest.raises(LayoutError, match=fault):
        StepMedia([*rows, RowMedia(images=(image,), tensors={"pixel_values": other})], np.arange(3)[:, None])
