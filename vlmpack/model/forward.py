"""The forward passes of an enabled model: pack a batch, use a row as it is, or pass the call on to the model's own.

Of a model with a head, `packed_class` replaces the forward. Of a model without one (`packed_backbone`), and of a
backbone that a trainer with a custom head (TRL) calls by itself (`pack_backbone`), inputs and output are replaced.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from dataclasses import replace
from types import MethodType
from typing import Any, final
from weakref import WeakSet

import numpy as np
import torch
from torch import nn
from transformers.generation.continuous_batching import PagedAttentionCache

from vlmpack.errors import ConfigError, LayoutError, check_kind, check_whole_number
from vlmpack.families.family import Family
from vlmpack.families.media import media_reader
from vlmpack.families.registry import CLASSIFIERS
from vlmpack.layout.batch import (
    MEDIA_KEYS,
    METADATA_KEY,
    TEACHER,
    HostMetadata,
    OnlyPacked,
    PaddedBatch,
    check_is_tensor,
)
from vlmpack.layout.device import around_graph, outside_graph, require, to_device
from vlmpack.layout.row import IGNORE, PackedRow, pack, unpack
from vlmpack.layout.sharing import share
from vlmpack.model.engine import (
    PackingState,
    RowPass,
    StepCall,
    check_column,
    packing_state,
    rope_segments,
    run_row,
    stored_state,
)
from vlmpack.model.exchange import zero_loss
from vlmpack.model.loss_count import CountsTargets, begin_batch
from vlmpack.model.mechanisms import subclass
from vlmpack.model.mechanisms.attention import Attention
from vlmpack.model.mechanisms.experts import wants_balance
from vlmpack.model.mechanisms.vision import for_compiler, with_plain_ids
from vlmpack.model.plain import (
    BOUNDARIES,
    CACHES,
    check_boundaries_kept,
    find_model,
    is_passed_on,
    passed_on,
    warn_of_padding,
)
from vlmpack.model.result import PackedOutput, Work
from vlmpack.model.row import CONTEXT

ENABLED: WeakSet[nn.Module] = WeakSet()
"""Models with packing enabled. They may share layers: one backbone under several heads."""


@functools.cache
def packed_class(base: Any) -> type[nn.Module]:
    """Return a subclass of `base`, with the same name, whose forward accepts rows. There is one per base class."""
    body = of_an_object(base)
    if any(cls.__name__ in CLASSIFIERS for cls in base.__mro__):
        return subclass(base, {**body, "forward": _forward_of_classifier(base)}, packed_class)
    body |= {
        "forward": around_graph(_forward_of(base)),
        "generate": _generate(base),
        "accepts_loss_kwargs": property(CountsTargets),
    }
    return subclass(base, body, packed_class)


def of_an_object(base: Any) -> dict[str, Any]:
    """Return the methods that keep packing attached to a copied object, and to one with other attention settings."""

    def setstate(self: Any, state: dict[str, Any]) -> None:
        base.__setstate__(self, state)
        self._vlmpack_state = replace(self._vlmpack_state, loss_count=None)  # loss_metrics is bound to one object
        _attach_attention(self)
        ENABLED.add(self)

    @functools.wraps(base.set_attn_implementation)
    def set_attn_implementation(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # transformers looks up the towers named in a dictionary by their configuration objects.
        if (state := stored_state(self)) is not None:
            Attention().detach(state.parts_of(self))
        try:
            return base.set_attn_implementation(self, *args, **kwargs)
        finally:
            _attach_attention(self)

    return {"__setstate__": setstate, "set_attn_implementation": set_attn_implementation}


def _forward_of_classifier(base: Any) -> Any:
    """Wrap a classifier's forward. It scores a padded batch, and hooks on its backbone pack it (`pack_backbone`)."""

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = functools.partial(base.forward, self)
        if stored_state(self) is not None and is_row_input(by_name(plain, args, kwargs)):
            raise no_loss(self)
        return plain(*args, **kwargs)

    return forward


