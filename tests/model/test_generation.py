"""What happens between two training steps, generation above all: neither changes the other."""

import pytest
import torch
from cases import slow

from vlmpack.layout import SlotRule, pack
from vlmpack.model import PackedStep, StepConfig, enable_packing
from vlmpack.testing import mixed_samples, padded, tiny_model
from vlmpack.testing.samples import word_ids

FEW = ["qwen3_vl_moe", "qwen3_5", *slow("qwen2_5_vl", "lfm2_vl", "gemma3", "gpt_oss")]
pytestmark = pytest.mark.chosen


@pytest.mark.parametrize("ways", [{}, {"use_cache": False}], ids=["cache", "no cache"])
@pytest.mark.parametrize("family", FEW)
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


@pytest.mark.parametrize("family", FEW)
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
