"""What routers did with a packed row: what transformers computes on the padded batch with its 2D mask.

The load-balancing loss, the z-loss, and how many tokens each expert was sent.
"""

import pytest
import torch
from cases import families, slow
from equality import checkpointed
from moe import (
    BALANCED,
    EXPERTS,
    LAYERS,
    MOE,
    TOP_K,
    batch_of,
    block_of,
    decoder_layers,
    fresh,
    naive_counts,
    naive_z_loss,
    plain_inputs,
    real_rows,
    router_of,
    rule_for,
    samples_of,
    text_config,
)
from training import distance, gradients

from vlmpack.errors import ConfigError
from vlmpack.layout import SlotRule, pack
from vlmpack.layout.batch import IGNORE
from vlmpack.model import PackedStep, StepConfig, enable_packing
from vlmpack.testing import alone, padded, tiny_model

RELATIVE, GRADIENT = 1e-6, 1e-5
every_family = pytest.mark.parametrize("family", families(lambda family: family.model_type in BALANCED))
few = pytest.mark.parametrize("family", ["qwen3_vl_moe", *slow("qwen3_5_moe", "gpt_oss")])


def close(a, b):
    return torch.isclose(a, b, rtol=RELATIVE, atol=0)


def given_as(batch, given, rule):
    """The inputs of a packed step: a padded batch, or a row that was packed before."""
    return (pack(batch, rule=rule) if given == "row" else batch).to_hf()


def without_first(labels):
    """With left padding Hugging Face's own cross-entropy learns them from padding, and ours would refuse to."""
    return torch.cat((torch.full_like(labels[:1], IGNORE), labels[1:]))


# ---------------------------------------------------------------------- of the row


@pytest.mark.parametrize(("given", "share"), [("padded", 0), ("left padded", 68), ("row", 20)])
@every_family
def test_they_are_those_of_the_padded_batch(family, share, given):
    """Values, and the gradients of the whole loss: cross-entropy, load-balancing loss, z-loss."""
    model, reference = fresh(family), fresh(family)
    samples = [{**sample, "labels": without_first(sample["labels"])} for sample in samples_of(model)]
    batch = padded(samples, "left" if given == "left padded" else "right")
    rule = rule_for(samples, share)
    enable_packing(model, StepConfig(slots=rule, z_loss_coef=0.25))
    theirs = reference(**plain_inputs(batch), output_router_logits=True, num_items_in_batch=40)
    real = real_rows(theirs.router_logits, batch)
    ours = model(**given_as(batch, given, rule), output_router_logits=True, num_items_in_batch=40)

    assert close(ours.aux_loss, theirs.aux_loss)
    assert close(ours.z_loss, naive_z_loss(real))
    assert ours.expert_counts.tolist() == naive_counts(real)
    assert len(ours.router_logits) == LAYERS
    for seen, expected in zip(ours.router_logits, real, strict=True):
        assert (seen - expected).abs().max() <= 2e-5
    total, expected = ours.loss, theirs.loss + 0.25 * naive_z_loss(real)
    assert close(total, expected)
    total.backward()
    expected.backward()
    assert distance(gradients(reference), gradients(model)) <= GRADIENT


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("eager", torch.float32), ("grouped_mm", torch.bfloat16), ("batched_mm", torch.float32)],
)
@pytest.mark.parametrize("family", families(lambda family: family.model_type in MOE))
def test_expert_counts_are_what_experts_were_sent(family, implementation, dtype):
    """Also where two experts are equally good for a token: every router here has two that always are."""
    model = fresh(family, implementation=implementation, dtype=dtype)
    sent = []
    for layer in decoder_layers(model):
        with torch.no_grad():
            router_of(layer).weight[2] = router_of(layer).weight[0]
        block_of(layer).experts.register_forward_pre_hook(lambda experts, args: sent.append(args[1].flatten()))
    row = pack(batch_of(model), rule=SlotRule(multiple=8))
    counts = PackedStep(model)(row, output_router_logits=True).expert_counts
    assert (counts.dtype, list(counts.shape)) == (torch.int64, [LAYERS, EXPERTS])
    assert counts.tolist() == [x.bincount(minlength=EXPERTS).tolist() for x in sent]
    assert counts.sum(1).tolist() == [row.segments.num_tokens * TOP_K] * LAYERS
    assert family not in BALANCED or (counts[:, 0] != counts[:, 2]).any(), (
        "no tie was ever between the last one chosen and the first left out"
    )


# ---------------------------------------------------------------------- sample by sample


