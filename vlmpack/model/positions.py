"""Rotary positions given by the caller: where they restart, and their values. Both are checked, not trusted.

Restarts (`rope_cu_seqlens`) are counted in real tokens, like `cu_seqlens_q`, or in positions of the packed row, like
`cu_seqlens_q_padded`. In real tokens, the last boundary is the number of real tokens. In positions of the row, it is at
or after the end of the last sample. The two differ only if the row has gaps between samples.

    row       a a a .  b b b b b . . .     two samples, each padded to a multiple of 4
    tokens    0        3     5       8     [0, 3, 5, 8]: at both samples, and before the third token of b
    positions 0        4     6       9     [0, 4, 6, 9] or [0, 4, 6, 12]: the same restarts
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise
from typing import Any, cast

import torch

from vlmpack.errors import FamilyError, LayoutError
from vlmpack.families.family import Family
from vlmpack.layout.batch import Media, check_is_tensor
from vlmpack.layout.device import copied, on_host, outside_graph, require
from vlmpack.layout.media import AUDIO, IMAGE, KINDS, TEXT, VIDEO, MediaTable
from vlmpack.layout.row import PackedRow
from vlmpack.layout.segments import Segments, checked_boundaries
from vlmpack.model.mechanisms import ModelParts

NAME = "rope_cu_seqlens"


@outside_graph
def rope_segments(boundaries: Any, segments: Segments) -> Segments | None:
    """Return the row split wherever rotary positions restart; None: only at the samples, as usual.

    Args:
        boundaries: the caller's `rope_cu_seqlens`: a 1D tensor of any length (on an accelerator: a host–device sync), a
            list or a tuple.
        segments: the row.

    Raises:
        LayoutError: invalid boundaries, boundaries of another row, or a sample whose positions would not restart.
    """
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
    """Return the positions in the row at which rotary positions restart."""
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
def positions_of_row(
    row: PackedRow,
    table: MediaTable,
    types: torch.Tensor,
    family: Family,
    config: Any,
    *,
    restarts: Segments | None = None,
) -> torch.Tensor:
    """Compute the rotary positions of a row, [4, 1, T]. The caller's own positions and token types must agree.

    Args:
        row: the row.
        table: the row's media.
        types: [1, T] token types derived from the token ids.
        family: the model's family.
        config: the model's configuration.
        restarts: the row split at the caller's `rope_cu_seqlens`; None: at the samples.

    Raises:
        LayoutError: types or positions do not match the row.
    """
    segments = row.segments
    if row.mm_token_type_ids is not None:
        _check_types(row.mm_token_type_ids, types, segments, family)
    if restarts is not None:
        check_restarts(restarts, segments, table)
    device = row.input_ids.device
    positions = family.positions(table, segments, config=config, restarts=restarts, device=device)
    if row.position_ids is not None:
        check_positions(row.position_ids, positions, family, segments, restarts=restarts)
    return positions


def _check_types(column: torch.Tensor, types: torch.Tensor, segments: Segments, family: Family) -> None:
    """Compare the caller's token types, [1, T], with the token ids. Padding is ignored."""
    check_is_tensor(column, "mm_token_type_ids")
    if column.shape != types.shape or column.is_complex():
        raise LayoutError(
            f"mm_token_type_ids is {column.dtype} {list(column.shape)} but input_ids is {list(types.shape)}; leave "
            "it out, it is made from input_ids"
        )
    differs = column != types
    if segments.has_padding:
        differs = differs & ~segments.padding_mask(types.device)
    message = (
        f"mm_token_type_ids contradicts input_ids: it has to be {family.type_values}and 0 elsewhere; leave it out, it "
        "is made from input_ids"
    )
    require(~differs.any(), message, LayoutError)


@outside_graph
def check_restarts(rope: Segments, segments: Segments, table: MediaTable) -> None:
    """Refuse restarts inside a run of image or video tokens: the image or video would have no valid positions.

    Args:
        rope: the row split at restarts.
        segments: the row.
        table: the row's media.

    Raises:
        LayoutError: there is such a restart.
    """
    inner = {*rope.stride} - {*segments.stride}
    for medium in table.media:
        first = segments.stride[medium.sample]
        if any(first + start < at < first + stop for start, stop in medium.runs for at in inner):
            raise LayoutError(
                f"{NAME} restarts positions inside {KINDS[medium.kind]} tokens of sample {medium.sample}; move the "
                "boundary before its first placeholder"
            )


