"""**A packed sample gets exactly what it would get alone**: losses, log-probabilities, logits, positions, and every
gradient, the vision tower's included. In eight families, from a padded batch, a packed row and prefix trees.

A test of values alone can pass for a wrong reason, so the work is counted too: padding that is not there cannot have
been computed.
"""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from tests.oracle.packed import LAYOUTS, MIN_SHARED, collator_of, outcome_of, run_of, talks_of
from tests.oracle.plain import (
    CASES,
    TOLERANCE,
    Case,
    apart,
    differences,
    gradient_differences,
    media_of,
)
from vlmpack import PackedStep

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@every_layout
@every_case
def test_losses_log_probabilities_and_gradients_are_those_alone(case: Case, layout: str) -> None:
    run = run_of(case, layout)
    assert differences(run.packed, run.alone) == []
    assert len(run.alone.targets) == len(run.samples) > 2
    assert min(run.alone.targets) > 2


@every_layout
@pytest.mark.parametrize("case", [CASES[3], CASES[5]], ids=str)
def test_losses_are_those_alone_where_no_gradient_is_computed(case: Case, layout: str) -> None:
    """Layers may compute a row in another way then."""
    run = run_of(case, layout)
    with torch.no_grad():
        result = PackedStep(case.model())(collator_of(case, layout).collate(talks_of(case, layout)))
    assert differences(outcome_of(result, run.samples, run.alone.gradients), run.alone) == []


@every_layout
@every_case
def test_the_loss_is_the_mean_over_all_targets(case: Case, layout: str) -> None:
    run = run_of(case, layout)
    assert run.result.num_targets == sum(run.alone.targets)
    assert run.result.loss.item() == pytest.approx(run.alone.loss, rel=TOLERANCE["losses"])


@every_layout
@pytest.mark.parametrize("case", [case for case in CASES if case.has_images], ids=str)
def test_the_vision_tower_is_trained_alike(case: Case, layout: str) -> None:
    run = run_of(case, layout)
    towers = [
        {name: gradient for name, gradient in outcome.gradients.items() if "vis" in name}
        for outcome in (run.packed, run.alone)
    ]
    assert gradient_differences(*towers) == []
    assert sum(float(gradient.abs().max()) > 1e-4 for gradient in towers[1].values()) > 10


@every_case
def test_all_logits_are_those_alone(case: Case) -> None:
    run = run_of(case, "packed")
    model = case.model()
    for logits, sample, length in zip(run.result.logits, run.samples, run.lengths, strict=True):
        inputs = {name: value for name, value in sample.items() if name != "labels"}
        with torch.no_grad():
            expected = model(**inputs, use_cache=False).logits[0]
        assert apart(logits[:length], expected) <= TOLERANCE["logprobs"]
        assert not logits[length:].any(), "padding has logits of 0"


@every_case
def test_positions_restart_in_every_sample(case: Case) -> None:
    run = run_of(case, "packed")
    (packed,) = run.packed.positions
    assert packed.equal(torch.cat(run.alone.positions, 1))
    assert packed.shape[1] == sum(run.lengths)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@every_case
def test_not_one_token_of_padding_is_computed(case: Case, layout: str) -> None:
    run = run_of(case, layout)
    assert run.result.work.real_tokens == run.result.work.physical_tokens == sum(run.lengths)
    assert run.packed.positions[0].shape[1] == sum(run.lengths), "tokens that reached the layers"


@every_case
def test_a_shared_beginning_is_computed_once(case: Case) -> None:
    run = run_of(case, "tree")
    ids = [sample["input_ids"][0].tolist() for sample in run.samples]
    shared = {pair: common(ids[pair[0]], ids[pair[1]]) for pair in combinations(range(4), 2)}
    group = [pair for pair, count in shared.items() if count >= MIN_SHARED]
    assert group == [(0, 1), (0, 3), (1, 3)], "sample 2 is of something else"
    (beginning,) = {shared[pair] for pair in group}
    assert run.result.work.physical_tokens == sum(run.lengths) - 2 * beginning
    assert run.packed.positions[0].shape[1] == sum(run.lengths) - 2 * beginning
    assert run.result.work.real_tokens == sum(run.lengths)


@every_case
def test_what_branches_twice_is_computed_once_up_to_each_branching(case: Case) -> None:
    run = run_of(case, "deep tree")
    ids = [sample["input_ids"][0].tolist() for sample in run.samples]
    first, second = common(ids[0], ids[1]), common(ids[1], ids[2])
    assert min(first, second - first) >= MIN_SHARED
    assert common(ids[0], ids[2]) == first
    distinct = {tuple(sample[:length]) for sample in ids for length in range(1, len(sample) + 1)}
    assert run.result.work.physical_tokens == len(distinct) == sum(run.lengths) - first - second


@pytest.mark.parametrize("case", [case for case in CASES if case.has_images], ids=str)
def test_a_shared_image_is_computed_once(case: Case) -> None:
    row = collator_of(case, "tree")(talks_of(case, "tree"))
    first, _, other, _ = [media_of(sample)["pixel_values"] for sample in run_of(case, "tree").samples]
    assert row["pixel_values"].equal(torch.cat([first, other]))


def common(one: list[int], other: list[int]) -> int:
    """Tokens with which both begin."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count
