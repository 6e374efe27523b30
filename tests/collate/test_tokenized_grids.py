"""Tokenized samples of families beyond Qwen whose media are patches with grids: images, and videos of GLM-4V."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import slow
from fixtures.processors import tiny_model, tiny_processor

from vlmpack.collate import VLMCollator
from vlmpack.errors import SampleError
from vlmpack.families.registry import FAMILIES
from vlmpack.lengths import measure_lengths
from vlmpack.testing import build_sample, mixed_samples, padded

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # transformers' own
]
GRIDS = [name for name in ("glm4v", "ernie4_5_vl_moe", "glm46v", "glm4v_moe", "paddleocr_vl") if name in FAMILIES]


@functools.cache
def config_of(family: str) -> Any:
    return tiny_model(family, processor=tiny_processor(family), layers=1).config


def feature_of(sample: Any) -> dict[str, Any]:
    """What a person's own processing stores: lists of ids and labels, tensors of media."""
    kept = {name: value for name, value in sample.items() if name != "moe_mm_token_type_ids"}  # made of ids
    return {name: value.tolist() if name in ("input_ids", "labels") else value for name, value in kept.items()}


@pytest.mark.parametrize("family", [*GRIDS[:2], *slow(*GRIDS[2:])])
def test_tokenized_samples_are_joined_as_they_are(family: str) -> None:
    videos = ("video", "video") if FAMILIES[family].has_videos else ()
    samples = mixed_samples(config_of(family), seed=3, kinds=("image", "text", "images", *videos))
    features, collator = [*map(feature_of, samples)], VLMCollator(tiny_processor(family))
    batch, expected = collator.collate(features), padded(samples)
    assert expected.metadata is not None
    real = expected.attention_mask.bool()
    assert torch.equal(batch.input_ids[real], expected.input_ids[real])
    assert batch.metadata == replace(expected.metadata, sample_ids=tuple(range(len(samples))))
    ours, theirs = batch.to_hf(), expected.to_hf()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if isinstance(tensor, torch.Tensor) and name not in ("input_ids", "labels"):
            assert torch.equal(ours[name], tensor), name
    assert torch.equal(ours["labels"][:, 1:], theirs["labels"][:, 1:])
    table = measure_lengths(features, collator)
    assert [*table.tokens] == [len(sample["input_ids"]) for sample in samples]
    measured = [collator.measure(feature) for feature in features]
    assert collator.decode(measured).metadata == batch.metadata


CLIP = {"video_grids": [(2, 2, 4)], "seconds": [1.0]}


def refused(feature: dict[str, Any]) -> SampleError:
    with pytest.raises(SampleError, match="sample 0") as caught:
        VLMCollator(tiny_processor("glm4v")).collate([feature])
    return caught.value


@pytest.mark.skipif("ernie4_5_vl_moe" not in FAMILIES, reason="this transformers has no ERNIE 4.5 VL")
def test_kinds_of_tokens_for_experts_are_made_of_the_ids() -> None:
    name, collator = "moe_mm_token_type_ids", VLMCollator(tiny_processor("ernie4_5_vl_moe"))
    sample = build_sample(config_of("ernie4_5_vl_moe"), stretches=[3, 2], image_grids=[(1, 2, 4)])
    kinds = sample[name].tolist()
    feature = feature_of(sample) | {name: kinds}
    assert {0, 1} == {*kinds}
    assert collator.collate([feature]).extras[name].tolist() == [kinds]  # without a warning, which is an error here
    padded_left = {**feature, "attention_mask": [0, *[1] * len(kinds)], "labels": [-100, *feature["labels"]]}
    padded_left |= {column: [0, *feature[column]] for column in ("input_ids", name)}
    padded_left.pop("mm_token_type_ids", None)
    assert collator.collate([padded_left]).extras[name].tolist() == [kinds]
    assert collator.collate([feature | {name: [1 - kind for kind in kinds]}]).extras[name].tolist() == [kinds]


def test_a_sample_of_images_and_videos_is_refused() -> None:
    sample = build_sample(config_of("glm4v"), stretches=[2, 2, 2], image_grids=[(1, 2, 2)], **CLIP)
    error = refused(feature_of(sample))
    assert error.reason == "ambiguous_media"
    assert "it has 1 image(s) and 1 video(s), but its model takes one kind" in str(error)


def test_videos_whose_frames_are_not_those_of_their_tokens_are_refused() -> None:
    feature = feature_of(build_sample(config_of("glm4v"), stretches=[2, 2], **CLIP))
    longer = feature | {"video_grid_thw": torch.tensor([[1, 4, 4]])}
    assert refused(longer).reason == "video_token_mismatch"
    lost = {name: value for name, value in feature.items() if name != "video_grid_thw"}
    assert refused(lost).reason == "pixel_shape"
    as_image = feature | {"image_grid_thw": torch.tensor([[2, 2, 4]]), "pixel_values": feature["pixel_values_videos"]}
    del as_image["video_grid_thw"], as_image["pixel_values_videos"]
    assert refused(as_image).reason == "pixels_without_image_tokens"
    bare = {name: feature[name] for name in ("input_ids", "labels")}
    assert refused(bare).reason == "video_tokens_without_pixels"


def test_frames_that_are_left_over_are_refused() -> None:
    sample = feature_of(build_sample(config_of("ernie4_5_vl_moe"), stretches=[2, 2], **CLIP))
    odd = {"video_grid_thw": torch.tensor([[1, 2, 4]]), "pixel_values_videos": sample["pixel_values_videos"][:8]}
    with pytest.raises(SampleError, match="a video has 1 frames, no multiple of 2") as caught:
        VLMCollator(tiny_processor("ernie4_5_vl_moe")).collate([sample | odd])
    assert caught.value.reason == "bad_grid"
