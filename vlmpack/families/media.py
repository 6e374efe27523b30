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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from types import SimpleNamespace
from typing import Any, final

import numpy as np
import torch

from vlmpack.errors import FamilyError, LayoutError
from vlmpack.families.spans import types_on_host
from vlmpack.layout.batch import IMAGE, VIDEO, Grid, HostMetadata, Media, check_tensor
from vlmpack.layout.device import on_host, require, to_device
from vlmpack.layout.row import PackedRow, metadata_of_tree
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
    check_tensor("mm_token_type_ids", types, (1, segments.total), f"[1, {segments.total}], as the row is")
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
    if not on_host(types):
        for runs in expected:
            require(_as_expected(types[0], segments, runs), _SOMEWHERE.format(runs.name), LayoutError)
        return
    kinds_T = types[0].numpy()
    begins_T = np.ones(len(kinds_T), bool)
    np.not_equal(kinds_T[1:], kinds_T[:-1], out=begins_T[1:])
    begins_T[_edges(segments)] = True
    starts = np.flatnonzero(begins_T)
    kinds, lengths = kinds_T[starts], np.diff(starts, append=len(kinds_T))
    for runs in expected:
        of_kind = kinds == runs.kind
        _check_kind(runs, starts[of_kind], lengths[of_kind], segments)


_REMEDY = (
    "images and videos come in the order of their samples, each in a run of placeholders of its own (so do frames "
    "from Qwen3-VL on), between vision_start and vision_end; give pixels and grids in that order"
)
_SOMEWHERE = "a run of {0} placeholders is not as long as its grid says, or lies in another sample: " + _REMEDY


# ---------------------------------------------------------------------- on the host


def _check_kind(runs: ExpectedRuns, starts: np.ndarray, lengths: np.ndarray, segments: Segments) -> None:
    """Raise a `LayoutError` where these are not the runs of one kind."""
    name, sizes, medium, counted = runs.name, runs.sizes, runs.items.medium, runs.samples
    samples, shared = _samples_at(starts, segments), min(len(lengths), len(sizes))
    first = int(np.append(lengths[:shared] != sizes[:shared], True).argmax())  # that is not the next medium
    if lengths.sum() != sizes.sum():
        raise LayoutError(
            f"{_sample_of(first, runs, lengths, samples)}the {name} {runs.measure} make {sizes.sum()} tokens, but the "
            f"row has another number of {name} placeholders, {lengths.sum()}; every placeholder needs its medium, and "
            "the other way round"
        )
    if first < shared:
        stop, follows = starts[first] + lengths[first], samples[first + 1 : first + 2]
        cut_short = lengths[first] < sizes[first] and stop in starts
        if not cut_short or follows[0] in (samples[first], PADDING):
            part = "a frame of " if (medium == medium[first]).sum() > 1 else ""
            raise LayoutError(
                f"sample {samples[first]}: a run of {lengths[first]} {name} placeholders begins at place "
                f"{starts[first]} of the row, but {part}{name} {medium[first]}, which is next, makes {sizes[first]} "
                f"tokens; {_REMEDY}"
            )
        raise LayoutError(_split(name, int(medium[first]), int(follows[0]), segments))
    if PADDING in samples:
        at = int(starts[samples.argmin()])
        raise LayoutError(f"place {at} of the row is padding, but has {name} placeholders; {_REMEDY}")
    if len(split := np.flatnonzero((medium[1:] == medium[:-1]) & (samples[1:] != samples[:-1]))):
        raise LayoutError(_split(name, int(medium[split[0]]), int(samples[split[0] + 1]), segments))
    if counted is not None and (counted != samples).any():
        at = int((counted != samples).argmax())
        raise LayoutError(
            f"{name} {medium[at]} of the row lies in sample {samples[at]}, but the host metadata says that it belongs "
            f"to sample {counted[at]}; leave the metadata out of a batch whose tokens were moved"
        )


