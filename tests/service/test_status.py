"""The status page and the metrics."""

from __future__ import annotations

import asyncio
import re

import pytest
from starlette.requests import Request

from vlmpack.service.status import HISTORY, Metric, Snapshot, Status, render, sparkline

NAMES = [
    "uptime_seconds",
    "models",
    "sessions",
    "samplers",
    "checkpoints",
    "queued_requests",
    "trained_tokens_total",
    "sampled_tokens_total",
    "rows_total",
    "computed_tokens_total",
    "patches_total",
]


def snapshot(*, title: str = "tiny", tokens: int = 0, fault: str | None = None) -> Snapshot:
    numbers = tuple(Metric(name=name, help="Help.", value=0.5) for name in NAMES)
    kinds = {"ForwardBackward": 3, "OptimStep": 2}
    by_kind = tuple(
        Metric(name=name, help="Help.", value=kinds) for name in ("requests_total", "requests_failed_total")
    )
    return Snapshot(title=title, metrics=(*numbers, *by_kind), tokens=tokens, fault=fault)


def test_metrics_in_the_format_of_prometheus() -> None:
    status = Status(snapshot=snapshot)
    answer = asyncio.run(status.metrics(Request({"type": "http"})))
    lines = bytes(answer.body).decode().splitlines()
    assert "# TYPE vlmpack_models gauge" in lines
    assert "# TYPE vlmpack_requests_total counter" in lines
    assert 'vlmpack_requests_total{kind="ForwardBackward"} 3' in lines
    assert "vlmpack_models 0.5" in lines
    assert all(re.fullmatch(r'# (HELP|TYPE) .+|vlmpack_\w+(\{\w+="\w+"\})? [-+.e\d]+', line) for line in lines)


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    answer = asyncio.run(Status(snapshot=snapshot).page(Request({"type": "http"})))
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    page = bytes(answer.body).decode()
    assert not re.search(r"<script|<link|<img|https?:|@import|url\(", page)
    assert "requests done</th><td>5</td>" in page
    assert "tokens a row</th><td>0</td>" in page


def test_names_on_the_page_are_text() -> None:
    page = render(snapshot(title="<script>alert(1)</script>", fault="a <b> fault"), [])
    assert "<script>" not in page
    assert "a &lt;b&gt; fault" in page


def test_speed_is_tokens_over_time() -> None:
    times, tokens = iter([0.0, 2.0, 2.0, 6.0]), iter([0, 100, 100, 300, 300])
    status = Status(snapshot=lambda: snapshot(tokens=next(tokens)), clock=lambda: next(times))
    for _ in range(4):
        status.tick()
    page = bytes(asyncio.run(status.page(Request({"type": "http"}))).body).decode()
    assert "50 tokens/s" in page


@pytest.mark.parametrize("count", [0, 1, 2, HISTORY])
def test_the_newest_point_is_at_the_right_and_the_largest_at_the_top(count: int) -> None:
    drawn = re.search(r'points="([^"]*)"', sparkline([float(index) for index in range(count)]))
    assert drawn is not None
    points = [tuple(map(float, point.split(","))) for point in drawn[1].split()]
    assert len(points) == count
    if count > 1:
        assert points[-1] == (600.0, 2.0)
        assert points[0][1] == 58.0
