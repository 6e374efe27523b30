"""Short convolutions: causal convolutions over a few tokens that stop at the start of each sample.

A layer projects each token to three vectors, multiplies two of them, convolves the product along the sequence (each
token and the K tokens before it), multiplies by the third, and projects (Liquid AI, 2025, LFM2). It reads no position
ids, and only the padding of attention masks.

A row goes through the unmodified layer in one call, with K zeros between its segments (`ConvLayout`). Zeros stay zero
after the projection, so a sample's first tokens see what they would see on their own. Neither PyTorch's convolution nor
causal-conv1d needs boundaries for this.

    row       a a a b b b b b c c
    one call  a a a 0 0  b b b b b 0 0  c c
    row       A A A B B B B B C C

In a prefix tree, each node is preceded not by zeros but by the last K tokens on the path to it. Behind a kept prefix
(`PackedStep.group`), the prefix's last K tokens take the place of the tree's first node.

A projection with a bias would not keep zeros zero. Such layers run on right-padded batches of samples of similar length
(`Buckets`), for a prefix tree along the paths of its samples. Context-parallel ranks compute whole rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, final

import torch
from torch import nn

from vlmpack.layout.device import outside_graph
from vlmpack.model.mechanisms import ClassMechanism, Maker, ModelParts, RowSetup, replaces
from vlmpack.model.mechanisms.recurrent_rows import Buckets, ConvLayout, call_cost, tail_of, with_tail
from vlmpack.model.plain import check_not_bypassed
from vlmpack.model.row import CONTEXT, RowContext


@final
class ShortConv(ClassMechanism):
    """Short convolutions. A row's entry says how the layers compute it: in one call or in buckets."""

    name: ClassVar[str] = "short_conv"

    def makers(self, model: ModelParts) -> list[tuple[nn.Module, Maker]]:
        """Return every short convolution. Each maps hidden states [B, S, D] to [B, S, D]."""
        return [(layer, short_conv_class) for layer in model.layer_parts(self.name)]

    def problem_of_groups(self, model: ModelParts) -> str | None:
        """Report layers that run on whole samples."""
        if not any(map(has_bias, self.find(model))):
            return None
        return "a projection of its short convolutions has a bias: train without it, or give groups that fit a row"

    def prepare(self, setup: RowSetup) -> ConvLayout | Buckets:
        """Put zeros between samples, or split the row into buckets if a projection has a bias."""
        segments, tree, kept = setup.row.segments, setup.row.tree, setup.part.kept
        if any(map(has_bias, self.find(setup.model))):
            return Buckets.cheapest(segments, call_cost=call_cost(setup.row.input_ids.device))
        taps = setup.text_config.conv_L_cache - 1
        if tree is None or not kept:
            return ConvLayout.every(segments if tree is None else tree.nodes, taps, tree)
        short = with_tail(tree, kept, taps)
        return ConvLayout(segments=short.nodes, taps=taps, nodes=(*range(1, len(short.lengths)),), tree=short)

    def work(self, setup: RowSetup, entry: Any) -> Mapping[str, int]:
        """Count the tokens that each layer computes."""
        return {"conv_tokens": entry.tokens}


def has_bias(layer: Any) -> bool:
    """Return whether the projection before a convolution has a bias, either its own or an adapter's."""
    return any(name.rpartition(".")[2] == "bias" for name, _ in layer.in_proj.named_parameters())


@replaces()
def short_conv_class(plain: Any, module: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Make a subclass of a short convolution's class that keeps a row's samples apart."""
    row: RowContext | None = kwargs.pop(CONTEXT, None)
    if row is None:
        check_not_bypassed(kwargs)
        return plain(module, hidden_states, *args, **kwargs)
    return packed_short_conv(lambda hidden: plain(module, hidden, *args, **kwargs), hidden_states, row, module)


@outside_graph
def packed_short_conv(
    layer: Callable[..., torch.Tensor], hidden_1tD: torch.Tensor, row: RowContext, module: nn.Module
) -> torch.Tensor:
    """Run [1, t, D] through the layer of a module, sample by sample. This stays outside compiled graphs, because it
    would be recompiled for nearly every row."""
    conv: ConvLayout | Buckets = row.entries[ShortConv.name]

    def on_samples(row_1TD: torch.Tensor) -> torch.Tensor:
        return conv.join([layer(part) for part in conv.split(row_1TD)])

    if (piece := row.part.piece) is not None:
        assert isinstance(conv, ConvLayout), "a bias is refused"
        before = piece.read_last(module) or ()
        row_1TD = torch.cat([*before, hidden_1tD], 1)
        return piece.keep(module, on_samples(row_1TD), tail_of(row_1TD, conv.taps))
    return on_samples(hidden_1tD) if conv.tree is not None else row.part.on_whole_row(on_samples, hidden_1tD)
