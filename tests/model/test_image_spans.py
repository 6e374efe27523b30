"""Image tokens that see later ones of their image, in the layers and windows of the model's own code. (Packed
equals alone: `test_equality.py`.)"""

import functools
from typing import Any

import pytest
import torch
from equality import alone_through, check_outputs, check_packed, limits_of
from parts import parts_of
from transformers.models.gemma3 import modeling_gemma3

from vlmpack.errors import FamilyError, LayoutError
from vlmpack.families.registry import FAMILIES
from vlmpack.families.spans import ImageSpans, Prefix, media_runs
from vlmpack.layout import PackedRow, Segments, SlotRule, pack
from vlmpack.layout.media import MediaTable, Medium
from vlmpack.model import PackedStep, enable_packing
from vlmpack.model.mechanisms.attention import layer_masks
from vlmpack.model.mechanisms.upstream import check_spans
from vlmpack.testing import mixed_samples, padded, tiny_model
from vlmpack.testing.samples import sample_like


def fresh(family: str, **sizes: Any) -> Any:
    return tiny_model(family, seed=3, **{"layers": 2, **sizes})


@functools.cache
def truth(family: str) -> Any:
    model = fresh(family)
    return alone_through(model, mixed_samples(model.config, seed=5, kinds=("image", "text", "image"), side=(2, 3)))


def test_images_without_text_between_are_one_run_as_in_the_models_own_code() -> None:
    model = fresh("gemma3")
    (sample,) = mixed_samples(model.config, seed=5, kinds=("images",))
    ids = sample["input_ids"]
    is_between = (ids == model.config.boi_token_index) | (ids == model.config.eoi_token_index)
    kept = ~is_between
    joined = sample_like(sample, {n: x[kept] if len(x) == len(ids) else x for n, x in sample.items()})
    joined["input_ids"] = torch.cat([ids[:1], joined["input_ids"][joined["token_type_ids"] == 1], ids[-2:]])
    joined["token_type_ids"] = (joined["input_ids"] == model.config.image_token_id).long()
    joined["labels"] = joined["input_ids"].clone()
    assert len(media_runs(joined["token_type_ids"].numpy())) == 1 < len(sample["pixel_values"])
    own = alone_through(model, [joined, *truth("gemma3").samples[1:]])
    check_packed(own, fresh("gemma3"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
def test_layers_that_share_keys_and_values_and_checkpointing() -> None:
    model = fresh("gemma4", layers=4)
    assert model.config.text_config.kv_sharing_modes[2:] == ["reuse", "reuse"]
    own = alone_through(model, truth("gemma4").samples)
    checkpointed = fresh("gemma4", layers=4)
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    check_packed(own, checkpointed)


def test_a_gemma_4_without_spans_has_none() -> None:
    model = fresh("gemma4")
    model.config.text_config.use_bidirectional_attention = None
    assert parts_of(model).family.bidirectional_tokens(model.config) is None
    own = alone_through(model, truth("gemma4").samples)
    again = fresh("gemma4")
    again.config.text_config.use_bidirectional_attention = None
    row = pack(padded(own.samples))
    result = PackedStep(again)(row, logits=True)
    check_outputs(own, result, limits_of("gemma4"))
    assert result.work.attended_pairs == row.segments.attended_pairs


IMAGES = [None, ImageSpans(), ImageSpans(layers="sliding"), ImageSpans(beyond_window=True)]
WRONG = {
    "gemma3": [wrong for wrong in IMAGES if wrong != ImageSpans()],
    "gemma4": [wrong for wrong in IMAGES if wrong != ImageSpans(layers="sliding")],
    "paligemma": [None, ImageSpans(), Prefix(beyond_window=False)],
}


@pytest.mark.parametrize(("family", "wrong"), [(family, wrong) for family in WRONG for wrong in WRONG[family]])
def test_a_descriptor_with_other_spans_than_the_models_own_masks_is_refused(family: str, wrong: Any) -> None:
    parts = parts_of(fresh(family))
    windows = layer_masks(parts)
    check_spans(parts, windows, parts.family.bidirectional_tokens(parts.core.config))
    with pytest.raises(
        FamilyError, match=rf"layer \d: as {family} is described, token \d of a sample with (images|a pre)"
    ):
        check_spans(parts, windows, wrong)


def test_a_model_whose_images_are_causal_is_compared_too() -> None:
    parts = parts_of(tiny_model("qwen3_vl", layers=1))
    check_spans(parts, layer_masks(parts), None)
    with pytest.raises(FamilyError, match=r"attends to token 3, but in the model's own code"):
        check_spans(parts, layer_masks(parts), ImageSpans())


def test_a_model_is_refused_whose_own_code_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    none = lambda types, device: torch.full_like(types, -1)  # noqa: E731
    monkeypatch.setattr(modeling_gemma3, "get_block_sequence_ids_for_mask", none)
    with pytest.raises(FamilyError, match="layer 0: as gemma3 is described"):
        enable_packing(fresh("gemma3"))


def test_token_types_come_under_the_name_of_the_model() -> None:
    model = enable_packing(fresh("gemma3"))
    batch = padded(truth("gemma3").samples).to_hf()
    before = model(**batch).loss
    types = FAMILIES["gemma3"].media_types(batch["input_ids"], model.config)
    assert torch.equal(model(**batch, token_type_ids=types).loss, before)
    assert torch.equal(model(**batch, token_type_ids=types, mm_token_type_ids=types).loss, before)
    with pytest.raises(LayoutError, match="mm_token_type_ids contradicts input_ids"):
        model(**batch, token_type_ids=1 - types)
    with pytest.raises(LayoutError, match="token_type_ids and mm_token_type_ids differ"):
        model(**batch, token_type_ids=types, mm_token_type_ids=1 - types)


def test_images_side_by_side_are_one_run_within_a_sample_and_two_across() -> None:
    segments = Segments.from_lengths([6, 3], SlotRule(multiple=6))
    row = PackedRow(input_ids=torch.zeros(1, 12).long(), segments=segments)
    runs = ((0, ((1, 3),)), (0, ((3, 6),)), (1, ((0, 2),)))
    table = MediaTable(media=tuple(Medium(kind=1, sample=sample, runs=of) for sample, of in runs))
    assert ImageSpans().of_row(row, table) == ((1, 6), (6, 8))
