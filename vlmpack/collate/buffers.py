"""Memory for the pixels of batches, reused once a batch is gone.

Pixels take 450 times as many bytes as ids. Joining the patches of a batch in new memory costs several times the copy
itself, because the system hands out empty pages one by one and takes them back with every batch. It costs even more in
a DataLoader worker, where torch copies anything outside shared memory once again, into new shared memory.

Here, patches are joined in blocks of memory that stay allocated. A block is free again when nothing refers to it:

    block    o r . . . . . .   p p p p p p p p p p p ...      header of 64 bytes, then the pixels
             │ └ 1 while the receiver (the main process that the pixels were sent to) holds them
             └── 1 while the owner (the process that joined the pixels) holds them

"Holds" means that something refers to the memory itself: the batch's tensor, a view of it, or a tensor saved by
autograd. Whether some variable still exists does not matter. No process ever waits: if no block is free, new memory is
allocated.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from functools import partial
from math import isfinite, prod
from multiprocessing.reduction import ForkingPickler
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

HEADER = 64
"""Bytes before the pixels, so that they start at a cache line."""
GRAIN = 2**21
"""Blocks are multiples of 2 MiB, so that batches of similar size can share them."""
PIECE = 2**16
"""Number of values that are copied and then checked while in a core's cache: 256 KiB of float32."""
ROW = 2**12
"""Number of values in one dot product, for checking a piece."""
OWNER, RECEIVER = 0, 1
"""Bytes of the header: whether the process that joined the pixels holds them, and whether their receiver does."""


class NotFinite(Exception):  # noqa: N818 (never leaves the package: the collator refuses the sample with these pixels)
    """Pixels hold NaN or infinity."""


