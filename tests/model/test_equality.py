"""Packed equals alone: logits, loss and every parameter's gradient, in every family and every circumstance of training.

Each case is compared with every sample by itself through the untouched model, with poison in every gap
(`equality.check_packed`). Below the table: other ways in, several models at a time, and what each mechanism is worth,
taken out.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from breakages import BREAKAGES
from cases import EIGHT, families, one_of_each, slow, slow_cases
from equality import (
    LOW_PRECISION,
    VISION,
    Alone,
    adapted,
    alone_through,
    check_gradients,
    check_outputs,
    check_packed,
    check_step,
    check_work,
    checkpointed,
    gradients,
    kinds_in,
    limits_of,
    poisoned,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmpack.errors import VlmpackError
from vlmpack.families.registry import FAMILIES
from vlmpack.families.videos import run_of_pairs
from vlmpack.layout import SlotRule, pack
from vlmpack.model import PackedStep, StepConfig, enable_packing
from vlmpack.model.mechanisms import recurrent_rows
from vlmpack.testing import build_sample, mixed_samples, padded, tiny_model
from vlmpack.testing.comparison import logits_by_sample, run_alone

KINDS = {
    "text": ("text", "text", "text", "text"),
    "image": ("image", "image", "image"),
    "images": ("images", "images"),
    "video": ("video", "video"),
    "audio": ("audio", "audio"),
    "mixed": ("text", "video", "image", "text", "images_and_video", "images", "audio", "everything"),
}
BATCHES = {family: kinds_in(family, KINDS) for family in FAMILIES}
MOST = {family: "mixed" if "mixed" in kinds else "text" for family, kinds in BATCHES.items()}
"""For each family the kind of batch that has the most in it."""
pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning"),  # a frozen tower's
    pytest.mark.filterwarnings("ignore:Unsupported layer type.*Conv3d:UserWarning"),
]
OMNI = "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"
few = pytest.mark.parametrize("family", ["qwen3_5_moe", *slow("qwen3_vl_moe", "gemma3", "lfm2_vl", OMNI[1])])
"""One family in the fast tier; experts, bidirectional images, short convolutions and audio in the slow one."""


@dataclass(frozen=True, kw_only=True)
class Circumstance:
    """What the samples are, how they are handed in, and how a model is trained or asked."""

    kind: str | None = None
    """A key of `KINDS`; None: whatever the family takes."""
    given: str = "row with gaps"
    """See `equality.GIVEN`."""
    multiple: int = 4
    """Of the slots."""
    backend: str = "auto"
    """Of attention."""
    prepare: Callable[[Any], Any] = lambda model: model
    """Changes the model before anything is computed."""
    around: Callable[[], AbstractContextManager] = nullcontext
    """Surrounds each forward pass."""
    backward: bool = True
    """Whether there are gradients to compare."""


def frozen(model, *, part):
    tower = FAMILIES[model.config.model_type].vision_path
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(f"{tower}.") != (part == "tower"))
    return model


reentrant = functools.partial(checkpointed, reentrant=True)
ROW = Circumstance(prepare=checkpointed)
"""A row with gaps, whose layers are computed again."""
BATCH = Circumstance(given="left padded without metadata")
CIRCUMSTANCES = {
    "evaluation of a row without gaps, eager": Circumstance(
        given="row", backend="eager_mask", prepare=lambda model: model.eval(), around=torch.no_grad, backward=False
    ),
    "text": Circumstance(kind="text", multiple=1),
    "image": Circumstance(kind="image", multiple=8),
    "images": Circumstance(kind="images", given="right padded"),
    "video": Circumstance(kind="video", backend="eager_mask"),
    "audio": Circumstance(kind="audio", backend="eager_mask"),
    "sdpa_segments": Circumstance(backend="sdpa_segments", given="left padded"),
    "no metadata": Circumstance(given="right padded without metadata"),
    "a row without metadata": Circumstance(given="row with gaps without metadata", multiple=8),
    "reentrant checkpointing": Circumstance(prepare=reentrant),
    "LoRA": Circumstance(prepare=adapted, given="right padded"),
    "LoRA, reentrant checkpointing": Circumstance(prepare=lambda model: reentrant(adapted(model))),
    "LoRA, checkpointing": Circumstance(prepare=lambda model: checkpointed(adapted(model)), given="row"),
    "frozen tower": Circumstance(prepare=functools.partial(frozen, part="tower"), given="left padded"),
    "frozen text": Circumstance(prepare=functools.partial(frozen, part="text")),
    "no_grad": Circumstance(around=torch.no_grad, backward=False),
    "inference_mode": Circumstance(around=torch.inference_mode, backward=False, given="right padded"),
    "eval": Circumstance(prepare=lambda model: model.eval(), given="row"),
}


def fresh(family, implementation="sdpa"):
    # more layers than there are deepstack features, so that all get gradients
    return tiny_model(family, seed=3, layers=3, attn_implementation=implementation)


def samples_of(family, kind=None):
    return mixed_samples(fresh(family).config, seed=5, kinds=BATCHES[family][kind or MOST[family]], text=(1, 12))


@functools.cache
def truth(family, kind=None, implementation="sdpa"):
    return alone_through(fresh(family, implementation), samples_of(family, kind))


def check(family, circumstance):
    """One case: the back-end against the implementation of transformers that rounds as it does."""
    implementation = "eager" if circumstance.backend == "eager_mask" else "sdpa"
    model = circumstance.prepare(fresh(family, implementation))
    own = truth(family, circumstance.kind, implementation)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    if trained != {name for name, p in fresh(family).named_parameters() if p.requires_grad}:
        own = alone_through(model, own.samples)  # the same outputs; other parameters are trained
    limits = limits_of(family)
    if any("lora_" in name for name in trained):
        limits = replace(limits, gradient=max(limits.gradient, 4e-5))  # of small adapters are rounded more
    settings = {name: getattr(circumstance, name) for name in ("given", "multiple", "backend", "around", "backward")}
    check_packed(own, model, limits=limits, **settings)
    return model, own


# ---------------------------------------------------------------------- the contract


@pytest.mark.parametrize("family", families())
def test_packed_equals_alone(family):
    model, own = check(family, ROW)
    assert len(set(own.lengths)) > 1  # images of one size may take equal places
    if FAMILIES[family].has_vision:
        assert any(parameter.startswith(f"{FAMILIES[family].vision_path}.") for parameter in own.gradients)
    if (audio := FAMILIES[family].audio) is not None:
        assert any(parameter.startswith(f"{audio.path}.") for parameter in own.gradients)
    assert FAMILIES[family].has("gated_delta") == (PackedStep(model)(padded(own.samples)).work.delta_tokens > 0)


@pytest.mark.parametrize("family", one_of_each())
def test_a_batch_padded_on_the_left_and_without_metadata_equals_alone(family):
    check(family, BATCH)


ANY_KIND = [name for name, circumstance in CIRCUMSTANCES.items() if circumstance.kind is None]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("qwen3_5_moe", name) for name, each in CIRCUMSTANCES.items() if each.kind != "audio"),
        *slow_cases(*product(("gemma3", "lfm2_vl"), ANY_KIND)),
        *slow_cases(*((family, "audio") for family in OMNI if "audio" in BATCHES.get(family, ()))),
    ],
)
def test_packed_equals_alone_in_every_circumstance_of_training(family, name):
    check(family, CIRCUMSTANCES[name])


@few
@pytest.mark.parametrize("prepare", [fresh, lambda family: checkpointed(fresh(family))], ids=["plain", "checkpointed"])
def test_under_autocast_the_error_is_that_of_samples_alone(family, prepare):
    autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    exact, model = truth(family), prepare(family)
    plain = Alone(samples=exact.samples, outcome=run_alone(model, exact.samples, forward_context=autocast))
    with autocast():
        result = PackedStep(model)(pack(padded(exact.samples), rule=SlotRule(multiple=4)), logits=True)
    result.loss.backward()
    error, allowed = (
        max((a - b).abs().max() for a, b in zip(x, exact.logits, strict=True))
        for x in (logits_by_sample(result), plain.logits)
    )
    assert allowed > 1e-3, "autocast did nothing"
    assert error <= LOW_PRECISION * allowed
    assert apart(gradients(model), exact.gradients) <= LOW_PRECISION * apart(plain.gradients, exact.gradients)


def apart(a, b):
    """Root mean square of all differences between two sets of gradients."""
    return float(torch.cat([(a[name] - b[name]).flatten() for name in b]).square().mean().sqrt())


@few
def test_models_that_live_side_by_side_do_not_disturb_each_other(family):
    """Two of a family and one of another, forward one after the other and backward in another order, while the first
    one's layers are computed again."""
    cases = [(family, checkpointed), (family, lambda model: model), ("qwen3", lambda model: model)]
    models = [prepare(fresh(name)) for name, prepare in cases]
    forms = [lambda x: padded(x, "left"), lambda x: pack(padded(x), rule=SlotRule(multiple=4)), padded]
    results = [
        PackedStep(model)(form(truth(name).samples), logits=True)
        for (name, _), model, form in zip(cases, models, forms, strict=True)
    ]
    for at in (1, 0, 2):
        results[at].loss.backward()
    for (name, _), model, result in zip(cases, models, results, strict=True):
        check_outputs(truth(name), result, limits_of(name))
        check_gradients(truth(name), gradients(model), limits_of(name))


