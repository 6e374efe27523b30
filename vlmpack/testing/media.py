"""Media of synthetic samples, built from a configuration without a processor: tiles, batches of images, videos, audio.

A grid (1, rows, columns) gives the shape of an image. Each family has a rule that turns a grid into the tokens that its
processor would write and the tensors that it would return.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from vlmpack.families.family import Family
from vlmpack.families.registry import family_named
from vlmpack.layout.batch import Grid


class Sample(dict[str, torch.Tensor]):
    """A processor's output for one conversation, without the batch axis, and the model that it is for."""

    family: Family | None = None
    """The model's family; None: the sample has no media, or they are joined along their first axis."""
    config: Any = None
    """The model's configuration; None: unknown, so the modality of tokens is unknown, too."""

    @classmethod
    def of(cls, tensors: dict[str, torch.Tensor], family: Family | None, config: Any = None) -> Sample:
        """Make a sample from tensors, for a model of this family with this configuration."""
        sample = cls(tensors)
        sample.family, sample.config = family, config
        return sample


def sample_like(sample: Mapping[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> Sample:
    """Make a sample from `tensors`, with the family and configuration of `sample` (a plain dictionary has none)."""
    model = (sample.family, sample.config) if isinstance(sample, Sample) else (None, None)
    return Sample.of(tensors, *model)


@final
@dataclass(frozen=True, kw_only=True)
class TiledImage:
    """The tokens and tensors of one image or video."""

    ids: Sequence[int]
    """Token ids: placeholders, and the tokens around and between them."""
    tensors: dict[str, torch.Tensor]
    """Tensors that a processor would return for it, by name."""


UNREAD = 1e4
"""The value of padding frames after an audio: nothing may read them."""
Draw = Callable[..., torch.Tensor]
"""Function of sizes that returns float32 numbers from N(0, 1)."""

TileRule = Callable[..., TiledImage]
"""Function (config, grid, draw, *, several) that returns an image; `several`: its sample has several images."""


def _between(config: Any, *runs: int, mark: bool = False) -> list[int]:
    """Return runs of placeholders between start and end token; `mark`: the end token follows each run."""
    ids = [config.vision_start_token_id]
    for run in runs:
        ids += [*[config.image_token_id] * run, *[config.vision_end_token_id] * mark]
    return ids if mark else [*ids, config.vision_end_token_id]


def _fixed_tiles(config: Any, grid: Grid, draw: Draw, *, several: bool) -> TiledImage:
    """Tiles of one size, one for each cell of the grid, and a thumbnail if there are several cells."""
    cells = grid[1] * grid[2]
    tiles = cells + (cells > 1)
    side = config.vision_config.image_size[0]
    pixels = {"pixel_values": draw(tiles, 3, side, side)}
    return TiledImage(ids=_between(config, config.image_seq_length * tiles), tensors=pixels)


def _marked_squares(config: Any, grid: Grid, draw: Draw, *, several: bool) -> TiledImage:
    """Tiles, one for each cell of the grid, and a thumbnail if there are several, each followed by a text token."""
    cells, side = grid[1] * grid[2], config.vision_config.image_size
    tensors = {"pixel_values": draw(cells + (cells > 1), 3, side, side)}
    return TiledImage(ids=_between(config, *_runs(config, tensors), mark=True), tensors=tensors)


def _crops(config: Any, grid: Grid, draw: Draw, *, several: bool) -> TiledImage:
    """A whole image, and two crops if the grid has several cells, each with its own start and end token."""
    tiles = 1 if grid[1] * grid[2] == 1 else 3
    ids = [config.boi_token_index, *[config.image_token_id] * config.mm_tokens_per_image, config.eoi_token_index]
    side = config.vision_config.image_size
    return TiledImage(ids=ids * tiles, tensors={"pixel_values": draw(tiles, 3, side, side)})


MOST_PATCHES = 84
"""Number of patches that every image is padded to, in families whose processors pad patches."""


def _padded_patches(config: Any, grid: Grid, draw: Draw, *, several: bool) -> TiledImage:
    """Patches with position ids, pooled to one token per cell."""
    vision = config.vision_config
    return _with_places(config, grid, draw, patches=vision.pooling_kernel_size, side=vision.patch_size)


def _merged_patches(config: Any, grid: Grid, draw: Draw, *, several: bool) -> TiledImage:
    """Patches with position ids, one per cell."""
    return _with_places(config, grid, draw, patches=1, side=config.vision_config.model_patch_size)


def _with_places(config: Any, grid: Grid, draw: Draw, *, patches: int, side: int) -> TiledImage:
    """Patches with position ids (-1 for padding): `patches` along each side of a cell, each of `side` pixels."""
    rows, columns = (patches * cells for cells in grid[1:])
    places = torch.full((1, MOST_PATCHES, 2), -1)
    places[0, : rows * columns] = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1)
    pixels = draw(1, MOST_PATCHES, 3 * side**2)
    pixels[0, rows * columns :] = 0
    tokens = [config.image_token_id] * (grid[1] * grid[2])
    tensors = {"pixel_values": pixels, "image_position_ids": places}
    return TiledImage(ids=[config.boi_token_id, *tokens, config.eoi_token_id], tensors=tensors)


def _fixed_image(config: Any, grid: Grid, draw: Draw, *, several: bool) -> TiledImage:
    """An image of fixed size, whatever the grid."""
    side = config.vision_config.image_size
    pixels = {"pixel_values": draw(1, 3, side, side)}
    return TiledImage(ids=_of_family(config, pixels), tensors=pixels)


def _bare_image(config: Any, grid: Grid, draw: Draw, *, several: bool) -> TiledImage:
    """An image of fixed size, whatever the grid, without start and end tokens."""
    side = config.vision_config.image_size
    tokens = [config.image_token_id] * config.text_config.num_image_tokens
    return TiledImage(ids=tokens, tensors={"pixel_values": draw(1, 3, side, side)})


def _anyres(config: Any, grid: Grid, draw: Draw, *, several: bool) -> TiledImage:
    """A thumbnail, and the tiles of the grid that fits the image's proportions best.

    With several images, LLaVA-OneVision has only the thumbnails, each followed by one more token.
    """
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    side = config.vision_config.image_size
    size = [11 * grid[1], 13 * grid[2]]
    if several and config.model_type == "llava_onevision":
        tensors = {"pixel_values": draw(1, 1, 3, side, side), "image_sizes": torch.tensor([size])}
        return TiledImage(ids=_between(config, (side // config.vision_config.patch_size) ** 2 + 1), tensors=tensors)
    tiles = image_size_to_num_patches(size, config.image_grid_pinpoints, side)
    tensors = {"pixel_values": draw(1, tiles, 3, side, side), "image_sizes": torch.tensor([size])}
    return TiledImage(ids=_of_family(config, tensors), tensors=tensors)


def _of_family(config: Any, tensors: dict[str, torch.Tensor]) -> list[int]:
    """Return the tokens of an image, with the placeholders that the family's rule counts."""
    return _between(config, *_runs(config, tensors))


def _runs(config: Any, tensors: dict[str, torch.Tensor]) -> Sequence[int]:
    rule = family_named(config.model_type).tile_tokens
    assert rule is not None
    return rule(tensors, config)


def _marked_tiles(config: Any, grid: Grid, draw: Draw, *, several: bool) -> TiledImage:
    """A run of placeholders for each tile, each followed by a text token."""
    tiles, side = grid[1] * grid[2], config.vision_config.image_size
    run = (side // config.vision_config.patch_size // config.scale_factor) ** 2
    mask = torch.ones(1, tiles, side, side, dtype=torch.int64)
    tensors = {"pixel_values": draw(1, tiles, 3, side, side), "pixel_attention_mask": mask}
    return TiledImage(ids=_between(config, *[run] * tiles, mark=True), tensors=tensors)


def _rows_of_tokens(config: Any, grid: Grid, draw: Draw, *, several: bool) -> TiledImage:
    """A placeholder for each cell of the grid, and a text token after each row."""
    side = config.vision_config.patch_size * config.spatial_merge_size
    size = [grid[1] * side, grid[2] * side]
    tensors = {"pixel_values": draw(1, 3, *size), "image_sizes": torch.tensor([size])}
    return TiledImage(ids=_between(config, *[grid[2]] * grid[1], mark=True), tensors=tensors)


def _row_of_patches(config: Any, grid: Grid, draw: Draw, *, several: bool) -> TiledImage:
    """Patches, one after the other along the last axis."""
    side, rows, columns = config.vision_config.patch_size, 4 * grid[1], 4 * grid[2]
    sizes = torch.tensor([[rows, columns]], dtype=torch.int32)
    tensors = {"pixel_values": draw(1, 3, side, side * rows * columns), "target_sizes": sizes}
    return TiledImage(ids=_of_family(config, tensors), tensors=tensors)


def _masked_patches(config: Any, grid: Grid, draw: Draw, *, several: bool) -> TiledImage:
    """An image in the shape of the grid; with more than two cells, this is a thumbnail after two square tiles, each
    followed by a text token. All are padded to a common number of patches, with a mask."""
    factor, side = config.downsample_factor, 3 * config.vision_config.patch_size**2
    cells = [*[(2, 2)] * 2 * (grid[1] * grid[2] > 2), grid[1:]]
    shapes = factor * torch.tensor(cells)
    patches = shapes.prod(-1)
    mask = (torch.arange(int(patches.max()) + 3) < patches[:, None]).long()
    pixels = draw(*mask.shape, side) * mask[..., None]
    tensors = {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": shapes}
    return TiledImage(ids=_between(config, *[rows * columns for rows, columns in cells], mark=True), tensors=tensors)


def _views(config: Any, grid: Grid, draw: Draw, *, several: bool) -> TiledImage:
    """A whole image, and two tiles of half its side if the grid has several cells; without start and end tokens."""
    tiles, side = 2 * (grid[1] * grid[2] > 1), config.vision_config.sam_config.image_size
    tensors = {"pixel_values": draw(1, 3, side, side), "num_local_patches": torch.tensor([tiles])}
    if tiles:
        tensors["pixel_values_local"] = draw(tiles, 3, side // 2, side // 2)
    return TiledImage(ids=[config.image_token_id] * sum(_runs(config, tensors)), tensors=tensors)


def _frames_of_one_size(config: Any, grid: Grid, draw: Draw) -> TiledImage:
    """A video of two frames, whatever the grid: all videos of a call need the same number of frames."""
    side = config.vision_config.image_size
    tensors = {"pixel_values_videos": draw(1, 2, 3, side, side)}
    return TiledImage(ids=_of_video(config, tensors), tensors=tensors)


def _row_of_frames(config: Any, grid: Grid, draw: Draw) -> TiledImage:
    """Patches of all frames, one after the other along the last axis; each frame has the shape of the grid."""
    side, (frames, rows, columns) = config.vision_config.patch_size, (grid[0], 4 * grid[1], 4 * grid[2])
    sizes = torch.tensor([[rows, columns]] * frames, dtype=torch.int32)
    pixels = draw(1, 3, side, side * frames * rows * columns)
    tensors = {"pixel_values_videos": pixels, "target_sizes_videos": sizes}
    return TiledImage(ids=_of_video(config, tensors), tensors=tensors)


def _of_video(config: Any, tensors: dict[str, torch.Tensor]) -> list[int]:
    """Return the tokens of a video: runs of placeholders that the family's rule counts, each between start and end."""
    rule = family_named(config.model_type).video_tokens
    assert rule is not None
    start, end = config.vision_start_token_id, config.vision_end_token_id
    return [token for count in rule(tensors, config) for token in (start, *[config.video_token_id] * count, end)]


TILE_VIDEOS: dict[str, Callable[[Any, Grid, Draw], TiledImage]] = {
    "llava_onevision": _frames_of_one_size,
    "minicpmv4_6": _row_of_frames,
}
"""Rules for videos, by `config.model_type`."""

TILE_RULES: dict[str, TileRule] = {
    "internvl": _fixed_tiles,
    "llava": _fixed_image,
    "llava_next": _anyres,
    "llava_onevision": _anyres,
    "smolvlm": _marked_tiles,
    "idefics3": _marked_tiles,
    "mistral3": _rows_of_tokens,
    "minicpmv4_6": _row_of_patches,
    "lfm2_vl": _masked_patches,
    "deepseek_ocr2": _views,
    "cohere2_vision": _marked_squares,
    "aya_vision": _marked_squares,
    "llama4": _marked_squares,
    "gemma3": _crops,
    "gemma4": _padded_patches,
    "gemma4_unified": _merged_patches,
    "paligemma": _bare_image,
}
"""Rules for images, by `config.model_type`."""


def tiled_image(config: Any, grid: Grid, rng: torch.Generator, *, several: bool) -> TiledImage:
    """Make an image in the shape of a grid; `several`: its sample has several images."""
    return TILE_RULES[config.model_type](config, grid, _draws(rng), several=several)


def tiled_video(config: Any, grid: Grid, rng: torch.Generator) -> TiledImage:
    """Make a video in the shape of a grid."""
    return TILE_VIDEOS[config.model_type](config, grid, _draws(rng))


def _draws(rng: torch.Generator) -> Draw:
    return lambda *sizes: torch.randn(sizes, generator=rng)


# ---------------------------------------------------------------------- synthetic audio


def frames_of(config: Any) -> tuple[int, int]:
    """Return the smallest and largest number of frames of a synthetic audio: more than a chunk, so that no tower reads
    padding."""
    window = config.audio_config.n_window
    return 2 * window + 1, 5 * window


def audio_tokens(config: Any, frames: int, family: Family) -> list[int]:
    """Return the placeholders of an audio, between its start and end tokens."""
    assert family.audio is not None
    count = family.audio.tokens(frames, config.audio_config)
    return [config.audio_start_token_id, *[config.audio_token_id] * count, config.audio_end_token_id]


def audio_tensors(config: Any, frames: Sequence[int], rng: torch.Generator) -> dict[str, torch.Tensor]:
    """Draw log-mel frames, float32 [N, mel, F], with their mask, int64 [N, F]; padding frames are `UNREAD`."""
    mask = (torch.arange(max(frames))[None] < torch.tensor(frames)[:, None]).long()
    values = torch.randn(len(frames), config.audio_config.num_mel_bins, max(frames), generator=rng)
    return {"input_features": values.where(mask[:, None].bool(), UNREAD), "feature_attention_mask": mask}


def frames_in(sample: Sample) -> tuple[int, ...]:
    """Return the number of log-mel frames of each audio of a sample."""
    mask = sample.get("feature_attention_mask")
    return () if mask is None else tuple(mask.sum(1).tolist())


def noises(count: int) -> list[dict[str, Any]]:
    """Draw audios of noise as parts of messages: each longer than a second, all of different lengths."""
    rng = np.random.default_rng(0)
    lengths = (18_000 + 3_001 * at for at in range(count))
    return [{"type": "audio", "audio": rng.normal(scale=0.1, size=n).astype(np.float32)} for n in lengths]
