"""Tokens that a model lets see later ones: runs of image tokens, as a family's descriptor names them.

    sample    t t i i i i t t i i t       an image token sees all tokens up to the end of its run
    runs          2 .. 6      8 .. 10

A run ends where text or another sample begins, as in the masks of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
import torch

from vlmpack.errors import LayoutError
from vlmpack.layout import Segments, on_host, require, to_device


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


Runs = tuple[tuple[int, int], ...]
"""(start, stop) of each run, rising."""


def media_runs(types_L: np.ndarray) -> Runs:
    """Find the runs of media tokens of one sample.

    Args:
        types_L: [L], 0 text, 1 image, 2 video.
    """
    return _runs(np.where(types_L > 0, 0, -1))


def runs_of_row(types_1T: torch.Tensor, segments: Segments, known: Sequence[Runs]) -> Runs:
    """Find the runs of media tokens of a row, none of them across two samples.

    Args:
        types_1T: [1, T], 0 text, 1 image, 2 video; what stands on padding does not matter.
        segments: the row's samples.
        known: the runs of each sample by the host metadata, which spare a row on an accelerator a host–device sync;
            empty: not known.

    Raises:
        LayoutError: the metadata has others than the row (an accelerator asserts the same, asynchronously).
    """
    if len(known) != segments.num_samples or on_host(types_1T):
        of_sample_T = segments.seq_idx().numpy()
        is_media_T = (types_1T[0].cpu().numpy() > 0) & ~segments.padding_mask().numpy()
        return _runs(np.where(is_media_T, of_sample_T, -1))
    runs = [(at + start, at + stop) for (at, _), of in zip(segments.spans, known, strict=False) for start, stop in of]
    expected_T = np.zeros(segments.total, bool)
    for start, stop in runs:
        expected_T[start:stop] = True
    device = types_1T.device
    is_media_T = (types_1T[0] > 0) & ~segments.padding_mask(device)
    message = "media_runs of the host metadata are not where this row has media tokens; leave the metadata out"
    require((is_media_T == to_device(expected_T, device)).all(), message, LayoutError)
    return tuple(runs)


def _runs(number_T: np.ndarray) -> Runs:
    """Runs of equal numbers that are not -1."""
    edges = np.flatnonzero(np.diff(number_T, prepend=-1, append=-1))
    starts, stops = edges[:-1], edges[1:]
    is_run = number_T[starts] >= 0
    return tuple(zip(starts[is_run].tolist(), stops[is_run].tolist(), strict=True))
