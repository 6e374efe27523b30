"""Short convolutions: the taps of a causal convolution over a few tokens end where a sample of a row begins.

A layer projects each token to three, multiplies two of them, convolves the product along the sequence, K tokens before
each and itself, multiplies by the third, and projects (Liquid AI, 2025, LFM2). It reads no position ids, and of
attention masks only those of padding.

A row goes through the unmodified layer in one call, with K zeros between its segments (`ConvLayout`): what is zero is
zero behind the projection, so a sample's first tokens find what they find alone. Whatever computes the convolution,
PyTorch or causal-conv1d, needs no boundaries.

    row       a a a b b b b b c c
    one call  a a a 0 0  b b b b b 0 0  c c
    row       A A A B B B B B C C

A prefix tree has in place of the zeros what the first tokens of each node read, the last K tokens on the path to it.

A projection with a bias makes something else of zeros. Such layers run on right-padded batches of samples of like
length (`Buckets`), of a prefix tree along the paths of its samples. Context-parallel ranks compute whole rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, final

import torch
from torch import nn

from vlmpack.layout.device import around_graph, outside_graph
from vlmpack.model.mechanisms import ClassMechanism, Maker, ModelParts, RowSetup, subclass
from vlmpack.model.mechanisms.gated_delta import CALL_COST
from vlmpack.model.mechanisms.recurrent_rows import Buckets, ConvLayout
from vlmpack.model.plain import check_not_bypassed
from vlmpack.model.row import CONTEXT, RowContext


@final
class ShortConv(ClassMechanism):
    """Short convolutions. A row's entry: how the layers compute it, in one call or in buckets."""

    name: ClassVar[str] = "short_conv"

    def makers(self, model: ModelParts) -> list[tuple[nn.Module, Maker]]:
        """Every short convolution, hidden states [B, S, D] in and out."""
        return [(layer, row_class) for layer in model.layer_parts(self.name)]

    def prepare(self, setup: RowSetup) -> ConvLayout | Buckets:
        """Lay zeros between samples, or cut the row where a projection has a bias."""
        segments, device, tree = setup.row.segments, setup.row.input_ids.device, setup.row.tree
        if any(map(has_bias, self.find(setup.model))):
            return Buckets.cheapest(segments, call_cost=CALL_COST.get(device.type, CALL_COST["cuda"]))
        return ConvLayout.every(segments if tree is None else tree.nodes, setup.text_config.conv_L_cache - 1, tree)

    def work(self, setup: RowSetup, entry: Any) -> Mapping[str, int]:
        """Tokens that each layer computes."""
        return {"conv_tokens": entry.tokens}


def has_bias(layer: Any) -> bool:
    """Return whether the projection before a convolution has a bias, of its own or of an adapter."""
    return any(name.rpartition(".")[2] == "bias" for name, _ in layer.in_proj.named_parameters())


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
    """[1, t, D] through the layer, sample by sample. It stays out of compiled graphs: it would be compiled again for
    nearly every row."""
    conv: ConvLayout | Buckets = row.entries[ShortConv.name]

    def on_samples(row_1TD: torch.Tensor) -> torch.Tensor:
        return conv.join([layer(part) for part in conv.split(row_1TD)])

    return on_samples(hidden_1tD) if conv.tree is not None else row.part.on_whole_row(on_samples, hidden_1tD)
