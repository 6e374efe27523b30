"""What an enabled model does not pack goes to the model's own forward as it was given, and comes back unchanged."""

import functools
import inspect
import warnings

import pytest
import torch
from cases import one_of_each, slow

from vlmpack.families.registry import FAMILIES
from vlmpack.layout import SlotRule, pack
from vlmpack.model import PackedStep, StepConfig, enable_packing
from vlmpack.model.forward import pack_backbone
from vlmpack.testing import alone, mixed_samples, padded, tiny_model
from vlmpack.testing.samples import random_sample, word_ids

BEGINNINGS = ("qwen3_vl", "qwen2_5_omni_thinker", "llava", "gemma3", "qwen3")
"""One family of each order of the first arguments."""
FEW = ["qwen3_vl", "lfm2", *slow("llava", "qwen3_5")]


@functools.cache
def plain(family):
    return tiny_model(family).eval()


@functools.cache
def enabled(family):
    return enable_packing(tiny_model(family).eval())


def inputs_of(family, *, labels=False):
    kind = "image" if FAMILIES[family].has_vision else "text"
    return alone(random_sample(plain(family).config, kind, seed=3), labels=labels)


def prompt_of(family):
    """A prompt, and settings that let no placeholder be generated."""
    words = {"suppress_tokens": [*range(word_ids(plain(family).config).start)], "max_new_tokens": 4}
    return {**inputs_of(family), **words, "do_sample": False}


def order_of(family):
    return list(inspect.signature(type(plain(family)).forward).parameters)[1:]


@pytest.fixture
def calls(monkeypatch):
    """What the forward of a model's own class gets, called by itself or by that of an enabled model."""
    found = []

    def record(family):
        enabled(family)  # which calls it too
        own = type(plain(family))
        forward = own.forward

        @functools.wraps(forward)
        def recording(self, *args, **kwargs):
            found.append((args, kwargs))
            return forward(self, *args, **kwargs)

        monkeypatch.setattr(own, "forward", recording)
        return found

    return record


