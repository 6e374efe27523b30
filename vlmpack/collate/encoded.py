"""One sample after encoding: token ids, what is learnt of them, and its media, as patches or only their grids."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
import torch

from vlmpack.collate.holes import MediaRef
from vlmpack.layout import IGNORE, Grid


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Visual:
    """One image or one video, cut into patches or only measured."""

    grid: Grid
    """(frames, rows, columns) of patches."""
    pixels: torch.Tensor | None
    """[P, C] floats, P = frames * rows * columns of `grid`; None: only measured."""
    seconds: float | None = None
    """Seconds from one grid of a video to the next; None: an image, or a family that is not told."""
    timestamps: tuple[float, ...] = ()
    """Seconds of each grid of a video, which some families write into the text; (): an image."""
    source: MediaRef | None = None
    """Where it was read from; None: it came as patches."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """n tokens, all on the host."""

    input_ids: np.ndarray
    """int64 [n]."""
    labels: np.ndarray
    """int64 [n], not shifted; -100 where nothing is learnt."""
    types: np.ndarray
    """int64 [n]: 0 text, 1 image, 2 video."""
    images: tuple[Visual, ...] = ()
    """In the order of their placeholders."""
    videos: tuple[Visual, ...] = ()
    """In the order of their placeholders."""
    sample_id: int | str | None = None
    """The sample's own id, where it has one."""

    @property
    def num_tokens(self) -> int:
        """n."""
        return len(self.input_ids)

    @cached_property
    def num_targets(self) -> int:
        """Labelled next-token targets: the first token is nobody's next token."""
        return int(np.count_nonzero(self.labels[1:] != IGNORE))
