"""Adapters that PEFT adds to a model that transformers has divided over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from vlmpack.context_parallel.mesh import mesh_of
from vlmpack.errors import ConfigError


def fit_adapters(core: Any) -> None:
    """Make adapters fit the layers of a divided model.

    PEFT 0.21 sizes an adapter by this rank's part of a weight, except with FSDP ranks alone. With tensor ranks alone it
    then divides the adapter as well, but leaves `in_features` at this rank's inputs. transformers 5.24 reads those of
    all ranks there, so they are set.

    Raises:
        ConfigError: an adapter has another size than its layer, or adapts experts that tensor or expert ranks divide.
    """
    if mesh_of(core) is None:
        return
    wrong = []
    for name, layer in core.named_modules():
        for adapter, first in (getattr(layer, "lora_A", None) or {}).items():
            if hasattr(layer, "get_param"):  # adapts a parameter of experts
                weight = layer.get_param()
                fits = not isinstance(weight, DTensor) or not {*(weight.device_mesh.mesh_dim_names or ())} & {
                    "tp",
                    "ep",
                }
            else:
                base, last = layer.get_base_layer(), layer.lora_B[adapter]
                if isinstance(first.weight, DTensor):
                    first.in_features = first.weight.shape[1]
                fits = _has_size(first.weight, 1, base.in_features) and _has_size(last.weight, 0, base.out_features)
            wrong += [] if fits else [name]
    if wrong:
        raise ConfigError(
            f"adapters do not fit their layers on this mesh ({wrong[0]}; {len(wrong)} in all), because PEFT sizes them "
            "by this rank's part of a weight: leave these layers out of target_modules and target_parameters, or load "
            "the model with fsdp_size= and no other size"
        )


def _has_size(weight: torch.Tensor, dim: int, size: int) -> bool:
    """Return whether a weight has `size` entries along a dimension, over all ranks that have parts of it."""
    if isinstance(weight, DTensor):
        part, _ = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
        if tuple(part) != tuple(weight.to_local().shape):
            return False
    return weight.shape[dim] == size
