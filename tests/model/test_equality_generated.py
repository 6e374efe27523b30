"""Packed equals alone for any lengths, image sizes, slots and paddings: hypothesis looks for those that are not."""

import functools

import pytest
import torch
from cases import slow
from equality import alone_through, check_gradients, check_outputs, check_work, gradients, limits_of, poisoned
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmpack.families.media import run_of_pairs
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import SlotRule, pack
from vlmpack.model import PackedStep, StepConfig
from vlmpack.model.mechanisms import gated_delta
from vlmpack.testing import build_sample, padded, tiny_model
from vlmpack.testing.samples import VISION

pytestmark = pytest.mark.chosen
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
    multiple = data.draw(st.sampled_from([1, 2, 8, 64]), label="slot multiple")
    rule = SlotRule(multiple=multiple)
    side = data.draw(st.sampled_from(["left", "right"]), label="padding")
    step = PackedStep(model, StepConfig(slots=rule))
    cost = data.draw(st.sampled_from([0.0, 16.0, 1e9]), label="cost of a call")
    with pytest.MonkeyPatch.context() as patch, poisoned(model, pack(padded(samples, side), rule=rule).segments):
        patch.setitem(gated_delta.CALL_COST, "cpu", cost)
        result = step(padded(samples, side), logits=True)
        result.loss.backward()
    check_outputs(own, result, limits_of(family))
    check_gradients(own, gradients(model), limits_of(family))
    check_work(own, result, multiple, model.config)
    if FAMILIES[family].has("gated_delta"):
        assert sum(own.lengths) <= result.work.delta_tokens <= 1.25 * sum(own.lengths)


@pytest.mark.parametrize(
    "family", ["qwen3_5", "lfm2", *slow("qwen3_vl_moe", "qwen4_exp", "gemma3", "llama4", "gpt_oss")]
)
@settings(max_examples=6)
@given(lengths=st.lists(st.integers(1, 40), min_size=2, max_size=6), data=st.data())
def test_no_sample_sees_another(family, lengths, data):
    """Not a bit of the others moves when one sample is exchanged for another of its length; experts, whose tokens are
    multiplied together, round them otherwise."""
    model = model_of(family).eval()
    step = PackedStep(model)
    texts = [build_sample(model.config, stretches=[n], seed=i) for i, n in enumerate(lengths)]
    changed = data.draw(st.integers(0, len(lengths) - 1), label="exchanged")
    other = build_sample(model.config, stretches=[lengths[changed]], seed=1000)
    with torch.no_grad():
        before, after = (
            step(pack(padded(batch)), logits=True).row_logits[0].split(lengths)
            for batch in (texts, [*texts[:changed], other, *texts[changed + 1 :]])
        )
    has_experts = FAMILIES[family].has("experts") or family == "gemma4"  # whose routers have no statistics
    for i, (first, second) in enumerate(zip(before, after, strict=True)):
        if i == changed:
            assert (first - second).abs().max() > 0.1
        else:
            assert (first - second).abs().max() <= (limits_of(family).logits if has_experts else 0)
