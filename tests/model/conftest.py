"""What the tests of models share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

OF_TRANSFORMERS = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(OF_TRANSFORMERS)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
