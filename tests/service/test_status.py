"""The status page and the metrics."""

from __future__ import annotations

import asyncio
import re

from starlette.requests import Request
from starlette.responses import Response

from vlmpack.service.status import METRICS, Snapshot, render, routes

KINDS = {"ForwardBackward": 3, "OptimStep": 2}


def snapshot(*, title: str = "tiny", fault: str | None = None) -> Snapshot:
    by_kind = {"requests_total": KINDS, "requests_failed_total": KINDS}
    return Snapshot(title=title, numbers={**dict.fromkeys(METRICS, 0.5), **by_kind}, fault=fault)


def answer(path: str) -> Response:
    (route,) = [route for route in routes(snapshot) if route.path == path]
    return asyncio.run(route.endpoint(Request({"type": "http"})))


def test_metrics_in_the_format_of_prometheus() -> None:
    lines = bytes(answer("/metrics").body).decode().splitlines()
    assert "# TYPE vlmpack_models gauge" in lines
    assert "# TYPE vlmpack_requests_total counter" in lines
    assert 'vlmpack_requests_total{kind="ForwardBackward"} 3' in lines
    assert "vlmpack_models 0.5" in lines
    assert all(re.fullmatch(r'# (HELP|TYPE) .+|vlmpack_\w+(\{\w+="\w+"\})? [-+.e\d]+', line) for line in lines)


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    got = answer("/")
    assert got.headers["content-security-policy"].startswith("default-src 'none'")
    page = bytes(got.body).decode()
    assert not re.search(r"<script|<link|<img|https?:|@import|url\(", page)
    assert "requests done</th><td>5</td>" in page
    assert "tokens a row</th><td>0</td>" in page


def test_names_on_the_page_are_text() -> None:
    page = render(snapshot(title="<script>alert(1)</script>", fault="a <b> fault"))
    assert "<script>" not in page
    assert "a &lt;b&gt; fault" in page
