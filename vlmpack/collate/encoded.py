"""One sample after encoding: token ids, what is learnt of them, and the patches of its media."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch

from vlmpack.layout import IGNORE, Grid

TEXT, IMAGE, VIDEO = 0, 1, 2
"""Values of `mm_token_type_ids`."""


@final
@dataclass(frozen=True, kw_only=True)
class Visual:
    """One image or one video as patches."""

    pixels: torch.Tensor
    """[P, C] floats, P = frames * rows * columns of `grid`."""
    grid: Grid
    """(frames, rows, columns) of patches."""
    seconds: float | None = None
    """Seconds from one grid of a video to the next; None: an image, or a family that is not told."""


@final
@dataclass(frozen=True, kw_only=True)
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

    @property
    def num_targets(self) -> int:
        """Labelled next-token targets: the first token is nobody's next token."""
        return int((self.labels[1:] != IGNORE).sum())
