"""Rows for Megatron-Core and back: THD batches, a rank's part of a row, and rolls of such parts.

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, partial
from importlib import metadata
from itertools import pairwise
from typing import Any, Literal, final

import numpy as np
import torch

from vlmpack.context_parallel.collectives import Route, Transfers
from vlmpack.context_parallel.partition import Partition
from vlmpack.context_parallel.vision import MediaShare
from vlmpack.errors import ConfigError, LayoutError
from vlmpack.layout.batch import METADATA_KEY, HostMetadata, Media, compare_media, host_grids
from vlmpack.layout.device import outside_graph, require
from vlmpack.layout.media import IMAGE, VIDEO, MediaTable, Medium
from vlmpack.layout.row import IGNORE, PackedRow, check_none_on_padding
from vlmpack.layout.segments import Layout, Segments, SlotRule, checked_boundaries
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


def validate(
    row: PackedRow | Segments | Sequence[int] | torch.Tensor, rule: SlotRule, *, total: int | None = None
) -> None:
    """Check that ranks can share a row, whoever packed it.

        validate(batch["packed_seq_params"].cu_seqlens_q_padded, SlotRule.for_parallel(context=4, layout="mirrored"))

    Args:
        row: a row, its segments, or the boundaries of its slots (`cu_seqlens_q_padded`): tensors on a device cost a
            host-device sync.
        rule: what the ranks need.
        total: width of the row in tokens, where `row` is boundaries; None: their end.

    Raises:
        LayoutError: everything that is wrong, and what to set.
    """
    segments = row.segments if isinstance(row, PackedRow) else row
    if isinstance(segments, Segments):
        total = segments.total
        stride = segments.stride if rule.tail_in_slot else segments.without_tail().stride
    else:
        stride = tuple(segments.tolist() if isinstance(segments, torch.Tensor) else segments)
        total = (stride or (0,))[-1] if total is None else total
    problems = list(_problems(stride, total, rule))
    if problems:
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


# ---------------------------------------------------------------------- a rank's part of a row


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class LocalRow:
    """The t = T / ranks tokens of a packed row that one rank holds."""

    input_ids: torch.Tensor
    """[1, t] int64."""
    partition: Partition
    """The rank that holds each part; its segments are the whole row's."""
    rank: int
    """Whose part this is."""
    shift_labels: torch.Tensor | None = None
    """[1, t] int64: the target of each token, shifted before the row was cut; -100: none."""
    shift_weights: torch.Tensor | None = None
    """[1, t] floats: the weight of each target; None: 1."""
    position_ids: torch.Tensor | None = None
    """[k, 1, t] or [1, t], as the row had them."""
    mm_token_type_ids: torch.Tensor | None = None
    """[1, t]: 0 text, 1 image, 2 video."""
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Further [1, t] or [k, 1, t] tensors."""
    media: Media = field(default_factory=Media)
    """Pixels and grids that this rank computes, whosever tokens they stand for."""
    images: MediaShare
    """The rank that computes each image."""
    videos: MediaShare
    """The rank that computes each video."""
    metadata: HostMetadata | None = None
    """Metadata of the whole row on the host; `num_targets` is that of all ranks."""

    @property
    def segments(self) -> Segments:
        """The whole row's boundaries."""
        return self.partition.segments

    @property
    def local_segments(self) -> Segments:
        """The boundaries of this part; positions are not counted in it."""
        return self.partition.local_segments(self.rank)

    @property
    def index(self) -> torch.Tensor:
        """int64 [t]: the place in the row of each token."""
        return self.partition.index(self.rank, self.input_ids.device)

    @property
    def moe_padding_mask(self) -> torch.Tensor:
        """[1, t] bool: True where the row holds padding."""
        return self.partition.cut(self.segments.padding_mask(self.input_ids.device)[None], self.rank)


