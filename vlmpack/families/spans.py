"""Tokens that attend to later tokens: bidirectional image tokens, or prefixes, as a family's descriptor says.

    sample    t t i i i i t t i i t       an image token attends to all tokens up to the end of its run
    runs          2 .. 6      8 .. 10

    types     0 0 0 0 0 0 0 1 1 1 1       prefix tokens attend to the whole prefix; the suffix is causal
    run       0 .. 7

A run of image tokens ends where text or another sample begins, as in the masks of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
import torch

from vlmpack.errors import LayoutError
from vlmpack.layout.device import require, to_device
from vlmpack.layout.media import MediaTable, Runs, runs_of_equal
from vlmpack.layout.row import PackedRow
from vlmpack.layout.segments import Segments


def always(text_config: Any) -> bool:
    """Return True: all models of the family have bidirectional tokens."""
    return True


@final
@dataclass(frozen=True, kw_only=True)
class ImageSpans:
    """Runs of image tokens that attend to each other in both directions."""

    layers: Literal["all", "sliding"] = "all"
    """The layers with bidirectional runs: all, or only layers with a sliding window."""
    enabled: Callable[[Any], bool] = always
    """Function of the text part's configuration; returns whether the model has bidirectional runs."""
    beyond_window: bool = False
    """True if tokens of a run also attend to its tokens outside the layer's sliding window."""

    def is_in(self, window: int | None) -> bool:
        """Return whether layers with this sliding window have bidirectional runs; None: no window."""
        return self.layers == "all" or window is not None

    def of_sample(self, sample: Mapping[str, torch.Tensor], types_L: torch.Tensor) -> Runs:
        """Find the runs of a sample; `types_L`: [L], 0 text, 1 image, 2 video."""
        return media_runs(types_L.cpu().numpy())

    def of_row(self, row: PackedRow, table: MediaTable) -> Runs:
        """Find the runs of a row; no run crosses a sample boundary. `table`: the row's media."""
        return table.runs(row.segments)


@final
@dataclass(frozen=True, kw_only=True)
class Prefix:
    """A bidirectional prefix of each sample: its tokens attend to each other in both directions, in all layers.

    A column of the batch is 0 on the prefix and 1 after it; its values on padding are ignored. Attention modules of
    such a model may have `is_causal=False`, because the model's own code always passes them a mask.
    """

    column: str = "token_type_ids"
    """Name of that column."""
    beyond_window: bool = True
    """True if tokens of a prefix also attend to its tokens outside the sliding window."""

    def enabled(self, text_config: Any) -> bool:
        """Return True: all models of the family have a prefix."""
        return True

    def is_in(self, window: int | None) -> bool:
        """Return True: all layers have a prefix."""
        return True

    def of_sample(self, sample: Mapping[str, torch.Tensor], types_L: torch.Tensor) -> Runs:
        """Find the prefix of a sample in its column; `types_L` is ignored."""
        length = prefix_length(sample[self.column].cpu().numpy())
        return ((0, length),) if length else ()

    def of_row(self, row: PackedRow, table: MediaTable) -> Runs:
        """Find the prefix of each sample of a row.

        Args:
            row: a row with the column in its `extras`. On an accelerator, a row without `HostMetadata.prefixes` costs
                one host–device sync.
            table: ignored.

        Raises:
            LayoutError: the column is missing or malformed, is not zeros and then ones in each sample, or differs from
                the metadata (compared on an accelerator in an asynchronous assertion).
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
        return prefixes_of_row(column_1T, row.segments, row.known_metadata.prefixes, self.column)


Bidirectional = ImageSpans | Prefix
"""The tokens of a sample that attend to later tokens."""


def media_runs(types_L: np.ndarray) -> Runs:
    """Find the runs of media tokens of one sample.

    Args:
        types_L: [L], 0 text, 1 image, 2 video.
    """
    return runs_of_equal(np.where(types_L > 0, 0, -1))


def prefix_length(column_L: np.ndarray) -> int:
    """Return the length of a sample's prefix from its column [L], which is 0 on the prefix."""
    return int(np.argmax(np.append(column_L, 1) != 0))


def prefixes_of_row(column_1T: torch.Tensor, segments: Segments, known: Sequence[int], name: str) -> Runs:
    """Find the prefix of each sample of a row, as `Prefix.of_row` does.

    Args:
        column_1T: the row's column.
        segments: the row's boundaries.
        known: prefix lengths of the host metadata; (): not known.
        name: name of the column, for messages.
    """
    message = f"prefixes of the host metadata are not those of {name}; leave the metadata out"
    spans = segments.spans[: segments.num_samples]
    if len(known) not in (0, len(spans)):
        raise LayoutError(message)
    if not known:
        column_T = column_1T[0].cpu().numpy()
        known = [prefix_length(column_T[start:stop]) for start, stop in spans]
        message = (
            f"{name} are no prefix and its suffix; they have to be 0 from a sample's first token to the last of the "
            "prompt, and 1 from there on"
        )
    expected_T = np.zeros(segments.total, np.int64)
    for (start, stop), length in zip(spans, known, strict=True):
        expected_T[start + length : stop] = 1
    device = column_1T.device
    agree_T = (column_1T[0] == to_device(expected_T, device)) | segments.padding_mask(device)
    require(agree_T, message, LayoutError, where=segments.where)
    return tuple((start, start + length) for (start, _), length in zip(spans, known, strict=True) if length)
