"""Media tokens of a row: their multimodal rotary positions, and their runs, compared with the grids.

Positions are table look-ups; the README of this room draws the maths. The host has every grid, so it lists once, for
each media token of the row, its offsets (t, h, w) from the place where its item starts, and how far the item moves on
what follows. The device holds which tokens are media: the k-th of them takes the k-th entry. A cumulative sum does the
rest, without a host–device sync.

**Runs** of placeholders are compared with the images, videos or frames that they stand for:

    row       x [ i i i i ] x   x [ i i i i i i ] x       two samples; `i` an image placeholder
    runs          4                   6                   the next grid of the row has to make as many tokens
    grids     (1, 4, 4)           (1, 4, 6)

A run ends where another kind of token, or another sample, begins. transformers counts placeholders of a whole batch
only: of images in another order than their samples', one would fill tokens of both.

N media items or runs, M media tokens, T row tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch

from vlmpack.errors import LayoutError
from vlmpack.layout.batch import IMAGE, VIDEO, Grid
from vlmpack.layout.device import on_host, require, to_device
from vlmpack.layout.segments import Segments


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class MediaItems:
    """N runs of media tokens, in row order: images, whole videos, or single frames of videos."""

    grids: np.ndarray
    """[N, 3] int64: frames, rows, columns of merged tokens."""
    interval: np.ndarray
    """[N] float32: positions between one frame of the item and the next, before rounding down."""
    medium: np.ndarray
    """[N] int64, rising: the image or video that each run belongs to."""

    @property
    def num_media(self) -> int:
        """Images, or videos."""
        return int(self.medium[-1]) + 1 if len(self.medium) else 0

    @property
    def num_tokens(self) -> int:
        """Media tokens M of all items."""
        return int(self.grids.prod(1).sum())

    def table(self) -> np.ndarray:
        """[4, M] int64: offsets t, h, w of each token, and the advance after it.

        An item advances by max(h, w) after its last token, whatever its number of frames: so does transformers'
        `get_rope_index`. The temporal offset is a float32 product rounded down, as there.
        """
        sizes = self.grids.prod(1)
        item = np.repeat(np.arange(len(sizes)), sizes)
        ends = sizes.cumsum()
        local = np.arange(len(item)) - (ends - sizes)[item]
        _, rows, columns = self.grids.T
        frame, within = np.divmod(local, (rows * columns)[item])
        out = np.zeros((4, len(item)), np.int64)
        out[0] = frame.astype(np.float32) * self.interval[item]
        out[1], out[2] = np.divmod(within, columns[item])
        out[3, ends - 1] = np.maximum(rows, columns)
        return out


def media_items(grids: Sequence[Grid], merge: int, modality: str) -> MediaItems:
    """Items whose frames lie one position apart, from grids in patches.

    Raises:
        LayoutError: a grid that is not (frames, rows, columns), has a side of 0, or that `merge` does not divide.
    """
    for i, grid in enumerate(grids):
        if len(grid) != 3 or min(grid) < 1:
            raise LayoutError(
                f"{modality} {i}: its grid is {tuple(grid)}; it must be (frames, rows, columns), all >= 1"
            )
        if grid[1] % merge or grid[2] % merge:
            raise LayoutError(
                f"{modality} {i}: its grid {tuple(grid)} is not a multiple of the merge size {merge} in height and "
                "width; grids are counted in patches, before merging: give `image_grid_thw` as the processor made it"
            )
    patches = np.asarray(grids, np.int64).reshape(-1, 3)
    interval, medium = np.ones(len(patches), np.float32), np.arange(len(patches))
    return MediaItems(grids=patches // (1, merge, merge), interval=interval, medium=medium)


def row_positions(
    mm_token_type_ids: torch.Tensor | None,
    segments: Segments,
    *,
    images: MediaItems,
    videos: MediaItems,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """int64 [4, 1, T]: the text row, then time, height and width. Restarts at 0 in every segment; 0 on padding.

    Media tokens beyond those that the items stand for count as text: their number is on the device, and it is not
    waited for. `check_runs` compares them.

    Args:
        mm_token_type_ids: [1, T], 0 text, 1 image, 2 video; None: text only.
        segments: the boundaries at which positions restart.
        images: the images of the row, in row order.
        videos: the videos (or their frames) of the row, in row order.
        device: where the result lives if there are no token types.

    Raises:
        LayoutError: what the host can see to be wrong: shapes, or more media tokens than the row has room for.
    """
    _check(mm_token_type_ids, segments, images, videos)
    if mm_token_type_ids is None:
        text = segments.position_in_segment("cpu" if device is None else device)
        return text.repeat(4, 1, 1)
    device = mm_token_type_ids.device
    text = segments.position_in_segment(device)
    if not images.num_tokens + videos.num_tokens:
        return text.repeat(4, 1, 1)
    offsets_3T, advance = _look_up(mm_token_type_ids.view(-1), images, videos)
    before = advance.cumsum(0) - advance
    # The row index of each token's segment start; a pad is its own, which makes its position 0.
    start = torch.arange(segments.total, device=device) - text
    spatial_3T = before - before.index_select(0, start) + offsets_3T
    if segments.has_gaps:
        spatial_3T = spatial_3T.masked_fill(segments.padding_mask(device), 0)
    return torch.cat((text[None], spatial_3T))[:, None]


def _look_up(types: torch.Tensor, images: MediaItems, videos: MediaItems) -> tuple[torch.Tensor, torch.Tensor]:
    """(offsets [3, T], advance [T]) of every token, from one table: images, then videos, then one entry for text."""
    num_images, num_videos = images.num_tokens, videos.num_tokens
    text = np.asarray([[0], [0], [0], [1]])
    table = to_device(np.concatenate((images.table(), videos.table(), text), 1), types.device)
    entry = torch.full_like(types, num_images + num_videos, dtype=torch.int64)
    for modality, first, count in ((IMAGE, 0, num_images), (VIDEO, num_images, num_videos)):
        is_kind = types == modality
        k = is_kind.cumsum(0) - 1
        entry = torch.where(is_kind & (k < count), first + k, entry)
    entries = table.index_select(1, entry)
    return entries[:3], entries[3]


def _check(types: torch.Tensor | None, segments: Segments, images: MediaItems, videos: MediaItems) -> None:
    needed = images.num_tokens + videos.num_tokens
    if types is None:
        if needed:
            raise LayoutError(
                f"the row has {len(images.grids)} images and {len(videos.grids)} videos (or frames) but no "
                "mm_token_type_ids, so their tokens cannot be found; keep what the processor returns under that name"
            )
        return
    if tuple(types.shape) != (1, segments.total):
        raise LayoutError(
            f"mm_token_type_ids is {list(types.shape)} but the segments describe a row of [1, {segments.total}]"
        )
    if needed > segments.total:
        raise LayoutError(
            f"the grids of {len(images.grids)} images and {len(videos.grids)} videos (or frames) stand for {needed} "
            f"tokens, but the row has only {segments.total}; were media and token ids taken from different batches, "
            "or were the samples truncated?"
        )


# ---------------------------------------------------------------------- runs of placeholders

PADDING = -1
"""The sample of a token that belongs to none."""


@final
@dataclass(frozen=True, kw_only=True)
class ExpectedRuns:
    """The runs of placeholders of one kind that a row has to have."""

    kind: int
    """Their value in `mm_token_type_ids`: 1 image, 2 video, 3 audio."""
    name: str
    """ "image", "video" or "audio"."""
    measure: str = "grids"
    """The source of the number of their tokens, in words."""
    items: MediaItems
    """The runs, in row order."""
    per_sample: Sequence[int] = ()
    """Images (or videos) of each sample as the host metadata counts them; empty: not counted."""

    @property
    def sizes(self) -> np.ndarray:
        """int64 [N]: placeholders of each run."""
        return self.items.grids.prod(1)

    @property
    def samples(self) -> np.ndarray | None:
        """int64 [N]: the sample of each run; None: not counted.

        Raises:
            LayoutError: the host metadata counts another number of images or videos than there are grids.
        """
        if not len(self.per_sample):
            return None
        of_medium, media = np.repeat(np.arange(len(self.per_sample)), self.per_sample), self.items.num_media
        if len(of_medium) != media:
            raise LayoutError(
                f"the host metadata counts {list(self.per_sample)} {self.name}s of the samples, but there are {media} "
                f"{self.measure}; leave the metadata out of a batch that was changed"
            )
        return of_medium[self.items.medium]


def check_runs(types: torch.Tensor, segments: Segments, expected: Sequence[ExpectedRuns]) -> None:
    """Insist that each run of placeholders has the tokens of its grid, inside one sample, in the order of the grids.

    On the host it is one look over the row; a device asserts the same, without a sync.

    Args:
        types: [1, T], 0 text, 1 image, 2 video, by the token ids.
        segments: the row's samples.
        expected: the images, and the videos.

    Raises:
        LayoutError: it is not so; on the host it names the sample, its run and its grid.
    """
    if on_host(types):
        row_runs = _RowRuns(types, segments)
        for runs in expected:
            row_runs.check(runs)
        return
    for runs in expected:
        require(_as_expected(types[0], segments, runs), _SOMEWHERE.format(runs.name), LayoutError)


_REMEDY = (
    "images and videos come in the order of their samples, each in a run of placeholders of its own (so do frames "
    "from Qwen3-VL on), between vision_start and vision_end; give pixels and grids in that order"
)
_SOMEWHERE = "a run of {0} placeholders is not as long as its grid says, or lies in another sample: " + _REMEDY


# ---------------------------------------------------------------------- on the host


@final
class _RowRuns:
    """The runs that a row has."""

    def __init__(self, types: torch.Tensor, segments: Segments) -> None:
        kinds_T = types[0].numpy()
        begins_T = np.ones(len(kinds_T), bool)
        np.not_equal(kinds_T[1:], kinds_T[:-1], out=begins_T[1:])
        begins_T[_edges(segments)] = True
        self._starts = np.flatnonzero(begins_T)
        self._lengths = np.diff(self._starts, append=len(kinds_T))
        self._kinds = kinds_T[self._starts]
        self._segments = segments

    def check(self, runs: ExpectedRuns) -> None:
        """Raise a `LayoutError` where these are not the runs of one kind."""
        of_kind, sizes = self._kinds == runs.kind, runs.sizes
        starts, lengths = self._starts[of_kind], self._lengths[of_kind]
        if lengths.sum() != sizes.sum():
            raise LayoutError(
                f"{self._sample_of_another_number(runs, starts, lengths)}the {runs.name} {runs.measure} make "
                f"{sizes.sum()} tokens, but the row has another number of {runs.name} placeholders, {lengths.sum()}; "
                "every placeholder needs its medium, and the other way round"
            )
        if not len(starts):
            return
        samples = _samples_at(starts, self._segments)
        if len(lengths) != len(sizes) or (lengths != sizes).any():
            raise LayoutError(self._differing(runs, starts, lengths, samples))
        if samples.min() == PADDING:
            at = int(starts[samples.argmin()])
            raise LayoutError(f"place {at} of the row is padding, but has {runs.name} placeholders; {_REMEDY}")
        medium = runs.items.medium
        if len(split := np.flatnonzero((medium[1:] == medium[:-1]) & (samples[1:] != samples[:-1]))):
            raise LayoutError(self._split(runs, int(medium[split[0]]), int(samples[split[0] + 1])))
        counted = runs.samples
        if counted is not None and (counted != samples).any():
            at = int((counted != samples).argmax())
            raise LayoutError(
                f"{runs.name} {medium[at]} of the row lies in sample {samples[at]}, but the host metadata says that it "
                f"belongs to sample {counted[at]}; leave the metadata out of a batch whose tokens were moved"
            )

    def _sample_of_another_number(self, runs: ExpectedRuns, starts: np.ndarray, lengths: np.ndarray) -> str:
        """The first sample whose placeholders are not as many as its media make, in words; "" if that is not known."""
        if (of_run := runs.samples) is None:
            return self._first_unlike(runs, starts, lengths)
        count, at = len(runs.per_sample), _samples_at(starts, self._segments)
        expected, found = (
            np.bincount(of[of >= 0], weights=sizes[of >= 0], minlength=count)
            for of, sizes in ((of_run, runs.sizes), (at, lengths))
        )
        differs = np.flatnonzero(expected[:count] != found[:count])
        if not len(differs):
            return ""
        sample = int(differs[0])
        return f"sample {sample} has {found[sample]:.0f} {runs.name} placeholders for {expected[sample]:.0f} tokens: "

    def _first_unlike(self, runs: ExpectedRuns, starts: np.ndarray, lengths: np.ndarray) -> str:
        """The sample of the first run that is not of the next medium, in words; "": media are left over."""
        shared = min(len(lengths), len(runs.sizes))
        unlike = np.append(lengths[:shared] != runs.sizes[:shared], True)
        if (first := int(unlike.argmax())) == len(lengths):
            return ""
        sample = _samples_at(starts[first : first + 1], self._segments)[0]
        tokens = f"its next {runs.name} makes {runs.sizes[first]}" if first < shared else f"no {runs.name} is left"
        return "" if sample == PADDING else f"sample {sample} has a run of {lengths[first]}, but {tokens}: "

    def _differing(self, runs: ExpectedRuns, starts: np.ndarray, lengths: np.ndarray, samples: np.ndarray) -> str:
        """The first run that is not as expected; there is one among those that both have, as the totals agree."""
        sizes, count = runs.sizes, min(len(lengths), len(runs.sizes))
        at = int((lengths[:count] != sizes[:count]).argmax())
        stop = int(starts[at] + lengths[at])
        medium, sample = int(runs.items.medium[at]), int(samples[at])
        if lengths[at] < sizes[at] and stop in starts and samples[at + 1] not in (sample, PADDING):
            return self._split(runs, medium, int(samples[at + 1]))
        part = "a frame of " if (runs.items.medium == medium).sum() > 1 else ""
        return (
            f"sample {sample}: a run of {lengths[at]} {runs.name} placeholders begins at place {starts[at]} of the "
            f"row, but {part}{runs.name} {medium}, which is next, makes {sizes[at]} tokens; {_REMEDY}"
        )

    def _split(self, runs: ExpectedRuns, medium: int, sample: int) -> str:
        return (
            f"{runs.name} {medium} of the row is cut in two where sample {sample} starts, at place "
            f"{self._segments.stride[sample]} of the row: move that boundary of cu_seqlens_q before the {runs.name}, "
            "or behind it"
        )


def _edges(segments: Segments) -> list[int]:
    """Where samples start, and where padding does."""
    return [edge for edge in segments.kernel if edge < segments.total]


def _samples_at(places: np.ndarray, segments: Segments) -> np.ndarray:
    """int64: the sample of each of these places of the row; -1 on padding."""
    starts, lengths = np.asarray(segments.stride, np.int64), np.asarray((*segments.lengths, 0), np.int64)
    # Where slots end, so that one of no tokens holds none.
    samples = np.searchsorted(starts[1:], places, side="right")
    return np.where(places - starts[samples] < lengths[samples], samples, PADDING)


# ---------------------------------------------------------------------- on a device


def _as_expected(types_T: torch.Tensor, segments: Segments, runs: ExpectedRuns) -> torch.Tensor:
    """Scalar bool: whether the row has these runs."""
    of_kind_T = types_T == runs.kind
    counted = of_kind_T.sum() == runs.items.num_tokens
    if not runs.items.num_tokens:
        return counted
    place_M = torch.nonzero_static(of_kind_T, size=runs.items.num_tokens, fill_value=0)[:, 0]
    # Neighbours of one sample are 1 apart, those of two samples 2.
    apart_T = segments.derived("runs", types_T.device, lambda: np.arange(segments.total) + _stretch(segments))
    sample_T = segments.derived("samples", types_T.device, lambda: _samples_at(np.arange(segments.total), segments))
    follows_M = apart_T.index_select(0, place_M).diff(prepend=apart_T.new_full((1,), -2)) == 1
    sample_M = sample_T.index_select(0, place_M)
    if (samples := runs.samples) is not None:
        follows, samples = _continues(runs), np.repeat(samples, runs.sizes)
        return (2 * sample_M + follows_M == to_device(2 * samples + follows, types_T.device)).all() & counted
    again = np.diff(np.repeat(runs.items.medium, runs.sizes), prepend=-1) == 0
    moves_M = sample_M.diff(prepend=sample_M[:1]) != 0
    as_expected_M = (follows_M == to_device(_continues(runs), types_T.device)) & (sample_M != PADDING)
    return (as_expected_M & ~(moves_M & to_device(again, types_T.device))).all() & counted


def _stretch(segments: Segments) -> np.ndarray:
    """int64 [T]: how many edges come before each place, its own included."""
    steps = np.zeros(segments.total, np.int64)
    steps[_edges(segments)] = 1
    return steps.cumsum()


def _continues(runs: ExpectedRuns) -> np.ndarray:
    """bool [M]: whether a placeholder is of the run of the one before."""
    sizes = runs.sizes
    continues = np.ones(sizes.sum(), bool)
    continues[sizes.cumsum() - sizes] = False
    return continues