# ---------------------------------------------------------------------- other ways in, and what comes out


@pytest.mark.parametrize("family", one_of_each(lambda family: not family.token_columns))
def test_a_row_of_nothing_but_padding_gives_every_parameter_the_gradient_that_other_ranks_wait_for(family):
    model = fresh(family)
    settings = StepConfig(keep_empty=True, slots=SlotRule(pad_to=128))
    enable_packing(model, settings)(**padded(samples_of(family, "text")).to_hf()).loss.backward()
    learnt = {name for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    nothing = torch.zeros(2, 5, dtype=torch.long)
    output = model(input_ids=nothing, attention_mask=nothing, labels=nothing - 100)
    output.loss.backward()
    assert output.loss == 0
    assert any("self_attn" in name for name in learnt)
    assert learnt == {name for name, p in model.named_parameters() if p.grad is not None and not p.grad.any()}


# ---------------------------------------------------------------------- what each mechanism is worth


UNSEEN = ("positions run on", "cache", "router losses", "head", "padding of audio")
"""Breakages of what the contract does not look at. Rotary positions are relative: whether they restart shows nowhere,
but transformers' own packed detection would ask. There is one chunk of targets, and one group of audio."""
BREAKING = [name for name in ("qwen3_5_moe", "lfm2_vl", "qwen4_exp", *EIGHT, *OMNI, *FAMILIES) if name in FAMILIES]


def broken_in(name):
    """A breakage in the first two families that have it; the first one in the fast tier."""
    having = dict.fromkeys(family for family in BREAKING if BREAKAGES[name].has(FAMILIES[family]))
    first, second = [(name, family) for family in having][:1], [(name, family) for family in having][1:2]
    return first + slow_cases(*second)


@pytest.mark.parametrize(
    ("name", "family"), [case for name in BREAKAGES if name not in UNSEEN for case in broken_in(name)]
)
def test_the_contract_fails_without(name, family, monkeypatch):
    truth(family)
    BREAKAGES[name].breaks(family, monkeypatch)
    with pytest.raises((AssertionError, VlmpackError)):  # some are seen by the host, which has counted
        check(family, Circumstance(given="left padded" if name == "packing" else "row with gaps"))


# ---------------------------------------------------------------------- any batch


model_of = functools.partial(tiny_model, seed=3, layers=3, patch_size=4)
sides = st.integers(1, 5).map(lambda n: 2 * n)
"""In patches; two of them make a token."""


@st.composite
def samples_for(draw, family):
    """One sample: any texts between any images and videos, or a text of any length."""
    images = videos = []
    if family in VISION:
        images = draw(st.lists(st.tuples(st.just(1), sides, sides), max_size=3))
        frames = st.sampled_from([2, 4]) if FAMILIES[family].videos is run_of_pairs else st.integers(1, 3)
        videos = draw(st.lists(st.tuples(frames, sides, sides), max_size=1))
        images = [] if videos and FAMILIES[family].videos_as_images else images
    count = len(images) + len(videos) + 1
    shortest, longest = (0, 9) if count > 1 else (1, 70)
    return {
        "stretches": draw(st.lists(st.integers(shortest, longest), min_size=count, max_size=count)),
        "image_grids": images,
        "video_grids": videos,
        "seconds": [draw(st.sampled_from([0.25, 0.5, 1.0, 2.5])) for _ in videos],
        "videos_first": draw(st.booleans()),
    }


@pytest.mark.parametrize("family", ["qwen3_5_moe", *slow("qwen2_5_vl", "qwen3_vl_moe", "glm4v", "lfm2_vl", "gpt_oss")])
@settings(max_examples=8)
@given(data=st.data())
def test_any_batch_is_what_its_samples_are_alone(family, data):
    model = model_of(family)
    drawn = data.draw(st.lists(samples_for(family), min_size=1, max_size=5), label="samples")
    # The last one is always there, so that there is something to learn.
    samples = [build_sample(model.config, **sample, seed=i) for i, sample in enumerate(drawn)]
    samples.append(build_sample(model.config, stretches=[5], seed=99))
    own = alone_through(model, samples)
    rule = SlotRule(
        multiple=data.draw(st.sampled_from([1, 8]), label="slot multiple"),
        row_multiple=data.draw(st.sampled_from([1, 8, 64]), label="row multiple"),
    )
    side = data.draw(st.sampled_from(["left", "right"]), label="padding")
    step = PackedStep(model, StepConfig(slots=rule))
    cost = data.draw(st.sampled_from([0.0, 16.0, 1e9]), label="cost of a call")
    segments = pack(padded(samples, side), rule=rule).segments
    with pytest.MonkeyPatch.context() as patch, poisoned(model, segments, rule):
        patch.setitem(recurrent_rows.CALL_COST, "cpu", cost)
        check_step(own, model, result := step(padded(samples, side), logits=True), limits_of(family))
    check_work(own, result, rule.row_multiple, model.config)
    if FAMILIES[family].has("gated_delta"):
        assert sum(own.lengths) <= result.work.delta_tokens <= 1.25 * result.work.physical_tokens
