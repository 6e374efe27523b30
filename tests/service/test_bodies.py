"""Bodies under caps, before and after decompression."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable

import pytest
import zstandard

from vlmpack.service import bodies
from vlmpack.service.bodies import BodyReader, HTTPError, decompress
from vlmpack.service.limits import ServiceLimits

TEXT = b"receipts " * 5000


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def zstd_of_unknown_size(data: bytes) -> bytes:
    compressor = zstandard.ZstdCompressor().compressobj()
    return compressor.compress(data) + compressor.flush()


CODECS: dict[str, Callable[[bytes], bytes]] = {"zstd": zstd, "gzip": gzip.compress, "deflate": zlib.compress}


def read(pieces: list[bytes], *, encoding: str = "", most: int = 10**6, reader: BodyReader | None = None) -> bytes:
    async def stream() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    return asyncio.run((reader or BodyReader(limits=ServiceLimits())).read(stream(), encoding=encoding, most=most))


@pytest.mark.parametrize("encoding", ["", "identity", *CODECS])
def test_a_body_is_what_it_was(encoding: str) -> None:
    packed = CODECS.get(encoding, bytes)(TEXT)
    assert read([packed[:7], b"", packed[7:]], encoding=encoding) == TEXT


@pytest.mark.parametrize("pack", [*CODECS.values(), zstd_of_unknown_size])
def test_a_bomb_is_refused_before_it_is_large(pack: Callable[[bytes], bytes]) -> None:
    encoding = next((name for name, codec in CODECS.items() if codec is pack), "zstd")
    bomb = pack(bytes(256 * 2**20))
    tracemalloc.start()
    with pytest.raises(HTTPError, match="after decompression") as refused:
        decompress(bomb, encoding, 2**20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert refused.value.status == 413
    assert peak < 80 * 2**20


DAMAGE: tuple[Callable[[bytes], bytes], ...] = (
    lambda packed: packed[:-3],
    lambda packed: b"",
    lambda packed: b"\x00" + packed,
    lambda packed: packed + b"more",
    lambda packed: packed + packed,
)


@pytest.mark.parametrize("encoding", CODECS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_body_is_refused(damage: Callable[[bytes], bytes], encoding: str) -> None:
    with pytest.raises(HTTPError) as refused:
        decompress(damage(CODECS[encoding](TEXT)), encoding, 10**6)
    assert refused.value.status == 400


def test_a_window_that_no_client_needs_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=False)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    with pytest.raises(HTTPError) as refused:
        decompress(compressor.compress(TEXT) + compressor.flush(), "zstd", 10**6)
    assert refused.value.status == 400


def test_an_unknown_compression_is_refused_before_the_body() -> None:
    with pytest.raises(HTTPError, match="Content-Encoding 'br': send deflate, gzip, identity, zstd") as refused:
        read([b"x"], encoding="br")
    assert refused.value.status == 415


def test_a_large_body_is_read_to_its_end_and_its_beginning_is_kept() -> None:
    taken: list[bytes] = []

    async def stream() -> AsyncIterator[bytes]:
        for piece in [b"begin", b"x" * 20, b"end"]:
            taken.append(piece)
            yield piece

    with pytest.raises(HTTPError, match="more than 10 bytes") as refused:
        asyncio.run(BodyReader(limits=ServiceLimits()).read(stream(), encoding="", most=10))
    assert refused.value.status == 413
    assert refused.value.beginning.startswith(b"begin")
    assert taken[-1] == b"end"


def test_the_beginning_of_a_large_compressed_body_is_decompressed() -> None:
    with pytest.raises(HTTPError) as refused:
        read([zstd(TEXT)], encoding="zstd", most=20)
    assert TEXT.startswith(refused.value.beginning)
    with pytest.raises(HTTPError) as refused:
        read([zstd(TEXT)], encoding="zstd", most=1000)
    assert refused.value.beginning == TEXT[: bodies.BEGINNING_BYTES]


def test_all_bodies_together_stay_within_a_budget() -> None:
    reader = BodyReader(limits=ServiceLimits(bodies_bytes=10))
    with pytest.raises(HTTPError) as refused:
        read([b"x" * 11], reader=reader)
    assert refused.value.status == 429
    assert reader.held == 0
    assert read([b"x" * 10], reader=reader) == b"x" * 10


def test_a_slow_body_is_given_up() -> None:
    async def stream() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.Event().wait()

    reader = BodyReader(limits=ServiceLimits(body_seconds=0.01))
    with pytest.raises(HTTPError, match="did not arrive within") as refused:
        asyncio.run(reader.read(stream(), encoding="", most=10))
    assert refused.value.status == 408
    assert reader.held == 0