def shard(row: PackedRow, rank: int, ranks: int, *, layout: Layout = "mirrored") -> LocalRow:
    """The part of `row` that `rank` of `ranks` holds.

    Every rank is given the same whole row and cuts its own part out of it. Labels are shifted already, so a part's
    last target is a token of another part. Images are spread over ranks by their patches, wherever their tokens are.

    Args:
        row: the whole row; with media in its metadata there is no host–device sync.
        rank: whose part.
        ranks: how many there are.
        layout: `mirrored` balances causal attention, `contiguous` takes any boundaries.

    Raises:
        LayoutError: the row cannot be cut so; names the segment, what was seen and what to set.
    """
    check_unshared(row, "a rank that holds a part of it")
    partition = Partition(segments=row.segments, ranks=ranks, layout=layout)
    partition.check_rank(rank)

    def cut(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else partition.cut(tensor, rank)

    table = _table_of(row)
    images, videos = (MediaShare.spread(media, ranks=ranks) for media in (table.images, table.videos))
    return LocalRow(
        input_ids=partition.cut(row.input_ids, rank),
        partition=partition,
        rank=rank,
        shift_labels=cut(row.shift_labels),
        shift_weights=cut(row.shift_weights),
        position_ids=cut(row.position_ids),
        mm_token_type_ids=cut(row.mm_token_type_ids),
        extras={name: partition.cut(tensor, rank) for name, tensor in row.extras.items()},
        media=_media_of(row.media, images, videos, rank),
        images=images,
        videos=videos,
        metadata=row.metadata,
    )


def unshard(
    parts: Sequence[torch.Tensor], segments: Segments, *, layout: Layout = "mirrored", token_dim: int = -1
) -> torch.Tensor:
    """The inverse of `shard` for one tensor: what each rank holds of it, in the order of ranks, to the row's own.

    Args:
        parts: a [..., t, ...] of each rank.
        segments: the whole row's boundaries.
        layout: as it was cut.
        token_dim: the dimension of length t, and of length T in what is given back.

    Raises:
        LayoutError: parts that are not those of this row.
    """
    return Partition(segments=segments, ranks=len(parts), layout=layout).join(parts, token_dim=token_dim)


# ---------------------------------------------------------------------- media


def _table_of(row: PackedRow) -> MediaTable:
    """The media of a row; of one whose metadata does not know them, their grids."""
    media, known = row.media, row.known_metadata.media
    if known is not None:
        compare_media(known, media)
        return known
    grids = ((IMAGE, media.image_grid_thw, "image_grid_thw"), (VIDEO, media.video_grid_thw, "video_grid_thw"))
    records = [Medium(kind=kind, grid=grid) for kind, of, name in grids for grid in host_grids(of, name)]
    return MediaTable(media=tuple(records))


def _media_of(media: Media, images: MediaShare, videos: MediaShare, rank: int) -> Media:
    """Return the media that `rank` computes; no tensors of a kind of which it computes none."""
    tensors, of_rank = media.to_hf(), {}
    for share, pixels, of_each in (
        (images, "pixel_values", ("image_grid_thw",)),
        (videos, "pixel_values_videos", ("video_grid_thw", "second_per_grid_ts")),
    ):
        if share.items(rank) and pixels in tensors:
            of_rank[pixels] = share.take(tensors[pixels], rank)
            of_rank |= {name: share.pick(tensors[name], rank) for name in of_each if name in tensors}
    return Media(**of_rank)


@final
@dataclass(frozen=True, kw_only=True)
class Halo:
    """The tokens that each rank needs to roll its part of a row by 1, ..., K tokens."""

    partition: Partition
    """The tokens that each rank holds."""
    depth: int
    """K, the most tokens that a part is rolled by."""

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise LayoutError(f"a halo serves rolls by 1 token and more, got depth={self.depth}")

    def route(self, rank: int) -> Route:
        """Return the tokens that `rank` sends to each rank, and how many it receives: at most K a stretch."""
        self.partition.check_rank(rank)
        return self._transfers.route(rank)

    def places(self, rank: int) -> torch.Tensor:
        """int64 [h]: the place in the row of each token that comes to `rank`, in the order in which they come."""
        self.partition.check_rank(rank)
        return torch.from_numpy(self._places(rank))

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
        """The part of `rank` of what `vlmpack.layout.roll_left` makes of the whole row. Differentiable.

        Args:
            part: what `rank` holds, t tokens along `token_dim`.
            halo: what came to it by its `route`, h tokens along `token_dim`.
            rank: whose part.
            depth: tokens to move by, 1 to K.
            fill: what the last `depth` tokens of a segment and padding get.
            token_dim: the dimension of tokens.

        Raises:
            LayoutError: a depth that this halo does not serve, or tensors of another width.
        """
        if not 1 <= depth <= self.depth:
            raise LayoutError(f"this halo serves rolls by 1 to {self.depth} tokens, got depth={depth}")
        widths, needed = (part.shape[token_dim], halo.shape[token_dim]), (self.partition.local_total, self._size(rank))
        if widths != needed:
            raise LayoutError(
                f"rank {rank} rolls its {needed[0]} tokens with {needed[1]} that come to it, got {widths[0]} and "
                f"{widths[1]} at dimension {token_dim}"
            )
        source = self._derived(self._source, rank, depth, part.device)
        ends = self._derived(self._ends, rank, depth, part.device)
        return torch.cat([part, halo], token_dim).index_select(token_dim, source).index_fill_(token_dim, ends, fill)

    # ------------------------------------------------------------------ made once for a row

    @cached_property
    def _wanted(self) -> tuple[np.ndarray, np.ndarray]:
        """(rank, place) of every token that a rank needs and does not hold, each int64 [N], both rising.

        Such a token lies fewer than K places behind the start of a stretch of the row that another rank holds.
        """
        total, stops = self.partition.segments.total, _stops(self.partition.segments)
        depth = min(self.depth, total)
        owner = self.partition.place().numpy() // self.partition.local_total
        starts = np.flatnonzero(owner[1:] != owner[:-1]) + 1
        tokens = (starts[:, None] + np.arange(depth)).ravel()
        tokens = tokens[tokens < total, None]
        before = tokens - np.arange(1, depth + 1)
        apart = (before >= 0) & (owner[before] != owner[tokens]) & (tokens < stops[before])
        wanted = np.zeros(self.partition.ranks * total, bool)
        wanted[(owner[before] * total + tokens)[apart]] = True
        return np.divmod(np.flatnonzero(wanted), total)

    @cached_property
    def _transfers(self) -> Transfers:
        target, tokens = self._wanted
        source, local = np.divmod(self.partition.place().numpy()[tokens], self.partition.local_total)
        return Transfers(source=source, local=local, target=target, ranks=self.partition.ranks)

    @outside_graph
    def _size(self, rank: int) -> int:
        self.partition.check_rank(rank)
        return len(self._places(rank))

    def _places(self, rank: int) -> np.ndarray:
        return self._wanted[1][self._transfers.arriving(rank)]

    @outside_graph
    def _derived(
        self, make: Callable[[int, int], np.ndarray], rank: int, depth: int, device: torch.device
    ) -> torch.Tensor:
        partition = self.partition
        key = ("halo", make.__name__, partition.layout, partition.ranks, self.depth, rank, depth)
        return partition.segments.derived(key, device, partial(make, rank, depth))

    def _ends(self, rank: int, depth: int) -> np.ndarray:
        """int64: where in the part of `rank` no token of the same segment comes `depth` places later in the row."""
        index = self.partition.index(rank).numpy()
        return np.flatnonzero(index + depth >= _stops(self.partition.segments)[index])

    def _source(self, rank: int, depth: int) -> np.ndarray:
        """int64 [t]: the place, in the part with its halo behind it, of the token that follows each; 0 at ends."""
        index, halo = self.partition.index(rank).numpy(), self._places(rank)
        place = np.zeros(self.partition.segments.total + depth, np.int64)
        place[index], place[halo] = np.arange(len(index)), len(index) + np.arange(len(halo))
        return place[index + depth]


def _stops(segments: Segments) -> np.ndarray:
    """int64 [T]: for each token, the end of its segment's real tokens; 0 on the row's tail."""
    return np.repeat([*(stop for _, stop in segments.spans), 0], segments.slots_and_tail)
