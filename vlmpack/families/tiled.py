"""Tiled families: images are rows of a batch, or tiles, with one rotary position per token. One descriptor each.

Most of their towers compute every tile separately; a tower that attends within boundaries has `tile_boundaries`. For
each family, a rule counts the placeholder tokens of each tile or image, as its processor and its model do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from vlmpack.errors import LayoutError
from vlmpack.families.family import Family, Rotary
from vlmpack.families.pixels import (
    frames_of_one_size,
    image_of_any_size,
    masked_patches,
    row_of_patches,
    square_tiles,
    thumbnail_and_tiles,
    tile_or_image,
    tiles_with_mask,
    views,
)
from vlmpack.families.tiles import Join
from vlmpack.layout.segments import Segments

Tensors = Mapping[str, torch.Tensor]


def tiled_family(model_type: str, **settings: Any) -> Family:
    """Describe a family whose images are rows of a batch or tiles, and whose text part has one position per token."""
    tiled: dict[str, Any] = {
        "positions_rule": Rotary(axes=1),
        "token_types": None,
        "vision_path": "model.vision_tower",
        "media": {"pixel_values": Join()},
        "image": square_tiles,
    }
    return Family(model_type=model_type, **{**tiled, **settings})


# ---------------------------------------------------------------------- numbers of placeholder tokens


def tiles_of_one_size(tensors: Tensors, config: Any) -> Sequence[int]:
    """Return `image_seq_length` tokens for every row of `pixel_values` [N, 3, H, W]."""
    return [config.image_seq_length] * len(tensors["pixel_values"])


def shuffled_tiles(tensors: Tensors, config: Any) -> Sequence[int]:
    """Return one token for every `downsample_factor`² patches of each row of `pixel_values` [N, 3, H, W]."""
    rows, columns = (n // config.vision_config.patch_size for n in tensors["pixel_values"].shape[-2:])
    return [rows * columns // config.downsample_factor**2] * len(tensors["pixel_values"])


def images_of_one_size(tensors: Tensors, config: Any) -> Sequence[int]:
    """Return one token for every feature of the tower, for each row of `pixel_values` [N, 3, H, W].

    The CLS token is left out by default. With `image_sizes` [N, 2], patches of each image's own size are counted.
    """
    if "image_sizes" in tensors:
        return (tensors["image_sizes"] // config.vision_config.patch_size).prod(-1).tolist()
    rows, columns = (n // config.vision_config.patch_size for n in tensors["pixel_values"].shape[-2:])
    return [_selected(rows * columns, config)] * len(tensors["pixel_values"])


def _selected(patches: int, config: Any) -> int:
    """Number of features used of a tile: a CLIP tower adds a CLS token, and "default" drops the first feature."""
    has_cls = config.vision_config.model_type == "clip_vision_model"
    return patches + has_cls - (config.vision_feature_select_strategy == "default")


def tiles_by_size(tensors: Tensors, config: Any) -> Sequence[int]:
    """Return the tokens of each image of `image_sizes` [N, 2]: a thumbnail, and the tiles of the best-fitting grid.

    Features of the tiles' padding are dropped, and one token follows each row of features.
    """
    return [_thumbnail(config) + prod(_unpadded(size, config, rows=1)) for size in tensors["image_sizes"].tolist()]


def tiles_of_single_images(tensors: Tensors, config: Any) -> Sequence[int]:
    """Return the tokens of `tiles_by_size`, limited by `vision_aspect_ratio`.

    If a sample has several images, each has only a thumbnail and one more token.
    """
    most = int(config.vision_aspect_ratio.removeprefix("anyres_max_")) * _side(config) ** 2
    tokens = []
    for size, single in _with_singles(tensors):
        height, width = _unpadded(size, config) if single else (0, 0)
        ratio = math.sqrt(height * width / most)
        if ratio > 1.1:  # the model shrinks features likewise
            height, width = int(height // ratio), int(width // ratio)
        tokens.append(_thumbnail(config) + (height * (width + 1) if single else 1))
    return tokens


def pooled_frames(tensors: Tensors, config: Any) -> Sequence[int]:
    """Return the tokens of each video of `pixel_values_videos` [N, F, 3, H, W].

    These are the features of its frames, pooled 2 x 2, and an end token. Frames of zeros behind the last other one are
    padding, as videos of a call have one size.

    Raises:
        LayoutError: the frames do not have the size of the tower's tiles.
    """
    if (videos := tensors.get("pixel_values_videos")) is None:
        return ()
    side = config.vision_config.image_size
    if videos.ndim != 5 or tuple(videos.shape[2:]) != (3, side, side):
        raise LayoutError(
            f"pixel_values_videos is {list(videos.shape)}, but the model takes [videos, frames, 3, {side}, {side}]; "
            "keep what the processor makes"
        )
    counts = (next((n for n in range(len(frames), 1, -1) if frames[n - 1].any()), 1) for frames in videos)
    return [count * _pooled(config) + 1 for count in counts]


def frames_of_pooled(tokens: int, config: Any) -> int:
    """Return the number of frames of a video with that many tokens: the inverse of `pooled_frames`."""
    return (tokens - 1) // _pooled(config)


def _pooled(config: Any) -> int:
    return (-(-_side(config) // 2)) ** 2


def _side(config: Any) -> int:
    """Number of patches along the side of a tile."""
    return config.vision_config.image_size // config.vision_config.patch_size


def _with_singles(tensors: Tensors) -> list[tuple[list[int], bool]]:
    """Pair each image's size with whether it is the only image of its sample."""
    sizes = tensors["image_sizes"].tolist()
    counts = tensors["batch_num_images"].tolist() if "batch_num_images" in tensors else [1] * len(sizes)
    return list(zip(sizes, [n == 1 for n in counts for _ in range(n)], strict=True))


