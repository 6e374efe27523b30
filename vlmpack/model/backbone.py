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
from types import MethodType
from typing import Any, final

from torch import nn

from vlmpack.errors import ConfigError, check_whole_number
from vlmpack.families.media import media_reader
from vlmpack.layout.batch import OnlyPacked
from vlmpack.layout.device import around_graph, outside_graph
from vlmpack.layout.row import PackedRow, unpack
from vlmpack.layout.sharing import share
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
from vlmpack.model.pieces import Outputs, PieceOfGroup
from vlmpack.model.plain import find_model, is_passed_on, warn_of_padding
from vlmpack.model.result import Work
from vlmpack.model.row import CONTEXT

_ENTRY = "backbone"
"""Entry in a row's context: present if the caller wants hidden states in the shape of its batch."""

Report = Callable[[Work, int], None]
"""Called after each packed call with its work and the number of tokens of the batch, padding included."""


@final
class _PackedCall:
    """One call of a backbone: the row that goes through it, and the way back to the shape of the caller's batch."""

    def __init__(self, core: Any, inputs: dict[str, Any], min_shared: int | None) -> None:
        state, is_row = packing_state(core), is_row_input(inputs)
        model, family, mask = state.parts_of(core), state.family, inputs["attention_mask"]
        self._core, self._state = core, state
        self._routers = bool(inputs.pop("output_router_logits", None))
        # Derive token types from the ids: TRL's collators make them for one padding side only.
        types = family.media_types(inputs["input_ids"], core.config) if family.has_vision else None
        inputs |= {"labels": None, "mm_token_type_ids": types, **({"attention_mask": None} if is_row else {})}
        check_keys(inputs, family, is_row=is_row)
        row = row_of(model, inputs, state, is_row=is_row)
        self._offsets = None if is_row else row.known_metadata.offsets  # the first column of each sample
        self.mask = ~row.segments.padding_mask(row.input_ids.device)[None] if is_row else mask != 0
        if not is_row and min_shared is not None:  # on the host, because it compares pixels
            reader, device = media_reader(family, core.config), row.input_ids.device
            row = share(row.to("cpu"), min_shared=min_shared, read_media=reader).to(device)
        self._compact, self._works = state.compact(row), list[Work]()
        self._setup = setup_row(model, self._compact.row, parallel=state.parallel, backend=state.config.attention)
        self._pieces, self._computed = state.in_pieces(core, self._compact.row, self._run), self._setup
        if self._pieces is not None:
            self._computed = self._setup_of_piece(self._pieces.first_row, self._pieces.first)
        self.inputs = self._inputs_of(self._computed)
        """The backbone's inputs for the row, or for its first piece."""
        self.inputs[CONTEXT].entries[_ENTRY] = self

    def _setup_of_piece(self, row: PackedRow, piece: PieceOfGroup) -> RowSetup:
        model, backend = self._state.parts_of(self._core), self._state.config.attention
        return setup_row(model, row, parallel=None, backend=backend, piece=piece)

    def _inputs_of(self, setup: RowSetup) -> dict[str, Any]:
        inputs = backbone_inputs(setup, self._state.mechanisms, rope_segments=None) | {"return_dict": True}
        return inputs | ({"output_router_logits": self._routers} if self._state.family.has("experts") else {})

    def _run(self, row: PackedRow, piece: PieceOfGroup) -> Outputs:
        setup = self._setup_of_piece(row, piece)
        inputs = self._inputs_of(setup)
        output = self._state.family.backbone(self._core)(**with_plain_ids(inputs))
        self._works.append(finish(setup, self._state.mechanisms, inputs[CONTEXT].entries))
        return _outputs(output)

    def unpacked(self, output: Any) -> Work:
        """Unpack the output's hidden states and router logits to the shape of the batch; return the work done."""
        self._works.append(finish(self._computed, self._state.mechanisms, self.inputs[CONTEXT].entries))
        hidden, *router_logits = outputs = _outputs(output)
        if self._pieces is not None:
            hidden, *router_logits = self._pieces.rest(*outputs)
        part, given = self._setup.part, self._compact.given.segments
        row = self._compact.spread(part.gather(hidden[0])[None])
        output.last_hidden_state = row
        if self._offsets is not None:
            output.last_hidden_state = unpack(row, given, width=self.mask.shape[1], offsets=self._offsets)
        if output.get("router_logits") is not None:  # [B · S, E] of each layer, 0 on padding
            places = self.mask.reshape(-1).nonzero()[:, 0]
            logits = (part.for_each_sample(logits_tE)[: given.num_tokens] for logits_tE in router_logits)
            output.router_logits = tuple(
                x.new_zeros(self.mask.numel(), *x.shape[1:]).index_put((places,), x) for x in logits
            )
        return Work.total(self._works, self._setup.row.segments.num_tokens)


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


def _outputs(output: Any) -> Outputs:
    return output.last_hidden_state, *(output.get("router_logits") or ())


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
