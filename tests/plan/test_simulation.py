"""From padded batches to packed rows: numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmpack.errors import ConfigError, SampleError
from vlmpack.plan import LengthTable, PaddedRecipe, Simulation, simulate
from vlmpack.plan.length_table import COLUMNS


def table_of(lengths: list[int], patches: list[int] | None = None, sample_ids: list[int] | None = None) -> LengthTable:
    """Text samples of these lengths."""
    columns = (sample_ids or range(len(lengths)), lengths, patches or [0] * len(lengths))
    rows = [{"sample_ids": at, "text_tokens": n, "targets": n, "patches": p} for at, n, p in zip(*columns, strict=True)]
    return LengthTable.from_rows([{**dict.fromkeys(COLUMNS, 0), **row} for row in rows])


def simulation(*, world_size: int = 1, per_device_batch: int = 1, accumulation: int = 1, **given: Any) -> Simulation:
    """The published example: 972 samples in 100 rows of 12,000 tokens, 9.72 a row."""
    recipe = PaddedRecipe(world_size=world_size, per_device_batch=per_device_batch, accumulation=accumulation)
    numbers: dict[str, Any] = {
        "capacity": 12_000, "samples": 972, "tokens": 1_188_000, "rows": 100, "least_rows": 99, "most_samples": 30,
        "longest": 9_000, "fill": 0.99, "computed": {}, "dropped": {}, **given,
    }  # fmt: skip
    return Simulation(recipe=recipe, **numbers)


class TestAccumulation:
    def test_the_published_example(self) -> None:
        """9.72 x 8 x 2 = 155.52."""
        packed = simulation(world_size=8, per_device_batch=4, accumulation=4)
        assert (packed.samples_per_row, packed.samples_per_update) == (9.72, pytest.approx(155.52))
        assert packed.recipe.samples_per_update == 128

    def test_steps_and_updates_of_an_epoch(self) -> None:
        """100 rows over 8 ranks are 13 steps, two of them an update: 7; padded: 972 / 32 = 31 steps, 8 updates."""
        packed = simulation(world_size=8, per_device_batch=4, accumulation=4)
        assert (packed.steps, packed.updates, packed.recipe.updates(packed.samples)) == (13, 7, 8)

    @given(
        target=st.integers(1, 4096),
        samples=st.integers(1, 10_000),
        rows=st.integers(1, 10_000),
        ranks=st.integers(1, 64),
    )
    def test_it_is_the_least_that_keeps_the_samples(self, target: int, samples: int, rows: int, ranks: int) -> None:
        packed = simulation(per_device_batch=target, samples=samples, rows=rows, world_size=ranks)
        target *= ranks
        assert samples * ranks * packed.accumulation >= target * rows
        assert packed.accumulation == 1 or samples * ranks * (packed.accumulation - 1) < target * rows


class TestSimulate:
    def test_a_table_is_packed(self) -> None:
        packed = simulate(table_of([5, 3, 4, 2, 6]), 10)
        assert (packed.rows, packed.samples, packed.tokens, packed.fill) == (2, 5, 20, 1.0)
        assert (packed.most_samples, packed.longest, packed.least_rows) == (3, 6, 2)

    def test_samples_that_exceed_a_row_are_named_by_their_place_in_the_data_set(self) -> None:
        packed = simulate(table_of([5, 30, 5, 11], sample_ids=[0, 2, 3, 7]), 10)
        assert dict(packed.dropped) == {2: 30, 7: 11}
        assert (packed.samples, packed.rows) == (2, 1)

    def test_where_all_exceed_a_row_there_is_nothing_to_divide_by(self) -> None:
        packed = simulate(table_of([30, 40]), 10)
        numbers = (packed.rows, packed.fill, packed.samples_per_row, packed.accumulation, packed.updates)
        assert numbers == (0, 0, 0, 1, 0)
        assert packed.explain() == ("Samples that exceed a row are left out: 0 (30 tokens), 1 (40 tokens).",)

    def test_a_row_may_hold_only_so_many_patches(self) -> None:
        packed = simulate(table_of([2] * 4, patches=[6, 6, 6, 20]), 10, max_patches=12)
        assert (packed.rows, packed.samples, dict(packed.dropped)) == (2, 3, {3: 2})

    def test_rows_of_short_samples_beside_rows_of_long_ones_are_told(self) -> None:
        """Placed by falling length, short samples share the last rows."""
        lengths = np.clip(np.random.default_rng(0).lognormal(6, 1.3, 1000), 30, 12_000).astype(int).tolist()
        falling, rolling = (
            simulate(table_of(lengths), 12_000, strategy=name) for name in ("best_fit_decreasing", "rolling_fill")
        )
        assert falling.samples_deviation > 2 * rolling.samples_deviation
        uneven = {"samples_deviation": 19.5, "per_device_batch": 9}
        assert "the strategy rolling_fill mixes long and short ones" in simulation(**uneven).explain()[0]
        assert simulation(**uneven, strategy="rolling_fill").explain() == ()

    def test_it_refuses_what_cannot_be_planned(self) -> None:
        with pytest.raises(ConfigError, match="nothing to plan"):
            simulate(table_of([]), 10)
        with pytest.raises(SampleError, match="has length 0"):
            simulate(table_of([0]), 10)


class TestPaddedRecipe:
    def test_the_accumulation_that_reaches_so_many_samples_an_update(self) -> None:
        assert PaddedRecipe.reaching(128, world_size=8, per_device_batch=4).accumulation == 4
        with pytest.raises(ConfigError, match="100 samples per update are not a multiple of 8 ranks x 4 samples"):
            PaddedRecipe.reaching(100, world_size=8, per_device_batch=4)

    @pytest.mark.parametrize("name", ["world_size", "per_device_batch", "accumulation"])
    def test_nothing_may_be_zero(self, name: str) -> None:
        with pytest.raises(ConfigError, match=f"{name} must be a whole number from 1 to"):
            PaddedRecipe(**{name: 0})

    def test_padding_to_the_longest_of_each_batch_or_of_all(self) -> None:
        lengths = np.array([3, 5, 2, 4, 7])
        padding = PaddedRecipe(per_device_batch=2).padding(lengths)
        assert (padding.tokens, padding.computed) == (21, 5 + 5 + 4 + 4 + 7)
        assert padding.fill == 21 / 25
        assert padding.waste == pytest.approx(4 / 25)
        assert PaddedRecipe(per_device_batch=2).padding(lengths, to="max").computed == 5 * 7
        nothing = PaddedRecipe().padding(np.zeros(0, np.int64))
        assert (nothing.computed, nothing.fill, nothing.waste) == (0, 0.0, 0.0)
