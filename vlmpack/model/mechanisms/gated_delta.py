"""Gated delta layers: convolution and recurrence restart in every segment of a row.

Linear attention that carries state along the sequence: a causal convolution over a few tokens, then a recurrence over
the whole sequence (Yang et al., 2024, Gated Delta Networks). Neither reads position ids or attention masks.

With flash-linear-attention, whose kernel restarts at given boundaries, a row goes through the layer in one call, with
zeros between its segments for the convolution (`VarlenCalls`). Otherwise the row is split into right-padded batches of
samples of similar length, or into single samples, whichever costs less (`Buckets`), and the layer runs on each.

    row       a a a b b b b b c c
    one call  a a a 0 0 0  b b b b b 0 0 0  c c        buckets   a a a     b b b b b
                                                                 c c ~
    row       A A A B B B B B C C

A prefix tree is computed level by level: the layer's cache has each node's initial state, its parent's final one.

Context parallelism splits the heads. The layer's own projections before the convolution and after the norm run token by
token. Between them each head runs along the sequence by itself, in the layer's own forward, on a copy with fewer
heads:

    hidden [t, D] ─ projections ─▶ [t, all heads] ═ all-to-all ═▶ [T, some heads] ─ convolution, recurrence, norm ─┐
    hidden [t, D] ◀─ projection ── [t, all heads] ◀═ all-to-all ═ [T, some heads] ◀────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, ClassVar, final

import torch
from torch import nn

from vlmpack.layout.device import outside_graph
from vlmpack.layout.segments import Segments
from vlmpack.model.mechanisms import ClassMechanism, Maker, ModelParts, RowSetup, replaces
from vlmpack.model.mechanisms.gated_delta_fla import check_fla, fla_boundaries, uses_fla
from vlmpack.model.mechanisms.recurrent_rows import Buckets, LayerState, VarlenCalls
from vlmpack.model.plain import cache_name, check_not_bypassed
from vlmpack.model.row import CONTEXT, RowContext


@final
class GatedDelta(ClassMechanism):
    """Gated delta layers. A row's entry says how the layers compute it: in buckets or with a varlen kernel."""

    name: ClassVar[str] = "gated_delta"

    def makers(self, model: ModelParts) -> list[tuple[nn.Module, Maker]]:
        """Return every gated delta layer. Each maps hidden states [B, S, D] to [B, S, D]."""
        return [(layer, gated_delta_class) for layer in model.layer_parts(self.name)]

    def prepare(self, setup: RowSetup) -> Buckets | VarlenCalls:
        """Choose a layout by what computes the recurrence.

        Raises:
            BackendError: flash-linear-attention computes the layers, and it would fail or be wrong here.
        """
        if not uses_fla(setup.model.family):
            return Buckets.of_row(setup)
        check_fla(setup.row.input_ids.device, training=torch.is_grad_enabled())
        return VarlenCalls.of_row(setup, conv_taps(setup.text_config), is_recurrent=True)

    def work(self, setup: RowSetup, entry: Any) -> Mapping[str, int]:
        """Count the tokens that each layer computes."""
        return {"delta_tokens": entry.tokens}


