"""Settings of the vision parts of tiny models, and of what joins them to the text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlmpack.testing.models import TinySizes


def patch_blocks(sizes: TinySizes) -> dict[str, Any]:
    """Sizes of a tower whose images are patches with a grid each."""
    assert sizes.patch_size is not None
    return {
        "depth": sizes.vision_depth,
        "num_heads": sizes.vision_heads,
        "in_channels": 3,
        "patch_size": sizes.patch_size,
        "spatial_merge_size": sizes.merge,
        "temporal_patch_size": sizes.temporal_patch_size,
    }


def qwen2_vision(sizes: TinySizes) -> dict[str, Any]:
    return {"embed_dim": sizes.vision_hidden, "hidden_size": sizes.hidden, "mlp_ratio": 2}


def vision_settings(sizes: TinySizes) -> dict[str, Any]:
    return {
        "hidden_size": sizes.vision_hidden,
        "intermediate_size": 2 * sizes.vision_hidden,
        "out_hidden_size": sizes.hidden,
    }


def windowed_vision(sizes: TinySizes) -> dict[str, Any]:
    """Windows of 4 x 4 tokens as in the released models; the last block sees whole images."""
    assert sizes.patch_size is not None
    return {
        **vision_settings(sizes),
        "window_size": 4 * sizes.merge * sizes.patch_size,
        "fullatt_block_indexes": [sizes.vision_depth - 1],
        "tokens_per_second": 2,
    }


def qwen3_vision(sizes: TinySizes) -> dict[str, Any]:
    return {**vision_settings(sizes), "num_position_embeddings": 64}


def deepstack_vision(sizes: TinySizes) -> dict[str, Any]:
    """Deepstack: one text layer for each feature, which is added to the first layers' outputs."""
    deepstack = list(range(min(sizes.vision_depth, sizes.layers)))[:3]
    return {**qwen3_vision(sizes), "deepstack_visual_indexes": deepstack}


# ---------------------------------------------------------------------- images as rows of a batch, and tiles

TILE_PATCHES = 4
"""Patches along the side of a tile."""


def tile_tower(sizes: TinySizes) -> dict[str, Any]:
    assert sizes.patch_size is not None
    return {
        "hidden_size": sizes.vision_hidden,
        "intermediate_size": 2 * sizes.vision_hidden,
        "num_hidden_layers": sizes.vision_depth,
        "num_attention_heads": sizes.vision_heads,
        "patch_size": sizes.patch_size,
        "image_size": TILE_PATCHES * sizes.patch_size,
    }


def internvl_tower(sizes: TinySizes) -> dict[str, Any]:
    tower = tile_tower(sizes)
    return {**tower, "patch_size": [tower["patch_size"]] * 2, "image_size": [tower["image_size"]] * 2}


