"""The forward pass of an enabled model: its inputs decide whether they are packed, used as a row, or passed on."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

import numpy as np
import torch
from torch import nn

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
from vlmpack.model.engine import PackingState, StepConfig, run_row
from vlmpack.model.inputs import rope_segments
from vlmpack.model.mechanisms import ModelParts
from vlmpack.model.mechanisms.experts import puts_aux_loss_first, wants_balance
from vlmpack.model.plain import is_generating, passed_on, warn_of_padding
from vlmpack.model.result import PackedOutput, StepResult

STEP = "vlmpack_step"
"""The keyword of a `StepCall`."""


@final
class StepCall:
    """Carries a row into the forward of an enabled model, past wrappers, and its whole result out again."""

    def __init__(self, row: PackedRow | None = None, *, last_hidden: bool = False) -> None:
        self.row = row
        """The row, on the model's device; None: the model's other inputs are a batch or a row."""
        self.last_hidden = last_hidden
        """Whether the result has `row_last_hidden`."""
        self.result: StepResult | None = None
        """The result; None: the model did not pack."""


def without_guards(inputs: dict[str, Any]) -> dict[str, Any]:
    """Take out of a row's dictionary what stops models without packing."""
    return {name: None if isinstance(value, OnlyPacked) else value for name, value in inputs.items()}


@around_graph
def plain_forward(model: nn.Module, forward: Callable[..., Any], inputs: dict[str, Any], reason: str) -> Any:
    """Pass a call on to the model's own forward; `reason`: why it is not packed."""
    if not is_generating(model) and inputs.get("cache") is None:  # continuous batching keeps its requests apart
        check_boundaries_kept(inputs)
    if model.training and not is_generating(model):
        warn_of_padding(inputs["attention_mask"], reason)
    with passed_on():
        return forward(**{name: value for name, value in inputs.items() if name not in (METADATA_KEY, STEP)})


@around_graph
def packed_forward(core: Any, inputs: dict[str, Any], state: PackingState) -> Any:
    """Pack a padded batch, or use a row as it is; see `enable_packing`."""
    model, is_row = state.parts_of(core), _is_row(inputs)
    call: StepCall | None = inputs.get(STEP)
    routers = inputs.pop("output_router_logits", None) if state.family.has("experts") else None
    check_keys(inputs, is_row=is_row)
    row = _row_of(model, inputs, state, is_row=is_row)
    text_config = model.text.config
    if is_row and text_config.output_attentions:
        raise ConfigError("output_attentions, which the configuration asks for, cannot be had of a packed row")
    as_tuple = inputs.get("return_dict") is False
    keep = None if is_row or not _has_columns(inputs) else inputs["logits_to_keep"]
    wants_logits = _wants_logits(inputs, row) or (as_tuple and not is_row)
    by_hidden = keep is not None and state.parallel is None
    _check_counted(inputs, row, is_row=is_row)
    result = run_row(
        core,
        state,
        row,
        num_items_in_batch=inputs.get("num_items_in_batch"),
        rope_segments=rope_segments(inputs.get("rope_cu_seqlens"), row.segments),
        logits=wants_logits and not by_hidden,
        last_hidden=by_hidden or (call is not None and call.last_hidden),
        hidden_states=_requested(inputs, "output_hidden_states", text_config.output_hidden_states),
        balance=state.family.has("experts") and wants_balance(model, routers),
    )
    if not is_row:
        assert row.metadata is not None
        result = replace(result, width=inputs["input_ids"].shape[1], offsets=row.metadata.offsets)
    if call is not None:
        call.result = result
    output = _output(result, has_labels=row.shift_labels is not None, is_row=is_row, routers=bool(routers))
    if keep is not None:
        output.logits = _kept_logits(result, keep, state.family.head(core))
    return _tuple_of(output, state.family) if as_tuple else output


def _row_of(model: ModelParts, inputs: dict[str, Any], state: PackingState, *, is_row: bool) -> PackedRow:
    """The row that goes through the model: handed over, in a dictionary, or packed of a padded batch."""
    call: StepCall | None = inputs.get(STEP)
    if call is not None and call.row is not None:
        return _checked_row(call.row)
    inputs |= _whole_columns(inputs)
    if is_row:
        return _row_in(inputs)
    slots = state.config.slots if state.parallel is None else state.parallel.slots(state.config.slots)
    pad_token_id = state.family.text_config(model.core.config).pad_token_id
    return _packed_batch(inputs, slots, state.config, pad_token_id)


