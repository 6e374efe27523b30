"""Hold the choice of experts to that of the samples alone, where rounding alone decides it.

A router sends a token to the k experts of the highest scores. Where the k-th and the next score are equal but for
rounding, the last bit of a hidden state chooses the expert. It depends on the processor and on the number of rows in a
product, and it is not continuous: the token's hidden state, and gradients of the router and the experts, jump by a
tenth of their size. Such a jump is neither rounding, for which limits allow, nor a leak.

So choices are recorded of each sample alone, in float32, and held in every pass that is compared with them: the plain
pass in low precision, which sets the limits, the padded batch, and the packed row. What is left between two passes is
continuous in their rounding. That needs no wider limit in low precision, and makes limits that are earned narrower: the
plain pass contains no jumps either.

A choice is held only where the scores of that very pass leave it open: those of the held experts lie at most a part of
the spread of the token's scores below those that it would choose (`OPEN`). Any other choice stays as it is, and the
logits then differ. Scores, weights and hidden states are always those of the pass, so a leak into a router's input
shows in them as before.

Where samples are exchanged and all others watched, every choice is held. Experts multiply the tokens of all samples at
once, and how a product rounds depends on its number of rows. With the same choices each expert gets as many tokens, so
the others are the same bit for bit unless something leaks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.probing.forward_passes import ForwardPass, PackedPass, ProbedModel
from vlmpack.testing.samples import Sample

Choices = dict[str, list[torch.Tensor]]
"""int64 [N, k] of each top-k of each block with experts: the experts of the N tokens that it routes, in their order."""

OPEN = {"float32": 1e-3, "low": 0.125}
"""The most that scores of held experts lie below the chosen ones, as a part of the spread of a token's scores.

