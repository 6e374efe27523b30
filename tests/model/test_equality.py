"""Packed equals alone: logits, loss and every parameter's gradient, vision tower included.

The matrix is families x input kind x slot multiple x attention back-end x {train, eval, checkpointing}, with poison in
every gap. Every cell is compared with each sample on its own through the untouched model; how far apart the two may be
is one table, in `equality`. Below it: other ways to hand samples in, and what each mechanism is worth, taken out.
"""

import functools
import sys

import pytest
import torch
from equality import (
    alone_through,
    check_gradients,
    check_outputs,
    check_work,
    gradients,
    kinds_in,
    limits_of,
    poisoned,
)

from vlmpack.errors import LayoutError
from vlmpack.families import Family
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import IGNORE, Segments, SlotRule, pack
from vlmpack.model import (
    PackedStep,
    StepConfig,
    disable_packing,
    enable_packing,
)
from vlmpack.model.mechanisms import attention, experts
from vlmpack.model.mechanisms.gated_delta import GatedDelta
from vlmpack.model.mechanisms.per_sample import PerSample
from vlmpack.model.mechanisms.recurrent_rows import Buckets
from vlmpack.model.mechanisms.short_conv import ShortConv
from vlmpack.model.mechanisms.vision import VisionRow
from vlmpack.testing import mixed_samples, padded, tiny_model
from vlmpack.testing.samples import VISION

KINDS = {
    "text": ("text", "text", "text", "text"),
    "image": ("image", "image", "image"),
    "images": ("images", "images"),
    "video": ("video", "video"),
    "audio": ("audio", "audio"),
    "mixed": ("text", "video", "image", "text", "images_and_video", "images", "audio", "everything"),
}
BATCHES = {family: kinds_in(family, KINDS) for family in FAMILIES}
CELLS = [(family, kind) for family, kinds in BATCHES.items() for kind in kinds]
MOST = {family: "mixed" if "mixed" in kinds else "text" for family, kinds in BATCHES.items()}
"""For each family the kind of batch that has the most in it."""
BY_SAMPLE = [family for family in FAMILIES if FAMILIES[family].has("per_sample")]
every_family = pytest.mark.parametrize("family", FAMILIES)
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")


def fresh(family, implementation="sdpa"):
    # more layers than there are deepstack features, so that all get gradients
    return tiny_model(family, seed=3, layers=3, attn_implementation=implementation)


@functools.cache
def truth(family, kind, implementation="sdpa"):
    model = fresh(family, implementation)
    return alone_through(model, mixed_samples(model.config, seed=5, kinds=BATCHES[family][kind], text=(1, 12)))


def cell(family, kind, *, multiple=4, backend="auto", mode="train"):
    """One cell of the matrix: the back-end against the implementation of transformers that rounds as it does."""
    implementation = "eager" if backend == "eager_mask" else "sdpa"
    own, limits = truth(family, kind, implementation), limits_of(family)
    model = fresh(family, implementation)
    if mode == "eval":
        model.eval()
    elif mode != "train":
        settings = {"use_reentrant": mode.startswith("reentrant")}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
        model.enable_input_require_grads()
    row = pack(padded(own.samples), rule=SlotRule(multiple=multiple), pad_token_id=17)
    step = PackedStep(model, StepConfig(attention=backend))
    with poisoned(model, row.segments) as poison, torch.set_grad_enabled(mode != "eval"):
        result = step(row, logits=True)
        if mode != "eval":
            result.loss.backward()

    check_outputs(own, result, limits)
    if mode != "eval":
        check_gradients(own, gradients(model), limits)
    check_work(own, result, multiple, model.config)
    assert (sum(poison) > 0) == row.segments.has_gaps


@pytest.mark.pairwise
@pytest.mark.parametrize("mode", ["train", "eval", "checkpointing"])
@pytest.mark.parametrize("backend", ["sdpa_segments", "eager_mask"])
@pytest.mark.parametrize("multiple", [1, 4, 8])
@pytest.mark.parametrize(("family", "kind"), CELLS)
def test_packed_equals_alone(family, kind, multiple, backend, mode):
    cell(family, kind, multiple=multiple, backend=backend, mode=mode)


@pytest.mark.each_value
@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama4"])
def test_reentrant_checkpointing_equals_alone(family, multiple):
    """(Llama 4's tower hands hidden states on by keyword, so that transformers itself gives it no gradients then.)"""
    cell(family, MOST[family], multiple=multiple, mode="reentrant checkpointing")