def _thumbnail(config: Any) -> int:
    return _selected(_side(config) ** 2, config)


def _unpadded(size: Sequence[int], config: Any, *, rows: int = 0) -> tuple[int, int]:
    """Rows and columns of features of an image of `size`, without the padding to the proportions of its tiles.

    `rows`: number of tokens that follow each row; they count as columns.
    """
    height, width = size
    high, wide = (n * _side(config) for n in _best_grid(size, config))
    if width / height > wide / high:
        high -= 2 * ((high - int(round(height * (wide / width), 7))) // 2)
    else:
        wide -= 2 * ((wide - int(round(width * (high / height), 7))) // 2)
    return high, wide + rows


def _best_grid(size: Sequence[int], config: Any) -> list[int]:
    """Rows and columns of tiles of an image of `size`."""
    from transformers.image_processing_utils import select_best_resolution

    best = select_best_resolution((size[0], size[1]), config.image_grid_pinpoints)
    return [n // config.vision_config.image_size for n in best]


def tiles_with_pixels(tensors: Tensors, config: Any) -> Sequence[int]:
    """Return the tokens of every tile of `pixel_values` [B, N, 3, H, W]; tiles of zeros are padding and left out."""
    real = tensors["pixel_values"].flatten(0, 1).flatten(1).any(1)
    side = config.vision_config.image_size // config.vision_config.patch_size
    return [int(side**2 / config.scale_factor**2)] * int(real.sum())


def without_padding(tensors: Tensors) -> Tensors:
    """Remove padding tiles, which are all zeros: [B, N, ...] tensors become [1, n, ...]."""
    real = tensors["pixel_values"].flatten(0, 1).flatten(1).any(1) if "pixel_values" in tensors else None
    return {name: tensor.flatten(0, 1)[real][None] for name, tensor in tensors.items()}


def merged_patches(tensors: Tensors, config: Any) -> Sequence[int]:
    """Return one token for every `spatial_merge_size`² patches of each image of `image_sizes` [N, 2], in pixels."""
    side = config.vision_config.patch_size * config.spatial_merge_size
    return (tensors["image_sizes"] // side).prod(-1).tolist()


def patches_of_sizes(tensors: Tensors, config: Any) -> Sequence[Segments]:
    """Return the boundaries of images: one segment with the patches of each image of `image_sizes` [N, 2]."""
    return [Segments.from_lengths((tensors["image_sizes"] // config.vision_config.patch_size).prod(-1).tolist())]


def merged_windows(tensors: Tensors, config: Any, *, sizes: str = "target_sizes") -> Sequence[int]:
    """Return the tokens of each image of `target_sizes` [N, 2], in patches.

    Patches are merged `merger_times`, and once more inside the tower unless `downsample_mode` is "4x". The same rule
    counts each frame of a video, or tile of a frame, with `sizes="target_sizes_videos"`.
    """
    rows, columns = (n**config.merger_times for n in config.merge_kernel_size)
    inner = 1 if config.downsample_mode == "4x" else 2
    sizes_N2 = tensors[sizes].tolist() if sizes in tensors else []
    return [(height // (inner * rows)) * (width // (inner * columns)) for height, width in sizes_N2]


def columns_of_targets(tensors: Tensors, config: Any) -> Mapping[str, Sequence[int]]:
    """Return the number of columns of each image in `pixel_values` [1, 3, side, columns].

    Every patch of `target_sizes` [N, 2] has `side` columns. Frames of videos are counted likewise.
    """
    side, sizes = config.vision_config.patch_size, {"": "target_sizes", "_videos": "target_sizes_videos"}
    return {
        f"pixel_values{of}": (tensors[name].prod(-1) * side).tolist() for of, name in sizes.items() if name in tensors
    }


def patches_of_targets(tensors: Tensors, config: Any) -> Sequence[Segments]:
    """Return all boundaries of the tower, separately for images of `target_sizes` [N, 2] and for frames of videos.

    These are the patches of each image before and after merging inside the tower, and the windows that are merged.
    """
    calls = [tensors[name].prod(-1).tolist() for name in ("target_sizes", "target_sizes_videos") if name in tensors]
    window = prod(config.vision_config.window_kernel_size)
    whole = [Segments.from_lengths([n // merged for n in patches]) for patches in calls for merged in (1, 4)]
    return [*whole, *(Segments.from_lengths([window] * (sum(patches) // window)) for patches in calls)]


def shuffled_patches(tensors: Tensors, config: Any) -> Sequence[int]:
    """Return one token for every `downsample_factor`² patches of each tile of `spatial_shapes` [N, 2], in patches."""
    return (tensors["spatial_shapes"] // config.downsample_factor).prod(-1).tolist()


def views_of_images(tensors: Tensors, config: Any) -> Sequence[int]:
    """Return the tokens of each image of `pixel_values` [N, 3, H, W].

    These are the queries of its tiles in `pixel_values_local` (`num_local_patches` [N] counts the tiles of each image),
    the queries of the whole image, and an end token.

    Raises:
        LayoutError: the number of tiles is not the sum of `num_local_patches`.
    """
    whole, tiles = tensors["pixel_values"], tensors.get("pixel_values_local")
    counts = tensors["num_local_patches"].tolist() if "num_local_patches" in tensors else [0] * len(whole)
    count = 0 if tiles is None else len(tiles)
    if len(counts) != len(whole) or sum(counts) != count:
        raise LayoutError(
            f"{len(whole)} images have {count} tiles in pixel_values_local, but num_local_patches counts "
            f"{counts[:9]}; keep what the processor gives"
        )
    of_tile = 0 if tiles is None else _queries(tiles, config)
    return [of_tile * n + _queries(whole, config) + 1 for n in counts]


def tiles_of_views(tensors: Tensors, config: Any) -> Mapping[str, Sequence[int]]:
    """Return the number of tiles of each image in `pixel_values_local`, from `num_local_patches` [N]."""
    counts = tensors.get("num_local_patches")
    return {} if counts is None else {"pixel_values_local": counts.tolist()}


def _queries(pixels: torch.Tensor, config: Any) -> int:
    """Number of learned queries of a view in DeepSeek-OCR 2: 144 for up to 144 features, otherwise 256."""
    side = 4 * config.vision_config.sam_config.patch_size  # two convolutions halve rows and columns of patches
    rows, columns = (-(-n // side) for n in pixels.shape[-2:])
    return 144 if rows * columns <= 144 else 256


# ---------------------------------------------------------------------- what the tower computes


def work_of_best_grids(tensors: Tensors, config: Any) -> Sequence[tuple[int, int]]:
    """Return the tiles of each image of `image_sizes` [N, 2], its thumbnail among them, and the patches of one.

    If a sample has several images (`batch_num_images`), each has only a thumbnail.
    """
    each = _side(config) ** 2
    return [(1 + is_single * prod(_best_grid(size, config)), each) for size, is_single in _with_singles(tensors)]


def work_of_sizes(tensors: Tensors, config: Any) -> Sequence[tuple[int, int]]:
    """Return one tile for each row of `pixel_values`, of all its patches, or with `image_sizes` of the image's own."""
    if "image_sizes" in tensors:
        return [(1, patches) for patches in patches_of_sizes(tensors, config)[0].lengths]
    return [(1, _side(config) ** 2)] * len(tensors["pixel_values"])


# ---------------------------------------------------------------------- a small image, for ranks that have none


def blank_views(config: Any) -> Tensors:
    """Return a small image and one tile of it."""
    side = 4 * config.vision_config.sam_config.patch_size
    view = torch.ones(1, 3, side, side)
    return {"pixel_values": view, "pixel_values_local": view, "num_local_patches": torch.tensor([1])}


# ---------------------------------------------------------------------- the families

_SIZES = {"pixel_values": Join(pad=True), "image_sizes": Join()}

_PIXTRAL = {
    "tile_tokens": merged_patches,
    "image": image_of_any_size,
    "tile_boundaries": patches_of_sizes,
    "blocks_path": "transformer.layers",
    "media": _SIZES,
}
_IDEFICS3 = {
    "text_path": "model.text_model",
    "vision_path": "model.vision_model",
    "tile_tokens": tiles_with_pixels,
    "without_padding": without_padding,
    "image": tiles_with_mask,
    "media": {"pixel_values": Join(axis=1), "pixel_attention_mask": Join(axis=1)},
}
_COHERE2 = {"tile_tokens": shuffled_tiles, "text_type": "cohere2", "oldest_transformers": (5, 23)}

TILED = (
    tiled_family("internvl", tile_tokens=tiles_of_one_size),
    tiled_family("llava", tile_tokens=images_of_one_size, media=_SIZES, image_work=work_of_sizes, image=tile_or_image),
    tiled_family(
        "llava_next", tile_tokens=tiles_by_size, media=_SIZES, image_work=work_of_best_grids, image=thumbnail_and_tiles
    ),
    tiled_family(
        "llava_onevision",
        tile_tokens=tiles_of_single_images,
        video_tokens=pooled_frames,
        frames_in=frames_of_pooled,
        oldest_over_ranks=(5, 23),
        image_work=work_of_best_grids,
        image=thumbnail_and_tiles,
        video=frames_of_one_size,
        media=_SIZES | {"batch_num_images": Join(counts_images=True), "pixel_values_videos": Join(pad=True)},
    ),
    tiled_family("smolvlm", **_IDEFICS3),
    tiled_family("idefics3", **_IDEFICS3),
    tiled_family("mistral3", **_PIXTRAL),
    tiled_family("lighton_ocr", vision_path="model.vision_encoder", **_PIXTRAL),
    tiled_family(
        "minicpmv4_6",
        mechanisms={"gated_delta": {"layer": "linear_attn"}},
        tile_tokens=merged_windows,
        tile_entries=columns_of_targets,
        image=row_of_patches,
        video=partial(row_of_patches, of="_videos"),
        tile_boundaries=patches_of_targets,
        blocks_path="encoder.layers",
        keeps_row={"vit_merger": "self_attn"},
        video_tokens=partial(merged_windows, sizes="target_sizes_videos"),
        media={
            "pixel_values": Join(axis=3),
            "target_sizes": Join(),
            "pixel_values_videos": Join(axis=3),
            "target_sizes_videos": Join(),
        },
        oldest_transformers=(5, 23),
        text_type="qwen3_5",
    ),
    tiled_family(
        "lfm2_vl",
        mechanisms={"short_conv": {"layer": "conv"}},
        tile_tokens=shuffled_patches,
        image=masked_patches,
        media={"pixel_values": Join(pad=True), "pixel_attention_mask": Join(pad=True), "spatial_shapes": Join()},
        oldest_transformers=(5, 23),
        text_type="lfm2",
    ),
    tiled_family("cohere2_vision", **_COHERE2),
    tiled_family("aya_vision", **_COHERE2),
    tiled_family(
        "deepseek_ocr2",
        mechanisms={"experts": {"layer": "mlp", "router": "gate"}},
        tile_tokens=views_of_images,
        tile_entries=tiles_of_views,
        image=views,
        blank=blank_views,
        media={"pixel_values": Join(), "pixel_values_local": Join(), "num_local_patches": Join()},
        oldest_transformers=(5, 23),
    ),
)
"""The descriptors."""
