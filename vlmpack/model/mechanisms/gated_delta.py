"""Gated delta layers: convolution and recurrence restart in every segment of a row.

Linear attention that carries state along the sequence: a causal convolution over a few tokens, then a recurrence over
all of them (Yang et al., 2024, Gated Delta Networks). Neither reads position ids or attention masks.

With flash-linear-attention, whose kernel restarts at given boundaries, a row goes through the layer in one call, with
zeros between its segments for the convolution (`VarlenCalls`). Otherwise it is cut into right-padded batches of samples
of like length, or into single samples, whichever costs less (`Buckets`), and the layer runs on each.

    row       a a a b b b b b c c
    one call  a a a 0 0 0  b b b b b 0 0 0  c c        buckets   a a a     b b b b b
                                                                 c c ~
    row       A A A B B B B B C C

A prefix tree is computed level by level, each node from the state in which its parent ended; where an installed
transformers does not hand states on (`gated_delta_states`), along the paths of its samples.

Context parallelism, by heads. Projections of tokens before the convolution and after the norm are the layer's own;
between them each head runs along the sequence by itself, in the layer's own forward, on a stand-in with fewer heads:

    hidden [t, D] ─ projections ─▶ [t, all heads] ═ all-to-all ═▶ [T, some heads] ─ convolution, recurrence, norm ─┐
    hidden [t, D] ◀─ projection ── [t, all heads] ◀═ all-to-all ═ [T, some heads] ◀────────────────────────────────┘
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, ClassVar, final

import torch
from torch import nn

from vlmpack.errors import ConfigError
from vlmpack.layout.device import around_graph, outside_graph
from vlmpack.model.mechanisms import ClassMechanism, Maker, ModelParts, RowSetup, plain_class, subclass
from vlmpack.model.mechanisms.gated_delta_fla import check_fla, uses_fla
from vlmpack.model.mechanisms.gated_delta_states import supports_initial_state, with_state
from vlmpack.model.mechanisms.recurrent_rows import Buckets, VarlenCalls
from vlmpack.model.plain import check_not_bypassed
from vlmpack.model.row import CONTEXT, RowContext

CALL_COST = {"cpu": 16.0, "cuda": 65536.0}
"""The cost of one more call of a layer, in tokens, by type of device. A GPU scans a batch in the time of its longest
sample, so there as few calls as `recurrent_rows.MAX_OVERHEAD` allows are best."""


@final
class GatedDelta(ClassMechanism):
    """Gated delta layers. A row's entry: how the layers compute it, in buckets or by a varlen kernel."""

    name: ClassVar[str] = "gated_delta"

    def makers(self, model: ModelParts) -> list[tuple[nn.Module, Maker]]:
        """Every gated delta layer, hidden states [B, S, D] in and out."""
        return [(layer, row_class) for layer in model.layer_parts(self.name)]

    def prepare(self, setup: RowSetup) -> Buckets | VarlenCalls:
        """Choose by what computes the recurrence, and by cost. A prefix tree goes along the paths of its samples where
        states cannot be handed on.

        Raises:
            BackendError: flash-linear-attention computes the layers, and does so wrongly or not at all here.
        """
        device, tree, layers = setup.row.input_ids.device, setup.row.tree, self.find(setup.model)
        cut: Callable[..., Buckets | VarlenCalls]
        if uses_fla(setup.model.family):
            check_fla(device, training=torch.is_grad_enabled())
            cut, tried_on = partial(VarlenCalls.of, taps=conv_taps(setup.text_config)), device
        else:
            call_cost, tried_on = CALL_COST.get(device.type, CALL_COST["cuda"]), torch.device("cpu")
            cut = partial(Buckets.cheapest, call_cost=call_cost)
        if tree is None or not layers:
            return cut(setup.row.segments)
        is_supported = supports_initial_state(plain_class(layers[0]), setup.text_config, cut=cut, device=tried_on)
        return cut(tree.nodes, tree=tree) if is_supported else cut(setup.row.segments)

    def work(self, setup: RowSetup, entry: Any) -> Mapping[str, int]:
        """Tokens that each layer computes."""
        return {"delta_tokens": entry.tokens}


