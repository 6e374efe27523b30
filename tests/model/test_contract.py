"""The step's contract holds in every circumstance of training: packed equals alone, each in that circumstance.

Families x circumstances x ways to hand samples in. What the samples come to alone is computed once for each family and
circumstance, by the same model, before packing is enabled on it.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from equality import LOW_PRECISION, alone_through, by_sample, check_gradients, check_outputs, gradients, limits_of
from moe import block_of
from peft import LoraConfig, get_peft_model
from tiers import only_exhaustive
from torch._dynamo.utils import counters

from vlmpack.families.registry import FAMILIES
from vlmpack.layout import SlotRule, pack
from vlmpack.model import PackedStep, StepConfig, disable_packing
from vlmpack.model.plain import find_model
from vlmpack.testing import mixed_samples, padded, tiny_model
from vlmpack.testing.samples import VISION

SMALL = {"layers": 2, "vision_depth": 1, "hidden": 48}
GAPS = SlotRule(multiple=4, row_multiple=16)
GIVEN = ("right padded", "left padded", "row", "row with gaps")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning"),  # a frozen tower's
]


@dataclass(frozen=True, kw_only=True)
class Circumstance:
    """How a model is trained or asked."""

    prepare: Callable[[Any], Any] = lambda model: model
    """Changes the model before anything is computed."""
    around: Callable[[], AbstractContextManager] = nullcontext
    """Surrounds each forward pass."""
    backward: bool = True
    """Whether there are gradients to compare."""


def checkpointed(model, *, reentrant):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    return model


def adapted(model):
    """LoRA on attention and gated delta layers of the text part and on the vision tower, far from its zero start."""
    mixers = r"self_attn\.(q_proj|v_proj|qkv_proj|q_b_proj|kv_b_proj)|linear_attn\.\w*_proj\w*"
    targets = rf".*({mixers}|visual\.blocks.*\.(qkv|proj))"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))


def frozen(model, *, part):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(("visual" in name) != (part == "tower"))
    return model


CIRCUMSTANCES = {
    "training": Circumstance(),
    "reentrant checkpointing": Circumstance(prepare=functools.partial(checkpointed, reentrant=True)),
    "checkpointing": Circumstance(prepare=functools.partial(checkpointed, reentrant=False)),
    "LoRA": Circumstance(prepare=adapted),
    "LoRA, reentrant checkpointing": Circumstance(prepare=lambda m: checkpointed(adapted(m), reentrant=True)),
    "frozen tower": Circumstance(prepare=functools.partial(frozen, part="tower")),
    "frozen text": Circumstance(prepare=functools.partial(frozen, part="text")),
    "no_grad": Circumstance(around=torch.no_grad, backward=False),
    "inference_mode": Circumstance(around=torch.inference_mode, backward=False),
    "eval": Circumstance(prepare=lambda model: model.eval()),
}


def fresh(family, **sizes):
    return tiny_model(family, seed=3, **{**SMALL, **sizes})


def samples_of(family):
    kinds = ("image", "text", "images") if family in VISION else ("text", "text", "text")
    return mixed_samples(fresh(family).config, seed=6, kinds=kinds, side=(1, 3))


def handed_in(samples, given, **more):
    """A batch or a row for `PackedStep`, and how a padded batch is packed."""
    if given.startswith("row"):
        rule = GAPS if given == "row with gaps" else None
        return pack(padded(samples), rule=rule, pad_token_id=17).to_hf(), StepConfig(**more)
    if given == "left padded":  # what nobody has counted on the host, into slots
        return padded(samples, "left", metadata=False).to_hf(), StepConfig(slots=GAPS, **more)
    return padded(samples).to_hf(), StepConfig(**more)


@functools.cache
def truth(family, name):
    """(the model in its circumstance, what the samples come to alone)."""
    model = CIRCUMSTANCES[name].prepare(fresh(family))
    return model, alone_through(model, samples_of(family))


def computed(model, own, given, *, around=nullcontext, backward=True):
    """(result, gradients) of a packed step; the model is left as it was."""
    batch, config = handed_in(own.samples, given)
    with around():
        result = PackedStep(model, config)(batch, logits=True)
    if backward:
        result.loss.backward()
    found = gradients(model)
    model.zero_grad()
    disable_packing(model)
    return result, found


CASES = [
    (family, name)
    for family in FAMILIES
    for name in CIRCUMSTANCES
    if family in VISION or name != "frozen text"  # which leaves a text model nothing to learn
]


@pytest.mark.pairwise
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize(("family", "name"), CASES)
def test_packed_equals_alone(family, name, given):
    model, own = truth(family, name)
    circumstance = CIRCUMSTANCES[name]
    result, found = computed(model, own, given, around=circumstance.around, backward=circumstance.backward)
    check_outputs(own, result, limits_of(family))
    if circumstance.backward:
        check_gradients(own, found, limits_of(family))
    assert result.loss.requires_grad == circumstance.backward
    assert result.segments.has_gaps == (given in ("left padded", "row with gaps"))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_circumstance_is_what_it_is_called(family):
    parts = {name: set(truth(family, name)[1].gradients) for case, name in CASES if case == family}
    tower = {name for name in parts["training"] if "visual" in name}
    assert bool(tower) == (family in VISION)
    assert parts["frozen tower"] == parts["training"] - tower
    assert parts.get("frozen text", tower) == tower
    for lora in (parts["LoRA"], parts["LoRA, reentrant checkpointing"]):
        assert all("lora_" in name for name in lora)
        assert any("linear_attn" in name for name in lora) == (FAMILIES[family].has("gated_delta"))
    # (Under reentrant checkpointing a frozen patch embedding leaves the adapters of some towers without gradients.)
    assert any("visual" in name for name in parts["LoRA"]) == bool(tower)
    assert not truth(family, "eval")[0].training
    calls = []
    for name in ("training", "checkpointing", "reentrant checkpointing"):
        model, own = truth(family, name)
        mlp = block_of(FAMILIES[family].language_model(model).layers[0])
        hook = mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        computed(model, own, "row")
        hook.remove()
        calls.append(0)
    assert calls == [1, 0, 1, 1, 0, 1, 1, 0], "layers are computed once, twice, twice"


# ---------------------------------------------------------------------- autocast


@pytest.mark.each_value
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("name", ["training", "checkpointing"])
@pytest.mark.parametrize("family", FAMILIES)
def test_under_autocast_the_error_is_that_of_samples_alone(family, name, given):
    _, exact = truth(family, "training")
    model, plain = under_autocast(family, name)
    result, found = computed(model, plain, given, around=autocast)
    error, allowed = (
        [(a - b).abs().max() for a, b in zip(x, exact.logits, strict=True)] for x in (by_sample(result), plain.logits)
    )
    assert max(allowed) > 1e-3, "autocast did nothing"
    assert max(error) <= LOW_PRECISION * max(allowed)
    assert apart(found, exact.gradients) <= LOW_PRECISION * apart(plain.gradients, exact.gradients)


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


@functools.cache
def under_autocast(family, name):
    model = CIRCUMSTANCES[name].prepare(fresh(family))
    with autocast():
        return model, alone_through(model, samples_of(family))


def apart(a, b):
    """Root mean square of all differences between two sets of gradients."""
    return float(torch.cat([(a[name] - b[name]).flatten() for name in b]).square().mean().sqrt())


# ---------------------------------------------------------------------- several models at a time


@pytest.mark.each_value
@pytest.mark.parametrize("given", [("left padded", "row", "row with gaps"), ("row with gaps", "right padded", "row")])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_that_live_side_by_side_do_not_disturb_each_other(family, given):
    """Two of a family and one of another, forward one after the other and backward in another order, while the first
    one's layers are computed again."""
    other = [*FAMILIES, *FAMILIES][[*FAMILIES].index(family) + 1]
    cases = [truth(family, "checkpointing"), truth(family, "LoRA"), truth(other, "training")]
    results = []
    for (model, own), kind in zip(cases, given, strict=True):
        batch, config = handed_in(own.samples, kind)
        results.append(PackedStep(model, config)(batch, logits=True))
    for at in (1, 0, 2):
        results[at].loss.backward()
    for (model, own), result in zip(cases, results, strict=True):
        limits = limits_of(find_model(model).config.model_type)
        check_outputs(own, result, limits)
        check_gradients(own, gradients(model), limits)
        model.zero_grad()
        disable_packing(model)


# ---------------------------------------------------------------------- torch.compile


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("family", [*only_exhaustive("qwen3_5"), "qwen3"])
def test_a_compiled_model_packs(family):
    """Text samples: what `torch.compile` makes of the vision tower is tested with the Trainer."""
    model = fresh(family, layers=1 if family == "qwen3" else 2)
    own = alone_through(model, mixed_samples(model.config, seed=6, kinds=("text",) * 4, text=(8, 9)))
    compiled = torch.compile(model, backend="aot_eager")
    try:
        for given in ("left padded", "row with gaps"):
            result, found = computed(compiled, own, given)
            check_outputs(own, result, limits_of(family))
            check_gradients(own, {name.removeprefix("_orig_mod."): x for name, x in found.items()}, limits_of(family))
        assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    finally:
        torch.compiler.reset()
        counters.clear()
