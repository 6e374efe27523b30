"""Convert rows to and from Megatron-Core's THD batches, cut a row into rank-local parts, and roll such parts.

    PackedRow              Megatron's THD batch
    input_ids              tokens
    shift_labels           labels (shifted on both sides) and loss_mask: 1 where there is a target
    position_ids           position_ids: [1, T], or [3, 1, T] time, height, width
    moe_padding_mask       padding_mask: True on padding
    segments               packed_seq_params: a `PackedSeqParams` of the installed megatron-core

Lengths [3, 2] in a row of 8 tokens. Megatron's boundaries must end where the row ends, so the last segment takes the
padding at the end:

    row                    a a a b b . . .
    cu_seqlens_q           [0, 3, 5]
    cu_seqlens_q_padded    [0, 3, 8]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, Literal, final

import numpy as np
import torch

from vlmpack.context_parallel.collectives import Route, Transfers
from vlmpack.context_parallel.partition import Partition
from vlmpack.errors import ConfigError, LayoutError
from vlmpack.layout.batch import METADATA_KEY, Media
from vlmpack.layout.device import outside_graph, require
from vlmpack.layout.row import COLUMNS, IGNORE, PackedRow, check_none_on_padding
from vlmpack.layout.segments import Layout, Segments, SlotRule, checked_boundaries
from vlmpack.layout.sharing import check_unshared

Boundaries = Literal["real", "slots"]
"""Boundaries that Megatron gets for a row with padding. `real`: two pairs, for real and for padded lengths. `slots`:
one pair, for padded lengths; padding is then the causal tail of its sample, which no real token attends to."""

_DISPENSABLE = frozenset({"total_tokens", "seq_idx", "pad_between_seqs"})
"""Fields that older versions compute themselves, or have no layer for."""


def to_megatron(row: PackedRow, *, boundaries: Boundaries = "real") -> dict[str, Any]:
    """Convert a row to the batch of a Megatron model step, before context parallelism cuts it.

    Extras, media and host metadata keep their names. No host–device sync.

    Args:
        row: the packed row. Without positions, it gets 0, 1, 2, ... in each sample.
        boundaries: use `slots` for multi-token prediction on rows with padding (megatron-core rolls tokens across it),
            and if no attention kernel supports padding.

    Raises:
        ConfigError: megatron-core is not installed, or is too old for a row with padding.
        LayoutError: samples of the row share prefixes, or its targets have weights.
    """
    check_unshared(row, "Megatron")
    if row.shift_weights is not None:
        raise LayoutError(
            "the row has shift_weights, and Megatron's loss_mask is of zeros and ones: use ThdStep, which weighs the "
            "losses that the model returns, or leave the weights out"
        )
    batch = row.step_inputs()
    labels = batch.pop("shift_labels")
    targets = {} if labels is None else {"labels": labels, "loss_mask": (labels != IGNORE).float()}
    del batch["cu_seqlens_q"], batch["cu_seqlens_q_padded"]
    return {
        "tokens": batch.pop("input_ids"),
        **targets,
        "position_ids": _positions(row),
        "attention_mask": None,
        "padding_mask": batch.pop("moe_padding_mask"),
        "packed_seq_params": packed_seq_params(row.segments, boundaries=boundaries, device=row.input_ids.device),
        **{name: value for name, value in batch.items() if name != "position_ids"},
    }


def from_megatron(batch: Mapping[str, Any], *, extras: Sequence[str] = ()) -> PackedRow:
    """Convert a Megatron THD batch to a row: the inverse of `to_megatron`. The batch must not be cut over ranks yet.

    Boundaries come from the host metadata if present, otherwise from `packed_seq_params`, which costs a host–device
    sync if its tensors are on a device. If these contain only padded lengths, `padding_mask` marks the real tokens.

    Args:
        batch: `tokens` [1, T], `packed_seq_params`, and optionally `labels` [1, T] (shifted), `loss_mask` [1, T] of
            zeros and ones, `position_ids`, `padding_mask` [1, T], `mm_token_type_ids`, media.
        extras: names of further tensors to keep.

    Raises:
        LayoutError: the format is not thd; boundaries are invalid, or contradict the row, its metadata or its padding;
            the loss mask has values other than 0 and 1; or padding has targets.
    """
    tokens, metadata, params = batch["tokens"], batch.get(METADATA_KEY), batch["packed_seq_params"]
    _check_format(params)
    if metadata is not None and (segments := metadata.segments) is not None:
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
    """Make a `PackedSeqParams` of the installed megatron-core from the `packed_seq_fields` that it knows.

    Raises:
        ConfigError: megatron-core is not installed, or lacks a field that it needs to keep samples apart.
    """
    params_class = _params_class()
    values = packed_seq_fields(segments, boundaries=boundaries, device=device)
    accepted = {field.name for field in fields(params_class)}
    if lacking := sorted(values.keys() - accepted - _DISPENSABLE):
        raise ConfigError(
            f"PackedSeqParams of the installed megatron-core has no {', '.join(lacking)}, without which it would not "
            "keep the samples of this row apart: pip install -U megatron-core"
        )
    total = values.pop("total_tokens")
    params = params_class(**{name: value for name, value in values.items() if name in accepted})
    if "total_tokens" in accepted:  # passed to the constructor, newer versions recompute `seq_idx` with a sync
        params.total_tokens = total
    return params


def packed_seq_fields(
    segments: Segments, *, boundaries: Boundaries = "real", device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Return the fields of `PackedSeqParams` by name, whatever version is installed. No host–device sync.

    `cu_seqlens_*` are int32 [G + 1]; the padded pair is present only if it differs. `max_seqlen_*` is the largest
    padded length, a Python int. `seq_idx` is int32 [1, T]: the segment of each token. Query and key boundaries are the
    same object.
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
        "max_seqlen_q": max(slots.slots),
        "max_seqlen_kv": max(slots.slots),
        "total_tokens": slots.total,
        "seq_idx": slots.seq_idx(device)[None],
        "pad_between_seqs": gaps,
    }


def validate(
    row: PackedRow | Segments | Sequence[int] | torch.Tensor, rule: SlotRule, *, total: int | None = None
) -> None:
    """Check that ranks can share a row, whoever packed it.

        validate(batch["packed_seq_params"].cu_seqlens_q_padded, SlotRule.for_parallel(context=4, layout="mirrored"))

    Args:
        row: a row, its segments, or its padded boundaries (`cu_seqlens_q_padded`). Tensors on a device cost a
            host–device sync.
        rule: padding that the ranks need.
        total: width of the row in tokens, if `row` is boundaries; None: where they end.

    Raises:
        LayoutError: lists everything that is wrong, and what to set.
    """
    segments = row.segments if isinstance(row, PackedRow) else row
    if isinstance(segments, Segments):
        total = segments.total
        stride = segments.stride if rule.tail_in_slot else segments.without_tail().stride
    else:
        stride = tuple(segments.tolist() if isinstance(segments, torch.Tensor) else segments)
        total = (stride or (0,))[-1] if total is None else total
    if problems := list(_problems(stride, total, rule)):
        raise LayoutError("ranks cannot share this row:\n- " + "\n- ".join(problems))


def _problems(stride: tuple[int, ...], total: int, rule: SlotRule) -> Iterator[str]:
    if rule.pad_to is not None and total != rule.pad_to:
        yield f"it is {total} tokens wide but pad_to={rule.pad_to}: pack it by this rule"
    if total % rule.row_multiple:
        yield f"it is {total} tokens wide: pack it with SlotRule(row_multiple={rule.row_multiple})"
    if not stride or stride[0] != 0:
        yield f"boundaries must start at 0, got {list(stride)[:6]}: set the first one to 0"
    slots = [b - a for a, b in pairwise(stride)]
    for i, slot in enumerate(slots):
        if slot < 0:
            yield f"boundaries must never decrease, but segment {i} runs from {stride[i]} to {stride[i + 1]}"
    if stride and stride[-1] != total:
        yield (
            f"boundaries end at {stride[-1]} but the row is {total} tokens wide, so kernels leave tokens unwritten or "
            "read beyond it: end the last slot where the row ends (SlotRule(tail_in_slot=True))"
        )
    odd = [(i, slot) for i, slot in enumerate(slots) if slot > 0 and slot % rule.multiple]
    if odd:
        more = f" (and {len(odd) - 1} more like it)" if len(odd) > 1 else ""
        yield (
            f"segment {odd[0][0]} has a slot of {odd[0][1]} tokens{more}, so ranks would hold tokens twice and lose "
            f"others: pack it with SlotRule(multiple={rule.multiple})"
        )


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
    """[1, T] or [3, 1, T]; drops the text positions of four, which only transformers reads."""
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
    if key is not None and key is not query:
        message = "cu_seqlens_kv is not cu_seqlens_q: keys of other samples (cross attention) are no packed row"
        if key.shape != query.shape:
            raise LayoutError(message)
        require((key == query).all(), message, LayoutError)


def _check_metadata(params: Any, segments: Segments) -> None:
    """Check that params match the metadata, by comparing on the device of the boundaries, without a sync."""
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
    if real == stride:  # count the real tokens in each padded segment
        before = np.concatenate([[0], np.cumsum(padding_mask.reshape(-1).cpu().numpy() == 0)])
        real = before[list(stride)].tolist()
    segments = Segments.from_boundaries(real, stride, total=total)
    agrees = (padding_mask.reshape(-1) == segments.padding_mask(padding_mask.device)).all()
    message = "padding_mask is not True exactly behind each segment's real tokens, as the boundaries say: leave it out"
    require(agrees, message, LayoutError)
    return segments


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


# ---------------------------------------------------------------------- one rank's part of a row


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class LocalRow:
    """The t = T / ranks tokens of a packed row that one rank holds."""

    input_ids: torch.Tensor
    """[1, t] int64."""
    partition: Partition
    """Which rank holds which tokens; its segments are those of the whole row."""
    rank: int
    """Rank that holds this part."""
    shift_labels: torch.Tensor | None = None
    """[1, t] int64: target of each token, shifted before the row was cut; -100: none."""
    shift_weights: torch.Tensor | None = None
    """[1, t] float: weight of each target; None: 1."""
    position_ids: torch.Tensor | None = None
    """[k, 1, t] or [1, t], like the positions of the row."""
    mm_token_type_ids: torch.Tensor | None = None
    """[1, t]: 0 text, 1 image, 2 video."""
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Further [1, t] or [k, 1, t] tensors."""

    @property
    def segments(self) -> Segments:
        """Boundaries of the whole row."""
        return self.partition.segments

    @property
    def index(self) -> torch.Tensor:
        """int64 [t]: index in the whole row of each token."""
        return self.partition.index(self.rank, self.input_ids.device)

    @property
    def moe_padding_mask(self) -> torch.Tensor:
        """[1, t] bool: True on padding."""
        return self.partition.cut(self.segments.padding_mask(self.input_ids.device)[None], self.rank)


