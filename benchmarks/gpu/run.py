"""Cells, one after the other, within a budget: each is a few figures, and none can end the run.

The report is written after every cell, whole. A cell that breaks is a line of the report with its traceback. One that
would not fit into the remaining time is skipped, and the report lists it. If the device is broken, which no process
survives, a new process goes on with the next cell.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

from benchmarks.figures import BenchSettings, Failed, Figure, Report, Skipped, environment
from benchmarks.gpu.device import Device
from benchmarks.gpu.models import Models
from benchmarks.gpu.shapes import GpuShapes

Entries = Iterable[Figure | Skipped]

FASTEST, SLOWEST = 0.5, 4.0
"""Bounds of a pace: a cell in which little fitted into memory predicts the next one badly."""


@final
@dataclass(frozen=True, kw_only=True)
class Lab:
    """The surroundings of every cell."""

    device: Device
    """The device of the run."""
    shapes: GpuShapes
    """All sizes."""
    settings: BenchSettings
    """Of the run; `seconds` is the time for the rounds of one cell."""
    models: Models
    """The model on the device."""
    figures: list[Figure] = field(default_factory=list)
    """Figures measured so far."""
    ends: float = float("inf")
    """The moment at which the budget is used up, by `time.time`."""

    @property
    def seconds_left(self) -> float:
        """Of the budget."""
        return self.ends - time.time()


@final
@dataclass(frozen=True, kw_only=True)
class Cell:
    """A few figures that are measured together."""

    case: str
    """The case that its figures belong to."""
    name: str
    """Its subject; with the case, its name in the report."""
    guess: float
    """Seconds it will take; 0: it costs nothing, and is run even when the budget is used up."""
    run: Callable[[Lab], Entries]
    """Measures; what it yields before an error is kept."""
    pace: str | None = None
    """Cells of one pace are guessed wrongly alike: the guess of the next is corrected by how the last one did."""

    @property
    def key(self) -> str:
        """Its name in the report."""
        return f"{self.case}: {self.name}"


@final
class Journal:
    """The report as far as it has got, on disk."""

    def __init__(self, lab: Lab, path: Path | None, *, started: float, budget: float) -> None:
        self._lab, self._path = lab, path
        self._skipped: list[Skipped] = []
        self._failed: list[Failed] = []
        self._done: dict[str, float | None] = {}
        self._times = {"budget": budget, "started": started}
        self._environment = {**environment(lab.device.name), **lab.device.describe()}

    def go_on_from(self, report: Report) -> None:
        """Take over the report of another process."""
        self._lab.figures.extend(report.figures)
        self._skipped.extend(report.skipped)
        self._failed.extend(report.failed)
        self._done.update(report.settings["cells"])
        for key in [key for key, seconds in self._done.items() if seconds is None]:
            case, _, name = key.partition(": ")
            self.note(Failed(case=case, name=name, why="the process ended while it was measured", traceback=""))
            self._done[key] = 0.0

    def is_done(self, cell: Cell) -> bool:
        """Return whether the cell was run or skipped."""
        return cell.key in self._done

    def begin(self, cell: Cell) -> None:
        """Write down that a cell is running: if the process dies in it, it is not tried again."""
        self._done[cell.key] = None
        self.save()

    def note(self, entry: Figure | Skipped | Failed) -> None:
        """Keep what a cell yields."""
        kept: dict[type, list[Any]] = {Figure: self._lab.figures, Skipped: self._skipped, Failed: self._failed}
        kept[type(entry)].append(entry)

    def finish(self, cell: Cell, seconds: float) -> None:
        """Write everything down."""
        self._done[cell.key] = seconds
        self.save()

    def save(self) -> None:
        """Write the report."""
        if self._path is not None:
            self.report().save(self._path)

    def report(self) -> Report:
        """The report."""
        settings = {**asdict(self._lab.settings), **self._times, "cells": self._done}
        return Report(
            figures=tuple(self._lab.figures),
            environment=self._environment,
            settings=settings,
            shapes={"gpu": asdict(self._lab.shapes)},
            skipped=tuple(self._skipped),
            failed=tuple(self._failed),
        )


def run_cells(
    cells: Sequence[Cell],
    lab: Lab,
    journal: Journal,
    *,
    before: Callable[[Cell], None] = lambda cell: None,
    restart: Callable[[], None] = lambda: None,
) -> Report:
    """Run the cells that have not had their turn.

    Args:
        cells: the more important first.
        lab: their surroundings.
        journal: where everything is kept.
        before: called with each cell before it starts.
        restart: called when the device is broken; starts a new process, or returns to let this one end.
    """
    paces: dict[str | None, float] = {}
    for cell in cells:
        if journal.is_done(cell):
            continue
        guess = cell.guess * paces.get(cell.pace, 1.0)
        if guess > max(lab.seconds_left, 0.0):
            journal.note(_no_time(cell, guess, lab))
            journal.finish(cell, 0.0)
            continue
        before(cell)
        started = time.time()
        if not _run(cell, lab, journal):
            restart()
            break
        if cell.pace:
            paces[cell.pace] = min(max((time.time() - started) / cell.guess, FASTEST), SLOWEST)
    return journal.report()


def _run(cell: Cell, lab: Lab, journal: Journal) -> bool:
    """Run one cell; whether the device can be used for the next."""
    started = time.time()
    journal.begin(cell)
    try:
        for entry in cell.run(lab):
            journal.note(entry)
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        lines = traceback.format_exc()
        journal.note(Failed(case=cell.case, name=cell.name, why=why, traceback=lines))
        traceback.clear_frames(error.__traceback__)  # a model in a frame would stay on the device
    answers = lab.device.answers()
    if answers:
        lab.device.release()
    journal.finish(cell, time.time() - started)
    return answers


def _no_time(cell: Cell, guess: float, lab: Lab) -> Skipped:
    why = f"it takes about {guess:.0f} s, and {max(lab.seconds_left, 0.0):.0f} s are left of the budget"
    return Skipped(case=cell.case, name=cell.name, why=why, owed=True)
