"""Distillation from a teacher's top k equals that of each sample alone, from its whole logits in plain transformers."""

from dataclasses import replace

import pytest
import torch
from cases import slow_cases
from equality import gradients
from model.test_prefix_tree import MASKED, fresh
from shared_rows import relative
from teachers import K, loss_of, taught
from trees import STRANGER, rollouts, samples_of, shared

from vlmpack.errors import ConfigError, LayoutError
from vlmpack.layout import pack
from vlmpack.layout.batch import NO_ENTRY
from vlmpack.model import Distillation, PackedStep, StepConfig, ThdStep, enable_packing, topk_divergence
from vlmpack.testing import alone, padded

HALF, SHARP = Distillation(weight=0.5), Distillation(tail=False)
TREE = rollouts(5, 1, 9, 12), STRANGER


def drawn(family):
    samples = samples_of(fresh(family).config, *TREE, masked=MASKED)
    vocab = fresh(family).get_input_embeddings().num_embeddings
    batch = taught(padded(samples), samples, vocab)
    batch.extras["topk_ids"][:, -1] = NO_ENTRY  # the last sample has no teacher
    return samples, batch


def truth_of(family, samples, settings):
    """The mean loss of every sample by itself, and its gradients."""
    model, total = fresh(family), 0
    for sample in samples:
        logits = model(**alone(sample, labels=False), use_cache=False).logits[0]
        weight = 0 if sample is samples[-1] else settings.weight
        total = total + loss_of(logits, sample, weight=weight, tail=settings.tail)
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


def test_ids_alone_are_scored_and_change_no_loss():
    row = pack(drawn("qwen3")[1])
    step = PackedStep(fresh("qwen3"))
    plain, scored = step(replace(row, extras={})), step(replace(row, extras={"topk_ids": row.extras["topk_ids"]}))
    assert torch.equal(plain.loss, scored.loss)
    assert scored.topk_logprobs.shape == (scored.num_targets, K + 1)
    assert plain.topk_logprobs is None


def test_a_teacher_that_is_the_model_is_no_distance_away():
    logits = torch.randn(5, 11)
    known, q = torch.arange(3), logits.softmax(-1)
    topk = torch.cat([q[:, known], q[:, 3:].sum(1, keepdim=True)], 1).log()
    for tail in (True, False):
        assert topk_divergence(topk, q[:, known].log(), tail=tail).abs().max() < 1e-6
    impossible = torch.tensor([[0.0, -torch.inf]])  # all of the teacher's probability is on one id
    assert topk_divergence(impossible.new_tensor([[-1.0, -2.0, -3.0]]), impossible).tolist() == [1.0]


def at_targets(name, change):
    """The row with changed entries of a teacher at token 5 of the second sample, which is a target."""

    def changed(row):
        column = row.extras[name].clone()
        column[:, 0, row.segments.stride[1] + 5] = change(column[:, 0, row.segments.stride[1] + 5])
        return replace(row, extras={**row.extras, name: column})

    return changed


REFUSED = {
    r"sample 1, token 5, .*: topk_ids .* outside the vocabulary": at_targets("topk_ids", lambda ids: ids + 10**6),
    r"sample 1, token 5, \[7, 7, 7\]: topk_ids holds an id twice": at_targets("topk_ids", lambda ids: ids * 0 + 7),
    "sample 1, token 5, .* more than 1: give log-prob": at_targets("topk_logprobs", lambda logits: logits * 0),
    "sample 1, token 5, .* add up to nothing": at_targets("topk_logprobs", lambda logits: logits * torch.nan),
    "the row has topk_logprobs but no topk_ids": lambda row: replace(row, extras={"topk_logprobs": torch.zeros(1)}),
    r"give K ids of each token, \[K, 1, T\]": lambda row: replace(row, extras={"topk_ids": row.input_ids}),
    r"topk_ids is \[1, \d+, 3\]; give": lambda row: replace(
        row, extras={"topk_ids": row.extras["topk_ids"].permute(1, 2, 0)}
    ),
    "topk_logprobs is torch.int64": lambda row: replace(row, extras=dict.fromkeys(row.extras, row.extras["topk_ids"])),
    "the last token of a sample has a target": lambda row: replace(row, shift_labels=row.input_ids, metadata=None),
}


@pytest.mark.parametrize("match", REFUSED)
def test_entries_that_are_no_teachers_are_refused(match):
    _, batch = drawn("qwen3")
    with pytest.raises(LayoutError, match=match):
        PackedStep(fresh("qwen3"))(REFUSED[match](pack(batch)))


def test_a_teacher_is_never_ignored():
    samples, batch = drawn("qwen3")
    model, row = fresh("qwen3"), pack(batch)
    for given in (batch, row, pack(taught(padded(samples[:1]), samples[:1], 50))):
        with pytest.raises(ConfigError, match="reached a model without passing through the packed forward"):
            model(**given.to_hf())
    enable_packing(model)
    with pytest.raises(ConfigError, match="topk_ids would be ignored, because this batch is not packed"):
        model(**{**batch.to_hf(), "use_cache": True})
    with pytest.raises(ConfigError, match="the row has topk_ids, which a model that takes boundaries would ignore"):
        ThdStep(lambda input_ids, cu_seqlens_q, position_ids: input_ids)(row)
    with pytest.raises(ConfigError, match="distillation weight is 2; it is a share, from 0 to 1"):
        Distillation(weight=2)
