"""Compute a vision tower's inputs from the grids of its images on the host, with transformers' own functions.

transformers' vision towers accept these values as keyword arguments and compute any that are missing
(`transformers.vision_utils`). On a GPU, each of these functions costs one to four host-device syncs.

    rotary           position_ids     int64 [P, 2]
    boundaries       cu_seqlens       int32 [G + 1] of frames, and max_seqlen
    windows          window_index     int64 [P / merge^2], with cu_window_seqlens and max_window_seqlen
    interpolation    interp_indices   int64 [P, taps] into the learned position embeddings, and interp_weights

P patches, G frames.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

ROTARY, BOUNDARIES, WINDOWS, INTERPOLATION = "rotary", "boundaries", "windows", "interpolation"


def tower_inputs(tower: Any, grid_thw: torch.Tensor, names: Sequence[str]) -> dict[str, torch.Tensor | int]:
    """Return keyword arguments of a tower: numbers, and tensors on the host.

    Args:
        tower: the vision tower.
        grid_thw: int64 [n, 3] on the host, the grids of one call.
        names: what it computes, of the table above.
    """
    from transformers import vision_utils

    grids = grid_thw.cpu()
    return {key: value for name in names for key, value in _COMPUTED[name](vision_utils, tower, grids).items()}


def _rotary(vision_utils: Any, tower: Any, grids: torch.Tensor) -> dict[str, Any]:
    return {"position_ids": vision_utils.get_vision_position_ids(grids, _merge(tower))}


def _boundaries(vision_utils: Any, tower: Any, grids: torch.Tensor) -> dict[str, Any]:
    cu_seqlens = vision_utils.get_vision_cu_seqlens(grids)
    return {"cu_seqlens": cu_seqlens, "max_seqlen": _longest(cu_seqlens)}


def _windows(vision_utils: Any, tower: Any, grids: torch.Tensor) -> dict[str, Any]:
    index, cu_seqlens = vision_utils.get_vision_window_index(
        grids, spatial_merge_size=tower.spatial_merge_size, window_size=tower.window_size, patch_size=tower.patch_size
    )
    return {"window_index": index, "cu_window_seqlens": cu_seqlens, "max_window_seqlen": _longest(cu_seqlens)}


def _interpolation(vision_utils: Any, tower: Any, grids: torch.Tensor) -> dict[str, Any]:
    embeddings = next(module for module in tower.modules() if hasattr(module, "num_grid_per_side"))
    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        grids,
        num_grid_per_side=embeddings.num_grid_per_side,
        mode=embeddings.interpolation_mode,
        align_corners=embeddings.interpolation_align_corners,
        spatial_merge_size=_merge(tower),
    )
    return {"interp_indices": indices, "interp_weights": weights}


def _merge(tower: Any) -> int:
    """Return the side of the blocks in which a tower orders its patches; 1 if it merges none (PaddleOCR-VL)."""
    return getattr(tower, "spatial_merge_size", 1)


def _longest(cu_seqlens: torch.Tensor) -> int:
    return int(cu_seqlens.diff().max())


_COMPUTED: Mapping[str, Callable[[Any, Any, torch.Tensor], dict[str, Any]]] = {
    ROTARY: _rotary,
    BOUNDARIES: _boundaries,
    WINDOWS: _windows,
    INTERPOLATION: _interpolation,
}
