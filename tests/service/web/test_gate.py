"""Bodies under caps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from vlmpack.service.limits import ServiceLimits
from vlmpack.service.web.gate import BodyReader
from vlmpack.service.wire.messages import Rejected


def read(pieces: list[bytes], *, encoding: str = "", most: int = 10**6, reader: BodyReader | None = None) -> bytes:
    async def stream() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    return asyncio.run((reader or BodyReader(limits=ServiceLimits())).read(stream(), encoding=encoding, most=most))


def test_a_compressed_body_is_refused() -> None:
    with pytest.raises(Rejected, match="Content-Encoding 'zstd': send the body as it is") as refused:
        read([b"x"], encoding="zstd")
    assert refused.value.status == 415


def test_a_large_body_is_read_to_its_end_and_its_beginning_is_kept() -> None:
    taken: list[bytes] = []

    async def stream() -> AsyncIterator[bytes]:
        for piece in [b"begin", b"x" * 20, b"end"]:
            taken.append(piece)
            yield piece

    with pytest.raises(Rejected, match="more than 10 bytes") as refused:
        asyncio.run(BodyReader(limits=ServiceLimits()).read(stream(), encoding="", most=10))
    assert refused.value.status == 413
    assert refused.value.beginning.startswith(b"begin")
    assert taken[-1] == b"end"


def test_all_bodies_together_stay_within_a_budget() -> None:
    reader = BodyReader(limits=ServiceLimits(bodies_bytes=10))
    with pytest.raises(Rejected) as refused:
        read([b"x" * 11], reader=reader)
    assert refused.value.status == 429
    assert reader.held == 0
    assert read([b"x" * 10], reader=reader) == b"x" * 10


def test_a_slow_body_is_given_up_and_a_large_one_gets_more_time() -> None:
    async def stream(size: int, seconds: float) -> AsyncIterator[bytes]:
        yield b"x" * size
        await asyncio.sleep(seconds)

    reader = BodyReader(limits=ServiceLimits(body_seconds=0.01))
    assert len(asyncio.run(reader.read(stream(10**7, 0.1), encoding="", most=10**7))) == 10**7
    with pytest.raises(Rejected, match="did not arrive within") as refused:
        asyncio.run(reader.read(stream(1, 1000), encoding="", most=10))
    assert refused.value.status == 408
    assert reader.held == 0
