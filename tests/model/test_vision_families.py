"""What families with other images than Qwen's bring with them, each mechanism once: tiles, images of several sizes,
further tensors, towers that get boundaries from us, grids of other models. In the full tier each family once, whole."""

from __future__ import annotations

import copy
import functools
import pickle
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import (
    Alone,
    alone_through,
    check_gradients,
    check_low_precision,
    check_outputs,
    check_work,
    gradients,
    limits_of,
    poisoned,
)
from tiers import full, only_exhaustive, other_vision, tiers

from vlmpack.context_parallel import Parallel
from vlmpack.errors import ConfigError, FamilyError, LayoutError
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import Segments, SlotRule, pack, share, unshare
from vlmpack.layout.device import nothing_on_host
from vlmpack.model import PackedStep, StepConfig, disable_packing, enable_packing
from vlmpack.model.mechanisms.vision import VisionRow
from vlmpack.probing import probe
from vlmpack.testing import build_sample, mixed_samples, padded, tiny_model
from vlmpack.testing.comparison import compare, run_alone
from vlmpack.testing.samples import kinds_of, sample_like

pytestmark = [
    pytest.mark.every_family,
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
]
MECHANISMS = {
    "internvl": "tiles, one run an image",
    "smolvlm": "tiles along the second axis, a run for each",
    "mistral3": "sizes of images, padding of pixels, boundaries",
    "minicpmv4_6": "patches along the last axis, gated delta layers",
    "lfm2_vl": "patches padded to a common number, with a mask; short convolutions",
    "paddleocr_vl": "patches of three axes, with grids",
}
OTHERS = sorted(other_vision() - MECHANISMS.keys())
each_family = pytest.mark.parametrize("family", [*MECHANISMS, *full(*OTHERS)])
MIXED = ("text", "image", "images", "text")
TILED = [name for name in MECHANISMS if name in FAMILIES and not FAMILIES[name].has_grids]


def fresh(family: str) -> Any:
    return tiny_model(family, seed=3, layers=2)


@functools.cache
def truth(family: str) -> Any:
    model = fresh(family)
    return alone_through(model, mixed_samples(model.config, seed=5, kinds=MIXED, text=(2, 9), side=(1, 2)))


def packed(family: str, backend: str = "auto", inputs: Any = None, *, multiple: int = 8) -> Any:
    """One step on a row with poison in its gaps, with checkpointing, compared with its samples alone."""
    own, limits, model = truth(family), limits_of(family), fresh(family)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    row = pack(padded(own.samples), rule=SlotRule(multiple=multiple), pad_token_id=17)
    step = PackedStep(model, StepConfig(attention=backend, slots=SlotRule(multiple=multiple)))
    with poisoned(model, row.segments):
        result = step(row if inputs is None else inputs, logits=True)
        result.loss.backward()
    check_outputs(own, result, limits)
    check_gradients(own, gradients(model), limits)
    check_work(own, result, multiple, model.config)
    return result


@each_family
def test_packed_equals_alone(family: str) -> None:
    result, pixels = packed(family), truth(family).samples
    assert any(name.startswith(f"{FAMILIES[family].vision_path}.") for name in truth(family).gradients)
    values = sum(sample["pixel_values"].numel() for sample in pixels if "pixel_values" in sample)
    assert 0 < result.work.vision_patches <= values


@pytest.mark.full
@each_family
@pytest.mark.parametrize("metadata", [True, False])
def test_a_padded_batch_with_and_without_metadata_equals_alone(family: str, metadata: bool) -> None:
    packed(family, inputs=padded(truth(family).samples, "left", metadata=metadata).to_hf())


