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

A prefix tree is computed level by level; each node starts from its parent's final state. If the installed transformers
does not support initial states (`supports_initial_state`), the layers run along the paths of the tree's samples.

Context parallelism splits the heads. The layer's own projections before the convolution and after the norm run token by
token. Between them each head runs along the sequence by itself, in the layer's own forward, on a copy with fewer
heads:

    hidden [t, D] ─ projections ─▶ [t, all heads] ═ all-to-all ═▶ [T, some heads] ─ convolution, recurrence, norm ─┐
    hidden [t, D] ◀─ projection ── [t, all heads] ◀═ all-to-all ═ [T, some heads] ◀────────────────────────────────┘
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, ClassVar, final

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from vlmpack.errors import ConfigError
from vlmpack.layout.device import around_graph, outside_graph
from vlmpack.layout.prefix_tree import PrefixTree
from vlmpack.layout.segments import Segments
from vlmpack.model.mechanisms import ClassMechanism, Maker, ModelParts, RowSetup, plain_class, subclass
from vlmpack.model.mechanisms.gated_delta_fla import check_fla, fla_boundaries, uses_fla
from vlmpack.model.mechanisms.recurrent_rows import Buckets, LayerState, VarlenCalls, tail_of, with_tail
from vlmpack.model.plain import cache_name, check_not_bypassed
from vlmpack.model.row import CONTEXT, RowContext

CALL_COST = {"cpu": 16.0, "cuda": 65536.0}
"""The cost of one more call of a layer, in tokens, by device type. A GPU scans a batch in the time of its longest
sample, so there the fewest calls that `recurrent_rows.MAX_OVERHEAD` allows are best."""


@final
class GatedDelta(ClassMechanism):
    """Gated delta layers. A row's entry says how the layers compute it: in buckets or with a varlen kernel."""

    name: ClassVar[str] = "gated_delta"

    def makers(self, model: ModelParts) -> list[tuple[nn.Module, Maker]]:
        """Return every gated delta layer. Each maps hidden states [B, S, D] to [B, S, D]."""
        return [(layer, gated_delta_class) for layer in model.layer_parts(self.name)]

    def problem_of_groups(self, model: ModelParts) -> str | None:
        """Report layers that cannot start from a kept state."""
        if not (layers := self.find(model)):
            return None
        text_config, device = model.family.text_config(model.core.config), torch.device("cpu")
        cut: Callable[..., Buckets | VarlenCalls] = partial(Buckets.cheapest, call_cost=CALL_COST["cpu"])
        if uses_fla(model.family):
            cut, device = partial(VarlenCalls.of, taps=conv_taps(text_config)), next(layers[0].parameters()).device
        if supports_initial_state(plain_class(layers[0]), text_config, cut=cut, device=device):
            return None
        return "its gated delta layers take no initial state in this transformers: give groups that fit a row"

    def prepare(self, setup: RowSetup) -> Buckets | VarlenCalls:
        """Choose a layout by what computes the recurrence, and by cost. If initial states are not supported, a prefix
        tree runs along the paths of its samples.

        Raises:
            BackendError: flash-linear-attention computes the layers, and it would fail or be wrong here.
        """
        device, tree = setup.row.input_ids.device, setup.row.tree
        call_cost = CALL_COST.get(device.type, CALL_COST["cuda"])
        piece = setup.part.piece
        if piece is not None and tree is not None and uses_fla(setup.model.family):
            check_fla(device, training=torch.is_grad_enabled())
            taps, first = conv_taps(setup.text_config), int(piece.kept_tokens > 0)
            tree = with_tail(tree, piece.kept_tokens, taps) if first else tree
            return VarlenCalls.of(tree.nodes, taps=taps, tree=tree, first=first)
        if piece is not None:
            nodes = Segments.from_lengths([0] * (piece.kept_tokens > 0) + [*setup.part.segments.lengths])
            return Buckets.cheapest(nodes, call_cost=call_cost, tree=tree, keeps_last=piece.own is not None)
        cut: Callable[..., Buckets | VarlenCalls]
        if uses_fla(setup.model.family):
            check_fla(device, training=torch.is_grad_enabled())
            cut, tried_on = partial(VarlenCalls.of, taps=conv_taps(setup.text_config)), device
        else:
            cut, tried_on = partial(Buckets.cheapest, call_cost=call_cost), torch.device("cpu")
        if tree is None or not (layers := self.find(setup.model)):
            return cut(setup.row.segments)
        is_supported = supports_initial_state(plain_class(layers[0]), setup.text_config, cut=cut, device=tried_on)
        return cut(tree.nodes, tree=tree) if is_supported else cut(setup.row.segments)

    def work(self, setup: RowSetup, entry: Any) -> Mapping[str, int]:
        """Count the tokens that each layer computes."""
        return {"delta_tokens": entry.tokens}


