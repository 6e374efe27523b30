"""Pack calls of a model's backbone: of a model without a head, and those of trainers with a custom head (TRL).

    trainer ──▶ core.forward, replaced ──▶ backbone(padded batch) ──▶ hidden states [B, S, D] ──▶ the trainer's head
                                             │ hook: pack, share          ▲ hook: unpack
                                             ▼                            │
                                           packed row [1, T] ──▶ hidden states [1, T, D]

Two hooks on the backbone do the packing. Nothing in the trainer is replaced: it keeps its head, loss and metrics.
Calls from the enabled model's own forward are packed already and pass through the hooks unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, final

import torch
from torch import nn

from vlmpack.errors import ConfigError, check_whole_number
from vlmpack.families.media import media_reader
from vlmpack.layout.batch import OnlyPacked
from vlmpack.layout.device import around_graph, outside_graph
from vlmpack.layout.row import Compact, PackedRow, unpack
from vlmpack.layout.sharing import ReadMedia, share
from vlmpack.model.engine import PackingState, backbone_inputs, finish, packing_state, setup_row, stored_state
from vlmpack.model.forward import (
    LOOKED_AT,
    STEP,
    by_name,
    check_keys,
    is_row_input,
    no_loss,
    of_an_object,
    plain_forward,
    requested,
    row_of,
    unpackable,
)
from vlmpack.model.mechanisms import RowSetup, subclass
from vlmpack.model.mechanisms.vision import for_compiler, with_plain_ids
from vlmpack.model.pieces import Outputs, PieceOfGroup, RowInPieces
from vlmpack.model.plain import find_model, is_passed_on, warn_of_padding
from vlmpack.model.result import Work
from vlmpack.model.row import CONTEXT

_ENTRY = "backbone"
"""Entry in a row's context: present if the caller wants hidden states in the shape of its batch."""

Report = Callable[[Work, int], None]
"""Called after each packed call with its work and the number of tokens of the batch, padding included."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class _Caller:
    """The caller's batch. Hidden states are returned in its shape."""

    setup: RowSetup
    """The row that goes through the model."""
    compact: Compact
    """The same row, and the row before its gaps were removed."""
    mask: torch.Tensor
    """bool [B, S]: real tokens."""
    offsets: tuple[int, ...] | None
    """First column of each sample; None: the input was already a row."""
    computed: RowSetup
    """What the call computes: the row, or its first piece."""
    pieces: RowInPieces | None
    """The row's pieces; None: it goes through whole."""
    works: list[Work]
    """Of each piece, or of the row."""

    def in_shape(self, part_t: torch.Tensor) -> torch.Tensor:
        """Unpack computed tokens [t, ...] to [B, S, ...], 0 on padding."""
        row = self.compact.spread(self.setup.part.gather(part_t)[None])
        if self.offsets is None:
            return row
        return unpack(row, self.compact.given.segments, width=self.mask.shape[1], offsets=self.offsets)

    def of_real_tokens(self, part_t: torch.Tensor) -> torch.Tensor:
        """Unpack computed tokens [t, E] to [B · S, E], 0 on padding."""
        values = self.setup.part.for_each_sample(part_t)[: self.compact.given.segments.num_tokens]
        places = self.mask.reshape(-1).nonzero()[:, 0]
        return values.new_zeros(self.mask.numel(), *values.shape[1:]).index_put((places,), values)


@functools.cache
def packed_backbone(base: Any) -> type[nn.Module]:
    """Return a subclass of `base` (a model without a head), with the same name, whose forward packs padded batches."""

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain, state = functools.partial(base.forward, self), stored_state(self)
        if state is None or CONTEXT in kwargs:
            return plain(*args, **kwargs)
        # OnlyPacked values in a row stop models without packing.
        given = {n: None if isinstance(v, OnlyPacked) else v for n, v in by_name(plain, args, kwargs).items()}
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
        state = packing_state(self.core)
        model, handed_row = state.parts_of(self.core), is_row_input(inputs)
        routers, mask = inputs.pop("output_router_logits", None), inputs["attention_mask"]
        # Derive token types from the ids: TRL's collators make them for one padding side only.
        types = state.family.media_types(inputs["input_ids"], model.core.config) if state.family.has_vision else None
        inputs |= {"labels": None, "mm_token_type_ids": types, **({"attention_mask": None} if handed_row else {})}
        check_keys(inputs, state.family, is_row=handed_row)
        row = row_of(model, inputs, state, is_row=handed_row)
        offsets = None if handed_row else row.known_metadata.offsets
        real = ~row.segments.padding_mask(row.input_ids.device)[None] if handed_row else mask != 0
        if not handed_row and self._min_shared is not None:
            row = _shared(row, self._min_shared, media_reader(state.family, model.core.config))
        compact, works = state.compact(row), list[Work]()
        setup = setup_row(model, compact.row, parallel=state.parallel, backend=state.config.attention)

        def inputs_of(setup: RowSetup) -> dict[str, Any]:
            packed = backbone_inputs(setup, state.mechanisms, rope_segments=None) | {"return_dict": True}
            return packed | ({"output_router_logits": bool(routers)} if state.family.has("experts") else {})

        def inputs_of_piece(row: PackedRow, piece: PieceOfGroup) -> tuple[RowSetup, dict[str, Any]]:
            of_piece = setup_row(model, row, parallel=None, backend=state.config.attention, piece=piece)
            return of_piece, inputs_of(of_piece)

        def run(row: PackedRow, piece: PieceOfGroup) -> Outputs:
            of_piece, packed = inputs_of_piece(row, piece)
            output = state.family.backbone(self.core)(**with_plain_ids(packed))
            works.append(finish(of_piece, state.mechanisms, packed[CONTEXT].entries))
            return _outputs(output)

        computed, pieces = setup, state.in_pieces(self.core, compact.row, run)
        if pieces is None:
            packed = inputs_of(setup)
        else:
            computed, packed = inputs_of_piece(pieces.first_row, pieces.first)
        packed[CONTEXT].entries[_ENTRY] = _Caller(
            setup=setup, compact=compact, mask=real, offsets=offsets, computed=computed, pieces=pieces, works=works
        )
        return packed

    @outside_graph
    def after(self, backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Unpack hidden states and router logits to the shape of the batch."""
        context, state = kwargs.get(CONTEXT), stored_state(self.core)
        if context is None or state is None or _ENTRY not in context.entries:
            return None
        caller: _Caller = context.entries[_ENTRY]
        caller.works.append(finish(caller.computed, state.mechanisms, context.entries))
        hidden, *router_logits = outputs = _outputs(output)
        if caller.pieces is not None:
            hidden, *router_logits = caller.pieces.rest(*outputs)
        work = Work.total(caller.works, caller.setup.row.segments.num_tokens)
        output.last_hidden_state = caller.in_shape(hidden[0])
        if output.get("router_logits") is not None:
            output.router_logits = tuple(map(caller.of_real_tokens, router_logits))
        if self._report is not None:
            self._report(work, caller.mask.numel())
        return output


def _outputs(output: Any) -> Outputs:
    return output.last_hidden_state, *(output.get("router_logits") or ())


def _shared(row: PackedRow, min_shared: int, read_media: ReadMedia) -> PackedRow:
    """Find the row's shared prefixes. This happens on the host, because it compares pixels."""
    return share(row.to("cpu"), min_shared=min_shared, read_media=read_media).to(row.input_ids.device)


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
