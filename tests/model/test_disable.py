"""After disable_packing a model is bit for bit what it was, whatever happened while packing was enabled."""

import copy
import gc
import os
import pickle
import subprocess
import sys

import pytest
import torch
from cases import one_of_each, slow
from equality import VISION
from moe import block_of

from vlmpack.errors import ConfigError
from vlmpack.families import family_named
from vlmpack.layout import SlotRule, pack
from vlmpack.model import StepConfig, disable_packing, enable_packing
from vlmpack.testing import alone, mixed_samples, padded, tiny_model
from vlmpack.testing.samples import TOKEN_KEYS

SMALL = {"layers": 2, "vision_depth": 1, "hidden": 48}
GAPS = SlotRule(multiple=4)
OTHERS = ("qwen4_exp", "lfm2_vl")
few = pytest.mark.parametrize("family", ["qwen3_5_moe", *slow(*OTHERS)])


def fresh(family, seed=3):
    return tiny_model(family, seed=seed, **SMALL)


def samples_of(model):
    kinds = ("image", "text", "images") if model.config.model_type in VISION else ("text", "text", "text")
    return mixed_samples(model.config, seed=4, kinds=kinds, side=(1, 2))


def row_of(model):
    return pack(padded(samples_of(model)), rule=GAPS).to_hf()


def anatomy(model):
    """Everything that could have been changed but weights: classes, attributes, hooks, configurations."""
    parts = {
        name: (type(module), {key: dict(x) if isinstance(x, dict) else x for key, x in vars(module).items()})
        for name, module in model.named_modules()
    }
    configs = [vars(module)["config"] for module in model.modules() if "config" in vars(module)]
    return parts, [(config.to_dict(), dict(vars(config))) for config in configs]


def shape_of(model):
    """What two objects of the same making have in common: names of attributes, classes, numbers of hooks."""
    return {
        name: (type(module), {key: len(x) if isinstance(x, dict) else None for key, x in vars(module).items()})
        for name, module in model.named_modules()
    }


def outputs(model):
    """Logits, loss and gradients of a sample alone, logits of a padded batch, and what is generated."""
    samples = samples_of(model)
    model.zero_grad()
    out = model(**alone(samples[0]))
    out.loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    batch = {name: x for name, x in padded(samples).to_hf().items() if name not in ("vlmpack", "labels")}
    prompt = {name: x[None] if name in TOKEN_KEYS else x for name, x in samples[0].items() if name != "labels"}
    with torch.no_grad():
        logits = model(**batch).logits[batch["attention_mask"].bool()]
        prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
        text = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    for part in model.children():
        if "rope_deltas" in vars(part):  # what a vision family itself remembers of its last plain call
            part.rope_deltas = None
    return [out.logits.detach(), out.loss.detach(), logits, text, *gradients]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---------------------------------------------------------------------- what happens in between


def nothing(model):
    pass


def steps(model):
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        model(**row_of(model)).loss.backward()
        optimiser.step()
        optimiser.zero_grad()


def recomputed_steps(model):
    steps(model)


def plain_calls(model):
    outputs(model)


def other_settings(model):
    enable_packing(model, StepConfig(slots=SlotRule(multiple=8), attention="eager_mask"))
    model(**padded(samples_of(model)).to_hf())
    enable_packing(model)


def an_error_in_a_layer(model):
    def stumble(*_):
        raise KeyboardInterrupt

    layers = family_named(model.config.model_type).language_model(model).layers
    for place in (block_of(layers[0]), block_of(layers[1]), model.lm_head):
        hook = place.register_forward_pre_hook(stumble)
        with pytest.raises(KeyboardInterrupt):
            model(**row_of(model))
        hook.remove()


def a_refused_batch(model):
    with pytest.raises(ConfigError, match="no input 'cu_seqlens'"):
        model(**row_of(model), cu_seqlens=[0, 3])


EVENTS = (nothing, steps, recomputed_steps, plain_calls, other_settings, an_error_in_a_layer, a_refused_batch)