def internvl_settings(sizes: TinySizes) -> dict[str, Any]:
    return {"image_seq_length": TILE_PATCHES**2 // 4}  # pixels are shuffled two by two


def clip_tower(sizes: TinySizes) -> dict[str, Any]:
    return {**tile_tower(sizes), "model_type": "clip_vision_model", "projection_dim": sizes.vision_hidden}


def siglip_tower(sizes: TinySizes) -> dict[str, Any]:
    return {**tile_tower(sizes), "model_type": "siglip_vision_model", "vision_use_head": False}


def pixtral_tower(sizes: TinySizes) -> dict[str, Any]:
    """Images of any form within four tiles a side."""
    tower = {**tile_tower(sizes), "model_type": "pixtral", "head_dim": sizes.vision_hidden // sizes.vision_heads}
    return {**tower, "image_size": 4 * tower["image_size"]}


def llava_settings(sizes: TinySizes) -> dict[str, Any]:
    return {"image_token_index": sizes.image_token_id, "vision_feature_layer": -1}


def anyres_settings(sizes: TinySizes) -> dict[str, Any]:
    side = tile_tower(sizes)["image_size"]
    grids = [[rows * side, columns * side] for rows, columns in ((1, 2), (2, 1), (2, 2), (1, 3), (3, 1))]
    return {**llava_settings(sizes), "video_token_index": sizes.video_token_id, "image_grid_pinpoints": grids}


def glm_vision(sizes: TinySizes) -> dict[str, Any]:
    side = 4 * sizes.merge * (sizes.patch_size or 1)
    return {
        **patch_blocks(sizes),
        **vision_settings(sizes),
        "intermediate_size": 2 * sizes.vision_hidden,
        "image_size": side,
    }


def paddle_vision(sizes: TinySizes) -> dict[str, Any]:
    return {**tile_tower(sizes), "spatial_merge_size": sizes.merge}


def ernie_vision(sizes: TinySizes) -> dict[str, Any]:
    return {
        "hidden_size": sizes.vision_hidden,
        "intermediate_size": 2 * sizes.vision_hidden,
        "depth": sizes.vision_depth,
        "num_heads": sizes.vision_heads,
        "patch_size": sizes.patch_size,
        "spatial_merge_size": sizes.merge,
    }


def video_ends(sizes: TinySizes) -> dict[str, Any]:
    """Tokens that start and end a video: the last two of the vocabulary."""
    return {"video_start_token_id": sizes.vocab_size - 2, "video_end_token_id": sizes.vocab_size - 1}


def ernie_settings(sizes: TinySizes) -> dict[str, Any]:
    image = {"image_start_token_id": sizes.vision_start_token_id, "image_end_token_id": sizes.vision_end_token_id}
    return image | video_ends(sizes)


def kimi_vision(sizes: TinySizes) -> dict[str, Any]:
    """Places of 4 x 4 patches, which are stretched to the form of each image."""
    places = {"pos_emb_height": TILE_PATCHES, "pos_emb_width": TILE_PATCHES}
    return {**tile_tower(sizes), **places, "merge_kernel_size": [sizes.merge] * 2}


def kimi_settings(sizes: TinySizes) -> dict[str, Any]:
    return {"projection_hidden_size": sizes.vision_hidden, "tie_word_embeddings": False}


def minicpm_tower(sizes: TinySizes) -> dict[str, Any]:
    return {**tile_tower(sizes), "insert_layer_id": 0}


def siglip2_tower(sizes: TinySizes) -> dict[str, Any]:
    """Places of 4 x 4 patches, which are stretched to the form of each image."""
    tower = {**tile_tower(sizes), "model_type": "siglip2_vision_model", "vision_use_head": False}
    return {**tower, "num_patches": TILE_PATCHES**2}


def deepseek_ocr2_tower(sizes: TinySizes) -> dict[str, Any]:
    """Whole images of two tiles a side, windows in all blocks but the last; an encoder as deep, 144 queries a view.

    A tile is halved twice. Smaller ones would be of one feature before: of its convolution PyTorch's gradient in
    bfloat16 on a CPU is not written.
    """
    tower = tile_tower(sizes)
    tower["image_size"] *= 2
    shared = {"num_hidden_layers": sizes.vision_depth, "num_attention_heads": sizes.vision_heads}
    blocks = {"window_size": TILE_PATCHES - 1, "global_attn_indexes": [sizes.vision_depth - 1]}
    widths = {"output_channels": sizes.vision_hidden, "downsample_channels": [sizes.vision_hidden] * 2}
    encoder = {"num_key_value_heads": sizes.vision_heads, "intermediate_size": tower["intermediate_size"]}
    return {
        "sam_config": {**tower, **blocks, **widths, "mlp_dim": tower["intermediate_size"]},
        "encoder_config": {**shared, **encoder, "hidden_size": sizes.vision_hidden, "vocab_size": 1},
    }


def lfm2_settings(sizes: TinySizes) -> dict[str, Any]:
    return {"downsample_factor": sizes.merge, "projector_hidden_size": 2 * sizes.vision_hidden}


def llama4_tower(sizes: TinySizes) -> dict[str, Any]:
    """Patches are shuffled two by two, projected twice."""
    width = 2 * sizes.vision_hidden
    tower = {**tile_tower(sizes), "intermediate_size": 4 * sizes.vision_hidden}
    return {**tower, "vision_output_dim": width, "projector_input_dim": width, "projector_output_dim": width}


def llama4_settings(sizes: TinySizes) -> dict[str, Any]:
    return {
        "image_token_index": sizes.image_token_id,
        "boi_token_index": sizes.vision_start_token_id,
        "eoi_token_index": sizes.vision_end_token_id,
    }


def gemma3_tower(sizes: TinySizes) -> dict[str, Any]:
    tower = tile_tower(sizes)
    return {**tower, "image_size": 6 * tower["patch_size"]}


def gemma3_settings(sizes: TinySizes) -> dict[str, Any]:
    """Images of more tokens than the window: 6 x 6 patches, pooled two by two."""
    ends = {"boi_token_index": sizes.vision_start_token_id, "eoi_token_index": sizes.vision_end_token_id}
    return {"mm_tokens_per_image": 9, "image_token_index": sizes.image_token_id, **ends}


def paligemma_tower(sizes: TinySizes) -> dict[str, Any]:
    return {**siglip_tower(sizes), "projection_dim": sizes.hidden}


def paligemma_settings(sizes: TinySizes) -> dict[str, Any]:
    return {
        "image_token_index": sizes.image_token_id,
        "projection_dim": sizes.hidden,
        "hidden_size": sizes.hidden,
        "vocab_size": sizes.vocab_size,
    }


def gemma4_tower(sizes: TinySizes) -> dict[str, Any]:
    heads = {"num_attention_heads": sizes.vision_heads, "num_key_value_heads": sizes.vision_heads}
    return {
        **tile_tower(sizes),
        **heads,
        "head_dim": sizes.vision_hidden // sizes.vision_heads,
        "pooling_kernel_size": 2,
        "position_embedding_size": 64,
    }


def merged_patches(sizes: TinySizes) -> dict[str, Any]:
    """No tower: patches of two by two are embedded as they are."""
    widths = {"mm_embed_dim": sizes.vision_hidden, "output_proj_dims": sizes.vision_hidden}
    return {**widths, "patch_size": sizes.patch_size, "pooling_kernel_size": 2, "mm_posemb_size": 64}


def gemma4_settings(sizes: TinySizes) -> dict[str, Any]:
    return {"boi_token_id": sizes.vision_start_token_id, "eoi_token_id": sizes.vision_end_token_id}
