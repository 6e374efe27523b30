"""Gradients that are sent together: in order, of one type, none left out, and each looked at once."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlmpack.context_parallel import mesh as gradients

CPU, DEVICE = torch.device("cpu"), torch.device("meta")


def gradient(numbers: int, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Any:
    """What is read of a gradient, and how often its size is."""
    seen = SimpleNamespace(dtype=dtype, device=device, reads=0)

    def numel() -> int:
        seen.reads += 1
        return numbers

    seen.numel = numel
    return seen


def sizes(found: list[list[Any]]) -> list[int]:
    return [len(bucket) for bucket in found]


def test_no_gradient_is_left_out_or_moved() -> None:
    grads = [gradient(n) for n in (3, 1, 4, 1, 5)]
    assert [grad for bucket in gradients._buckets(grads) for grad in bucket] == grads


def test_a_bucket_is_of_one_type_and_on_one_device() -> None:
    half = torch.bfloat16
    grads = [gradient(1), gradient(1), gradient(1, half), gradient(1, half, DEVICE), gradient(1)]
    assert sizes(list(gradients._buckets(grads))) == [2, 1, 1, 1]


def test_a_bucket_ends_with_the_gradient_that_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_BUCKET", 10)
    found = list(gradients._buckets([gradient(n) for n in (6, 4, 3, 20, 1)]))
    assert sizes(found) == [2, 2, 1]


def test_the_size_of_each_is_read_once_however_many_there_are() -> None:
    grads = [gradient(1) for _ in range(50)]
    assert sizes(list(gradients._buckets(grads))) == [50]
    assert Counter(grad.reads for grad in grads) == {1: 50}


def test_nothing_to_send() -> None:
    assert list(gradients._buckets([])) == []
