"""Tokens that a model lets see later ones: runs of image tokens, or prefixes, as a family's descriptor names them.

    sample    t t i i i i t t i i t       an image token sees all tokens up to the end of its run
    runs          2 .. 6      8 .. 10

    types     0 0 0 0 0 0 0 1 1 1 1       a token of the prefix sees all of it, and each of the suffix those before it
    run       0 .. 7

A run of image tokens ends where text or another sample begins, as in the masks of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import numpy as np
import torch

from vlmpack.errors import LayoutError
from vlmpack.layout.device import on_host, require, to_device
from vlmpack.layout.row import PackedRow
from vlmpack.layout.segments import Segments

Runs = tuple[tuple[int, int], ...]
"""(start, stop) of each run, rising."""


def always(text_config: Any) -> bool:
    """Return True: every configuration of the family has it."""
    return True


@final
@dataclass(frozen=True, kw_only=True)
class ImageSpans:
    """Runs of image tokens that attend to each other in both directions."""

    layers: Literal["all", "sliding"] = "all"
    """The layers in which they do: all, or those with a sliding window."""
    enabled: Callable[[Any], bool] = always
    """Returns, of the text part's configuration, whether a model has them."""
    beyond_window: bool = False
    """True if tokens of a run also see those of it that lie out of the window of a layer that has one."""
    noun: ClassVar[str] = "an image"
    """For people."""

    def is_in(self, window: int | None) -> bool:
        """Return whether layers with this window have spans."""
        return self.layers == "all" or window is not None

    def of_sample(self, sample: Mapping[str, torch.Tensor], types_L: torch.Tensor) -> Runs:
        """Find the runs of a sample; `types_L`: [L], 0 text, 1 image, 2 video."""
        return media_runs(types_L.cpu().numpy())

    def of_row(self, row: PackedRow, types_1T: torch.Tensor, known: Sequence[Runs]) -> Runs:
        """Find the runs of a row (`runs_of_row`)."""
        if row.media.pixel_values is None:  # it has no placeholders either
            return ()
        return runs_of_row(types_1T, row.segments, known)


