"""Transformers' own meshes, tensor, expert and sharded data parallel: a packed step is that of all samples alone."""

from pathlib import Path

import pytest
import torch
from equality import alone_through, check_gradients, limits_of
from model.mesh_ranks import MESHES
from model.two_ranks import samples_of
from ranks import on_ranks

from vlmpack.testing import tiny_model
from vlmpack.testing.samples import VISION

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first rank left the gradients of every case."""
    folder = tmp_path_factory.mktemp("meshes")
    for family in {family for _, family, _ in MESHES.values()}:
        model_of(family).save_pretrained(folder / family)
    for ranks in (2, 4):
        on_ranks(Path(__file__).with_name("mesh_ranks.py"), folder, ranks=ranks)
    return folder


def model_of(family: str):
    return tiny_model(family, seed=3, **({"vision_depth": 1} if family in VISION else {}))


@pytest.mark.parametrize("case", MESHES)
def test_every_gradient_is_that_of_all_samples_alone(folder: Path, case: str) -> None:
    ranks, family, mesh = MESHES[case]
    model = model_of(family)
    own = alone_through(model, samples_of(model))
    halves = 1 if ranks == mesh.get("tp_size") else 2  # gradients are the mean of those of the data ranks
    found = {name: halves * gradient for name, gradient in torch.load(folder / f"{case}.pt").items()}
    check_gradients(own, {name: gradient for name, gradient in found.items() if gradient.any()}, limits_of(family))
