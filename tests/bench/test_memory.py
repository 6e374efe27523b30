"""peak_bytes: what is alive at one time, to the byte, and the same number every time."""

from __future__ import annotations

import gc

import torch

from vlmpack.bench.memory import peak_bytes

KIB = 1024


def kib() -> torch.Tensor:
    return torch.empty(KIB, dtype=torch.uint8)


def test_what_is_freed_before_the_next_is_made_does_not_add_up():
    def one_after_the_other() -> None:
        for _ in range(5):
            kib()

    def together() -> None:
        assert len([kib() for _ in range(5)]) == 5

    assert peak_bytes(one_after_the_other) == KIB
    assert peak_bytes(together) == 5 * KIB


def test_views_and_in_place_operations_weigh_nothing():
    assert peak_bytes(lambda: kib().view(2, -1).add_(1).t()[0]) == KIB


def test_held_tensors_count_once_however_they_are_used():
    weight = kib()
    assert peak_bytes(lambda: weight.view(-1).zero_(), held=[weight, weight]) == KIB
    assert peak_bytes(lambda: weight + 1, held=[weight]) == 2 * KIB


def test_what_the_backward_pass_keeps_is_counted():
    x = torch.ones(KIB // 4, requires_grad=True)

    def chain(links: int) -> None:
        y = x
        for _ in range(links):
            y = y.exp()  # keeps its result for the backward pass
        y.sum().backward()

    growth = peak_bytes(lambda: chain(20)) - peak_bytes(lambda: chain(10))
    assert growth == 10 * KIB


def test_it_is_the_same_every_time_and_leaves_the_garbage_collector_as_it_was():
    model = torch.nn.Sequential(*[torch.nn.Linear(17, 17) for _ in range(5)])

    def step() -> None:
        model.zero_grad()
        model(torch.ones(7, 17)).sum().backward()

    step()
    assert len({peak_bytes(step, held=model.parameters()) for _ in range(3)}) == 1
    assert gc.isenabled()
