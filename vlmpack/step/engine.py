"""One packed row through an unmodified model: positions, hidden states, head on labelled positions, sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ParamSpec, TypeVar, final

import torch
from torch import nn

from vlmpack.attention import AUTO
from vlmpack.errors import ConfigError, LayoutError
from vlmpack.families import Family
from vlmpack.layout import IGNORE, BatchFacts, Grid, PackedRow, Segments, SlotRule, outside_graph, require
from vlmpack.step.balance import Balance, RouterStatistics, router_statistics
from vlmpack.step.context import CONTEXT, RealTokens, RowContext, VisionSegments
from vlmpack.step.head import target_logprobs, target_positions
from vlmpack.step.result import StepResult, Work, sums_by_sample

TEXT, IMAGE, VIDEO = 0, 1, 2

P = ParamSpec("P")
R = TypeVar("R")


def around_graph(function: Callable[P, R]) -> Callable[P, R]:
    """Keep a function itself out of compiled graphs, but not what it calls: the model's own layers."""
    return torch.compiler.disable(function, recursive=False)  # pyright: ignore[reportReturnType]


@final
@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """How an enabled model packs and computes."""

    slots: SlotRule = SlotRule()
    """Room that each segment and the row take up when a padded batch is packed inside the forward pass."""
    keep_empty: bool = False
    """Keep all-zero rows of a padded batch as segments of length 0 instead of refusing them."""
    attention: str = AUTO
    """Name of the attention back-end, or "auto": the first that can serve the call."""
    head_chunk: int = 2048
    """Rows of logits alive at a time; logits take `4 * head_chunk * vocabulary` bytes and more."""
    aux_loss: Balance = "row"
    """The routers' load-balancing loss, where one is asked for: "row", of all real tokens together, as transformers
    does for a batch; "sample", the mean over the samples of each one's own."""

    def __post_init__(self) -> None:
        if self.aux_loss not in ("row", "sample"):
            raise ConfigError(f'aux_loss is {self.aux_loss!r}; it is "row" or "sample"')


@around_graph
def run_row(
    model: nn.Module,
    family: Family,
    row: PackedRow,
    config: StepConfig,
    *,
    num_items_in_batch: torch.Tensor | int | None = None,
    rope_segments: Segments | None = None,
    logits: bool = False,
    balance: bool = False,
) -> StepResult:
    """Compute one row.

    Args:
        model: a `...ForConditionalGeneration` with packing enabled.
        family: the model's family.
        row: the row, on the model's device.
        config: back-end and head chunk.
        num_items_in_batch: what the loss sum is divided by; None: this row's targets.
        rope_segments: boundaries at which MRoPE restarts; None: the row's own.
        logits: also compute logits at every position of the row, [1, T, V].
        balance: also compute the routers' load-balancing loss; it becomes part of the loss if the row has labels.
    """
    facts = known_facts(row)
    inputs = _backbone_inputs(family, row, facts, config, rope_segments, model.config)
    if family.experts is not None:
        inputs.update(output_router_logits=balance, return_dict=True)  # whatever the configuration says
    output = family.backbone(model)(**inputs)
    hidden = output[0]  # of a tuple where the configuration says return_dict=False
    routers = _routers(family, model, hidden, output.router_logits, row.segments, config.aux_loss) if balance else None
    return _result(hidden, row, facts, family.head(model), config, num_items_in_batch, routers=routers, logits=logits)


@outside_graph
def _routers(
    family: Family,
    model: nn.Module,
    hidden: torch.Tensor,
    logits: tuple[torch.Tensor, ...],
    segments: Segments,
    per: Balance,
) -> RouterStatistics:
    assert family.experts is not None
    return router_statistics(
        hidden,
        logits,
        segments,
        experts=family.experts,
        text_config=family.text_config(model.config),
        per=per,
        language_model=family.language_model(model),
    )


@outside_graph
def _result(
    hidden: torch.Tensor,
    row: PackedRow,
    facts: BatchFacts,
    head: nn.Module,
    config: StepConfig,
    num_items_in_batch: torch.Tensor | int | None,
    *,
    routers: RouterStatistics | None,
    logits: bool,
) -> StepResult:
    """What hidden states [1, T, D] come to: the head on labelled positions, sums and counts."""
    labels = row.shift_labels
    if labels is None:
        labels = torch.full_like(row.input_ids, IGNORE)
        facts = replace(facts, num_targets=0)
    _check_targets(labels, row.segments)
    index = target_positions(labels, facts.num_targets)
    logprobs, loss_sum = _loss(hidden, labels, index, head, config.head_chunk)
    sums, counts = sums_by_sample(logprobs, index, row.segments)
    loss = loss_sum / (max(index.numel(), 1) if num_items_in_batch is None else num_items_in_batch)
    if routers is not None and row.shift_labels is not None:
        loss = loss + routers.coefficient * routers.loss.to(loss.device)
    return StepResult(
        loss=loss,
        loss_sum=loss_sum,
        num_targets=index.numel(),
        sample_loss_sums=sums,
        sample_targets=counts,
        target_logprobs=logprobs,
        target_index=index,
        segments=row.segments,
        work=_work(row.segments, facts),
        row_logits=head(hidden) if logits else None,
        aux_loss=None if routers is None else routers.loss,
        router_logits=None if routers is None else routers.logits,
    )