@every_family
def test_the_matrix_has_every_kind_of_input_and_sees_the_vision_tower(family):
    descriptor = FAMILIES[family]
    for kind in BATCHES[family]:
        own = truth(family, kind)
        has_vision = kind not in ("text", "audio")
        assert any(name.startswith(f"{descriptor.vision_path}.") for name in own.gradients) == has_vision
        if descriptor.audio is not None:
            has_audio = kind in ("audio", "mixed")
            assert any(name.startswith(f"{descriptor.audio.path}.") for name in own.gradients) == has_audio
        images, videos = (any(name in s for s in own.samples) for name in ("pixel_values", "pixel_values_videos"))
        assert images == (kind in ("image", "images", "mixed"))
        assert videos == (descriptor.has_videos and kind in ("video", "mixed"))
        assert len(set(own.lengths)) > 1  # images of one size may take equal places


# ---------------------------------------------------------------------- other ways in


@pytest.mark.pairwise
@pytest.mark.parametrize("given", ["padded", "left padded", "padded without metadata", "row without metadata"])
@pytest.mark.parametrize("multiple", [1, 8])
@every_family
def test_however_the_samples_are_given_packed_equals_alone(family, multiple, given):
    own, limits, model = truth(family, MOST[family]), limits_of(family), fresh(family)
    rule = SlotRule(multiple=multiple)
    inputs = padded(own.samples, "left" if given == "left padded" else "right", metadata="without" not in given).to_hf()
    if given == "row without metadata":
        inputs = pack(padded(own.samples), rule=rule).to_hf()
        del inputs["vlmpack"]
    result = PackedStep(model, StepConfig(slots=rule))(inputs, logits=True)
    result.loss.backward()
    check_outputs(own, result, limits)
    check_gradients(own, gradients(model), limits)
    check_work(own, result, multiple, model.config)


@every_family
def test_a_padded_step_is_what_hugging_face_computes_on_the_padded_batch(family):
    """(GLM-4V's own code takes images or videos.)"""
    kind = "images" if FAMILIES[family].videos_as_images else MOST[family]
    own, limits, model = truth(family, kind), limits_of(family), fresh(family)
    batch = padded(own.samples).to_hf()
    if (name := FAMILIES[family].token_types) is not None:
        batch[name] = FAMILIES[family].media_types(batch["input_ids"], model.config)
    theirs = model(**{name: x for name, x in batch.items() if name != "vlmpack"}, num_items_in_batch=11)
    enable_packing(model)
    ours = model(**batch, num_items_in_batch=11, output_logits=True)
    assert torch.isclose(ours.loss, theirs.loss, rtol=limits.loss, atol=0)
    real = batch["attention_mask"].bool()
    assert (ours.logits[real] - theirs.logits[real]).abs().max() <= limits.logits
    assert (ours.logits[~real] == 0).all()


@every_family
def test_results_come_back_one_a_sample(family):
    own, limits = truth(family, MOST[family]), limits_of(family)
    result = PackedStep(fresh(family))(padded(own.samples, "left"))
    width = max(own.lengths)
    for i, (sample, logits) in enumerate(zip(own.samples, own.logits, strict=True)):
        targets = sample["labels"][1:]
        logprobs = logits[:-1].log_softmax(-1).gather(-1, targets.clamp(min=0)[:, None])[:, 0] * (targets != -100)
        at = width - len(sample["input_ids"])
        assert (result.logprobs[i, at : width - 1] - logprobs).abs().max() <= limits.logits
        assert (result.logprobs[i, :at] == 0).all()
        mean = -logprobs.sum() / (targets != -100).sum()
        assert torch.isclose(result.sample_losses[i], mean, rtol=1e-5)
        assert result.sample_targets[i] == (targets != -100).sum()
    assert result.num_targets == result.sample_targets.sum()


@every_family
def test_what_stands_in_gaps_does_not_change_a_bit(family):
    model = fresh(family)
    step = PackedStep(model)
    losses = []
    for pad_token_id in (0, 99):
        rule = SlotRule(multiple=8, row_multiple=64)
        losses.append(step(pack(padded(truth(family, "text").samples), rule=rule, pad_token_id=pad_token_id)).loss)
    assert torch.equal(*losses)


