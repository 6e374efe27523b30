"""Families other than Qwen's whose images are patches with grids, one descriptor each.

                 GLM-4.1V to 4.6V, OCR       PaddleOCR-VL            ERNIE 4.5 VL            Kimi K2.5
    a patch      C values, an image twice    channels, rows, columns C values, once          channels, rows, columns
    merged       by the tower                by its projector        by its resampler        by its projector
    positions    MRoPE, as Qwen3-VL          MRoPE, as Qwen2-VL      MRoPE, as Qwen2-VL      one per token
    videos       frames as images            none                    two frames per token    frames see each other
    experts      4.5V                        none                    of text, of images      DeepSeek-V3's

Video frames of GLM-4V have the placeholder of images (`frames.frames_as_images`). For Kimi, vlmpack supports images
only: its video tokens are means over all frames of a clip.
"""

from __future__ import annotations

from vlmpack.families.family import Family, Rotary
from vlmpack.families.tiles import QWEN_MEDIA, Join
from vlmpack.families.videos import run_of_pairs, run_per_frame

_IMAGES = {"pixel_values": Join(), "image_grid_thw": Join()}
"""Patches and grids of images, concatenated."""

_GLM = {"media": QWEN_MEDIA, "videos": run_per_frame, "videos_as_images": True, "reads_grids": "on device"}

GRIDS = (
    Family(model_type="glm4v", **_GLM),
    Family(model_type="glm46v", **_GLM),
    Family(model_type="glm4v_moe", mechanisms={"experts": {"layer": "mlp", "router": "gate"}}, **_GLM),
    Family(model_type="glm_ocr", processor_name="Glm46VProcessor", keeps_row={"": "blocks"}, **_GLM),
    Family(
        model_type="paddleocr_vl",
        blocks_path="vision_model.encoder.layers",
        flat_patches=False,
        media=_IMAGES,
    ),
    Family(
        model_type="ernie4_5_vl_moe",
        mechanisms={
            "experts": {
                "layer": "mlp",
                "experts": "text_moe",
                "router": "text_moe.gate",
                "vision_router": "vision_moe.gate",
            }
        },
        expert_types="moe_mm_token_type_ids",
        reads_grids="alone",
        patches_of_frames=False,
        media=QWEN_MEDIA,
        videos=run_of_pairs,
        videos_apart=True,
        oldest_transformers=(5, 23),
        vision_path="model.vision_tower",
    ),
    Family(
        model_type="exaone4_5",
        positions_rule=Rotary(axes=1),
        token_types=None,
        text_type="exaone4",
    ),
    Family(
        model_type="lfm3_vl",
        mechanisms={"short_conv": {"layer": "conv"}},
        positions_rule=Rotary(axes=1),
        token_types=None,
        videos=run_per_frame,
        oldest_transformers=(5, 23),
        vision_path="model.vision_tower",
        blocks_path="layers",
        text_type="lfm3",
    ),
    Family(
        model_type="kimi_k25",
        mechanisms={"experts": {"layer": "mlp", "router": "gate"}},
        positions_rule=Rotary(axes=1),
        token_types=None,
        flat_patches=False,
        reads_grids="alone",
        media=_IMAGES,
        oldest_transformers=(5, 23),
        vision_path="model.vision_tower",
        blocks_path="layers",
        text_type="deepseek_v3",
        returns_router_logits=False,
    ),
)
"""The descriptors."""