@replaces()
def gated_delta_class(plain: Any, module: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Make a subclass of a gated delta layer's class that keeps a row's samples apart."""
    row: RowContext | None = kwargs.pop(CONTEXT, None)
    if row is None:
        check_not_bypassed(kwargs)
        return plain(module, hidden_states, *args, **kwargs)
    return packed_gated_delta(plain, module, hidden_states, row, kwargs)


@outside_graph
def packed_gated_delta(
    plain_forward: Callable[..., torch.Tensor],
    layer: Any,
    hidden_1tD: torch.Tensor,
    row: RowContext,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Run [1, t, D] through the layer, sample by sample. This stays outside compiled graphs: it would be recompiled for
    nearly every row, and torch 2.13's aot_eager fails in its backward pass on any batch of two."""
    delta: Buckets | VarlenCalls = row.entries[GatedDelta.name]

    def on_samples(rank_layer: nn.Module, row_1TD: torch.Tensor) -> torch.Tensor:
        run = with_state(partial(plain_forward, rank_layer, **kwargs))
        if isinstance(delta, Buckets):
            return delta.run(run, layer, LayerState.behind, row.part, row_1TD)
        return delta.run(run, layer, row.part, row_1TD)

    if row.part.is_whole or delta.tree is not None:
        return on_samples(layer, hidden_1tD)
    heads = DeltaHeads(layer, row.part.ranks)
    if not heads.is_possible:
        return row.part.on_whole_row(partial(on_samples, layer), hidden_1tD)
    rank_layer = heads.layer_of_rank(row.part.rank)
    computed_tF = row.part.by_heads(
        heads.project(hidden_1tD[0]), lambda row_TF: on_samples(rank_layer, row_TF[None])[0], "gated delta"
    )
    return layer.out_proj(computed_tF[None])


def conv_taps(text_config: Any) -> int:
    """Return how many tokens before its own the convolution reads."""
    return text_config.linear_conv_kernel_dim - 1


# ---------------------------------------------------------------------- splitting the heads

_SPLIT = ("key_dim", "value_dim", "conv_dim", "num_k_heads", "num_v_heads")
"""Attributes of a layer that count heads or channels of heads."""

_PER_HEAD = ("A_log", "dt_bias")
"""Parameters with one entry per value head."""


@final
class DeltaHeads:
    """One gated delta layer, split into as many groups of heads as there are ranks."""

    def __init__(self, layer: Any, ranks: int) -> None:
        self._layer = layer
        self._ranks = ranks
        self._blocks = _blocks(layer)

    @property
    def is_possible(self) -> bool:
        """Whether the number of ranks divides the heads, and the layer's projections are supported."""
        return bool(self._blocks) and self._layer.num_k_heads % self._ranks == 0

    def project(self, hidden_tD: torch.Tensor) -> list[torch.Tensor]:
        """Project [t, D] to one [t, ranks, F] per block of channels: this rank's tokens, split by target rank."""
        projected = []
        for name, sizes in self._blocks.items():
            blocks = self._layer.get_submodule(name)(hidden_tD).split(sizes, -1)
            projected += [block.unflatten(-1, (self._ranks, -1)) for block in blocks]
        return projected

    def layer_of_rank(self, rank: int) -> nn.Module:
        """Return a copy of the layer with only the heads of `rank`. Its forward takes projections (from `project`),
        [n, W, F of all blocks], in place of hidden states, and returns [n, W, value channels]."""
        layer, copied = self._layer, nn.Module.__new__(type(self._layer))
        vars(copied).update({**vars(layer), **{name: vars(layer)[name] // self._ranks for name in _SPLIT}})
        slices = {name: layer._parameters[name].chunk(self._ranks)[rank] for name in _PER_HEAD}
        copied._parameters = {**layer._parameters, **slices}
        copied._modules = {
            **layer._modules,
            **self._takers(),
            "conv1d": SimpleNamespace(weight=self._taps(layer.conv1d.weight, rank), bias=None),
            "out_proj": lambda heads: heads,
        }
        return copied

    def _takers(self) -> dict[str, Any]:
        """Return, for each projection, a function that selects its channels from all channels."""
        sizes = [sum(blocks) // self._ranks for blocks in self._blocks.values()]
        edges = pairwise(accumulate(sizes, initial=0))
        return {name: _taker(start, stop) for name, (start, stop) in zip(self._blocks, edges, strict=True)}

    def _taps(self, weight: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the convolution's weights for the channels of `rank`: queries, keys and values."""
        key, value = self._layer.key_dim, self._layer.value_dim
        return torch.cat([block.chunk(self._ranks)[rank] for block in weight.split((key, key, value))])


def _taker(start: int, stop: int) -> Any:
    return lambda channels: channels[..., start:stop]


def _blocks(layer: Any) -> Mapping[str, Sequence[int]]:
    """Return the projections before the convolution, each with the sizes of its blocks of channels, ordered by head.

    Empty if the projections are not supported or the convolution has a bias.
    """
    key, value, heads = layer.key_dim, layer.value_dim, layer.num_v_heads
    supported = (
        {"in_proj_qkv": (key, key, value), "in_proj_z": (value,), "in_proj_b": (heads,), "in_proj_a": (heads,)},
        {"in_proj_qkvz": (2 * key + 2 * value,), "in_proj_ba": (2 * heads,)},
    )
    names = {name for name, _ in layer.named_children() if name.startswith("in_proj")}
    return next((sizes for sizes in supported if sizes.keys() == names and layer.conv1d.bias is None), {})


# ---------------------------------------------------------------------- initial states


def with_state(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a layer's forward as a function of the initial state (passed as the layer's cache, whatever that argument's
    name), hidden states and the pieces in which the recurrence restarts."""

    def run(state: LayerState | None, hidden: torch.Tensor, pieces: Segments | None = None) -> torch.Tensor:
        boundaries = {} if pieces is None else fla_boundaries(pieces, hidden.device)
        given = {} if state is None else {cache_name(forward): state}  # wrappers (PEFT's) do not name the cache
        return forward(hidden, **boundaries, **given)

    return run
