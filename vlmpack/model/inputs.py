"""Inputs of the model without its head for a row, and what is checked first.

What a caller gives of rotary positions is checked, not trusted: where they restart, and what they are. Restarts
(`rope_cu_seqlens`) are counted in real tokens, as `cu_seqlens_q` is, or in places of the packed row, as
`cu_seqlens_q_padded` is. Counted in real tokens they end at the number of real tokens; counted in places, not before
the last sample does. Only where a row has gaps between samples are these two different.

    row       a a a .  b b b b b . . .     two samples, slots a multiple of 4
    tokens    0        3     5       8     [0, 3, 5, 8]: at both samples, and before the third token of b
    places    0        4     6       9     [0, 4, 6, 9] or [0, 4, 6, 12]: the same
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import torch

from vlmpack.context_parallel import Parallel
from vlmpack.errors import LayoutError
from vlmpack.families import Family
from vlmpack.layout import (
    IGNORE,
    Grid,
    HostMetadata,
    PackedRow,
    Segments,
    check_is_tensor,
    checked_boundaries,
    host_grids,
    host_seconds,
    on_host,
    outside_graph,
    require,
    seconds_of,
    to_device,
)
from vlmpack.model.mechanisms import CONTEXT, Mechanism, ModelParts, RowContext, RowSetup
from vlmpack.model.row import part_of


@outside_graph
def setup_row(model: ModelParts, row: PackedRow, *, parallel: Parallel | None, backend: str) -> RowSetup:
    """Take the part of a row that goes through the model on this rank, and derive its metadata.

    Args:
        model: the model.
        row: the row, on the model's device.
        parallel: how ranks work together on the row; None: this one has it to itself.
        backend: name of the attention back-end, or "auto".

    Raises:
        LayoutError: media or token ids that do not fit the row or the model.
    """
    metadata, part, hf_config = host_metadata(row), part_of(row, parallel), model.core.config
    _check_patch_size(model.family, row, hf_config)
    _check_vocabulary(row, model.family.text_config(hf_config).vocab_size)
    types = model.family.media_types(row.input_ids, hf_config)
    return RowSetup(model=model, row=row, metadata=metadata, part=part, types=types, backend=backend)


def host_metadata(row: PackedRow) -> HostMetadata:
    """The row's metadata on the host; grids that only a tensor holds are read from it: one host–device sync."""
    metadata, media = row.known_metadata, row.media
    metadata = replace(
        metadata,
        image_grids=host_grids(metadata.image_grids, media.image_grid_thw, "image_grid_thw"),
        video_grids=host_grids(metadata.video_grids, media.video_grid_thw, "video_grid_thw"),
    )
    if media.second_per_grid_ts is not None:
        seconds = host_seconds(metadata.seconds_per_grid, seconds_of(media.second_per_grid_ts))
        metadata = replace(metadata, seconds_per_grid=seconds)
    for pixels, grids, name in (
        (media.pixel_values, metadata.image_grids, "pixel_values"),
        (media.pixel_values_videos, metadata.video_grids, "pixel_values_videos"),
    ):
        _check_patches(pixels, grids, name)
    return metadata


def _check_patches(pixels: torch.Tensor | None, grids: Sequence[Grid], name: str) -> None:
    if pixels is not None and (not isinstance(pixels, torch.Tensor) or pixels.ndim != 2 or pixels.is_complex()):
        count = f"{pixels.dtype} {list(pixels.shape)}" if isinstance(pixels, torch.Tensor) else type(pixels).__name__
        raise LayoutError(f"{name} must be a tensor [patches, values], got {count}; keep what the processor gives")
    expected, count = sum(map(prod, grids)), 0 if pixels is None else pixels.shape[0]
    if expected != count:
        raise LayoutError(f"the grids describe {expected} patches, {name} has {count}; pass the media of every sample")


