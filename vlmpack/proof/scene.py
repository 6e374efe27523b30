"""What reached each mechanism in one forward pass, and the mechanism run again by itself on something else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.func import functional_call

from vlmpack.families import Family
from vlmpack.layout import Segments
from vlmpack.model import ModelParts, expert_layers
from vlmpack.proof.samples import ProbeSample
from vlmpack.proof.ways import Pass, Way

LEAK = 1e-5
"""What may move when something else is changed, as a part of the largest entry: a real leak is 1e-2."""

Span = tuple[int, int]
Calls = dict[nn.Module, list["Call"]]

CACHES = ("past_key_values", "past_key_value", "cache_params")
"""Keywords under which a layer is handed a cache, which a second run would find full."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One call of a module."""

    module: nn.Module
    """The module."""
    args: tuple[Any, ...]
    """Positional arguments."""
    kwargs: Mapping[str, Any]
    """Keyword arguments: a row's boundaries are among them."""
    output: list[torch.Tensor]
    """Every tensor that it returned: the container may be rearranged by the caller."""

    @property
    def hidden(self) -> torch.Tensor:
        """Hidden states [1, T, D], or patches [P, C]: the first positional argument or the one of that name."""
        return self.args[0] if self.args else self.kwargs["hidden_states"]

    def again(self, hidden: torch.Tensor, weights: Mapping[str, torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Every tensor that the module gives for other hidden states, and with some weights exchanged."""
        kwargs = {name: None if name in CACHES else value for name, value in self.kwargs.items()}
        if self.args:
            args = (hidden, *self.args[1:])
        else:
            args, kwargs = (), {**kwargs, "hidden_states": hidden}
        return tensors_in(functional_call(self.module, dict(weights or {}), args, kwargs))


@final
@dataclass(frozen=True, kw_only=True)
class Scene:
    """One forward pass, as each mechanism saw it."""

    family: Family
    """Of the model."""
    samples: Sequence[ProbeSample]
    """In row order."""
    segments: Segments
    """Where they lie in the row."""
    attention: Mapping[str, Call]
    """The attention of each layer of the text model that has it, by name."""
    delta: Mapping[str, Call]
    """The gated delta layers."""
    experts: Mapping[str, Call]
    """The experts of each layer that has them."""
    blocks: Mapping[str, Call]
    """The blocks around them, by the same names."""
    vision: Sequence[Call]
    """The calls of the vision tower: images, then videos."""
    backbone: Call
    """The call of the model without its head."""
    head: Sequence[Call]
    """The calls of the head."""
    given: Pass
    """What came back."""

    @property
    def gaps(self) -> list[Span]:
        """Runs of the row that belong to no sample."""
        edges = [0, *(edge for span in self.segments.spans for edge in span), self.segments.total]
        return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]


def watch(model: nn.Module, family: Family, way: Way, samples: Sequence[ProbeSample]) -> Scene:
    """Run `way` once, with a graph or without. `model` is the one with the head, not a wrapper around it."""
    text, tower = family.language_model(model), family.vision_tower(model)
    attention = children(text, "self_attn")
    delta = children(text, "linear_attn") if family.has("gated_delta") else {}
    blocks = _expert_blocks(family, model)
    experts = {name: block.get_submodule("experts") for name, block in blocks.items()}
    mixers = [*attention.values(), *delta.values()]
    backbone, head = family.backbone(model), family.head(model)
    watched = [backbone, head, *mixers, *experts.values(), *blocks.values(), *([] if tower is None else [tower])]
    with recorded(watched) as calls:
        given = way(samples)
    return Scene(
        family=family,
        samples=samples,
        segments=way.segments(samples),
        attention={name: calls[module][0] for name, module in attention.items()},
        delta={name: calls[module][0] for name, module in delta.items()},
        experts={name: calls[module][0] for name, module in experts.items()},
        blocks={name: calls[module][0] for name, module in blocks.items()},
        vision=[] if tower is None else calls[tower],
        backbone=calls[backbone][0],
        head=calls[head],
        given=given,
    )


def children(text: nn.Module, name: str) -> dict[str, nn.Module]:
    """The submodule of this name of each decoder layer that has one."""
    layers = text.get_submodule("layers").named_children()
    found = {f"layer {at}": dict(layer.named_children()).get(name) for at, layer in layers}
    return {at: module for at, module in found.items() if module is not None}


def _expert_blocks(family: Family, model: nn.Module) -> dict[str, nn.Module]:
    layers = expert_layers(ModelParts(family=family, core=model))
    return {f"expert block {i}": layer.block for i, layer in enumerate(layers)}


@contextmanager
def recorded(modules: Iterable[nn.Module]) -> Iterator[Calls]:
    """Every call of these modules; nothing of it is changed."""
    calls: Calls = {module: [] for module in modules}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls[module].append(Call(module=module, args=args, kwargs=dict(kwargs), output=_detached(output)))

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in calls]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


# ---------------------------------------------------------------------- changing one thing and watching another


def changed(x: torch.Tensor, spans: Iterable[Span], *, dim: int) -> torch.Tensor:
    """`x` with other numbers of the same size in these spans of `dim`."""
    out = x.detach().clone()
    for start, stop in spans:
        part = out.narrow(dim, start, stop - start)
        part.copy_(-part.roll(1, dims=-1) - 0.5 * part.roll(3, dims=-1))
    return out


def moved(after: torch.Tensor, before: torch.Tensor, spans: Iterable[Span], *, dim: int) -> float:
    """The most that these spans moved, as a part of the largest entry; NaN counts as infinitely far."""
    before = before.detach()
    scale = max(float(before.abs().nan_to_num().max()), 1e-30)
    difference = (after.detach() - before).abs().nan_to_num(nan=float("inf"))
    moves = [float(difference.narrow(dim, a, b - a).max()) for a, b in spans if b > a]
    return max(moves, default=0.0) / scale


def most_moved(
    run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, spans: Sequence[Span], gaps: Sequence[Span]
) -> float:
    """The most that spans of `run(x)` move when every other one, or the gaps, are changed. [1, T, D] in and out."""
    before = run(x)
    worst = moved(run(changed(x, gaps, dim=1)), before, spans, dim=1) if gaps else 0.0
    for these, others in (spans[::2], spans[1::2]), (spans[1::2], spans[::2]):
        worst = max(worst, moved(run(changed(x, these, dim=1)), before, others, dim=1))
    return worst


def _detached(output: Any) -> list[torch.Tensor]:
    return [x.detach() for x in tensors_in(output)]


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Every tensor of a nested output, in order."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, (list, tuple)):
        return [tensor for part in output for tensor in tensors_in(part)]
    return []
