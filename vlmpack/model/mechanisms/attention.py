"""The attention functions of a model with packing enabled, registered with transformers under names of our own.

A call with a `RowContext` goes to a vlmpack back-end. A call without one (generation, a cache, a plain padded batch)
goes to the implementation that the model's configuration names.

    text model    vlmpack
    towers        vlmpack_flash    transformers passes all images to a vision tower in one call only if the
                                   implementation has "flash" in its name; otherwise it passes them one by one

The model's configuration keeps its attention name: each attention module gets a proxy for it (`ConfigProxy`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from operator import attrgetter
from types import FunctionType
from typing import Any, ClassVar, final

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vlmpack.attention.backends import AttentionCall, Backend, choose
from vlmpack.attention.patterns import CAUSAL, FULL_CAUSAL, LayerMask, Pattern
from vlmpack.attention.spans import Spans
from vlmpack.errors import BackendError, ConfigError, FamilyError
from vlmpack.families.family import Family
from vlmpack.families.spans import Bidirectional, Prefix
from vlmpack.layout.device import is_compiled, outside_graph
from vlmpack.layout.segments import Segments
from vlmpack.model.mechanisms import Mechanism, ModelParts, RowSetup, is_subclassed
from vlmpack.model.mechanisms.upstream import check_spans, layer_numbers, measure_layer_masks
from vlmpack.model.opaque import OpaqueCall, handle_of, value_of
from vlmpack.model.plain import check_not_bypassed, warn_past_the_forward
from vlmpack.model.row import CONTEXT, RowContext

TEXT, VISION = "vlmpack", "vlmpack_flash"
NUMBER = "_vlmpack_layer"
"""Name of an attention layer's attribute: its number, int64 [] on the host."""
OF_VISION = "vision"
"""Name of the entry with the boundaries of the vision tower (`vision.VisionRow`)."""


@final
@dataclass(eq=False)
class RowAttention:
    """A row's entry for attention."""

    backend: str
    """Name of the attention back-end, or "auto"."""
    upstream_masks: Mapping[int, LayerMask] | None = None
    """The mask of each layer in the model's own code, by layer number; None: do not compare."""
    spans: Spans | None = None
    """The bidirectional spans of this rank's part of the row; None: the family has none."""
    bidirectional: Bidirectional | None = None
    """The family's rule for these; None: it has none."""
    calls: int = 0
    """Calls of packed attention in the text model so far."""
    limits: set[tuple[int | None, int | None]] = field(default_factory=set)
    """(window, chunk) of the text model's layers called so far."""
    chosen: dict[AttentionCall, Backend] = field(default_factory=dict)
    """The back-end of each kind of call so far."""

    def spans_of(self, window: int | None) -> Spans | None:
        """Return the bidirectional spans of layers with this window."""
        return self.spans if self.bidirectional is not None and self.bidirectional.is_in(window) else None


