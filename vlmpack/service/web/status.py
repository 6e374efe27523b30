"""The state of a service for people (GET /) and for Prometheus (GET /metrics).

Both need no key. They show only numbers and the base model's name: no session ids, and no names that clients gave.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from html import escape
from itertools import pairwise
from typing import Any, final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'", "Cache-Control": "no-store"}
TYPES = "text/plain; version=0.0.4; charset=utf-8"

STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { max-width: 44rem; margin: 3rem auto; padding: 0 1rem }
h1 { font-size: 1.3rem; margin-bottom: 0 } h2 { font-size: 1rem; margin: 2rem 0 .4rem }
p { margin: .2rem 0 1.2rem; opacity: .7 }
table { border-collapse: collapse; width: 100% } th { text-align: left; font-weight: 400; opacity: .7 }
td { text-align: right; font-variant-numeric: tabular-nums } tr { border-bottom: 1px solid #8883 }
th, td { padding: .3rem 0 }
.scale { display: flex; justify-content: space-between; font-size: .8rem; opacity: .7 }
svg { display: block; width: 100%; height: 5rem; border: solid #8886; border-width: 0 0 1px 1px }
polyline { fill: none; stroke: #099; stroke-width: 1.5; vector-effect: non-scaling-stroke }
.fault { color: #c33; opacity: 1 }
"""
REMEMBERED = 3600
"""Seconds that the curves show at most."""
EVERY = 5
"""Seconds between two points of a curve."""


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
    "memory_bytes": "Resident memory of the process, and memory that its tensors take on the device.",
    "disk_bytes": "Space of the disk with the state folder, by what is used and what is free.",
}
"""The metrics of a service and their descriptions. Counters end in `_total`. Some metrics have one value per kind."""


@final
@dataclass(frozen=True, kw_only=True)
class ModelLine:
    """A model on the status page."""

    trains: str
    """What is trained, e.g. "LoRA, rank 16"."""
    age: float
    """Seconds since it was created."""
    idle: float
    """Seconds since its last request."""


@final
@dataclass(eq=False)
class History:
    """Tokens trained and sampled in the last hour, for the curves."""

    points: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED // EVERY + 1))
    """(monotonic seconds, tokens trained, tokens sampled) since the start."""

    def add(self, now: float, trained: float, sampled: float) -> None:
        """Add a point."""
        self.points.append((now, trained, sampled))

    def rates(self, which: int) -> list[tuple[float, float]]:
        """Return (seconds before the last point, tokens per second) of training (1) or sampling (2)."""
        end = self.points[-1][0] if self.points else 0.0
        return [
            (end - after[0], (after[which] - before[which]) / (after[0] - before[0]))
            for before, after in pairwise(self.points)
        ]


@final
@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of a service at one time."""

    title: str
    """Name of the base model."""
    numbers: Mapping[str, Any]
    """Values of `METRICS`; a value may be a mapping by kind. Other names are ignored."""
    models: Sequence[ModelLine] = ()
    """The models, newest first."""
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


def routes(snapshot: Callable[[], Snapshot], history: History) -> list[Route]:
    """Return the routes of the status page and of the metrics. `snapshot` returns the current state."""

    def metrics(request: Request) -> Response:
        return Response("\n".join(snapshot().lines()) + "\n", media_type=TYPES)

    def page(request: Request) -> Response:
        return Response(render(snapshot(), history), media_type="text/html", headers=HEADERS)

    return [Route("/", page), Route("/metrics", metrics)]


def render(state: Snapshot, history: History) -> str:
    """Render the status page. It has no scripts and no external resources, and reloads every 5 s."""
    fault = "" if state.fault is None else f'<p class="fault">{escape(state.fault)}</p>'
    memory, disk = state.numbers["memory_bytes"], state.numbers["disk_bytes"]
    rows = max(state.number("rows_total"), 1)
    training = {
        "tokens": _count(state, "trained_tokens_total"),
        "packed rows": _count(state, "rows_total"),
        "tokens per row": f"{state.number('computed_tokens_total') / rows:,.0f}",
        "image patches": _count(state, "patches_total"),
    }
    sampling = {
        "tokens": _count(state, "sampled_tokens_total"),
        "sampling sessions": _count(state, "samplers"),
        "samples that wait or run": _count(state, "queued_samples"),
    }
    requests = {
        "waiting": _count(state, "queued_requests"),
        "done": _count(state, "requests_total"),
        "failed": _count(state, "requests_failed_total"),
    }
    machine = {
        **{f"memory, {kind}": _gigabytes(value) for kind, value in memory.items()},
        **{f"disk of the state folder, {kind}": _gigabytes(value) for kind, value in disk.items()},
        "checkpoints": _count(state, "checkpoints"),
        "sessions": _count(state, "sessions"),
    }
    models = {
        f"{number}: {model.trains}": f"created {_ago(model.age)}, last request {_ago(model.idle)}"
        for number, model in enumerate(state.models, 1)
    }
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="5">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(state.title)}: vlmpack serve</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(state.title)}</h1>"
        f"<p>vlmpack serve, up {timedelta(seconds=int(state.number('uptime_seconds')))}</p>{fault}"
        f"<h2>Training</h2>{_curve(history.rates(1))}{_table(training)}"
        f"<h2>Sampling</h2>{_curve(history.rates(2))}{_table(sampling)}"
        f"<h2>Requests</h2>{_table(requests)}<h2>Machine</h2>{_table(machine)}"
        f"<h2>Models: {len(models)}</h2>{_table(models)}</body></html>\n"
    )


def _table(rows: Mapping[str, str]) -> str:
    body = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows.items())
    return f"<table>{body}</table>"


def _curve(rates: Sequence[tuple[float, float]]) -> str:
    """Draw tokens per second, at most of the last hour, with the scales of both axes."""
    longest = max((ago for ago, _ in rates), default=0.0)
    most = max((rate for _, rate in rates), default=0.0)
    line = " ".join(f"{1 - ago / (longest or 1):.4f},{1 - rate / (most or 1):.4f}" for ago, rate in rates)
    return (
        f'<div class="scale"><span>{most:,.0f} tokens/s</span></div>'
        f'<svg viewBox="0 -.05 1 1.05" preserveAspectRatio="none"><polyline points="{line}"/></svg>'
        f'<div class="scale"><span>{_ago(longest)}</span><span>now</span></div>'
    )


def _count(state: Snapshot, name: str) -> str:
    return f"{state.number(name):,.0f}"


def _gigabytes(value: float) -> str:
    return f"{value / 2**30:,.2f} GiB"


def _ago(seconds: float) -> str:
    return f"{timedelta(seconds=int(seconds))} ago"
