"""Choices of experts that rounding alone decides are held to those of the samples alone; others are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vlmpack.probing import probe
from vlmpack.probing import reference as routing
from vlmpack.probing.forward_passes import PlainPaddedPass, ProbedModel
from vlmpack.testing import Sample, tiny_model
from vlmpack.testing.comparison import distance
from vlmpack.testing.samples import synthetic_samples

BY_ROUNDING = 1e-6
"""Part of a router's scores."""


def with_equal_scores() -> tuple[Any, list[torch.nn.Module]]:
    """A model whose experts have the same scores in pairs; a token goes to one of them."""
    model = tiny_model("qwen3_moe").eval()
    routers = [layer.mlp.gate for layer in model.model.layers]
    for router in routers:
        router.top_k = 1
        with torch.no_grad():
            router.weight[1::2] = router.weight[::2]
    return model, routers


def preferring(second: bool, share: float) -> Callable[..., None]:
    """A hook that makes scores of the second experts of all pairs a little larger than those of the first, or smaller.

    The best score of a token is above their mean, 0, so a larger factor makes it larger.
    """

    def hook(module: Any, args: tuple[torch.Tensor]) -> None:
        with torch.no_grad():
            module.weight.data[1::2] = module.weight[::2] * (1 + share if second else 1 - share)

    return hook


def computed(
    share: float, *, second: bool, held: routing.HeldChoices | None = None
) -> tuple[torch.Tensor, routing.Routing]:
    """Logits of a sample alone, with either preference."""
    model, routers = with_equal_scores()
    for router in routers:
        router.register_forward_pre_hook(preferring(second, share))
    probed = ProbedModel.of(model)
    with torch.no_grad(), routing.routing(probed, held) as record:
        return PlainPaddedPass(probed=probed)([sample_of(model)]).logits[0], record


def sample_of(model: Any) -> Sample:
    return synthetic_samples(model.config)[0]


def held_by(record: routing.Routing, share: float) -> routing.HeldChoices:
    rows = len(next(iter(record.choices.values()))[0])
    return routing.HeldChoices(samples=[record.choices], token_indices=[torch.arange(rows)], share=share)


@pytest.mark.parametrize("is_low", [False, True])
def test_a_choice_between_equal_scores_is_held_and_counted(is_low: bool) -> None:
    before, chosen = computed(BY_ROUNDING, second=False)
    free, _ = computed(BY_ROUNDING, second=True)
    after, record = computed(BY_ROUNDING, second=True, held=held_by(chosen, routing.OPEN[is_low]))
    assert distance(free, before) > 1e-3
    assert distance(after, before) < 1e-5
    assert record.held > 0


def test_a_choice_between_other_scores_is_not_held() -> None:
    _, chosen = computed(0.5, second=False)
    free, _ = computed(0.5, second=True)
    after, record = computed(0.5, second=True, held=held_by(chosen, routing.OPEN[True]))
    assert record.held == 0
    assert torch.equal(after, free)


def test_every_choice_is_held_where_samples_are_exchanged() -> None:
    _, chosen = computed(0.5, second=False)
    _, record = computed(0.5, second=True, held=held_by(chosen, routing.HOLD_ALL))
    assert all(torch.equal(record.choices[name][0], calls[0]) for name, calls in chosen.choices.items())


def test_tokens_are_found_in_a_row_of_real_tokens_and_in_one_with_gaps() -> None:
    samples = [{"mlp": [torch.tensor([[1], [2]])]}, {"mlp": [torch.tensor([[3]])]}]
    held = routing.HeldChoices(samples=samples, token_indices=[torch.tensor([0, 1]), torch.tensor([4])], share=0.0)
    for rows, token_indices in ((3, [0, 1, 2]), (8, [0, 1, 4])):
        found = held.for_rows("mlp", 0, rows, 1)
        assert found is not None
        assert (found[0].tolist(), found[1].flatten().tolist()) == (token_indices, [1, 2, 3])
    assert held.for_rows("mlp", 0, 4, 1) is None, "a row that ends before the last token"
    assert held.for_rows("mlp", 1, 3, 1) is None, "a second top-k that the samples alone do not run"
    assert held.for_rows("mlp", 0, 3, 2) is None, "another number of experts"


def by_length(module: Any, args: tuple[torch.Tensor]) -> None:
    """Rounding that depends on the number of rows, as that of products does."""
    rows = args[0].numel() // args[0].shape[-1]
    preferring(rows > 150, BY_ROUNDING)(module, args)


def mixing(module: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (args[0] + 0.02 * args[0].mean(-2, keepdim=True),)


@pytest.mark.slow
def test_a_probe_gives_no_false_alarm_where_rounding_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    model, routers = with_equal_scores()
    for router in routers:
        router.register_forward_pre_hook(by_length)
    report = probe(model, plain=False, share_prefixes=False)
    assert report.verdict == "exact", report
    assert "row: routers' gradient" in {check.name for check in report.checks if check.finding == "not counted"}
    assert {"gaps: choice of experts", "autocast: choice of experts"} <= {check.name for check in report.checks}
    for low in routing.OPEN:
        monkeypatch.setitem(routing.OPEN, low, -1.0)
    report = probe(model, plain=False, share_prefixes=False)
    assert "gaps: logits" in {check.name for check in report.checks if check.is_bad}


@pytest.mark.slow
def test_a_leak_into_a_router_is_found() -> None:
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_pre_hook(mixing)
    assert probe(model, plain=False, share_prefixes=False).verdict == "leaks"