def _sample_of(first: int, runs: ExpectedRuns, lengths: np.ndarray, samples: np.ndarray) -> str:
    """The first sample with another number of placeholders than its media make, in words; "" if it is not known."""
    name, sizes, counted = runs.name, runs.sizes, runs.samples
    if counted is not None:
        most = max([len(runs.per_sample), *(samples + 1)])
        makes = np.bincount(counted, weights=sizes, minlength=most)
        has = np.bincount(samples[samples >= 0], weights=lengths[samples >= 0], minlength=most)
        if not (differs := np.flatnonzero(makes != has)).size:  # padding has them
            return ""
        at = differs[0]
        return f"sample {at} has {has[at]:.0f} {name} placeholders for {makes[at]:.0f} tokens: "
    if first == len(lengths) or samples[first] == PADDING:
        return ""
    tokens = f"its next {name} makes {sizes[first]}" if first < len(sizes) else f"no {name} is left"
    return f"sample {samples[first]} has a run of {lengths[first]}, but {tokens}: "


def _split(name: str, medium: int, sample: int, segments: Segments) -> str:
    return (
        f"{name} {medium} of the row is cut in two where sample {sample} starts, at place {segments.stride[sample]} of "
        f"the row: move that boundary of cu_seqlens_q before the {name}, or behind it"
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


def media_starts(kinds_L: np.ndarray, *of: int) -> np.ndarray:
    """int64: where runs of tokens of these kinds begin, in the kinds of the tokens of a sample."""
    begins = np.isin(kinds_L, of)
    begins[1:] &= kinds_L[1:] != kinds_L[:-1]
    return np.flatnonzero(begins)


# ---------------------------------------------------------------------- videos

VideoPlacement = Callable[[MediaItems, Sequence[float], Any], MediaItems]
"""Runs of tokens of whole videos, seconds from one grid of each to the next, and the vision configuration, to the runs
that the family's processor writes and the distances of their frames."""


def single_run(videos: MediaItems, seconds: Sequence[float], vision: Any) -> MediaItems:
    """Place a video as one run of tokens, its frames one position apart."""
    return videos


def run_per_frame(videos: MediaItems, seconds: Sequence[float], vision: Any) -> MediaItems:
    """Place every frame of a video as a run of its own, like an image; time stamps are text between."""
    frames = np.repeat(videos.grids * (0, 1, 1) + (1, 0, 0), videos.grids[:, 0], axis=0)
    medium = np.repeat(videos.medium, videos.grids[:, 0])
    return MediaItems(grids=frames, interval=np.ones(len(frames), np.float32), medium=medium)


def run_of_pairs(videos: MediaItems, seconds: Sequence[float], vision: Any) -> MediaItems:
    """Place a video as one run of tokens, each of several frames (`temporal_merge_size`), one position apart.

    Raises:
        LayoutError: frames are left over, of which the model makes no token.
    """
    size = vision.temporal_merge_size
    if (odd := videos.grids[:, 0] % size).any():
        at = int(odd.argmax())
        raise LayoutError(
            f"video {at}: its grid has {videos.grids[at, 0]} frames, and the model makes a token of {size} each; "
            "repeat its last frame, as the model's processor does"
        )
    return replace(videos, grids=videos.grids // (size, 1, 1))


def timed_run(
    videos: MediaItems, seconds: Sequence[float], vision: Any, *, whole_seconds: bool | None = None
) -> MediaItems:
    """Place a video as one run of tokens, its frames as many positions apart as they are in time.

    `whole_seconds`: round the seconds between frames down before use, as older transformers do; None: as the installed
    transformers does.
    """
    if not len(seconds):
        seconds = (1.0,) * len(videos.grids)
    if len(seconds) != len(videos.grids):
        raise LayoutError(
            f"there are {len(videos.grids)} videos but seconds_per_grid has {len(seconds)} values; give one for each "
            "video (the processor's second_per_grid_ts), or none"
        )
    check_seconds(seconds)
    if whole_seconds is None:
        whole_seconds = truncates_seconds()
    # float32 all the way: the model computes with the float32 tensor second_per_grid_ts
    times = np.asarray(seconds, np.float32)
    rate = np.float32(vision.tokens_per_second)
    return replace(videos, interval=rate * (np.trunc(times) if whole_seconds else times))


def check_seconds(seconds: Sequence[float], videos_per_sample: Sequence[int] = ()) -> None:
    """Insist on times from one grid of each video to the next.

    Args:
        seconds: one for each video of a row.
        videos_per_sample: the videos of each sample, which name it; empty: not known.

    Raises:
        LayoutError: one is NaN, infinite or negative.
    """
    for at, value in enumerate(seconds):
        if not 0 <= value < float("inf"):
            samples = np.repeat(np.arange(len(videos_per_sample)), videos_per_sample)
            of_sample = f"sample {samples[at]}: " if at < len(samples) else ""
            raise LayoutError(
                f"{of_sample}video {at}: seconds_per_grid is {value}; it must be a finite time, not negative: give "
                "what the processor makes (second_per_grid_ts; Qwen-Omni: video_second_per_grid)"
            )


@cache
def truncates_seconds() -> bool:
    """Return whether the installed transformers rounds `second_per_grid_ts` down to whole seconds.

    5.17 does, 5.23 does not. The function itself is tried, not the version read: a video of three frames 0.7 s apart,
    at 4 positions a second, lies at 0, 2, 5 or, with whole seconds, at 0, 0, 0.

    Raises:
        FamilyError: it does neither.
    """
    from transformers import Qwen2_5_VLModel

    model: Any = Qwen2_5_VLModel  # its methods are called on a stand-in that has only what they read
    vision = SimpleNamespace(spatial_merge_size=1, tokens_per_second=4)
    stand_in = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    stand_in.get_vision_position_ids = partial(model.get_vision_position_ids, stand_in)
    tokens = torch.full((1, 3), 2, device="cpu")
    positions, _ = model.get_rope_index(
        stand_in,
        tokens,
        mm_token_type_ids=tokens,
        video_grid_thw=torch.tensor([[3, 1, 1]], device="cpu"),
        second_per_grid_ts=torch.tensor([0.7], device="cpu"),
    )
    times = positions[0, 0].tolist()
    if times not in ([0, 2, 5], [0, 0, 0]):
        raise FamilyError(
            f"qwen2_5_vl: the installed transformers puts three frames 0.7 s apart at {times}; vlmpack supports "
            "[0, 2, 5] and [0, 0, 0]. Its video positions would be wrong: use a version of the supported range"
        )
    return times == [0, 0, 0]


# ---------------------------------------------------------------------- videos with the placeholder of images

# GLM-4V writes images and the frames of videos with one placeholder, so that a call of its own code takes one kind.
# To its tower and its positions a frame is an image: rows hand frames on as images, in the order of their tokens.
#
#     sample    x ( [ i i ] 0 [ i i ] 1 ) x   x [ i i i ] x       two samples: a video of two frames, an image
#     kinds     0 0 0 2 2 0 0 0 2 2 0 0 0 0   0 0 1 1 1 0 0       `(` and `)` start and end a video
#     grids     (2, 2, 4)                     (1, 2, 6)
#     handed on (1, 2, 4), (1, 2, 4), (1, 2, 6)                   all as images, in the order of the row


def kinds_between(
    input_ids: torch.Tensor, config: Any, *, segments: Segments | None = None, column: torch.Tensor | None = None
) -> torch.Tensor:
    """0 text, 1 image, 2 video for each token, int64 in the shape of `input_ids`. No host–device sync.

    Args:
        input_ids: [1, T] of a row, [B, S] of a batch, or [L].
        config: the model's configuration.
        segments: the row's samples; None: each row of `input_ids` is one, as in the family's processor.
        column: what a caller gives as `mm_token_type_ids`, which decides between images and videos: configurations of
            checkpoints may name other tokens than their tokenizers have. None: tokens that start and end videos do.
    """
    is_placeholder = input_ids == config.image_token_id
    if column is not None and column.shape == input_ids.shape:
        return torch.where(is_placeholder, torch.where(column == VIDEO, VIDEO, IMAGE), 0)
    opened = (input_ids == config.video_start_token_id).long() - (input_ids == config.video_end_token_id).long()
    depth = opened.cumsum(-1)
    if segments is not None:
        first_T = torch.arange(segments.total, device=depth.device) - segments.position_in_segment(depth.device)
        depth = depth - (depth - opened).index_select(-1, first_T)
    return torch.where(is_placeholder, torch.where(depth > 0, VIDEO, IMAGE), 0)


def frames_as_images(
    row: PackedRow, types: torch.Tensor, metadata: HostMetadata, model_type: str
) -> tuple[Media, tuple[Grid, ...]]:
    """Replace the videos of a row by their frames, as images in the order of its placeholders.

    A row with images and videos whose metadata do not count them by sample, or have no `type_runs` of a prefix tree,
    takes one host–device sync on a device.

    Args:
        row: whose media are those of the samples, or of its prefix tree.
        types: [1, T], 0 text, 1 image, 2 video.
        metadata: with the grids of images and videos of the samples.
        model_type: of the family, for errors.

    Returns:
        The media, and their grids.

    Raises:
        LayoutError: a sample has images and videos, or the metadata count other media.
    """
    media, tree = row.media, row.tree
    computed = metadata if tree is None else metadata_of_tree(metadata, tree)
    images, frames = computed.image_grids, _frames(computed)
    if not frames:
        return media, images
    assert media.pixel_values_videos is not None, "their patches were counted"
    pixels, grids = media.pixel_values_videos, frames
    if images:
        assert media.pixel_values is not None, "their patches were counted"
        counts_S2 = _media_of_samples(types, row.segments, metadata)
        _check_apart(counts_S2, (len(metadata.image_grids), len(_frames(metadata))), model_type)
        if tree is not None:  # its nodes have whole media, in its order
            types_T = types_on_host(types, row.segments, metadata.type_runs)
            counts_S2 = _counted_by_tokens(types_T[tree.source().numpy()], tree.nodes)
        pixels, grids = _interleaved(counts_S2, (images, frames), (media.pixel_values, media.pixel_values_videos))
    table = to_device(np.asarray(grids, np.int64), pixels.device)
    return Media(pixel_values=pixels, image_grid_thw=table), grids


def _media_of_samples(types: torch.Tensor, segments: Segments, metadata: HostMetadata) -> np.ndarray:
    """int64 [S, 2]: images and frames of each sample."""
    images, videos = metadata.images_per_sample, metadata.videos_per_sample
    if len(images) == len(videos) == segments.num_samples:
        lengths = np.append(0, np.cumsum([count for count, _, _ in metadata.video_grids]))
        last = np.minimum(np.cumsum(videos), len(lengths) - 1)
        return np.stack([np.asarray(images), np.diff(lengths[last], prepend=0)], 1)
    return _counted_by_tokens(types_on_host(types, segments, metadata.type_runs), segments)


def _counted_by_tokens(types_T: np.ndarray, segments: Segments) -> np.ndarray:
    """int64 [S, 2]: runs of placeholders of images, and of frames, in each segment."""
    of_segments = [types_T[start:stop] for start, stop in segments.spans]
    return np.asarray([[len(media_starts(kinds, kind)) for kind in (IMAGE, VIDEO)] for kinds in of_segments])


def _frames(metadata: HostMetadata) -> tuple[Grid, ...]:
    """A grid for each frame of all videos."""
    return tuple((1, rows, columns) for count, rows, columns in metadata.video_grids for _ in range(count))


def _check_apart(counts_S2: np.ndarray, totals: tuple[int, int], model_type: str) -> None:
    if tuple(counts_S2.sum(0)) != totals:
        raise LayoutError(
            f"the samples have {counts_S2[:, 0].tolist()} images and {counts_S2[:, 1].tolist()} frames of videos, but "
            f"the row has grids of {totals[0]} and {totals[1]}; leave the metadata out of a batch that was changed"
        )
    if (both := counts_S2.all(1)).any():
        raise LayoutError(
            f"sample {int(both.argmax())} has images and videos, which {model_type} writes with one placeholder: its "
            "own code takes either, and refuses such a sample. Leave one of them out, or give frames as images"
        )


def _interleaved(
    counts_S2: np.ndarray, grids: tuple[Sequence[Grid], ...], pixels: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, tuple[Grid, ...]]:
    """Patches of images and frames in the order of samples, each of which has one kind, and their grids."""
    parts: list[torch.Tensor] = []
    order: list[Grid] = []
    used, patches = [0, 0], [0, 0]
    for counts in counts_S2.tolist():
        for kind, count in enumerate(counts):
            taken = grids[kind][used[kind] : used[kind] + count]
            size = sum(map(prod, taken))
            parts.append(pixels[kind][patches[kind] : patches[kind] + size])
            order += taken
            used[kind] += count
            patches[kind] += size
    return torch.cat(parts), tuple(order)