def shard(row: PackedRow, rank: int, ranks: int, *, layout: Layout = "mirrored") -> LocalRow:
    """Cut the part of a row that `rank` of `ranks` holds. No host–device sync.

    Every rank gets the same whole row and cuts out its own part. Labels are already shifted, so the last target of a
    part may be a token of another part. Media stay with the row: an image's features belong to tokens of several ranks.

    Args:
        row: the whole row.
        rank: rank whose part to cut.
        ranks: number of ranks.
        layout: `mirrored` balances causal attention, `contiguous` accepts any boundaries.

    Raises:
        LayoutError: the row cannot be cut like this; names the segment, what was seen and what to set.
    """
    check_unshared(row, "a rank that holds a part of it")
    partition = Partition(segments=row.segments, ranks=ranks, layout=layout)
    columns = {name: getattr(row, name) for name in COLUMNS}
    return LocalRow(
        **{name: partition.cut(x, rank) for name, x in columns.items() if x is not None},
        partition=partition,
        rank=rank,
        extras={name: partition.cut(tensor, rank) for name, tensor in row.extras.items()},
    )


def unshard(
    parts: Sequence[torch.Tensor], segments: Segments, *, layout: Layout = "mirrored", token_dim: int = -1
) -> torch.Tensor:
    """Join one tensor's parts of all ranks to that of the whole row: the inverse of `shard`.

    Args:
        parts: a [..., t, ...] tensor of each rank, in rank order.
        segments: boundaries of the whole row.
        layout: layout with which the row was cut.
        token_dim: dimension of length t, which has length T in the result.

    Raises:
        LayoutError: the parts do not belong to this row.
    """
    return Partition(segments=segments, ranks=len(parts), layout=layout).join(parts, token_dim=token_dim)


