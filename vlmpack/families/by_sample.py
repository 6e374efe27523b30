"""What a family adds whose layers mix tokens in ways that know no boundaries: where those layers are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import nn


@final
@dataclass(frozen=True, kw_only=True)
class BySample:
    """Two kinds of layers that know a sample only by where the sequence begins."""

    attention: str
    """Name in a decoder layer of its sparse attention: hidden states [B, S, D], (cosines, sines) [B, S, H] and a causal
    mask [B, 1, S, S] in, (hidden states, weights) out. An indexer chooses which tokens a query attends to."""
    ngram: str
    """Name in a decoder layer of its n-gram layer: hidden states [B, S, D] and token ids [B, S] in, what is added to
    the hidden states out."""
    ngram_ids: str
    """Argument of the text model that it hands down to its n-gram layers as their token ids, and not otherwise used."""

    def attention_layers(self, language_model: nn.Module) -> list[nn.Module]:
        """Every layer of sparse attention."""
        return _found(language_model, self.attention)

    def ngram_layers(self, language_model: nn.Module) -> list[nn.Module]:
        """Every n-gram layer; there may be none."""
        return _found(language_model, self.ngram)


def _found(language_model: nn.Module, name: str) -> list[nn.Module]:
    layers = [getattr(layer, name, None) for layer in language_model.get_submodule("layers").children()]
    return [layer for layer in layers if layer is not None]
