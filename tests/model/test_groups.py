"""Groups larger than a row go through the model in pieces: every sample is what it is alone in plain transformers, and
each token goes through the model once."""

from contextlib import suppress

import pytest
import torch
from cases import families, slow
from equality import alone_through, check_gradients, gradients
from model.test_prefix_tree import CIRCUMSTANCES, MASKED, counted, fresh, limits
from trees import DEEP, STRANGER, VIDEOS, rollouts, samples_of, shared

from vlmpack.errors import ConfigError, LayoutError
from vlmpack.families.registry import FAMILIES
from vlmpack.layout import unshare
from vlmpack.model import PackedStep, StepConfig
from vlmpack.model.plain import find_model

GROUPS = {
    "deep": (DEEP, STRANGER),
    "rollouts": (rollouts(5, 1, 9, 1, 5, 12, 3, 8),),
    "videos": (VIDEOS, rollouts(3, 6)),
}
REFUSED = ("gated_delta", "short_conv", "per_sample")
CAPACITIES = 20, 40, 80, 160


def in_pieces(step, row, **settings):
    """The group in pieces as small as its images allow."""
    for capacity in CAPACITIES:
        with suppress(LayoutError):
            return step.group(row, capacity=capacity, **settings)
    raise AssertionError("no capacity is enough")


def check_group(family, name, prepare=lambda model: model, given=lambda row: row):
    samples = samples_of(fresh(family).config, *GROUPS[name], masked=MASKED)
    alone, model = alone_through(prepare(fresh(family)), samples), prepare(fresh(family))
    row = given(shared(samples))
    group = in_pieces(PackedStep(model), row)
    with counted(find_model(model)) as seen:
        result = group.backward()
    assert len(group) > 1
    assert torch.allclose(result.loss, alone.loss, rtol=1e-6, atol=0)
    assert torch.allclose(result.target_logprobs, -alone.outcome.target_losses, rtol=0, atol=5e-6)
    check_gradients(alone, gradients(model), limits(family))
    tree = row.segments if row.tree is None else row.tree
    work = result.work
    assert (work.physical_tokens, work.real_tokens) == (tree.num_tokens, row.segments.num_tokens)
    if FAMILIES[family].has_grids:
        whole = PackedStep(fresh(family))(row).work
        assert work.attended_pairs == whole.attended_pairs
        assert work.vision_patches == seen["patches"] == whole.vision_patches, "each image goes through the tower once"


@pytest.mark.parametrize(
    "family", families(lambda family: not any(map(family.has, REFUSED)), always=["qwen3", "qwen3_vl"])
)
def test_every_sample_is_what_it_is_alone_and_no_token_is_computed_twice(family):
    check_group(family, "deep")


@pytest.mark.parametrize("name", [name for name in GROUPS if name != "deep"])
def test_so_it_is_with_other_groups(name):
    check_group("qwen3_vl", name)


def test_samples_that_share_nothing_go_through_in_pieces_too():
    check_group("qwen3_vl", "rollouts", given=unshare)


@pytest.mark.parametrize("name", ["checkpointing", "reentrant checkpointing", "LoRA", *slow("LoRA, checkpointing")])
@pytest.mark.parametrize("family", ["qwen3_vl", *slow("gemma3")])
def test_in_every_circumstance_of_training(family, name):
    check_group(family, "rollouts", CIRCUMSTANCES[name])


def test_each_piece_may_have_a_loss_of_its_own():
    """Advantages of opposite sign: a sample keeps its index and its positions in every piece."""
    samples = samples_of(fresh("qwen3").config, rollouts(4, 6, 3, images=0))
    weights, whole, model = torch.tensor([1.0, -2.0, 0.25]), fresh("qwen3"), fresh("qwen3")
    (PackedStep(whole)(shared(samples)).logprobs * weights[:, None]).sum().backward()
    group = PackedStep(model).group(shared(samples), capacity=12)
    result = group.backward(lambda piece: (piece.result.logprobs * weights[list(piece.samples), None]).sum())
    for (name, ours), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert (ours.grad - expected.grad).abs().max() <= 1e-5 * expected.grad.abs().max(), name
    assert torch.allclose(result.logprobs, PackedStep(whole)(shared(samples)).logprobs, atol=5e-6)
    assert torch.allclose(group.forward().logprobs, result.logprobs, atol=0)


REFUSALS = {
    "sparse attention": ("qwen4_exp", StepConfig(), {}, ConfigError, "give groups that fit a row"),
    "routers of a row": (
        "qwen3_moe",
        StepConfig(),
        {"output_router_logits": True},
        ConfigError,
        r'StepConfig\(aux_loss="sample"\)',
    ),
    "no capacity": ("qwen3", StepConfig(), {"capacity": 0}, ConfigError, "capacity"),
    "an image": ("gemma3", StepConfig(), {"capacity": 20}, LayoutError, "sample 0 .* give a capacity of 31"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_exact_is_refused_before_the_first_forward(name):
    family, config, settings, error, words = REFUSALS[name]
    model = fresh(family)
    row = shared(samples_of(model.config, rollouts(4, 6)))
    with pytest.raises(error, match=words):
        PackedStep(model, config).group(row, **{"capacity": 40, **settings})


def test_a_piece_without_its_backward_pass_is_not_passed_over():
    model = fresh("qwen3")
    group = PackedStep(model).group(shared(samples_of(model.config, rollouts(4, 6))), capacity=12)
    with pytest.raises(ConfigError, match="piece 0 of the group had no backward pass"):
        list(group)
    with pytest.raises(ConfigError, match="1 of 2 pieces"):
        _ = group.result
