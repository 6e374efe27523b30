"""The forward pass of an enabled model: what was given decides whether it is packed, used as a row, or passed on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from torch import nn
from transformers.utils.generic import ModelOutput

from vlmpack.errors import ConfigError, LayoutError, check_kind
from vlmpack.families import Family
from vlmpack.layout import (
    IGNORE,
    METADATA_KEY,
    HostMetadata,
    OnlyPacked,
    PackedRow,
    PaddedBatch,
    SlotRule,
    around_graph,
    check_is_tensor,
    outside_graph,
    pack,
    require,
    to_device,
    whole_numbers,
)
from vlmpack.parallel import Parallel
from vlmpack.step.engine import StepConfig, run_row
from vlmpack.step.keys import SINK, check_boundaries_kept, check_keys
from vlmpack.step.result import StepResult
from vlmpack.step.rotary import rope_segments
from vlmpack.step.unpacked import is_generating, passed_on, warn_of_padding


@dataclass
class PackedOutput(ModelOutput):
    """What an enabled model returns for packed input. B samples.

    `sample_losses` and `sample_targets` reach `Trainer.predict` as its predictions, one entry a sample.
    """

    loss: torch.Tensor | None = None
    """Scalar; None without labels."""
    logits: torch.Tensor | None = None
    """[B, S, V] for a padded batch, [1, T, V] for a row; on request (`output_logits=True`, `return_dict=False`) or
    without labels. With `logits_to_keep` of those columns alone."""
    hidden_states: tuple[torch.Tensor | None, ...] | None = None
    """[B, S, D] for a padded batch, [1, T, D] for a row, of the embeddings and of each layer; on request."""
    aux_loss: torch.Tensor | None = None
    """Scalar: the routers' load-balancing loss, where the model computes one."""
    z_loss: torch.Tensor | None = None
    """Scalar: the routers' z-loss, with `aux_loss` or if it is part of the loss (`StepConfig.z_loss_coef`)."""
    expert_counts: torch.Tensor | None = None
    """int64 [layers, E]: real tokens that each expert was sent; with `output_router_logits=True`."""
    router_logits: tuple[torch.Tensor, ...] | None = None
    """[R, E] of each layer that has experts, real tokens in row order; with `output_router_logits=True`."""
    sample_losses: torch.Tensor | None = None
    """float32 [B]: mean cross-entropy (nats) of each sample's targets."""
    sample_targets: torch.Tensor | None = None
    """int64 [B]: targets of each sample."""


@final
class Sink:
    """Carries a `StepResult` past wrappers that rebuild the outputs of a model."""

    result: StepResult | None = None


def without_guards(inputs: dict[str, Any]) -> dict[str, Any]:
    """Take out what a row's dictionary holds for models without packing to stumble over."""
    return {name: None if isinstance(value, OnlyPacked) else value for name, value in inputs.items()}


@around_graph
def plain_forward(model: nn.Module, own_forward: Callable[..., Any], inputs: dict[str, Any], reason: str) -> Any:
    """Pass a call on to the model's own forward; `reason` says why it is not packed."""
    if not is_generating(model) and inputs.get("cache") is None:  # continuous batching keeps its requests apart
        check_boundaries_kept(inputs)
    if model.training and not is_generating(model):
        warn_of_padding(inputs["attention_mask"], reason)
    with passed_on():
        return own_forward(**{name: value for name, value in inputs.items() if name not in (METADATA_KEY, SINK)})


@around_graph
def packed_forward(
    model: Any, inputs: dict[str, Any], family: Family, config: StepConfig, parallel: Parallel | None
) -> Any:
    """Pack a padded batch, or use a row as it is; see `enable_packing`."""
    is_row = _is_row(inputs)
    routers = inputs.pop("output_router_logits", None) if family.experts is not None else None
    check_keys(inputs, is_row=is_row)
    inputs |= _whole_columns(inputs)
    pad_token_id = family.text_config(model.config).pad_token_id
    slots = config.slots if parallel is None else parallel.slots(config.slots)
    row = _given_row(inputs) if is_row else _packed_batch(inputs, slots, config, pad_token_id)
    text_config: Any = vars(family.language_model(model))["config"]
    if is_row and text_config.output_attentions:
        raise ConfigError("output_attentions, which the configuration asks for, cannot be had of a packed row")
    as_tuple = inputs.get("return_dict") is False
    keep = None if is_row or not _has_columns(inputs) else inputs["logits_to_keep"]
    want_logits = _wants_logits(inputs) or (as_tuple and not is_row)
    by_hidden = keep is not None and parallel is None
    _check_counted(inputs, row, is_row=is_row)
    result = run_row(
        model,
        family,
        row,
        config,
        parallel=parallel,
        num_items_in_batch=inputs.get("num_items_in_batch"),
        rope_segments=rope_segments(inputs.get("rope_cu_seqlens"), row.segments),
        logits=want_logits and not by_hidden,
        last_hidden=by_hidden,
        hidden_states=_asked(inputs, "output_hidden_states", text_config.output_hidden_states),
        balance=_wants_balance(family, model, routers),
    )
    if not is_row:
        assert row.metadata is not None
        result = replace(result, width=inputs["input_ids"].shape[1], offsets=row.metadata.offsets)
    if inputs.get(SINK) is not None:
        inputs[SINK].result = result
    output = _output(result, has_labels=row.shift_labels is not None, is_row=is_row, routers=bool(routers))
    if keep is not None:
        output.logits = _kept_logits(result, keep, family.head(model))
    return _tuple_of(output, family) if as_tuple else output


