"""Record one forward pass: the inputs of each mechanism, pairs of query and key, host-device syncs.

A mechanism can then be run again by itself on changed inputs: what moves is its fault, and not that of a layer before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from vlmpack.layout.segments import Segments
from vlmpack.model.mechanisms import ModelParts
from vlmpack.model.mechanisms.experts import expert_layers
from vlmpack.model.plain import CACHES
from vlmpack.probing.forward_passes import ForwardPass, ForwardResult, ProbedModel
from vlmpack.probing.host_syncs import recorded_syncs
from vlmpack.testing.samples import Sample

LEAK = 1e-5
"""The most that may move when something else is changed, as a part of the largest entry: a real leak is 1e-2."""

Span = tuple[int, int]
Calls = dict[nn.Module, list["ModuleCall"]]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ModuleCall:
    """One call of a module."""

    module: nn.Module
    """The module."""
    args: tuple[Any, ...]
    """Positional arguments."""
    kwargs: Mapping[str, Any]
    """Keyword arguments: a row's boundaries are among them."""
    output: list[torch.Tensor]
    """Every tensor that it returned: the caller may change the container."""

    @property
    def hidden(self) -> torch.Tensor:
        """Hidden states [1, T, D], or patches [P, C]: the first positional argument or the one of that name."""
        return self.args[0] if self.args else self.kwargs["hidden_states"]

    def rerun(self, hidden: torch.Tensor, weights: Mapping[str, torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Run the module on other hidden states, and with some weights exchanged; every tensor that it returns."""
        # a second run would find its cache full
        kwargs = {name: None if name in CACHES else value for name, value in self.kwargs.items()}
        if self.args:
            args = (hidden, *self.args[1:])
        else:
            args, kwargs = (), {**kwargs, "hidden_states": hidden}
        return _tensors_in(functional_call(self.module, dict(weights or {}), args, kwargs))

    def rerun_plain(
        self, hidden: torch.Tensor, *, weights: Mapping[str, torch.Tensor] | None = None, **further: Any
    ) -> list[torch.Tensor]:
        """Run a layer as a plain model does, without a row, on hidden states and what it needs `further`."""
        return _tensors_in(functional_call(self.module, dict(weights or {}), (), {"hidden_states": hidden, **further}))


def routed_tokens(calls: Iterable[ModuleCall]) -> int:
    """Count the tokens that the experts of a layer were given. Those that are not told a token's experts (Llama 4) get
    all tokens once for each of them."""

    def tokens(call: ModuleCall) -> int:
        given = call.hidden.numel() // call.hidden.shape[-1]
        return given if len(call.args) + len(call.kwargs) > 1 else given // int(vars(call.module)["num_experts"])

    return sum(map(tokens, calls))


@final
@dataclass(frozen=True, kw_only=True)
class Trace:
    """One forward pass: the call of each mechanism."""

    probed: ProbedModel
    """The model."""
    samples: Sequence[Sample]
    """In row order."""
    segments: Segments
    """Their boundaries in the row."""
    attention: Mapping[str, ModuleCall]
    """The attention of each layer of the text model that has it, by name."""
    delta: Mapping[str, ModuleCall]
    """The gated delta layers."""
    conv: Mapping[str, ModuleCall]
    """The short convolutions."""
    experts: Mapping[str, Sequence[ModuleCall]]
    """The experts of each layer that has them, and were sent tokens: of text and of images apart, where they are."""
    blocks: Mapping[str, ModuleCall]
    """The blocks around them, by the same names."""
    vision: Sequence[ModuleCall]
    """The calls of the vision tower: images, then videos."""
    backbone: ModuleCall
    """The call of the model without its head."""
    head: Sequence[ModuleCall]
    """The calls of the head."""
    result: ForwardResult
    """The result of the pass."""

    @property
    def gaps(self) -> list[Span]:
        """Runs of the row that belong to no sample."""
        edges = [0, *(edge for span in self.segments.spans for edge in span), self.segments.total]
        return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]


def trace(forward: ForwardPass, probed: ProbedModel, samples: Sequence[Sample]) -> Trace:
    """Run `forward` once, with a graph or without, and record every mechanism."""
    family = probed.family
    text, tower = family.language_model(probed.core), family.vision_tower(probed.core)
    layers = expert_layers(ModelParts(family=family, core=probed.core))
    blocks = {f"expert block {i}": layer.block for i, layer in enumerate(layers)}
    groups: dict[str, dict[str, nn.Module]] = {
        "attention": submodules(text, "self_attn"),
        "delta": submodules(text, "linear_attn") if family.has("gated_delta") else {},
        "conv": submodules(text, "conv") if family.has("short_conv") else {},
        "blocks": blocks,
    }
    experts = dict(zip(blocks, (layer.experts for layer in layers), strict=True))
    backbone, head = family.backbone(probed.core), family.head(probed.core)
    modules = [backbone, head, *(module for group in groups.values() for module in group.values())]
    modules += [module for of_block in experts.values() for module in of_block]
    with recorded_calls([*modules, *([] if tower is None else [tower])]) as calls:
        result = forward(samples)
    first = {kind: {name: calls[module][0] for name, module in group.items()} for kind, group in groups.items()}
    return Trace(
        probed=probed,
        samples=samples,
        segments=forward.segments(samples),
        **first,
        experts={name: [call for part in parts for call in calls[part]] for name, parts in experts.items()},
        vision=[] if tower is None else calls[tower],
        backbone=calls[backbone][0],
        head=calls[head],
        result=result,
    )


def count_caches(forward: ForwardPass, probed: ProbedModel, samples: Sequence[Sample]) -> int:
    """Count the decoder layers that are given a cache, up to where the forward pass ends or raises."""
    layers = list(probed.family.language_model(probed.core).get_submodule("layers").children())
    with_cache: set[nn.Module] = set()

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(kwargs.get(name) is not None for name in CACHES):
            with_cache.add(module)

    handles = [layer.register_forward_pre_hook(look, with_kwargs=True) for layer in layers]
    try:
        with suppress(Exception):
            forward(samples)
    finally:
        for handle in handles:
            handle.remove()
    return len(with_cache)


def submodules(text: nn.Module, name: str) -> dict[str, nn.Module]:
    """Find the submodule of this name in each decoder layer that has one."""
    layers = text.get_submodule("layers").named_children()
    named = {f"layer {at}": dict(layer.named_children()).get(name) for at, layer in layers}
    return {at: module for at, module in named.items() if module is not None}


@contextmanager
def recorded_calls(modules: Iterable[nn.Module]) -> Iterator[Calls]:
    """Record every call of these modules, those that are called in the order in which their first call ends; nothing of
    it is changed."""
    calls: Calls = {module: [] for module in modules}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not calls[module]:
            calls[module] = calls.pop(module)
        tensors = [x.detach() for x in _tensors_in(output)]
        calls[module].append(ModuleCall(module=module, args=args, kwargs=dict(kwargs), output=tensors))

    handles = [module.register_forward_hook(record, with_kwargs=True) for module in calls]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _tensors_in(output: Any) -> list[torch.Tensor]:
    """Every tensor of a nested output, in order."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, (list, tuple)):
        return [tensor for part in output for tensor in _tensors_in(part)]
    return []


# ---------------------------------------------------------------------- changing one thing and comparing another


def perturb_spans(x: torch.Tensor, spans: Iterable[Span], *, dim: int) -> torch.Tensor:
    """Copy `x` with other numbers of the same size in these spans of `dim`."""
    out = x.detach().clone()
    for start, stop in spans:
        part = out.narrow(dim, start, stop - start)
        part.copy_(-part.roll(1, dims=-1) - 0.5 * part.roll(3, dims=-1))
    return out


def largest_move(after: torch.Tensor, before: torch.Tensor, spans: Iterable[Span], *, dim: int) -> float:
    """The most that these spans moved, as a part of the largest entry; NaN counts as infinitely far."""
    before = before.detach()
    scale = max(float(before.abs().nan_to_num().max()), 1e-30)
    difference = (after.detach() - before).abs().nan_to_num(nan=float("inf"))
    moves = [float(difference.narrow(dim, a, b - a).max()) for a, b in spans if b > a]
    return max(moves, default=0.0) / scale


def leak_between(
    run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, spans: Sequence[Span], gaps: Sequence[Span]
) -> float:
    """The most that spans of `run(x)` move when every other one, or the gaps, are changed. [1, T, D] in and out."""
    before = run(x)
    worst = largest_move(run(perturb_spans(x, gaps, dim=1)), before, spans, dim=1) if gaps else 0.0
    for changed, others in (spans[::2], spans[1::2]), (spans[1::2], spans[::2]):
        worst = max(worst, largest_move(run(perturb_spans(x, changed, dim=1)), before, others, dim=1))
    return worst


def first_moved(
    before: Callable[[], object],
    after: Callable[[], object],
    probed: ProbedModel,
    spans: Sequence[Span],
    *,
    width: int,
    limit: float,
) -> str | None:
    """Name the first module of the text model, in the order in which they end, whose output moves between two passes.

    The layers are compared first, then the modules inside the one that is found: outputs of one layer are held at a
    time.

    Args:
        before: runs a pass.
        after: runs the same with something changed.
        probed: the model of both.
        spans: of the row, tokens that must not move.
        width: tokens of the row: outputs of another number are not compared.
        limit: the most that they may move, as a part of an output's largest entry.

    Returns:
        The name of the module in the model, or None: they move in no output.
    """

    def first(modules: Sequence[nn.Module]) -> nn.Module | None:
        recorded: list[Calls] = []
        for run in (before, after):
            with recorded_calls(modules) as calls:
                run()
            recorded.append(calls)
        outputs, others = recorded
        for module, calls in outputs.items():
            pairs = zip(calls, others[module], strict=True)
            for x, y in (pair for a, b in pairs for pair in zip(a.output, b.output, strict=True)):
                dim = next((dim for dim, size in enumerate(x.shape[:2]) if size == width == y.shape[dim]), None)
                if dim is not None and largest_move(y, x, spans, dim=dim) > limit:
                    return module
        return None

    text, head = probed.family.language_model(probed.core), probed.family.head(probed.core)
    layers = text.get_submodule("layers")
    found = first([*(part for part in text.children() if part is not layers), *layers.children(), head])
    if found is None:
        return None
    inner = first([*found.modules()])
    found = found if inner is None else inner
    return next(name for name, module in probed.core.named_modules() if module is found)


# ---------------------------------------------------------------------- pairs of query and key

_VARLEN = {"torch_attn::_varlen_attn": (3, 4), "flash_attn::_flash_attn_varlen_forward": (3, 4)}
"""Varlen kernels, and the places of cu_seqlens of queries and keys among their arguments."""


@final
@dataclass(kw_only=True)
class PairCount:
    """Pairs of query and key of the text model's attention, read off the arguments of its kernels."""

    computed: int = 0
    """Per head, over all calls; causal attention counts both halves."""
    dense: int = 0
    """Of these, those of a dense score matrix, where a mask hides most."""
    calls: int = 0
    """Calls of attention layers."""
    depth: int = 0
    """Attention layers that are running."""

    @property
    def per_layer(self) -> int | None:
        """Pairs that one layer computes; None: no kernel showed any."""
        return self.computed // self.calls if self.calls and self.computed else None


@contextmanager
def counted_pairs(attention: Iterable[nn.Module]) -> Iterator[PairCount]:
    """Count while these attention layers run, forward passes only."""
    pairs = PairCount()

    def enter(*_: Any) -> None:
        pairs.depth += 1
        pairs.calls += 1

    def leave(*_: Any) -> None:
        pairs.depth -= 1

    handles = []
    for layer in attention:
        handles += [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave, always_call=True)]
    try:
        with _KernelPairs(pairs), _FunctionPairs(pairs):
            yield pairs
    finally:
        for handle in handles:
            handle.remove()


@final
class _FunctionPairs(TorchFunctionMode):
    """PyTorch's attention, and softmax over a score matrix that the model's code computed."""

    def __init__(self, pairs: PairCount) -> None:
        super().__init__()
        self._pairs = pairs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._pairs.depth:
            if func is F.scaled_dot_product_attention:
                query, key = args[0], args[1]
                self._pairs.computed += query.shape[0] * query.shape[-2] * key.shape[-2]
            elif func in (F.softmax, torch.softmax, torch.Tensor.softmax):
                *batch, _, queries, keys = args[0].shape
                self._pairs.computed += (batch[0] if batch else 1) * queries * keys
                self._pairs.dense += (batch[0] if batch else 1) * queries * keys
        return func(*args, **(kwargs or {}))


@final
class _KernelPairs(TorchDispatchMode):
    """Varlen kernels."""

    def __init__(self, pairs: PairCount) -> None:
        super().__init__()
        self._pairs = pairs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._pairs.depth and (places := _VARLEN.get(func._schema.name)):
            queries, keys = (args[i].diff().long() for i in places)
            self._pairs.computed += int((queries * keys).sum())
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------------- host-device syncs

PACKAGE = Path(__file__).parent.parent
PROBING = (PACKAGE / "probing", PACKAGE / "testing")
"""Code that calls `backward`: every operation of that pass is below this line, so it is not counted."""


@final
@dataclass(kw_only=True)
class SyncCount:
    """Moments in which the host blocks on the device, or would."""

    package: list[str] = field(default_factory=list)
    """Syncs in vlmpack's code: the operation and the file."""
    others: int = 0
    """Number of those in the model's code."""


@contextmanager
def counted_syncs(device: torch.device) -> Iterator[SyncCount]:
    """Count while something runs: on CUDA PyTorch itself reports syncs; on a CPU, operations that would need one."""
    syncs = SyncCount()
    with recorded_syncs(device) as recorded:
        try:
            yield syncs
        finally:
            for sync in recorded:
                file = Path(sync.file)
                if file.is_relative_to(PACKAGE) and not any(map(file.is_relative_to, PROBING)):
                    syncs.package.append(f"{sync.operation} in {file.relative_to(PACKAGE)}")
                else:
                    syncs.others += 1
