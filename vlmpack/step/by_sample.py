"""Sparse attention and n-gram layers are given each sample of a row by itself.

The sparse attention of a sample scores blocks of its tokens, counted from where the sequence begins, and the highest
win; an n-gram layer hashes every token together with the ones before it. No boundaries can be handed to either, so both
are run on the samples one by one, those of the same length together: nothing is padded, and every choice that is made
among a sample's tokens is made among them alone.

The layers' classes become subclasses of their own (`subclass`). Attention is told the row by keyword, as all layers
are. An n-gram layer is given no keywords; it is told with its token ids (`InRow`), by a hook on the text model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import create_causal_mask

from vlmpack.families import Family
from vlmpack.layout import Buckets, Segments, around_graph, outside_graph
from vlmpack.step.attention import plain_config
from vlmpack.step.context import CONTEXT, InRow, RowContext
from vlmpack.step.subclass import subclass
from vlmpack.step.unpacked import warn_past_the_forward


def cut(family: Family, segments: Segments) -> Buckets | None:
    """How these layers compute a row; None: the family has none.

    A call counts for nothing beside the tokens, which the indexer takes one at a time.
    """
    return None if family.by_sample is None else Buckets.cheapest(segments, call_cost=0)


def install(family: Family, core: nn.Module) -> None:
    """Hook the text model, unless it is, so that the row goes to the n-gram layers with their token ids."""
    if family.by_sample is not None and not is_installed(family, core):
        tell = functools.partial(_tell, family.by_sample.ngram_ids)  # can be copied and pickled with the model
        family.language_model(core).register_forward_pre_hook(tell, with_kwargs=True)


def uninstall(family: Family, core: nn.Module, *, kept: Set[int]) -> None:
    """Remove the hook, unless the text model is among `kept`, ids of what other enabled models have too."""
    for text in changed(family, core):
        if id(text) not in kept:
            for number in [number for number, hook in text._forward_pre_hooks.items() if _is_ours(hook)]:
                del text._forward_pre_hooks[number]
                text._forward_pre_hooks_with_kwargs.pop(number, None)


def is_installed(family: Family, core: nn.Module) -> bool:
    """Whether the row still goes to the n-gram layers: the hook is on the text model, which may be another one by
    now."""
    return all(any(map(_is_ours, text._forward_pre_hooks.values())) for text in changed(family, core))


def changed(family: Family, core: nn.Module) -> list[nn.Module]:
    """The text model, if it is hooked."""
    return [] if family.by_sample is None else [family.language_model(core)]


def _is_ours(hook: Any) -> bool:
    return isinstance(hook, functools.partial) and hook.func is _tell


def _tell(
    ids: str, language_model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    row: RowContext | None = kwargs.get(CONTEXT)
    if row is None or kwargs.get(ids) is None:
        return None
    return args, {**kwargs, ids: InRow(kwargs[ids], row)}


@functools.cache
def attention_class(base: type[nn.Module]) -> type[nn.Module]:
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

        return _on_samples(attend, row, hidden_states, *position_embeddings), None

    return subclass(base, {"forward": around_graph(forward)}, attention_class)


@functools.cache
def ngram_class(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of an n-gram layer's class that runs it on the samples of a row; one a base class."""

    @functools.wraps(base.forward)
    def forward(
        self: nn.Module, hidden_states: torch.Tensor, input_ids: torch.Tensor | InRow, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if not isinstance(input_ids, InRow):
            return base.forward(self, hidden_states, input_ids, *args, **kwargs)

        def look_up(hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return base.forward(self, hidden, ids, *args, **kwargs)

        return _on_samples(look_up, input_ids.row, hidden_states, input_ids.tensor_1T)

    return subclass(base, {"forward": around_graph(forward)}, ngram_class)


@outside_graph
def _on_samples(
    layer: Callable[..., torch.Tensor], row: RowContext, hidden_1tD: torch.Tensor, *beside_1t: torch.Tensor
) -> torch.Tensor:
    """What the layer makes of every sample, as a row [1, t, D], zeros on padding. It stays out of compiled graphs: it
    would be compiled again for nearly every row."""
    buckets = row.by_sample
    assert buckets is not None
    if not buckets.tokens:  # padding alone: one token of it keeps the parameters of the layer in the graph
        return layer(*(own[:, :1] for own in (hidden_1tD, *beside_1t))) * torch.zeros_like(hidden_1tD)

    def on_row(*rows_1T: torch.Tensor) -> torch.Tensor:
        return buckets.join([layer(*parts) for parts in zip(*map(buckets.split, rows_1T), strict=True)])

    return row.share.by_row(on_row, hidden_1tD, *beside_1t)


def _causal_mask(attention: nn.Module, hidden_nWD: torch.Tensor) -> torch.Tensor:
    """[n, 1, W, W]: the mask that transformers makes for samples without padding, boolean or to be added.

    Never left out in favour of a flag: the indexer reads from it which tokens a query sees.
    """
    mask = create_causal_mask(
        config=plain_config(attention),
        inputs_embeds=hidden_nWD,
        attention_mask=None,
        past_key_values=None,
        allow_is_causal_skip=False,
    )
    assert isinstance(mask, torch.Tensor)
    return mask
