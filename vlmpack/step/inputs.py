"""What the model without its head is given for a row, and what is checked first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn

from vlmpack.errors import LayoutError
from vlmpack.families import Family
from vlmpack.layout import (
    IGNORE,
    Grid,
    HostMetadata,
    PackedRow,
    Segments,
    check_is_tensor,
    host_grids,
    host_seconds,
    on_host,
    outside_graph,
    require,
    seconds_of,
)
from vlmpack.step import by_sample, delta
from vlmpack.step.context import CONTEXT, RowContext, VisionSegments
from vlmpack.step.rotary import check_positions, check_restarts
from vlmpack.step.shared import Share
from vlmpack.step.whole import MediaCall


@outside_graph
def known_metadata(row: PackedRow) -> HostMetadata:
    """The row's host metadata; grids that only a tensor knows are read from it, which waits for the device once."""
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
        seen = f"{pixels.dtype} {list(pixels.shape)}" if isinstance(pixels, torch.Tensor) else type(pixels).__name__
        raise LayoutError(f"{name} must be a tensor [patches, values], got {seen}; keep what the processor gives")
    expected, seen = sum(map(prod, grids)), 0 if pixels is None else pixels.shape[0]
    if expected != seen:
        raise LayoutError(f"the grids describe {expected} patches, {name} has {seen}; pass the media of every sample")


@outside_graph
def backbone_inputs(
    family: Family,
    model: nn.Module,
    row: PackedRow,
    metadata: HostMetadata,
    share: Share,
    *,
    backend: str,
    rope_segments: Segments | None,
) -> dict[str, Any]:
    """Keyword arguments of the model without its head.

    Args:
        family: the model's family.
        model: the model with its head.
        row: the row, on the model's device.
        metadata: what `known_metadata` found.
        share: how much of the row this rank has.
        backend: name of the attention back-end, or "auto".
        rope_segments: the row cut where rotary positions restart; None: at its samples.

    Raises:
        LayoutError: media, placeholders or positions that do not fit the row.
    """
    hf_config: Any = model.config
    _check_patch_size(family, row, hf_config)
    _check_vocabulary(row, family.text_config(hf_config).vocab_size)
    types = family.media_types(row.input_ids, hf_config)
    if row.mm_token_type_ids is not None:
        _check_types(row.mm_token_type_ids, types, row.segments)
    family.check_runs(types, row.segments, metadata, config=hf_config)
    if rope_segments is not None:
        check_restarts(rope_segments, row.segments, types)
    positions = family.positions(
        types,
        rope_segments or row.segments,
        image_grids=metadata.image_grids,
        video_grids=metadata.video_grids,
        seconds_per_grid=metadata.seconds_per_grid,
        config=hf_config,
    )
    if row.position_ids is not None:
        check_positions(row.position_ids, positions, family, row.segments, restarts=rope_segments)
    media = share.media(MediaCall(family=family, model=model, row=row, metadata=metadata, types=types, backend=backend))
    return {
        "input_ids": share.own(row.input_ids),
        # A 4D mask is taken as it is, so no T x T mask is ever built; the attention function does not read it.
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=row.input_ids.device),
        "position_ids": share.own(family.rotary_ids(positions)),
        # Whatever the configuration says: a cache would be filled and thrown away.
        "use_cache": False,
        **({"mm_token_type_ids": share.own(types)} if family.has_vision else {}),
        **media.inputs,
        CONTEXT: RowContext(
            segments=row.segments,
            share=share,
            vision=_vision_segments(family, metadata, hf_config),
            backend=backend,
            experts=None if family.experts is None else _real_tokens(share.segments, row.input_ids.device),
            delta=delta.cut(family, row.segments, row.input_ids.device, family.text_config(hf_config)),
            by_sample=by_sample.cut(family, row.segments),
            features=media.form,
        ),
    }


def _vision_segments(family: Family, metadata: HostMetadata, hf_config: Any) -> VisionSegments:
    calls = [grids for grids in (metadata.image_grids, metadata.video_grids) if grids]
    return VisionSegments(segments for grids in calls for segments in family.vision_segments(grids, hf_config))


def _real_tokens(segments: Segments, device: torch.device) -> torch.Tensor | None:
    """int64 [R]: places of the real tokens. None: experts are given the whole row.

    That is so if every token is real. It is also so if none is: experts then compute padding, because their parameters
    have to keep their place in the graph.
    """
    if not segments.has_gaps or not segments.num_tokens:
        return None
    return segments.real_index(device)


def _check_patch_size(family: Family, row: PackedRow, hf_config: Any) -> None:
    """Patches were cut for this model."""
    for pixels, name in ((row.media.pixel_values, "pixel_values"), (row.media.pixel_values_videos, "videos")):
        if pixels is not None and pixels.shape[-1] != (channels := family.patch_channels(hf_config)):
            raise LayoutError(
                f"a patch of {name} has {pixels.shape[-1]} values, but {channels} in this {family.model_type} model; "
                "use the processor that belongs to the model"
            )


def _check_types(given: torch.Tensor, types: torch.Tensor, segments: Segments) -> None:
    """What a caller says of each token, [1, T], against what the token ids say; padding does not matter."""
    check_is_tensor(given, "mm_token_type_ids")
    if given.shape != types.shape or given.is_complex():
        raise LayoutError(
            f"mm_token_type_ids is {given.dtype} {list(given.shape)} but input_ids is {list(types.shape)}; leave "
            "it out, it is made from input_ids"
        )
    differs = given != types
    if segments.has_gaps:
        differs = differs & ~segments.padding_mask(types.device)
    message = (
        "mm_token_type_ids contradicts input_ids: it has to be 1 exactly on image placeholders, 2 on video "
        "placeholders and 0 elsewhere; leave it out, it is made from input_ids"
    )
    require(~differs.any(), message, LayoutError)


def _check_vocabulary(row: PackedRow, size: int) -> None:
    """Look for ids that the model does not have, which PyTorch would name without their place.

    On an accelerator its own assertions do, without making the host wait.
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