@pytest.mark.parametrize(
    ("family", "event"),
    [
        *(("qwen3_5_moe", event) for event in EVENTS if event is not steps),
        *(pytest.param(*family.values, steps, marks=family.marks) for family in one_of_each()),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_model_is_what_it_was_whatever_happened(family, event):
    model, copied_model = fresh(family), fresh(family)
    if event is recomputed_steps:
        for each in (model, copied_model):
            each.gradient_checkpointing_enable()
    before = anatomy(model)
    keys = list(model.state_dict())

    assert enable_packing(model) is model
    assert anatomy(model) != before, "nothing was looked at"
    event(model)
    assert disable_packing(model) is model

    model.zero_grad()
    assert anatomy(model) == before
    assert list(model.state_dict()) == keys
    copied_model.load_state_dict(model.state_dict())
    assert same(outputs(model), outputs(copied_model))


# ---------------------------------------------------------------------- copies


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@few
def test_a_copy_is_packed_by_itself_and_undone_by_itself(family, copied):
    model = enable_packing(fresh(family))
    row = row_of(model)
    loss = model(**row).loss
    copied_model, plain = copied(model), copied(fresh(family))
    disable_packing(model)
    assert torch.equal(copied_model(**row).loss, loss)
    disable_packing(copied_model)
    assert shape_of(copied_model) == shape_of(plain)
    assert copied_model.config.to_dict() == plain.config.to_dict()
    assert same(outputs(copied_model), outputs(plain))
    assert same(outputs(model), outputs(plain))


UNPICKLE = """
import pickle, sys
import torch
torch.set_num_threads(1)
with open(sys.argv[1], "rb") as file:
    cases = pickle.load(file)
assert cases
for model, row, loss, logits in cases:
    assert torch.equal(model(**row).loss, loss)
    from vlmpack.model import disable_packing
    text = {"input_ids": row["input_ids"][:, :5]}
    assert type(disable_packing(model)).__module__.startswith("transformers.")
    assert not [m for m in model.modules() if "_vlmpack_base" in vars(type(m))]
    assert torch.equal(model(**text).logits, logits)
print("packed", len(cases))
"""


@pytest.mark.slow
def test_unpickling_in_another_process_installs_everything(tmp_path):
    families = ("qwen3_5", "qwen3_vl_moe", "qwen3_next")
    cases = []
    for family in families:
        plain, model = fresh(family), enable_packing(fresh(family))
        row = pack(padded([s for s in samples_of(model) if "pixel_values" not in s]), rule=GAPS).to_hf()
        cases.append((model, row, model(**row).loss.detach(), plain(input_ids=row["input_ids"][:, :5]).logits.detach()))
    (tmp_path / "models.pickle").write_bytes(pickle.dumps(cases))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", UNPICKLE, str(tmp_path / "models.pickle")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["packed", "3"]


# ---------------------------------------------------------------------- models with something in common


@pytest.mark.parametrize("first", [0, *slow(1)])
@pytest.mark.parametrize("family", ["qwen3_5_moe", *slow("qwen4_exp")])
def test_models_that_share_a_backbone_are_enabled_and_disabled_one_by_one(family, first):
    """One text model and tower under two heads: what is changed in them stays until the last one is disabled."""
    pair = [fresh(family), fresh(family, seed=9)]
    row, before = row_of(pair[0]), anatomy(pair[0])
    pair[1].model = pair[0].model
    alone_enabled = [enable_packing(copy.deepcopy(model))(**row).loss for model in pair]
    assert not torch.equal(*alone_enabled)

    def losses():
        return [model(**row).loss for model in pair]

    for model in pair:
        enable_packing(model)
    assert all(map(torch.equal, losses(), alone_enabled))
    enable_packing(pair[first], StepConfig(slots=GAPS))
    assert all(map(torch.equal, losses(), alone_enabled))
    sum(losses()).backward()
    pair[0].zero_grad()
    disable_packing(pair[first])
    other = 1 - first
    assert torch.equal(pair[other](**row).loss, alone_enabled[other]), "the other one goes on"
    disable_packing(pair[other])
    assert anatomy(pair[0]) == before


def test_a_model_that_is_gone_keeps_no_backbone_changed():
    model = fresh("qwen3")
    before = anatomy(model)
    other = type(model)(model.config)
    other.model = model.model
    enable_packing(other)
    enable_packing(model)
    del other
    gc.collect()
    disable_packing(model)
    assert anatomy(model) == before