@pytest.mark.full
@each_family
def test_adapters_of_a_row_learn_what_those_of_its_samples_alone_do(family: str) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        config = peft.LoraConfig(
            r=2,
            target_modules=r".*(language_model|text_model)(.model)?.layers.*q(_b)?_proj",
            init_lora_weights=False,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return peft.get_peft_model(fresh(family), config)

    samples, plain, model = truth(family).samples, adapted(), adapted()
    own = alone_through(plain, samples)
    result = PackedStep(model)(padded(samples), logits=True)
    result.loss.backward()
    assert own.gradients.keys()
    assert all("lora" in name for name in own.gradients)
    check_outputs(own, result, limits_of(family))
    check_gradients(own, gradients(model), limits_of(family))


@pytest.mark.parametrize("family", [*MECHANISMS, *full(*OTHERS)])
def test_generation_is_that_of_the_unmodified_model(family: str) -> None:
    model = fresh(family).eval()
    batch = padded(truth(family).samples[1:2], metadata=False).to_hf()
    del batch["labels"]
    call = {**batch, "max_new_tokens": 4, "do_sample": False}
    plain = model.generate(**call)
    assert torch.equal(enable_packing(model).generate(**call), plain)
    assert torch.equal(disable_packing(model).generate(**call), plain)


# ---------------------------------------------------------------------- the probe, and what the comparison sees


PROBED = ("gemma4", "llava_next", "minicpmv4_6")
"""In the full tier one of each kind: spans and experts, tiles, gated delta layers."""


@pytest.mark.full
@pytest.mark.parametrize("family", tiers([*MECHANISMS, *OTHERS], PROBED, exhaustive=[*MECHANISMS, *OTHERS]))
def test_the_probe_finds_every_family_exact(family: str) -> None:
    report = probe(tiny_model(family, layers=2))
    assert report.verdict == "exact", [check for check in report.checks if check.is_bad]
    assert any(check.name == "vision" for check in report.checks)


@pytest.mark.full
def test_the_probe_names_the_tower_where_images_attend_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VisionRow, "find", lambda self, cu, patches: Segments.from_lengths([patches]))
    report = probe(tiny_model("mistral3", layers=2), plain=False)
    assert report.verdict != "exact"
    assert "vision" in {check.name for check in report.checks if check.is_bad}


def test_the_comparison_sees_images_that_attend_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in ("mistral3", "minicpmv4_6"):
        truth(family)
        monkeypatch.setattr(VisionRow, "find", lambda self, cu, patches: Segments.from_lengths([patches]))
        with pytest.raises(AssertionError):
            packed(family)


