"""A queue on a tiny engine, started on a state folder of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from service.clients import Client
    from service.fakes import FakeEngine


@pytest.fixture
def queue_and_engine(tmp_path: Path) -> Iterator[tuple[Client, FakeEngine]]:
    from service.clients import served  # needs the packages of an extra

    with served(tmp_path) as both:
        yield both


@pytest.fixture
def client(queue_and_engine: tuple[Client, FakeEngine]) -> Client:
    return queue_and_engine[0]


@pytest.fixture
def engine(queue_and_engine: tuple[Client, FakeEngine]) -> FakeEngine:
    return queue_and_engine[1]


@pytest.fixture
def model(client: Client) -> str:
    """A new model of a new session."""
    return client.model()
