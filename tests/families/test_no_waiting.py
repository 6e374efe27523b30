"""Positions never make the host wait for the device, and need no values to know their shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from waiting import waits_are_errors

from vlmpack.families.media import truncates_seconds
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import Grid, PackedRow, Segments, SlotRule, pack
from vlmpack.probing.host_syncs import recorded_syncs
from vlmpack.testing import mixed_samples, padded, tiny_config
from vlmpack.testing.samples import kinds_of


def row_of(name: str) -> tuple[PackedRow, Any]:
    config = tiny_config(name, patch_size=1)
    return pack(padded(mixed_samples(config, kinds=kinds_of(config) * 2)), rule=SlotRule(multiple=4)), config


def positions(row: PackedRow, name: str, config: Any, types: torch.Tensor | None) -> torch.Tensor:
    assert row.metadata is not None
    family = FAMILIES[name]
    return family.positions(
        types,
        row.segments,
        config=config,
        image_grids=row.metadata.image_grids,
        video_grids=row.metadata.video_grids,
        seconds_per_grid=row.metadata.seconds_per_grid,
    )


@pytest.fixture(autouse=True)
def asked_once() -> None:
    """A family is compared with the model when packing is enabled, not in a step: transformers is tried before."""
    truncates_seconds()


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_no_operation_waits(name: str) -> None:
    row, config = row_of(name)
    with recorded_syncs(torch.device("cpu")) as waits:
        found = positions(row, name, config, row.mm_token_type_ids)
    assert waits == []
    assert found.shape == (4, 1, row.segments.total)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_fake_tensors_are_enough(name: str) -> None:
    row, config = row_of(name)
    # boundaries and grids are constants known on the host: they may be real
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = positions(row, name, config, torch.zeros(1, row.segments.total, dtype=torch.int64))
    assert found.shape == (4, 1, row.segments.total)
    assert found.dtype == torch.int64


def test_a_compiled_step_is_not_compiled_again_for_other_lengths() -> None:
    family, config = FAMILIES["qwen3_vl"], tiny_config("qwen3_vl")
    graphs = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def step(types: torch.Tensor, segments: Segments, grids: list[Grid]) -> torch.Tensor:
        return family.positions(types, segments, config=config, image_grids=grids) * 2

    compiled = torch.compile(step, backend=backend, dynamic=True)
    for rows in (2, 3, 4, 5):
        types = torch.tensor([[0, *[1] * rows, 0, 0]])
        segments, grids = Segments.from_lengths([rows + 2, 1]), [(1, 2, 2 * rows)]
        assert torch.equal(compiled(types, segments, grids), step(types, segments, grids))
    assert graphs == 1


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_gpu_is_not_waited_for_and_gives_the_same(name: str) -> None:
    row, config = row_of(name)
    types = None if row.mm_token_type_ids is None else row.mm_token_type_ids.cuda()
    with waits_are_errors():
        found = positions(row, name, config, types)
    assert torch.equal(found.cpu(), positions(row, name, config, row.mm_token_type_ids))
