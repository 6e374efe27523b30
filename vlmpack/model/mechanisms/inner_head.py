"""Models whose head is inside their text part, so that no module is the model without it (Llama 4 with images).

    most        model ─┬─ backbone ─┬─ tower            here    model ─┬─ tower
                       │            └─ text                            └─ text with head ─┬─ text
                       └─ head                                                            └─ head

A row goes through the model's own forward, which embeds tokens and images and calls the text part with its head. That
part returns hidden states in place of logits where the call carries a row: the head computes nothing, and what packing
computes of labelled positions is as everywhere.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, final

from torch import nn

from vlmpack.families.family import Family
from vlmpack.model.mechanisms import ClassMechanism, Maker, ModelParts, subclass
from vlmpack.model.row import CONTEXT

_OF_THE_HEAD = ("labels", "logits_to_keep")
"""Inputs of a text part with a head that the part without it does not take."""
_SWITCHED_OFF = "output_attentions"
"""An input that the model hands on unasked, and that attention of rows refuses."""


@final
class InnerHead(ClassMechanism):
    """The text part with its head. A row's entry: nothing."""

    name: ClassVar[str] = "inner_head"

    def is_in(self, family: Family) -> bool:
        """Families that have no path to a model without its head."""
        return not family.backbone_path

    def makers(self, model: ModelParts) -> list[tuple[nn.Module, Maker]]:
        """The module that holds the head and the text part."""
        holder, _, _ = model.family.head_path.rpartition(".")
        _, _, text = model.family.text_path.rpartition(".")
        return [(model.core.get_submodule(holder), functools.partial(headless_class, text=text))]

    def prepare(self, setup: Any) -> None:
        """Return nothing."""


@functools.cache
def headless_class(base: Any, *, text: str) -> type[nn.Module]:
    """A subclass of the class of a text part with a head that leaves out the head of a row; one a base class.

    Args:
        base: the class.
        text: the name of the part without the head.
    """

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get(CONTEXT) is None:
            return base.forward(self, *args, **kwargs)
        # its first output is hidden states, where the caller expects logits
        inputs = {name: value for name, value in kwargs.items() if name not in _OF_THE_HEAD}
        if not inputs.get(_SWITCHED_OFF):
            inputs.pop(_SWITCHED_OFF, None)
        return self.get_submodule(text)(*args, **inputs)

    return subclass(base, {"forward": forward}, functools.partial(headless_class, text=text))
