"""What raises in a probe is one finding: the other checks are made all the same."""

from __future__ import annotations

from typing import Any

import pytest

from vlmpack.probing import Report, checks, probe, reference
from vlmpack.probing.forward_passes import AUTOCAST, LEFT
from vlmpack.probing.report import Check, Part
from vlmpack.testing import tiny_model


def broken(*args: Any, **kwargs: Any) -> Any:
    raise TypeError("this transformers hands over something else")


def failing(report: Report) -> dict[str, tuple[Part, str]]:
    """Names of the checks that raised, with their part of the report and what was raised."""
    assert {check.finding for check in report.checks if check.is_bad} == {"fails"}, report
    return {check.name: (check.part, check.detail) for check in report.checks if check.is_bad}


def ok(report: Report) -> list[Check]:
    return [check for check in report.checks if check.finding == "ok"]


RAISED = "TypeError: this transformers hands over something else"


@pytest.mark.usefixtures("shared_references")
def test_packing_that_cannot_be_enabled_leaves_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "PackedStep", broken)
    report = probe(tiny_model("qwen3", layers=1), share_prefixes=False)
    assert failing(report)["gaps"] == ("equality", RAISED)
    assert {baseline.verdict for baseline in report.plain} == {"leaks", "exact"}


@pytest.mark.usefixtures("shared_references")
def test_a_circumstance_that_raises_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    enable = checks.packing

    def not_left(setup: Any, circumstance: Any) -> Any:
        return broken() if circumstance is LEFT else enable(setup, circumstance)

    monkeypatch.setattr(checks, "packing", not_left)
    report = probe(tiny_model("qwen3", layers=1), plain=False, share_prefixes=False)
    assert {name for name, (part, _) in failing(report).items() if part == "equality"} == {"left"}
    others = {check.name.partition(":")[0] for check in ok(report) if check.part == "equality"}
    assert others == {"gaps", "row", "padded", "autocast"}


@pytest.mark.full
def test_mixed_precision_that_the_model_alone_cannot_do_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_autocast_reference", broken)
    report = probe(tiny_model("qwen3", layers=1), plain=False, share_prefixes=False)
    assert failing(report) == {AUTOCAST.name: ("equality", RAISED)}


@pytest.mark.full
def test_router_losses_that_the_padded_batch_cannot_do_leave_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (reference, checks):
        monkeypatch.setattr(module, "reference_router_losses", broken)
    report = probe(tiny_model("qwen3_moe", layers=1), plain=False)
    assert {*failing(report)} == {"load-balancing loss", "tree: load-balancing loss"}


@pytest.mark.full
def test_samples_that_share_prefixes_and_raise_alone_leave_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "compute_reference", broken)
    report = probe(tiny_model("qwen3", layers=1), plain=False)
    assert failing(report) == {"tree": ("equality", RAISED)}


@pytest.mark.full
@pytest.mark.usefixtures("shared_references")
def test_losses_that_cannot_be_checked_leave_logits_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "check_losses", broken)
    report = probe(tiny_model("qwen3", layers=1), plain=False, share_prefixes=False)
    assert failing(report) == {"loss count": ("mechanism", RAISED)}
    assert "row: logits" in {check.name for check in ok(report)}
