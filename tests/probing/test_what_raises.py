"""What raises in a probe is one finding: the other checks are made all the same."""

from __future__ import annotations

from typing import Any

import pytest

from vlmpack.probing import Report, difference, probe, reference, run
from vlmpack.probing.forward_passes import AUTOCAST, LEFT, Circumstance
from vlmpack.probing.report import Check, CheckPart
from vlmpack.testing import tiny_model


def broken(*args: Any, **kwargs: Any) -> Any:
    raise TypeError("this transformers hands over something else")


def failing(report: Report) -> dict[str, tuple[CheckPart, str]]:
    """Names of the checks that raised, with their part of the report and what was raised."""
    assert {check.finding for check in report.checks if check.is_bad} == {"fails"}, report
    return {check.name: (check.part, check.detail) for check in report.checks if check.is_bad}


def ok(report: Report) -> list[Check]:
    return [check for check in report.checks if check.finding == "ok"]


RAISED = "TypeError: this transformers hands over something else"


@pytest.mark.usefixtures("shared_references")
def test_packing_that_cannot_be_enabled_leaves_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PackedStep", broken)
    report = probe(tiny_model("qwen3", layers=1), share_prefixes=False)
    assert failing(report)["gaps"] == ("equality", RAISED)
    assert {baseline.verdict for baseline in report.plain} == {"leaks", "exact"}


@pytest.mark.usefixtures("shared_references")
def test_a_circumstance_that_raises_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    enable = run.packing

    def not_left(setup: Any, circumstance: Any) -> Any:
        return broken() if circumstance is LEFT else enable(setup, circumstance)

    monkeypatch.setattr(run, "packing", not_left)
    report = probe(tiny_model("qwen3", layers=1), plain=False, share_prefixes=False)
    assert {name for name, (part, _) in failing(report).items() if part == "equality"} == {"left"}
    others = {check.name.partition(":")[0] for check in ok(report) if check.part == "equality"}
    assert others == {"gaps", "row", "padded", "autocast"}


RAISING: dict[str, tuple[Any, str, str, CheckPart]] = {
    "mixed precision that the model alone cannot do": (reference, "_reference", AUTOCAST.name, "equality"),
    "samples that share prefixes and raise alone": (reference, "_reference", "tree", "equality"),
    "results that cannot be checked": (difference, "result_checks", "mechanisms", "mechanism"),
    "router losses of the padded batch": (reference, "reference_router_losses", "load-balancing loss", "equality"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("module", "function", "name", "part"), RAISING.values(), ids=RAISING)
def test_what_raises_leaves_the_others(
    module: Any, function: str, name: str, part: CheckPart, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = getattr(module, function)

    def broken_there(*args: Any, **settings: Any) -> Any:
        circumstances = [each.name for each in args if isinstance(each, Circumstance)]
        return broken() if circumstances in ([], [name]) else own(*args, **settings)

    monkeypatch.setattr(module, function, broken_there)
    report = probe(tiny_model("qwen3_moe", layers=1), plain=False, share_prefixes=name == "tree")
    assert {what.split(": ")[-1]: why for what, why in failing(report).items()} == {name: (part, RAISED)}
    assert "row: logits" in {check.name for check in ok(report)}
