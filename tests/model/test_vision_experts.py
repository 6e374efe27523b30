"""Vision-language families whose text part has experts: counts by the choice of each router, experts of text and of
images, and what Kimi K2.5, DeepSeek-OCR 2 and ERNIE 4.5 VL bring with them beside."""

import functools
from typing import Any

import pytest
import torch
from equality import gradients
from moe import decoder_layers

from vlmpack.errors import FamilyError, LayoutError
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import SlotRule
from vlmpack.model import PackedStep, StepConfig, enable_packing
from vlmpack.model.mechanisms.experts import ExpertChoice
from vlmpack.testing import Sample, build_sample, mixed_samples, padded, tiny_model

KIMI, OCR, ERNIE = "kimi_k25", "deepseek_ocr2", "ernie4_5_vl_moe"
pytestmark = [
    pytest.mark.skipif(KIMI not in FAMILIES, reason="transformers of this version is older than these families")
]
KINDS = ("text", "image", "images", "text")
GAPS = SlotRule(multiple=8)


def fresh(family: str, **settings: Any) -> Any:
    return tiny_model(family, seed=3, **{"layers": 2, "experts": 8, **settings})


@functools.cache
def samples_of(family: str) -> list[Sample]:
    return mixed_samples(fresh(family).config, seed=5, kinds=KINDS, text=(2, 9), side=(1, 2))


def routers_of(layer: Any) -> list[Any]:
    blocks = (layer.mlp.text_moe, layer.mlp.vision_moe) if hasattr(layer.mlp, "text_moe") else (layer.mlp,)
    return [block.gate for block in blocks]


@pytest.mark.parametrize("family", [ERNIE, KIMI])
def test_counts_of_experts_are_what_the_routers_chose(family: str) -> None:
    """Also where the model without its head drops what routers gave, and where text and images have experts apart."""
    model, chosen = fresh(family), {}
    for number, layer in enumerate(decoder_layers(model)):
        chosen[number] = []
        for router in routers_of(layer):
            router.register_forward_hook(
                lambda router, args, output, number=number: chosen[number].append(output[2].flatten())
            )
    step = PackedStep(model, StepConfig(z_loss_coef=0.1, slots=GAPS))
    result = step(padded(samples_of(family)))
    counted = [torch.cat([x.bincount(minlength=8) for x in of_layer]).tolist() for of_layer in chosen.values()]
    assert result.expert_counts.tolist() == counted
    by_probability = [
        ExpertChoice().counts(x, model.config.text_config.num_experts_per_tok) for x in result.router_logits
    ]
    assert [x.tolist() for x in by_probability] != [x[:8] for x in counted], "no token chose by the bias"
    assert result.z_loss > 0


def test_choice_among_the_best_groups_is_that_of_a_router_of_deepseek_v2() -> None:
    model = fresh(OCR)
    gate = decoder_layers(model)[0].mlp.gate
    gate.topk_method, gate.num_group, gate.topk_group = "group_limited_greedy", 4, 1
    logits, _, chosen = gate(torch.randn(40, model.config.text_config.hidden_size))
    counts = ExpertChoice(groups=4, top_groups=1).counts(logits, gate.top_k)
    assert counts.tolist() == chosen.flatten().bincount(minlength=8).tolist()
    assert counts.tolist() != ExpertChoice().counts(logits, gate.top_k).tolist()
    model.config.text_config.n_group, model.config.text_config.topk_group = 4, 1
    result = PackedStep(model, StepConfig(z_loss_coef=0.1))(padded(samples_of(OCR)[:1]))
    assert [choice.groups for choice in result.routers.choices] == [4, 1]


def test_a_load_balancing_loss_is_that_of_the_padded_batch() -> None:
    model, batch = fresh(ERNIE), padded(samples_of(ERNIE))
    inputs = {name: value for name, value in batch.to_hf().items() if name != "vlmpack"}
    theirs = model(**inputs, output_router_logits=True)
    theirs.loss.backward()
    expected = gradients(model)
    enable_packing(model, StepConfig(slots=GAPS)).zero_grad()
    ours = model(**batch.to_hf(), output_router_logits=True)
    ours.loss.backward()
    assert torch.isclose(ours.aux_loss, theirs.aux_loss, rtol=1e-6)
    assert torch.isclose(ours.loss, theirs.loss, rtol=1e-6)
    found = gradients(model)
    assert expected.keys() == found.keys()
    assert all((found[name] - x).abs().max() <= 1e-5 * max(x.abs().max(), 1e-3) for name, x in expected.items())


def test_kinds_that_a_caller_gives_are_compared_with_the_ids() -> None:
    model = enable_packing(fresh(ERNIE))
    batch = padded(samples_of(ERNIE)).to_hf()
    name = "moe_mm_token_type_ids"
    on_padding = torch.where(batch["attention_mask"] == 0, 1, batch[name])
    assert model(**batch | {name: on_padding}).loss == model(**batch | {name: None}).loss
    with pytest.raises(LayoutError, match=f"{name} contradicts input_ids"):
        model(**batch | {name: batch["mm_token_type_ids"]})
    with pytest.raises(LayoutError, match=rf"{name} is .* but input_ids is \[4, \d+\]"):
        model(**batch | {name: batch[name][:2]})


@pytest.mark.parametrize(("patches", "queries"), [((1, 576), 144), ((1, 577), 256), ((5, 9), 144)])
def test_a_view_makes_as_many_tokens_as_its_features_have_queries(patches: tuple[int, int], queries: int) -> None:
    model = fresh(OCR, layers=1)
    side = model.config.vision_config.sam_config.patch_size
    pixels = torch.randn(1, 3, *(side * n for n in patches))
    tensors = {"pixel_values": pixels, "num_local_patches": torch.zeros(1, dtype=torch.int64)}
    rule = FAMILIES[OCR].tile_tokens
    assert rule is not None
    assert list(rule(tensors, model.config)) == [queries + 1]
    assert len(model.model.get_image_features(pixels).pooler_output[0]) == queries + 1


def test_tiles_are_those_of_their_images() -> None:
    model = fresh(OCR, layers=1)
    samples = [build_sample(model.config, stretches=[3, 4], image_grids=[grid]) for grid in ((1, 1, 1), (1, 2, 2))]
    batch = padded(samples).to_hf()
    del batch["vlmpack"]
    step = PackedStep(model)
    assert step(batch).work.vision_patches == 2 * 64 + 2 * 16
    with pytest.raises(LayoutError, match=r"sample 0 ends .* in the middle of image 0"):
        step(batch | {"num_local_patches": batch["num_local_patches"].flip(0)})
    with pytest.raises(LayoutError, match=r"2 images have 1 tiles in pixel_values_local, but num_local_patches counts"):
        step(batch | {"pixel_values_local": batch["pixel_values_local"][:1]})


def test_patches_that_are_merged_to_no_square_are_refused() -> None:
    model = fresh(KIMI)
    model.config.vision_config.merge_kernel_size = [1, 2]
    with pytest.raises(FamilyError, match="kimi_k25 merges 1 x 2 patches into one token"):
        PackedStep(model)(padded(samples_of(KIMI)))
