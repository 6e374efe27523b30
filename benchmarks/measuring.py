"""Time callables in turn in one process, and report what was found: figures, targets, where it was measured.

A slow minute of the machine hits all callables of a round alike, so ratios are taken within each round.
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
"""A callable faster than this is called several times for one measurement."""


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
    """Seconds a call, one entry a round, for each callable and clock."""

    seconds: Mapping[Clock, Mapping[str, Sequence[float]]]

    def ratio(self, name: str, base: str, clock: Clock, scale: float = 1.0) -> Spread:
        """The time of `name` over that of `base`, times `scale`, each round compared within itself."""
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
    """Call each of `callables` once a round, in turn, and start each round one further along.

    Fast callables are called once unmeasured in their turn and then several times for one measurement, so that they
    meet warm memory. Garbage is collected between measurements and never during one.

    Args:
        callables: what to time, by name.
        seconds: stop after the round in which this much time has passed.
        least_rounds: measure this many rounds in any case.
        most_rounds: and never more than this.
        device: wait for this device before a clock is read.
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
    """Measure with one thread, as in a DataLoader's worker."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def wait(device: str) -> None:
    """Block until the device has done all that was queued."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _calls_for(function: Callable[[], object], device: str) -> int:
    """Warm up, and return the number of calls of one measurement."""
    once = _measure(function, 1, device)["wall"]
    if once < 50 * LEAST_SECONDS:  # libraries may have been loaded in the first call
        once = _measure(function, 1, device)["wall"]
    return max(1, round(LEAST_SECONDS / max(once, 1e-7)))


def _measure(function: Callable[[], object], calls: int, device: str) -> dict[Clock, float]:
    """Seconds of one call by each clock."""
    gc.collect()
    if calls > 1:  # a slow callable warms itself
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
    """Collect garbage only when asked to, and only what was made inside: walking through all of transformers' objects
    takes a tenth of a second, hundreds of times, and empties the caches."""
    global _freezes
    was_on = gc.isenabled()
    if not _freezes:  # freezing again would keep cycles that were made since, and the tensors in them
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
    """Settings of one run; the sizes of a case are its own."""

    device: str = "cpu"
    """Of models and batches: "cpu" or "cuda"."""
    family: str = "qwen3_vl"
    """`config.model_type` of the model, for cases that measure one family at a time."""
    seconds: float = 60.0
    """Time that one case may take (for one family); it always gets its least number of rounds."""
    clock: Clock = "wall"
    """The clock that decides: "wall", or "cpu" (of all threads of this process) on a machine that others use."""
    seed: int = 0
    """Of weights, ids and pixels."""


@final
@dataclass(frozen=True, kw_only=True)
class Target:
    """A limit that a figure must reach, in the figure's unit."""

    limit: float
    better: Literal["lower", "higher"]


@final
@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number that a case found."""

    case: str
    name: str
    value: float
    """A median where it was measured over rounds."""
    unit: str
    """"x" for a ratio, "s", "bytes", ..."""
    family: str | None = None
    """`config.model_type` of the model it was measured on; None: no family's in particular."""
    low: float | None = None
    """Lower quartile over the rounds; None: an exact number."""
    high: float | None = None
    rounds: int = 0
    """0: an exact number."""
    clocks: Mapping[str, float] = field(default_factory=dict)
    """The same median by each clock, whichever of them decides."""
    target: Target | None = None
    """None: for information."""

    @classmethod
    def measured(cls, case: str, name: str, spread: Spread, unit: str, **more: Any) -> Figure:
        """A figure with a spread."""
        numbers = {"value": spread.median, "low": spread.low, "high": spread.high, "rounds": spread.rounds}
        return cls(case=case, name=name, unit=unit, **numbers, **more)

    @classmethod
    def timed(cls, case: str, name: str, timings: Timings, of: str, settings: BenchSettings, **more: Any) -> Figure:
        """Seconds of one call."""
        spread = Spread.of(timings.seconds[settings.clock][of])
        clocks = {clock: median(timings.seconds[clock][of]) for clock in CLOCKS}
        return cls.measured(case, name, spread, "s", clocks=clocks, **more)

    @classmethod
    def rate(cls, case: str, name: str, timings: Timings, of: str, count: float, unit: str, clock: Clock) -> Figure:
        """Things a second, of which one call makes `count`."""
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
        """The time of the first callable over that of the second, times `scale`."""
        clocks = {clock: timings.ratio(*of, clock, scale).median for clock in CLOCKS}
        spread = timings.ratio(*of, settings.clock, scale)
        return cls.measured(case, name, spread, "x", clocks=clocks, target=target)

    @property
    def met(self) -> bool | None:
        """True where the target is reached; None: there is none."""
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
    """Something that was not measured."""

    case: str
    name: str
    why: str
    """The reason, and the remedy."""
    owed: bool = False
    """True: it could have been measured on this machine, so a check of all targets is not complete without it."""


@final
@dataclass(frozen=True, kw_only=True)
class Failed:
    """Something that was to be measured, and broke."""

    case: str
    name: str
    why: str
    traceback: str = ""


@final
@dataclass(frozen=True, kw_only=True)
class Report:
    """All figures of one run, and what is needed to repeat it."""

    figures: Sequence[Figure]
    environment: Mapping[str, Any]
    settings: Mapping[str, Any]
    shapes: Mapping[str, Any]
    skipped: Sequence[Skipped] = ()
    failed: Sequence[Failed] = ()

    @property
    def complete(self) -> bool:
        """True where every target is reached, nothing failed, and nothing that could be measured was left out."""
        missed = any(figure.met is False for figure in self.figures)
        return not missed and not self.failed and not any(skipped.owed for skipped in self.skipped)

    def save(self, path: Path) -> None:
        """Write the report as JSON: whole or not at all."""
        write_text(path, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read back what `save` wrote.

        Raises:
            ConfigError: the file cannot be read, or is no report.
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
        """Print a line a figure, as a table in Markdown; then what was left out, and where it was measured."""
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


# ---------------------------------------------------------------------- where it was measured

PACKAGES = ("torch", "transformers", "numpy", "pillow")


def environment(device: str) -> dict[str, Any]:
    """Versions, device, threads and the commit of the source tree (None outside one), as JSON values."""
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
    """The commit that is checked out, with "+" for changes on top of it."""
    git = ["git", "-C", str(Path(vlmpack.__file__).parent.parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + "+" * bool(changes.strip())
