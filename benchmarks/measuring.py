"""Time callables in turn in one process, and report figures, targets and the environment.

A slow minute of the machine affects all callables of a round equally, so ratios are computed within each round.
"""

from __future__ import annotations

import gc
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal, final

import torch
from rich.console import Console

import vlmpack
from vlmpack.errors import ConfigError
from vlmpack.files import write_text
from vlmpack.machine import version_of

Clock = Literal["wall", "cpu"]
CLOCKS: tuple[Clock, ...] = ("wall", "cpu")
LEAST_SECONDS = 0.02
"""Faster callables are called several times for one measurement, so that it takes about this long."""


@final
@dataclass(frozen=True, kw_only=True)
class Spread:
    """A median and its quartiles."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarize at least one value."""
        low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        return cls(median=middle, low=low, high=high, rounds=len(values))


@final
@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds per call, one entry per round, for each clock and callable."""

    seconds: Mapping[Clock, Mapping[str, Sequence[float]]]

    def ratio(self, name: str, base: str, clock: Clock, scale: float = 1.0) -> Spread:
        """Return time of `name` / time of `base` * `scale`, computed within each round."""
        rounds = zip(self.seconds[clock][name], self.seconds[clock][base], strict=True)
        return Spread.of([scale * a / b for a, b in rounds])


def alternate(
    callables: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    least_rounds: int = 3,
    most_rounds: int = 200,
    device: str = "cpu",
) -> Timings:
    """Time each callable once per round, in turn; each round starts with the next callable.

    A fast callable first runs once unmeasured, to warm its memory, and then several times for one measurement. Garbage
    is collected between measurements, never during one.

    Args:
        callables: the functions to time, by name.
        seconds: stop after the round in which this much time has passed.
        least_rounds: minimum number of rounds.
        most_rounds: maximum number of rounds.
        device: wait for this device before reading a clock.
    """
    names = list(callables)
    taken: dict[Clock, dict[str, list[float]]] = {clock: {name: [] for name in names} for clock in CLOCKS}
    with new_garbage_only():
        calls = {name: _calls_for(function, device) for name, function in callables.items()}
        started = time.perf_counter()
        for turn in range(most_rounds):
            if turn >= least_rounds and time.perf_counter() - started > seconds:
                break
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                for clock, value in _measure(callables[name], calls[name], device).items():
                    taken[clock][name].append(value)
    return Timings(seconds=taken)


@contextmanager
def one_thread() -> Iterator[None]:
    """Measure with one thread, as in a DataLoader worker."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def wait(device: str) -> None:
    """Block until the device has finished all queued work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _calls_for(function: Callable[[], object], device: str) -> int:
    """Warm up, and return the number of calls for one measurement."""
    once = _measure(function, 1, device)["wall"]
    if once < 50 * LEAST_SECONDS:  # the first call may have loaded libraries
        once = _measure(function, 1, device)["wall"]
    return max(1, round(LEAST_SECONDS / max(once, 1e-7)))


def _measure(function: Callable[[], object], calls: int, device: str) -> dict[Clock, float]:
    """Return the seconds of one call by each clock."""
    gc.collect()
    if calls > 1:  # a slow callable needs no warm-up
        function()
    wait(device)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        function()
    wait(device)
    return {"wall": (time.perf_counter() - wall) / calls, "cpu": (time.process_time() - cpu) / calls}


_freezes = 0


@contextmanager
def new_garbage_only() -> Iterator[None]:
    """Disable automatic garbage collection, and let `gc.collect` visit only objects created inside.

    Visiting all objects of transformers takes a tenth of a second, hundreds of times, and evicts the CPU caches.
    """
    global _freezes
    was_on = gc.isenabled()
    if not _freezes:  # freezing again would keep newer reference cycles alive, with the tensors in them
        gc.collect()
        gc.freeze()
    gc.disable()
    _freezes += 1
    try:
        yield
    finally:
        _freezes -= 1
        if not _freezes:
            gc.unfreeze()
        if was_on:
            gc.enable()


# ---------------------------------------------------------------------- figures


@final
@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Settings of one run. Sizes are separate, because each case has its own."""

    device: str = "cpu"
    """Device of models and batches: "cpu" or "cuda"."""
    family: str = "qwen3_vl"
    """`config.model_type` of the model, for cases that measure one family at a time."""
    seconds: float = 60.0
    """Time for one case (and family). A case always gets its minimum number of rounds."""
    clock: Clock = "wall"
    """The clock for figures and targets: "wall", or "cpu" (all threads of this process) on a shared machine."""
    seed: int = 0
    """Seed of weights, ids and pixels."""


@final
@dataclass(frozen=True, kw_only=True)
class Target:
    """A limit that a figure must reach, in the figure's unit."""

    limit: float
    better: Literal["lower", "higher"]