def same(ours, theirs):
    """Whether two outputs are of one class, with the same names, and equal throughout."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and all(same(ours[name], theirs[name]) for name in ours)
    if isinstance(ours, tuple | list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return not isinstance(ours, int | float | str) or ours == theirs


# ---------------------------------------------------------------------- what is given


@pytest.mark.parametrize("family", BEGINNINGS)
def test_positional_arguments_are_those_of_the_models_own_signature(family):
    """`model(ids, pixels, mask)`: 20 of 52 families have another order than Qwen."""
    inputs = inputs_of(family)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    first = [inputs.pop(name, None) for name in order_of(family)[:3]]
    ours, theirs = enabled(family)(*first, **inputs), plain(family)(*first, **inputs)
    assert (ours.logits - theirs.logits).abs().max() <= 2e-5


def test_positional_arguments_that_the_model_refuses_are_refused():
    ids = inputs_of("llava")["input_ids"]
    for model in (plain("llava"), enabled("llava")):
        with pytest.raises(TypeError, match=r"multiple values for .*argument 'input_ids'"):
            model(ids, input_ids=ids)
        with pytest.raises(TypeError, match="positional arguments"):
            model(*[None] * (len(order_of("llava")) + 1))


def test_positional_arguments_of_a_backbone_that_packs_are_those_of_its_own_signature():
    model = pack_backbone_of("llava")
    batch = padded(mixed_samples(model.config, seed=2), metadata=False).to_hf()
    ids, pixels, mask = batch["input_ids"], batch["pixel_values"], batch["attention_mask"]
    by_name = model.model(input_ids=ids, pixel_values=pixels, attention_mask=mask)
    assert torch.equal(model.model(ids, pixels, mask)[0], by_name[0])
    assert not by_name[0][mask == 0].any()  # it was packed


def pack_backbone_of(family):
    model = enable_packing(tiny_model(family).eval())
    pack_backbone(model)
    return model


@pytest.mark.parametrize("family", FEW)
def test_nothing_is_added_to_a_call_that_is_passed_on(family, calls):
    given = {**inputs_of(family), "use_cache": True}
    found = calls(family)
    enabled(family)(**given)
    assert found == [((), given)]


@pytest.mark.parametrize("family", FEW)
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_goes_on_under_the_name_that_it_was_given(family, name, calls):
    """One of them may be deprecated: then transformers says so, once and not of us."""
    if name not in order_of(family) and "cache" not in order_of(family):
        pytest.skip("transformers before 5.24 has no such argument")
    given, found = inputs_of(family), []
    for model in (plain(family), enabled(family)):
        cache = model(**given, use_cache=True)["past_key_values"]
        following = {"input_ids": given["input_ids"][:, -1:], name: cache}
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found.append((model(**following).logits, [str(warning.message) for warning in warned]))
    (theirs, told), (ours, told_by_ours) = found
    assert torch.equal(ours, theirs)
    assert told_by_ours == told
    following[name] = enabled(family)(**given, use_cache=True)["past_key_values"]
    recorded = calls(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        enabled(family)(**following)
    assert recorded == [((), following)]


# ---------------------------------------------------------------------- what comes back


@pytest.mark.parametrize("family", FEW)
@pytest.mark.parametrize("labels", [False, True], ids=["no labels", "labels"])
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"use_cache": True},
        {"use_cache": False, "output_hidden_states": True},
        {"return_dict": False},
        {"return_dict": False, "output_hidden_states": True},
    ],
    ids=lambda asked: "-".join(asked) or "nothing more",
)
def test_outputs_are_the_models_own(family, asked, labels):
    given = {**inputs_of(family, labels=labels), **asked}
    ours, theirs = enabled(family)(**given), plain(family)(**given)
    assert same(ours, theirs)
    if asked.get("return_dict") is None:
        assert same(ours.to_tuple(), theirs.to_tuple())
        assert same(ours[0], theirs[0])


WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "static cache": {"cache_implementation": "static"},
    "with scores": {"return_dict_in_generate": True, "output_logits": True, "output_hidden_states": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
}


@pytest.mark.parametrize(
    ("family", "way"),
    [
        *(("qwen3_vl", way) for way in WAYS),
        ("qwen3_5", "with scores"),
        *(pytest.param(*family.values, "greedy", marks=family.marks) for family in one_of_each()),
    ],
)
def test_generation_is_that_of_the_plain_model(family, way):
    """In train mode too, in which nothing is packed either."""
    for training in (False, True):
        models = [model.train(training) for model in (enabled(family), plain(family))]
        ours, theirs = (model.generate(**prompt_of(family), **WAYS[way]) for model in models)
        for model in models:
            model.eval()
        assert same(ours, theirs)


# ---------------------------------------------------------------------- test generation
#
# What happens between two training steps, generation above all: neither changes the other.


BETWEEN = ["qwen3_vl_moe", "qwen3_5", *slow("qwen2_5_vl", "lfm2_vl", "gemma3", "gpt_oss")]


@pytest.mark.parametrize("ways", [{}, {"use_cache": False}], ids=["cache", "no cache"])
@pytest.mark.parametrize("family", BETWEEN)
def test_generation_from_a_left_padded_batch_between_two_steps(family, ways):
    """Caches, recurrent states and MRoPE deltas of generation stay its own; rows leave none behind."""
    untouched = tiny_model(family, layers=2)
    model = enable_packing(tiny_model(family, layers=2), StepConfig(slots=SlotRule(multiple=4)))
    samples = mixed_samples(model.config, seed=2)
    prompts = padded(samples, "left", metadata=False).to_hf()
    del prompts["labels"]

    def generated(source):
        words = {"max_new_tokens": 4, "do_sample": False, "suppress_tokens": [*range(word_ids(model.config).start)]}
        return source.eval().generate(**prompts, **words, **ways)

    def trained():
        model.train().zero_grad()
        loss = model(**padded(samples).to_hf()).loss
        loss.backward()
        return loss, [p.grad.clone() for p in model.parameters() if p.grad is not None]

    loss, gradients = trained()
    found = generated(model)
    assert torch.equal(found, generated(untouched))
    assert found.shape == (4, prompts["input_ids"].shape[1] + 4)
    loss_after, gradients_after = trained()
    assert torch.equal(loss_after, loss)
    assert all(map(torch.equal, gradients_after, gradients))


@pytest.mark.parametrize("family", BETWEEN)
def test_a_row_whose_log_probabilities_were_computed_in_inference_mode_can_be_trained_on(family):
    """A reference's, for DPO or GRPO: what a row keeps of its boundaries on a device must not be inference tensors."""
    model = tiny_model(family, layers=2)
    step = PackedStep(model)
    batch = padded(mixed_samples(model.config, seed=2))
    row = pack(batch, rule=SlotRule(multiple=4))
    with torch.inference_mode():
        reference = step(row)
    trained = step(row)
    trained.loss.backward()
    assert torch.equal(trained.target_logprobs, reference.target_logprobs)
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    step(pack(batch, rule=SlotRule(multiple=4))).loss.backward()
    assert all(map(torch.equal, found, [p.grad for p in model.parameters() if p.grad is not None]))
