"""Media tokens of a row: the placeholder runs of images and videos, and their multimodal rotary positions.

One sample, four text tokens around an image of 1 x 4 x 4 patches, 2 x 2 patches per token:

    types     0 0 1 1 1 1 0 0
    text      0 1 2 3 4 5 6 7        position in the sample
    time      0 1 2 2 2 2 4 5        an image advances later positions by max(rows, columns) of its tokens
    height    0 1 2 2 3 3 4 5
    width     0 1 2 3 2 3 4 5

N runs, M media tokens, T row tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from vlmpack.errors import FamilyError, LayoutError
from vlmpack.layout.batch import Media
from vlmpack.layout.device import to_device
from vlmpack.layout.media import IMAGE, VIDEO, Grid, MediaTable, Medium
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.segments import Segments

if TYPE_CHECKING:
    pass

# ---------------------------------------------------------------------- runs of tokens


@final
@dataclass(frozen=True, kw_only=True)
class Placement:
    """The placeholder tokens of an image or video, as its family's processor writes them."""

    cells: tuple[Grid, ...]
    """Frames, rows and columns of tokens of each run of placeholders."""
    interval: float = 1.0
    """Distance in positions from one frame of a run to the next, before rounding down."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Number of placeholders of each run."""
        return tuple(map(prod, self.cells))


VideoPlacement = Callable[[Grid, float | None, Any], Placement]
"""Function of a video's grid in tokens (frames, rows, columns), its seconds per frame, and the vision configuration;
returns the runs that the family's processor writes. Its LayoutErrors do not name the video; the caller adds that."""


def single_run(grid: Grid, seconds: float | None, vision: Any) -> Placement:
    """Place a video as one run of tokens; frames are one position apart."""
    return Placement(cells=(grid,))


def run_per_frame(grid: Grid, seconds: float | None, vision: Any) -> Placement:
    """Place every frame of a video as its own run, like an image; timestamps are text between the runs."""
    return Placement(cells=((1, *grid[1:]),) * grid[0])


