"""Settings of a store and the folder it goes into."""

from __future__ import annotations

import numpy as np
from store.stores import digests, packing, store, texts

from vlmpack.store.manifest import Manifest


def test_numbers_of_numpys_are_settings_like_pythons(tmp_path):
    def write(folder, number):
        numbers = {name: number(2) for name in ("seed", "shard_rows", "rows_multiple")}
        return store(folder, texts(), packing(max_length=number(90)), capacity=number(96), **numbers)

    manifest = write(tmp_path / "numpy", np.int64)
    assert manifest == write(tmp_path / "python", int) == Manifest.load(tmp_path / "numpy")
    assert digests(tmp_path / "numpy") == digests(tmp_path / "python")
    assert write(tmp_path / "numpy", int) == manifest  # the store is known again
