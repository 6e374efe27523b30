"""Families beside Qwen's whose images are patches with a grid each, one descriptor each.

                 GLM-4.1V to 4.6V, OCR       PaddleOCR-VL            ERNIE 4.5 VL            Kimi K2.5
    a patch      C values, an image twice    channels, rows, columns C values, once          channels, rows, columns
    merged       by the tower                by its projector        by its resampler        by its projector
    positions    MRoPE, as Qwen3-VL          MRoPE, as Qwen2-VL      MRoPE, as Qwen2-VL      one a token
    videos       frames as images            none                    two frames a token      frames see each other
    experts      4.5V                        none                    of text, of images      DeepSeek-V3's

Frames of GLM-4V's videos have the placeholder of images (`shared_placeholder.py`). Kimi takes images alone here: its
tokens of a video are means over all frames of a clip.
"""

from __future__ import annotations

from typing import Any

from vlmpack.families.family import Family
from vlmpack.families.rules import OneAxis, run_of_pairs, run_per_frame
from vlmpack.families.tiles import QWEN_MEDIA, Join

_IMAGES = {"pixel_values": Join(), "image_grid_thw": Join()}
"""Patches and grids of images, one after the other."""


def _glm(model_type: str, model_class: str, processor: str, **settings: Any) -> Family:
    """A model of GLM-4V's kind.

    `media_over_ranks` is False: its tower has places for features of images, which ranks that compute other images than
    those of their tokens were not tested with.
    """
    return Family(
        model_type=model_type,
        model_class=model_class,
        processor=processor,
        patch_size=14,
        media_over_ranks=False,
        media=QWEN_MEDIA,
        videos=run_per_frame,
        videos_as_images=True,
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
    _glm("glm_ocr", "GlmOcrForConditionalGeneration", "Glm46VProcessor", keeps_row={"": "blocks"}),
    Family(
        model_type="paddleocr_vl",
        model_class="PaddleOCRVLForConditionalGeneration",
        processor="PaddleOCRVLProcessor",
        blocks_path="vision_model.encoder.layers",
        patch_size=14,
        flat_patches=False,
        media_over_ranks=False,
        media=_IMAGES,
    ),
    Family(
        model_type="ernie4_5_vl_moe",
        model_class="Ernie4_5_VLMoeForConditionalGeneration",
        processor="Ernie4_5_VLMoeProcessor",
        mechanisms={
            "experts": {
                "layer": "mlp",
                "experts": "text_moe",
                "router": "text_moe.gate",
                "vision_router": "vision_moe.gate",
            }
        },
        expert_types="moe_mm_token_type_ids",
        patch_size=14,
        patches_of_frames=False,
        media_over_ranks=False,
        media=QWEN_MEDIA,
        videos=run_of_pairs,
        oldest_transformers=(5, 23),
        vision_path="model.vision_tower",
    ),
    Family(
        model_type="kimi_k25",
        model_class="Kimi_K25ForConditionalGeneration",
        processor="Kimi_K25Processor",
        mechanisms={"experts": {"layer": "mlp", "router": "gate"}},
        positions_rule=OneAxis(),
        token_types=None,
        patch_size=14,
        flat_patches=False,
        media_over_ranks=False,
        media=_IMAGES,
        oldest_transformers=(5, 23),
        vision_path="model.vision_tower",
        blocks_path="layers",
        text_type="deepseek_v3",
        returns_router_logits=False,
    ),
)
"""The descriptors."""