def by_name(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name. Positional ones are named by this forward; defaults are not added. Values that
    only stop models without packing (`OnlyPacked`) are None.

    Raises:
        TypeError: too many positional arguments, or an argument given both by position and by name.
    """
    given = dict(**inspect.signature(forward).bind_partial(*args).arguments, **kwargs) if args else kwargs
    return {name: None if isinstance(value, OnlyPacked) else value for name, value in given.items()}


def no_loss(model: nn.Module) -> ConfigError:
    """Return the error of a model that has no language-model loss."""
    return ConfigError(
        f"a {type(model).__name__} has no language-model loss for PackedStep, PackedTrainer or a packed row: call it "
        "with a padded batch and its attention_mask, which its backbone packs"
    )


def _forward_of(base: Any) -> Any:
    @functools.wraps(base.forward)  # keep signature and name: trainers and generation read them
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain, state = functools.partial(base.forward, self), stored_state(self)
        if state is None:  # accelerate's autocast wrapper still holds this function after disable_packing
            return plain(*args, **kwargs)
        call: StepCall | None = kwargs.get(STEP)
        if call is not None and call.exchanged is not None:
            return PackedOutput(loss=zero_loss(call.exchanged, self.device))
        given = by_name(plain, args, kwargs)
        inputs = LOOKED_AT | given
        if (reason := unpackable(self, inputs, state)) is not None:
            return plain_forward(self, plain, given, reason)
        state = packing_state(self)
        output = packed_forward(self, inputs, state)
        if state.loss_count is not None:
            state.loss_count.add(output)
        return output

    wrapper: Any = forward
    wrapper.__signature__ = _signature(base.forward)
    return wrapper


_generating: ContextVar[nn.Module | None] = ContextVar("vlmpack_generating", default=None)


def _generate(base: Any) -> Callable[..., Any]:
    """Return `generate` for an enabled model: its forward passes go to the model's own forward."""

    @functools.wraps(base.generate)
    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Only Seq2SeqTrainer passes labels here: it passes the whole batch, with synced_gpus. Its next forward pass
        # computes that batch's loss.
        if kwargs.get("labels") is not None and "synced_gpus" in kwargs:
            begin_batch(self)
        token = _generating.set(self)
        try:
            return base.generate(self, *args, **kwargs)
        finally:
            _generating.reset(token)

    return generate


def is_generating(model: nn.Module) -> bool:
    """Return whether the current forward pass is a step of this model's `generate`."""
    return _generating.get() is model


def _attach_attention(core: nn.Module) -> None:
    if (state := stored_state(core)) is not None:
        Attention().attach(state.parts_of(core))


def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    """The signature of the model's own forward plus the keys of a row. HF Trainer removes inputs that are not in the
    signature (`remove_unused_columns`), and a row without its boundaries would be taken for one sample."""
    plain = inspect.signature(forward)
    of_row = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in ROW_KEYS]
    added = [parameter for parameter in of_row if parameter.name not in plain.parameters]
    ordered = sorted((*plain.parameters.values(), *added), key=lambda parameter: parameter.kind)
    return plain.replace(parameters=ordered)


@around_graph
def plain_forward(model: nn.Module, forward: Callable[..., Any], inputs: dict[str, Any], reason: str) -> Any:
    """Pass a call on to the model's own forward. `reason` says why it is not packed."""
    if ignored := [name for name in (*WEIGHTS, *TEACHER) if inputs.get(name) is not None]:
        raise ConfigError(f"{ignored[0]} would be ignored, because this batch is not packed: {reason}")
    # Continuous batching keeps its requests apart.
    if not is_generating(model) and not isinstance(inputs.get("cache"), PagedAttentionCache):
        check_boundaries_kept(inputs)
    if model.training and not is_generating(model):
        warn_of_padding(inputs.get("attention_mask"), reason)
    with passed_on():
        return forward(**{name: value for name, value in inputs.items() if name not in (METADATA_KEY, STEP)})


