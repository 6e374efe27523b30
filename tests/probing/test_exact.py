"""A probe of families as they are: exact in every circumstance, where plain transformers is not."""

from __future__ import annotations

import pytest
import torch
from cases import EIGHT, FURTHER, slow

from vlmpack.families.registry import FAMILIES
from vlmpack.probing import Report, probe
from vlmpack.probing.report import Baseline
from vlmpack.testing import tiny_model

ROWS = {True: ["one row, [3, 1, T] positions", "one row, [4, 1, T] positions"], False: ["one row, [1, T] positions"]}
PADDED = "a padded batch, 2D mask"


def plain_of(report: Report) -> dict[str, Baseline]:
    return {one.name: one for one in report.plain}


def names(report: Report, finding: str) -> set[str]:
    return {check.name for check in report.checks if check.finding == finding}


@pytest.mark.parametrize("family", [*(name for name in EIGHT if name != "qwen3_5_moe"), *slow("qwen3_5_moe", *FURTHER)])
def test_packed_samples_are_exact_and_a_plain_row_leaks(family: str) -> None:
    kind, report = FAMILIES[family], probe(tiny_model(family, seed=1))
    assert (report.verdict, report.causes) == ("exact", ()), report
    mechanisms = {
        "recurrent state": kind.has("gated_delta") or kind.has("short_conv"),
        "router": kind.has("experts"),
        "vision": kind.has_vision,
    }
    ok = names(report, "ok")
    assert {what for what in mechanisms if what in ok} == {what for what, has in mechanisms.items() if has}
    assert ok >= {"packing", "positions", "mask", "loss count", "head", "sample results"}
    assert ok >= {f"tree: {what}" for what in ("logits", "loss", "sample losses", "tokens")}
    assert len([name for name in ok if name.startswith("tree: exchange")]) == 6
    if family.startswith("qwen"):
        check_plain(family, report)


def check_plain(family: str, report: Report) -> None:
    """A row by hand leaks, and the padded batch does not; in other families it may."""
    kind = FAMILIES[family]
    plain, rows = plain_of(report), ROWS[kind.positions_rule.axes == 3]
    assert list(plain) == [*rows, PADDED]
    delta = ("recurrent state",) if kind.has("gated_delta") else ()
    for name in rows:
        first = "mask" if "3" in name else "cache"
        assert (plain[name].verdict, plain[name].causes) == ("leaks", (first, *delta, "loss count"))
        assert plain[name].leak is not None
        assert plain[name].leak > 0.1
    assert (plain[PADDED].verdict, plain[PADDED].causes) == ("exact", ())


@pytest.mark.parametrize(("family", "dtype"), [("qwen3", torch.float16), ("llama4_text", torch.float64)])
def test_weights_of_other_types_are_probed_too(family: str, dtype: torch.dtype) -> None:
    report = probe(tiny_model(family, dtype=dtype), plain=False, share_prefixes=False)
    assert report.verdict == "exact", report