# ---------------------------------------------------------------------- what each mechanism is worth


def positions_forget_images(monkeypatch):
    """(That they restart is worth nothing by itself: rotary positions are relative. It tells transformers' own packed
    detection where samples begin, and that is not asked.)"""
    own = Family.positions

    def as_text(self, types, segments, *, config, **media):
        return own(self, None, segments, config=config)

    monkeypatch.setattr(Family, "positions", as_text)
    monkeypatch.setattr(sys.modules["vlmpack.model.enable"], "check_rope_index", lambda model: None)  # it would notice


def attention_runs_on(monkeypatch):
    packed = attention.run_on_row

    def one_segment(query, key, value, row, *, vision=None, **settings):
        whole = attention.RowContext(segments=Segments.from_lengths([query.shape[2]]), entries=row.entries)
        return packed(query, key, value, row if vision is not None else whole, vision=vision, **settings)

    monkeypatch.setattr(attention, "run_on_row", one_segment)


def whole(segments):
    return Buckets.cheapest(Segments.from_lengths([segments.total]), call_cost=0)


def delta_layers_run_on(monkeypatch):
    monkeypatch.setattr(GatedDelta, "prepare", lambda self, setup: whole(setup.row.segments))


def convolutions_run_on(monkeypatch):
    monkeypatch.setattr(ShortConv, "prepare", lambda self, setup: whole(setup.row.segments))


def samples_run_on(monkeypatch):
    monkeypatch.setattr(PerSample, "prepare", lambda self, setup: whole(setup.row.segments))


def images_attend_to_each_other(monkeypatch):
    monkeypatch.setattr(VisionRow, "find", lambda self, cu, patches: Segments.from_lengths([patches]))


def first_labels_are_learnt(monkeypatch):
    def across(take, labels):
        return torch.roll(take(labels, IGNORE), -1, dims=-1)

    monkeypatch.setattr(sys.modules["vlmpack.layout.packing"]._Take, "targets", across)


def experts_see_padding(monkeypatch):
    monkeypatch.setattr(experts.Gate, "open", lambda gate, *call: None)


DELTA = [family for family in FAMILIES if FAMILIES[family].has("gated_delta")]
CONV = [family for family in FAMILIES if FAMILIES[family].has("short_conv")]
EXPERTS = [family for family in FAMILIES if FAMILIES[family].has("experts")]
BREAKAGES = [
    *((positions_forget_images, family, 1) for family in VISION),
    *((attention_runs_on, family, 1) for family in FAMILIES if family not in BY_SAMPLE),
    *((samples_run_on, family, 1) for family in BY_SAMPLE),
    *((delta_layers_run_on, family, 1) for family in DELTA),
    *((convolutions_run_on, family, 1) for family in CONV),
    # (GLM-OCR's tower hands no row on to its blocks: they attend image by image, in its own code)
    *((images_attend_to_each_other, family, 1) for family in VISION if family != "glm_ocr"),
    *((first_labels_are_learnt, family, 1) for family in FAMILIES),
    *((experts_see_padding, family, 4) for family in EXPERTS),
]


@pytest.mark.parametrize(("breakage", "family", "multiple"), BREAKAGES, ids=lambda x: getattr(x, "__name__", x))
def test_the_matrix_fails_without(breakage, family, multiple, monkeypatch):
    kind = "mixed" if breakage is images_attend_to_each_other else MOST[family]
    truth(family, kind)
    breakage(monkeypatch)
    with pytest.raises((AssertionError, LayoutError)):  # one label too many is seen by the host, which has counted them
        cell(family, kind, multiple=multiple)


@every_family
def test_the_matrix_sees_whoever_reads_a_gap(family):
    """Poison is worth something only if a model that reads it shows it: here gaps are samples of their own."""
    own, model = truth(family, "text"), fresh(family)
    row = pack(padded(own.samples), rule=SlotRule(multiple=8))
    joined = Segments.from_boundaries(row.segments.stride)
    step = PackedStep(enable_packing(model))
    with poisoned(model, row.segments) as poison:
        inputs = {"input_ids": row.input_ids, "cu_seqlens_q": list(joined.stride)}
        inputs |= {name: torch.zeros_like(row.input_ids) for name in FAMILIES[family].token_columns}
        result = step(inputs, logits=True)
    disable_packing(model)
    assert sum(poison) > 0
    assert result.row_logits.isnan().any()
