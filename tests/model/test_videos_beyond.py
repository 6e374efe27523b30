"""Videos of families beyond Qwen in rows with samples of every other kind: what is refused, and what is shared."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from cases import slow
from equality import alone_through

from vlmpack.errors import LayoutError
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import pack, share
from vlmpack.model import PackedStep, enable_packing
from vlmpack.testing import build_sample, joined, mixed_samples, padded, tiny_model
from vlmpack.testing.samples import kinds_of, sample_like

pytestmark = pytest.mark.skipif("llava_onevision" not in FAMILIES, reason="this transformers has other families")
GLM, TILES, PAIRS, NAVIT = "glm4v", "llava_onevision", "ernie4_5_vl_moe", "minicpmv4_6"
both = pytest.mark.parametrize("family", [GLM, TILES, *slow(PAIRS)])


def fresh(family: str) -> Any:
    return tiny_model(family, seed=3, layers=2)


@functools.cache
def truth(family: str) -> Any:
    model = fresh(family)
    wanted = ("text", "video", "image", "images_and_video", "video", "images")
    kinds: list[Any] = [kind for kind in wanted if kind in kinds_of(model.config)]
    return alone_through(model, mixed_samples(model.config, seed=5, kinds=kinds, text=(1, 6), side=(1, 2)))


@both
def test_videos_in_another_order_than_their_samples_are_seen_by_their_places(family: str) -> None:
    """(Of LLaVA-OneVision all videos of a call are as long: nobody can notice two that changed places.)"""
    model = enable_packing(fresh(family))
    batch = padded(truth(family).samples, metadata=False).to_hf()
    lost = batch | {"pixel_values_videos": batch["pixel_values_videos"][:-1]}
    if "video_grid_thw" in batch:
        lost |= {name: batch[name][:-1] for name in ("video_grid_thw",)}
        lost["pixel_values_videos"] = batch["pixel_values_videos"][: -int(batch["video_grid_thw"][-1].prod())]
    with pytest.raises(LayoutError, match=r"sample \d has .* video|sample \d has a run of"):
        model(**lost)
    bare = {name: x for name, x in batch.items() if name not in ("pixel_values_videos", "video_grid_thw")}
    with pytest.raises(LayoutError, match="video placeholders"):
        model(**bare)


@pytest.mark.parametrize("metadata", [True, False])
def test_a_sample_of_images_and_videos_with_one_placeholder_is_refused(metadata: bool) -> None:
    model = fresh(GLM)
    media = {"image_grids": [(1, 2, 2)], "video_grids": [(2, 2, 2)], "seconds": [1.0]}
    samples = [build_sample(model.config, stretches=[3]), build_sample(model.config, stretches=[1, 1, 1], **media)]
    with pytest.raises(LayoutError, match="sample 1 has images and videos, which glm4v writes with one placeholder"):
        PackedStep(model)(padded(samples, metadata=metadata))


def test_videos_that_samples_share_are_computed_once() -> None:
    model = fresh(GLM)
    video = build_sample(model.config, stretches=[3, 4], video_grids=[(2, 2, 2)], seconds=[1.0])
    image = build_sample(model.config, stretches=[2, 5], image_grids=[(1, 2, 4)])
    row = pack(padded([video, image, video, image]))
    shared = share(row, min_shared=1)
    assert shared.tree is not None
    assert (shared.tree.images, shared.tree.videos) == ((0,), (0,))
    found, expected = (PackedStep(model)(each, logits=True) for each in (shared, row))
    assert torch.allclose(found.row_logits, expected.row_logits, atol=1e-5)
    both = joined([video, image])
    with pytest.raises(LayoutError, match="sample 0 has images and videos, which glm4v writes with one placeholder"):
        PackedStep(model)(share(pack(padded([both, both])), min_shared=1))


@pytest.mark.parametrize("family", [NAVIT, *slow(TILES, PAIRS)])
def test_videos_of_other_forms_are_shared_with_their_own_patches(family: str) -> None:
    model = fresh(family)
    forms = ({"video_grids": [(2, 2, 4)]}, {"image_grids": [(1, 2, 2)]}, {"video_grids": [(4, 2, 2)]})
    once = [
        build_sample(model.config, stretches=[2, 6], seconds=[1.0] * ("video_grids" in form), seed=at, **form)
        for at, form in enumerate(forms)
    ]
    row = pack(padded([sample for sample in once for _ in range(2)]))
    shared = share(row, min_shared=1, read_media=FAMILIES[family].media_reader(model.config))
    found, expected, single = (PackedStep(model)(each, logits=True) for each in (shared, row, pack(padded(once))))
    assert torch.allclose(found.row_logits, expected.row_logits, atol=1e-5)
    assert found.work.vision_patches == single.work.vision_patches == expected.work.vision_patches // 2


def test_frames_of_which_the_model_makes_no_token_are_refused() -> None:
    model = fresh(PAIRS)
    sample = build_sample(model.config, stretches=[2, 3], video_grids=[(4, 2, 2)], seconds=[1.0])
    odd = {"video_grid_thw": torch.tensor([[3, 2, 2]]), "pixel_values_videos": sample["pixel_values_videos"][:12]}
    with pytest.raises(
        LayoutError, match="video 0: its grid has 3 frames, and the model makes a token of 2 each; repeat"
    ):
        PackedStep(model)(padded([sample_like(sample, {**sample, **odd})]))


def test_frames_of_another_size_than_the_tower_s_are_refused() -> None:
    batch = padded(truth(TILES).samples).to_hf()
    with pytest.raises(
        LayoutError, match=r"the model takes videos of equally many frames, \[videos, frames, 3, 24, 24\]"
    ):
        enable_packing(fresh(TILES))(**batch | {"pixel_values_videos": batch["pixel_values_videos"][..., :-1]})