class PixelBuffers:
    """Blocks of memory in which the pixels of batches are joined in turn.

    A DataLoader worker has its own blocks in shared memory, so its batches reach the main process without a copy.

    Args:
        most: largest number of blocks to keep, and so of batches alive at a time without new memory. A training loop
            needs two or three, a DataLoader worker `prefetch_factor` more. 0: new memory every time.
    """

    def __init__(self, most: int = 8) -> None:
        self.most = most
        self._blocks: list[torch.Tensor] = []
        self._owner = os.getpid()
        self._taking = Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"most": self.most}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    @property
    def held(self) -> int:
        """Number of blocks that are still referred to."""
        return sum(not _is_free(block) for block in self._blocks)

    @property
    def kept(self) -> int:
        """Number of blocks, free or held."""
        return len(self._blocks)

    def join(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Join parts [P_i, ...] into [P, ...] of a dtype. Copies once, or not at all if a single part can stay.

        Args:
            parts: at least one tensor, on the CPU.
            dtype: dtype of the result.

        Raises:
            NotFinite: a part holds NaN or infinity.
        """
        in_worker = get_worker_info() is not None
        if len(parts) == 1 and not in_worker:
            joined = parts[0].detach().to(dtype)
            finite = [is_finite(parts[0].detach())]
        else:
            joined = self._take((sum(map(len, parts)), *parts[0].shape[1:]), dtype, shared=in_worker)
            places = joined.split([len(part) for part in parts])
            finite = [_copy(part.detach(), place) for part, place in zip(parts, places, strict=True)]
        if not all(finite):
            raise NotFinite
        return joined

    def _take(self, shape: tuple[int, ...], dtype: torch.dtype, *, shared: bool) -> torch.Tensor:
        if self._owner != os.getpid():  # forked: these blocks belong to the parent, which cannot see our use of them
            self.__init__(self.most)
        with self._taking:  # if two threads found the same block free, one would overwrite the other's pixels
            block = self._free_block(HEADER + prod(shape) * dtype.itemsize, shared=shared)
            return torch.empty(shape, dtype=dtype) if block is None else _lend(block, shape, dtype, shared=shared)

    def _free_block(self, size: int, *, shared: bool) -> torch.Tensor | None:
        """Return a free block of at least `size` bytes, or a new one that is added or replaces a smaller free one."""
        free = [block for block in self._blocks if _is_free(block)]
        fitting = [block for block in free if len(block) >= size]
        if fitting:
            return min(fitting, key=len)
        if free:
            self._blocks = [block for block in self._blocks if block is not free[0]]
        elif len(self._blocks) >= self.most:
            return None
        block = torch.zeros(-(-size // GRAIN) * GRAIN, dtype=torch.uint8)
        self._blocks.append(block.share_memory_() if shared else block)
        return block


class Lent(torch.Tensor):
    """Pixels in a shared block of a worker, which the main process takes over without a copy.

    Results computed from it are plain tensors.
    """

    block: torch.Tensor | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]


def _copy(part: torch.Tensor, place: torch.Tensor) -> bool:
    """Copy into other memory or another dtype, and return whether the part is finite.

    With one thread, as in a DataLoader worker, each piece is checked while it is in the cache: a separate pass would
    cost half a copy. With several threads this gains nothing.
    """
    if torch.get_num_threads() > 1:
        place.copy_(part)  # `torch.cat` into another type would go through a third tensor
        return is_finite(part)
    values, place = part.contiguous().view(-1), place.view(-1)
    if values.dtype == place.dtype == torch.float32:
        finite = _copy_floats(values.numpy(), place.numpy())
    else:
        finite = _copy_values(values, place)
    return finite or is_finite(part)


def _copy_floats(source: np.ndarray, target: np.ndarray) -> bool:
    """Copy float32 [N] with numpy, whose calls cost less than torch's. May also return False if a square overflows.

    A row's product with itself is finite only if the row is. Rows are short, so that BLAS starts no threads for them.
    """
    whole = len(source) - len(source) % PIECE
    pieces = source[:whole].reshape(-1, PIECE // ROW, 1, ROW)
    places = target[:whole].reshape(pieces.shape)
    squares = np.empty((len(pieces), PIECE // ROW, 1, 1), np.float32)
    with np.errstate(all="ignore"):
        for piece, place, square in zip(pieces, places, squares, strict=True):
            place[...] = piece
            np.matmul(piece, piece.swapaxes(1, 2), out=square)
    target[whole:] = source[whole:]
    return bool(np.isfinite(squares).all() and np.isfinite(source[whole:]).all())


def _copy_values(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Copy [N] with a change of dtype, or another dtype than float32. May also return False if the sum overflows."""
    total = 0.0
    with torch.inference_mode():
        for piece, place in zip(source.split(PIECE), target.split(PIECE), strict=True):
            place.copy_(piece)
            total += piece.sum().item()
    return isfinite(total)


def is_finite(pixels: torch.Tensor) -> bool:
    """Return whether pixels are finite, without a mask of their size: a finite sum rules out NaN and infinity."""
    return isfinite(pixels.sum(dtype=torch.float32)) or bool(pixels.isfinite().all())


def _is_free(block: torch.Tensor) -> bool:
    return not block[: RECEIVER + 1].any()


def _lend(block: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, *, shared: bool) -> torch.Tensor:
    pixels = _hold(block, shape, dtype, holder=OWNER)
    if not shared:
        return pixels
    lent = pixels.as_subclass(Lent)
    lent.block = block
    return lent


def _hold(block: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, *, holder: int) -> torch.Tensor:
    """Return a tensor in the block, and mark the block as held until nothing refers to the memory any more.

    The tensor is made from an array that owns its memory. The array is released together with the last tensor that has
    this memory, whichever that is.
    """
    memory = block.numpy()
    memory[holder] = 1
    array = memory[HEADER : HEADER + prod(shape) * dtype.itemsize]
    weakref.finalize(array, partial(_let_go, memory[: RECEIVER + 1], holder, os.getpid())).atexit = False
    return torch.from_numpy(array).view(dtype).view(shape)


def _let_go(header: np.ndarray, holder: int, process: int) -> None:
    """Mark a block as free, except in a forked child, which inherits batches that its parent still holds."""
    if os.getpid() == process:
        header[holder] = 0


def _send(lent: Lent) -> tuple[Any, ...]:
    """Send pixels to another process in their own block; to a second receiver, send a copy."""
    block, lent.block = lent.block, None
    if block is None:
        return _as_it_is, (lent.as_subclass(torch.Tensor).clone(),)
    block.numpy()[RECEIVER] = 1
    return _receive, (block, tuple(lent.shape), lent.dtype)


def _receive(block: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return _hold(block, shape, dtype, holder=RECEIVER)


def _as_it_is(pixels: torch.Tensor) -> torch.Tensor:
    return pixels


ForkingPickler.register(Lent, _send)
