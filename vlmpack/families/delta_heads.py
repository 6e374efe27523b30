"""A gated delta layer cut by heads: projections of all tokens in, for some of its heads; the same heads' results out.

What comes before the convolution (projections of each token) and after the norm (one projection) is the layer's own
work on its own tokens. What lies between runs along the sequence, and each head by itself:

    hidden [t, D] ─ projections ─▶ [t, all heads] ═ exchanged ═▶ [T, some heads] ─ convolution, recurrence, norm ─┐
    hidden [t, D] ◀─ projection ── [t, all heads] ◀═ exchanged ═ [T, some heads] ◀────────────────────────────────┘

The layer's own forward computes the part between: on a stand-in for the layer, whose projections only take apart what
they are given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import nn

_SPLIT = ("key_dim", "value_dim", "conv_dim", "num_k_heads", "num_v_heads")
"""Numbers of a layer that count heads, or channels of heads."""

_PER_HEAD = ("A_log", "dt_bias")
"""Parameters with one entry a value head."""


@final
class DeltaHeads:
    """One gated delta layer, cut into as many parts of its heads as there are ranks."""

    def __init__(self, layer: Any, ranks: int) -> None:
        self._layer = layer
        self._ranks = ranks
        self._blocks = _blocks(layer)

    @property
    def is_possible(self) -> bool:
        """Whether the heads can be shared out evenly, and the layer's projections are known."""
        return bool(self._blocks) and self._layer.num_k_heads % self._ranks == 0

    def project(self, hidden_tD: torch.Tensor) -> list[torch.Tensor]:
        """[t, D] to [t, ranks, F] of each block of channels: what each rank is to have of the own tokens."""
        found = []
        for name, sizes in self._blocks.items():
            blocks = self._layer.get_submodule(name)(hidden_tD).split(sizes, -1)
            found += [block.unflatten(-1, (self._ranks, -1)) for block in blocks]
        return found

    def stand_in(self, rank: int) -> nn.Module:
        """The layer with the heads of `rank` alone. Its forward takes what `project` gave, [n, W, F of all blocks], for
        hidden states, and gives back [n, W, value channels]."""
        layer, own = self._layer, nn.Module.__new__(type(self._layer))
        vars(own).update(vars(layer))
        vars(own).update({name: vars(layer)[name] // self._ranks for name in _SPLIT})
        slices = {name: layer._parameters[name].chunk(self._ranks)[rank] for name in _PER_HEAD}
        vars(own)["_parameters"] = {**layer._parameters, **slices}
        vars(own)["_modules"] = {
            **layer._modules,
            **self._takers(),
            "conv1d": SimpleNamespace(weight=self._taps(layer.conv1d.weight, rank), bias=None),
            "out_proj": lambda heads: heads,
        }
        return own

    def _takers(self) -> dict[str, Any]:
        """For each projection a function that takes its channels out of all."""
        sizes = [sum(blocks) // self._ranks for blocks in self._blocks.values()]
        edges = pairwise(accumulate(sizes, initial=0))
        return {name: _taker(start, stop) for name, (start, stop) in zip(self._blocks, edges, strict=True)}

    def _taps(self, weight: torch.Tensor, rank: int) -> torch.Tensor:
        """The convolution's weights for the channels of `rank`: queries, keys and values."""
        key, value = self._layer.key_dim, self._layer.value_dim
        return torch.cat([block.chunk(self._ranks)[rank] for block in weight.split((key, key, value))])


def _taker(start: int, stop: int) -> Any:
    return lambda channels: channels[..., start:stop]


def _blocks(layer: Any) -> Mapping[str, Sequence[int]]:
    """The projections before the convolution; of each, the runs of channels that lie head after head. Empty: they
    are others, or the convolution has a bias."""
    key, value, heads = layer.key_dim, layer.value_dim, layer.num_v_heads
    known = (
        {"in_proj_qkv": (key, key, value), "in_proj_z": (value,), "in_proj_b": (heads,), "in_proj_a": (heads,)},
        {"in_proj_qkvz": (2 * key + 2 * value,), "in_proj_ba": (2 * heads,)},
    )
    here = {name for name, _ in layer.named_children() if name.startswith("in_proj")}
    return next((sizes for sizes in known if sizes.keys() == here and layer.conv1d.bias is None), {})