@functools.cache
def row_class(base: Any) -> type[nn.Module]:
    """A subclass of a gated delta layer's class that keeps the samples of a row apart; one a base class."""

    @functools.wraps(base.forward)
    def forward(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        row: RowContext | None = kwargs.pop(CONTEXT, None)
        if row is None:
            check_not_bypassed(kwargs)
            return base.forward(self, hidden_states, *args, **kwargs)
        return run_on_row(base.forward, self, hidden_states, row, kwargs)

    return subclass(base, {"forward": around_graph(forward)}, row_class)


@outside_graph
def run_on_row(
    plain_forward: Callable[..., torch.Tensor],
    layer: Any,
    hidden_1tD: torch.Tensor,
    row: RowContext,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """[1, t, D] through the layer, sample by sample. The layer stays out of compiled graphs: it would be compiled again
    for nearly every row, and torch 2.13's aot_eager fails in its backward pass on any batch of two."""
    delta: Buckets | VarlenCalls = row.entries[GatedDelta.name]
    if isinstance(delta, VarlenCalls):
        check_zeros(layer)

    def on_samples(stand_in: nn.Module, row_1TD: torch.Tensor) -> torch.Tensor:
        return delta.run(with_state(partial(plain_forward, stand_in, **kwargs)), row_1TD)

    if row.part.is_whole or delta.tree is not None:
        return on_samples(layer, hidden_1tD)
    heads = DeltaHeads(layer, row.part.ranks)
    if not heads.is_possible:
        return row.part.on_whole_row(partial(on_samples, layer), hidden_1tD)
    stand_in = heads.stand_in(row.part.rank)
    computed_tF = row.part.by_heads(
        heads.project(hidden_1tD[0]), lambda row_TF: on_samples(stand_in, row_TF[None])[0], "gated delta"
    )
    return layer.out_proj(computed_tF[None])


def conv_taps(text_config: Any) -> int:
    """Tokens before its own that the convolution reads."""
    return text_config.linear_conv_kernel_dim - 1


def check_zeros(layer: nn.Module) -> None:
    """Check that hidden states of zero still are zero at a gated delta layer's convolution.

    Raises:
        ConfigError: one of the projections before it has a bias.
    """
    projections = [child for name, child in layer.named_children() if name.startswith("in_proj")]
    names = [name for projection in projections for name, _ in projection.named_parameters()]
    if any(name.rpartition(".")[2] == "bias" for name in names):
        raise ConfigError(
            f"a projection before the convolution of a {type(layer).__name__} has a bias, which would turn the zeros "
            "that keep samples apart into something else: train without it (LoRA: lora_bias=False), or without fla"
        )


# ---------------------------------------------------------------------- some of the heads

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
        """Return whether the ranks divide the heads, and the layer's projections are supported ones."""
        return bool(self._blocks) and self._layer.num_k_heads % self._ranks == 0

    def project(self, hidden_tD: torch.Tensor) -> list[torch.Tensor]:
        """[t, D] to [t, ranks, F] of each block of channels: those that each rank computes, of the tokens here."""
        projected = []
        for name, sizes in self._blocks.items():
            blocks = self._layer.get_submodule(name)(hidden_tD).split(sizes, -1)
            projected += [block.unflatten(-1, (self._ranks, -1)) for block in blocks]
        return projected

    def stand_in(self, rank: int) -> nn.Module:
        """The layer with the heads of `rank` alone. Its forward takes what `project` gave, [n, W, F of all blocks], for
        hidden states, and gives back [n, W, value channels]."""
        layer, twin = self._layer, nn.Module.__new__(type(self._layer))
        vars(twin).update({**vars(layer), **{name: vars(layer)[name] // self._ranks for name in _SPLIT}})
        slices = {name: layer._parameters[name].chunk(self._ranks)[rank] for name in _PER_HEAD}
        twin._parameters = {**layer._parameters, **slices}
        twin._modules = {
            **layer._modules,
            **self._takers(),
            "conv1d": SimpleNamespace(weight=self._taps(layer.conv1d.weight, rank), bias=None),
            "out_proj": lambda heads: heads,
        }
        return twin

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
    supported = (
        {"in_proj_qkv": (key, key, value), "in_proj_z": (value,), "in_proj_b": (heads,), "in_proj_a": (heads,)},
        {"in_proj_qkvz": (2 * key + 2 * value,), "in_proj_ba": (2 * heads,)},
    )
    names = {name for name, _ in layer.named_children() if name.startswith("in_proj")}
    return next((sizes for sizes in supported if sizes.keys() == names and layer.conv1d.bias is None), {})
