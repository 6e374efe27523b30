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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from vlmpack.errors import FamilyError, LayoutError
from vlmpack.families.audio import check_markers
from vlmpack.families.tiles import tiles_of_images
from vlmpack.layout.batch import SIZES, Media, compare_media, host_frames, host_grids, host_seconds
from vlmpack.layout.device import on_host, require, to_device
from vlmpack.layout.media import AUDIO, IMAGE, KINDS, VIDEO, Expected, Grid, MediaTable, Medium, place
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.row import PackedRow
from vlmpack.layout.segments import Segments
from vlmpack.layout.sharing import with_entries

if TYPE_CHECKING:
    from vlmpack.families.family import Family

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


# ---------------------------------------------------------------------- the table of a row's media
#
# The table of a row's media: read from tensors and token ids, or compared with them if the host metadata has it.
#
# transformers writes image features, in order, to the placeholders of the whole row, and compares only their total
# numbers. So a sample with too few or too many placeholders would get features of another one. To prevent this, every
# medium must match the placeholders of exactly one sample (`layout.media.place`).

_PIXELS = {IMAGE: "pixel_values", VIDEO: "pixel_values_videos"}


def media_of_row(family: Family, row: PackedRow, config: Any) -> MediaTable:
    """Return the media of a row's samples; see `Family.media_of_row`."""
    known = row.known_metadata.media
    if known is None and row.tree is not None:
        known = MediaTable()
    table = _read(family, row, config) if known is None else _compared(family, row, known, config)
    if family.positions_rule.of_sample is not None:
        check_markers(row.input_ids, table, row.segments, config)
    check_seconds(table.videos)
    return table


def _read(family: Family, row: PackedRow, config: Any) -> MediaTable:
    """Read the media from the tensors of a row, and find their placeholders."""
    media = row.media
    images = host_grids(media.image_grid_thw, "image_grid_thw")
    videos = host_grids(media.video_grid_thw, "video_grid_thw")
    family.check_takes(images, videos)
    if not family.has_vision:
        return MediaTable()
    if family.has_grids:
        records = [Medium(kind=IMAGE, grid=grid) for grid in images] + _timed(videos, media.seconds_per_grid)
        records += [Medium(kind=AUDIO, frames=count) for count in host_frames(media.audio_mask)]
        expected = _expected(family, records, config)
    else:
        expected = [*_tiles(family, media, config, IMAGE), *_tiles(family, media, config, VIDEO)]
    types_1T = family.types_of_row(row, config)
    if not expected and not on_host(types_1T):
        message = "the row has placeholders of images, videos or audio, but no such media; give those of every sample"
        require(~(types_1T != 0).any(), message, LayoutError)
        return MediaTable()
    return _place(family, expected, types_1T[0].cpu().numpy(), row.segments)


def _timed(grids: Sequence[Grid], seconds: Any) -> list[Medium]:
    """Videos with these grids, and with seconds if they are given."""
    if not grids:
        return []
    of_each = host_seconds(seconds)
    if of_each and len(of_each) != len(grids):
        raise LayoutError(
            f"there are {len(grids)} videos but seconds_per_grid has {len(of_each)} values; give one for each "
            "video (the processor's second_per_grid_ts), or none"
        )
    return [
        Medium(kind=VIDEO, grid=grid, seconds=time)
        for grid, time in zip(grids, of_each or (None,) * len(grids), strict=True)
    ]


def _expected(family: Family, media: Sequence[Medium], config: Any) -> list[Expected]:
    """The number of placeholders that each medium needs; for an image without a grid, the number that it has."""
    if not family.has_grids:
        return [Expected(medium=medium, tokens=(medium.tokens,)) for medium in media]
    visual = [medium for medium in media if medium.kind != AUDIO]
    placed = zip(visual, family.placements(visual, config), strict=True)
    expected = [Expected(medium=medium, tokens=placement.tokens) for medium, placement in placed]
    for number, audio in enumerate(medium for medium in media if medium.kind == AUDIO):
        assert family.audio is not None, "a family with audio"
        count = family.audio.tokens(audio.frames, config.audio_config)
        if count < 1:
            raise LayoutError(
                f"audio {number} of the row has {audio.frames} frames (feature_attention_mask), too few for one token; "
                "leave it out of its sample"
            )
        expected.append(Expected(medium=audio, tokens=(count,)))
    return expected


