"""PixelBuffers: memory that batches use in turn, and never two at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.reduction import ForkingPickler
from threading import Barrier, BrokenBarrierError

import pytest
import torch
from cases import pairs
from torch.utils.data import DataLoader

from vlmpack.collate.buffers import PIECE, Lent, NotFinite, PixelBuffers, _is_free, _lend

WIDTH = 5


def parts(*rows: int, start: int = 0) -> list[torch.Tensor]:
    """Patches that are all different, also from those of another `start`."""
    total = torch.arange(sum(rows) * WIDTH, dtype=torch.float32).view(-1, WIDTH) + 1000 * start
    return list(total.split(rows))


# ---------------------------------------------------------------------- in one process


def test_a_batch_that_is_gone_leaves_its_memory_to_the_next() -> None:
    buffers, places = PixelBuffers(8), set()
    for start in range(5):
        joined = buffers.join(parts(3, 4, start=start), torch.float32)
        places.add(joined.data_ptr())
        del joined
    assert (len(places), buffers.kept, buffers.held) == (1, 1, 0)


def test_a_view_and_what_autograd_saved_keep_the_memory() -> None:
    buffers, weight = PixelBuffers(8), torch.ones(WIDTH, requires_grad=True)
    view = buffers.join(parts(3, 4), torch.float32)[2:4].view(-1)
    loss = (buffers.join(parts(3, 4, start=1), torch.float32) @ weight).sum()
    other = buffers.join(parts(3, 4, start=2), torch.float32)
    assert (buffers.held, len(other)) == (3, 7)
    loss.backward()
    assert torch.equal(view, torch.cat(parts(3, 4))[2:4].view(-1))
    assert torch.equal(weight.grad, torch.cat(parts(3, 4, start=1)).sum(0))
    del view
    assert buffers.held == 1


def test_whatever_is_kept_and_dropped_no_batch_changes() -> None:
    buffers, chance, alive = PixelBuffers(4), random.Random(0), {}
    for start in range(200):
        rows = chance.randint(1, 9), chance.randint(1, 9)
        alive[start] = rows, buffers.join(parts(*rows, start=start), torch.float32)
        for gone in chance.sample(sorted(alive), k=min(len(alive), chance.randint(0, 2))):
            del alive[gone]
        assert all(torch.equal(one, torch.cat(parts(*rows, start=at))) for at, (rows, one) in alive.items())
    assert buffers.kept == 4


# ---------------------------------------------------------------------- looked at on the way


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """A DataLoader's worker has one."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


LONG = PIECE // WIDTH + 3
"""Rows of a part that ends in a second, shorter piece."""


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [(LONG, 2, LONG), (LONG,)])
def test_every_piece_is_copied(rows: tuple[int, ...], dtype: torch.dtype, source: torch.dtype) -> None:
    torch.manual_seed(0)
    given = [torch.randn(n, WIDTH).to(source) for n in rows]
    for most in (0, 8):
        joined = PixelBuffers(most).join(given, dtype)
        assert type(joined) is torch.Tensor
        assert torch.equal(joined, torch.cat(given).to(dtype))


@pytest.mark.usefixtures("threads")
@pairs(
    count=[1, 3],
    source=[torch.float32, torch.float16, torch.bfloat16],
    at=[0, LONG // 2, LONG - 1],
    value=[float("nan"), float("inf"), float("-inf")],
)
def test_a_part_that_is_not_finite_is_refused(count: int, source: torch.dtype, at: int, value: float) -> None:
    given = [torch.randn(LONG, WIDTH).to(source) for _ in range(count)]
    buffers = PixelBuffers(8)
    buffers.join(given, torch.float32)
    given[-1][at, WIDTH - 1] = value
    with pytest.raises(NotFinite):
        buffers.join(given, torch.float32)
    assert buffers.held == 0


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("source", [torch.float32, torch.float16])
def test_large_values_whose_sum_overflows_are_still_finite(source: torch.dtype) -> None:
    given = [torch.full((LONG, WIDTH), torch.finfo(source).max, dtype=source)] * 2
    assert PixelBuffers(8).join(given, source).isfinite().all()


# ---------------------------------------------------------------------- from a worker


class Join:
    """A collate function: a batch whose values tell its number."""

    def __init__(self) -> None:
        self.buffers = PixelBuffers(8)

    def __call__(self, numbers: list[int]) -> dict:
        joined = self.buffers.join(parts(3, 4, start=numbers[0]), torch.float32)
        return {"pixel_values": joined, "kept": self.buffers.kept, "number": numbers[0]}


def loader(batches: int = 24, **options) -> DataLoader:
    return DataLoader(range(batches), collate_fn=Join(), num_workers=1, multiprocessing_context="fork", **options)


def is_right(batch: dict) -> bool:
    pixels = batch["pixel_values"]
    return type(pixels) is torch.Tensor and torch.equal(pixels, torch.cat(parts(3, 4, start=batch["number"])))


@pytest.mark.dist
def test_batches_that_are_dropped_hand_their_blocks_back() -> None:
    seen = [(is_right(batch), batch["kept"]) for batch in loader()]
    assert len(seen) == 24 and all(right for right, _ in seen)
    assert max(kept for _, kept in seen) < 8


@pytest.mark.dist
def test_batches_that_are_kept_never_change() -> None:
    batches = list(loader())
    assert len(batches) == 24 and all(map(is_right, batches))
    assert batches[-1]["kept"] == 8


def test_what_is_computed_from_lent_pixels_is_a_plain_tensor() -> None:
    lent = _lend(torch.zeros(2**12, dtype=torch.uint8).share_memory_(), (3, WIDTH), torch.float32, shared=True)
    assert type(lent) is Lent
    assert [type(one) for one in (lent + 1, lent[1:], lent.bfloat16())] == [torch.Tensor] * 3


def test_a_second_receiver_gets_a_copy() -> None:
    block = torch.zeros(2**12, dtype=torch.uint8).share_memory_()
    lent = _lend(block, (3, WIDTH), torch.float32, shared=True)
    first, second = (ForkingPickler.loads(ForkingPickler.dumps(lent)) for _ in range(2))
    first.fill_(7)
    assert lent.eq(7).all() and not second.eq(7).any()
    del lent, first
    assert not block[:2].any()


def forget(batches: list[dict]) -> None:
    batches.clear()


@pytest.mark.dist
def test_a_child_that_drops_what_it_inherited_gives_nobody_s_block_away() -> None:
    batches = iter(loader(persistent_workers=True))
    kept = [next(batches) for _ in range(4)]
    child = get_context("fork").Process(target=forget, args=(kept,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert all(is_right(next(batches)) for _ in range(16))
    assert all(map(is_right, kept))


def test_threads_are_lent_different_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both look for a free block at the same time, and would find the same."""
    buffers = PixelBuffers(8)
    first = buffers.join(parts(3, 4), torch.float32)
    del first
    together = Barrier(2)

    def slowly(block: torch.Tensor) -> bool:
        free = _is_free(block)
        with suppress(BrokenBarrierError):
            together.wait(timeout=0.2)
        return free

    monkeypatch.setattr("vlmpack.collate.buffers._is_free", slowly)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda start: buffers.join(parts(3, 4, start=start), torch.float32), (0, 100))
    assert torch.equal(one, torch.cat(parts(3, 4)))
    assert torch.equal(other, torch.cat(parts(3, 4, start=100)))
