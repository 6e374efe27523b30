"""Gated delta layers see one sample at a time: convolution and recurrence start anew in every segment of a row.

With flash-linear-attention, whose kernel starts anew at given boundaries, a row goes through the layer in one call,
with zeros between its segments for the convolution (`layout.Spaced`). Otherwise it is cut into right-padded batches of
samples of like length, or into single samples, whichever costs less (`layout.buckets`), and the layer is run on each.

    row       a a a .  b b b b b . . .  c c . .
    spaced    a a a 0 0 0  b b b b b 0 0 0  c c        buckets   a a a     b b b b b
                                                                 c c ~
    row       A A A 0  B B B B B 0 0 0  C C 0 0

The layer's class becomes a subclass of its own class that does so when it is told a row, by keyword, as all layers are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vlmpack.errors import ConfigError
from vlmpack.families import Family, check_fla, fla_boundaries, keeps_zeros
from vlmpack.layout import Buckets, Segments, Spaced, around_graph, outside_graph
from vlmpack.step.attention import check_not_bypassed
from vlmpack.step.context import CONTEXT, RowContext
from vlmpack.step.subclass import subclass

CALL_COST = {"cpu": 16.0, "cuda": 65536.0}
"""What one more call of a layer costs, in tokens, by type of device. A GPU scans a batch in the time of its longest
sample, so there as few calls as `layout.buckets.MAX_STRETCH` allows are best."""


def cut(family: Family, segments: Segments, device: torch.device, text_config: Any) -> Buckets | Spaced | None:
    """How gated delta layers compute a row; None: the family has none.

    Args:
        family: the model's family.
        segments: the row.
        device: where the model is.
        text_config: the text part's configuration.

    Raises:
        BackendError: flash-linear-attention computes the layers, and does so wrongly or not at all here.
    """
    if family.delta is None:
        return None
    if family.delta.uses_fla():
        check_fla(device, training=torch.is_grad_enabled())
        return Spaced(segments=segments, reach=family.delta.reach(text_config))
    return Buckets.cheapest(segments, call_cost=CALL_COST.get(device.type, CALL_COST["cuda"]))


@functools.cache
def cut_class(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a gated delta layer's class that keeps the samples of a row apart; one a base class."""

    @functools.wraps(base.forward)
    def forward(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        row: RowContext | None = kwargs.pop(CONTEXT, None)
        if row is None:
            check_not_bypassed(kwargs)
            return base.forward(self, hidden_states, *args, **kwargs)
        return _computed(base.forward, self, hidden_states, row, kwargs)

    return subclass(base, {"forward": around_graph(forward)}, cut_class)


@outside_graph
def _computed(
    own_forward: Callable[..., torch.Tensor],
    layer: nn.Module,
    hidden_1tD: torch.Tensor,
    row: RowContext,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """[1, t, D] through the layer, sample by sample. The layer stays out of compiled graphs: it would be compiled again
    for nearly every row, and torch 2.13's aot_eager fails in its backward pass on any batch of two."""
    delta = row.delta
    assert delta is not None
    if not delta.tokens:  # nothing but padding; the parameters up to here keep their place in the graph
        return own_forward(layer, hidden_1tD * 0, **kwargs)
    if isinstance(delta, Spaced):
        _check_zeros(layer)
        kwargs = {**kwargs, **fla_boundaries(delta, hidden_1tD.device)}

    def on_samples(stand_in: nn.Module, row_1TD: torch.Tensor) -> torch.Tensor:
        return delta.join([own_forward(stand_in, part, **kwargs) for part in delta.split(row_1TD)])

    return row.share.delta(on_samples, layer, hidden_1tD)


def _check_zeros(layer: nn.Module) -> None:
    if not keeps_zeros(layer):
        raise ConfigError(
            f"a projection before the convolution of a {type(layer).__name__} has a bias, which would turn the zeros "
            "that keep samples apart into something else: train without it (LoRA: lora_bias=False), or without fla"
        )
