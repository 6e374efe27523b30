"""Tokens that a model lets see later ones: runs of image tokens, as a family's descriptor names them.

    sample    t t i i i i t t i i t       an image token sees all tokens up to the end of its run
    runs          2 .. 6      8 .. 10

A run ends where text or another sample begins, as in the masks of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np

from vlmpack.layout import Segments


def always(text_config: Any) -> bool:
    """Return True: every configuration of the family has it."""
    return True


@final
@dataclass(frozen=True, kw_only=True)
class ImageSpans:
    """Runs of image tokens that attend to each other in both directions, within the window of a layer that has one."""

    layers: Literal["all", "sliding"] = "all"
    """The layers in which they do: all, or those with a sliding window."""
    enabled: Callable[[Any], bool] = always
    """Returns, of the text part's configuration, whether a model has them."""

    def is_in(self, window: int | None) -> bool:
        """Return whether layers with this window have spans."""
        return self.layers == "all" or window is not None


def runs_of(is_media_T: np.ndarray, segments: Segments) -> tuple[tuple[int, int], ...]:
    """Find the runs of media tokens of a row: (start, stop) of each, rising, none of them across two samples.

    Args:
        is_media_T: bool [T]; what stands on padding does not matter.
        segments: the row's samples.
    """
    of_sample_T = segments.seq_idx().numpy()
    number_T = np.where(is_media_T & ~segments.padding_mask().numpy(), of_sample_T, -1)
    edges = np.flatnonzero(np.diff(number_T, prepend=-1, append=-1))
    starts, stops = edges[:-1], edges[1:]
    is_run = number_T[starts] >= 0
    return tuple(zip(starts[is_run].tolist(), stops[is_run].tolist(), strict=True))