def run_of_pairs(grid: Grid, seconds: float | None, vision: Any) -> Placement:
    """Place a video as one run; every token merges `temporal_merge_size` frames, which take one position."""
    size = vision.temporal_merge_size
    if grid[0] % size:
        raise LayoutError(
            f"its grid has {grid[0]} frames, and the model makes a token of {size} each; repeat its last frame, as the "
            "model's processor does"
        )
    return Placement(cells=((grid[0] // size, *grid[1:]),))


def timed_run(grid: Grid, seconds: float | None, vision: Any, *, whole_seconds: bool | None = None) -> Placement:
    """Place a video as one run of tokens; the distance of frames is proportional to time.

    `whole_seconds`: True to round the seconds between frames down first, as older versions of transformers do; None: do
    as the installed transformers does.
    """
    if whole_seconds is None:
        whole_seconds = truncates_seconds()
    # float32 throughout, because the model computes with the float32 tensor second_per_grid_ts
    time = np.float32(1.0 if seconds is None else seconds)
    return Placement(
        cells=(grid,), interval=np.float32(vision.tokens_per_second) * (np.trunc(time) if whole_seconds else time)
    )


def check_seconds(videos: Sequence[Medium]) -> None:
    """Check the seconds from one frame of each video to the next.

    Raises:
        LayoutError: a value is NaN, infinite or negative.
    """
    for at, video in enumerate(videos):
        if video.seconds is not None and not 0 <= video.seconds < float("inf"):
            raise LayoutError(
                f"sample {video.sample}: video {at}: seconds_per_grid is {video.seconds}; it must be a finite time, "
                "not negative: give what the processor makes (second_per_grid_ts; Qwen-Omni: video_second_per_grid)"
            )


def merged_grid(grid: Grid, merge: int, name: str) -> Grid:
    """Convert a grid of patches to a grid of tokens: (frames, rows, columns), `merge` x `merge` patches per token.

    `name`: name of the medium, for messages.

    Raises:
        LayoutError: the grid is not (frames, rows, columns), has a side of 0, or is not divisible by `merge`.
    """
    if len(grid) != 3 or min(grid) < 1:
        raise LayoutError(f"{name}: its grid is {tuple(grid)}; it must be (frames, rows, columns), all >= 1")
    frames, rows, columns = grid
    if rows % merge or columns % merge:
        raise LayoutError(
            f"{name}: its grid {tuple(grid)} is not a multiple of the merge size {merge} in height and width; grids "
            "are counted in patches, before merging: give `image_grid_thw` as the processor made it"
        )
    return frames, rows // merge, columns // merge


@cache
def truncates_seconds() -> bool:
    """Return whether the installed transformers rounds `second_per_grid_ts` down to whole seconds.

    5.17 does, 5.23 does not. Instead of comparing versions, this calls transformers' own function: a video of three
    frames 0.7 s apart, at 4 positions per second, has positions 0, 2, 5, or with whole seconds 0, 0, 0.

    Raises:
        FamilyError: the positions are neither.
    """
    from transformers import Qwen2_5_VLModel

    model: Any = Qwen2_5_VLModel  # its methods are called on a dummy with only the attributes that they read
    vision = SimpleNamespace(spatial_merge_size=1, tokens_per_second=4)
    fake_self = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    fake_self.get_vision_position_ids = partial(model.get_vision_position_ids, fake_self)
    tokens = torch.full((1, 3), 2, device="cpu")
    positions, _ = model.get_rope_index(
        fake_self,
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


# ---------------------------------------------------------------------- positions


def token_offsets(placements: Sequence[Placement]) -> np.ndarray:
    """Return offsets (time, height, width) of each token from the start of its run, and the advance after it.

    int64 [4, M]. As in transformers' `get_rope_index`, a run advances positions by max(rows, columns) after its last
    token, whatever its number of frames, and the time offset is a float32 product rounded down.
    """
    cells = np.asarray([cell for placement in placements for cell in placement.cells], np.int64).reshape(-1, 3)
    intervals = np.asarray([placement.interval for placement in placements for _ in placement.cells], np.float32)
    sizes = cells.prod(1)
    run = np.repeat(np.arange(len(sizes)), sizes)
    ends = sizes.cumsum()
    local = np.arange(len(run)) - (ends - sizes)[run]
    _, rows, columns = cells.T
    frame, within = np.divmod(local, (rows * columns)[run])
    out = np.zeros((4, len(run)), np.int64)
    out[0] = frame.astype(np.float32) * intervals[run]
    out[1], out[2] = np.divmod(within, columns[run])
    out[3, ends - 1] = np.maximum(rows, columns)
    return out


def row_positions(places_M: np.ndarray, offsets_4M: np.ndarray, restarts: Segments) -> np.ndarray:
    """Return the positions of a row: int64 [4, T], position in the segment, then time, height and width.

    All restart at 0 in every segment, and are 0 on padding.

    Args:
        places_M: int64, position in the row of each media token.
        offsets_4M: offsets of each media token and the advance after it (`token_offsets`).
        restarts: the boundaries where positions restart.
    """
    text_T = restarts.position_in_segment().numpy()
    offsets_3T, advance_T = np.zeros((3, restarts.total), np.int64), np.ones(restarts.total, np.int64)
    offsets_3T[:, places_M], advance_T[places_M] = offsets_4M[:3], offsets_4M[3]
    before_T = advance_T.cumsum() - advance_T
    # subtract the value at each token's segment start; padding is its own start, so its position is 0
    spatial_3T = before_T - before_T[np.arange(restarts.total) - text_T] + offsets_3T
    return np.concatenate((text_T[None], spatial_3T))


def media_starts(kinds_L: np.ndarray, *of: int) -> np.ndarray:
    """Return the positions where runs of tokens of the kinds `of` begin; `kinds_L`: kinds of a sample's tokens."""
    begins = np.isin(kinds_L, of)
    begins[1:] &= kinds_L[1:] != kinds_L[:-1]
    return np.flatnonzero(begins)


# ---------------------------------------------------------------------- videos with the placeholder of images

# GLM-4V has the same placeholder for images and for frames of videos, so a call of its own code takes one kind only.
# Its tower and its positions treat a frame as an image: rows pass frames as images, in the order of their tokens.
#
#     sample    x ( [ i i ] 0 [ i i ] 1 ) x   x [ i i i ] x       two samples: a video of two frames, an image
#     kinds     0 0 0 2 2 0 0 0 2 2 0 0 0 0   0 0 1 1 1 0 0       `(` and `)` start and end a video
#     grids     (2, 2, 4)                     (1, 2, 6)
#     passed on (1, 2, 4), (1, 2, 4), (1, 2, 6)                   all as images, in the order of the row


def kinds_between(
    input_ids: torch.Tensor, config: Any, *, segments: Segments | None = None, column: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the kind of each token, 0 text, 1 image, 2 video: int64 in the shape of `input_ids`. No host–device sync.

    Args:
        input_ids: [1, T] of a row, [B, S] of a batch, or [L] of a sample.
        config: the model's configuration.
        segments: the row's samples; None: each row of `input_ids` is one sample, as in the family's processor.
        column: the caller's `mm_token_type_ids`, which tell images from videos; needed because a checkpoint's
            configuration may name other tokens than its tokenizer has. None: use the tokens that start and end videos.
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
    media: Media, table: MediaTable, segments: Segments, tree: PrefixTree | None, model_type: str
) -> tuple[Media, tuple[Medium, ...]]:
    """Replace the videos of a row by their frames, as images in the order of the placeholders.

    Args:
        media: the media tensors of the samples, or of the row's prefix tree.
        table: the media of the samples.
        segments: the boundaries of the samples.
        tree: the prefix tree; None: the row has none.
        model_type: the family, for messages.

    Returns:
        The media tensors, and all images.

    Raises:
        LayoutError: a sample has both images and videos.
    """
    computed = table if tree is None else table.in_tree(tree)
    if not computed.videos:
        return media, computed.images
    both = {medium.sample for medium in table.images} & {medium.sample for medium in table.videos}
    if both:
        raise LayoutError(
            f"sample {min(both)} has images and videos, which {model_type} writes with one placeholder: its own code "
            "takes either, and refuses such a sample. Leave one of them out, or give frames as images"
        )
    starts: list[int] = []
    parts: list[tuple[Medium, torch.Tensor]] = []
    for kind, pixels in ((IMAGE, media.pixel_values), (VIDEO, media.pixel_values_videos)):
        if of_kind := computed.of_kind(kind):
            assert pixels is not None, "their patches were counted"
            starts += computed.spans(segments, kind)[:, 0].tolist()
            parts += zip(of_kind, pixels.split([medium.patches for medium in of_kind]), strict=True)
    order = np.argsort(starts if tree is None else tree.place().numpy()[starts])
    images: list[Medium] = []
    for medium, _ in (parts[at] for at in order):
        assert medium.grid is not None, "a family with grids"
        grid = (1, *medium.grid[1:]) if medium.kind == VIDEO else medium.grid
        images += [replace(medium, kind=IMAGE, grid=grid, runs=(run,)) for run in medium.runs]
    joined = torch.cat([parts[at][1] for at in order])
    grids = to_device(np.asarray([image.grid for image in images]), joined.device)
    return Media(pixel_values=joined, image_grid_thw=grids), tuple(images)