@final
class Attention(Mechanism):
    """Attention of the text model and the towers, computed by a back-end that takes boundaries."""

    name: ClassVar[str] = "attention"

    def is_in(self, family: Family) -> bool:
        """Return True: every family has attention."""
        return True

    def find(self, model: ModelParts) -> list[nn.Module]:
        """Return every module that calls its configuration's attention function, and the towers themselves."""
        return [module for _, module in _Callers.of(model).modules]

    def attach(self, model: ModelParts) -> None:
        """Give each module a proxy for its configuration. Nothing outside these modules changes."""
        proxies: dict[tuple[str, int], PreTrainedConfig] = {}
        for name, module in _Callers.of(model).modules:
            if not isinstance(config := module.config, ConfigProxy):
                key = name, id(config)
                module.config = proxies[key] = proxies.get(key) or config_proxy(config, name)
        _number(model)
        if not _has_own_masks(model):
            layer_masks(model)

    def detach(self, model: ModelParts, *, kept: Set[int] = frozenset()) -> None:
        """Restore the configurations."""
        for _, module in _Callers.of(model).modules:
            if id(module) not in kept:
                module.config = plain_config(module)
                vars(module).pop(NUMBER, None)

    def problem(self, model: ModelParts, *, attached: bool) -> str | None:
        """Report a replaced layer, or a model that computes anything other than causal softmax attention over whole
        samples."""
        callers = _Callers.of(model).modules
        if attached and not all(isinstance(module.config, ConfigProxy) for _, module in callers):
            return (
                "an attention layer was exchanged after enable_packing, or given another configuration, so that it no "
                "longer gets the boundaries of a row; call enable_packing(model) again afterwards"
            )
        return next(_not_computed(model, callers), None)

    def prepare(self, setup: RowSetup) -> RowAttention:
        """Collect the name of the back-end, the masks of layers and the bidirectional spans of the row."""
        masks = None if _has_own_masks(setup.model) else layer_masks(setup.model)
        if (bidirectional := setup.model.family.bidirectional_tokens(setup.config)) is None:
            return RowAttention(setup.backend, masks)
        runs = bidirectional.of_row(setup.row, setup.media)
        for name in setup.model.family.token_columns:
            setup.part.check_shared(setup.row.extras[name], name)
        spans = Spans(runs=setup.part.spans(runs), beyond_window=bidirectional.beyond_window)
        return RowAttention(setup.backend, masks, spans=spans, bidirectional=bidirectional)

    def work(self, setup: RowSetup, entry: RowAttention) -> Mapping[str, int]:
        """Count the pairs of layers with a window or chunks, and of layers without."""
        masks = {LayerMask(window=window, chunk=chunk) for window, chunk in entry.limits}
        if entry.spans is None and masks <= {FULL_CAUSAL}:
            return {}
        pairs = {mask: setup.part.attended_pairs(mask) for mask in masks}
        for mask in pairs:
            if (spans := entry.spans_of(mask.window)) is not None:
                pairs[mask] += spans.further_pairs(mask.window)
        local = [count for mask, count in pairs.items() if mask.is_local]
        return {"attended_pairs": max(pairs.values()), "window_pairs": min(local, default=0)}

    def check_ran(self, model: ModelParts, entry: RowAttention) -> None:
        """Check that every attention layer (or its substitute) with a custom forward called packed attention.

        Raises:
            ConfigError: one did not, so samples attended to each other in it.
        """
        callers = model.memo[self.name].of_layers  # as `problem` found them before this pass
        if entry.calls >= len(callers):
            return
        changed = [part for part in callers if not _has_upstream_forward(part) and not is_subclassed(part)]
        if changed and entry.calls < sum(not is_subclassed(part) for part in callers):
            raise ConfigError(
                f"a {type(changed[0]).__name__} has a custom forward that does not call the attention function of its "
                "configuration, so samples of a row attend to each other; restore the forward of transformers, or "
                "train this model without packing"
            )


# ---------------------------------------------------------------------- masks in the model's own code

_MASK_SETTINGS = (
    *("sliding_window", "use_sliding_window", "max_window_layers", "attention_chunk_size", "layer_types"),
    "use_bidirectional_attention",
)
"""Configuration settings from which models make masks."""
_MASK_FUNCTIONS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")
"""Functions with which models make masks."""


def layer_masks(model: ModelParts) -> dict[int, LayerMask]:
    """Return the mask of each decoder layer with attention, by its `layer_idx`, as the model's own code masks it.

    The masks are measured, and those of a sample with images or a prefix compared with the descriptor's, at the first
    call, and again when settings or the order of the layers have changed.

    Raises:
        FamilyError: a layer's mask is not causal, optionally within a window or chunk, or not as described.
    """
    settings, known = _mask_settings(model.text), model.memo.get(_LAYER_MASKS)
    if known is None or known[0] != settings:
        masks = measure_layer_masks(model.text)
        check_spans(model, masks, model.family.bidirectional_tokens(model.core.config))
        known = model.memo[_LAYER_MASKS] = settings, masks
        _number(model)
    return known[1]


def _number(model: ModelParts) -> None:
    """Give each attention layer its number as a tensor: compiled code would be specialized for its `layer_idx`."""
    for name, module in _Callers.of(model).modules:
        if name == TEXT and "layer_idx" in vars(module):
            setattr(module, NUMBER, torch.tensor(module.layer_idx, device="cpu"))


_LAYER_MASKS = "layer masks"