@final
@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Tokens at the beginning of each sample that attend to each other in both directions, in all layers.

    A column of the batch, of 0 on the prefix and 1 on what follows, gives their number; no padding is read. Attention
    modules of such a model may call themselves not causal: its own code always passes them a mask.
    """

    column: str = "token_type_ids"
    """Name of that column."""
    beyond_window: bool = True
    """True if the tokens of a prefix also see those of it that lie out of the window."""
    noun: ClassVar[str] = "a prefix"
    """For people."""

    def enabled(self, text_config: Any) -> bool:
        """Return True: every configuration of the family has it."""
        return True

    def is_in(self, window: int | None) -> bool:
        """Return True: layers with any window have it."""
        return True

    def of_sample(self, sample: Mapping[str, torch.Tensor], types_L: torch.Tensor) -> Runs:
        """Find the prefix of a sample in its column; the kinds of its tokens do not matter."""
        return prefix_run(sample[self.column].cpu().numpy())

    def of_row(self, row: PackedRow, types_1T: torch.Tensor, known: Sequence[Runs]) -> Runs:
        """Find the prefix of each sample of a row.

        Args:
            row: with the column among its `extras`.
            types_1T: the kinds of its tokens, which do not matter.
            known: the prefix of each sample by the host metadata, which spares a row on an accelerator a host–device
                sync; empty: not known.

        Raises:
            LayoutError: the row has no such column, or a sample's is not zeros and then ones, or not what the metadata
                has (an accelerator asserts the last, asynchronously).
        """
        column_1T = row.extras.get(self.column)
        if column_1T is None:
            raise LayoutError(
                f"{self.column} is missing, which says how many tokens of each sample see each other in both "
                f"directions: give it, 0 on the prompt and its images and 1 on the answer, as the model's own "
                "processor returns it of suffix=... (VLMCollator adds it)"
            )
        if column_1T.shape != row.input_ids.shape or column_1T.is_floating_point() or column_1T.is_complex():
            raise LayoutError(
                f"{self.column} is {column_1T.dtype} {list(column_1T.shape)} but input_ids is "
                f"{list(row.input_ids.shape)}; it has a whole number for each token"
            )
        return prefixes_of_row(column_1T, row.segments, known, self.column)


Sees = ImageSpans | Prefix
"""The tokens that a model lets see later ones."""


def media_runs(types_L: np.ndarray) -> Runs:
    """Find the runs of media tokens of one sample.

    Args:
        types_L: [L], 0 text, 1 image, 2 video.
    """
    return _runs(np.where(types_L > 0, 0, -1))


TypeRuns = tuple[tuple[int, int, int], ...]
"""(start, stop, type) of each run, rising."""


def type_runs(types_L: np.ndarray) -> TypeRuns:
    """Find the runs of each type of one sample, but for text.

    Args:
        types_L: [L], 0 text, 1 image, 2 video, 3 audio.
    """
    runs = _runs(np.where(types_L > 0, types_L, -1))
    return tuple((start, stop, int(types_L[start])) for start, stop in runs)


def types_on_host(types_1T: torch.Tensor, segments: Segments, known: Sequence[TypeRuns]) -> np.ndarray:
    """Read the types of a row's tokens, int64 [T]; what stands on padding does not matter.

    Args:
        types_1T: [1, T], 0 text, 1 image, 2 video, 3 audio.
        segments: the row's samples.
        known: `type_runs` of each sample by the host metadata, which spare a row on an accelerator a host–device sync;
            empty: not known.

    Raises:
        LayoutError: the metadata has others than the row (an accelerator asserts the same, asynchronously).
    """
    if len(known) != segments.num_samples or on_host(types_1T):
        return types_1T[0].cpu().numpy()
    types_T = np.zeros(segments.total, np.int64)
    for (first, _), runs in zip(segments.spans, known, strict=False):
        for start, stop, kind in runs:
            types_T[first + start : first + stop] = kind
    _require_equal(types_1T[0], types_T, segments, "type_runs", "the types of the row's tokens")
    return types_T


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
    _require_equal(types_1T[0] > 0, expected_T, segments, "media_runs", "where this row has media tokens")
    return tuple(runs)


def prefix_run(column_L: np.ndarray) -> Runs:
    """Find the prefix of one sample in its column, [L], 0 on the prefix."""
    length = int(np.argmax(np.append(column_L, 1) != 0))
    return ((0, length),) if length else ()


def prefixes_of_row(column_1T: torch.Tensor, segments: Segments, known: Sequence[Runs], name: str) -> Runs:
    """Find the prefix of each sample of a row in its column, as `Prefix.of_row` does; `name`: of the column."""
    compared = len(known) == segments.num_samples and not on_host(column_1T)
    column_T = np.zeros(0) if compared else column_1T[0].cpu().numpy()
    runs, expected_T = [], np.zeros(segments.total, np.int64)
    for sample, (start, stop) in enumerate(segments.spans):
        of_sample = known[sample] if compared else prefix_run(column_T[start:stop])
        length = of_sample[0][1] if of_sample else 0
        expected_T[start + length : stop] = 1
        runs += [(start, start + length)] if length else []
        if not compared and (column_T[start:stop] != expected_T[start:stop]).any():
            raise LayoutError(
                f"sample {sample}: its {name} are {_shown(column_T[start:stop])}, which is no prefix and its suffix; "
                "they have to be 0 from its first token to the last of the prompt, and 1 from there on"
            )
    if compared:
        _require_equal(column_1T[0], expected_T, segments, "media_runs", f"the prefixes of {name}")
    return tuple(runs)


def _require_equal(of_row_T: torch.Tensor, known_T: np.ndarray, segments: Segments, name: str, what: str) -> None:
    """Compare metadata, 0 on padding, with the row where that lies; what stands on its padding does not matter."""
    device = of_row_T.device
    agree_T = of_row_T.masked_fill(segments.padding_mask(device), 0) == to_device(known_T, device)
    require(agree_T.all(), f"{name} of the host metadata are not {what}; leave the metadata out", LayoutError)


def _shown(values: np.ndarray) -> str:
    return f"[{', '.join(map(str, values[:16].tolist()))}{', ...' if len(values) > 16 else ''}]"


def _runs(number_T: np.ndarray) -> Runs:
    """Runs of equal numbers that are not -1."""
    edges = np.flatnonzero(np.diff(number_T, prepend=-1, append=-1))
    starts, stops = edges[:-1], edges[1:]
    is_run = number_T[starts] >= 0
    return tuple(zip(starts[is_run].tolist(), stops[is_run].tolist(), strict=True))
