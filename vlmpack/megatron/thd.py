"""Rows for Megatron-Core, and rows that come from it.

    PackedRow              Megatron's THD batch
    input_ids              tokens
    shift_labels           labels (shifted on both sides) and loss_mask: 1 where there is a target
    position_ids           position_ids: [1, T], or [3, 1, T] time, height, width
    moe_padding_mask       padding_mask: True on padding
    segments               packed_seq_params: a `PackedSeqParams` of the installed megatron-core

Lengths [3, 2], the row 8 tokens wide. Megatron's boundaries end where the row ends, so the tail is the last slot's:

    row                    a a a b b . . .
    cu_seqlens_q           [0, 3, 5]
    cu_seqlens_q_padded    [0, 3, 8]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from importlib import metadata
from typing import Any, Literal

import numpy as np
import torch

from vlmpack.errors import ConfigError, LayoutError
from vlmpack.layout.batch import METADATA_KEY, Media
from vlmpack.layout.device import require
from vlmpack.layout.row import IGNORE, PackedRow, check_none_on_padding
from vlmpack.layout.segments import Segments, checked_boundaries
from vlmpack.layout.sharing import check_unshared

Boundaries = Literal["real", "slots"]
"""The boundaries of a row with gaps that Megatron gets. `real`: two pairs, real tokens and slots. `slots`: one pair;
padding is attended to as the causal tail of its own sample, which no real token sees."""

_DISPENSABLE = frozenset({"total_tokens", "seq_idx", "pad_between_seqs"})
"""Fields that older versions compute for themselves or have no layer for."""


def to_megatron(row: PackedRow, *, boundaries: Boundaries = "real") -> dict[str, Any]:
    """The batch that a Megatron model step is given: whole, before context parallelism cuts it.

    Extras, media and host metadata travel along under their own names. No host–device sync.

    Args:
        row: the packed row. Without positions it gets 0, 1, 2, ... in each sample.
        boundaries: `slots` for multi-token prediction on rows with gaps (megatron-core rolls tokens across them), and
            where no attention kernel takes gaps.

    Raises:
        ConfigError: megatron-core is not installed, or too old for a row with gaps.
        LayoutError: samples of the row share prefixes.
    """
    check_unshared(row, "Megatron")
    batch = row.step_inputs()
    labels = batch.pop("shift_labels")
    targets = {} if labels is None else {"labels": labels, "loss_mask": (labels != IGNORE).float()}
    for name in ("cu_seqlens_q", "cu_seqlens_q_padded"):
        del batch[name]
    device = row.input_ids.device
    return {
        "tokens": batch.pop("input_ids"),
        **targets,
        "position_ids": _positions(row),
        "attention_mask": None,
        "padding_mask": batch.pop("moe_padding_mask"),
        "packed_seq_params": packed_seq_params(row.segments, boundaries=boundaries, device=device),
        **{name: value for name, value in batch.items() if name != "position_ids"},
    }


def from_megatron(batch: Mapping[str, Any], *, extras: Sequence[str] = ()) -> PackedRow:
    """The inverse of `to_megatron`, and the row of any other THD batch that no rank has cut yet.

    Boundaries come from the host metadata where they travel along; otherwise from `packed_seq_params`, a
    host–device sync if its tensors lie on a device. Where these hold only slots, `padding_mask` marks what is real.

    Args:
        batch: `tokens` [1, T], `packed_seq_params`, and as far as they are there `labels` [1, T] (shifted),
            `loss_mask` [1, T] of zeros and ones, `position_ids`, `padding_mask` [1, T], `mm_token_type_ids`, media.
        extras: names of further tensors to keep.

    Raises:
        LayoutError: another format than thd, boundaries that cannot be or that contradict the row, its metadata or its
            padding; a loss mask that is no mask; targets on padding.
    """
    tokens, metadata = batch["tokens"], batch.get(METADATA_KEY)
    params = batch["packed_seq_params"]
    _check_format(params)
    if metadata is not None and metadata.segments is not None:
        segments = metadata.segments
        _check_metadata(params, segments)
    else:
        segments = _segments(params, batch.get("padding_mask"), total=tokens.shape[-1])
    return PackedRow(
        input_ids=tokens,
        segments=segments,
        shift_labels=_targets(batch, segments),
        position_ids=batch.get("position_ids"),
        mm_token_type_ids=batch.get("mm_token_type_ids"),
        extras={name: batch[name] for name in extras},
        media=Media.from_hf(batch),
        metadata=None if metadata is None else replace(metadata, segments=segments),
    )


def packed_seq_params(
    segments: Segments, *, boundaries: Boundaries = "real", device: torch.device | str = "cpu"
) -> Any:
    """A `PackedSeqParams` of the installed megatron-core, with those of `packed_seq_fields` that it has.

    Raises:
        ConfigError: megatron-core is not installed, or lacks a field without which it would attend elsewhere.
    """
    params_class = _params_class()
    values = packed_seq_fields(segments, boundaries=boundaries, device=device)
    accepted = {field.name for field in fields(params_class)}
    lacking = sorted(values.keys() - accepted - _DISPENSABLE)
    if lacking:
        raise ConfigError(
            f"PackedSeqParams of the installed megatron-core has no {', '.join(lacking)}, without which it would not "
            "keep the samples of this row apart: pip install -U megatron-core"
        )
    # With `total_tokens` from the start newer versions compute `seq_idx` again, with a host–device sync.
    late = {"total_tokens"} & accepted
    params = params_class(**{name: values[name] for name in values if name in accepted - late})
    if late:
        params.total_tokens = values["total_tokens"]
    return params


def packed_seq_fields(
    segments: Segments, *, boundaries: Boundaries = "real", device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """The fields of `PackedSeqParams` by name, whatever is installed. No host–device sync.

    `cu_seqlens_*` are int32 [G + 1]; the padded pair is there only if it differs. `max_seqlen_*` is the widest slot, a
    python int. `seq_idx` is int32 [1, T]: the segment of each token. Query and key boundaries are one object.
    """
    slots = segments.without_tail()
    gaps = boundaries == "real" and slots.real != slots.stride
    attended = slots.cu_seqlens(device) if boundaries == "real" else slots.cu_seqlens_padded(device)
    padded = slots.cu_seqlens_padded(device) if gaps else None
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": attended,
        "cu_seqlens_kv": attended,
        **({"cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": padded} if gaps else {}),
        "max_seqlen_q": slots.max_slot,
        "max_seqlen_kv": slots.max_slot,
        "total_tokens": slots.total,
        "seq_idx": slots.seq_idx(device)[None],
        "pad_between_seqs": gaps,
    }


def installed_version() -> tuple[int, ...] | None:
    """(major, minor) of the installed megatron-core; None: it is not installed."""
    try:
        return tuple(int(part) for part in metadata.version("megatron-core").split(".")[:2])
    except metadata.PackageNotFoundError:
        return None


# ---------------------------------------------------------------------- to Megatron


@cache
def _params_class() -> type[Any]:
    try:
        from megatron.core.packed_seq_params import PackedSeqParams
    except ImportError as error:
        raise ConfigError(
            "PackedSeqParams is a class of megatron-core, which is not installed here: pip install 'vlmpack[megatron]'"
        ) from error
    return PackedSeqParams


def _positions(row: PackedRow) -> torch.Tensor:
    """[1, T] or [3, 1, T]: the text row of four, which only transformers reads, stays behind."""
    if row.position_ids is None:
        return row.segments.position_in_segment(row.input_ids.device)[None]
    return row.position_ids[-3:] if row.position_ids.ndim == 3 else row.position_ids


# ---------------------------------------------------------------------- from Megatron


def _check_format(params: Any) -> None:
    if params is None or params.qkv_format != "thd":
        value = "None" if params is None else f"qkv_format={params.qkv_format!r}"
        raise LayoutError(
            f"packed_seq_params is {value}, but only a thd batch is a packed row; a batch of rows is a PaddedBatch"
        )
    query, key = params.cu_seqlens_q, params.cu_seqlens_kv
    if query is None:
        raise LayoutError("packed_seq_params has no cu_seqlens_q, so samples have no ends; set it")
    if key is None or key is query:
        return
    message = "cu_seqlens_kv is not cu_seqlens_q: keys of other samples (cross attention) are no packed row"
    if key.shape != query.shape:
        raise LayoutError(message)
    require((key == query).all(), message, LayoutError)


def _check_metadata(params: Any, segments: Segments) -> None:
    """Compare them where the boundaries are, without a sync."""
    slots = segments.without_tail()
    query, padded = params.cu_seqlens_q, params.cu_seqlens_q_padded
    message = (
        f"packed_seq_params has neither the real boundaries {list(slots.real)[:9]} nor the slots "
        f"{list(slots.stride)[:9]} in the metadata ({METADATA_KEY!r}) of the row; if you changed the row, leave "
        "its metadata out"
    )
    if any(boundaries is not None and boundaries.shape != (len(slots.real),) for boundaries in (query, padded)):
        raise LayoutError(message)
    real, stride = slots.cu_seqlens(query.device), slots.cu_seqlens_padded(query.device)
    require((query == real).all() | (query == stride).all(), message, LayoutError)
    require(((query if padded is None else padded) == stride).all(), message, LayoutError)


def _segments(params: Any, padding_mask: torch.Tensor | None, *, total: int) -> Segments:
    real = stride = checked_boundaries(params.cu_seqlens_q, "cu_seqlens_q")
    if params.cu_seqlens_q_padded is not None and params.cu_seqlens_q_padded is not params.cu_seqlens_q:
        stride = checked_boundaries(params.cu_seqlens_q_padded, "cu_seqlens_q_padded")
    if stride[-1] > total:
        raise LayoutError(
            f"the batch is {total} tokens wide but its boundaries end at {stride[-1]}, where the whole row does; join "
            "the parts of context-parallel ranks first (unshard)"
        )
    if padding_mask is None:
        return Segments.from_boundaries(real, stride, total=total)
    if padding_mask.numel() != total:
        raise LayoutError(f"padding_mask is {list(padding_mask.shape)} but the batch is {total} tokens wide")
    if real == stride:
        real = _real_boundaries(padding_mask, stride)
    segments = Segments.from_boundaries(real, stride, total=total)
    agrees = (padding_mask.reshape(-1) == segments.padding_mask(padding_mask.device)).all()
    message = "padding_mask is not True exactly behind each segment's real tokens, as the boundaries say: leave it out"
    require(agrees, message, LayoutError)
    return segments


def _real_boundaries(padding_mask: torch.Tensor, stride: tuple[int, ...]) -> list[int]:
    """Cumulative tokens, G + 1 values, of which the mask leaves some in each slot."""
    before = np.concatenate([[0], np.cumsum(padding_mask.reshape(-1).cpu().numpy() == 0)])
    return before[list(stride)].tolist()


def _targets(batch: Mapping[str, Any], segments: Segments) -> torch.Tensor | None:
    labels, loss_mask = batch.get("labels"), batch.get("loss_mask")
    if labels is None:
        return None
    if loss_mask is not None:
        message = "loss_mask holds other values than 0 and 1; give weights of targets a name of their own (extras)"
        require(((loss_mask == 0) | (loss_mask == 1)).all(), message, LayoutError)
        labels = labels.masked_fill(loss_mask == 0, IGNORE)
    message = "padding has targets: the boundaries are not those of this row, or loss_mask counts padding"
    check_none_on_padding(labels, segments, message)
    return labels