@outside_graph
def _whole_columns(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Token ids and labels as int64."""
    return {name: whole_numbers(inputs[name], name) for name in _WHOLE if inputs.get(name) is not None}


def _asked(inputs: dict[str, Any], name: str, configured: Any) -> Any:
    """The argument of a call, or else what the configuration says."""
    return configured if inputs.get(name) is None else inputs[name]


@outside_graph
def _kept_logits(result: StepResult, keep: int | torch.Tensor, head: nn.Module) -> torch.Tensor:
    """[B, K, V]: logits of these columns of the padded batch (of the last ones, if a number), 0 on padding."""
    columns = slice(-keep, None) if isinstance(keep, int) else keep
    if result.logits is not None:  # ranks share the row
        return result.logits[:, columns]
    assert result.last_hidden is not None
    return head(result.last_hidden[:, columns])


def _tuple_of(output: PackedOutput, family: Family) -> tuple[Any, ...]:
    """In the order of the unmodified model, which may put the routers' loss before the logits."""
    if family.experts is None or not family.experts.puts_aux_loss_first(family.model_class):
        return output.to_tuple()
    names = sorted(output.keys(), key=("loss", "aux_loss", *output.keys()).index)
    return tuple(output[name] for name in names)


def _wants_logits(inputs: dict[str, Any]) -> bool:
    if inputs.get("output_logits"):
        return True
    has_labels = inputs["labels"] is not None or inputs.get("shift_labels") is not None
    if not has_labels and inputs.get("num_items_in_batch") is not None:
        raise ConfigError(
            "the targets were counted (num_items_in_batch) but the labels were kept back: Trainer does that for "
            "label_smoothing_factor, whose smoother does not shift the labels of Qwen-VL models: set it to 0; and for "
            "compute_loss_func: let the collator put output_logits=True into the batch if you need it"
        )
    return not has_labels


@outside_graph
def _check_counted(inputs: dict[str, Any], row: PackedRow, *, is_row: bool) -> None:
    """Trainer counts every label but those of the first column; that of a sample's first token is never a target."""
    labels = inputs["labels"]
    if labels is None or inputs.get("num_items_in_batch") is None or inputs.get(SINK) is not None:
        return
    if is_row and inputs.get("shift_labels") is not None:  # which Trainer counts instead
        return
    if is_row:
        first = labels[0].index_select(0, row.segments.first_tokens(labels.device)[1:])
    else:
        assert row.metadata is not None
        places = [i * labels.shape[1] + at for i, at in enumerate(row.metadata.offsets) if at]
        first = labels.reshape(-1).index_select(0, to_device(np.asarray(places, np.int64), labels.device))
    require(
        (first == IGNORE).all(),
        "the first token of a sample has a label, which no token predicts, but it was counted (num_items_in_batch), so "
        "the loss would be divided by too many: set the labels of first tokens to -100",
        LayoutError,
    )


def _wants_balance(family: Family, model: nn.Module, asked: bool | None) -> bool:
    return family.experts is not None and family.experts.wants_balance(model, family.text_config(model.config), asked)


@outside_graph
def _output(result: StepResult, *, has_labels: bool, is_row: bool, routers: bool) -> PackedOutput:
    """`routers`: whether router statistics were asked for by name; what is kept for a loss need not come back."""
    found: dict[str, Any] = {
        "logits": result.row_logits if is_row else result.logits,
        "hidden_states": result.row_hidden_states if is_row else result.hidden_states,
        "aux_loss": result.aux_loss,
        "z_loss": result.z_loss,
    }
    if routers:
        found |= {"expert_counts": result.expert_counts, "router_logits": result.router_logits}
    if has_labels:
        found |= {"loss": result.loss, "sample_losses": result.sample_losses, "sample_targets": result.sample_targets}
    return PackedOutput(**found)


_WHOLE = ("input_ids", "labels", "shift_labels")


def _is_row(inputs: dict[str, Any]) -> bool:
    metadata: HostMetadata | None = inputs.get(METADATA_KEY)
    if metadata is not None:
        check_kind(METADATA_KEY, metadata, HostMetadata, "the collator's: leave it out of a batch of your own")
    return inputs.get("cu_seqlens_q") is not None or (metadata is not None and metadata.segments is not None)


_PACKED_BY = "a padded batch is packed by its input_ids and 2D attention_mask"


def unpackable(model: nn.Module, inputs: dict[str, Any], family: Family) -> str | None:
    """Why a call goes to the model's own forward, and what would be packed; None: it is packed."""
    if is_generating(model):
        return "this is a step of generate()"
    if _is_row(inputs):
        return None
    missing = [name for name in ("input_ids", "attention_mask") if inputs[name] is None]
    if missing:
        return f"{missing[0]} is missing; {_PACKED_BY}"
    given = [name for name in _PLAIN_INPUTS if inputs.get(name) is not None]
    if inputs.get("use_cache"):
        given.append("use_cache")
    text_config: Any = vars(family.language_model(model))["config"]
    if _asked(inputs, "output_attentions", text_config.output_attentions):
        given.append("output_attentions")
    if _has_columns(inputs) and not _can_keep(inputs):
        given.append("logits_to_keep")
    return f"{', '.join(given)} cannot be had of a packed row; {_PACKED_BY}, without them" if given else None


_PLAIN_INPUTS = ("past_key_values", "inputs_embeds", "mm_encoder_outputs", "cache")


def _has_columns(inputs: dict[str, Any]) -> bool:
    """Whether `logits_to_keep` is given, and is not 0, which keeps all."""
    keep = inputs.get("logits_to_keep")
    return keep is not None and not (isinstance(keep, int) and keep == 0)


def _can_keep(inputs: dict[str, Any]) -> bool:
    """Whether `logits_to_keep` are columns of the batch. With labels, transformers' own loss does not fit them."""
    keep = inputs["logits_to_keep"]
    return inputs["labels"] is None and (isinstance(keep, int) or (isinstance(keep, torch.Tensor) and keep.ndim == 1))


@outside_graph
def _given_row(inputs: dict[str, Any]) -> PackedRow:
    check_is_tensor(inputs["input_ids"], "input_ids of a packed row")
    if (shape := list(inputs["input_ids"].shape))[:-1] != [1]:
        raise LayoutError(
            f"a packed row is [1, T] but input_ids is {shape}; was the batch concatenated on its way (accelerate: set "
            "dispatch_batches=False)?"
        )
    if not shape[-1]:
        raise LayoutError("a packed row of no tokens cannot go through a model; leave it out, or give it a fixed width")
    row = PackedRow.from_hf(inputs)
    if (mask := inputs["attention_mask"]) is not None:
        raise LayoutError(
            f"a packed row comes without attention_mask, got one of shape {list(mask.shape)}; its boundaries say "
            "what is real"
        )
    if (mask := inputs.get("moe_padding_mask")) is not None:
        _check_padding_mask(
            mask,
            row.moe_padding_mask,
            "boundaries of the row; give a row with gaps both cu_seqlens_q and cu_seqlens_q_padded",
        )
    return row


@outside_graph
def _packed_batch(inputs: dict[str, Any], slots: SlotRule, config: StepConfig, pad_token_id: int | None) -> PackedRow:
    if inputs.get("cu_seqlens_q_padded") is not None:
        raise ConfigError(
            "cu_seqlens_q_padded belongs to a packed row, which has cu_seqlens_q too and no attention_mask; a padded "
            "batch is packed by its mask: leave cu_seqlens_q_padded out, and set StepConfig(slots=...) for gaps"
        )
    if inputs.get("shift_labels") is not None:
        raise ConfigError(
            "shift_labels belong to a packed row; give a padded batch its labels, not shifted: each sample's targets "
            "are shifted when its place in the row is known"
        )
    batch = PaddedBatch.from_hf(inputs)
    row = pack(batch, rule=slots, keep_empty=config.keep_empty, pad_token_id=pad_token_id or 0)
    if (mask := inputs.get("moe_padding_mask")) is not None:
        _check_padding_mask(
            mask, batch.attention_mask == 0, "attention_mask; leave moe_padding_mask out, it is derived"
        )
    return row


def _check_padding_mask(given: torch.Tensor, padding: torch.Tensor, remedy: str) -> None:
    """Boundaries and mask say the same thing twice, which shows when `cu_seqlens_q_padded` was left out."""
    check_is_tensor(given, "moe_padding_mask")
    if given.shape != padding.shape:
        raise LayoutError(f"moe_padding_mask is {list(given.shape)} but input_ids is {list(padding.shape)}")
    message = f"moe_padding_mask (True on padding) does not fit the {remedy}"
    require((given.bool() == padding).all(), message, LayoutError)
