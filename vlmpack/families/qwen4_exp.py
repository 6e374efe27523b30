"""Qwen4-exp: sparse attention, gated delta layers, n-gram layers and experts around several residual streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from vlmpack.families.by_sample import BySample
from vlmpack.families.delta import Delta
from vlmpack.families.experts import Experts
from vlmpack.families.qwen3_vl import FramesApart
from vlmpack.layout import Segments

_MODELLING = "transformers.models.qwen4_exp.modeling_qwen4_exp"


@final
@dataclass(frozen=True, kw_only=True)
class Qwen4Exp(FramesApart):
    """Qwen4-exp: three of four layers of its text model are gated delta layers, the others have sparse attention.

    Sparse attention puts the tokens that a query sees into blocks, counted from the first one, and attends to those
    blocks whose indexer scores are highest. An n-gram layer (per-layer embedding) looks up hashes of each token and the
    ones before it, and runs a dilated convolution over what it finds. Both know a sample only by where the sequence
    begins; streams (hyper-connections), experts and norms take each token by itself.
    """

    model_type: ClassVar[str] = "qwen4_exp"
    model_class: ClassVar[str] = "Qwen4ExpForConditionalGeneration"
    delta: ClassVar[Delta | None] = Delta(modelling=_MODELLING)
    experts: ClassVar[Experts | None] = Experts(modelling=_MODELLING)
    by_sample: ClassVar[BySample | None] = BySample(attention="self_attn", ngram="ple", ngram_ids="ple_input_ids")

    def attended_pairs(self, segments: Segments, config: Any) -> int:
        """Query-key pairs that the indexer selects: as many whatever its scores are.

        Of the m tokens that a query sees, m // ratio whole blocks compete for budget // ratio places, and the m % ratio
        tokens of the last, broken block are always taken.
        """
        text = self.text_config(config)
        ratio = text.indexer_compress_ratio
        seen = np.arange(1, max(segments.lengths, default=0) + 1)
        taken = np.minimum(seen // ratio, text.indexer_budget // ratio) * ratio + seen % ratio
        pairs = np.concatenate([[0], taken.cumsum()])
        return int(pairs[list(segments.lengths)].sum())
