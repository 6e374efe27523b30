"""Recipes of padded batches: numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from vlmpack.errors import ConfigError
from vlmpack.plan import PaddedRecipe


class TestPaddedRecipe:
    def test_samples_of_an_update(self) -> None:
        assert PaddedRecipe(world_size=8, per_device_batch=4, accumulation=4).samples_per_update == 128

    def test_the_accumulation_that_reaches_them(self) -> None:
        assert PaddedRecipe.reaching(128, world_size=8, per_device_batch=4).accumulation == 4

    def test_samples_that_no_accumulation_reaches_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="100 samples an update are no multiple of 8 ranks x 4 samples"):
            PaddedRecipe.reaching(100, world_size=8, per_device_batch=4)

    @pytest.mark.parametrize("name", ["world_size", "per_device_batch", "accumulation"])
    def test_nothing_may_be_zero(self, name: str) -> None:
        with pytest.raises(ConfigError, match=f"{name} must be a whole number from 1 to"):
            PaddedRecipe(**{name: 0})

    def test_updates_of_an_epoch_round_up_twice(self) -> None:
        recipe = PaddedRecipe(world_size=2, per_device_batch=3, accumulation=4)
        assert recipe.updates(24) == 1
        assert recipe.updates(25) == 2  # five batches a rank
        assert recipe.updates(0) == 0

    def test_padding_to_the_longest_of_each_batch(self) -> None:
        lengths = np.array([3, 5, 2, 4, 7])
        padding = PaddedRecipe(per_device_batch=2).padding(lengths)
        assert (padding.tokens, padding.computed) == (21, 5 + 5 + 4 + 4 + 7)
        assert padding.fill == 21 / 25
        assert padding.waste == pytest.approx(4 / 25)

    def test_padding_to_the_longest_of_all(self) -> None:
        assert PaddedRecipe(per_device_batch=2).padding(np.array([3, 5, 2, 4, 7]), to="max").computed == 5 * 7

    def test_nothing_needs_no_padding(self) -> None:
        nothing = PaddedRecipe().padding(np.zeros(0, np.int64))
        assert (nothing.computed, nothing.fill, nothing.waste) == (0, 0.0, 0.0)
