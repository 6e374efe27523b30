"""What two ranks compute and one process compares: models, samples, cases of the tests of sharding."""

from __future__ import annotations

from itertools import product
from typing import Any

from vlmpack.testing import Sample, mixed_samples, tiny_model
from vlmpack.testing.samples import VISION

CASES = tuple(
    product(("qwen3_5", "qwen3"), ("ddp", "fsdp2", "fsdp2 of layers' parts"), ("left padded", "row with gaps"))
)
"""(family, wrapper, how the samples are handed in)."""


def fresh(family: str) -> Any:
    """Two gated delta layers and one with attention, in a hybrid family."""
    return tiny_model(family, seed=3, layers=3, vision_depth=1)


def samples_of(model: Any) -> list[Sample]:
    """Five samples: two for the first rank and three for the second, images on both."""
    kinds = ("image", "text", "images", "text", "text") if model.config.model_type in VISION else ("text",) * 5
    return mixed_samples(model.config, seed=4, kinds=kinds, side=(1, 2))
