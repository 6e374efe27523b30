"""The status page and the metrics."""

from __future__ import annotations

import re

from starlette.requests import Request
from starlette.responses import Response

from vlmpack.service.queue.journal import ModelRow
from vlmpack.service.web.status import METRICS, History, Snapshot, render, routes
from vlmpack.service.wire.messages import LoraConfig

KINDS = {"ForwardBackward": 3, "OptimStep": 2}


def snapshot(*, title: str = "tiny", fault: str | None = None) -> Snapshot:
    by_kind = {"requests_total": KINDS, "requests_failed_total": KINDS}
    by_kind |= {"memory_bytes": {"process": 2**30}, "disk_bytes": {"used": 2**31, "free": 2**29}}
    lora = LoraConfig(rank=16)
    model = ModelRow(id="m", session="s", base_model=title, lora=lora, created=10_000.0, last_request=17_262.0)
    numbers = {**dict.fromkeys(METRICS, 0.5), **by_kind}
    return Snapshot(title=title, numbers=numbers, now=17_265.0, models=[model], fault=fault)


def answer(path: str) -> Response:
    (route,) = [route for route in routes(snapshot, History()) if route.path == path]
    return route.endpoint(Request({"type": "http"}))


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
    assert "done</th><td>5</td>" in page
    assert "memory, process</th><td>1.00 GiB</td>" in page
    assert "1: LoRA, rank 16</th><td>created 2:01:05 ago, last request 0:00:03 ago</td>" in page


def test_curves_show_tokens_per_second_of_the_last_hour() -> None:
    history = History()
    for now, trained, sampled in ((0.0, 0, 0), (5.0, 0, 50), (10.0, 1000, 50)):
        history.add(now, trained, sampled)
    assert history.rates(1) == [(5.0, 0.0), (0.0, 200.0)]
    page = render(snapshot(), history)
    training, sampling = page.split("<h2>Training</h2>")[1].split("<h2>Sampling</h2>")
    assert "200 tokens/s" in training
    assert "10 tokens/s" in sampling
    assert '<polyline points="0.0000,1.0000 1.0000,0.0000"/>' in training


def test_names_on_the_page_are_text() -> None:
    page = render(snapshot(title="<script>alert(1)</script>", fault="a <b> fault"), History())
    assert "<script>" not in page
    assert "a &lt;b&gt; fault" in page
