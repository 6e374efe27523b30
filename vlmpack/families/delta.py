"""What a family with gated delta layers adds: where they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import nn


@final
@dataclass(frozen=True, kw_only=True)
class Delta:
    """The gated delta layers of a family: linear attention that carries state along the sequence.

    A causal convolution over a few tokens, then a recurrence over all of them (Yang et al., 2024, Gated Delta
    Networks). Neither reads position ids or attention masks, so both run on from one sample of a row into the next.
    """

    modelling: str
    """Module of transformers that holds the layer and the functions that it calls."""

    def layers(self, language_model: nn.Module) -> list[nn.Module]:
        """Every gated delta layer, hidden states [B, S, D] in and out; other decoder layers have attention."""
        layers = language_model.get_submodule("layers").children()
        return [layer.get_submodule("linear_attn") for layer in layers if hasattr(layer, "linear_attn")]
