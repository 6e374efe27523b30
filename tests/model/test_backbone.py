"""Calls of the backbone past the forward: packed, and laid out as the batch."""

import copy
import pickle

import pytest
import torch
from chats import picture, processor_of
from training import collator, receipts

from vlmpack.errors import ConfigError
from vlmpack.layout import PaddedBatch, pack
from vlmpack.model import disable_packing, enable_packing
from vlmpack.model.backbone import pack_backbone
from vlmpack.testing import padded, tiny_model

SIZES = {"hidden": 32, "heads": 2, "layers": 2, "vision_depth": 1}


def hidden_states(model, batch):
    """[B, S, D] of the backbone, without labels, as a trainer with a head of its own calls it."""
    columns = {name: value for name, value in batch.items() if name not in ("labels", "vlmpack")}
    return model.model(**columns, use_cache=False).last_hidden_state


def packing(family="qwen3_vl", **settings):
    """A model whose backbone packs, and the (work, tokens) of each call."""
    calls = []
    model = enable_packing(tiny_model(family, **SIZES))
    pack_backbone(model, report=lambda *call: calls.append(call), **settings)
    return model, calls


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_hidden_states_and_gradients_are_those_of_the_plain_backbone(family):
    model, calls = packing(family)
    plain = tiny_model(family, **SIZES)
    batch = PaddedBatch.from_hf(padded(receipts(model)).to_hf()).to_hf()
    real = batch["attention_mask"].bool()
    states, truth = hidden_states(model, batch), hidden_states(plain, batch)
    assert states.shape == truth.shape
    assert torch.allclose(states[real], truth[real], atol=1e-5)
    assert not states[~real].any()
    weights = torch.randn(truth.shape, generator=torch.Generator().manual_seed(1))
    for found in (states, truth):
        (found[real] * weights[real]).sum().backward()
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        if theirs.grad is not None:
            assert torch.allclose(ours.grad, theirs.grad, atol=1e-4 * float(theirs.grad.abs().max()) + 1e-7), name
    ((work, tokens),) = calls
    assert work.physical_tokens == int(real.sum()) < tokens == real.numel()


def test_logits_of_routers_come_back_as_the_batch():
    model, _ = packing("qwen3_vl_moe")
    batch = padded(receipts(model)).to_hf()
    columns = {name: value for name, value in batch.items() if name not in ("labels", "vlmpack")}
    settings = {"use_cache": False, "output_router_logits": True}
    logits, truth = (m.model(**columns, **settings).router_logits for m in (model, tiny_model("qwen3_vl_moe", **SIZES)))
    real = batch["attention_mask"].bool().flatten()
    assert len(logits) == len(truth) == 2
    for ours, theirs in zip(logits, truth, strict=True):
        assert torch.allclose(ours[real], theirs.view(real.numel(), -1)[real], atol=1e-5)
        assert not ours[~real].any()


def test_a_row_goes_through_as_it_is():
    model, calls = packing()
    batch = padded(receipts(model))
    row = pack(batch)
    columns = {**row.to_hf(), "labels": None}
    states = model.model(**{**columns, "use_cache": False}).last_hidden_state
    expected = hidden_states(model, batch.to_hf())[batch.attention_mask.bool()]
    assert torch.allclose(states[0], expected, atol=1e-6)
    assert len(calls) == 2


def test_beginnings_are_computed_once():
    model, calls = packing(min_shared=4)
    first, *_ = receipts(model)
    columns = [name for name, value in first.items() if value.shape[:1] == first["input_ids"].shape]
    longer = {**first, **{name: torch.cat([first[name], first[name][-3:].flip(0)]) for name in columns}}
    batch = padded([first, longer])
    expected = hidden_states(tiny_model(**SIZES), batch.to_hf())
    states, real = hidden_states(model, batch.to_hf()), batch.attention_mask.bool()
    assert torch.allclose(states[real], expected[real], atol=1e-5)
    assert calls[0][0].physical_tokens < calls[0][0].real_tokens


def test_tiles_of_a_padded_batch_are_shared():
    """[B, N, ...]: samples with fewer tiles than others have padding for tiles, which is no image."""
    processor, calls = processor_of("idefics3"), []
    model, plain = (tiny_model("idefics3", processor=processor, **SIZES) for _ in range(2))
    pack_backbone(enable_packing(model), min_shared=4, report=lambda *call: calls.append(call))
    first, second = picture(64, 64), picture(64, 64, seed=1)
    image, beginning = processor.image_token, f"{processor.image_token}What is the total of it? "
    texts, images = (
        [beginning + "75", f"{beginning}{image}More", beginning + "nothing"],
        [[first], [first, second], [first]],
    )
    batch = processor(text=texts, images=images, padding=True, return_tensors="pt")
    assert batch["pixel_values"].shape[0] == 3
    states, expected = hidden_states(model, batch), hidden_states(plain, batch)
    real = batch["attention_mask"].bool()
    assert torch.allclose(states[real], expected[real], atol=1e-5)
    ((work, _),) = calls
    assert work.physical_tokens < 0.7 * work.real_tokens


def test_the_forward_and_generation_pass_untouched():
    model, calls = packing()
    batch = collator("padded")(receipts(model))
    expected = enable_packing(tiny_model(**SIZES))(**batch).loss.item()
    assert model(**batch).loss.item() == expected
    ids = torch.tensor([[5, 6, 7]])
    drawn = [m.generate(input_ids=ids, max_new_tokens=3, do_sample=False) for m in (model, tiny_model(**SIZES))]
    assert drawn[0].tolist() == drawn[1].tolist()
    assert not calls


def test_it_is_replaced_copied_and_undone():
    model, calls = packing()
    later = []
    pack_backbone(model, report=lambda *call: later.append(call))
    batch = padded(receipts(model)).to_hf()
    states = hidden_states(model, batch)
    assert (len(calls), len(later)) == (0, 1)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(hidden_states(copied, batch), states)
        assert len(later) == 1
    disable_packing(model)
    assert not model.model._forward_hooks
    assert not model.model._forward_pre_hooks
    assert hidden_states(model, batch)[~batch["attention_mask"].bool()].any()  # padding is computed again


def test_what_is_refused():
    with pytest.raises(ConfigError, match="packing is not enabled"):
        pack_backbone(tiny_model(**SIZES))
    model, _ = packing()
    with pytest.raises(ConfigError, match="min_shared"):
        pack_backbone(model, min_shared=0)
    with pytest.raises(ConfigError, match="takes no input 'pixel_mask'"):
        hidden_states(model, {**padded(receipts(model)).to_hf(), "pixel_mask": torch.ones(1)})
