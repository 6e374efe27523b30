"""Random but reproducible samples for a tiny model: the raw material of the tests.

A sample is a dictionary of what one call of a Qwen processor gives for one conversation, without the batch axis:

    input_ids [L], labels [L] (not shifted, -100 on media and prompt), and but for text models
    mm_token_type_ids [L] (0 text, 1 image, 2 video); where there are any: pixel_values [P, C],
    image_grid_thw [N, 3], pixel_values_videos, video_grid_thw, second_per_grid_ts [N] (Qwen2.5-VL)

    samples = mixed_samples(config, seed=0)          # text only, one image, several images, ...
    batch = padded(samples, side="left")             # PaddedBatch
    reference = [model(**alone(s)) for s in samples]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from vlmpack.families import FAMILIES, family_named
from vlmpack.families.tiny_configs import MEDIA_TOKENS
from vlmpack.layout import Grid, HostMetadata, Media, PaddedBatch

Sample = dict[str, torch.Tensor]
Kind = Literal["text", "image", "images", "video", "images_and_video"]

KINDS: tuple[Kind, ...] = ("text", "image", "images", "video", "images_and_video")
VISION = tuple(name for name, family in FAMILIES.items() if family.has_vision)
TEXT_ONLY = tuple(name for name, family in FAMILIES.items() if not family.has_vision)
FIRST_TEXT_ID = 6
TOKEN_KEYS = ("input_ids", "mm_token_type_ids", "labels")
MEDIA_KEYS = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts")


def random_sample(
    config: Any,
    kind: Kind = "image",
    *,
    seed: int = 0,
    text: tuple[int, int] = (1, 9),
    side: tuple[int, int] = (1, 4),
    frames: tuple[int, int] = (2, 4),
) -> Sample:
    """One sample. `text`, `side` and `frames` are inclusive ranges of: tokens of each stretch of text, image sides in
    merged tokens, and video frames."""
    rng = torch.Generator().manual_seed(seed)
    merge = _merge(config)

    def pick(bounds: tuple[int, int]) -> int:
        return int(torch.randint(bounds[0], bounds[1] + 1, (), generator=rng))

    images = {"image": 1, "images": 2 + pick((0, 1)), "images_and_video": 1}.get(kind, 0)
    videos = {"video": 1, "images_and_video": 1}.get(kind, 0)
    image_grids = [(1, merge * pick(side), merge * pick(side)) for _ in range(images)]
    video_grids = [(pick(frames), merge * pick(side), merge * pick(side)) for _ in range(videos)]
    seconds = [pick((1, 9)) * 0.25 for _ in video_grids]
    stretches = [pick(text) for _ in range(images + videos + 1)]
    if kind == "text":
        stretches = [2 + 3 * stretches[0]]  # at least one target even if a stretch may be empty
    return build_sample(
        config, stretches=stretches, image_grids=image_grids, video_grids=video_grids, seconds=seconds, seed=seed
    )


def build_sample(
    config: Any,
    *,
    stretches: Sequence[int],
    image_grids: Sequence[Grid] = (),
    video_grids: Sequence[Grid] = (),
    seconds: Sequence[float] = (),
    videos_first: bool = False,
    seed: int = 0,
) -> Sample:
    """A sample of: text, image, text, image, ..., text, video, ..., text. Needs one stretch more than media.

    `videos_first` puts the videos before the images. Stretches may be of length 0. The first and the last one are
    labelled. So is the sample's very first token, which nothing predicts when the sample is alone: a row that forgets
    to mask it learns it from the sample before (and Hugging Face's own loss on a left-padded batch learns it from
    padding, so that loss is not a reference).
    """
    assert len(stretches) == len(image_grids) + len(video_grids) + 1
    merge = _merge(config)
    rng = torch.Generator().manual_seed(seed + 1)
    images = [_image(config, grid, merge) for grid in image_grids]
    videos = [_video(config, grid, merge) for grid in video_grids]
    media = videos + images if videos_first else images + videos
    ids: list[int] = []
    labelled: list[bool] = []
    for i, length in enumerate(stretches):
        words = torch.randint(FIRST_TEXT_ID, _text(config).vocab_size, (length,), generator=rng)
        words = torch.where(_is_special(config, words), FIRST_TEXT_ID, words)
        ids += words.tolist()
        labelled += [i in (0, len(stretches) - 1)] * length
        if i < len(media):
            ids += media[i]
            labelled += [False] * len(media[i])
    input_ids = torch.tensor(ids)
    sample = {"input_ids": input_ids, "labels": torch.where(torch.tensor(labelled), input_ids, -100)}
    if config.model_type in VISION:
        sample["mm_token_type_ids"] = family_named(config.model_type).media_types(input_ids, config)
    for name, pixels, grids in (
        ("image_grid_thw", "pixel_values", image_grids),
        ("video_grid_thw", "pixel_values_videos", video_grids),
    ):
        if grids:
            patches = sum(t * h * w for t, h, w in grids)
            sample[name] = torch.tensor(grids)
            sample[pixels] = torch.randn(patches, patch_channels(config), generator=rng)
    if video_grids and config.model_type == "qwen2_5_vl":
        sample["second_per_grid_ts"] = torch.tensor(seconds, dtype=torch.float32)
    return sample


def kinds_of(config: Any) -> tuple[Kind, ...]:
    """The kinds of samples that a model of this configuration takes."""
    return KINDS if config.model_type in VISION else ("text",)


def mixed_samples(config: Any, *, seed: int = 0, kinds: Sequence[Kind] | None = None, **ranges: Any) -> list[Sample]:
    """One sample of each kind given; None: four samples, with images if the model takes any."""
    if kinds is None:
        kinds = ("image", "text", "images", "image") if config.model_type in VISION else ("text",) * 4
    return [random_sample(config, kind, seed=1000 * seed + i, **ranges) for i, kind in enumerate(kinds)]


def padded(
    samples: Sequence[Sample], side: Literal["right", "left"] = "right", *, metadata: bool = True
) -> PaddedBatch:
    """The samples as one padded batch; `metadata=False` leaves out what a collator would know on the host."""
    lengths = [len(sample["input_ids"]) for sample in samples]
    width = max(lengths)
    offsets = [width - n if side == "left" else 0 for n in lengths]

    def stacked(name: str, fill: int) -> torch.Tensor:
        out = torch.full((len(samples), width), fill)
        for row, (sample, start, n) in enumerate(zip(samples, offsets, lengths, strict=True)):
            out[row, start : start + n] = sample[name]
        return out

    mask = torch.zeros(len(samples), width, dtype=torch.long)
    for row, (start, n) in enumerate(zip(offsets, lengths, strict=True)):
        mask[row, start : start + n] = 1
    return PaddedBatch(
        input_ids=stacked("input_ids", 0),
        attention_mask=mask,
        labels=stacked("labels", -100),
        mm_token_type_ids=stacked("mm_token_type_ids", 0) if "mm_token_type_ids" in samples[0] else None,
        media=_media(samples),
        metadata=metadata_of(samples, offsets=tuple(offsets)) if metadata else None,
    )


def alone(sample: Sample) -> dict[str, torch.Tensor]:
    """Keyword arguments of a Hugging Face model's forward for this sample on its own."""
    tokens = {name: sample[name][None] for name in TOKEN_KEYS if name in sample}
    return {**tokens, **{name: sample[name] for name in MEDIA_KEYS if name in sample}}


