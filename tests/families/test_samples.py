"""The samples that all tests are built on are what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import KINDS, VISION, Kind, alone, kinds_of, metadata_of, mixed_samples, padded, random_sample

from vlmpack.families import FAMILIES
from vlmpack.families.tiny import tiny_config

every_family = pytest.mark.parametrize("name", sorted(FAMILIES))


@pytest.mark.parametrize("name", VISION)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_grids_and_pixels_of_a_sample_agree(name: str, kind: Kind) -> None:
    config = tiny_config(name, patch_size=4)
    for seed in range(5):
        sample = random_sample(config, kind, seed=seed)
        for modality, token, code in (("image", config.image_token_id, 1), ("video", config.video_token_id, 2)):
            grids = sample.get(f"{modality}_grid_thw", torch.zeros(0, 3, dtype=torch.int64))
            pixels = sample.get("pixel_values" if code == 1 else "pixel_values_videos", torch.zeros(0, 96))
            assert pixels.shape == (int(grids.prod(1).sum()), 96)
            assert int((sample["input_ids"] == token).sum()) * 4 == len(pixels)
            assert torch.equal(sample["input_ids"] == token, sample["mm_token_type_ids"] == code)
        media = sample["mm_token_type_ids"] != 0
        assert (sample["labels"][media] == -100).all()
        assert (sample["labels"][1:] != -100).any()
        assert media.any() == (kind != "text")


def test_the_same_seed_gives_the_same_sample() -> None:
    config = tiny_config("qwen2_5_vl", patch_size=4)
    first, again, other = (random_sample(config, "images_and_video", seed=seed) for seed in (3, 3, 4))
    assert set(first) == set(again)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(first[name].shape != other[name].shape or not torch.equal(first[name], other[name]) for name in first)


@every_family
def test_left_and_right_padding_hold_the_same_tokens(name: str) -> None:
    config = tiny_config(name, patch_size=4)
    samples = mixed_samples(config, kinds=kinds_of(config) * 2)
    left, right = padded(samples, "left"), padded(samples, "right")
    assert not torch.equal(left.attention_mask, right.attention_mask)
    for field in ("input_ids", "labels", *(("mm_token_type_ids",) if name in VISION else ())):
        tensors = (left.to_hf()[field][left.attention_mask.bool()], right.to_hf()[field][right.attention_mask.bool()])
        assert torch.equal(*tensors)
        assert torch.equal(tensors[0], torch.cat([sample[field] for sample in samples]))


def test_metadata_are_counted_from_the_samples() -> None:
    config: Any = tiny_config("qwen2_5_vl", patch_size=4)
    samples = mixed_samples(config, kinds=["images_and_video", "text", "image"])
    metadata = metadata_of(samples)
    assert metadata.images_per_sample == (1, 0, 1)
    assert metadata.videos_per_sample == (1, 0, 0)
    assert len(metadata.seconds_per_grid) == 1
    assert metadata.lengths == tuple(len(s["input_ids"]) for s in samples)
    assert metadata.num_targets == sum(int((alone(s)["labels"][0, 1:] != -100).sum()) for s in samples)
    assert padded(samples, metadata=False).metadata is None
