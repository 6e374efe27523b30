"""The state of a service for people and for Prometheus: GET / and GET /metrics.

Both are served without the key, and hold numbers alone: no ids of sessions, no names that clients gave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from html import escape
from typing import final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

SECONDS_A_DAY = 86_400

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "Cache-Control": "no-store",
}
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


@final
@dataclass(frozen=True, kw_only=True)
class Metric:
    """One number, or one for each value of a label."""

    name: str
    """Without the prefix `vlmpack_`; a counter ends in `_total`."""
    help: str
    """One line."""
    value: float | Mapping[str, float]
    """The number, or numbers by the value of the label."""
    label: str = "kind"
    """Name of the label."""

    def lines(self) -> Iterable[str]:
        """Yield its lines in Prometheus' text format."""
        yield f"# HELP vlmpack_{self.name} {self.help}"
        yield f"# TYPE vlmpack_{self.name} {'counter' if self.name.endswith('_total') else 'gauge'}"
        if isinstance(self.value, Mapping):
            for kind, number in sorted(self.value.items()):
                yield f'vlmpack_{self.name}{{{self.label}="{kind}"}} {number:.17g}'
        else:
            yield f"vlmpack_{self.name} {self.value:.17g}"


@final
@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of a service at one time."""

    title: str
    """Name of the base model."""
    metrics: tuple[Metric, ...]
    """Numbers."""
    fault: str | None = None
    """Why the service does not go on; None: it does."""

    def number(self, name: str) -> float:
        """Return a metric, summed over its label."""
        value = next(metric.value for metric in self.metrics if metric.name == name)
        return sum(value.values()) if isinstance(value, Mapping) else value


def routes(snapshot: Callable[[], Snapshot]) -> list[Route]:
    """Return the routes of the page and of the metrics; `snapshot` returns the state."""

    async def metrics(request: Request) -> Response:
        state = await run_in_threadpool(snapshot)
        lines = [line for metric in state.metrics for line in metric.lines()]
        return Response("\n".join(lines) + "\n", media_type=TYPES)

    async def page(request: Request) -> Response:
        text = render(await run_in_threadpool(snapshot))
        return Response(text, media_type="text/html", headers=HEADERS)

    return [Route("/", page, methods=["GET"]), Route("/metrics", metrics, methods=["GET"])]


def render(state: Snapshot) -> str:
    """Write the status page: no scripts, nothing loaded from elsewhere; it loads itself again every 5 s."""
    fault = "" if state.fault is None else f'<p class="fault">{escape(state.fault)}</p>'
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in _rows(state).items())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="5">'
        f"<title>{escape(state.title)}: vlmpack serve</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(state.title)}</h1><p>vlmpack serve, up {_span(state.number('uptime_seconds'))}</p>{fault}"
        f"<table>{rows}</table></body></html>\n"
    )


def _rows(state: Snapshot) -> dict[str, str]:
    """Return the table of the status page."""
    number = state.number
    return {
        "models": f"{number('models'):,.0f}",
        "sessions": f"{number('sessions'):,.0f}",
        "sampling sessions": f"{number('samplers'):,.0f}",
        "checkpoints": f"{number('checkpoints'):,.0f}",
        "requests waiting": f"{number('queued_requests'):,.0f}",
        "requests done": f"{number('requests_total'):,.0f}",
        "requests failed": f"{number('requests_failed_total'):,.0f}",
        "tokens trained": f"{number('trained_tokens_total'):,.0f}",
        "tokens sampled": f"{number('sampled_tokens_total'):,.0f}",
        "packed rows": f"{number('rows_total'):,.0f}",
        "tokens a row": f"{number('computed_tokens_total') / max(number('rows_total'), 1):,.0f}",
        "vision patches": f"{number('patches_total'):,.0f}",
    }


def _span(seconds: float) -> str:
    whole = int(seconds)
    days, hours, minutes = whole // SECONDS_A_DAY, whole // 3600 % 24, whole // 60 % 60
    return f"{days} d {hours} h" if days else f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"
