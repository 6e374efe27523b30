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
from typing import Any, NamedTuple, final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vlmpack.service.queue.journal import ModelRow

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


class Metric(NamedTuple):
    """A number that the service counts."""

    about: str
    """Description, for Prometheus."""
    section: str = ""
    """Section of the status page; empty: it is not there."""
    label: str = ""
    """Name on the status page."""


METRICS = {
    "uptime_seconds": Metric("Seconds since the start."),
    "up": Metric("1 while work goes on, 0 on a full disk or after a fault."),
    "trained_tokens_total": Metric("Tokens of datums.", "Training", "tokens"),
    "computed_tokens_total": Metric("Tokens less what datums shared.", "Training", "tokens, shared prefixes once"),
    "rows_total": Metric("Packed rows.", "Training", "packed rows"),
    "patches_total": Metric("Patches of images.", "Training", "image patches"),
    "sampled_tokens_total": Metric("Tokens sampled.", "Sampling", "tokens"),
    "samplers": Metric("Sampling sessions.", "Sampling", "sampling sessions"),
    "queued_samples": Metric("Samples that wait or run.", "Sampling", "samples that wait or run"),
    "queued_requests": Metric("Requests that wait.", "Requests", "waiting"),
    "queued_bytes": Metric("Bytes of the bodies of requests that wait."),
    "requests_total": Metric("Requests carried out.", "Requests", "done"),
    "requests_failed_total": Metric("Requests that failed.", "Requests", "failed"),
    "engine_seconds_total": Metric("Time of the engine."),
    "snapshots_total": Metric("States of models written."),
    "memory_bytes": Metric("Resident memory, and memory of tensors on the device.", "Machine", "memory"),
    "disk_bytes": Metric("Space of the disk with the state folder.", "Machine", "disk of the state folder"),
    "sessions": Metric("Open sessions.", "Machine", "sessions"),
    "models": Metric("Models of open sessions."),
    "checkpoints": Metric("Checkpoints.", "Machine", "checkpoints"),
}
"""The metrics of a service. Counters end in `_total`. Some metrics have one value per kind."""


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
    now: float
    """Unix seconds."""
    models: Sequence[ModelRow] = ()
    """The models of open sessions, newest first."""
    fault: str | None = None
    """Why the service has stopped working; None: it works."""

    def number(self, name: str) -> float:
        """Return a metric, summed over its kinds."""
        value = self.numbers[name]
        return sum(value.values()) if isinstance(value, Mapping) else value

    def lines(self) -> Iterable[str]:
        """Yield all metrics in Prometheus' text format, line by line."""
        for name, metric in METRICS.items():
            value = self.numbers[name]
            yield f"# HELP vlmpack_{name} {metric.about}"
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
    models = {}
    for number, row in enumerate(state.models, 1):
        trains = "all weights" if row.lora is None else f"LoRA, rank {row.lora.rank}"
        created, last = (_ago(state.now - seconds) for seconds in (row.created, row.last_request))
        models[f"{number}: {trains}"] = f"created {created}, last request {last}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="5">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(state.title)}: vlmpack serve</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(state.title)}</h1>"
        f"<p>vlmpack serve, up {timedelta(seconds=int(state.number('uptime_seconds')))}</p>{fault}"
        f"<h2>Training</h2>{_curve(history.rates(1))}{_table(_rows(state, 'Training'))}"
        f"<h2>Sampling</h2>{_curve(history.rates(2))}{_table(_rows(state, 'Sampling'))}"
        f"<h2>Requests</h2>{_table(_rows(state, 'Requests'))}<h2>Machine</h2>{_table(_rows(state, 'Machine'))}"
        f"<h2>Models: {len(models)}</h2>{_table(models)}</body></html>\n"
    )


def _rows(state: Snapshot, section: str) -> dict[str, str]:
    """Return the numbers of a section by their labels."""
    rows = {}
    for name, metric in METRICS.items():
        if metric.section == section and name.endswith("_bytes"):
            kinds = state.numbers[name].items()
            rows |= {f"{metric.label}, {kind}": f"{value / 2**30:,.2f} GiB" for kind, value in kinds}
        elif metric.section == section:
            rows[metric.label] = f"{state.number(name):,.0f}"
    return rows


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


def _ago(seconds: float) -> str:
    return f"{timedelta(seconds=int(seconds))} ago"