Hidden states differ by about 1e-6 in float32, and in bfloat16 by 1 % to 3 % after some layers; a single token by more.
"""
HOLD_ALL = torch.inf
"""Share of choices that are held whatever the scores are."""


def open_share(*, is_low: bool) -> float:
    """Return the share for a pass that is compared with the samples alone."""
    return OPEN["low" if is_low else "float32"]


@final
@dataclass(frozen=True, kw_only=True)
class HeldChoices:
    """The choices of samples alone, and the places of their tokens in a pass."""

    samples: Sequence[Choices]
    """Of each sample."""
    places: Sequence[torch.Tensor]
    """int64 [L] of each sample: its tokens in the pass, whose rows are laid one after the other."""
    share: float
    """The most that scores of held experts may lie below those chosen, as a part of the spread of a token's scores."""

    def for_rows(self, block: str, call: int, rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return (places, experts) of the tokens in a top-k of so many rows; None: it does not route these samples.

        A block routes the tokens of the samples alone, one sample after the other, or every token of the pass.
        """
        by_sample = [choices.get(block, [])[call : call + 1] for choices in self.samples]
        experts = [chosen[0] for chosen in by_sample if chosen]
        if not experts or any(chosen.shape[-1] != k for chosen in experts):
            return None
        if sum(map(len, experts)) == rows:
            return torch.arange(rows), torch.cat(experts)
        is_whole = [len(chosen) for chosen in experts] == [len(places) for places in self.places]
        if is_whole and max(int(places.max()) for places in self.places) < rows:
            return torch.cat([*self.places]), torch.cat(experts)
        return None


@final
@dataclass(kw_only=True)
class RoutingRecord:
    """The routing of one pass."""

    choices: Choices
    """As they were computed with."""
    held: int = 0
    """Choices that would have been others by rounding, over all layers."""


def held_choices(
    forward: ForwardPass, samples: Sequence[Sample], choices: Sequence[Choices], *, share: float
) -> HeldChoices:
    """Place the choices of samples alone in a pass that computes them together; `share`: of `HeldChoices`."""
    return HeldChoices(samples=choices, places=places_of(forward, samples), share=share)


def places_of(forward: ForwardPass, samples: Sequence[Sample]) -> list[torch.Tensor]:
    """int64 [L] of each sample: its tokens in a pass, in a tree's sequence along its path."""
    tree = forward.row(samples).tree if isinstance(forward, PackedPass) and forward.circumstance.shares else None
    return [torch.arange(*span) for span in forward.segments(samples).spans] if tree is None else _paths(tree)


def _paths(tree: PrefixTree) -> list[torch.Tensor]:
    """int64 [L] of each sample: its tokens in the tree's sequence, node after node."""
    stops = torch.tensor(tree.lengths).cumsum(0).tolist()
    spans = [torch.arange(stop - length, stop) for stop, length in zip(stops, tree.lengths, strict=True)]

    def path(node: int) -> list[torch.Tensor]:
        return [] if node < 0 else [*path(tree.parents[node]), spans[node]]

    return [torch.cat(path(leaf)) for leaf in tree.leaves]


@contextmanager
def routing(probed: ProbedModel, held: HeldChoices | None = None) -> Iterator[RoutingRecord]:
    """Record the experts that each token is sent to, and hold them to other choices if there are any.

    Nothing of the model is changed; a model without experts is computed as it is.
    """
    record = RoutingRecord(choices={})
    blocks = _blocks(probed)
    if not blocks:
        yield record
        return
    mode = _TopK(record, held)
    with ExitStack() as stack:
        for name, block in blocks.items():
            stack.callback(block.register_forward_pre_hook(partial(mode.enter, name)).remove)
            stack.callback(block.register_forward_hook(mode.leave, always_call=True).remove)
        with mode:
            yield record


def _blocks(probed: ProbedModel) -> dict[str, nn.Module]:
    """The modules of the text model that route tokens: those that contain experts."""
    text = probed.family.language_model(probed.core)
    return {
        name: module
        for name, module in text.named_modules()
        if any(child == "experts" for child, _ in module.named_children())
    }


@final
class _TopK(TorchFunctionMode):
    """Top-k inside a block with experts."""

    def __init__(self, record: RoutingRecord, held: HeldChoices | None) -> None:
        super().__init__()
        self._record, self._held, self._block = record, held, ""

    def enter(self, name: str, *_: Any) -> None:
        self._block = name
        self._record.choices[name] = []

    def leave(self, *_: Any) -> None:
        self._block = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._block or func not in (torch.topk, torch.Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        if result[1].shape[:-1] != scores.shape[:-1] or not scores.is_floating_point():
            return result  # not over the experts, which are the last dimension
        calls = self._record.choices[self._block]
        if self._held is not None:
            result = self._hold(self._held, scores, result, len(calls))
        calls.append(result[1].detach().flatten(0, -2))
        return result

    def _hold(self, held: HeldChoices, scores: torch.Tensor, result: Any, call: int) -> Any:
        """Return the held experts with the scores of this pass, for tokens whose scores leave the choice open."""
        own = result[1].flatten(0, -2)
        wanted = held.for_rows(self._block, call, *own.shape)
        if wanted is None:
            return result
        places, experts = (x.to(own.device) for x in wanted)
        indices = own.index_copy(0, places, experts)
        flat = scores.detach().float().flatten(0, -2)
        finite = flat.isfinite()
        highest = flat.masked_fill(~finite, -torch.inf).amax(-1)
        spread = highest - flat.masked_fill(~finite, torch.inf).amin(-1)
        behind = flat.gather(-1, own).amin(-1) - flat.gather(-1, indices).amin(-1)
        is_open = torch.full_like(behind, True, dtype=torch.bool)
        if held.share != HOLD_ALL:
            is_open = behind <= held.share * spread
        differs = (own.sort(-1).values != indices.sort(-1).values).any(-1)
        self._record.held += int((differs & is_open).sum())
        chosen = torch.where((differs & is_open)[:, None], indices, own).view_as(result[1])
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))