def _mask_settings(text: Any) -> list[Any]:
    """Return what masks of layers depend on. Lists are copied, because they may be changed in place."""
    config, code = vars(text.config), inspect.unwrap(type(text).forward).__globals__
    settings = [*(config.get(name) for name in _MASK_SETTINGS), *(code.get(name) for name in _MASK_FUNCTIONS)]
    return [*(tuple(value) if isinstance(value, list) else value for value in settings), *layer_numbers(text)]


def with_chunk(masks: Mapping[int, LayerMask], pattern: Pattern, layer: int) -> Pattern:
    """Compare the window that a layer passes to its attention function with its mask in the model's own code.

    Returns:
        The pattern, with the layer's chunk size added: layers do not pass it, only the mask contains it.

    Raises:
        FamilyError: packed rows would attend to other tokens than in the model's own code.
    """
    if layer not in masks:
        raise FamilyError(
            f"layer {layer} gets no mask from its model, so what it attends to is not known; train this model without "
            "packing"
        )
    mask = masks[layer]
    if mask.window != pattern.window:
        raise FamilyError(
            f"layer {layer} calls attention with sliding_window={pattern.window}, but in the model's own code its mask "
            f"has {mask.window}: its configuration was changed after the model was made, its layers were reordered, or "
            "the family is not as described. Undo that, or train this model without packing"
        )
    return pattern if mask.chunk is None else replace(pattern, chunk=mask.chunk)


# ---------------------------------------------------------------------- the modules that call attention


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class _Callers:
    """The modules that call their configuration's attention function, and the towers. The towers' own code measures
    images or audios only for implementations with "flash" in their name.

    Every step needs them. They are searched again only if a module was added, removed or exchanged, which a comparison
    of `children` shows in a tenth of the time.
    """

    roots: list[tuple[str, nn.Module]]
    """The text model and the towers, each with the name of its attention."""
    depth: int
    """Number of decoder layers in use."""
    searched: list[nn.Module]
    """The modules that were searched and have children: not the projections of attention, and their adapters."""
    children: list[nn.Module | None]
    """Their children, one after the other."""
    modules: list[tuple[str, Any]]
    """(name of its attention, module) of each."""
    of_layers: list[nn.Module]
    """The attention of each decoder layer in use, or its substitute."""

    @classmethod
    def of(cls, model: ModelParts) -> _Callers:
        """Return the modules of a model."""
        family, core, text = model.family, model.core, model.text
        towers = [tower for tower in (family.vision_tower(core), family.audio_tower(core)) if tower is not None]
        roots, depth = [(TEXT, text), *((VISION, tower) for tower in towers)], text.config.num_hidden_layers
        known: _Callers | None = model.memo.get(Attention.name)
        if known is None or (known.roots, known.depth, known.children) != (roots, depth, _children(known.searched)):
            known = model.memo[Attention.name] = cls._search(roots, depth)
        return known

    @classmethod
    def _search(cls, roots: list[tuple[str, Any]], depth: int) -> _Callers:
        (_, text), *towers = roots
        searched, modules = list[nn.Module](), list[tuple[str, nn.Module]]()
        for name, root in roots:
            stack = [root]
            while stack:
                module = stack.pop()
                attributes, is_tower = vars(module), (name, module) in towers
                is_caller = "is_causal" in attributes or is_tower
                if is_caller and isinstance(attributes.get("config"), PreTrainedConfig):
                    modules.append((name, module))
                    if not is_tower:
                        continue
                if children := _children([module]):
                    searched.append(module)
                    stack.extend(children)
        parts = [named for layer in islice(text.layers, depth) for named in layer.named_children()]
        of_layers = [part for name, part in parts if name == "self_attn" or "is_causal" in vars(part)]
        children = _children(searched)
        return cls(roots=roots, depth=depth, searched=searched, children=children, modules=modules, of_layers=of_layers)


def _children(modules: list[nn.Module]) -> list[Any]:
    return [*chain.from_iterable(map(dict.values, map(_MODULES, modules)))]


_MODULES: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")


# ---------------------------------------------------------------------- what packed attention supports


