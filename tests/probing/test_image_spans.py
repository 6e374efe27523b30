"""The probe of a model whose image tokens, or prefixes, see later ones names its mask when they do not, or when others
see them."""

from __future__ import annotations

from typing import Any

import pytest
from chats import needs

from vlmpack.attention.spans import SpanCall, Spans
from vlmpack.layout import Segments
from vlmpack.model.mechanisms.attention import RowAttention
from vlmpack.probing import probe
from vlmpack.probing.report import Check
from vlmpack.testing import tiny_model

pytestmark = [pytest.mark.full, pytest.mark.every_family]


def checks_of_mask(family: str = "gemma3") -> list[Check]:
    report = probe(tiny_model(family, layers=2), plain=False, share_prefixes=False)
    return [check for check in report.checks if check.part == "mechanism" and check.name == "mask"]


def test_the_mask_of_image_spans_is_right() -> None:
    (check,) = checks_of_mask()
    assert check.finding == "ok"


@pytest.mark.parametrize(
    ("family", "noun"), [("gemma3", "an image"), pytest.param("paligemma", "a prefix", marks=needs("paligemma"))]
)
def test_spans_that_are_dropped_are_named(family: str, noun: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowAttention, "spans_of", lambda self, window: None)
    (check,) = checks_of_mask(family)
    assert (check.finding, check.cause) == ("differs", "mask")
    assert check.detail == (
        f"layer 0: the first token of {noun} does not attend to its last, as it does in the model's own code"
    )


def test_spans_that_reach_into_other_samples_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cut: Any = Spans.cut

    def wide(self: Spans, segments: Segments, keys: Segments, window: int | None) -> tuple[SpanCall, ...]:
        (call,) = cut(self, segments, keys, window)
        return (SpanCall(places=tuple((a, b, 0, end) for a, b, _, end in call.places), window=call.window),)

    monkeypatch.setattr(Spans, "cut", wide)
    (check,) = checks_of_mask()
    assert (check.finding, check.cause) == ("leaks", "mask")
