"""The compute cost of a sample, estimated from its tokens and vision patches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from vlmpack.errors import ConfigError


@final
@dataclass(frozen=True, kw_only=True)
class CostModel:
    """FLOPs of one forward pass: tokens + tokens² + patches + Σ patches² of each image, each with its factor.

    The backward pass costs twice as much again, so that shares stay the same. Only ratios of factors matter for a
    balance.
    """

    token: float
    """A token, through the linear layers of the language model."""
    token_pair: float = 0.0
    """A pair of tokens that attend to each other, over n² pairs of a sample of n tokens."""
    patch: float = 0.0
    """A vision patch, through the linear layers of the vision tower."""
    patch_pair: float = 0.0
    """A pair of patches of one image."""

    @classmethod
    def from_sizes(
        cls,
        *,
        hidden: int,
        layers: int,
        intermediate: int,
        kv_hidden: int | None = None,
        vision_hidden: int = 0,
        vision_layers: int = 0,
        vision_intermediate: int = 0,
    ) -> CostModel:
        """The factors of a dense vision-language model, from its configuration.

        Language model: 2 (2h² + 2hk + 3hf) a token and layer (query and output, key and value, gated MLP), and 2h a
        pair and layer: 4h for scores and values, half of it under the causal mask. Vision tower: 2 (4v² + 2vg) a patch
        and block, and 4v a pair.

        Args:
            hidden: h, width of the language model.
            layers: of the language model.
            intermediate: f, width of its MLP; of a mixture of experts, that of the experts which one token meets.
            kv_hidden: k, key-value heads times head dimension; None: as `hidden`.
            vision_hidden: v, width of the vision tower.
            vision_layers: its blocks.
            vision_intermediate: g, width of its MLP.
        """
        key_value = hidden if kv_hidden is None else kv_hidden
        linear = 2 * hidden**2 + 2 * hidden * key_value + 3 * hidden * intermediate
        return cls(
            token=2.0 * layers * linear,
            token_pair=2.0 * layers * hidden,
            patch=2.0 * vision_layers * (4 * vision_hidden**2 + 2 * vision_hidden * vision_intermediate),
            patch_pair=4.0 * vision_layers * vision_hidden,
        )

    def of_samples(
        self, lengths: np.ndarray, patches: np.ndarray | None = None, patch_pairs: np.ndarray | None = None
    ) -> np.ndarray:
        """float [N]: the cost of each sample.

        Args:
            lengths: [N] tokens.
            patches: [N] vision patches of all images of a sample; None: text only.
            patch_pairs: [N] patches² summed over the images of a sample; None: as if it were one image.

        Of groups of samples that share prefixes it is called with the tokens and patches of their prefixes, [K]: what a
        row of such samples costs is `plan.sums(costs, of_groups)`. A branch then costs its own tokens, and its pairs
        with the prefix besides those among themselves.

        Raises:
            ConfigError: as many patches, or pairs, are needed as there are lengths.
        """
        tokens = np.asarray(lengths, np.float64)
        cost = self.token * tokens + self.token_pair * tokens**2
        if patches is None:
            return cost
        count = np.asarray(patches, np.float64)
        pairs = count**2 if patch_pairs is None else np.asarray(patch_pairs, np.float64)
        if not len(tokens) == len(count) == len(pairs):
            raise ConfigError(f"{len(tokens)} lengths, but {len(count)} patches and {len(pairs)} patch_pairs")
        return cost + self.patch * count + self.patch_pair * pairs