@outside_graph
def backbone_inputs(
    setup: RowSetup, mechanisms: Sequence[Mechanism], *, rope_segments: Segments | None
) -> dict[str, Any]:
    """Keyword arguments of the model without its head.

    Args:
        setup: the row.
        mechanisms: those of the model.
        rope_segments: the row cut where rotary positions restart; None: at its samples.

    Raises:
        LayoutError: media, placeholders or positions that do not fit the row.
    """
    family, row, metadata, part = setup.model.family, setup.row, setup.metadata, setup.part
    if row.mm_token_type_ids is not None:
        _check_types(row.mm_token_type_ids, setup.types, row.segments)
    family.check_runs(setup.types, row.segments, metadata, config=setup.config)
    if rope_segments is not None:
        check_restarts(rope_segments, row.segments, setup.types)
    positions = family.positions(
        setup.types,
        rope_segments or row.segments,
        image_grids=metadata.image_grids,
        video_grids=metadata.video_grids,
        seconds_per_grid=metadata.seconds_per_grid,
        config=setup.config,
    )
    if row.position_ids is not None:
        check_positions(row.position_ids, positions, family, row.segments, restarts=rope_segments)
    entries = {mechanism.name: mechanism.prepare(setup) for mechanism in mechanisms}
    inputs: dict[str, Any] = {
        "input_ids": part.cut(row.input_ids),
        # A 4D mask is taken as it is, so no T x T mask is ever built; the attention function does not read it.
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=row.input_ids.device),
        "position_ids": part.cut(family.rotary_ids(positions)),
        # Whatever the configuration: a cache would be filled and thrown away.
        "use_cache": False,
        **({"mm_token_type_ids": part.cut(setup.types)} if family.has_vision else {}),
        CONTEXT: RowContext(segments=row.segments, part=part, entries=entries),
    }
    for mechanism in mechanisms:
        inputs |= mechanism.inputs(entries[mechanism.name])
    return inputs


def _check_patch_size(family: Family, row: PackedRow, hf_config: Any) -> None:
    """Patches were cut for this model."""
    for pixels, name in ((row.media.pixel_values, "pixel_values"), (row.media.pixel_values_videos, "videos")):
        if pixels is not None and pixels.shape[-1] != (channels := family.patch_channels(hf_config)):
            raise LayoutError(
                f"a patch of {name} has {pixels.shape[-1]} values, but {channels} in this {family.model_type} model; "
                "use the processor that belongs to the model"
            )


def _check_types(column: torch.Tensor, types: torch.Tensor, segments: Segments) -> None:
    """Compare a caller's type of each token, [1, T], with the token ids; padding does not matter."""
    check_is_tensor(column, "mm_token_type_ids")
    if column.shape != types.shape or column.is_complex():
        raise LayoutError(
            f"mm_token_type_ids is {column.dtype} {list(column.shape)} but input_ids is {list(types.shape)}; leave "
            "it out, it is made from input_ids"
        )
    differs = column != types
    if segments.has_gaps:
        differs = differs & ~segments.padding_mask(types.device)
    message = (
        "mm_token_type_ids contradicts input_ids: it has to be 1 exactly on image placeholders, 2 on video "
        "placeholders and 0 elsewhere; leave it out, it is made from input_ids"
    )
    require(~differs.any(), message, LayoutError)


def _check_vocabulary(row: PackedRow, size: int) -> None:
    """Look for ids that the model does not have, which PyTorch would name without their place.

    On an accelerator its own assertions do, without a sync.
    """
    for name, ids in (("input_ids", row.input_ids), ("a target of labels", row.shift_labels)):
        if ids is None or not on_host(ids):
            continue
        values = ids[0].numpy()
        odd = values.view(np.uint64) >= size  # negative numbers are large ones
        if name != "input_ids":
            odd &= values != IGNORE
        if odd.any():
            at = int(odd.argmax())
            raise LayoutError(
                f"place {at} of the row: {name} is {values[at]}, but this model's ids go from 0 to {size - 1}"
                f"{'' if name == 'input_ids' else f', and what is not learnt is {IGNORE}'}; use the tokenizer that "
                "belongs to the model"
            )


# ---------------------------------------------------------------------- rotary positions that a caller gives

NAME = "rope_cu_seqlens"


@outside_graph
def rope_segments(boundaries: Any, segments: Segments) -> Segments | None:
    """The row cut at each place where rotary positions restart; None: at its samples, as always.

    Args:
        boundaries: a caller's `rope_cu_seqlens`: a tensor [any] (on a device: a host–device sync), a list, a tuple, or
            None.
        segments: the row.

    Raises:
        LayoutError: no boundaries, not of this row, or a sample whose positions would not start anew.
    """
    if boundaries is None:
        return None
    places = _places(checked_boundaries(boundaries, NAME), segments)
    for sample, (start, stop) in enumerate(segments.spans):
        if stop > start and start not in places:
            raise LayoutError(
                f"{NAME} has no boundary where sample {sample} starts, at place {start} of the row, so its positions "
                "would run on from the sample before it; keep every boundary of cu_seqlens_q and add your own"
            )
    cut = _cut(segments, sorted(places))
    return None if cut.lengths == segments.lengths else cut