def _tiles(family: Family, media: Media, config: Any, kind: int) -> list[Expected]:
    """The images or videos of a tiled family, and the number of placeholders of each."""
    tensors = media.to_hf()
    tokens = _tile_tokens(family, tensors, config, kind)
    sizes = [tensors[name].tolist() for name, of in SIZES.items() if of == kind and name in tensors]
    rows = [(tuple(size),) for size in sizes[0]] if sizes and len(sizes[0]) == len(tokens) else [()] * len(tokens)
    pairs = zip(tokens, rows, strict=True)
    is_bidirectional = family.bidirectional_tokens(config) is not None
    return [
        Expected(medium=Medium(kind=kind, sizes=size, bidirectional=is_bidirectional), tokens=(count,))
        for count, size in pairs
    ]


def _tile_tokens(family: Family, tensors: Mapping[str, torch.Tensor], config: Any, kind: int) -> list[int]:
    """The number of placeholders of each tile, image or video in the tensors of one kind."""
    rule = family.tile_tokens if kind == IMAGE else family.video_tokens
    if rule is None or _PIXELS[kind] not in tensors:
        return []
    try:
        return [int(count) for count in rule(tensors, config)]
    except KeyError as missing:
        raise LayoutError(
            f"the batch has {_PIXELS[kind]}, but no {missing}: keep all that the model's own processor gives"
        ) from None


def _place(family: Family, expected: Sequence[Expected], types_T: np.ndarray, segments: Segments) -> MediaTable:
    return place(expected, types_T, segments, counted=() if family.has_grids else (IMAGE, VIDEO))


def _compared(family: Family, row: PackedRow, known: MediaTable, config: Any) -> MediaTable:
    """Compare the media of the metadata with the tensors and token ids."""
    media, segments = row.media, row.segments
    family.check_takes(known.grids(IMAGE), known.grids(VIDEO))
    if not family.has_vision:
        compare_media(known, media)
        return known
    held = known if row.tree is None else known.in_tree(row.tree)
    compare_media(held, media)
    if row.tree is None and known.videos and all(video.seconds is None for video in known.videos):
        timed = iter(host_seconds(media.seconds_per_grid))
        videos = tuple(replace(m, seconds=next(timed, None)) if m.kind == VIDEO else m for m in known.media)
        known = replace(known, media=videos)
    if not family.has_grids:
        _check_tiles(family, held, media, config)
    expected = _expected(family, known.media, config)
    types_1T, known_T = family.types_of_row(row, config), known.types(segments)
    found = _place(family, expected, types_1T[0].numpy() if on_host(types_1T) else known_T, segments)
    _check_same(known, found)
    if not on_host(types_1T):
        known_1T = to_device(known_T[None], types_1T.device)
        agree = (types_1T != 0) == (known_1T != 0) if family.videos_as_images else types_1T == known_1T
        message = (
            "the host metadata has images, videos or audio where the row has other tokens: give media in the order of "
            "their samples, or leave the metadata out of a batch that was changed"
        )
        require(agree.all(), message, LayoutError)
    return known


def _check_tiles(family: Family, held: MediaTable, media: Media, config: Any) -> None:
    """Compare the tokens of media with tensors on the host; reading tensors on a device would cost a sync."""
    tensors = media.with_sizes(held).to_hf()
    for kind in (IMAGE, VIDEO):
        pixels = tensors.get(_PIXELS[kind])
        if pixels is None or on_host(pixels):
            tokens = _tile_tokens(family, tensors, config, kind)
            tiles_of_images(tokens, [medium.tokens for medium in held.of_kind(kind)])


