"""Gradient checkpointing: a layer that is computed again in the backward pass sees the row it saw before."""

from __future__ import annotations

import copy

import pytest
from cases import families
from training import LAYOUTS, apart, checkpointing, collator, descend, distance, gradients, receipts, train

from vlmpack.families.registry import FAMILIES
from vlmpack.model import enable_packing
from vlmpack.testing import tiny_model

LOSS, GRADIENT = {False: 1e-6, True: 5e-6}, {False: 1e-5, True: 1e-4}
"""Of a second step, by whether the family is beyond Qwen: some of those norms enlarge what the first one rounded."""
KINDS_OF_CHECKPOINT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non_reentrant"])
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")


def checkpointed(model, *, reentrant):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    return model


def rows(model):
    """Two packed rows that have nothing in common, not even their width."""
    return [collator("packed")(receipts(model, seed=seed)[: 2 + seed]) for seed in (1, 2)]


def alone_gradients(model, row):
    model.zero_grad()
    model(**row).loss.backward()
    return gradients(model)


@pytest.mark.parametrize("family", families(lambda family: family.has_vision, always=["qwen3_vl"]))
def test_training_equals_samples_alone(family, tmp_path):
    reentrant = sorted(FAMILIES).index(family) % 2 == 0
    reference, model = tiny_model(family), enable_packing(tiny_model(family))
    samples = receipts(model)
    expected = descend(reference, samples, size=3, steps=2)
    settings = {
        "per_device_train_batch_size": 3,
        "remove_unused_columns": False,
        **checkpointing(use_reentrant=reentrant),
    }
    if reentrant and family == "llama4":  # its tower hands hidden states on by keyword, in the unmodified model too
        with pytest.raises(UserWarning, match="None of the inputs have requires_grad=True"):
            train(model, samples, tmp_path, **settings)
        return
    run = train(model, samples, tmp_path, **settings)
    assert run.losses == pytest.approx(expected.losses, rel=LOSS[not family.startswith("qwen")])
    assert len(run.gradients) == 2
    for ours, theirs in zip(run.gradients, expected.gradients, strict=True):
        assert apart(theirs, ours) < GRADIENT[not family.startswith("qwen")]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_are_really_computed_twice(layout):
    model = checkpointed(enable_packing(tiny_model()), reentrant=False)
    calls = []
    model.model.language_model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    loss = model(**collator(layout)(receipts(model)[:3])).loss
    assert len(calls) == 1
    loss.backward()
    assert len(calls) == 2


@KINDS_OF_CHECKPOINT
def test_two_forwards_before_one_backward(reentrant):
    model = checkpointed(enable_packing(tiny_model()), reentrant=reentrant)
    first, second = rows(model)
    plain = enable_packing(tiny_model())
    expected = [alone_gradients(plain, row) for row in (first, second)]

    model.zero_grad()
    (model(**first).loss + model(**second).loss).backward()

    both = {name: expected[0][name] + expected[1][name] for name in expected[0]}
    assert distance(both, gradients(model)) < 1e-5


@KINDS_OF_CHECKPOINT
def test_two_models_alive_at_once(reentrant):
    models = [checkpointed(enable_packing(tiny_model(seed=seed)), reentrant=reentrant) for seed in (1, 2)]
    inputs = rows(models[0])
    expected = [alone_gradients(copy.deepcopy(m), row) for m, row in zip(models, inputs, strict=True)]

    losses = [model(**row).loss for model, row in zip(models, inputs, strict=True)]
    for loss in losses:  # the first model's backward pass comes after the second one's forward pass
        loss.backward()

    for model, theirs in zip(models, expected, strict=True):
        assert distance(theirs, gradients(model)) < 1e-6
