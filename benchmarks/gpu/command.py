"""The command: `python -m benchmarks gpu` or `python -m benchmarks.gpu`, and the order of its cells."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from benchmarks.figures import MOST_SEED, BenchSettings, Report, check_budget, place_for
from benchmarks.gpu.checks import correctness_cells, equality_cells
from benchmarks.gpu.device import DEVICES
from benchmarks.gpu.layers import attention_cells, head_cells, skip_limit_cells
from benchmarks.gpu.models import Models
from benchmarks.gpu.run import Cell, Journal, Lab, run_cells
from benchmarks.gpu.shapes import SHAPES, GpuShapes
from benchmarks.gpu.steps import flash_cell, memory_cells, step_cells, summary_cell, sync_cells
from benchmarks.gpu.trees import tree_cells
from benchmarks.report import markdown, readable, skipped, target_in_words, title
from benchmarks.timing import new_garbage_only
from vlmpack.errors import check_whole_number
from vlmpack.files import write_text
from vlmpack.testing import tiny_model

FIRST = 3
"""Micro-batches that are measured before anything else about a model."""


def all_cells(shapes: GpuShapes) -> list[Cell]:
    """Every cell of a run, in order. A model stays on the device for all that follows one another about it."""
    cells = [*skip_limit_cells(shapes), *correctness_cells(shapes), *equality_cells(shapes)]
    cells.append(flash_cell())
    for shape in shapes.models:
        cells += step_cells(shapes, shape, shapes.micro_batches[:FIRST])
        cells += sync_cells(shapes, shape)
    cells += [*attention_cells(shapes), *head_cells(shapes), *tree_cells(shapes)]
    for shape in shapes.models:
        cells += memory_cells(shapes, shape)
        cells += step_cells(shapes, shape, shapes.recomputed, recomputed=True)
        cells += step_cells(shapes, shape, shapes.micro_batches[FIRST:])
        cells += memory_cells(shapes, shape, recomputed=True)
    return [*cells, summary_cell()]


BUDGET = 540.0
"""Seconds."""
RESUME = "--resume"


def main(arguments: Sequence[str], *, console: Console, restart: Callable[[list[str]], None] | None = None) -> int:
    """Measure a GPU within the budget, and write a report after every step of the way.

    Args:
        arguments: of the command line, after `gpu`.
        console: where to print.
        restart: starts this command anew, with these arguments, when the device is lost; None: in place of this
            process.

    Returns:
        0: measured; 1: something broke, or `--check` was given and a target was missed or left out; 2: could not be
        run with these arguments.

    Raises:
        ConfigError: a number or a path that cannot be used.
    """
    chosen = _parser().parse_args(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        console.print("[red]PyTorch sees no CUDA device here; --device cpu --shapes tiny runs every part on a CPU[/]")
        return 2
    check_budget(chosen.budget)
    check_whole_number("--seed", chosen.seed, at_least=0, at_most=MOST_SEED)
    place_for(chosen.json, option="--json")
    if chosen.markdown:
        place_for(chosen.markdown, option="--markdown")
    _be_quiet()
    again = [*(word for word in arguments if word != RESUME), RESUME]
    report = _run(chosen, console, restart=lambda: (restart or _in_place)(again))
    if chosen.markdown:
        write_text(Path(chosen.markdown), markdown({report.environment["device_name"]: report}))
    print_targets(report, console)
    return 1 if report.failed or (chosen.check and not report.complete) else 0


def print_targets(report: Report, console: Console) -> None:
    """Print where it was measured, a line for each figure with a target, and what was left out."""
    for line in (title(report), *_lines(report), *skipped(report)):
        console.print(line, highlight=False, soft_wrap=not console.is_terminal)


def _run(chosen: argparse.Namespace, console: Console, *, restart: Callable[[], None]) -> Report:
    device, shapes, path = DEVICES[chosen.device](), SHAPES[chosen.shapes], Path(chosen.json)
    settings = BenchSettings(device=device.name, seconds=shapes.cell_seconds, seed=chosen.seed)
    before = Report.load(path) if chosen.resume else None
    started = before.settings["started"] if before else time.time()
    models = Models(device, seed=chosen.seed)
    lab = Lab(device=device, shapes=shapes, settings=settings, models=models, ends=started + chosen.budget)
    journal = Journal(lab, path, started=started, budget=chosen.budget)
    if before:
        journal.go_on_from(before)
    cells = all_cells(shapes)

    def print_cell(cell: Cell) -> None:
        console.print(f"{time.time() - started:6.1f} s  {cell.key}", highlight=False)

    for shape in shapes.models:
        tiny_model(shape.family)  # loads what transformers loads late
    with new_garbage_only():
        return run_cells(cells, lab, journal, before=print_cell, restart=restart)


def _lines(report: Report) -> Iterator[Text]:
    """Lines of the figures that have a target; all figures are in the file."""
    for figure in report.figures:
        if figure.target is not None:
            words = f"{readable([figure.value], figure.unit)}, {target_in_words(figure)}"
            style = "green" if figure.met else "bold red"
            name = " ".join(filter(None, (figure.case, figure.family, figure.name)))
            yield Text(f"{'reached' if figure.met else 'missed '}  {name}: {words}", style=style)


def _be_quiet() -> None:
    """Without transformers' advice."""
    from transformers.utils import logging

    logging.set_verbosity_error()


def _in_place(arguments: list[str]) -> None:
    """This process becomes a new one: what the device held is free, and the journal is on disk."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu", *arguments])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks gpu",
        description="Everything about one GPU: ceilings, correctness, steps, memory, waits.",
    )
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="SECONDS", help="for everything (540)")
    parser.add_argument("--json", default="gpu.json", metavar="FILE", help="written after every cell (gpu.json)")
    parser.add_argument("--markdown", metavar="FILE", help="also write the figures as a table")
    parser.add_argument("--device", default="cuda", choices=list(DEVICES), help="cuda, or cpu to try it out")
    parser.add_argument("--shapes", default="full", choices=list(SHAPES), help="full, or tiny to try it out")
    parser.add_argument("--seed", type=int, default=0, help="of weights, ids and pixels (0)")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a target is missed or skipped")
    parser.add_argument(RESUME, action="store_true", help="go on where the report in --json ends")
    return parser