def _not_computed(model: ModelParts, callers: list[tuple[str, Any]]) -> Iterator[str]:
    """Yield the reasons why packed attention differs from what the model would have computed."""
    for config in (model.core.config, model.text.config):
        if getattr(config, "is_causal", None) is False:
            yield f"is_causal is False in the model's {type(config).__name__}, but {_CAUSAL}"
    is_causal = not isinstance(model.family.bidirectional, Prefix)
    for name, module in callers:
        if name == TEXT and is_causal and getattr(module, "is_causal", None) is False:
            yield f"is_causal is False on a {type(module).__name__}, but {_CAUSAL}"
    calls_own = _has_own_masks(model)
    for module in {(type(x), id(x.config)): x for name, x in callers if not (name == TEXT and calls_own)}.values():
        if "is_causal" in vars(module):
            yield from _function_problems(_original_name(module), module)


def _has_own_masks(model: ModelParts) -> bool:
    """Return whether a mechanism has its own attention, which packed rows call too."""
    return any("attention" in parts for parts in model.family.mechanisms.values())


_CAUSAL = (
    "packed attention is causal: a token would not see the later ones of its sample. Set it to True, or train this "
    "model without packing"
)


_OF_KERNELS = {"implementation", "attention_wrapper"}
"""Arguments with which transformers passes a kernel to its own function."""


def _function_problems(name: str, module: nn.Module) -> Iterator[str]:
    """Report a custom attention function. Back-ends only compute the same as transformers' own functions."""
    called: Any = _original(name, module)
    is_upstream = True
    while isinstance(called, functools.partial):
        is_upstream &= not called.args and called.keywords.keys() <= _OF_KERNELS
        called = called.func
    code = called if isinstance(called, FunctionType) else type(called)
    # A wrapper copies the name and module of the wrapped function, but its globals are those of its own file.
    file = code.__globals__["__name__"] if isinstance(code, FunctionType) else code.__module__
    if not (is_upstream and file.startswith("transformers.")):
        yield (
            f"the attention {name!r} of a {type(module).__name__} is a function of your own "
            f"({file}.{code.__qualname__}), which packed rows would not call: vlmpack's back-ends "
            "compute plain softmax attention. Choose one of transformers, "
            'model.set_attn_implementation("sdpa"), or train without packing'
        )


_COMPUTED = ("scaling", "dropout")
_OF_PATTERNS = {"sliding_window": "window", "softcap": "softcap", "s_aux": "sinks"}
"""Keywords with which a text layer passes its pattern, and the pattern's field names."""
_OF_VISION = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_WITHOUT_EFFECT = (
    "grid_thw",
    "position_ids",
    "interp_indices",
    "interp_weights",
    "use_cache",
    "output_router_logits",
    "output_hidden_states",
    "return_dict",
)
_UNDERSTOOD = frozenset((*_COMPUTED, *_OF_VISION, *_WITHOUT_EFFECT))
"""Keywords of an attention call that a back-end computes, or that do not affect attention. For the supported families,
transformers 5.17 to 5.24 passes only these and the pattern keywords."""


def _settings(
    module: nn.Module, kwargs: dict[str, Any], *, causal: bool, always_masked: bool = False
) -> dict[str, Any]:
    """Build the arguments of a back-end call.

    Raises:
        BackendError: a keyword that no back-end computes, or non-causal attention in a text model.
    """
    settings = {"scale": kwargs["scaling"], "dropout": kwargs.get("dropout", 0.0)}
    others = {name: value for name, value in kwargs.items() if value is not None and name not in _UNDERSTOOD}
    if causal and not always_masked and getattr(module, "is_causal", None) is False:
        others.setdefault("is_causal", False)
    if not others:
        return settings
    if causal and (pattern := {part: others.pop(name) for name, part in _OF_PATTERNS.items() if name in others}):
        settings["pattern"] = Pattern(**pattern)
    if "is_causal" in others and bool(others["is_causal"]) == causal:
        del others["is_causal"]
    if others:
        shown = ", ".join(f"{name}={value!r:.40}" for name, value in others.items())
        raise BackendError(
            f"a {type(module).__name__} calls attention with {shown}, which no back-end for packed rows computes; "
            "leave it out, or train this model without packing"
        )
    return settings


