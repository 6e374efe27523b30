"""The state of a service for people (GET /) and for Prometheus (GET /metrics).

Both need no key. They show only numbers and the model's name: no session ids, and no names that clients gave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from html import escape
from typing import Any, final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'", "Cache-Control": "no-store"}
TYPES = "text/plain; version=0.0.4; charset=utf-8"

STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { max-width: 44rem; margin: 3rem auto; padding: 0 1rem }
h1 { font-size: 1.3rem; margin-bottom: 0 } p { margin: .2rem 0 1.2rem; opacity: .7 }
table { border-collapse: collapse; width: 100% } th { text-align: left; font-weight: 400; opacity: .7 }
td { text-align: right; font-variant-numeric: tabular-nums } tr { border-bottom: 1px solid #8883 }
th, td { padding: .3rem 0 }
.fault { color: #c33; opacity: 1 }
"""


METRICS = {
    "uptime_seconds": "Seconds since the start.",
    "up": "1 while work goes on, 0 on a full disk or after a fault.",
    "sessions": "Open sessions.",
    "models": "Models of open sessions.",
    "samplers": "Sampling sessions.",
    "checkpoints": "Checkpoints.",
    "queued_requests": "Requests that wait.",
    "queued_bytes": "Bytes of the bodies of requests that wait.",
    "queued_samples": "Samples that wait or run.",
    "requests_total": "Requests carried out.",
    "requests_failed_total": "Requests that failed.",
    "engine_seconds_total": "Time of the engine.",
    "snapshots_total": "States of models written.",
    "rows_total": "Packed rows.",
    "trained_tokens_total": "Tokens of datums.",
    "computed_tokens_total": "Tokens less what datums shared.",
    "patches_total": "Patches of images.",
    "sampled_tokens_total": "Tokens sampled.",
}
"""The metrics of a service and their descriptions. Counters end in `_total`. Some metrics have one value per kind."""


@final
@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of a service at one time."""

    title: str
    """Name of the base model."""
    numbers: Mapping[str, Any]
    """Values of `METRICS`; a value may be a mapping by kind. Other names are ignored."""
    fault: str | None = None
    """Why the service has stopped working; None: it works."""

    def number(self, name: str) -> float:
        """Return a metric, summed over its kinds."""
        value = self.numbers[name]
        return sum(value.values()) if isinstance(value, Mapping) else value

    def lines(self) -> Iterable[str]:
        """Yield all metrics in Prometheus' text format, line by line."""
        for name, about in METRICS.items():
            value = self.numbers[name]
            yield f"# HELP vlmpack_{name} {about}"
            yield f"# TYPE vlmpack_{name} {'counter' if name.endswith('_total') else 'gauge'}"
            for kind, number in sorted(value.items()) if isinstance(value, Mapping) else (("", value),):
                label = f'{{kind="{kind}"}}' if kind else ""
                yield f"vlmpack_{name}{label} {number:.17g}"


def routes(snapshot: Callable[[], Snapshot]) -> list[Route]:
    """Return the routes of the status page and of the metrics. `snapshot` returns the current state."""

    async def metrics(request: Request) -> Response:
        state = await run_in_threadpool(snapshot)
        return Response("\n".join(state.lines()) + "\n", media_type=TYPES)

    async def page(request: Request) -> Response:
        text = render(await run_in_threadpool(snapshot))
        return Response(text, media_type="text/html", headers=HEADERS)

    return [Route("/", page, methods=["GET"]), Route("/metrics", metrics, methods=["GET"])]


def render(state: Snapshot) -> str:
    """Render the status page. It has no scripts and no external resources, and reloads every 5 s."""
    up = timedelta(seconds=int(state.number("uptime_seconds")))
    fault = "" if state.fault is None else f'<p class="fault">{escape(state.fault)}</p>'
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in _rows(state).items())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="5">'
        f"<title>{escape(state.title)}: vlmpack serve</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(state.title)}</h1><p>vlmpack serve, up {up}</p>{fault}"
        f"<table>{rows}</table></body></html>\n"
    )


def _rows(state: Snapshot) -> dict[str, str]:
    """Return the table of the status page."""
    shown = {
        "models": "models",
        "sessions": "sessions",
        "sampling sessions": "samplers",
        "checkpoints": "checkpoints",
        "requests waiting": "queued_requests",
        "requests done": "requests_total",
        "requests failed": "requests_failed_total",
        "tokens trained": "trained_tokens_total",
        "tokens sampled": "sampled_tokens_total",
        "packed rows": "rows_total",
        "vision patches": "patches_total",
    }
    a_row = state.number("computed_tokens_total") / max(state.number("rows_total"), 1)
    return {text: f"{state.number(name):,.0f}" for text, name in shown.items()} | {"tokens a row": f"{a_row:,.0f}"}
