"""One packed row through an unmodified model: positions, hidden states, head on labelled positions, sums."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any, final

import torch
from torch import nn

from vlmpack.attention import AUTO, BACKENDS
from vlmpack.errors import ConfigError, check_kind
from vlmpack.families import Family
from vlmpack.layout import (
    IGNORE,
    Buckets,
    HostMetadata,
    PackedRow,
    Segments,
    SlotRule,
    Spaced,
    around_graph,
    check_none_on_padding,
    outside_graph,
)
from vlmpack.parallel import Parallel
from vlmpack.step.attention import check_reached
from vlmpack.step.balance import Balance, RouterSettings, RouterStatistics, router_statistics
from vlmpack.step.context import CONTEXT
from vlmpack.step.head import target_logprobs, target_positions
from vlmpack.step.inputs import backbone_inputs, known_metadata
from vlmpack.step.result import StepResult, Work, sums_by_sample
from vlmpack.step.shared import Share, share_of


@final
@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """How an enabled model packs and computes."""

    slots: SlotRule = SlotRule()
    """Room that each segment and the row take up when a padded batch is packed inside the forward pass."""
    keep_empty: bool = False
    """Keep all-zero rows of a padded batch as segments of length 0 instead of refusing them."""
    attention: str = AUTO
    """Name of the attention back-end, or "auto": the first that can serve the call. Sparse attention stays the
    model's own."""
    head_chunk: int = 2048
    """Rows of logits alive at a time; logits take `4 * head_chunk * vocabulary` bytes and more."""
    aux_loss: Balance = "row"
    """The routers' losses, where there are any: "row", of all real tokens together, as transformers does for a batch;
    "sample", the mean over the samples of each one's own."""
    z_loss_coef: float = 0.0
    """What the routers' z-loss is multiplied by before it is added to the loss; transformers has none, so 0."""

    def __post_init__(self) -> None:
        check_kind("slots", self.slots, SlotRule, "SlotRule(multiple=4)")
        if self.attention not in (AUTO, *BACKENDS):
            raise ConfigError(f"attention is {self.attention!r}; it is one of {', '.join((AUTO, *BACKENDS))}")
        if self.head_chunk < 1:
            raise ConfigError(f"head_chunk is {self.head_chunk!r}; it is a number of rows, 1 or more")
        if self.aux_loss not in ("row", "sample"):
            raise ConfigError(f'aux_loss is {self.aux_loss!r}; it is "row" or "sample"')
        if not 0 <= self.z_loss_coef < inf:
            raise ConfigError(f"z_loss_coef is {self.z_loss_coef!r}; it is 0 or a positive number")


@around_graph
def run_row(
    model: nn.Module,
    family: Family,
    row: PackedRow,
    config: StepConfig,
    *,
    parallel: Parallel | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
    rope_segments: Segments | None = None,
    logits: bool = False,
    last_hidden: bool = False,
    hidden_states: Any = False,
    balance: bool = False,
) -> StepResult:
    """Compute one row.

    Args:
        model: a `...ForConditionalGeneration` with packing enabled.
        family: the model's family.
        row: the row, on the model's device.
        config: back-end and head chunk.
        parallel: how ranks work together on the row; None: this one has it to itself.
        num_items_in_batch: what the loss sum is divided by; None: this row's targets.
        rope_segments: boundaries at which MRoPE restarts; None: the row's own.
        logits: also compute logits at every position of the row, [1, T, V].
        last_hidden: also return what the head is given, [1, T, D].
        hidden_states: also return hidden states, [1, T, D] of each layer: all, or as transformers lets one choose.
        balance: also compute the routers' load-balancing loss; it becomes part of the loss if the row has targets.
    """
    metadata = known_metadata(row)
    share = share_of(row, parallel)
    inputs = backbone_inputs(family, model, row, metadata, share, backend=config.attention, rope_segments=rope_segments)
    recorded = balance or config.z_loss_coef > 0
    if family.experts is not None:
        inputs.update(output_router_logits=recorded, return_dict=True)  # whatever the configuration says
    if hidden_states:
        inputs.update(output_hidden_states=hidden_states, return_dict=True)
    output = family.backbone(model)(**inputs)
    check_reached(family, model, inputs[CONTEXT])
    hidden = output[0]  # of a tuple where the configuration says return_dict=False
    routers = None
    if recorded:
        settings = RouterSettings(per=config.aux_loss, balance=balance, z_loss_coef=config.z_loss_coef)
        routers = router_statistics(
            output.router_logits, hidden, row.segments, settings, share=share, family=family, model=model
        )
    pairs = family.attended_pairs(row.segments, model.config)
    work = _work(row.segments, metadata, inputs[CONTEXT].delta, pairs)
    result = _result(
        hidden,
        row,
        metadata,
        share,
        family.head(model),
        config,
        num_items_in_batch,
        routers=routers,
        logits=logits,
        work=work,
    )
    if hidden_states:
        states = tuple(None if x is None else share.same(x[0])[None] for x in output.hidden_states)
        result = replace(result, row_hidden_states=states)
    return replace(result, row_last_hidden=share.same(hidden[0])[None]) if last_hidden else result