@around_graph
def packed_forward(core: Any, inputs: dict[str, Any], state: PackingState) -> Any:
    """Pack a padded batch, or use a row as it is; see `enable_packing`."""
    model, is_row = state.parts_of(core), is_row_input(inputs)
    call: StepCall = inputs.get(STEP) or StepCall()
    routers = inputs.pop("output_router_logits", None) if state.family.has("experts") else None
    check_keys(inputs, state.family, is_row=is_row)
    inputs = with_token_types(inputs, state.family.token_types)
    row = row_of(inputs, state, core.config)
    check_expert_types(inputs, state.family, core.config)
    text_config = model.text.config
    if is_row and text_config.output_attentions:
        raise ConfigError("output_attentions, which the configuration asks for, cannot be had of a packed row")
    as_tuple = inputs.get("return_dict") is False
    keep = None if is_row else _kept_columns(inputs)
    wants_logits = _wants_logits(inputs, row) or (as_tuple and not is_row)
    by_hidden = keep is not None and state.parallel is None
    _check_counted(inputs, row, is_row=is_row)
    result = run_row(
        core,
        state,
        row,
        call,
        num_items_in_batch=inputs.get("num_items_in_batch"),
        rope_segments=None if (at := inputs.get("rope_cu_seqlens")) is None else rope_segments(at, row.segments),
        logits=wants_logits and not by_hidden,
        last_hidden=by_hidden,
        hidden_states=requested(inputs, "output_hidden_states", text_config.output_hidden_states),
        balance=state.family.has("experts") and wants_balance(model, routers),
    )
    if not is_row:
        assert row.metadata is not None
        result = replace(result, width=inputs["input_ids"].shape[1], offsets=row.metadata.offsets)
    call.result = result
    targets = call.scoring is not None
    output = PackedOutput.of(result, row, is_row=is_row, routers=bool(routers), targets=targets)
    if keep is not None:
        output.logits = result.kept_logits(keep, state.family.to_logits(core))
    return output.in_order(state.family) if as_tuple else output


@outside_graph
def row_of(inputs: dict[str, Any], state: PackingState, config: Any) -> PackedRow:
    """Return the row that goes through the model: passed by `PackedStep`, given as inputs, or packed from a batch."""
    call: StepCall | None = inputs.get(STEP)
    if call is not None and call.row is not None:
        return call.row
    batch = read_batch(inputs, extras=columns_in(inputs, state.family), media=state.family.media)
    if isinstance(batch, PackedRow):
        return batch
    pad = state.family.text_config(config).pad_token_id
    return pack(batch, rule=state.slots, keep_empty=state.config.keep_empty, pad_token_id=pad or 0)


def read_batch(
    inputs: Mapping[str, Any], *, extras: tuple[str, ...], media: Collection[str]
) -> PaddedBatch | PackedRow:
    """Build a padded batch, or a packed row, from a model's keyword arguments. What they say twice must agree.

    Args:
        inputs: the arguments by name.
        extras: names of further columns.
        media: names of the media tensors.

    Raises:
        LayoutError: the columns do not fit each other.
        ConfigError: a batch has columns of a row.
    """
    mask, is_row = inputs.get("attention_mask"), is_row_input(inputs)
    if is_row:
        check_is_tensor(inputs["input_ids"], "input_ids")
        if (shape := list(inputs["input_ids"].shape))[:-1] != [1]:
            raise LayoutError(
                f"a packed row is [1, T] but input_ids is {shape}; was the batch concatenated on its way (accelerate: "
                "set dispatch_batches=False)?"
            )
        if mask is not None:
            raise LayoutError(
                f"a packed row comes without attention_mask, got one of shape {list(mask.shape)}; its boundaries "
                "tell which tokens are real"
            )
        batch = PackedRow.from_hf(inputs, extras=extras, media=media)
        remedy = "boundaries of the row; give a row with gaps both cu_seqlens_q and cu_seqlens_q_padded"
    else:
        if inputs.get("cu_seqlens_q_padded") is not None:
            raise ConfigError(
                "cu_seqlens_q_padded belongs to a packed row, which has cu_seqlens_q too and no attention_mask; a "
                "padded batch is packed by its mask: leave cu_seqlens_q_padded out, and set StepConfig(slots=...) for "
                "gaps"
            )
        if inputs.get("shift_labels") is not None:
            raise ConfigError(
                "shift_labels belong to a packed row; give a padded batch its labels, not shifted: each sample's "
                "targets are shifted when its place in the row is known"
            )
        batch = PaddedBatch.from_hf(inputs, extras=extras, media=media)
        remedy = "attention_mask; leave it out, it is derived"
    for name in PADDING_MASKS:
        if (given := inputs.get(name)) is not None:
            padding = batch.moe_padding_mask if isinstance(batch, PackedRow) else batch.attention_mask == 0
            check_column(given, padding, name, f"(True on padding) does not fit the {remedy}")
    return batch


