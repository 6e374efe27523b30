"""Per-sample execution: sparse attention and n-gram layers run on each sample of a row by itself.

Sparse attention scores blocks of tokens, counted from the start of the sequence, and selects the highest. An n-gram
layer hashes every token together with the tokens before it. Neither takes boundaries, so both run on the samples, in
batches of equal length. Nothing is padded, and the tokens of a sample compete only with each other.

Attention gets the row by keyword, as all layers do. N-gram layers get no keywords, so a hook on the text model attaches
the row to their token ids (`InRow`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import nn
from transformers.masking_utils import create_causal_mask

from vlmpack.layout.device import around_graph, outside_graph
from vlmpack.layout.segments import Segments
from vlmpack.model.mechanisms import ClassMechanism, Maker, ModelParts, PreHook, RowSetup, subclass
from vlmpack.model.mechanisms.attention import plain_config
from vlmpack.model.mechanisms.recurrent_rows import Buckets
from vlmpack.model.plain import warn_past_the_forward
from vlmpack.model.row import CONTEXT, RowContext


@final
class PerSample(ClassMechanism):
    """Layers that take the start of the sequence as the start of the sample. A row's entry: its samples in buckets."""

    name: ClassVar[str] = "per_sample"

    def makers(self, model: ModelParts) -> list[tuple[nn.Module, Maker]]:
        """Return every sparse attention layer and every n-gram layer (there may be none of the latter)."""
        attention, ngram = attention_layers(model), ngram_layers(model)
        return [*((layer, attention_class) for layer in attention), *((layer, ngram_class) for layer in ngram)]

    def hook(self, model: ModelParts) -> tuple[nn.Module, PreHook]:
        """Give n-gram layers the row with their token ids, which the text model passes on."""
        return model.text, functools.partial(_add_row, model.family.mechanisms[self.name]["ngram_ids"])

    def problem_of_groups(self, model: ModelParts) -> str | None:
        """Report layers that look at whole samples."""
        return (
            "its sparse attention or n-gram layers look at whole samples, so that a kept prefix would have to go "
            "through them again: give groups that fit a row"
        )

    def prepare(self, setup: RowSetup) -> Buckets:
        """Group samples of equal length. A call itself costs nothing here, because the indexer takes tokens one at a
        time."""
        return Buckets.cheapest(setup.row.segments, call_cost=0)

    def work(self, setup: RowSetup, entry: Any) -> Mapping[str, int]:
        """Count the pairs that the indexer selects."""
        return {"attended_pairs": selected_pairs(setup.row.segments, setup.text_config)}


def attention_layers(model: ModelParts) -> list[nn.Module]:
    """Return every sparse attention layer. It takes hidden states [B, S, D], (cosines, sines) [B, S, H] and a causal
    mask [B, 1, S, S], and returns (hidden states, weights). An indexer chooses the tokens that a query attends to."""
    return model.layer_parts(PerSample.name, "attention")


def ngram_layers(model: ModelParts) -> list[nn.Module]:
    """Return every n-gram layer. It maps hidden states [B, S, D] and token ids [B, S] to an update of the former."""
    return model.layer_parts(PerSample.name, "ngram")


def selected_pairs(segments: Segments, text_config: Any) -> int:
    """Return the number of query-key pairs that the indexer selects. It does not depend on the scores.

    If a query sees m tokens, its m // ratio whole blocks compete for budget // ratio slots, and the m % ratio tokens of
    the last, partial block are always selected.
    """
    ratio = text_config.indexer_compress_ratio
    visible = np.arange(1, segments.max_length + 1)
    selected = np.minimum(visible // ratio, text_config.indexer_budget // ratio) * ratio + visible % ratio
    pairs = np.concatenate([[0], selected.cumsum()])
    return int(pairs[list(segments.sample_lengths)].sum())


@final
class InRow:
    """A tensor with its row, for a layer that gets no keywords."""

    def __init__(self, tensor_1T: torch.Tensor, row: RowContext) -> None:
        self.tensor_1T = tensor_1T
        """The tensor, [1, T]."""
        self.row = row
        """The row."""


def _add_row(
    ids: str, language_model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    row: RowContext | None = kwargs.get(CONTEXT)
    if row is None or kwargs.get(ids) is None:
        return None
    return args, {**kwargs, ids: InRow(kwargs[ids], row)}


@functools.cache
def attention_class(base: Any) -> type[nn.Module]:
    """Return a subclass of a sparse attention class that runs on each sample of a row. One per base class."""

    @functools.wraps(base.forward)
    def forward(
        self: nn.Module,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        row: RowContext | None = kwargs.pop(CONTEXT, None)
        if row is None:
            if self.training:
                warn_past_the_forward(attention_mask)
            return base.forward(self, hidden_states, position_embeddings, attention_mask, **kwargs)

        def attend(hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            return base.forward(self, hidden, (cos, sin), _causal_mask(self, hidden), **kwargs)[0]

        return run_per_sample(attend, row, hidden_states, *position_embeddings), None

    return subclass(base, {"forward": around_graph(forward)}, attention_class)


@functools.cache
def ngram_class(base: Any) -> type[nn.Module]:
    """Return a subclass of an n-gram layer's class that runs on each sample of a row. One per base class."""

    @functools.wraps(base.forward)
    def forward(
        self: nn.Module, hidden_states: torch.Tensor, input_ids: torch.Tensor | InRow, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if not isinstance(input_ids, InRow):
            return base.forward(self, hidden_states, input_ids, *args, **kwargs)

        def look_up(hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return base.forward(self, hidden, ids, *args, **kwargs)

        return run_per_sample(look_up, input_ids.row, hidden_states, input_ids.tensor_1T)

    return subclass(base, {"forward": around_graph(forward)}, ngram_class)


@outside_graph
def run_per_sample(
    layer: Callable[..., torch.Tensor], row: RowContext, hidden_1tD: torch.Tensor, *beside_1t: torch.Tensor
) -> torch.Tensor:
    """Run [1, t, D] through the layer, sample by sample. This stays outside compiled graphs, because it would be
    recompiled for nearly every row."""
    buckets: Buckets = row.entries[PerSample.name]

    def on_samples(*rows_1T: torch.Tensor) -> torch.Tensor:
        return buckets.join([layer(*parts) for parts in zip(*map(buckets.split, rows_1T), strict=True)])

    return row.part.on_whole_row(on_samples, hidden_1tD, *beside_1t)


def _causal_mask(attention: nn.Module, hidden_nWD: torch.Tensor) -> torch.Tensor:
    """Return the mask that transformers makes for samples without padding, [n, 1, W, W], boolean or additive.

    The mask is never replaced by a flag, because the indexer reads from it which tokens a query sees.
    """
    padding = cache = None
    mask = create_causal_mask(plain_config(attention), hidden_nWD, padding, cache, allow_is_causal_skip=False)
    assert isinstance(mask, torch.Tensor)
    return mask