@functools.cache
def gated_delta_class(base: Any) -> type[nn.Module]:
    """Return a subclass of a gated delta layer's class that keeps a row's samples apart. One per base class."""

    @functools.wraps(base.forward)
    def forward(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        row: RowContext | None = kwargs.pop(CONTEXT, None)
        if row is None:
            check_not_bypassed(kwargs)
            return base.forward(self, hidden_states, *args, **kwargs)
        return packed_gated_delta(base.forward, self, hidden_states, row, kwargs)

    return subclass(base, {"forward": around_graph(forward)}, gated_delta_class)


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
    if isinstance(delta, VarlenCalls):
        check_zeros(layer)

    def on_samples(rank_layer: nn.Module, row_1TD: torch.Tensor) -> torch.Tensor:
        run, piece = with_state(partial(plain_forward, rank_layer, **kwargs)), row.part.piece
        if piece is None:
            return delta.run(run, row_1TD)
        tail, state = piece.read_last(layer) or (None, None)
        if isinstance(delta, Buckets):
            kept = LayerState(tail, state)
            return piece.keep(layer, delta.run(run, row_1TD, kept), kept.tail, kept.state)
        kept, taps = LayerState(state_nHDD=state), delta.levels[0].taps
        row_1TD = row_1TD if tail is None else torch.cat([tail, row_1TD], 1)
        return piece.keep(layer, delta.run(run, row_1TD, kept), tail_of(row_1TD, taps), kept.state)

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


def check_zeros(layer: nn.Module) -> None:
    """Check that zero hidden states are still zero at a gated delta layer's convolution.

    Raises:
        ConfigError: a projection before the convolution has a bias.
    """
    projections = [child for name, child in layer.named_children() if name.startswith("in_proj")]
    names = [name for projection in projections for name, _ in projection.named_parameters()]
    if any(name.rpartition(".")[2] == "bias" for name in names):
        raise ConfigError(
            f"a projection before the convolution of a {type(layer).__name__} has a bias, which would turn the zeros "
            "that keep samples apart into something else: train without it (LoRA: lora_bias=False), or without fla"
        )


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
#
# Whether layers can compute a tree node by node, each from its parent's final state (`LayerState`), depends on an
# internal protocol of transformers' caches. It is tried on a small layer of the same class, once per process. If it
# fails, layers run along the paths of the samples (`RowPart.by_heads`).


def with_state(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a layer's forward as a function of hidden states, the initial state (passed as the layer's cache, whatever
    that argument's name) and the pieces in which the recurrence restarts."""

    def run(hidden: torch.Tensor, state: LayerState | None, pieces: Segments | None = None) -> torch.Tensor:
        boundaries = {} if pieces is None else fla_boundaries(pieces, hidden.device)
        given = {} if state is None else {cache_name(forward): state}  # wrappers (PEFT's) do not name the cache
        return forward(hidden, **boundaries, **given)

    return run


_SUPPORTED: dict[tuple[type[nn.Module], str, bool], bool] = {}
"""Results of `supports_initial_state` by layer class, device type, and whether gradients are computed."""

_PIECES = 5, 1, 2
"""Tokens of a node, its child, and its child's child."""
_FORGETS = -4.0
"""Logarithm of a decay rate that is low enough for states to matter: random layers forget within a few tokens."""
CLOSE = {"cpu": 1e-4}
CLOSE_IN_TF32 = 2e-2
"""Largest error that counts as rounding, relative to the largest entry: by device type, and for all other types."""


def supports_initial_state(
    layer_class: Any, text_config: Any, *, cut: Callable[..., Buckets | VarlenCalls], device: torch.device
) -> bool:
    """Return whether layers of this class compute the same node by node with `LayerState` as in one call, including
    gradients if they are enabled.

    Args:
        layer_class: the class of an unmodified layer.
        text_config: the language model's configuration.
        cut: splits `tree.nodes` and the tree into calls.
        device: where to try it: any device that can compute the layers.
    """
    key = layer_class, device.type, torch.is_grad_enabled()
    if key not in _SUPPORTED:
        sample = Segments.from_lengths([sum(_PIECES)])
        chain = PrefixTree(segments=sample, parents=(-1, 0, 1), lengths=_PIECES, leaves=(2,))
        try:
            with _disable_current_modes():  # what counts or records operations must not see this
                _SUPPORTED[key] = _is_exact(layer_class, text_config, cut(chain.nodes, tree=chain), device)
        except Exception:  # another version of transformers may raise anything: its protocol differs
            _SUPPORTED[key] = False
    return _SUPPORTED[key]


def _is_exact(layer_class: Any, text_config: Any, delta: Buckets | VarlenCalls, device: torch.device) -> bool:
    """Compare outputs and input gradients of a layer with few channels and the model's own number of heads."""
    small, training = copy.copy(text_config), torch.is_grad_enabled()
    small.hidden_size = 8
    # With no device listed, only the CPU generator is used, and it is restored.
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.device("cpu"):
        torch.default_generator.manual_seed(0)
        layer = layer_class(small, 0).float()
        nn.init.constant_(layer.A_log, _FORGETS)
        hidden = torch.randn(1, sum(_PIECES), small.hidden_size, dtype=torch.float32)
        weights = torch.randn_like(hidden)
    layer, hidden, weights = layer.to(device), hidden.to(device), weights.to(device)
    with torch.inference_mode(False), torch.set_grad_enabled(training), torch.autocast(device.type, enabled=False):
        whole = _computed(layer, hidden, weights)
        by_node = _computed(partial(delta.run, with_state(layer.forward)), hidden, weights)
    close = CLOSE.get(device.type, CLOSE_IN_TF32)
    return all(bool((a - b).abs().max() <= close * a.abs().max()) for a, b in zip(whole, by_node, strict=True))


def _computed(
    function: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, weights: torch.Tensor
) -> list[torch.Tensor]:
    """Return the output, and the gradient of the input if gradients are enabled."""
    leaf = hidden.clone().requires_grad_(torch.is_grad_enabled())
    out = function(leaf)
    if not torch.is_grad_enabled():
        return [out]
    (out * weights).sum().backward()  # not torch.autograd.grad, which fails while a FlopCounterMode is active
    assert leaf.grad is not None
    return [out.detach(), leaf.grad]
