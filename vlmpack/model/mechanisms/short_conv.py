"""Short convolutions: causal convolutions over a few tokens that stop at the start of each sample.

A layer projects each token to three vectors, multiplies two of them, convolves the product along the sequence (each
token and the K tokens before it), multiplies by the third, and projects (Liquid AI, 2025, LFM2). It reads no position
ids, and only the padding of attention masks.

A row goes through the unmodified layer in one call, with K zeros between its segments (`VarlenCalls`). Zeros stay zero
after the projection, so a sample's first tokens see what they would see on their own. Neither PyTorch's convolution nor
causal-conv1d needs boundaries for this.

    row       a a a b b b b b c c
    one call  a a a 0 0  b b b b b 0 0  c c
    row       A A A B B B B B C C

In a prefix tree, each node is preceded not by zeros but by the last K tokens on the path to it. Behind a kept prefix
(`PackedStep.group`), the prefix's last K tokens take the place of the tree's first node. Context-parallel ranks compute
whole rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, final

import torch
from torch import nn

from vlmpack.layout.device import outside_graph
from vlmpack.model.mechanisms import ClassMechanism, Maker, ModelParts, RowSetup, replaces
from vlmpack.model.mechanisms.recurrent_rows import VarlenCalls
from vlmpack.model.plain import check_not_bypassed
from vlmpack.model.row import CONTEXT, RowContext


@final
class ShortConv(ClassMechanism):
    """Short convolutions. A row's entry says how the layers compute it."""

    name: ClassVar[str] = "short_conv"

    def makers(self, model: ModelParts) -> list[tuple[nn.Module, Maker]]:
        """Return every short convolution. Each maps hidden states [B, S, D] to [B, S, D]."""
        return [(layer, short_conv_class) for layer in model.layer_parts(self.name)]

    def prepare(self, setup: RowSetup) -> VarlenCalls:
        """Put zeros between samples."""
        return VarlenCalls.of_row(setup, setup.text_config.conv_L_cache - 1)

    def work(self, setup: RowSetup, entry: Any) -> Mapping[str, int]:
        """Count the tokens that each layer computes."""
        return {"conv_tokens": entry.tokens}


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
    conv: VarlenCalls = row.entries[ShortConv.name]
    run = functools.partial(conv.run, lambda state, laid_1WD, pieces: layer(laid_1WD), module, row.part)
    return run(hidden_1tD) if conv.tree is not None else row.part.on_whole_row(run, hidden_1tD)