@outside_graph
def _result(
    hidden: torch.Tensor,
    row: PackedRow,
    metadata: HostMetadata,
    share: Share,
    head: nn.Module,
    config: StepConfig,
    num_items_in_batch: torch.Tensor | int | None,
    *,
    routers: RouterStatistics | None,
    logits: bool,
    work: Work,
) -> StepResult:
    """What this rank's hidden states [1, t, D] come to: the head on labelled positions; sums and counts of the row."""
    labels = row.shift_labels
    if labels is None:
        labels = torch.full_like(row.input_ids, IGNORE)
        metadata = replace(metadata, num_targets=0)
    message = "shift_labels has targets on padding, which belongs to no sample; set them to -100 there"
    check_none_on_padding(labels, row.segments, message)  # of a row that was made by hand
    index = target_positions(labels, metadata.num_targets)
    own_index = share.targets(index)
    own_logprobs = _logprobs(hidden, share.own(labels), own_index, head, config.head_chunk)
    logprobs = share.all_targets(own_logprobs, own_index, index)
    loss_sum = (-logprobs).sum()  # 0, not -0, of none
    sums, counts = sums_by_sample(logprobs, index, row.segments)
    targets = index.numel()
    items = _items(num_items_in_batch, targets)
    # In training 0, not 0 / 0, where no row of the whole step has targets. Of a batch that is evaluated, and has none,
    # there is no mean: a 0 would count in HF Trainer's eval_loss, which leaves NaN out.
    counted = num_items_in_batch is not None and not torch.is_grad_enabled()
    loss = loss_sum / items if targets or counted else loss_sum
    if routers is not None and targets:
        loss = loss + routers.added.to(loss.device)
    return StepResult(
        loss=loss,
        loss_sum=loss_sum,
        num_targets=targets,
        sample_loss_sums=sums,
        sample_targets=counts,
        target_logprobs=logprobs,
        target_index=index,
        segments=row.segments,
        work=work,
        row_logits=share.same(head(hidden)[0])[None] if logits else None,
        routers=routers,
    )


def _items(given: torch.Tensor | float | None, targets: int) -> torch.Tensor | float:
    """What the loss is divided by. A tensor on a device is believed, as looking would wait for it.

    Raises:
        ConfigError: no number, or one that these targets cannot be among.
    """
    if given is None:
        return targets
    is_tensor = isinstance(given, torch.Tensor)
    is_bool = given.dtype == torch.bool if is_tensor else isinstance(given, bool)
    if not isinstance(given, torch.Tensor | int | float) or is_bool or (is_tensor and given.numel() != 1):
        raise ConfigError(f"num_items_in_batch is a number, of the targets of all batches of a step; got {given!r:.80}")
    on_host = not isinstance(given, torch.Tensor) or given.device.type == "cpu"
    if on_host and targets and not given > 0:
        raise ConfigError(f"num_items_in_batch is {given}, but this batch alone has {targets} targets; count them all")
    return given


def _logprobs(
    hidden: torch.Tensor, labels: torch.Tensor, index: torch.Tensor, head: nn.Module, chunk: int
) -> torch.Tensor:
    """float32 [L]: log-probabilities of these targets."""
    if index.numel() == 0:
        # Nothing to learn, but every parameter keeps its place in the graph: other ranks may wait for its gradient.
        nothing = hidden.float().sum() * 0 + head(hidden[:, :1]).float().sum() * 0
        return nothing.expand(0)
    return target_logprobs(hidden[0].index_select(0, index), labels[0].index_select(0, index), head, chunk=chunk)


def _work(segments: Segments, metadata: HostMetadata, delta: Buckets | Spaced | None, pairs: int) -> Work:
    return Work(
        real_tokens=segments.num_tokens,
        physical_tokens=segments.total,
        attended_pairs=pairs,
        vision_patches=sum(map(prod, (*metadata.image_grids, *metadata.video_grids))),
        delta_tokens=0 if delta is None else delta.tokens,
    )
