"""Peak memory of a call, to the byte and the same every time; versions of packages, with their build."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from vlmpack import machine
from vlmpack.machine import peak_bytes, version_of

KIB = 1024
CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


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


@pytest.mark.parametrize(
    ("loaded", "found"), [({"__version__": "2.15.0+cu132"}, "2.15.0+cu132"), ({}, "2.15.0"), (None, "2.15.0")]
)
def test_an_imported_package_gives_its_own_version_and_others_are_looked_up(
    loaded: dict[str, str] | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert version_of("some-package") is None
    monkeypatch.setattr(machine, "version", lambda package: "2.15.0")
    if loaded is not None:
        module = ModuleType("some_package")
        vars(module).update(loaded)
        monkeypatch.setitem(sys.modules, "some_package", module)
    assert version_of("some-package") == found
    assert ("some_package" in sys.modules) == (loaded is not None)


@pytest.mark.parametrize(
    ("package", "installed", "newer"),
    [
        ("torch", "2.12.1", False),
        ("torch", "2.13.9+cu132", False),
        ("torch", "2.14.0.dev20261120", True),
        ("torch", "10.0", True),
        ("flash-attn", "99.0", False),
    ],
)
def test_a_version_is_newer_than_tested_by_its_first_two_numbers(
    package: str, installed: str, newer: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(machine.NEWEST_TESTED, "torch", "2.13")
    assert machine.is_newer_than_tested(package, installed) is newer


@pytest.mark.parametrize("package", machine.NEWEST_TESTED)
def test_the_versions_that_are_installed_for_tests_are_none_newer(package: str):
    """The pins of `constraints.txt` move first; then these follow, once everything is green."""
    (pinned,) = re.findall(rf"^{package}==([0-9.]+)", CONSTRAINTS.read_text(), re.MULTILINE)[-1:]
    assert not machine.is_newer_than_tested(package, pinned)