def _places(edges: tuple[int, ...], segments: Segments) -> frozenset[int]:
    """Where in the row positions restart."""
    if edges[-1] == segments.num_tokens:
        samples = [(token, bisect_right(segments.real, token) - 1) for token in edges if token < edges[-1]]
        return frozenset(segments.stride[sample] + token - segments.real[sample] for token, sample in samples)
    end = max((stop for start, stop in segments.spans if stop > start), default=0)
    if not end <= edges[-1] <= segments.total:
        raise LayoutError(
            f"{NAME} ends at {edges[-1]}, but the row has {segments.num_tokens} real tokens and its last sample ends "
            f"at place {end} of {segments.total}; count in real tokens, as cu_seqlens_q does, or in places of the row"
        )
    return frozenset(edges)


def _cut(segments: Segments, places: list[int]) -> Segments:
    lengths, slots = [], []
    for (start, stop), slot in zip(segments.spans, segments.slots, strict=True):
        inner = places[bisect_right(places, start) : bisect_left(places, stop)]
        pieces = [b - a for a, b in pairwise([start, *inner, stop])]
        lengths += pieces
        slots += [*pieces[:-1], slot - sum(pieces[:-1])]
    return Segments(lengths=tuple(lengths), slots=tuple(slots), total=segments.total, num_samples=len(lengths))


@outside_graph
def check_restarts(rope: Segments, segments: Segments, types: torch.Tensor) -> None:
    """Positions inside an image or video count from its first token, so they cannot restart there.

    Args:
        rope: the row cut at restarts.
        segments: the row.
        types: [1, T]: 0 text, 1 image, 2 video.
    """
    inner = to_device(np.asarray(sorted({*rope.stride} - {*segments.stride}), np.int64), types.device)
    split = (types[0, inner] == types[0, inner - 1]) & (types[0, inner] != 0)
    message = f"{NAME} restarts positions inside an image or a video; move the boundary before its first placeholder"
    require(~split.any(), message, LayoutError)


@outside_graph
def check_positions(
    caller: torch.Tensor, positions: torch.Tensor, family: Family, segments: Segments, *, restarts: Segments | None
) -> None:
    """A caller's own positions must be those of every sample alone. What stands on padding does not matter.

    Args:
        caller: [3, 1, T] time, height, width; or [4, 1, T], the place in the sample first. Of a text family [1, T], or
            [1, 1, T].
        positions: [4, 1, T] as computed.
        family: the model's family.
        segments: the row.
        restarts: the row cut at the caller's `rope_cu_seqlens`; None: at samples.

    Raises:
        LayoutError: another shape, or other positions; on the host it names the first one.
    """
    given_kT = _rows(caller, family, segments.total)
    text_1T = segments.position_in_segment(positions.device)[None]
    rotary_kT = family.rotary_ids(positions).reshape(-1, segments.total)
    expected_kT = rotary_kT if len(given_kT) == len(rotary_kT) else torch.cat((text_1T, rotary_kT))
    real = segments.real_index(positions.device)
    given_kR = given_kT.to(positions.device, non_blocking=True).index_select(1, real)
    expected_kR = expected_kT.index_select(1, real)
    differs_R = (given_kR != expected_kR).any(0)
    wrong = differs_R.any()
    where = ""
    if on_host(wrong) and wrong:
        first = int(differs_R.int().argmax())
        sample = bisect_right(segments.real, first) - 1
        where = (
            f": sample {sample} has {given_kR[:, first].tolist()} at its token {first - segments.real[sample]}, where "
            f"{expected_kR[:, first].tolist()} is right"
        )
    restart = "every sample" if restarts is None else f"every sample and boundary of {NAME}"
    message = (
        f"position_ids are not what each sample has alone{where}. They must restart at {restart} and place image "
        "tokens by their grids; leave position_ids out, they are computed"
    )
    require(~wrong, message, LayoutError)


def _rows(positions: torch.Tensor, family: Family, total: int) -> torch.Tensor:
    """[1, T] of a text family, [3, T] or [4, T] of others."""
    if not isinstance(positions, torch.Tensor):
        raise LayoutError(f"position_ids must be a tensor, got {type(positions).__name__}")
    shapes = [(3, 1, total), (4, 1, total)] if family.has_vision else [(1, total), (1, 1, total)]
    if tuple(positions.shape) not in shapes:
        rows = " (time, height, width; or the text row first: with fewer rows images lose their places)"
        raise LayoutError(
            f"position_ids is {list(positions.shape)}, but {family.model_type} needs "
            f"{' or '.join(str(list(shape)) for shape in shapes)} for this row{rows if family.has_vision else ''}: "
            "leave position_ids out, they are computed from the boundaries and the grids"
        )
    return positions.reshape(-1, total)