@outside_graph
def check_rope_index(model: ModelParts) -> None:
    """Compare positions for a sample with an image, and with a video and audio if the family takes them, with the
    model's own.

    Raises:
        FamilyError: the model's `get_rope_index` gives other positions than the family's descriptor.
    """
    family, config, backbone = model.family, model.core.config, cast(Any, model.family.backbone(model.core))
    merge, frames, seconds = family.merge(config), 30, [0.7]
    images, video = torch.tensor([[1, 2 * merge, 3 * merge]]), (2, merge, 2 * merge)
    for videos in (None, torch.tensor([video]))[: 1 + family.has_videos]:
        runs = [(IMAGE, family.media_tokens(images.tolist(), config))]
        tensors: dict[str, torch.Tensor] = {}
        if family.audio is not None:
            runs.append((AUDIO, family.audio.tokens(frames, config.audio_config)))
            tensors["feature_attention_mask"] = torch.ones(1, frames, dtype=torch.int64)
        if videos is not None:
            runs += [(VIDEO, tokens) for tokens in family.video_runs([video], config)]
            if "video_second_per_grid" in family.media:
                tensors["video_second_per_grid"] = torch.tensor(seconds)
        ids, kinds = list[int](), list[int]()
        for kind, tokens in runs:
            name = KINDS[IMAGE if family.videos_as_images else kind]
            start = getattr(config, f"{'audio' if kind == AUDIO else 'vision'}_start_token_id", 0)
            ids += [0, start, *[getattr(config, f"{name}_token_id")] * tokens, 0]  # 0 is the id of some word
            kinds += [TEXT, TEXT, *[kind] * tokens, TEXT]
        input_ids, types = torch.tensor([ids]), torch.tensor([kinds])
        media = Media(image_grid_thw=images, video_grid_thw=videos, tensors=tensors)
        segments = Segments.from_lengths([len(ids)])
        row = PackedRow(input_ids=input_ids, segments=segments, mm_token_type_ids=types, media=media)
        expected = family.positions(family.media_of_row(row, config), segments, config=config)
        further: dict[str, Any] = {"mm_token_type_ids": types}
        if family.positions_rule.of_sample is not None:
            further = {"attention_mask": torch.ones_like(input_ids), "audio_seqlens": torch.tensor([frames])}
            further["second_per_grids"] = tensors.get("video_second_per_grid")
        if videos is not None:
            further["video_grid_thw"] = videos
        upstream, _ = backbone.get_rope_index(input_ids, image_grid_thw=images, **further)
        if (differs := upstream.cpu() != expected[1:]).any():
            at = int(differs.any(0)[0].int().argmax())
            kinds_seen = ", ".join(dict.fromkeys(KINDS[kind] for kind, _ in runs))
            raise FamilyError(
                f"token {at} of a sample with {kinds_seen} is at {upstream[:, 0, at].tolist()} "
                f"(time, height, width) in the code of this {type(model.core).__name__}, but {family.model_type} is "
                f"described with {expected[1:, 0, at].tolist()}: rotary positions would be wrong. Use a transformers "
                "of the supported range, and an unmodified model"
            )


@outside_graph
def check_positions(
    caller: torch.Tensor, positions: torch.Tensor, family: Family, segments: Segments, *, restarts: Segments | None
) -> None:
    """Check that the caller's positions are the ones each sample would have on its own. Padding is ignored.

    Args:
        caller: [3, 1, T] time, height, width, or [4, 1, T] with the position in the sample first. For a text family
            [1, T] or [1, 1, T].
        positions: the computed positions, [4, 1, T].
        family: the model's family.
        segments: the row.
        restarts: the row split at the caller's `rope_cu_seqlens`; None: at the samples.

    Raises:
        LayoutError: another shape, or other positions; on the host the message names the first difference.
    """
    caller_kT = _rows(caller, family, segments.total)
    text_1T = segments.position_in_segment(positions.device)[None]
    rotary_kT = family.rotary_ids(positions).reshape(-1, segments.total)
    expected_kT = rotary_kT if len(caller_kT) == len(rotary_kT) else torch.cat((text_1T, rotary_kT))
    real = segments.real_index(positions.device)
    caller_kR = copied(caller_kT, positions.device).index_select(1, real)
    expected_kR = expected_kT.index_select(1, real)
    differs_R = (caller_kR != expected_kR).any(0)
    wrong = differs_R.any()
    where = ""
    if on_host(wrong) and wrong:
        first = int(differs_R.int().argmax())
        sample = bisect_right(segments.real, first) - 1
        where = (
            f": sample {sample} has {caller_kR[:, first].tolist()} at its token {first - segments.real[sample]}, where "
            f"{expected_kR[:, first].tolist()} is right"
        )
    restart = "every sample" if restarts is None else f"every sample and boundary of {NAME}"
    message = (
        f"position_ids are not what each sample has alone{where}. They must restart at {restart} and place image "
        "tokens by their grids; leave position_ids out, they are computed"
    )
    require(~wrong, message, LayoutError)


def _rows(positions: torch.Tensor, family: Family, total: int) -> torch.Tensor:
    """Check the shape and return [1, T] for a text family, [3, T] or [4, T] for others."""
    if not isinstance(positions, torch.Tensor):
        raise LayoutError(f"position_ids must be a tensor, got {type(positions).__name__}")
    has_axes = family.positions_rule.axes == 3
    shapes = [(3, 1, total), (4, 1, total)] if has_axes else [(1, total), (1, 1, total)]
    if tuple(positions.shape) not in shapes:
        rows = " (time, height, width; or the text row first: with fewer rows images lose their places)"
        raise LayoutError(
            f"position_ids is {list(positions.shape)}, but {family.model_type} needs "
            f"{' or '.join(str(list(shape)) for shape in shapes)} for this row{rows if has_axes else ''}: "
            "leave position_ids out, they are computed from the boundaries and the grids"
        )
    return positions.reshape(-1, total)