def with_media_table(family: Family, row: PackedRow, *, config: Any) -> PackedRow:
    """Add the media table to a row on the host, with the number of entries of each medium in the tensors.

    Raises:
        LayoutError: see `media_of_row`; or the row has tensors that the family does not take.
    """
    if unknown := {*row.media.to_hf()} - {*family.media, "second_per_grid_ts"}:
        raise LayoutError(f"the row has {min(unknown)}, which a {family.model_type} does not take; leave it out")
    table = family.media_of_row(row, config)
    if family.without_padding is not None:
        tensors = family.without_padding(row.media.to_hf())
        row = replace(row, media=Media.from_hf(tensors, names=tensors.keys()))
    counts = next((name for name, join in family.media.items() if join.counts_images), None)
    axes = {name: join.axis for name, join in family.media.items() if join.axis}
    table = replace(family.with_contexts(table), axes=axes, image_counts=counts)
    if family.has_grids:
        row = with_entries(row, table)
        table = row.known_metadata.media
        assert table is not None
    else:
        table = _with_tiles(family, row, table, config)
    if family.audio is not None:
        each = dict.fromkeys(("input_features", "feature_attention_mask"), 1)
        media = [replace(m, entries=each) if m.kind == AUDIO else m for m in table.media]
        table = replace(table, media=tuple(media))
    return replace(row, metadata=replace(row.known_metadata, media=table))


def _with_tiles(family: Family, row: PackedRow, table: MediaTable, config: Any) -> MediaTable:
    """Count the entries of the images and videos of a tiled family."""
    media = {kind: [*table.of_kind(kind)] for kind in KINDS}
    for kind in (IMAGE, VIDEO):
        tokens, entries = tile_entries(family, row.media.to_hf(), config, kind)
        computed = () if row.tree is None else (row.tree.images if kind == IMAGE else row.tree.videos)
        numbers = range(len(media[kind])) if row.tree is None else computed
        if not tokens:
            continue
        tiles = tiles_of_images(tokens, [media[kind][number].tokens for number in numbers])
        for number, (start, stop) in zip(numbers, tiles, strict=True):
            own = {name: sum(counts[start:stop]) for name, counts in entries.items()}
            media[kind][number] = replace(media[kind][number], entries=own)
    return replace(table, media=tuple(medium for of_kind in media.values() for medium in of_kind))


def tile_entries(
    family: Family, tensors: Mapping[str, torch.Tensor], config: Any, kind: int
) -> tuple[list[int], dict[str, list[int]]]:
    """Return the tokens of each tile, image or video of one kind, and its entries in each tensor; [] and {}: none.

    Raises:
        LayoutError: a tensor has the entries of another number of images.
    """
    if not (tokens := _tile_tokens(family, tensors, config, kind)):
        return [], {}
    of_tiles = {} if family.tile_entries is None else family.tile_entries(tensors, config)
    names = [name for name in family.tensors_of(kind) if name in tensors and not family.media[name].counts_images]
    entries = {name: [*(of_tiles.get(name) or [1] * len(tokens))] for name in names}
    if odd := next((name for name, counts in entries.items() if len(counts) != len(tokens)), None):
        raise LayoutError(
            f"{odd} is {list(tensors[odd].shape)}, but the row has {len(tokens)} images or tiles; keep what the "
            "processor gives"
        )
    return tokens, entries


def _check_same(known: MediaTable, found: MediaTable) -> None:
    """Check that the placeholders are where the host metadata has them."""
    if len(known.media) != len(found.media):
        raise LayoutError(
            f"the host metadata has {len(known.media)} media, but the row has {len(found.media)}; leave the metadata "
            "out of a batch that was changed"
        )
    numbers = dict.fromkeys(KINDS, 0)
    for told, seen in zip(known.media, found.media, strict=True):
        number, name = numbers[told.kind], KINDS[told.kind]
        numbers[told.kind] += 1
        if (told.sample, told.runs) != (seen.sample, seen.runs):
            of_seen, of_told = (f"{list(m.runs[:4])} of sample {m.sample}" for m in (seen, told))
            raise LayoutError(
                f"{name} {number} of the row lies at tokens {of_seen}, but the host metadata says that it lies at "
                f"{of_told}; leave the metadata out of a batch whose tokens were moved"
            )
