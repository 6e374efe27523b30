"""The table of a row's media: read from tensors and token ids, or compared with them if the host metadata has it.

transformers writes image features, in order, to the placeholders of the whole row, and compares only their total
numbers. So a sample with too few or too many placeholders would get features of another one. To prevent this, every
medium must match the placeholders of exactly one sample (`layout.media.place`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from vlmpack.errors import LayoutError
from vlmpack.families.audio import check_markers
from vlmpack.families.family import Family
from vlmpack.families.tiles import tiles_of_images
from vlmpack.layout.batch import AUDIO_MASK, GRIDS, SECONDS, SIZES, Media, compare_media, media_values
from vlmpack.layout.device import on_host, outside_graph, require, to_device
from vlmpack.layout.media import AUDIO, IMAGE, KINDS, VIDEO, Expected, MediaTable, Medium, place
from vlmpack.layout.row import PackedRow
from vlmpack.layout.sharing import ReadMedia

_PIXELS = {IMAGE: "pixel_values", VIDEO: "pixel_values_videos"}


@outside_graph
def media_of_row(family: Family, row: PackedRow, config: Any) -> MediaTable:
    """Return the media of a row's samples, each with its placeholders.

    If the host metadata has the media, it is compared with the tensors and token ids, on an accelerator without a
    host–device sync. Otherwise the media are read from the tensors and token ids.

    Args:
        family: the model's family.
        row: the row; with a prefix tree, its tensors hold the media that the tree computes.
        config: the model's configuration.

    Raises:
        LayoutError: the family does not take such media, or they do not match their placeholders or the metadata. On
            the host, the message names the sample.
    """
    known = row.known_metadata.media
    if known is None and row.tree is not None:
        known = MediaTable()
    if known is None:
        table = _read(family, row, config)
    else:
        family.check_takes(known.media)
        compare_media(known if row.tree is None else known.in_tree(row.tree), row.media)
        table = _compared(family, row, known, config) if family.has_vision else known
    if family.positions_rule.timed is not None:
        check_markers(row.input_ids, table, row.segments, config)
    return table


def _read(family: Family, row: PackedRow, config: Any) -> MediaTable:
    """Read the media from the tensors of a row, and find their placeholders."""
    tensors, media = row.media.to_hf(), list[Medium]()
    for name, kind in GRIDS.items():
        grids = media_values(name, tensors[name]).tolist() if name in tensors else []
        media += [Medium(kind=kind, grid=(frames, rows, columns)) for frames, rows, columns in grids]
    family.check_takes(media)
    if not family.has_vision:
        return MediaTable()
    if family.has_grids:
        if AUDIO_MASK in tensors:
            frames = media_values(AUDIO_MASK, tensors[AUDIO_MASK]).tolist()
            media += [Medium(kind=AUDIO, frames=count) for count in frames]
        expected = _expected(family, _with_seconds(media, row.media), config)
    else:
        expected = [*_tiles(family, row.media, config, IMAGE), *_tiles(family, row.media, config, VIDEO)]
    types_1T = family.types_of_row(row, config)
    if not expected and not on_host(types_1T):
        message = "the row has placeholders of images, videos or audio, but no such media; give those of every sample"
        require(types_1T == 0, message, LayoutError)
        return MediaTable()
    counted = () if family.has_grids else (IMAGE, VIDEO)
    return place(expected, types_1T[0].cpu().numpy(), row.segments, counted=counted)


def _with_seconds(records: Sequence[Medium], media: Media) -> list[Medium]:
    """Return the records with the seconds of videos that the tensors have."""
    videos = sum(medium.kind == VIDEO for medium in records)
    if media.seconds_per_grid is None or not videos:
        return [*records]
    seconds = media_values(SECONDS, media.seconds_per_grid).tolist()
    if len(seconds) != videos:
        raise LayoutError(
            f"there are {videos} videos but seconds_per_grid has {len(seconds)} values; give one for each video (the "
            "processor's second_per_grid_ts), or none"
        )
    if bad := [(video, value) for video, value in enumerate(seconds) if not 0 <= value < float("inf")]:
        raise LayoutError(
            f"video {bad[0][0]}: seconds_per_grid is {bad[0][1]}; it must be a finite time, not negative: give what "
            "the processor makes (second_per_grid_ts; Qwen-Omni: video_second_per_grid)"
        )
    timed = iter(seconds)
    return [replace(m, seconds=next(timed)) if m.kind == VIDEO else m for m in records]


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


def _compared(family: Family, row: PackedRow, known: MediaTable, config: Any) -> MediaTable:
    """Compare the media of the metadata with the tensors and token ids."""
    if row.tree is None and all(video.seconds is None for video in known.videos):
        known = replace(known, media=tuple(_with_seconds(known.media, row.media)))
    if not family.has_grids:
        _check_tiles(family, known if row.tree is None else known.in_tree(row.tree), row.media, config)
    ends: dict[int, tuple[int, int]] = {}
    for each in _expected(family, known.media, config):
        medium, runs = each.medium, tuple(stop - start for start, stop in each.medium.runs)
        start = medium.runs[0][0] - family.has_grids  # runs of media with grids do not touch
        if (family.has_grids and runs != each.tokens) or (medium.sample, start) < ends.get(medium.kind, (0, -1)):
            raise LayoutError(
                f"sample {medium.sample}: the host metadata says that one of its {KINDS[medium.kind]}s lies at tokens "
                f"{list(medium.runs[:4])}, but it makes runs of {list(each.tokens[:4])} tokens, behind those before "
                "it; leave the metadata out of a batch whose media were changed"
            )
        ends[medium.kind] = medium.sample, medium.runs[-1][1]
    types_1T, known_T = family.types_of_row(row, config), known.types(row.segments)
    known_1T = to_device(known_T[None], types_1T.device)
    agree = (types_1T != 0) == (known_1T != 0) if family.videos_as_images else types_1T == known_1T
    message = (
        "the host metadata has images, videos or audio where the row has other tokens, or none: give media in the "
        "order of their samples, or leave the metadata out of a batch that was changed"
    )
    require(agree, message, LayoutError, where=row.segments.where)
    return known


def _check_tiles(family: Family, held: MediaTable, media: Media, config: Any) -> None:
    """Compare the tokens of media with tensors on the host; reading tensors on a device would cost a sync."""
    tensors = media.with_sizes(held).to_hf()
    for kind in (IMAGE, VIDEO):
        pixels = tensors.get(_PIXELS[kind])
        if pixels is None or on_host(pixels):
            tokens = _tile_tokens(family, tensors, config, kind)
            tiles_of_images(tokens, [medium.tokens for medium in held.of_kind(kind)])


def media_reader(family: Family, config: Any) -> ReadMedia:
    """Return the function that `share` needs to find a row's media and their entries in the tensors."""
    return partial(_with_media_table, family, config=config)


