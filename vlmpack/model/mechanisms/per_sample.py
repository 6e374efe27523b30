"""Per-sample execution: sparse attention and n-gram layers run on each sample of a row by itself.

The sparse attention of a sample scores blocks of its tokens, counted from where the sequence begins, and the highest
win; an n-gram layer hashes every token together with the ones before it. No boundaries can be handed to either, so both
run on the samples, those of the same length together: nothing is padded, and every choice among a sample's tokens is
made among them alone.

Attention gets the row by keyword, as all layers do. An n-gram layer is given no keywords; a hook on the text model puts
the row beside its token ids (`InRow`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Set
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import nn
from transformers.masking_utils import create_causal_mask

from vlmpack.layout.device import around_graph, outside_graph
from vlmpack.layout.segments import Segments
from vlmpack.model.mechanisms import ClassMechanism, Maker, ModelParts, RowSetup, subclass
from vlmpack.model.mechanisms.attention import plain_config
from vlmpack.model.mechanisms.recurrent_rows import Buckets
from vlmpack.model.plain import warn_past_the_forward
from vlmpack.model.row import CONTEXT, RowContext


@final
class PerSample(ClassMechanism):
    """Layers to which a sample is what begins at the start of the sequence. A row's entry: its samples in buckets."""

    name: ClassVar[str] = "per_sample"

    def makers(self, model: ModelParts) -> list[tuple[nn.Module, Maker]]:
        """Every layer of sparse attention, and every n-gram layer; there may be none of these."""
        attention, ngram = attention_layers(model), ngram_layers(model)
        return [*((layer, attention_class) for layer in attention), *((layer, ngram_class) for layer in ngram)]

    def find(self, model: ModelParts) -> list[nn.Module]:
        """Every layer, and the text model with its hook."""
        return [*super().find(model), model.text]

    def attach(self, model: ModelParts) -> None:
        """Exchange classes, and hook the text model so that the row goes to n-gram layers with their token ids."""
        super().attach(model)
        if not self._is_hooked(model):
            ids = model.family.mechanisms[self.name]["ngram_ids"]
            hook = functools.partial(_add_row, ids)  # can be copied and pickled with the model
            model.text.register_forward_pre_hook(hook, with_kwargs=True)

    def detach(self, model: ModelParts, *, kept: Set[int] = frozenset()) -> None:
        """Restore classes and remove the hook."""
        super().detach(model, kept=kept)
        text = model.text
        if id(text) not in kept:
            for number in [number for number, hook in text._forward_pre_hooks.items() if _is_ours(hook)]:
                del text._forward_pre_hooks[number]
                text._forward_pre_hooks_with_kwargs.pop(number, None)

    def problem(self, model: ModelParts, *, attached: bool) -> str | None:
        """A class that was changed, or a text model without the hook."""
        if attached and not self._is_hooked(model):
            return (
                "n-gram layers no longer get the row: the text model was exchanged or lost its hooks after "
                "enable_packing; call enable_packing(model) again"
            )
        return super().problem(model, attached=attached)

    def prepare(self, setup: RowSetup) -> Buckets:
        """Put samples of the same length together. A call costs nothing beside the tokens, which the indexer takes
        one at a time."""
        return Buckets.cheapest(setup.row.segments, call_cost=0)

    def work(self, setup: RowSetup, entry: Any) -> Mapping[str, int]:
        """Pairs that the indexer selects."""
        return {"attended_pairs": selected_pairs(setup.row.segments, setup.text_config)}

    def _is_hooked(self, model: ModelParts) -> bool:
        return any(map(_is_ours, model.text._forward_pre_hooks.values()))


def attention_layers(model: ModelParts) -> list[nn.Module]:
    """Every layer of sparse attention: hidden states [B, S, D], (cosines, sines) [B, S, H] and a causal mask
    [B, 1, S, S] in, (hidden states, weights) out. An indexer chooses which tokens a query attends to."""
    return model.layer_parts(PerSample.name, "attention")


def ngram_layers(model: ModelParts) -> list[nn.Module]:
    """Every n-gram layer: hidden states [B, S, D] and token ids [B, S] in, what is added to the hidden states out."""
    return model.layer_parts(PerSample.name, "ngram")


def selected_pairs(segments: Segments, text_config: Any) -> int:
    """Query-key pairs that the indexer selects: as many whatever its scores are.

    Of the m tokens that a query sees, m // ratio whole blocks compete for budget // ratio places, and the m % ratio
    tokens of the last, broken block are always taken.
    """
    ratio = text_config.indexer_compress_ratio
    visible = np.arange(1, segments.max_length + 1)
    selected = np.minimum(visible // ratio, text_config.indexer_budget // ratio) * ratio + visible % ratio
    pairs = np.concatenate([[0], selected.cumsum()])
    return int(pairs[list(segments.sample_lengths)].sum())


@final
class InRow:
    """A tensor and the row that it lies along, for a layer that is given no keywords."""

    def __init__(self, tensor_1T: torch.Tensor, row: RowContext) -> None:
        self.tensor_1T = tensor_1T
        """The tensor, [1, T]."""
        self.row = row
        """The row."""


def _is_ours(hook: Any) -> bool:
    return isinstance(hook, functools.partial) and hook.func is _add_row


def _add_row(
    ids: str, language_model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    row: RowContext | None = kwargs.get(CONTEXT)
    if row is None or kwargs.get(ids) is None:
        return None
    return args, {**kwargs, ids: InRow(kwargs[ids], row)}


@functools.cache
def attention_class(base: Any) -> type[nn.Module]:
    """A subclass of a sparse attention's class that runs it on the samples of a row; one a base class."""

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

        return run_on_row(attend, row, hidden_states, *position_embeddings), None

    return subclass(base, {"forward": around_graph(forward)}, attention_class)


@functools.cache
def ngram_class(base: Any) -> type[nn.Module]:
    """A subclass of an n-gram layer's class that runs it on the samples of a row; one a base class."""

    @functools.wraps(base.forward)
    def forward(
        self: nn.Module, hidden_states: torch.Tensor, input_ids: torch.Tensor | InRow, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if not isinstance(input_ids, InRow):
            return base.forward(self, hidden_states, input_ids, *args, **kwargs)

        def look_up(hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return base.forward(self, hidden, ids, *args, **kwargs)

        return run_on_row(look_up, input_ids.row, hidden_states, input_ids.tensor_1T)

    return subclass(base, {"forward": around_graph(forward)}, ngram_class)


@outside_graph
def run_on_row(
    layer: Callable[..., torch.Tensor], row: RowContext, hidden_1tD: torch.Tensor, *beside_1t: torch.Tensor
) -> torch.Tensor:
    """[1, t, D] through the layer, sample by sample. It stays out of compiled graphs: it would be compiled again for
    nearly every row."""
    buckets: Buckets = row.entries[PerSample.name]

    def on_samples(*rows_1T: torch.Tensor) -> torch.Tensor:
        return buckets.join([layer(*parts) for parts in zip(*map(buckets.split, rows_1T), strict=True)])

    return row.part.on_whole_row(on_samples, hidden_1tD, *beside_1t)


def _causal_mask(attention: nn.Module, hidden_nWD: torch.Tensor) -> torch.Tensor:
    """[n, 1, W, W]: the mask that transformers makes for samples without padding, boolean or to be added.

    Never left out in favour of a flag: the indexer reads from it which tokens a query sees.
    """
    padding = cache = None
    mask = create_causal_mask(plain_config(attention), hidden_nWD, padding, cache, allow_is_causal_skip=False)
    assert isinstance(mask, torch.Tensor)
    return mask