@final
@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number that a case measured."""

    case: str
    name: str
    value: float
    """The median over the rounds, or an exact number."""
    unit: str
    """"x" for a ratio, "s", "bytes", ..."""
    family: str | None = None
    """`config.model_type` of the measured model; None: the figure does not depend on a family."""
    low: float | None = None
    """Lower quartile over the rounds; None: an exact number."""
    high: float | None = None
    """Upper quartile over the rounds; None: an exact number."""
    rounds: int = 0
    """Number of rounds; 0: an exact number."""
    clocks: Mapping[str, float] = field(default_factory=dict)
    """The median by each clock."""
    target: Target | None = None
    """The target; None: the figure is only for information."""

    @classmethod
    def measured(cls, case: str, name: str, spread: Spread, unit: str, **more: Any) -> Figure:
        """Make a figure from a spread."""
        numbers = {"value": spread.median, "low": spread.low, "high": spread.high, "rounds": spread.rounds}
        return cls(case=case, name=name, unit=unit, **numbers, **more)

    @classmethod
    def timed(cls, case: str, name: str, timings: Timings, of: str, settings: BenchSettings, **more: Any) -> Figure:
        """Make a figure of the seconds of one call."""
        spread = Spread.of(timings.seconds[settings.clock][of])
        clocks = {clock: median(timings.seconds[clock][of]) for clock in CLOCKS}
        return cls.measured(case, name, spread, "s", clocks=clocks, **more)

    @classmethod
    def rate(cls, case: str, name: str, timings: Timings, of: str, count: float, unit: str, clock: Clock) -> Figure:
        """Make a figure of a rate: one call processes `count` things."""
        rates = [count / seconds for seconds in timings.seconds[clock][of]]
        return cls.measured(case, name, Spread.of(rates), unit)

    @classmethod
    def compared(
        cls,
        case: str,
        name: str,
        timings: Timings,
        of: tuple[str, str],
        settings: BenchSettings,
        *,
        scale: float = 1.0,
        target: Target | None = None,
    ) -> Figure:
        """Make a figure of time of the first callable / time of the second * `scale`."""
        clocks = {clock: timings.ratio(*of, clock, scale).median for clock in CLOCKS}
        spread = timings.ratio(*of, settings.clock, scale)
        return cls.measured(case, name, spread, "x", clocks=clocks, target=target)

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None: there is no target."""
        if self.target is None:
            return None
        lower = self.target.better == "lower"
        return self.value <= self.target.limit if lower else self.value >= self.target.limit

    def __str__(self) -> str:
        spread = f" ({_number(self.low, self.unit)} to {_number(self.high, self.unit)})" if self.low is not None else ""
        return f"{_number(self.value, self.unit)} {self.unit}{spread}"


@final
@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A figure or case that was not measured."""

    case: str
    name: str
    why: str
    """The reason, and what to do about it."""
    owed: bool = False
    """True if it could have been measured on this machine, so a check of all targets is incomplete without it."""


@final
@dataclass(frozen=True, kw_only=True)
class Failed:
    """A case that raised an error."""

    case: str
    name: str
    why: str
    traceback: str = ""


@final
@dataclass(frozen=True, kw_only=True)
class Report:
    """All figures of one run, with the settings and the environment that are needed to repeat it."""

    figures: Sequence[Figure]
    environment: Mapping[str, Any]
    settings: Mapping[str, Any]
    shapes: Mapping[str, Any]
    skipped: Sequence[Skipped] = ()
    failed: Sequence[Failed] = ()

    @property
    def complete(self) -> bool:
        """Whether every target is reached, nothing failed, and nothing that could be measured was skipped."""
        missed = any(figure.met is False for figure in self.figures)
        return not missed and not self.failed and not any(skipped.owed for skipped in self.skipped)

    def save(self, path: Path) -> None:
        """Write the report as JSON, atomically."""
        write_text(path, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read a report that `save` wrote.

        Raises:
            ConfigError: the file cannot be read, or is not a report.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            targets = [figure.pop("target") for figure in content["figures"]]
            figures = tuple(
                Figure(**figure, target=target and Target(**target))
                for figure, target in zip(content.pop("figures"), targets, strict=True)
            )
            skipped = tuple(Skipped(**entry) for entry in content.pop("skipped"))
            failed = tuple(Failed(**entry) for entry in content.pop("failed"))
            return cls(figures=figures, skipped=skipped, failed=failed, **content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path} is no benchmark report ({type(error).__name__}: {error}); measure again"
            ) from error

    def print(self, console: Console) -> None:
        """Print a Markdown table with one row per figure; then what was skipped or failed, and the environment."""
        header = ("case", "figure", "value", "rounds", "target")
        for row in (header, ["---"] * len(header), *self._rows()):
            console.print(f"| {' | '.join(row)} |", markup=False, highlight=False, soft_wrap=True)
        for kind, entries in (("skipped", self.skipped), ("failed", self.failed)):
            for entry in entries:
                console.print(f"{kind}: {entry.case}, {entry.name}: {entry.why}", markup=False, soft_wrap=True)
        where = ", ".join(f"{name} {value}" for name, value in self.environment.items() if value is not None)
        console.print(where, markup=False, highlight=False, soft_wrap=True)

    def _rows(self) -> Iterator[Sequence[str]]:
        for figure in self.figures:
            target = ""
            if figure.target:
                sign = "≤" if figure.target.better == "lower" else "≥"
                verdict = "reached" if figure.met else "MISSED"
                target = f"{sign} {_number(figure.target.limit, figure.unit)} {verdict}"
            case = " ".join(filter(None, (figure.case, figure.family)))
            yield case, figure.name, str(figure), str(figure.rounds or "exact"), target


def _number(value: float | None, unit: str) -> str:
    assert value is not None
    return f"{value:,.0f}" if abs(value) >= 1000 or unit == "bytes" else f"{value:.3g}"


# ---------------------------------------------------------------------- environment

PACKAGES = ("torch", "transformers", "numpy", "pillow")


def environment(device: str) -> dict[str, Any]:
    """Return versions, device, threads and the commit of the source tree (None: no git repository), as JSON values."""
    return {
        "vlmpack": vlmpack.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        **{name: version_of(name) for name in PACKAGES},
        "device": device,
        "device_name": torch.cuda.get_device_name(device) if device.startswith("cuda") else _processor_name(),
        "threads": torch.get_num_threads(),
        "system": f"{sys.platform} {platform.machine()}",
    }


def _processor_name() -> str:
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _commit() -> str | None:
    """Return the checked-out commit, with "+" if there are uncommitted changes."""
    git = ["git", "-C", str(Path(vlmpack.__file__).parent.parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + "+" * bool(changes.strip())