def metadata_of(samples: Sequence[Sample], *, offsets: tuple[int, ...] = ()) -> HostMetadata:
    """What a collator knows of these samples on the host."""
    seconds = [s for sample in samples if "second_per_grid_ts" in sample for s in sample["second_per_grid_ts"].tolist()]
    image_grids, video_grids = ([grids_of(sample, name) for sample in samples] for name in ("image", "video"))
    return HostMetadata(
        lengths=tuple(len(sample["input_ids"]) for sample in samples),
        offsets=offsets if any(offsets) else (),
        image_grids=tuple(grid for grids in image_grids for grid in grids),
        video_grids=tuple(grid for grids in video_grids for grid in grids),
        images_per_sample=tuple(len(grids) for grids in image_grids) if any(image_grids) else (),
        videos_per_sample=tuple(len(grids) for grids in video_grids) if any(video_grids) else (),
        seconds_per_grid=tuple(seconds),
        num_targets=sum(int((sample["labels"][1:] != -100).sum()) for sample in samples),
    )


def grids_of(sample: Sample, modality: Literal["image", "video"]) -> tuple[Grid, ...]:
    """The sample's grids as tuples of python ints."""
    name = f"{modality}_grid_thw"
    return tuple((t, h, w) for t, h, w in sample[name].tolist()) if name in sample else ()


def patch_channels(config: Any) -> int:
    """C of `pixel_values` [P, C]."""
    vision = config.vision_config
    return vision.in_channels * vision.temporal_patch_size * vision.patch_size**2


def _text(config: Any) -> Any:
    return family_named(config.model_type).text_config(config)


def _merge(config: Any) -> int:
    return family_named(config.model_type).merge(config)


def _image(config: Any, grid: Grid, merge: int) -> list[int]:
    t, h, w = grid
    tokens = [config.image_token_id] * (t * h * w // merge**2)
    return [config.vision_start_token_id, *tokens, config.vision_end_token_id]


def _video(config: Any, grid: Grid, merge: int) -> list[int]:
    """Qwen3-VL writes each frame on its own, after its time stamp; the older families write one run of tokens."""
    t, h, w = grid
    frame = [config.video_token_id] * (h * w // merge**2)
    start, end = config.vision_start_token_id, config.vision_end_token_id
    if not config.model_type.startswith(("qwen3", "qwen4")):
        return [start, *frame * t, end]
    stamp = [FIRST_TEXT_ID, FIRST_TEXT_ID + 1]
    return [token for _ in range(t) for token in (*stamp, start, *frame, end)]


def _is_special(config: Any, ids: torch.Tensor) -> torch.Tensor:
    names = [name for name in MEDIA_TOKENS if name in config.to_dict()]
    return torch.isin(ids, torch.tensor([config.to_dict()[name] for name in names]))


def _media(samples: Sequence[Sample]) -> Media:
    found = {name: [sample[name] for sample in samples if name in sample] for name in MEDIA_KEYS}
    return Media(**{name: torch.cat(tensors) for name, tensors in found.items() if tensors})