def requested(inputs: dict[str, Any], name: str, configured: Any) -> Any:
    """Return the argument of a call, or the configured value if it was not given."""
    return configured if inputs.get(name) is None else inputs[name]


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
    """Refuse counted labels that are not targets.

    Trainer counts every label except the first column's. The first token of a sample is never a target, but in a row
    or a left-padded batch it may be in another column.
    """
    labels = inputs["labels"]
    if labels is None or inputs.get("num_items_in_batch") is None or inputs.get(STEP) is not None:
        return
    if is_row and inputs.get("shift_labels") is not None:  # Trainer counts these instead
        return
    if is_row:
        first = labels[0].index_select(0, row.segments.first_tokens(labels.device)[1:])
    else:
        assert row.metadata is not None
        places = [i * labels.shape[1] + at for i, at in enumerate(row.metadata.offsets) if at]
        first = labels.reshape(-1).index_select(0, to_device(np.asarray(places, np.int64), labels.device))
    require(
        (first == IGNORE).all(),
        "the first token of a sample has a label, which no token predicts; with num_items_in_batch, which Trainer "
        "makes of all labels, the loss may be divided by too many: set the labels of first tokens to -100",
        LayoutError,
    )


def is_row_input(inputs: Mapping[str, Any]) -> bool:
    """Return whether the inputs are a packed row (as opposed to a padded batch)."""
    call: StepCall | None = inputs.get(STEP)
    if call is not None and call.row is not None:
        return True
    metadata: HostMetadata | None = inputs.get(METADATA_KEY)
    if metadata is not None and not isinstance(metadata, HostMetadata):
        check_kind(METADATA_KEY, metadata, HostMetadata, "the collator's: leave it out of a batch of your own")
    return inputs.get("cu_seqlens_q") is not None or (metadata is not None and metadata.segments is not None)


_PACKED_BY = "a padded batch is packed by its input_ids and 2D attention_mask"


def unpackable(core: nn.Module, inputs: dict[str, Any], state: PackingState) -> str | None:
    """Return why a call goes to the model's own forward and how to have it packed; None: it is packed."""
    if is_generating(core):
        return "this is a step of generate()"
    if is_row_input(inputs):
        return None
    missing = [name for name in ("input_ids", "attention_mask") if inputs[name] is None]
    if missing:
        return f"{missing[0]} is missing; {_PACKED_BY}"
    plain = [name for name in _PLAIN_INPUTS if inputs.get(name) is not None]
    if inputs.get("use_cache"):
        plain.append("use_cache")
    if requested(inputs, "output_attentions", state.parts_of(core).text.config.output_attentions):
        plain.append("output_attentions")
    keep = _kept_columns(inputs)
    # With labels, transformers' own loss does not accept a selection either.
    can_keep = isinstance(keep, int) or (isinstance(keep, torch.Tensor) and keep.ndim == 1)
    if keep is not None and not (can_keep and inputs["labels"] is None):
        plain.append("logits_to_keep")
    return f"{', '.join(plain)} cannot be had of a packed row; {_PACKED_BY}, without them" if plain else None


_PLAIN_INPUTS = (*CACHES, "inputs_embeds", "mm_encoder_outputs")

LOOKED_AT: dict[str, Any] = dict.fromkeys(("input_ids", "attention_mask", "position_ids", "labels"))
"""Inputs that decide how a call is handled, with the value they have if the call omits them."""


def _kept_columns(inputs: dict[str, Any]) -> Any:
    """Return `logits_to_keep` if it selects columns; None: it keeps all."""
    keep = inputs.get("logits_to_keep")
    return None if isinstance(keep, int) and keep == 0 else keep