@outside_graph
def known_facts(row: PackedRow) -> BatchFacts:
    """The row's host facts; grids that only a tensor knows are read from it, which waits for the device once."""
    facts = row.facts or BatchFacts(lengths=row.segments.lengths[: row.segments.num_samples])
    media = row.media
    facts = replace(
        facts,
        image_grids=_host_grids(facts.image_grids, media.image_grid_thw, "image_grid_thw"),
        video_grids=_host_grids(facts.video_grids, media.video_grid_thw, "video_grid_thw"),
    )
    if media.second_per_grid_ts is not None and not facts.seconds_per_grid:
        facts = replace(facts, seconds_per_grid=tuple(torch.as_tensor(media.second_per_grid_ts).tolist()))
    for pixels, grids, name in (
        (media.pixel_values, facts.image_grids, "pixel_values"),
        (media.pixel_values_videos, facts.video_grids, "pixel_values_videos"),
    ):
        _check_patches(pixels, grids, name)
    return facts


def _host_grids(known: tuple[Grid, ...], tensor: torch.Tensor | None, name: str) -> tuple[Grid, ...]:
    if tensor is None:
        return ()
    if not known:
        return tuple((int(t), int(h), int(w)) for t, h, w in tensor.tolist())
    if len(known) != tensor.shape[0]:
        raise LayoutError(
            f"the host knows {len(known)} grids but {name} is {list(tensor.shape)}; was the batch split or "
            "concatenated on its way (accelerate: set dispatch_batches=False)?"
        )
    return known


def _check_patches(pixels: torch.Tensor | None, grids: Sequence[Grid], name: str) -> None:
    expected, seen = sum(map(prod, grids)), 0 if pixels is None else pixels.shape[0]
    if expected != seen:
        raise LayoutError(f"the grids describe {expected} patches, {name} has {seen}; pass the media of every sample")


@outside_graph
def _backbone_inputs(
    family: Family,
    row: PackedRow,
    facts: BatchFacts,
    config: StepConfig,
    rope_segments: Segments | None,
    hf_config: Any,
) -> dict[str, Any]:
    """Keyword arguments of the model without its head."""
    types = family.media_types(row.input_ids, hf_config)
    _check_media_tokens(types, family, facts, hf_config)
    positions = row.position_ids
    if positions is not None:
        _check_positions(positions)
    else:
        positions = family.positions(
            types,
            rope_segments or row.segments,
            image_grids=facts.image_grids,
            video_grids=facts.video_grids,
            seconds_per_grid=facts.seconds_per_grid,
            config=hf_config,
        )
    vision = [
        segments
        for grids in (facts.image_grids, facts.video_grids)
        if grids
        for segments in family.vision_segments(grids, hf_config)
    ]
    context = RowContext(
        segments=row.segments,
        vision=VisionSegments(vision),
        backend=config.attention,
        experts=None if family.experts is None else _real_tokens(row),
    )
    return {
        "input_ids": row.input_ids,
        # A 4D mask is taken as it is, so no T x T mask is ever built; the attention function does not read it.
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=row.input_ids.device),
        # Three rows: with a fourth, transformers would look for packed samples by itself, and wait for the device.
        "position_ids": positions[-3:],
        "mm_token_type_ids": types,
        # Whatever the configuration says: a cache would be filled and thrown away.
        "use_cache": False,
        **row.media.to_hf(),
        CONTEXT: context,
    }


def _real_tokens(row: PackedRow) -> RealTokens | None:
    segments = row.segments
    if not segments.has_gaps:
        return None
    return RealTokens(index=segments.real_index(row.input_ids.device), total=segments.total)


def _check_positions(positions: torch.Tensor) -> None:
    if positions.ndim != 3 or positions.shape[0] not in (3, 4):
        raise LayoutError(
            f"position_ids is {list(positions.shape)}; a model with MRoPE needs [3, ...] (time, height, width) or "
            "[4, ...] (the text row first), with fewer rows images lose their places: leave position_ids out, they are "
            "computed from the grids"
        )


def _check_media_tokens(types: torch.Tensor, family: Family, facts: BatchFacts, hf_config: Any) -> None:
    """As many placeholders in the row as its grids make tokens."""
    for kind, grids, name in ((IMAGE, facts.image_grids, "image"), (VIDEO, facts.video_grids, "video")):
        expected = family.media_tokens(grids, hf_config)
        message = (
            f"the {name} grids make {expected} tokens, but the row has another number of {name} placeholders; "
            "every placeholder needs its pixels, and the other way round"
        )
        require((types == kind).sum() == expected, message, LayoutError)


def _check_targets(labels: torch.Tensor, segments: Segments) -> None:
    """A row that was made by hand may have targets where there is no token."""
    if segments.has_gaps:
        stray = (labels[0] != IGNORE) & segments.padding_mask(labels.device)
        message = "shift_labels has targets on padding, which belongs to no sample; set them to -100 there"
        require(~stray.any(), message, LayoutError)


def _loss(
    hidden: torch.Tensor, labels: torch.Tensor, index: torch.Tensor, head: nn.Module, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(target log-probabilities [L], loss sum)."""
    if index.numel() == 0:
        # Nothing to learn, but every parameter keeps its place in the graph: other ranks may wait for its gradient.
        nothing = hidden.float().sum() * 0 + head(hidden[:, :1]).float().sum() * 0
        return nothing.new_zeros(0), nothing
    logprobs = target_logprobs(hidden[0].index_select(0, index), labels[0].index_select(0, index), head, chunk=chunk)
    return logprobs, -logprobs.sum()


def _work(segments: Segments, facts: BatchFacts) -> Work:
    return Work(
        real_tokens=segments.num_tokens,
        physical_tokens=segments.total,
        attended_pairs=segments.attended_pairs,
        vision_patches=sum(map(prod, (*facts.image_grids, *facts.video_grids))),
    )
