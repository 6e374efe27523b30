"""A report tells its verdict in one line, and everything in a notebook."""

from __future__ import annotations

import pytest

from vlmpack.probing.report import Check, Finding, Report


def report(*findings: Finding) -> Report:
    checks = tuple(Check(part="isolation", name=f"row: sample {at}", finding=f) for at, f in enumerate(findings))
    return Report(
        model="Qwen3VLForConditionalGeneration",
        family="qwen3_vl",
        weights="as given",
        device="cpu",
        dtype="float32",
        attention="sdpa_segments",
        samples=("text, 5 tokens",),
        row_tokens=8,
        checks=checks,
        circumstances={},
        plain=(),
    )


@pytest.mark.parametrize(
    ("findings", "told"),
    [
        (("ok", "ok"), "exact; 2 checks, 0 bad)"),
        (("ok", "leaks", "leaks"), "leaks (unknown); 3 checks, 2 bad)"),
        ((), "exact; 0 checks, 0 bad)"),
    ],
)
def test_a_report_tells_its_verdict_in_one_line(findings: tuple[Finding, ...], told: str) -> None:
    head = "Report(Qwen3VLForConditionalGeneration (as given), cpu, float32, sdpa_segments: "
    assert repr(report(*findings)) == head + told


def test_a_notebook_shows_the_table() -> None:
    one, shown = report("ok", "leaks"), []

    class Printer:
        """As IPython gives it to `_repr_pretty_`."""

        text = shown.append

    one._repr_pretty_(Printer(), cycle=False)
    assert shown == [str(one)]
    assert len(str(one).splitlines()) == 4