@outside_graph
def _whole_columns(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Token ids and labels as int64."""
    return {name: whole_numbers(inputs[name], name) for name in _WHOLE if inputs.get(name) is not None}


def _requested(inputs: dict[str, Any], name: str, configured: Any) -> Any:
    """The argument of a call, or else the configured value."""
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
    if not family.has("experts") or not puts_aux_loss_first(family):
        return output.to_tuple()
    names = sorted(output.keys(), key=("loss", "aux_loss", *output.keys()).index)
    return tuple(output[name] for name in names)


def _wants_logits(inputs: dict[str, Any], row: PackedRow) -> bool:
    if inputs.get("output_logits"):
        return True
    has_labels = row.shift_labels is not None
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
    if labels is None or inputs.get("num_items_in_batch") is None or inputs.get(STEP) is not None:
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


@outside_graph
def _output(result: StepResult, *, has_labels: bool, is_row: bool, routers: bool) -> PackedOutput:
    """`routers`: whether router statistics were requested by name; those kept for a loss alone do not come back."""
    fields: dict[str, Any] = {
        "logits": result.row_logits if is_row else result.logits,
        "hidden_states": result.row_hidden_states if is_row else result.hidden_states,
        "aux_loss": result.aux_loss,
        "z_loss": result.z_loss,
    }
    if routers:
        fields |= {"expert_counts": result.expert_counts, "router_logits": result.router_logits}
    if has_labels:
        fields |= {"loss": result.loss, "sample_losses": result.sample_losses, "sample_targets": result.sample_targets}
    return PackedOutput(**fields)


_WHOLE = ("input_ids", "labels", "shift_labels")


def _is_row(inputs: dict[str, Any]) -> bool:
    call: StepCall | None = inputs.get(STEP)
    if call is not None and call.row is not None:
        return True
    metadata: HostMetadata | None = inputs.get(METADATA_KEY)
    if metadata is not None:
        check_kind(METADATA_KEY, metadata, HostMetadata, "the collator's: leave it out of a batch of your own")
    return inputs.get("cu_seqlens_q") is not None or (metadata is not None and metadata.segments is not None)


_PACKED_BY = "a padded batch is packed by its input_ids and 2D attention_mask"


def unpackable(core: nn.Module, inputs: dict[str, Any], state: PackingState) -> str | None:
    """Why a call goes to the model's own forward, and what would be packed; None: it is packed."""
    if is_generating(core):
        return "this is a step of generate()"
    if _is_row(inputs):
        return None
    missing = [name for name in ("input_ids", "attention_mask") if inputs[name] is None]
    if missing:
        return f"{missing[0]} is missing; {_PACKED_BY}"
    plain = [name for name in _PLAIN_INPUTS if inputs.get(name) is not None]
    if inputs.get("use_cache"):
        plain.append("use_cache")
    if _requested(inputs, "output_attentions", state.parts_of(core).text.config.output_attentions):
        plain.append("output_attentions")
    if _has_columns(inputs) and not _can_keep(inputs):
        plain.append("logits_to_keep")
    return f"{', '.join(plain)} cannot be had of a packed row; {_PACKED_BY}, without them" if plain else None


_PLAIN_INPUTS = ("past_key_values", "inputs_embeds", "mm_encoder_outputs", "cache")


def _has_columns(inputs: dict[str, Any]) -> bool:
    """Return whether `logits_to_keep` is given, and is not 0, which keeps all."""
    keep = inputs.get("logits_to_keep")
    return keep is not None and not (isinstance(keep, int) and keep == 0)


def _can_keep(inputs: dict[str, Any]) -> bool:
    """Return whether `logits_to_keep` are columns of the batch; with labels, transformers' own loss fits none."""
    keep = inputs["logits_to_keep"]
    return inputs["labels"] is None and (isinstance(keep, int) or (isinstance(keep, torch.Tensor) and keep.ndim == 1))


@outside_graph
def _checked_row(row: PackedRow) -> PackedRow:
    """A row of `PackedStep`, whose columns are whole numbers, as wide as its boundaries."""
    columns = {"input_ids": whole_numbers(row.input_ids, "input_ids")}
    if row.shift_labels is not None:
        columns["shift_labels"] = whole_numbers(row.shift_labels, "shift_labels")
    for name, column in columns.items():
        if column.shape != (1, row.segments.total):
            raise LayoutError(f"{name} is {list(column.shape)}, but the row is [1, {row.segments.total}]")
    _check_not_empty(row.segments.total)
    return replace(row, **columns) if any(column is not vars(row)[name] for name, column in columns.items()) else row


def _check_not_empty(width: int) -> None:
    if not width:
        raise LayoutError("a packed row of no tokens cannot go through a model; leave it out, or give it a fixed width")


@outside_graph
def _row_in(inputs: dict[str, Any]) -> PackedRow:
    check_is_tensor(inputs["input_ids"], "input_ids of a packed row")
    if (shape := list(inputs["input_ids"].shape))[:-1] != [1]:
        raise LayoutError(
            f"a packed row is [1, T] but input_ids is {shape}; was the batch concatenated on its way (accelerate: set "
            "dispatch_batches=False)?"
        )
    _check_not_empty(shape[-1])
    row = PackedRow.from_hf(inputs)
    if (mask := inputs["attention_mask"]) is not None:
        raise LayoutError(
            f"a packed row comes without attention_mask, got one of shape {list(mask.shape)}; its boundaries "
            "tell which tokens are real"
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


def _check_padding_mask(mask: torch.Tensor, padding: torch.Tensor, remedy: str) -> None:
    """Compare a caller's mask with the padding of the row: they differ where `cu_seqlens_q_padded` was left out."""
    check_is_tensor(mask, "moe_padding_mask")
    if mask.shape != padding.shape:
        raise LayoutError(f"moe_padding_mask is {list(mask.shape)} but input_ids is {list(padding.shape)}")
    message = f"moe_padding_mask (True on padding) does not fit the {remedy}"
    require((mask.bool() == padding).all(), message, LayoutError)


# ---------------------------------------------------------------------- names of inputs

_BOUNDARIES = ("cu_seqlens_q", "cu_seqlens_q_padded", "rope_cu_seqlens", "moe_padding_mask")
_TOKENS = ("input_ids", "attention_mask", "position_ids", "labels", "shift_labels", "mm_token_type_ids")
_MEDIA = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts")

COLUMNS = frozenset((*_TOKENS, *_MEDIA, "cu_seqlens_q", "cu_seqlens_q_padded", "moe_padding_mask", METADATA_KEY))
"""The parts of a batch or a row."""

ROW_KEYS = (*_BOUNDARIES, METADATA_KEY, "use_cache", "output_logits")
"""What a packed row brings with it, or a batch requests, that the model's own forward may not have."""

_WANTED = ("output_logits", "output_hidden_states")
_BATCH_KEYS = frozenset((*_TOKENS, *_MEDIA, *_BOUNDARIES, "num_items_in_batch", *_WANTED, METADATA_KEY, STEP))

_OUTPUTS = ("output_attentions", "output_router_logits")
_GENERATION = ("past_key_values", "inputs_embeds", "use_cache", "logits_to_keep", "mm_encoder_outputs", "rope_deltas")
_SETTLED_KEYS = frozenset((*_GENERATION, *_OUTPUTS, "return_dict"))
"""Arguments of the model's own forward that a packed pass has settled: only their defaults go through it."""

_OF_MEGATRON = ("cu_seqlens_kv", "cu_seqlens_kv_padded", "cu_seqlens", "max_seqlen", "packed_seq_params")
_OF_TRANSFORMERS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "cu_seqlens_k")
_OF_OTHERS = ("seq_lengths", "sequence_ids", "document_ids")
_LOST_BOUNDARIES = (*_BOUNDARIES[1:], *_OF_MEGATRON, *_OF_TRANSFORMERS, *_OF_OTHERS)
"""Names under which boundaries are given elsewhere, or to us with `cu_seqlens_q` forgotten."""


def check_boundaries_kept(inputs: dict[str, Any]) -> None:
    """transformers' own attention ignores boundaries under most of their names, without a warning.

    Raises:
        ConfigError: there are some, or positions that restart.
        LayoutError: a padded batch has lost its mask.
    """
    lost = [name for name, value in inputs.items() if value is not None and _looks_like_boundaries(name)]
    if lost:
        raise ConfigError(f"{', '.join(lost)} {_MIXED}")
    if inputs["attention_mask"] is not None:
        return
    if inputs.get(METADATA_KEY) is not None:
        raise LayoutError(
            "a padded batch came without its attention_mask, so its padding would be attended to; keep the 2D mask "
            "that the collator made"
        )
    if (positions := inputs["position_ids"]) is not None and inputs.get("past_key_values") is None:
        # The place in the sample, or time: neither goes back.
        first = positions[0] if positions.ndim == 3 else positions
        goes_back = (first[..., 1:] < first[..., :-1]).any()
        require(
            ~goes_back,
            f"position_ids that restart are how others mark the samples of a row: they {_MIXED}",
            ConfigError,
        )


@functools.cache
def _looks_like_boundaries(name: str) -> bool:
    """One of those names, or misspelt."""
    return bool(difflib.get_close_matches(name, ("cu_seqlens_q", *_LOST_BOUNDARIES), n=1, cutoff=0.88))


_MIXED = (
    "would be ignored and the samples of the row mixed; give a packed row its boundaries as cu_seqlens_q (and "
    "cu_seqlens_q_padded if it has gaps)"
)


def check_keys(inputs: dict[str, Any], *, is_row: bool) -> None:
    """transformers accepts any keyword and ignores it, or hands it to the vision tower; a packed pass does not.

    Raises:
        ConfigError: it would; names what may have been meant.
    """
    for name, value in inputs.items():
        if value is None or name in _BATCH_KEYS:
            continue
        if name not in _SETTLED_KEYS:
            close = difflib.get_close_matches(name, _BATCH_KEYS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise ConfigError(f"a packed step takes no input {name!r}{hint} It takes {', '.join(sorted(_BATCH_KEYS))}")
        if is_row and name != "return_dict" and value is not False and not (isinstance(value, int) and value == 0):
            raise ConfigError(f"{name} cannot be combined with a packed row; leave it out")
