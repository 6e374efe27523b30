"""What families with other images than Qwen's bring with them, each mechanism once: tiles, images of several sizes,
further tensors, towers that get boundaries from us, grids of other models, and videos
(packed equals alone: test_equality.py)."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import slow, slow_cases
from equality import alone_through, check_packed

from vlmpack.context_parallel import Parallel
from vlmpack.errors import ConfigError, FamilyError, LayoutError
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import SlotRule, pack, share
from vlmpack.layout.device import nothing_on_host
from vlmpack.model import PackedStep, enable_packing
from vlmpack.testing import build_sample, joined, mixed_samples, padded, tiny_model
from vlmpack.testing.samples import kinds_of, sample_like

MECHANISMS = {
    "internvl": "tiles, one run an image",
    "smolvlm": "tiles along the second axis, a run for each",
    "mistral3": "sizes of images, padding of pixels, boundaries",
    "minicpmv4_6": "patches along the last axis, gated delta layers",
    "lfm2_vl": "patches padded to a common number, with a mask; short convolutions",
    "paddleocr_vl": "patches of three axes, with grids",
}
MIXED = ("text", "image", "images", "text")
TILED = [name for name in MECHANISMS if name in FAMILIES and not FAMILIES[name].has_grids]


def fresh(family: str) -> Any:
    return tiny_model(family, seed=3, layers=2)


@functools.cache
def truth(family: str) -> Any:
    model = fresh(family)
    return alone_through(model, mixed_samples(model.config, seed=5, kinds=MIXED, text=(2, 9), side=(1, 2)))


# ---------------------------------------------------------------------- positions of the model's own code


@pytest.mark.parametrize("family", ["paddleocr_vl", "qwen2_5_omni_thinker", *slow("qwen3_vl", "glm4v")])
def test_positions_that_are_not_the_model_s_own_are_an_error_when_packing_is_enabled(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    enable_packing(fresh(family))
    model = fresh(family)
    own = model.model.get_rope_index
    monkeypatch.setattr(model.model, "get_rope_index", lambda *args, **media: (own(*args, **media)[0] + 1, None))
    with pytest.raises(FamilyError, match=rf"is at \[1, 1, 1\] .* but {family} is described with"):
        enable_packing(model)


# ---------------------------------------------------------------------- refused


def row_of(family: str, **changes: Any) -> dict[str, Any]:
    return padded(truth(family).samples).to_hf() | changes


@pytest.mark.parametrize("family", TILED)
def test_placeholders_without_pixels_are_refused(family: str) -> None:
    batch = row_of(family, vlmpack=None)
    without = {name: value for name, value in batch.items() if name not in FAMILIES[family].media}
    with pytest.raises(LayoutError, match=r"image placeholders, and its 0 images make 0 tokens"):
        PackedStep(fresh(family))(without)


def test_an_image_in_another_sample_than_its_placeholders_is_refused() -> None:
    """transformers counts placeholders and features of the whole batch only."""
    config = fresh("mistral3").config
    samples = [build_sample(config, stretches=[3, 4], image_grids=[grid]) for grid in ((1, 1, 2), (1, 3, 2))]
    batch, swapped = padded(samples).to_hf(), padded(samples[::-1]).to_hf()
    batch |= {name: swapped[name] for name in ("pixel_values", "image_sizes")}
    batch.pop("vlmpack")
    fresh("mistral3")(**batch)  # transformers accepts it
    with pytest.raises(LayoutError, match=r"sample 0 ends .* in the middle of image 0"):
        PackedStep(fresh("mistral3"))(batch)
    del batch["image_sizes"]
    with pytest.raises(LayoutError, match="the batch has pixel_values, but no 'image_sizes'"):
        PackedStep(fresh("mistral3"))(batch)


def test_metadata_of_other_images_are_refused() -> None:
    samples = truth("internvl").samples
    batch = padded(samples).to_hf()
    batch["pixel_values"] = batch["pixel_values"][:-1]
    with pytest.raises(LayoutError, match=r"the host metadata has images of .* tokens, but pixel_values"):
        PackedStep(fresh("internvl"))(batch)


@pytest.mark.parametrize("place", [nullcontext, nothing_on_host], ids=["host", "device"])
def test_other_sizes_than_those_of_the_metadata_are_refused(place: Any) -> None:
    row = pack(padded(truth("mistral3").samples))
    sizes = row.media.tensors["image_sizes"]
    media = replace(row.media, tensors={**row.media.tensors, "image_sizes": sizes.flip(0)})
    with place(), pytest.raises((LayoutError, RuntimeError), match="image_sizes is not what the host metadata"):
        PackedStep(fresh("mistral3"))(replace(row, media=media))


def test_placeholders_on_padding_are_refused() -> None:
    model = fresh("internvl")
    rule = SlotRule(row_multiple=997)
    row = pack(padded(truth("internvl").samples), rule=rule, pad_token_id=model.config.image_token_id)
    with pytest.raises(LayoutError, match=r"padding at place \d+: the host metadata has images"):
        PackedStep(model)(row)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.not_over_ranks])
def test_ranks_cannot_compute_images_together(family: str) -> None:
    with pytest.raises(ConfigError, match=f"images of {family} cannot be computed by several ranks .*, because its"):
        enable_packing(fresh(family), parallel=Parallel())
    found = Parallel()
    found.same_calls = False  # as `enable_packing` finds it on a model, and gets it when it is called again
    enable_packing(fresh(family), parallel=found)


def test_ranks_cannot_compute_images_together_where_the_model_completes_their_features(monkeypatch: Any) -> None:
    monkeypatch.setattr("vlmpack.model.enable.TRANSFORMERS", (5, 17))
    with pytest.raises(ConfigError, match=r"because its model completes their features .* transformers 5\.23"):
        enable_packing(fresh("llava_onevision"), parallel=Parallel())


@pytest.mark.parametrize("family", TILED)
def test_tensors_of_other_families_are_refused_by_name(family: str) -> None:
    grid = torch.tensor([[1, 2, 2]])
    with pytest.raises(ConfigError, match="takes no input 'image_grid_thw'"):
        PackedStep(fresh(family))(row_of(family, image_grid_thw=grid))


@pytest.mark.parametrize("family", ["paddleocr_vl", *slow("kimi_k25")])
def test_videos_are_refused_where_images_alone_are_taken(family: str) -> None:
    assert "video" not in kinds_of(fresh(family).config)
    patches = torch.zeros(4, *FAMILIES[family].patch_shape(fresh(family).config))
    videos = {"pixel_values_videos": patches, "video_grid_thw": torch.tensor([[1, 2, 2]]), "vlmpack": None}
    with pytest.raises(LayoutError, match=f"{family} takes no videos, but the batch has 1"):
        PackedStep(fresh(family))(row_of(family, **videos))


# ---------------------------------------------------------------------- circumstances of training


def images_of_many_sizes(config: Any) -> list[Any]:
    side = FAMILIES[config.model_type].merge(config) if FAMILIES[config.model_type].has_grids else 1
    grids = [(1, h * side, w * side) for h, w in ((1, 7), (6, 1), (4, 5), (2, 2), (1, 2))]
    samples = [build_sample(config, stretches=[0, 4], image_grids=[grid]) for grid in grids]
    return [*samples, build_sample(config, stretches=[2, 0, 3, 1], image_grids=grids[::2], seed=7)]


@pytest.mark.parametrize(
    ("family", "samples_in"),
    [
        ("internvl", images_of_many_sizes),
        *slow_cases(*((each, images_of_many_sizes) for each in MECHANISMS if each in {*FAMILIES} - {"internvl"})),
    ],
)
def test_these_batches_equal_alone_too(family: str, samples_in: Callable[[Any], list[Any]]) -> None:
    """A row, and a padded batch without metadata; parameters that alone get no gradient get none."""
    model = fresh(family)
    own = alone_through(model, samples_in(model.config))
    for given in ("row with gaps", "left padded without metadata"):
        check_packed(own, model, given=given)
    PackedStep(model)(padded(own.samples)).loss.backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == own.outcome.gradients.keys()


# ---------------------------------------------------------------------- videos

GLM, TILES, PAIRS = "glm4v", "llava_onevision", "ernie4_5_vl_moe"


def videos_of(family: str) -> list[Any]:
    config = fresh(family).config
    wanted = ("text", "video", "image", "images_and_video", "video", "images")
    kinds: list[Any] = [kind for kind in wanted if kind in kinds_of(config)]
    return mixed_samples(config, seed=5, kinds=kinds, text=(1, 6), side=(1, 2))


@pytest.mark.parametrize("family", [GLM, TILES, *slow(PAIRS)])
def test_videos_in_another_order_than_their_samples_are_seen_by_their_places(family: str) -> None:
    model = enable_packing(fresh(family))
    batch = padded(videos_of(family), metadata=False).to_hf()
    lost = batch | {"pixel_values_videos": batch["pixel_values_videos"][:-1]}
    if "video_grid_thw" in batch:
        lost |= {name: batch[name][:-1] for name in ("video_grid_thw",)}
        lost["pixel_values_videos"] = batch["pixel_values_videos"][: -int(batch["video_grid_thw"][-1].prod())]
    with pytest.raises(LayoutError, match=r"sample \d has .* video|sample \d has a run of"):
        model(**lost)
    bare = {name: x for name, x in batch.items() if name not in ("pixel_values_videos", "video_grid_thw")}
    with pytest.raises(LayoutError, match="video placeholders"):
        model(**bare)


def test_videos_that_samples_share_are_computed_once() -> None:
    model = fresh(GLM)
    video = build_sample(model.config, stretches=[3, 4], video_grids=[(2, 2, 2)], seconds=[1.0])
    image = build_sample(model.config, stretches=[2, 5], image_grids=[(1, 2, 4)])
    row = pack(padded([video, image, video, image]))
    shared = share(row, min_shared=1)
    assert shared.tree is not None
    assert [at.tolist() for at in shared.known_metadata.media.chosen(shared.tree).values()] == [[0], [0], []]
    found, expected = (PackedStep(model)(each, logits=True) for each in (shared, row))
    assert torch.allclose(found.row_logits, expected.row_logits, atol=1e-5)
    both = joined([video, image])
    with pytest.raises(LayoutError, match="sample 0 has images and videos, which glm4v writes with one placeholder"):
        PackedStep(model)(share(pack(padded([both, both])), min_shared=1))


def test_frames_of_which_the_model_makes_no_token_are_refused() -> None:
    model = fresh(PAIRS)
    sample = build_sample(model.config, stretches=[2, 3], video_grids=[(4, 2, 2)], seconds=[1.0])
    odd = {"video_grid_thw": torch.tensor([[3, 2, 2]]), "pixel_values_videos": sample["pixel_values_videos"][:12]}
    with pytest.raises(
        LayoutError, match="video 0: its grid has 3 frames, and the model makes a token of 2 each; repeat"
    ):
        PackedStep(model)(padded([sample_like(sample, {**sample, **odd})]))


def test_frames_of_another_size_than_the_tower_s_are_refused() -> None:
    batch = padded(videos_of(TILES)).to_hf()
    with pytest.raises(LayoutError, match=r"the model takes \[videos, frames, 3, 24, 24\]"):
        enable_packing(fresh(TILES))(**batch | {"pixel_values_videos": batch["pixel_values_videos"][..., :-1]})
