"""Figures and reports: what a run measures, the targets, the settings, and where it was measured."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, final

import torch

import vlmpack
from benchmarks.timing import CLOCKS, Clock, Spread, Timings
from vlmpack.errors import ConfigError
from vlmpack.files import unreadable, write_text
from vlmpack.machine import version_of


@final
@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Settings of one benchmark run; the sizes of a case are its own."""

    device: str = "cpu"
    """The device of models and batches: "cpu" or "cuda"."""
    family: str = "qwen3_vl"
    """`config.model_type` of the model, for cases that measure one family at a time."""
    seconds: float = 60.0
    """Time that one case may take (for one family), in seconds; it always gets its least number of rounds. A run of
    several hands it out anew before each, by what is left."""
    clock: Clock = "wall"
    """The clock that decides: "wall", or "cpu" (time of all threads of this process), for a machine that others use."""
    seed: int = 0
    """Of weights, ids and pixels."""


def check_budget(seconds: float) -> None:
    """Refuse a time that never ends, or is none.

    Raises:
        ConfigError: it is negative, infinite or not a number.
    """
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ConfigError(f"--budget {seconds:g}: give seconds, 0 for as few rounds as can be")


MOST_SEED = 2**32 - 1
"""The largest seed that every source of random numbers takes."""
SCHEMA = 2
"""Version of the JSON form."""


@final
@dataclass(frozen=True, kw_only=True)
class Target:
    """A limit that a figure must reach."""

    limit: float
    """In the figure's unit."""
    better: Literal["lower", "higher"]
    """On which side of the limit it is reached."""

    def met_by(self, value: float) -> bool:
        """Return whether `value` reaches it."""
        return value <= self.limit if self.better == "lower" else value >= self.limit


@final
@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number that a case found."""

    case: str
    """The case that found it."""
    name: str
    """Its name, in words."""
    value: float
    """The number; a median where it was measured over rounds."""
    unit: str
    """"x" for a ratio, "s", "bytes", "FLOP", ..."""
    family: str | None = None
    """`config.model_type` of the model it was measured on; None: no family's in particular."""
    low: float | None = None
    """Lower quartile over the rounds; None: an exact number."""
    high: float | None = None
    """Upper quartile over the rounds."""
    rounds: int = 0
    """Rounds measured; 0: an exact number."""
    clocks: Mapping[str, float] = field(default_factory=dict)
    """The same median by each clock ("wall", "cpu"), whichever of them counts."""
    target: Target | None = None
    """Its target; None: for information."""

    @classmethod
    def measured(cls, case: str, name: str, spread: Spread, unit: str, **more: Any) -> Figure:
        """A figure with a spread."""
        numbers = {"value": spread.median, "low": spread.low, "high": spread.high, "rounds": spread.rounds}
        return cls(case=case, name=name, unit=unit, **numbers, **more)

    @classmethod
    def timed(cls, case: str, name: str, timings: Timings, callable_name: str, settings: BenchSettings) -> Figure:
        """Seconds of one call."""
        clocks = {clock: timings.of(callable_name, clock).median for clock in CLOCKS}
        return cls.measured(case, name, timings.of(callable_name, settings.clock), "s", clocks=clocks)

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
        spreads = {clock: timings.ratio(*of, clock).scaled(scale) for clock in CLOCKS}
        clocks = {clock: spread.median for clock, spread in spreads.items()}
        return cls.measured(case, name, spreads[settings.clock], "x", clocks=clocks, target=target)

    @property
    def met(self) -> bool | None:
        """True where the target is reached; None: there is none."""
        return None if self.target is None else self.target.met_by(self.value)


@final
@dataclass(frozen=True, kw_only=True)
class Skipped:
    """Something that was not measured."""

    case: str
    """The case that it belongs to."""
    name: str
    """Its name, in words, or the family."""
    why: str
    """The reason, and the remedy."""
    owed: bool = False
    """True: it could have been measured on this machine, so a check of all targets is not complete without it."""


@final
@dataclass(frozen=True, kw_only=True)
class Failed:
    """Something that was to be measured, and broke."""

    case: str
    """The case that it belongs to."""
    name: str
    """Its name, in words."""
    why: str
    """The error, in a line."""
    traceback: str
    """Of the error."""


@final
@dataclass(frozen=True, kw_only=True)
class Report:
    """All figures of one run, and what is needed to repeat it."""

    figures: tuple[Figure, ...]
    """In the order of the cases."""
    environment: Mapping[str, Any]
    """Versions, device, threads, commit."""
    settings: Mapping[str, Any]
    """The run's settings."""
    shapes: Mapping[str, Mapping[str, Any]]
    """Each case's sizes."""
    skipped: tuple[Skipped, ...] = ()
    """Figures that were not measured."""
    failed: tuple[Failed, ...] = ()
    """Figures whose measurement failed."""

    @property
    def missed(self) -> tuple[Figure, ...]:
        """Figures that do not reach their target."""
        return tuple(figure for figure in self.figures if figure.met is False)

    @property
    def complete(self) -> bool:
        """True where every target is reached, nothing failed, and nothing that could be measured was left out."""
        return not self.missed and not self.failed and not any(skipped.owed for skipped in self.skipped)

    def save(self, path: str | Path) -> None:
        """Write the report as JSON: whole or not at all."""
        write_text(Path(path), json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read back what `save` wrote.

        Raises:
            ConfigError: the file cannot be read, is not a report, not a whole one, or of another schema.
        """
        content = _json_in(Path(path))
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            kind = content.get("schema") if isinstance(content, dict) else type(content).__name__
            raise ConfigError(f"{path} is no benchmark report of schema {SCHEMA} (it has {kind!r}); measure again")
        try:
            return cls._of(content)
        except (KeyError, TypeError) as error:  # a part is missing, or there is an unknown one
            message = f"{path} is no whole benchmark report of schema {SCHEMA} ({type(error).__name__}: {error})"
            raise ConfigError(f"{message}; measure again") from error

    @classmethod
    def _of(cls, content: Mapping[str, Any]) -> Report:
        figures = tuple(
            Figure(**{**figure, "target": None if figure["target"] is None else Target(**figure["target"])})
            for figure in content["figures"]
        )
        return cls(
            figures=figures,
            environment=dict(content["environment"]),
            settings=dict(content["settings"]),
            shapes=dict(content["shapes"]),
            skipped=tuple(Skipped(**skipped) for skipped in content["skipped"]),
            failed=tuple(Failed(**failed) for failed in content.get("failed", ())),
        )


def _json_in(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError too
        raise ConfigError(f"{path} is no benchmark report: it is no JSON ({error}); measure again") from error


def place_for(path: str | Path, *, option: str) -> Path:
    """Make the folder of a file that will be written, so that a wrong path fails before anything is measured.

    Args:
        path: the file.
        option: of the command, for the error.

    Raises:
        ConfigError: it is a folder, or its folder can neither be made nor written to.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"{option} {path}: its folder cannot be made ({error.strerror}); name a file in one that can"
        raise ConfigError(message) from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        problem = "is a folder" if path.is_dir() else "is in a folder that cannot be written to"
        raise ConfigError(f"{option} {path} {problem}; name a file that can be written")
    return path


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
        "machine": platform.machine(),
        "system": sys.platform,
    }


def _processor_name() -> str:
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str | None:
    """The commit that is checked out, with "+" for changes on top of it."""
    root = Path(vlmpack.__file__).parent.parent
    try:
        git = ["git", "-C", str(root)]
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + "+" * bool(changes.strip())