def _has_upstream_forward(module: nn.Module) -> bool:
    return "forward" not in vars(module) and type(module).forward.__module__.startswith("transformers.")


# ---------------------------------------------------------------------- the functions


def _text_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, Any]:
    row: RowContext | None = kwargs.pop(CONTEXT, None)
    if row is None:
        check_not_bypassed(kwargs)
        if module.training and not is_subclassed(module):  # sparse attention gets a mask from its indexer
            warn_past_the_forward(args[0] if args else kwargs.get("attention_mask"))
        return _call_original(module, query, key, value, *args, **kwargs)
    always_masked = isinstance(row.entries[Attention.name].bidirectional, Prefix)  # whatever the layer's is_causal is
    settings = _settings(module, kwargs, causal=True, always_masked=always_masked)
    return packed_attention(query, key, value, row, module=module, **settings), None


def _vision_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, Any]:
    row: RowContext | None = kwargs.pop(CONTEXT, None)
    if row is not None:
        settings = _settings(module, kwargs, causal=False)
        boundaries = kwargs["cu_seq_lens_q"]
        return packed_attention(query, key, value, row, vision=boundaries, module=module, **settings), None
    if "flash" in _original_name(module) or "cu_seq_lens_q" not in kwargs:
        return _call_original(module, query, key, value, *args, **kwargs)
    return _image_by_image(module, (query, key, value), *args, **kwargs), None


AttentionInterface.register(TEXT, _text_attention)
AttentionInterface.register(VISION, _vision_attention)


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row: RowContext,
    *,
    scale: float,
    dropout: float,
    vision: torch.Tensor | None = None,
    pattern: Pattern = CAUSAL,
    module: Any = None,
) -> torch.Tensor:
    """Take transformers' [1, N, T, H] and return its [1, T, N, H]. Compiled graphs contain it as one operator, except
    in a row that goes through the model in pieces: their gradients take ways past the operator.

    `vision`: boundaries of a vision block; None: text. `module`: the calling layer.
    """
    device, is_double = query.device.type, query.dtype == torch.float64
    if not (is_double or query.is_meta) and torch.is_autocast_enabled(device):
        # Rotary embeddings leave q and k in float32. PyTorch's own attention casts them, but not every kernel.
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    q_TNH, k_TKH, v_TKH = qkv = [x.squeeze(0).transpose(0, 1) for x in (query, key, value)]
    settings: dict[str, Any] = {"scale": scale, "dropout": dropout}
    is_opaque = torch.compiler.is_compiling() and row.part.piece is None
    if not (is_opaque and (vision is not None or hasattr(module, NUMBER))):
        attend = _attend_outside_graph if is_compiled() else _attend
        return attend(q_TNH, k_TKH, v_TKH, row, pattern, vision, module=module, **settings).unsqueeze(0)
    tensors, number = [*(x.contiguous() for x in qkv), pattern.sinks], getattr(module, NUMBER, None)
    learns = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in tensors]
    limits = {"window": pattern.window, "softcap": pattern.softcap, "learns": learns}
    out_TNH, _ = attention_operator(*tensors, vision, row.handle, number, **settings, **limits)
    return out_TNH.unsqueeze(0)


def _attend(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    row: RowContext,
    pattern: Pattern,
    vision: torch.Tensor | None,
    *,
    scale: float,
    dropout: float,
    module: Any,
    layer: int | None = None,
) -> torch.Tensor:
    entry: RowAttention = row.entries[Attention.name]
    if vision is None:
        entry.calls += 1
        if entry.upstream_masks is not None and (number := layer if module is None else module.layer_idx) is not None:
            pattern = with_chunk(entry.upstream_masks, pattern, number)
        entry.limits.add((pattern.window, pattern.chunk))
        if entry.spans is not None:
            pattern = _with_spans(pattern, entry, row, q_TNH.shape[1])
    segments = row.segments if vision is None else row.entries[OF_VISION].find(vision, len(q_TNH))

    def attend(
        q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, segments: Segments, **keys: Segments
    ) -> torch.Tensor:
        # With Ulysses, a rank has some of the heads.
        heads = q_TNH.shape[1]
        of_heads = pattern.of_heads(row.part.rank * heads, heads)
        call = AttentionCall.of(q_TNH, k_TKH, value_dim=v_TKH.shape[2], dropout=dropout, pattern=of_heads)
        settings: dict[str, Any] = {"scale": scale, "dropout": dropout, "pattern": of_heads, **keys}
        backend = choose(call, entry.backend, chosen=entry.chosen)
        return backend(q_TNH, k_TKH, v_TKH, segments, causal=vision is None, **settings)

    if vision is not None:  # all patches of an image are on the same rank
        return attend(q_TNH, k_TKH, v_TKH, segments)
    return row.part.attend(attend, (q_TNH, k_TKH, v_TKH), segments, layer=module)