@final
@dataclass(frozen=True, kw_only=True)
class Halo:
    """The tokens that each rank needs from others to roll its part of a row by 1, ..., K tokens."""

    partition: Partition
    """Which rank holds which tokens."""
    depth: int
    """K, the maximum number of tokens to roll by."""

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise LayoutError(f"a halo serves rolls by 1 token and more, got depth={self.depth}")

    def route(self, rank: int) -> Route:
        """Return which tokens `rank` sends to each rank, and how many it receives: at most K per contiguous run."""
        self.partition.check_rank(rank)
        return self._transfers.route(rank)

    def places(self, rank: int) -> torch.Tensor:
        """int64 [h]: index in the row of each token that `rank` receives, in the order received."""
        self.partition.check_rank(rank)
        return torch.from_numpy(np.concatenate(self._missing)[self._transfers.arriving(rank)])

    def roll_left(
        self,
        part: torch.Tensor,
        halo: torch.Tensor,
        rank: int,
        *,
        depth: int = 1,
        fill: float,
        token_dim: int = -1,
    ) -> torch.Tensor:
        """Compute the part of `rank` of `vlmpack.layout.roll_left` of the whole row. Differentiable.

        Args:
            part: the part of `rank`, t tokens along `token_dim`.
            halo: tokens that `rank` received by its `route`, h tokens along `token_dim`.
            rank: rank whose part to roll.
            depth: number of tokens to roll by, 1 to K.
            fill: value for the last `depth` tokens of each segment, and for padding.
            token_dim: dimension of tokens.

        Raises:
            LayoutError: `depth` is not between 1 and K, or a tensor has another width.
        """
        if not 1 <= depth <= self.depth:
            raise LayoutError(f"this halo serves rolls by 1 to {self.depth} tokens, got depth={depth}")
        successor = self._successor(rank, depth, part.device)
        widths, needed = (part.shape[token_dim], halo.shape[token_dim]), (self.partition.local_total, self._size(rank))
        if widths != needed:
            raise LayoutError(
                f"rank {rank} rolls its {needed[0]} tokens with {needed[1]} that come to it, got {widths[0]} and "
                f"{widths[1]} at dimension {token_dim}"
            )
        shape = [*part.shape]
        shape[token_dim] = 1
        filling = part.new_full(shape, fill)
        return torch.cat([part, halo, filling], token_dim).index_select(token_dim, successor)

    # ------------------------------------------------------------------ computed once per row

    @cached_property
    def _missing(self) -> list[np.ndarray]:
        """For each rank, the row's tokens up to K behind one of its own, in the same segment, that it does not hold."""
        stops, missing = _stops(self.partition.segments), []
        for rank in range(self.partition.ranks):
            held = self.partition.index(rank).numpy()
            behind = held[:, None] + np.arange(1, min(self.depth, len(stops)) + 1)
            missing.append(np.setdiff1d(behind[behind < stops[held, None]], held))
        return missing

    @cached_property
    def _transfers(self) -> Transfers:
        """The transfers of all missing tokens, rank by rank."""
        places = self.partition.place().numpy()[np.concatenate(self._missing)]
        source, local = np.divmod(places, self.partition.local_total)
        target = np.repeat(np.arange(self.partition.ranks), [*map(len, self._missing)])
        return Transfers(source=source, local=local, target=target, ranks=self.partition.ranks)

    @outside_graph
    def _size(self, rank: int) -> int:
        return len(self._missing[rank])

    @outside_graph
    def _successor(self, rank: int, depth: int, device: torch.device) -> torch.Tensor:
        """int64 [t]: index in (part + halo + filling) of the token `depth` later in the segment of each token."""
        partition = self.partition
        key = ("halo", partition.layout, partition.ranks, self.depth, rank, depth)
        return partition.segments.derived(key, device, lambda: self._computed_successor(rank, depth))

    def _computed_successor(self, rank: int, depth: int) -> np.ndarray:
        index, came = self.partition.index(rank).numpy(), self.places(rank).numpy()
        filling = len(index) + len(came)
        place = np.full(self.partition.segments.total + depth, filling)
        place[np.concatenate([index, came])] = np.arange(filling)
        return np.where(index + depth < _stops(self.partition.segments)[index], place[index + depth], filling)


def _stops(segments: Segments) -> np.ndarray:
    """int64 [T]: for each token, the end of its segment's real tokens; 0 on the padding at the end of the row."""
    return np.repeat([*(stop for _, stop in segments.spans), 0], segments.slots_and_tail)
