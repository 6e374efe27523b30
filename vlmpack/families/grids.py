"""Families beside Qwen's whose images are patches with a grid each: GLM-4V and PaddleOCR-VL, one descriptor each."""

from __future__ import annotations

from typing import Any

from vlmpack.families.family import Family
from vlmpack.families.qwen import run_per_frame
from vlmpack.families.tiles import Join

_IMAGES = {"pixel_values": Join(), "image_grid_thw": Join()}
"""Images alone: GLM-4V writes images and videos with one placeholder, so that only its own code can tell them apart."""


def _glm(model_type: str, model_class: str, processor: str, **settings: Any) -> Family:
    return Family(
        model_type=model_type,
        model_class=model_class,
        processor=processor,
        patch_size=14,
        media_over_ranks=False,
        media=_IMAGES,
        videos=run_per_frame,
        **settings,
    )


GRIDS = (
    _glm("glm4v", "Glm4vForConditionalGeneration", "Glm4vProcessor"),
    _glm("glm46v", "Glm46VForConditionalGeneration", "Glm46VProcessor"),
    _glm(
        "glm4v_moe",
        "Glm4vMoeForConditionalGeneration",
        "Glm4vProcessor",
        mechanisms={"experts": {"layer": "mlp", "router": "gate"}},
    ),
    _glm("glm_ocr", "GlmOcrForConditionalGeneration", "Glm46VProcessor"),
    Family(
        model_type="paddleocr_vl",
        model_class="PaddleOCRVLForConditionalGeneration",
        processor="PaddleOCRVLProcessor",
        patch_size=14,
        flat_patches=False,
        media_over_ranks=False,
        media=_IMAGES,
    ),
)
"""The descriptors."""