def test_boundaries_of_towers_are_known_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no block reads them from a device."""

    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("boundaries were read from a tensor")

    for family in ("mistral3", "minicpmv4_6", "paddleocr_vl"):
        step, samples = PackedStep(fresh(family)), truth(family).samples
        row = pack(padded(samples))
        with monkeypatch.context() as patched:
            patched.setattr(Segments, "from_boundaries", read)
            step(row)


BLOCKS = [name for name, family in FAMILIES.items() if family.blocks_path != "blocks"]


@pytest.mark.parametrize("family", ["qwen3_vl", *BLOCKS])
def test_the_blocks_of_a_tower_are_found(family: str) -> None:
    model = tiny_model(family, layers=1, vision_depth=3)
    blocks = FAMILIES[family].vision_blocks(model)
    assert len(blocks) == 3
    assert len({type(block) for block in blocks}) == 1


# ---------------------------------------------------------------------- positions of the model's own code


@pytest.mark.parametrize("family", ["paddleocr_vl", *full("qwen2_5_vl", "qwen3_vl", "glm4v")])
def test_positions_that_are_not_the_model_s_own_are_an_error_when_packing_is_enabled(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    enable_packing(fresh(family))
    model = fresh(family)
    own = model.model.get_rope_index
    monkeypatch.setattr(model.model, "get_rope_index", lambda *args, **media: (own(*args, **media)[0] + 1, None))
    with pytest.raises(
        FamilyError, match=rf"token 0 of a sample .* is at \[1, 1, 1\] .* but {family} is described with"
    ):
        enable_packing(model)


# ---------------------------------------------------------------------- refused


def row_of(family: str, **changes: Any) -> dict[str, Any]:
    return padded(truth(family).samples).to_hf() | changes


@pytest.mark.parametrize("family", TILED)
def test_placeholders_without_pixels_are_refused(family: str) -> None:
    batch = row_of(family, vlmpack=None)
    without = {name: value for name, value in batch.items() if name not in FAMILIES[family].media}
    with pytest.raises(LayoutError, match=r"image placeholders, but its 0 images or tiles make 0 tokens"):
        PackedStep(fresh(family))(without)


def test_an_image_in_another_sample_than_its_placeholders_is_refused() -> None:
    """transformers counts placeholders and features of the whole batch only."""
    config = fresh("mistral3").config
    samples = [build_sample(config, stretches=[3, 4], image_grids=[grid]) for grid in ((1, 1, 2), (1, 3, 2))]
    batch, swapped = padded(samples).to_hf(), padded(samples[::-1]).to_hf()
    batch |= {name: swapped[name] for name in ("pixel_values", "image_sizes")}
    batch.pop("vlmpack")
    fresh("mistral3")(**batch)  # transformers accepts it
    with pytest.raises(LayoutError, match=r"sample 0 ends in the middle of an image"):
        PackedStep(fresh("mistral3"))(batch)


def test_metadata_of_other_images_are_refused() -> None:
    samples = truth("internvl").samples
    batch = padded(samples).to_hf()
    batch["pixel_values"] = batch["pixel_values"][:-1]
    with pytest.raises(LayoutError, match=r"the host metadata counts \d+ tokens of \d+ images, but pixel_values"):
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
    row = pack(padded(truth("internvl").samples), rule=SlotRule(multiple=64), pad_token_id=model.config.image_token_id)
    with pytest.raises(LayoutError, match=r"padding of the row has \d+ image placeholders"):
        PackedStep(model)(row)


@pytest.mark.parametrize("family", MECHANISMS)
def test_ranks_cannot_compute_images_together(family: str) -> None:
    with pytest.raises(ConfigError, match=rf"the images of {family} cannot be computed by several ranks together"):
        enable_packing(fresh(family), parallel=Parallel())


@pytest.mark.parametrize("family", TILED)
def test_prefixes_with_images_are_shared_with_the_family_alone(family: str) -> None:
    image, config = truth(family).samples[1], fresh(family).config
    row = pack(padded([image, sample_like(image, dict(image))]))
    units = FAMILIES[family].media_units(config)
    shared = share(row, units=units, min_shared=1)
    assert shared.tree is not None
    assert shared.tree.num_tokens == len(image["input_ids"])
    for name, tensor in unshare(shared, units=units).media.to_hf().items():
        assert torch.equal(tensor, row.media.to_hf()[name])
    with pytest.raises(LayoutError, match=r"media of this row are not images .*media_units\(model.config\)"):
        share(row)


@pytest.mark.parametrize("family", TILED)
def test_tensors_of_other_families_are_refused_by_name(family: str) -> None:
    grid = torch.tensor([[1, 2, 2]])
    with pytest.raises(ConfigError, match="takes no input 'image_grid_thw'"):
        PackedStep(fresh(family))(row_of(family, image_grid_thw=grid))


@pytest.mark.parametrize("family", ["paddleocr_vl", *full("kimi_k25")])
def test_videos_are_refused_where_images_alone_are_taken(family: str) -> None:
    assert "video" not in kinds_of(fresh(family).config)
    patches = torch.zeros(4, *FAMILIES[family].patch_shape(fresh(family).config))
    videos = {"pixel_values_videos": patches, "video_grid_thw": torch.tensor([[1, 2, 2]]), "vlmpack": None}
    with pytest.raises(LayoutError, match=f"{family} takes no videos, but the batch has 1"):
        PackedStep(fresh(family))(row_of(family, **videos))


# ---------------------------------------------------------------------- circumstances of training

most_exhaustive = pytest.mark.parametrize(
    "family", [*full("internvl"), *only_exhaustive(*sorted(other_vision() - {"internvl"}))]
)
CIRCUMSTANCES = ("one sample", "no images", "images of many sizes", "a sample without labels", "a frozen tower")


def samples_in(circumstance: str, config: Any) -> list[Any]:
    """The samples of one circumstance."""
    if circumstance == "one sample":
        return mixed_samples(config, seed=3, kinds=("images",), side=(1, 2))
    if circumstance == "no images":
        return mixed_samples(config, seed=3, kinds=("text", "text"))
    if circumstance == "images of many sizes":
        side = FAMILIES[config.model_type].merge(config) if FAMILIES[config.model_type].has_grids else 1
        forms = ((1, 7), (6, 1), (4, 5), (2, 2), (1, 2))
        samples = [build_sample(config, stretches=[0, 4], image_grids=[(1, h * side, w * side)]) for h, w in forms]
        several = [(1, h * side, w * side) for h, w in forms[::2]]
        return [*samples, build_sample(config, stretches=[2, 0, 3, 1], image_grids=several, seed=7)]
    samples = mixed_samples(config, seed=3, kinds=("image", "text", "images"), side=(1, 2))
    if circumstance == "a sample without labels":
        samples[2] = sample_like(samples[2], {**samples[2], "labels": torch.full_like(samples[2]["labels"], -100)})
    return samples


@pytest.mark.parametrize("circumstance", CIRCUMSTANCES)
@most_exhaustive
def test_a_batch_in_every_circumstance_equals_alone(family: str, circumstance: str) -> None:
    """A row, and a padded batch without metadata; parameters that alone get no gradient get none."""
    model, limits = fresh(family), limits_of(family)
    if circumstance == "a frozen tower":
        model.get_submodule(FAMILIES[family].vision_path).requires_grad_(False)
    own = alone_through(model, samples_in(circumstance, model.config))
    row = pack(padded(own.samples), rule=SlotRule(multiple=8), pad_token_id=17)
    for inputs in (row, padded(own.samples, "left", metadata=False).to_hf()):
        result = PackedStep(model)(inputs, logits=True)
        result.loss.backward()
        check_outputs(own, result, limits)
        check_gradients(own, gradients(model), limits)
        assert {name for name, p in model.named_parameters() if p.grad is not None} == own.outcome.gradients.keys()
        model.zero_grad()


@most_exhaustive
def test_targets_that_were_counted_before_divide_the_loss(family: str) -> None:
    """Trainer counts those of all micro-batches of a step, here more than this batch has."""
    model = fresh(family)
    samples = [sample_like(x, {**x, "labels": x["labels"].clone()}) for x in truth(family).samples]
    for sample in samples:
        sample["labels"][0] = -100
    own = alone_through(model, samples)
    targets = sum(int((x["labels"][1:] != -100).sum()) for x in samples)
    enable_packing(model)
    for inputs in (padded(samples, "left", metadata=False), pack(padded(samples), rule=SlotRule(multiple=8))):
        model.zero_grad()
        loss = model(**inputs.to_hf(), num_items_in_batch=torch.tensor(53)).loss
        (loss * 53 / targets).backward()
        assert loss.item() * 53 / targets == pytest.approx(own.outcome.loss, rel=2e-6)
        check_gradients(own, gradients(model), limits_of(family))


@most_exhaustive
def test_under_autocast_a_row_is_as_close_to_float32_as_alone(family: str) -> None:
    autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    own, model = truth(family), fresh(family)
    plain = Alone(samples=own.samples, outcome=run_alone(model, own.samples, forward_context=autocast))
    with autocast():
        result = PackedStep(model)(pack(padded(own.samples), rule=SlotRule(multiple=8)), logits=True)
    result.loss.backward()
    check_low_precision(own, plain, result, gradients(model))


@most_exhaustive
def test_copies_of_an_enabled_model_pack_and_can_be_disabled(family: str, tmp_path: Path) -> None:
    """Copied, pickled, or saved and loaded: each computes the row as the model does, and disabled it is plain again."""
    own, model = truth(family), enable_packing(fresh(family))
    model.save_pretrained(tmp_path)
    loaded = enable_packing(type(fresh(family)).from_pretrained(tmp_path).train())
    row = pack(padded(own.samples), rule=SlotRule(multiple=8))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        result = PackedStep(copied)(row, logits=True)
        result.loss.backward()
        check_outputs(own, result, limits_of(family))
        check_gradients(own, gradients(copied), limits_of(family))
        copied.zero_grad()
        again = alone_through(disable_packing(copied), own.samples)
        check = replace(own.outcome, gradients={})
        assert compare(replace(again.outcome, gradients={}), check).logits <= limits_of(family).logits
        assert {name: type(part) for name, part in copied.named_modules()} == {
            name: type(part) for name, part in fresh(family).named_modules()
        }


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")  # of experts
@most_exhaustive
@pytest.mark.parametrize("saved", [["lm_head"], ["lm_head", "embed_tokens"]], ids="-".join)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_adapters_on_every_layer_learn_what_those_of_samples_alone_do(
    family: str, saved: list[str], checkpointed: bool
) -> None:
    """On all linear layers, the tower's too, with whole parts that are trained beside them."""
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        model = fresh(family)
        linear = [name for name, part in model.named_modules() if type(part) is torch.nn.Linear]  # routers return pairs
        layers = [name for name in linear if not name.endswith("lm_head")]
        config = peft.LoraConfig(
            r=2, lora_alpha=1, target_modules=layers, modules_to_save=saved, init_lora_weights=False
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return peft.get_peft_model(model, config)

    own, model = alone_through(adapted(), truth(family).samples), adapted()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    result = PackedStep(model)(pack(padded(own.samples), rule=SlotRule(multiple=8)), logits=True)
    result.loss.backward()
    check_outputs(own, result, limits_of(family))
    # gradients of small adapters are rounded more: twice what GLM-4V's make of it alone, against float64
    check_gradients(own, gradients(model), replace(limits_of(family), gradient=4e-5))
    assert any(f"{FAMILIES[family].vision_path}." in name for name in own.gradients)
    assert any("modules_to_save" in name for name in own.gradients)
