"""generate() on an enabled model: the same tokens as from the untouched one, left-padded batches with images too."""

from __future__ import annotations

import pytest
import torch
from training import receipts, train

from vlmpack.model import enable_packing
from vlmpack.testing import alone, padded, tiny_model

FAMILIES = ("qwen2_5_vl", "qwen3_vl_moe", "qwen3_5")


def prompts(model, side):
    """Four samples in one batch; what a processor gives, without labels or host metadata."""
    batch = padded(receipts(model)[:4], side, metadata=False).to_hf()
    return {name: value for name, value in batch.items() if name != "labels"}


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_left_padded_batch(family, use_cache):
    untouched, model = tiny_model(family).eval(), enable_packing(tiny_model(family)).eval()
    settings = {"max_new_tokens": 6, "do_sample": False, "use_cache": use_cache, "eos_token_id": None}
    expected = untouched.generate(**prompts(model, "left"), **settings)
    assert expected.shape[1] == prompts(model, "left")["input_ids"].shape[1] + 6
    assert torch.equal(model.generate(**prompts(model, "left"), **settings), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_sample_after_training(family, tmp_path):
    model, untouched = enable_packing(tiny_model(family)), tiny_model(family).eval()
    samples = receipts(model)
    train(model, samples, tmp_path)
    untouched.load_state_dict(model.state_dict())
    prompt = {name: value for name, value in alone(samples[2]).items() if name != "labels"}
    prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
    settings = {"max_new_tokens": 6, "do_sample": False, "use_cache": True, "eos_token_id": None}
    expected = untouched.generate(**prompt, **settings)
    assert torch.equal(model.eval().generate(**prompt, **settings), expected)
