"""The choice of a token: its distribution, what top-k and top-p leave, and when rounding could have changed it."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from vlmpack.service.sampling.choice import Choice, Draw, choose
from vlmpack.service.wire.messages import SamplingParams

ALL = SamplingParams()
LIMITED = [
    SamplingParams(temperature=t, top_k=k, top_p=p) for t, k, p in product((0.3, 1.0, 2.5), (-1, 1, 5), (0.1, 0.8, 1.0))
]


def logits_of(size: int = 97, *, seed: int = 0, rows: int = 1, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * scale


def choose_one(logits: torch.Tensor, params: SamplingParams, *, seed: int = 0, place: int = 0, **kw) -> Choice:
    settings = {"rounding": 0.0, **kw}
    (choice,) = choose(logits, [Draw(params=params, seed=seed, place=place)], **settings)
    return choice


def many(logits: torch.Tensor, params: SamplingParams, *, count: int, places: bool = False) -> np.ndarray:
    draws = [Draw(params=params, seed=0 if places else i, place=i if places else 0) for i in range(count)]
    return np.array([choice.token for choice in choose(logits.expand(count, -1), draws, rounding=0.0)])


@pytest.mark.parametrize("places", [False, True], ids=["over-seeds", "over-places"])
def test_tokens_come_as_often_as_the_softmax_says(places: bool) -> None:
    logits, count = logits_of(23, scale=1.0), 20_000
    seen = np.bincount(many(logits, ALL, count=count, places=places), minlength=23) / count
    probabilities = logits[0].softmax(0).numpy()
    spread = np.sqrt(probabilities * (1 - probabilities) / count)
    assert (np.abs(seen - probabilities) < 4.5 * spread).all()


@pytest.mark.parametrize("params", LIMITED, ids=str)
def test_top_k_and_top_p_leave_what_transformers_leaves(params: SamplingParams) -> None:
    logits = logits_of()
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    scores = warpers(None, logits)  # pyright: ignore[reportArgumentType]
    left = {int(i) for i in (scores[0] > -torch.inf).nonzero()}
    seen = set(many(logits, params, count=1500).tolist())
    assert seen <= left
    likely = {int(i) for i in (scores[0].softmax(0) > 0.02).nonzero()}
    assert likely
    assert likely <= seen


def test_greedy_is_the_largest_logit_whatever_the_seed_and_of_equals_the_first() -> None:
    logits = logits_of()
    greedy = SamplingParams(temperature=0.0, top_k=3, top_p=0.5)
    assert {choose_one(logits, greedy, seed=i).token for i in range(20)} == {int(logits.argmax())}
    logits[0, [40, 30, 50]] = 99.0
    assert choose_one(logits, greedy).token == 30


@pytest.mark.parametrize("temperature", [1e-300, 1e-12, 1e-6])
@pytest.mark.parametrize("limits", [{}, {"top_k": 5}, {"top_p": 0.5}], ids=str)
def test_next_to_no_temperature_is_greedy(temperature: float, limits: dict[str, Any]) -> None:
    logits = logits_of()
    params = SamplingParams(temperature=temperature, **limits)
    choices = [choose_one(logits, params, seed=i, rounding=1e-6) for i in range(20)]
    assert {(choice.token, choice.is_sure) for choice in choices} == {(int(logits.argmax()), True)}


def test_forbidden_ids_are_never_chosen_but_count_in_log_probabilities() -> None:
    logits = logits_of()
    best, second = logits[0].topk(2).indices.tolist()
    choice = choose_one(logits, SamplingParams(temperature=0.0), forbidden=(best,))
    assert choice.token == second
    assert choice.logprob == pytest.approx(float(logits.log_softmax(1)[0, second]), abs=1e-6)
    assert (
        choose_one(logits, SamplingParams(temperature=1e308), forbidden=range(logits.shape[1] - 1)).token
        == logits.shape[1] - 1
    )


@pytest.mark.parametrize("seed", [0, 1, -3, 2**31, 2**63 + 5, -(2**70)])
def test_a_seed_and_a_place_give_one_token_whatever_stands_beside(seed: int) -> None:
    logits, others = logits_of(), logits_of(rows=5, seed=9)
    draws = [Draw(params=LIMITED[i], seed=i, place=i) for i in range(5)]
    for place in range(10):
        alone = choose_one(logits, ALL, seed=seed, place=place)
        wanted = Draw(params=ALL, seed=seed, place=place)
        beside = choose(torch.cat((others[:2], logits, others[2:])), [*draws[:2], wanted, *draws[2:]], rounding=0.0)
        assert beside[2] == alone


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), ALL, *LIMITED], ids=str)
def test_a_sure_choice_stays_the_same_under_errors_up_to_the_rounding(params: SamplingParams) -> None:
    """Errors at random, and those that are worst: half of the tokens up, half down."""
    rounding, generator, count = 0.004, torch.Generator().manual_seed(1), 100
    logits = torch.cat([logits_of(seed=seed) for seed in range(count)])
    draws = [Draw(params=params, seed=seed, place=0) for seed in range(count)]
    seen = choose(logits, draws, rounding=rounding)
    bound = rounding * logits.abs().amax(1, keepdim=True) * 0.999
    changed = 0
    for trial in range(12):
        errors = torch.rand(logits.shape, generator=generator) * 2 - 1
        off = choose(logits + bound * (errors if trial % 2 else errors.sign()), draws, rounding=0.0)
        differs = [a.token != b.token for a, b in zip(seen, off, strict=True)]
        assert not any(choice.is_sure and is_other for choice, is_other in zip(seen, differs, strict=True))
        changed += sum(differs)
    assert sum(choice.is_sure for choice in seen) > count / 2
    if params.top_k != 1:
        assert changed  # errors of this size do change what is not sure


def test_without_rounding_every_choice_is_sure_and_with_infinite_rounding_none_is() -> None:
    logits = torch.zeros(1, 50)
    for params in (SamplingParams(temperature=0.0), ALL, *LIMITED):
        assert choose_one(logits, params).is_sure
        assert not choose_one(logits_of(50), params, rounding=float("inf")).is_sure
