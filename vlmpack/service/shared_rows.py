"""Rows shared by adapters in layers that compute a row in parts: whose tokens each part holds.

A gated delta layer cuts the row into right-padded batches of samples of like length, or lays zeros between its samples,
and calls its projections on each part in turn; so does a short convolution:

    row       x x x  y y  z z          owners of the tokens, as `Span`s of the whole row
    parts     x x x | y y              what a projection is called with, first and second
                      z z
    spans     (x 3) | (y 2) (z 2)      of each part

The layer's own cut of hidden states cuts a row of owners too, so whatever its rule is, the spans are those of its
parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, final

import torch
from torch import nn

from vlmpack.families.family import Family
from vlmpack.model.mechanisms import ModelParts
from vlmpack.model.row import CONTEXT
from vlmpack.service.adapters import Adapters, Span

MECHANISMS = ("gated_delta", "short_conv")
"""Mechanisms whose layers compute a row in parts."""


@final
class PartSpans:
    """A hook on one such layer: before each call it lays out the spans of its parts.

    Gradient checkpointing calls the layer again, and so the hook.
    """

    def __init__(self, adapters: Adapters, mechanism: str, names: Sequence[str]) -> None:
        self._adapters, self._mechanism, self._names = adapters, mechanism, tuple(names)

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if len(self._adapters.spans) > 1:
            cut = kwargs[CONTEXT].entries[self._mechanism]
            self._adapters.lay_out(self._names, part_spans(cut, self._adapters.spans))

    def __deepcopy__(self, memo: dict[int, Any]) -> PartSpans:
        """Not copied with a model, as its adapters are not."""
        return self


def attach(adapters: Adapters, model: nn.Module, family: Family) -> None:
    """Hook every layer of a model that computes a row in parts."""
    names = {module: name for name, module in model.named_modules()}
    parts = ModelParts(family=family, core=model)
    for mechanism in MECHANISMS:
        for layer in parts.layer_parts(mechanism):
            targets = [target for target in adapters.targets.attention if target.startswith(f"{names[layer]}.")]
            layer.register_forward_pre_hook(PartSpans(adapters, mechanism, targets), with_kwargs=True)


def part_spans(cut: Any, spans: Sequence[Span]) -> list[tuple[Span, ...]]:
    """The spans of each part of a row.

    Args:
        cut: `split` cuts [1, T, 1] into parts [n, W, 1]: the row's entry of its mechanism.
        spans: of the whole row.
    """
    lengths = torch.tensor([span.length for span in spans])
    owners_1T1 = torch.repeat_interleave(torch.arange(1, len(spans) + 1), lengths)[None, :, None]
    return [_spans_of(part.flatten().tolist(), spans) for part in cut.split(owners_1T1)]


def _spans_of(owners: Sequence[int], spans: Sequence[Span]) -> tuple[Span, ...]:
    """Runs of one owner; zeros between samples, of which nothing is read, go to the one before."""
    filled, last = [], 1
    for owner in owners:
        last = owner or last
        filled.append(last)
    runs = [(owner, len(list(run))) for owner, run in groupby(filled)]
    return tuple(Span(adapter=spans[owner - 1].adapter, length=length) for owner, length in runs)
