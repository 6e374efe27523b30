"""Llama 4: query scaling by the position in the sample, and a head inside the text part (`InnerHead`).

Llama 4's layers without rotary positions scale their queries (attention temperature tuning, Nakanishi, 2025,
Scalable-Softmax):

    scale = 1 + attn_scale * log(1 + floor((position + 1) / floor_scale))

The unmodified layer counts positions from the start of its input, 0 .. t - 1, and adds the number of tokens in its
cache. It reads no position ids. So we pass an empty cache, which holds no keys and reports a different number
of tokens for each token of the row:

    row       a a a .  b b b b b
    counted   0 1 2 3  4 5 6 7 8
    offsets   0 0 0 .  -4 -4 -4 ..       "tokens in the cache"
    positions 0 1 2 .  0 1 2 3 4

The layer's own arithmetic then gives the same scale as for each sample on its own, bit for bit. Ranks that share a row,
and prefix trees, use the positions of their part. Gradient checkpointing removes caches from the arguments of whole
layers; this one is passed inside the layer.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, final

import torch
from torch import nn

from vlmpack.errors import FamilyError
from vlmpack.families.family import Family
from vlmpack.model.mechanisms import ClassMechanism, Maker, ModelParts, RowSetup, replaces
from vlmpack.model.plain import cache_name
from vlmpack.model.row import CONTEXT, RowContext


@final
class QueryScale(ClassMechanism):
    """Layers that scale queries by position. A row's entry: offsets from counted to real positions, int64 [t]."""

    name: ClassVar[str] = "query_scale"

    def makers(self, model: ModelParts) -> list[tuple[nn.Module, Maker]]:
        """Return the attention of every layer without rotary positions."""
        return [(layer, placed_class) for layer in model.layer_parts(self.name) if not layer.use_rope]

    def prepare(self, setup: RowSetup) -> torch.Tensor:
        """Subtract the positions that a layer counts from the positions in the samples."""
        device = setup.row.input_ids.device
        places_t = setup.part.cut(setup.row.segments.position_in_segment(device)[None])[0]
        return places_t - torch.arange(len(places_t), device=device)


@final
class Offsets:
    """An empty cache. It holds no keys, and its number of tokens is the offset of each token's position."""

    def __init__(self, offsets_t: torch.Tensor) -> None:
        self._offsets_t = offsets_t
        self.was_read = False
        """Whether the layer has asked for the number of tokens."""

    def get_seq_length(self, layer_idx: int | None = None) -> torch.Tensor:
        """Return the offset of each token's position, int64 [t]."""
        self.was_read = True
        return self._offsets_t

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values unchanged."""
        return key, value


_cache_name = functools.cache(cache_name)


@replaces(in_graph=True)
def placed_class(plain: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a subclass of an attention class that scales queries by the position in the sample."""
    row: RowContext | None = kwargs.get(CONTEXT)
    if row is None:
        return plain(module, *args, **kwargs)
    offsets = Offsets(row.entries[QueryScale.name])
    output = plain(module, *args, **{**kwargs, _cache_name(plain): offsets})
    if module.attn_temperature_tuning and not offsets.was_read:
        raise FamilyError(
            f"a {type(module).__name__} scales queries by their place and did not read it where transformers 5.23 "
            "does, so that samples of a row would have others than alone; use a transformers of the supported range, "
            "or attn_temperature_tuning=False"
        )
    return output


# ---------------------------------------------------------------------- inner head
#
# Models whose head is inside their text part, so that no module is the model without its head (Llama 4 with images).
#
#     most        model ─┬─ backbone ─┬─ tower            here    model ─┬─ tower
#                        │            └─ text                            └─ text with head ─┬─ text
#                        └─ head                                                            └─ head
#
# A row goes through the model's own forward, which embeds tokens and images and calls the text part with its head. If
# the call carries a row, that part returns hidden states in place of logits, without running the head. Packing then
# computes labeled positions as for every other family.


_OF_THE_HEAD = ("labels", "logits_to_keep")
"""Inputs that the text part with its head takes, but the text part alone does not."""
_SWITCHED_OFF = "output_attentions"
"""An input that the model always passes on, and that attention of packed rows refuses."""


@final
class InnerHead(ClassMechanism):
    """The text part with its head. A row has no entry for it."""

    name: ClassVar[str] = "inner_head"

    def is_in(self, family: Family) -> bool:
        """Return whether the family lacks a path to a model without its head."""
        return family.backbone_path is None

    def makers(self, model: ModelParts) -> list[tuple[nn.Module, Maker]]:
        """Return the module that holds the head and the text part."""
        holder, _, _ = model.family.head_path.rpartition(".")
        return [(model.core.get_submodule(holder), headless_class)]


@replaces(in_graph=True)
def headless_class(plain: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a subclass of the class of a text part with a head. It skips the head for rows."""
    if kwargs.get(CONTEXT) is None:
        return plain(module, *args, **kwargs)
    # The first output is hidden states, in the place where the caller expects logits.
    inputs = {name: value for name, value in kwargs.items() if name not in _OF_THE_HEAD}
    if not inputs.get(_SWITCHED_OFF):
        inputs.pop(_SWITCHED_OFF, None)
    return module.model(*args, **inputs)