# ---------------------------------------------------------------------- a backbone
#
#     trainer ──▶ core.forward, replaced ──▶ backbone(padded batch) ──▶ hidden states [B, S, D] ──▶ the trainer's head
#                                              │ hook: pack, share          ▲ hook: unpack
#                                              ▼                            │
#                                            packed row [1, T] ──▶ hidden states [1, T, D]
#
# Two hooks on the backbone do the packing. Nothing in the trainer is replaced: it keeps its head, loss and metrics.
# Calls from the enabled model's own forward are packed already and pass through the hooks unchanged.


_ENTRY = "backbone"
"""Entry in a row's context: present if the caller wants hidden states in the shape of its batch."""

Report = Callable[[Work, int], None]
"""Called after each packed call with its work and the number of tokens of the batch, padding included."""


@final
class _PackedCall:
    """One call of a backbone: the row that goes through it, and the way back to the shape of the caller's batch."""

    def __init__(self, core: Any, inputs: dict[str, Any], min_shared: int | None) -> None:
        state, is_row = packing_state(core), is_row_input(inputs)
        family, mask = state.family, inputs["attention_mask"]
        routers = bool(inputs.pop("output_router_logits", None))
        # Derive token types from the ids: TRL's collators make them for one padding side only.
        types = family.media_types(inputs["input_ids"], core.config) if family.has_vision else None
        inputs |= {"labels": None, "mm_token_type_ids": types, **({"attention_mask": None} if is_row else {})}
        check_keys(inputs, family, is_row=is_row)
        row = row_of(inputs, state, core.config)
        self._offsets = None if is_row else row.known_metadata.offsets  # the first column of each sample
        self.mask = ~row.segments.padding_mask(row.input_ids.device)[None] if is_row else mask != 0
        if not is_row and min_shared is not None:  # on the host, because it compares pixels
            reader, device = media_reader(family, core.config), row.input_ids.device
            row = share(row.to("cpu"), min_shared=min_shared, read_media=reader).to(device)
        routers = {"output_router_logits": routers} if family.has("experts") else {}
        self._pass = RowPass(core, state, row, {"return_dict": True, **routers}, prepared=with_plain_ids)
        self.inputs = self._pass.inputs
        """The backbone's inputs for the row, or for its first piece."""
        self.inputs[CONTEXT].entries[_ENTRY] = self

    def unpacked(self, output: Any) -> Work:
        """Unpack the output's hidden states and router logits to the shape of the batch; return the work done."""
        hidden, *router_logits = self._pass.end((output.last_hidden_state, *(output.get("router_logits") or ())))
        row, part, given = self._pass.of_row(hidden), self._pass.setup.part, self._pass.compact.given.segments
        output.last_hidden_state = row
        if self._offsets is not None:
            output.last_hidden_state = unpack(row, given, width=self.mask.shape[1], offsets=self._offsets)
        if output.get("router_logits") is not None:  # [B · S, E] of each layer, 0 on padding
            places = self.mask.reshape(-1).nonzero()[:, 0]
            logits = (part.for_each_sample(logits_tE)[: given.num_tokens] for logits_tE in router_logits)
            output.router_logits = tuple(
                x.new_zeros(self.mask.numel(), *x.shape[1:]).index_put((places,), x) for x in logits
            )
        return self._pass.work


@functools.cache
def packed_backbone(base: Any) -> type[nn.Module]:
    """Return a subclass of `base` (a model without a head), with the same name, whose forward packs padded batches."""

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain, state = functools.partial(base.forward, self), stored_state(self)
        if state is None or CONTEXT in kwargs:
            return plain(*args, **kwargs)
        given = by_name(plain, args, kwargs)
        if given.get(STEP) is not None:
            raise no_loss(self)
        hooks, inputs = _BackboneHooks(self, None, None), LOOKED_AT | given
        if (reason := hooks.unpackable(inputs, state)) is not None:
            return plain_forward(self, plain, given, reason)
        packed = for_compiler(hooks.packed(inputs))
        return hooks.after(self, (), packed, plain(**packed))

    return subclass(base, {**of_an_object(base), "forward": around_graph(forward)}, packed_backbone)


