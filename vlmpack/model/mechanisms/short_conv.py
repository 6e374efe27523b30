"""Short convolutions: the taps of a causal convolution over a few tokens end where a sample of a row begins.

A layer projects each token to three, multiplies two of them, convolves the product along the sequence, K tokens before
each and itself, multiplies by the third, and projects (Liquid AI, 2025, LFM2). It reads no position ids, and of
attention masks only those of padding.

A row goes through the unmodified layer in one call, with K zeros between its segments (`layout.Spaced`): what is zero
is zero behind the projection, so a sample's first tokens find what they find alone. Whatever computes the convolution,
PyTorch or causal-conv1d, needs no boundaries. Padding is left out.

    row       a a a .  b b b b b . . .  c c . .
    spaced    a a a 0 0  b b b b b 0 0  c c
    row       A A A 0  B B B B B 0 0 0  C C 0 0

A prefix tree has in place of the zeros what the first tokens of each node read, the last K tokens on its path:

    tree      P ─┬─ A          P = p q r s    K = 2
                 └─ B          0 0 p q r s  r s A  r s B

A projection with a bias makes something else of zeros. Such layers run on right-padded batches of samples of like
length (`layout.Buckets`), of a prefix tree along the paths of its samples. Context-parallel ranks compute whole rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import nn

from vlmpack.layout import Buckets, PrefixTree, Spaced, around_graph, outside_graph
from vlmpack.model.mechanisms import ClassMechanism, Maker, ModelParts, RowSetup, subclass
from vlmpack.model.mechanisms.gated_delta import CALL_COST
from vlmpack.model.plain import check_not_bypassed
from vlmpack.model.row import CONTEXT, RowContext


@final
class ShortConv(ClassMechanism):
    """Short convolutions. A row's entry: how the layers compute it, spaced, in buckets, or as a prefix tree."""

    name: ClassVar[str] = "short_conv"

    def makers(self, model: ModelParts) -> list[tuple[nn.Module, Maker]]:
        """Every short convolution, hidden states [B, S, D] in and out."""
        return [(layer, row_class) for layer in model.layer_parts(self.name)]

    def prepare(self, setup: RowSetup) -> Spaced | Buckets | ConvTree:
        """Lay zeros between samples, or cut the row where a projection has a bias."""
        segments, device, tree = setup.row.segments, setup.row.input_ids.device, setup.row.tree
        if any(map(has_bias, self.find(setup.model))):
            return Buckets.cheapest(segments, call_cost=CALL_COST.get(device.type, CALL_COST["cuda"]))
        reach = setup.text_config.conv_L_cache - 1
        return Spaced(segments=segments, reach=reach) if tree is None else ConvTree(tree=tree, reach=reach)

    def work(self, setup: RowSetup, entry: Any) -> Mapping[str, int]:
        """Tokens that each layer computes."""
        return {"conv_tokens": entry.tokens}


def has_bias(layer: Any) -> bool:
    """Return whether the projection before a convolution has a bias, of its own or of an adapter."""
    return any(name.rpartition(".")[2] == "bias" for name, _ in layer.in_proj.named_parameters())


@final
@dataclass(frozen=True, kw_only=True)
class ConvTree:
    """The nodes of a prefix tree, each behind the tokens that a convolution reads before its first ones.

    `split` and `join` are inverses of each other.
    """

    tree: PrefixTree
    """The tree, t tokens."""
    reach: int
    """Tokens that a convolution reads before each token."""

    @property
    def tokens(self) -> int:
        """Its width W, repeated tokens and zeros included: what a layer computes."""
        return self.tree.num_tokens + self.reach * len(self.tree.lengths)

    def split(self, tree_1tD: torch.Tensor) -> list[torch.Tensor]:
        """[1, t, D] to a list of one [1, W, D]."""
        with_zero = torch.cat([tree_1tD[0], tree_1tD.new_zeros(1, tree_1tD.shape[-1])])
        return [with_zero.index_select(0, self._derived("source", tree_1tD.device, self._source))[None]]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """A list of one [1, W, D] to [1, t, D]."""
        (computed_1WD,) = parts
        return computed_1WD.index_select(1, self._derived("places", computed_1WD.device, self._places))

    def _source(self) -> np.ndarray:
        """int64 [W]: the token at each place; t, behind the last one: a zero."""
        spans, before = self.tree.nodes.spans, self.tree.predecessor("cpu").numpy()
        tails_GK = np.empty((len(spans), self.reach), np.int64)
        reached = np.asarray([start for start, _ in spans], np.int64)
        for tap in reversed(range(self.reach)):
            reached = np.where(reached < 0, -1, before[reached])
            tails_GK[:, tap] = reached
        parts = [(tail, np.arange(*span)) for tail, span in zip(tails_GK, spans, strict=True)]
        source = np.concatenate([part for of_node in parts for part in of_node])
        return np.where(source < 0, self.tree.num_tokens, source)

    def _places(self) -> np.ndarray:
        """int64 [t]: where each token lies."""
        nodes = np.repeat(np.arange(len(self.tree.lengths)), self.tree.lengths)
        return np.arange(self.tree.num_tokens) + self.reach * (nodes + 1)

    def _derived(self, what: str, device: torch.device, make: Callable[[], np.ndarray]) -> torch.Tensor:
        return self.tree.nodes.derived(("convolution tree", self.reach, what), device, make)


@functools.cache
def row_class(base: Any) -> type[nn.Module]:
    """A subclass of a short convolution's class that keeps the samples of a row apart; one a base class."""

    @functools.wraps(base.forward)
    def forward(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        row: RowContext | None = kwargs.pop(CONTEXT, None)
        if row is None:
            check_not_bypassed(kwargs)
            return base.forward(self, hidden_states, *args, **kwargs)
        return run_on_row(lambda hidden: base.forward(self, hidden, *args, **kwargs), hidden_states, row)

    return subclass(base, {"forward": around_graph(forward)}, row_class)


@outside_graph
def run_on_row(layer: Callable[..., torch.Tensor], hidden_1tD: torch.Tensor, row: RowContext) -> torch.Tensor:
    """[1, t, D] through the layer, sample by sample, zeros on padding. It stays out of compiled graphs: it would be
    compiled again for nearly every row."""
    conv: Spaced | Buckets | ConvTree = row.entries[ShortConv.name]
    if not conv.tokens:  # nothing but padding; the parameters up to here keep their place in the graph
        return layer(hidden_1tD * 0)

    def on_samples(row_1TD: torch.Tensor) -> torch.Tensor:
        return conv.join([layer(part) for part in conv.split(row_1TD)])

    if isinstance(conv, ConvTree):
        return on_samples(hidden_1tD)
    return row.part.on_whole_row(on_samples, hidden_1tD)