_attend_outside_graph = outside_graph(_attend)

# ---------------------------------------------------------------------- as an operator of compiled graphs


_OPERATOR: dict[str, Any] = {"mutates_args": (), "tags": (torch.Tag.cudagraph_unsafe,)}


@torch.library.custom_op("vlmpack::attention", **_OPERATOR)
def attention_operator(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    sinks: torch.Tensor | None,
    vision: torch.Tensor | None,
    row: torch.Tensor,
    layer: torch.Tensor | None,
    scale: float,
    dropout: float,
    window: int | None,
    softcap: float | None,
    learns: list[bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [T, N, H] of a row's handle, and the handle of the `OpaqueCall`. `learns`: which of the first four tensors
    get gradients."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        pattern = Pattern(window=window, softcap=softcap, sinks=sinks)
        number = None if layer is None else int(layer)
        settings: dict[str, Any] = {"scale": scale, "dropout": dropout, "module": None, "layer": number}
        return _attend_outside_graph(q, k, v, value_of(row)(), pattern, vision, **settings).contiguous()

    tensors = (q_TNH, k_TKH, v_TKH, sinks)
    if not any(learns):
        return attend(*tensors), torch.zeros((), dtype=torch.int64, device="cpu")
    call = OpaqueCall(attend, tensors, learns)
    return call.out, handle_of(call)


@attention_operator.register_fake
def _(q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, *others: Any) -> Any:
    out_TNH = q_TNH.new_empty(*q_TNH.shape[:2], v_TKH.shape[2])
    return out_TNH, torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.custom_op("vlmpack::attention_backward", **_OPERATOR)
def _backward_operator(
    grad_TNH: torch.Tensor,
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    sinks: torch.Tensor | None,
    out_TNH: torch.Tensor,
    call: torch.Tensor,
    learns: list[bool],
) -> list[torch.Tensor]:
    return value_of(call).gradients(grad_TNH, (q_TNH, k_TKH, v_TKH, sinks, out_TNH))


@_backward_operator.register_fake
def _(grad_TNH: torch.Tensor, *inputs: Any) -> list[torch.Tensor]:
    *tensors, learns = inputs
    return [x.new_empty(x.shape) for x, is_one in zip(tensors, learns, strict=False) if is_one]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, _, _, _, _, _, _, _, ctx.learns = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad_TNH: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    found = iter(_backward_operator(grad_TNH, *ctx.saved_tensors, ctx.learns))
    return *(next(found) if is_one else None for is_one in ctx.learns), *(None for _ in range(8))


attention_operator.register_autograd(_backward, setup_context=_save)


def _with_spans(pattern: Pattern, entry: RowAttention, row: RowContext, heads: int) -> Pattern:
    """Add a layer's bidirectional spans to its pattern.

    Raises:
        ConfigError: the number of ranks that share the row does not divide the heads. A span's later tokens may then be
            on another rank, out of the query's sight.
    """
    if (spans := entry.spans_of(pattern.window)) is None:
        return pattern
    if heads % row.part.ranks:
        raise ConfigError(
            f"{row.part.ranks} ranks share a row and do not divide the {heads} heads of a layer with bidirectional "
            "spans, whose tokens also attend to keys of later ranks; use a number of ranks that divides the heads"
        )
    return replace(pattern, spans=spans)


def _original_name(module: Any) -> str:
    """Return the implementation that the module's configuration names."""
    return module.config._attn_implementation_internal


def _original(name: str, module: nn.Module) -> Callable[..., tuple[torch.Tensor, Any]]:
    """Return the function that transformers would have called. Each modeling file has its own "eager" function."""
    files = [vars(sys.modules[klass.__module__]) for klass in type(module).__mro__ if klass.__module__ in sys.modules]
    eager = next(file["eager_attention_forward"] for file in files if "eager_attention_forward" in file)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)


def _call_original(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    name = _original_name(module)
    caller = module if name in ("sdpa", "eager", "flex_attention") else _with_plain_config(module)
    return _original(name, module)(caller, *args, **kwargs)


def _with_plain_config(module: nn.Module) -> nn.Module:
    """Return a shallow copy with the plain configuration, for functions that read a kernel's name from it (flash)."""
    copied = object.__new__(type(module))
    vars(copied).update(vars(module), config=plain_config(module))
    return copied


def _image_by_image(module: nn.Module, qkv: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Call attention once per image, as a vision tower does for implementations that take no boundaries."""
    sizes = kwargs.pop("cu_seq_lens_q").diff().tolist()
    for name in ("cu_seq_lens_k", "max_length_q", "max_length_k"):
        kwargs.pop(name, None)
    images = zip(*(x.split(sizes, dim=2) for x in qkv), strict=True)
    return torch.cat([_call_original(module, *image, *args, **kwargs)[0] for image in images], dim=1)


# ---------------------------------------------------------------------- configuration proxies
#
# Proxies for configurations: they give the attention modules of one model another attention name.
#
# An attention layer looks up its attention function by the name in its configuration, which other modules, other models
# and saved files share. So each attention module gets a proxy: the same attributes with another attention name.


class ConfigProxy:
    """A configuration with another attention name. It shares its attributes with the plain one, in both directions."""

    __slots__ = ()
    _vlmpack_name: ClassVar[str]
    _vlmpack_plain: PreTrainedConfig

    @property
    def _attn_implementation(self) -> str:
        return self._vlmpack_name

    @_attn_implementation.setter
    def _attn_implementation(self, value: str) -> None:
        self._vlmpack_plain._attn_implementation = value

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of both configurations.

        Raises:
            ConfigError: the attention name of the proxy would be stored: a new model is being made from it.
        """
        if name == "_attn_implementation_internal" and value == self._vlmpack_name:
            raise ConfigError(
                f"this {type(self).__name__} is that of a layer with packing enabled; make the new model of "
                "model.config, or of copy.copy(layer.config)"
            )
        super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        return self._vlmpack_plain == (other._vlmpack_plain if isinstance(other, ConfigProxy) else other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # configurations are not hashable

    def __copy__(self) -> PreTrainedConfig:
        return copy.copy(self._vlmpack_plain)

    def __deepcopy__(self, memo: dict[int, Any]) -> PreTrainedConfig:
        """Copy to a proxy if the module is copied too, and to the plain configuration if only this is copied."""
        alone = not memo
        plain = copy.deepcopy(self._vlmpack_plain, memo)
        return plain if alone else config_proxy(plain, self._vlmpack_name)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return config_proxy, (self._vlmpack_plain, self._vlmpack_name)


def config_proxy(plain: PreTrainedConfig, name: str) -> PreTrainedConfig:
    """Make a proxy for `plain` with the attention name `name`."""
    config = object.__new__(_proxy_class(type(plain), name))
    object.__setattr__(config, "_vlmpack_plain", plain)
    object.__setattr__(config, "__dict__", vars(plain))
    return config


@functools.cache
def _proxy_class(base: type[PreTrainedConfig], name: str) -> Any:
    def new(cls: type[PreTrainedConfig], *args: Any, **kwargs: Any) -> PreTrainedConfig:
        return base(*args, **kwargs)  # `type(config)(...)` makes a plain configuration

    shown = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    body = {"__new__": new, "__eq__": ConfigProxy.__eq__, "__slots__": ("_vlmpack_plain",), "_vlmpack_name": name}
    return type(base.__name__, (ConfigProxy, base), {**shown, **body})


def plain_config(module: Any) -> PreTrainedConfig:
    """Return the plain configuration of a module, without our attention name."""
    config = module.config
    return config._vlmpack_plain if isinstance(config, ConfigProxy) else config
