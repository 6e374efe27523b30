"""Distillation from a teacher's top k equals that of each sample alone, from its whole logits in plain transformers."""

from dataclasses import replace

import pytest
import torch
from cases import slow_cases
from equality import gradients
from model.test_prefix_tree import MASKED, fresh
from shared_rows import relative
from teachers import K, loss_of, taught
from torch.nn import functional as F
from trees import STRANGER, rollouts, samples_of, shared

from vlmpack.errors import ConfigError, LayoutError
from vlmpack.layout import pack, share, unshare
from vlmpack.model import Distillation, PackedStep, StepConfig, ThdStep, enable_packing, topk_divergence
from vlmpack.testing import alone, padded

HALF, SHARP = Distillation(weight=0.5), Distillation(tail=False)
TREE = rollouts(5, 1, 9, 12), STRANGER


def drawn(family):
    samples = samples_of(fresh(family).config, *TREE, masked=MASKED)
    vocab = fresh(family).get_input_embeddings().num_embeddings
    return samples, taught(padded(samples), samples, vocab)


def truth_of(family, samples, settings):
    """The mean loss of every sample by itself, and its gradients."""
    model, total = fresh(family), 0
    for sample in samples:
        logits = model(**alone(sample, labels=False), use_cache=False).logits[0]
        total = total + loss_of(logits, sample, weight=settings.weight, tail=settings.tail)
    loss = total / sum(int((sample["labels"][1:] != -100).sum()) for sample in samples)
    loss.backward()
    return loss.detach(), gradients(model)


def whole(step, row):
    result = step(row)
    result.loss.backward()
    return result


def tree_of(samples, batch):
    return replace(shared(samples), extras=pack(batch).extras)


WAYS = {
    "padded": lambda step, samples, batch: whole(step, batch),
    "dictionary": lambda step, samples, batch: whole(step, pack(batch).to_hf()),
    "row": lambda step, samples, batch: whole(step, pack(batch)),
    "tree": lambda step, samples, batch: whole(step, tree_of(samples, batch)),
    "pieces": lambda step, samples, batch: step.group(tree_of(samples, batch), capacity=40).backward(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("family", "settings"), [("qwen3", Distillation()), ("qwen3_vl", HALF), *slow_cases(("gemma3", SHARP))], ids=str
)
def test_loss_and_gradients_are_those_of_each_sample_alone(family, settings, way):
    samples, batch = drawn(family)
    loss, truth = truth_of(family, samples, settings)
    model = fresh(family)
    step = PackedStep(model, StepConfig(distillation=settings, head_chunk=16))
    result = WAYS[way](step, samples, batch)
    assert relative(result.loss.detach(), loss) <= 1e-6
    found = gradients(model)
    assert found.keys() == truth.keys()
    assert max(relative(found[name], gradient) for name, gradient in truth.items()) <= 1e-5
    assert result.topk_logprobs.shape == (result.num_targets, K + 1)
    assert torch.allclose(result.topk_logprobs.exp().sum(1), torch.ones(result.num_targets), atol=1e-5)
