"""One sample after encoding: token ids, what is learnt of them, and its media, as patches or only their grids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
import torch

from vlmpack.collate.columns import Kind, MediaRef
from vlmpack.collate.processor_metadata import ProcessorMetadata
from vlmpack.errors import Refusal
from vlmpack.layout import IGNORE, IMAGE, VIDEO, Grid


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


def check_sample(sample: Encoded, metadata: ProcessorMetadata) -> None:
    """Raise a `Refusal` for the first thing that is wrong with a sample; reasons are listed in the room's README."""
    check_ids(sample.input_ids, metadata)
    _check_labels(sample, metadata)
    for visual in (*sample.images, *sample.videos):
        _check_grid(visual, metadata)
        check_pixels(visual, metadata)
    highest = sample.types.max(initial=0)  # most samples have no video, and many no image: nothing to look for
    if sample.images or highest >= IMAGE:
        check_runs(sample.input_ids, sample.images, metadata, kind="image")
    if sample.videos or highest >= VIDEO:
        check_runs(sample.input_ids, sample.videos, metadata, kind="video")
    if sample.num_targets == 0:
        raise Refusal(
            "no_targets",
            f"none of its {sample.num_tokens} tokens is learnt (a mean over no targets is NaN); it needs an assistant "
            "turn or a completion with text in it, or train_on='all', or labels that are not all -100",
        )


def check_ids(input_ids: np.ndarray, metadata: ProcessorMetadata) -> None:
    """There are ids, and the embedding has a row for each."""
    if len(input_ids) == 0:
        raise Refusal("empty", "it has no tokens at all; leave it out of the data set")
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= metadata.vocab_size:
        raise Refusal(
            "id_out_of_range",
            f"it holds the token id {low if low < 0 else high}, but ids run from 0 to {metadata.vocab_size - 1}; tokenise "
            "it with this processor's tokenizer (or pass vocab_size= if the model's embedding is larger)",
        )


def check_runs(input_ids: np.ndarray, visuals: Sequence[Visual], metadata: ProcessorMetadata, *, kind: Kind) -> None:
    """Each unbroken run of placeholders has the length that its own image or frame needs, in order."""
    seen = run_lengths(input_ids, metadata.token_id(kind))
    needed = [n for visual in visuals for n in tokens_of(visual, metadata, kind=kind)]
    if seen == needed:
        return
    if not visuals:
        raise Refusal(
            f"{kind}_tokens_without_pixels",
            f"it has {sum(seen)} {kind} tokens but no {kind} pixels; add pixels and grid, or remove the tokens",
        )
    if not seen:
        raise Refusal(
            f"pixels_without_{kind}_tokens",
            f"it has the pixels of {len(visuals)} {kind}(s) but no {kind} token; is the placeholder missing?",
        )
    at = next((i for i, (a, b) in enumerate(zip(seen, needed, strict=False)) if a != b), min(len(seen), len(needed)))
    raise Refusal(
        f"{kind}_token_mismatch",
        f"its runs of {kind} tokens are {_some(seen)} long but its grids need {_some(needed)} (first difference at "
        f"run {at}); each {kind} needs frames * rows * columns / {metadata.merge_size**2} tokens in a run of its own: "
        "tokenise and cut into patches with the same processor settings, and do not truncate inside an image",
    )


def run_lengths(input_ids: np.ndarray, token_id: int) -> list[int]:
    """Lengths of the unbroken runs of `token_id`, in order."""
    return [stop - start for start, stop in runs(input_ids, token_id)]


def runs(input_ids: np.ndarray, token_id: int) -> list[tuple[int, int]]:
    """(start, stop) of each unbroken run of `token_id`, in order."""
    hit = input_ids == token_id
    changes = (np.flatnonzero(hit[1:] != hit[:-1]) + 1).tolist()
    edges = [0] * bool(hit[:1].any()) + changes + [len(hit)] * bool(hit[-1:].any())
    return list(zip(edges[::2], edges[1::2], strict=True))


def tokens_of(visual: Visual, metadata: ProcessorMetadata, *, kind: Kind) -> list[int]:
    """The runs of placeholders that one image or video is written as."""
    frames, rows, columns = visual.grid
    merged = rows * columns // metadata.merge_size**2
    return [merged] * frames if kind == "video" and metadata.frame_timestamps else [frames * merged]


def _check_labels(sample: Encoded, metadata: ProcessorMetadata) -> None:
    labels = sample.labels
    in_range = np.count_nonzero(labels.view(np.uint64) < metadata.vocab_size)  # unsigned, negative ones are large
    if in_range + np.count_nonzero(labels == IGNORE) == len(labels):
        return
    odd = labels[(labels != IGNORE) & ((labels < 0) | (labels >= metadata.vocab_size))]
    if len(odd):
        raise Refusal(
            "label_out_of_range",
            f"it holds the label {int(odd[0])}; labels are -100 (ignored) or ids from 0 to {metadata.vocab_size - 1}",
        )


def check_pixels(visual: Visual, metadata: ProcessorMetadata) -> None:
    """Patches, where they were cut, are floats of the grid's shape; that they are finite is seen as they are joined."""
    if visual.pixels is None:
        return
    frames, rows, columns = visual.grid
    expected = (frames * rows * columns, metadata.patch_dim)
    if tuple(visual.pixels.shape) != expected:
        raise Refusal(
            "pixel_shape",
            f"the grid {frames} x {rows} x {columns} needs pixels of shape {list(expected)}, got "
            f"{list(visual.pixels.shape)}; pixels and grid must come from one call of this processor",
        )
    if not visual.pixels.is_floating_point():
        raise Refusal(
            "pixel_dtype", f"pixels are {visual.pixels.dtype}; they must be the processor's normalised floats"
        )


def _check_grid(visual: Visual, metadata: ProcessorMetadata) -> None:
    frames, rows, columns = visual.grid
    if min(visual.grid) < 1 or rows % metadata.merge_size or columns % metadata.merge_size:
        raise Refusal(
            "bad_grid",
            f"the grid {frames} x {rows} x {columns} (frames, rows, columns of patches) cannot be merged: rows and "
            f"columns must be positive multiples of {metadata.merge_size}; use this processor's image_grid_thw unchanged",
        )


def _some(numbers: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    return f"[{shown}{', ...' if len(numbers) > most else ''}]"
