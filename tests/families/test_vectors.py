"""The MRoPE vector drawn in the room's README."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families.naive import naive_positions

from vlmpack.families.registry import FAMILIES
from vlmpack.layout import Segments, SlotRule
from vlmpack.testing import tiny_config
from vlmpack.testing.samples import VISION

VECTOR: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors" / "mrope.json").read_text())
SAMPLES: list[dict[str, Any]] = VECTOR["samples"]
IMAGE_PAD = 9


def types_of(sample: dict[str, Any]) -> list[int]:
    return [int(token == IMAGE_PAD) for token in sample["input_ids"]]


def axes_of(sample: dict[str, Any]) -> list[list[int]]:
    return [list(range(len(sample["t"]))), sample["t"], sample["h"], sample["w"]]


def test_the_vector_has_samples() -> None:
    assert [sample["name"] for sample in SAMPLES] == ["A", "B", "C"]


@pytest.mark.parametrize("name", VISION)
@pytest.mark.parametrize("multiple", [1, 4])
def test_a_row_of_the_vector_restarts_in_every_segment(name: str, multiple: int) -> None:
    segments = Segments.from_lengths([len(s["input_ids"]) for s in SAMPLES], SlotRule(multiple=multiple))
    types = torch.zeros(1, segments.total, dtype=torch.int64)
    for sample, (start, stop) in zip(SAMPLES, segments.spans, strict=True):
        types[0, start:stop] = torch.tensor(types_of(sample))
    found = FAMILIES[name].positions(
        types,
        segments,
        config=tiny_config(name, merge=VECTOR["merge"]),
        image_grids=[tuple(grid) for s in SAMPLES for grid in s["image_grid_thw"]],
    )
    for sample, (start, stop) in zip(SAMPLES, segments.spans, strict=True):
        assert found[:, 0, start:stop].tolist() == axes_of(sample), sample["name"]
        length = stop - start
        assert int(found[1:, 0, start:stop].max()) + 1 - length == sample["delta"]


def test_a_row_that_does_not_restart_is_off_by_seven_and_nine() -> None:
    """The guard: what the test above would see if boundaries were ignored."""
    segments = Segments.from_lengths([sum(len(s["input_ids"]) for s in SAMPLES)])
    types = torch.tensor([[kind for sample in SAMPLES for kind in types_of(sample)]])
    found = FAMILIES["qwen3_vl"].positions(
        types, segments, config=tiny_config("qwen3_vl"), image_grids=[(1, 4, 4), (1, 4, 6)]
    )
    expected = torch.tensor([axis for sample in SAMPLES for axis in sample["t"]])
    assert (found[1, 0] - expected).tolist() == [0] * 9 + [7] * 2 + [9] * 10


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s["name"])
def test_the_naive_twin_gives_the_vector(sample: dict[str, Any]) -> None:
    grids = [tuple(grid) for grid in sample["image_grid_thw"]]
    found = naive_positions(types_of(sample), merge=VECTOR["merge"], image_grids=grids)
    assert [list(axis) for axis in zip(*found, strict=True)] == axes_of(sample)