@pytest.mark.parametrize("share", [0, 68])
@every_family
def test_sample_by_sample_they_are_the_means_of_the_samples_alone(family, share):
    model, reference = fresh(family), fresh(family)
    samples = samples_of(model)
    outputs = [reference(**alone(sample), output_router_logits=True) for sample in samples]
    aux_loss = torch.stack([output.aux_loss for output in outputs]).mean()
    z_loss = torch.stack([naive_z_loss(output.router_logits) for output in outputs]).mean()
    (aux_loss + z_loss).backward()
    config = StepConfig(aux_loss="sample", slots=rule_for(samples, share))
    found = PackedStep(model, config)(padded(samples), output_router_logits=True)
    (found.aux_loss + found.z_loss).backward()
    assert close(found.aux_loss, aux_loss)
    assert close(found.z_loss, z_loss)
    assert distance(gradients(reference), gradients(model)) <= GRADIENT
    of_the_row = PackedStep(model, StepConfig())(padded(samples), output_router_logits=True)
    assert abs(of_the_row.aux_loss - aux_loss) > 1e-3, "the two are different things"
    assert abs(of_the_row.z_loss - z_loss) > 1e-3, "the two are different things"


# ---------------------------------------------------------------------- when they are computed


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("always", [True, False])
@few
def test_the_load_balancing_loss_is_computed_when_the_model_would(family, always, asked):
    """By argument; by configuration where the installed transformers reads that (5.17 does not for all)."""
    model = fresh(family)
    text_config(model).output_router_logits = always
    batch = batch_of(model)
    more = {} if asked is None else {"output_router_logits": asked}
    theirs = model(**plain_inputs(batch), **more)
    enable_packing(model)
    ours = model(**batch.to_hf(), **more)
    assert (ours.aux_loss is None) == (theirs.aux_loss is None)
    assert close(ours.loss, theirs.loss)
    assert (ours.router_logits is not None) == (ours.expert_counts is not None) == (asked is True)


@few
def test_the_z_loss_joins_the_loss_only_by_its_coefficient(family):
    batch = batch_of(fresh(family))
    plain = PackedStep(fresh(family))(batch)
    assert plain.routers is None
    assert plain.z_loss is plain.aux_loss is plain.expert_counts is plain.router_logits is None
    found = PackedStep(fresh(family), StepConfig(z_loss_coef=0.25))(batch)
    assert found.aux_loss is None
    assert close(found.loss, plain.loss + 0.25 * found.z_loss)
    output = enable_packing(fresh(family), StepConfig(z_loss_coef=0.25))(**batch.to_hf())
    assert close(output.z_loss, found.z_loss)
    assert output.aux_loss is output.expert_counts is output.router_logits is None


@pytest.mark.parametrize("dense", ["qwen3_vl", "qwen3"])
def test_a_dense_model_has_no_routers(dense):
    model = enable_packing(tiny_model(dense))
    row = pack(batch_of(model)).to_hf()
    output = model(**row)
    assert output.aux_loss is output.z_loss is output.expert_counts is None
    with pytest.raises(ConfigError, match="output_router_logits cannot be combined with a packed row"):
        model(**row, output_router_logits=True)
    with pytest.raises(ConfigError, match=f"z_loss_coef is 0.1, but {dense} has no experts; leave it out"):
        enable_packing(model, StepConfig(z_loss_coef=0.1))
    assert torch.equal(model(**row).loss, output.loss), "a refusal changes nothing"


@few
def test_without_labels_they_are_reported_and_part_of_nothing(family):
    model = enable_packing(fresh(family), StepConfig(z_loss_coef=0.25))
    given = batch_of(model).to_hf()
    expected = model(**given, output_router_logits=True)
    del given["labels"]
    output = model(**given, output_router_logits=True)
    assert output.loss is None
    assert torch.equal(output.aux_loss, expected.aux_loss)
    assert torch.equal(output.z_loss, expected.z_loss)


# ---------------------------------------------------------------------- gradients that get lost


@few
def test_reentrant_checkpointing_would_silently_cut_them_off_and_is_refused(family):
    model = checkpointed(fresh(family), reentrant=True)
    batch = batch_of(model)
    theirs = model(**plain_inputs(batch), output_router_logits=True)
    assert not theirs.aux_loss.requires_grad  # transformers adds it to the loss nevertheless
    enable_packing(model)
    with pytest.raises(ConfigError, match=r"router logits have no gradient.*use_reentrant"):
        model(**batch.to_hf(), output_router_logits=True)
    model(**batch.to_hf())
    with pytest.raises(ConfigError, match=r"router logits have no gradient.*use_reentrant"):
        enable_packing(model, StepConfig(z_loss_coef=0.1))(**batch.to_hf())
    model.eval()  # nothing is recomputed then
    assert close(model(**batch.to_hf(), output_router_logits=True).aux_loss, theirs.aux_loss)


@few
def test_blocks_that_do_not_call_their_routers_are_noticed(family):
    """What a kernel in a block's place may do."""

    def zeros(hidden):
        return torch.zeros_like(hidden), None

    model = enable_packing(fresh(family))
    for layer in decoder_layers(model):
        block_of(layer).forward = zeros if family == "gpt_oss" else torch.zeros_like
    given = batch_of(model).to_hf()
    with pytest.raises(ConfigError, match=r"routers saw \[\] tokens of a row of \d+"):
        model(**given, output_router_logits=True)
    model(**given)


@few
def test_frozen_routers_are_no_mistake(family):
    model = enable_packing(fresh(family))
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    loss = model(**batch_of(model).to_hf(), output_router_logits=True).loss
    loss.backward()
    assert model.lm_head.weight.grad.any()
