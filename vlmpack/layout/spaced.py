"""Put zeros between the segments of a row, for layers that run over all of it but restart at its boundaries.

Lengths [3, 5, 2], a convolution that reads 3 tokens before each token:

    row       a a a .  b b b b b . . .  c c . .
    spaced    a a a 0 0 0  b b b b b 0 0 0  c c
    edges     [0, 6, 14, 16]

Before a segment's first token the convolution reads zeros, as it does before a sample alone. The zeros end the slot of
the segment before them, so they lie behind all that is ever read of it. `split` and `join` are inverses of each other
on real tokens; `join` puts zeros on padding.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import final

import numpy as np
import torch

from vlmpack.layout.arrays import ranges
from vlmpack.layout.buckets import onto_row
from vlmpack.layout.segments import Segments


@final
@dataclass(frozen=True, kw_only=True)
class Spaced:
    """Every segment of a row that has tokens, `reach` zeros between one and the next."""

    segments: Segments
    """The row."""
    reach: int
    """Tokens that a convolution reads before each token: its width less one."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Real tokens of each segment that has any, n of them."""
        return tuple(length for length in self.segments.lengths if length)

    @property
    def tokens(self) -> int:
        """Its width W, zeros included: what a layer computes."""
        return self.segments.num_tokens + self.reach * max(len(self.lengths) - 1, 0)

    @property
    def edges(self) -> tuple[int, ...]:
        """Where each segment starts, and the end: n + 1 values, no stretch between two of them empty.

        They cover all of it: kernels leave what lies behind the last boundary unwritten.
        """
        starts = accumulate((length + self.reach for length in self.lengths[:-1]), initial=0)
        return (*starts, self.tokens) if self.lengths else (0,)

    def split(self, row_1TD: torch.Tensor) -> list[torch.Tensor]:
        """[1, T, D] to a list of one [1, W, D]."""
        real_RD = row_1TD[0]
        if self.segments.has_gaps:
            real_RD = real_RD.index_select(0, self.segments.real_index(real_RD.device))
        if len(self.lengths) > 1:
            spaced_WD = real_RD.new_zeros(self.tokens, real_RD.shape[-1])
            real_RD = spaced_WD.index_copy(0, self._places(real_RD.device), real_RD)
        return [real_RD[None]]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """A list of one [1, W, D] to [1, T, D], zeros on padding."""
        (real_1RD,) = parts
        if len(self.lengths) > 1:
            real_1RD = real_1RD.index_select(1, self._places(real_1RD.device))
        return onto_row(real_1RD, self.segments)

    def cu_seqlens(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """`edges` as int32 [n + 1]."""
        return self._derived("edges", device, lambda: np.asarray(self.edges, np.int32))

    def chunks(self, size: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """int32 [C, 2]: (segment, chunk of it) of each stretch of at most `size` tokens that no edge cuts."""
        return self._derived(("chunks", size), device, partial(self._make_chunks, size))

    def _places(self, device: torch.device) -> torch.Tensor:
        """int64 [R]: where each real token lies."""
        return self._derived("places", device, self._make_places)

    def _derived(self, what: Hashable, device: torch.device | str, make: Callable[[], np.ndarray]) -> torch.Tensor:
        return self.segments.derived(("spaced", self.reach, what), device, make)

    def _make_places(self) -> np.ndarray:
        return ranges(np.asarray(self.edges[:-1], np.int64), np.asarray(self.lengths, np.int64))

    def _make_chunks(self, size: int) -> np.ndarray:
        counts = -(-np.diff(self.edges) // size)
        return np.stack([np.repeat(np.arange(len(counts)), counts), ranges(0, counts)], 1).astype(np.int32)
