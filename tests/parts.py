"""The layers of a mechanism in a model."""

from __future__ import annotations

from typing import Any

from vlmpack.families import family_of
from vlmpack.model.mechanisms import ModelParts


def parts_of(model: Any) -> ModelParts:
    """The model and its parts, packing enabled or not."""
    return ModelParts(family=family_of(model), core=model)


def gated_delta_layers(model: Any) -> list[Any]:
    """Every gated delta layer."""
    return parts_of(model).layer_parts("gated_delta")
