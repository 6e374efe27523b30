"""Training steps that go past the packed forward are warned of, once, with what to do instead; nothing else is."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from vlmpack.errors import ConfigError, UnpackedWarning
from vlmpack.model import disable_packing, enable_packing, plain
from vlmpack.testing import mixed_samples, padded, tiny_model

SMALL = {"layers": 2, "vision_depth": 1, "hidden": 48}


@pytest.fixture(autouse=True)
def nothing_was_said_yet():
    plain._warned.clear()
    yield
    plain._warned.clear()


def enabled(family="qwen3_vl", attention="sdpa"):
    return enable_packing(tiny_model(family, attn_implementation=attention, **SMALL))


def batch_of(model, lengths=(7, 12), side="right"):
    samples = [mixed_samples(model.config, seed=n, kinds=("text",), text=(n, n))[0] for n in lengths]
    batch = padded(samples, side, metadata=False).to_hf()
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def backbone(model, batch):
    model.model(**batch)


def text_model(model, batch):
    model.model.language_model(**batch)


def embeddings(model, batch):
    mask = batch["attention_mask"].float()  # as prompt tuning of PEFT makes it
    model(inputs_embeds=model.get_input_embeddings()(batch["input_ids"]), attention_mask=mask)


def a_cache(model, batch):
    model(**batch, use_cache=True)


def labels_and_columns(model, batch):
    with pytest.raises(ValueError, match="to match target batch_size"):
        model(**batch, labels=batch["input_ids"], logits_to_keep=2)


CALLS = {
    backbone: r"model.model\(...\).*past the forward that packs. Call the model itself",
    text_model: r"a part of the model was called directly",
    embeddings: r"input_ids is missing; a padded batch is packed by its input_ids and 2D attention_mask",
    a_cache: r"use_cache cannot be had of a packed row",
    labels_and_columns: r"logits_to_keep cannot be had of a packed row",
}
every_call = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@every_call
def test_a_training_step_whose_padding_is_computed_is_warned_of_once(call, attention, side):
    model = enabled(attention=attention)
    batch = batch_of(model, side=side)
    with pytest.warns(UnpackedWarning, match=f"nothing is packed in this training step.*{CALLS[call]}") as said:
        call(model, batch)
        call(model, batch)
    assert len(said) == 1
    assert said[0].filename == __file__, "the caller's line is shown, not ours"


@every_call
def test_no_word_where_there_is_nothing_to_gain(call):
    """No padding; no training."""
    model = enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(model, batch_of(model, lengths=(9, 9)))
        with torch.no_grad():
            call(model, batch_of(model))
        call(model.eval(), batch_of(model))


@pytest.mark.parametrize("use_cache", [True, False])
def test_no_word_of_generation_in_train_mode(use_cache):
    model = enabled()
    batch = batch_of(model, side="left")
    model.generate(**batch, max_new_tokens=2, use_cache=use_cache)


def test_what_is_packed_is_no_cause_for_a_warning():
    model = enabled()
    batch = batch_of(model)
    for flags in ({}, {"logits_to_keep": 3}, {"output_hidden_states": True}, {"return_dict": False}):
        model(**batch, **flags)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_recomputing_a_step_that_was_passed_on_is_no_call_past_the_forward(attention, reentrant):
    """In a thread of its own, as on a GPU."""
    model = enabled("qwen3", attention)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    batch = batch_of(model)
    embedded = model.get_input_embeddings()(batch["input_ids"])
    with pytest.warns(UnpackedWarning, match="input_ids is missing") as said:
        logits = model(inputs_embeds=embedded, attention_mask=batch["attention_mask"]).logits
        with ThreadPoolExecutor() as threads:
            threads.submit(logits.sum().backward).result()
    assert len(said) == 1


def test_a_row_during_which_packing_was_disabled_is_refused():
    """As by another thread."""
    model = enabled("qwen3")
    model.model.layers[0].register_forward_hook(lambda *_: disable_packing(model) and None)
    with pytest.raises(ConfigError, match=r"packing was disabled or enabled again, .* while a row was in the model"):
        model(**batch_of(model))