@final
class _BackboneHooks:
    """The hooks of one model's backbone."""

    def __init__(self, core: nn.Module, min_shared: int | None, report: Report | None) -> None:
        self.core, self._min_shared, self._report = core, min_shared, report

    def __getstate__(self) -> dict[str, Any]:
        """Drop the report callback from copies of the model: their calls are not counted."""
        return {**vars(self), "_report": None}

    @outside_graph
    def before(self, backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the inputs (a padded batch or a row) by the inputs of a packed row; None: leave them unchanged."""
        state = stored_state(self.core)
        if state is None or CONTEXT in kwargs or is_passed_on():
            return None
        inputs = LOOKED_AT | by_name(backbone.forward, args, kwargs)
        if (reason := self.unpackable(inputs, state)) is not None:
            warn_of_padding(inputs["attention_mask"], reason)
            return None
        return (), with_plain_ids(self.packed(inputs))  # inside a hook, nothing tells whether the backbone is compiled

    def unpackable(self, inputs: dict[str, Any], state: PackingState) -> str | None:
        """Return why a call is not packed; None: it is packed."""
        configured = state.parts_of(self.core).text.config.output_hidden_states
        if requested(inputs, "output_hidden_states", configured) and not is_row_input(inputs):
            return "the hidden states of every layer are not handed to the caller of a packed backbone"
        return unpackable(self.core, inputs, state)

    @outside_graph
    def packed(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the backbone's inputs for the packed row."""
        return _PackedCall(self.core, inputs, self._min_shared).inputs

    @outside_graph
    def after(self, backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Unpack hidden states and router logits to the shape of the batch."""
        context = kwargs.get(CONTEXT)
        if context is None or stored_state(self.core) is None or _ENTRY not in context.entries:
            return None
        call: _PackedCall = context.entries[_ENTRY]
        work = call.unpacked(output)
        if self._report is not None:
            self._report(work, call.mask.numel())
        return output


def pack_backbone(model: nn.Module, *, min_shared: int | None = None, report: Report | None = None) -> None:
    """Pack direct calls of an enabled model's backbone, with padded batches or packed rows.

    A second call replaces the settings of the first. `disable_packing` undoes it.

    Args:
        model: a model with packing enabled, or a wrapper around it.
        min_shared: compute prefixes (images included) that samples of a batch share only once, if they have at least
            this many tokens; None: share nothing.
        report: called after each packed call with its work and the batch's number of tokens.

    Raises:
        ConfigError: packing is not enabled, `min_shared` is not a positive number, or the family has no backbone
            separate from its head.
    """
    core = find_model(model)
    state = packing_state(core)
    if min_shared is not None:
        check_whole_number("min_shared", min_shared)
    if state.family.backbone_path is None:
        raise ConfigError(
            f"the head of {state.family.model_type} is inside its text part, so that no part of the model gives a "
            "trainer hidden states; call the model itself, with a loss that is the model's own"
        )
    hooks, backbone = _BackboneHooks(core, min_shared, report), state.family.backbone(core)
    leave_backbone(backbone)
    backbone.register_forward_pre_hook(hooks.before, with_kwargs=True)
    backbone.register_forward_hook(hooks.after, with_kwargs=True)


def leave_backbone(backbone: nn.Module, core: nn.Module | None = None) -> None:
    """Undo `pack_backbone`. `core`: only for this model, because another one may share the backbone."""
    by_kind = (
        (backbone._forward_pre_hooks, backbone._forward_pre_hooks_with_kwargs),
        (backbone._forward_hooks, backbone._forward_hooks_with_kwargs),
    )
    for hooks, with_kwargs in by_kind:
        for key in [key for key, hook in hooks.items() if _is_of_ours(hook, core)]:
            del hooks[key], with_kwargs[key]


def _is_of_ours(hook: Any, core: nn.Module | None) -> bool:
    if not isinstance(hook, MethodType) or not isinstance(hook.__self__, _BackboneHooks):
        return False
    return core is None or hook.__self__.core is core


# ---------------------------------------------------------------------- columns
#
# Names of inputs: what a batch, a row and a call of an enabled model may contain, and which names are refused.


STEP = "vlmpack_step"
"""The keyword of a `StepCall`."""

PADDING_MASKS = ("moe_padding_mask", "padding_mask")
"""Names of a mask that is True on padding."""
WEIGHTS = ("loss_weights", "shift_weights")
"""Loss weights: of the labels of a batch, and of the targets of a row."""
_TOKENS = ("input_ids", "attention_mask", "position_ids", "labels", "shift_labels", "mm_token_type_ids", *WEIGHTS)
COLUMN_OF_TYPES = "mm_token_type_ids"
"""The token types. Some models use another name."""

ROW_KEYS = (*BOUNDARIES, *WEIGHTS, *TEACHER, METADATA_KEY, "use_cache", "output_logits")
"""Keywords for packed rows and batches that the model's own forward may not have."""

SOUND_IN_VIDEO = "use_audio_in_video"
"""Qwen-Omni's option to interleave audio tokens with the tokens of the video that they belong to."""

_BESIDE = ("num_items_in_batch", "output_logits", "output_hidden_states", METADATA_KEY, STEP)
_BATCH_KEYS = frozenset((*_TOKENS, *TEACHER, *MEDIA_KEYS, *BOUNDARIES, *_BESIDE))

_GENERATION = (*CACHES, "inputs_embeds", "use_cache", "logits_to_keep", "mm_encoder_outputs", "rope_deltas")
_SETTLED_KEYS = frozenset((*_GENERATION, "output_attentions", "output_router_logits", "return_dict"))
"""Arguments of the model's own forward that packing fixes: only their default values are accepted."""


def check_keys(inputs: dict[str, Any], family: Family, *, is_row: bool) -> None:
    """Refuse unknown keywords. transformers ignores them, or passes them to the vision tower.

    Raises:
        ConfigError: an unknown or unsupported keyword. The message suggests the closest known name.
    """
    takes_others = family.has_audio or (family.has_vision and not family.has_grids)
    other_media = {*MEDIA_KEYS} - family.media.keys() if takes_others else set()
    columns = {family.token_types or "mm_token_type_ids", family.expert_types, *family.token_columns} - {None}
    known = (_BATCH_KEYS | family.media.keys() | columns) - other_media
    for name, value in inputs.items():
        if value is None or name in known:
            continue
        if name == SOUND_IN_VIDEO and family.has_audio:
            if value:
                raise ConfigError(
                    f"{SOUND_IN_VIDEO}={value!r} interleaves a video with its own sound, whose places in a row are not "
                    "supported: give the sound as audio of its own, and leave the keyword out"
                )
            continue
        if name not in _SETTLED_KEYS:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise ConfigError(f"a packed step takes no input {name!r}{hint} It takes {', '.join(sorted(known))}")
        if is_row and name != "return_dict" and value is not False and not (isinstance(value, int) and value == 0):
            remedy = "use LoRA in place of PEFT's prompt tuning, or " if name == "inputs_embeds" else ""
            raise ConfigError(f"{name} cannot be combined with a packed row; {remedy}leave it out")


def columns_in(inputs: dict[str, Any], family: Family) -> tuple[str, ...]:
    """Return the names of the further token columns that the inputs contain: the family's own and a teacher's."""
    return tuple(name for name in (*family.token_columns, *TEACHER) if inputs.get(name) is not None)


@outside_graph
def with_token_types(inputs: dict[str, Any], name: str | None) -> dict[str, Any]:
    """Rename the token types from the model's name for them to `mm_token_type_ids`."""
    if name in (None, COLUMN_OF_TYPES) or (types := inputs.get(name)) is None:
        return inputs
    if inputs.get(COLUMN_OF_TYPES) is not None:
        fault = f"and {COLUMN_OF_TYPES} differ; leave them out, both are made from input_ids"
        check_column(inputs[COLUMN_OF_TYPES], types, name, fault)
    return inputs | {COLUMN_OF_TYPES: types, name: None}


@outside_graph
def check_expert_types(inputs: dict[str, Any], family: Family, config: Any) -> None:
    """Check the token types that choose experts, if the caller gives them, against the token ids. In a batch, values
    on padding are ignored.

    Raises:
        LayoutError: they differ.
    """
    name, mask = family.expert_types, inputs.get("attention_mask")
    if name is None or (types := inputs.get(name)) is None:
        return
    fault = "contradicts input_ids, of which the processor makes it; leave it out, it is made from input_ids"
    expected = family.expert_types_of(inputs["input_ids"], config)[name]
    check_column(types, expected, name, fault, ignored=None if mask is None else mask == 0)