def _with_media_table(family: Family, row: PackedRow, *, config: Any) -> PackedRow:
    """Add the media table to a row on the host, with the number of entries of each medium in the tensors.

    Raises:
        LayoutError: see `media_of_row`; or the row has tensors that the family does not take.
    """
    if unknown := {*row.media.to_hf()} - {*family.media, "second_per_grid_ts"}:
        raise LayoutError(f"the row has {min(unknown)}, which a {family.model_type} does not take; leave it out")
    table = media_of_row(family, row, config)
    if family.without_padding is not None:
        tensors = family.without_padding(row.media.to_hf())
        row = replace(row, media=Media.from_hf(tensors, names=tensors.keys()))
    counts = next((name for name, join in family.media.items() if join.counts_images), None)
    axes = {name: join.axis for name, join in family.media.items() if join.axis}
    table = replace(family.with_contexts(table), axes=axes, image_counts=counts)
    if not family.has_grids:
        table = _with_tiles(family, row, table, config)
    return replace(row, metadata=replace(row.known_metadata, media=table))


def _with_tiles(family: Family, row: PackedRow, table: MediaTable, config: Any) -> MediaTable:
    """Count the entries of the images and videos of a tiled family."""
    media = {kind: [*table.of_kind(kind)] for kind in KINDS}
    for kind in (IMAGE, VIDEO):
        tokens, entries = tile_entries(family, row.media.to_hf(), config, kind)
        numbers = range(len(media[kind])) if row.tree is None else table.chosen(row.tree)[kind]
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
