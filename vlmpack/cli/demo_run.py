"""The demo from end to end: two trainings, the proof on one batch, a table, pictures, the numbers as JSON."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vlmpack.cli.contest import Run, TrainingSettings, run
from vlmpack.cli.contestants import Contestants, contestants
from vlmpack.cli.demo_table import print_comparison
from vlmpack.cli.device import checked_device, quiet_transformers
from vlmpack.cli.folder import made_folder
from vlmpack.cli.gradients import Agreement, packed_against_alone
from vlmpack.collate import BatchLayout, VLMCollator
from vlmpack.layout import PackedRow, PaddedBatch
from vlmpack.plots import plot_losses, plot_rows, save

LAYOUTS: tuple[BatchLayout, ...] = ("padded", "packed")


@final
@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """What was asked for on the command line."""

    model: str | None
    """Hub id or folder; None: a small random Qwen3-VL."""
    data: str
    """"synthetic", or where CORD is."""
    device: str
    """"cpu" or "cuda"."""
    dtype: str
    """"float32" or "bfloat16"."""
    steps: int
    """Optimiser steps of each training."""
    batch_size: int
    """Samples in a step."""
    seed: int
    """Of weights, receipts and their order."""
    out: Path
    """Folder for pictures and numbers."""


def run_demo(settings: DemoSettings) -> None:
    """Run it and print what comes out."""
    console = Console()
    device = checked_device(settings.device)
    made_folder("--out", settings.out)
    with quiet_transformers():
        with console.status("making model and receipts"):
            given = contestants(
                settings.model,
                settings.data,
                num=settings.steps * settings.batch_size,
                seed=settings.seed,
                device=device,
                dtype=vars(torch)[settings.dtype],
            )
        console.print(f"[bold]{given.title}[/], on {settings.data} receipts, {settings.device}", highlight=False)
        result = _compete(settings, given, device, console)
    console.print()
    print_comparison(*result, console, device=settings.device)
    _save(settings, given, result)
    files = {name: settings.out / name for name in ("rows.png", "losses.png", "demo.json")}
    console.print(
        f"Pictures: {files['rows.png']}, {files['losses.png']}\nNumbers:  {files['demo.json']}", highlight=False
    )


class Result(NamedTuple):
    """What the demo shows."""

    padded: Run
    """The training of the unmodified model."""
    packed: Run
    """The same, packed."""
    agreement: Agreement
    """Gradients of a packed batch against those of its samples alone."""


def _compete(settings: DemoSettings, given: Contestants, device: torch.device, console: Console) -> Result:
    runs: dict[BatchLayout, Run] = {}
    with tempfile.TemporaryDirectory() as scratch, _progress(console) as progress:
        training = TrainingSettings(
            steps=settings.steps,
            batch_size=settings.batch_size,
            learning_rate=given.learning_rate,
            seed=settings.seed,
            device=device,
            scratch=Path(scratch),
        )
        bars = {layout: progress.add_task(layout, total=settings.steps, loss="", start=False) for layout in LAYOUTS}
        proof = progress.add_task("gradients", total=1, loss="packed against each sample alone", start=False)
        model: Any = None
        for layout in LAYOUTS:
            model = None  # before the next one is made: two may not fit
            model = given.make_model()
            bar = bars[layout]
            progress.start_task(bar)

            def tick(loss: float, bar: Any = bar) -> None:
                progress.update(bar, advance=1, loss=f"loss {loss:.4f}")

            collator = VLMCollator(given.processor, layout=layout)
            runs[layout] = run(layout, model, given.records, collator, training, tick)
            progress.stop_task(bar)
        progress.start_task(proof)
        samples = [given.records[i] for i in range(settings.batch_size)]
        agreement = packed_against_alone(model, given.processor, samples)
        progress.update(proof, advance=1)
    return Result(runs["padded"], runs["packed"], agreement)


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description:<9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield progress


def _save(settings: DemoSettings, given: Contestants, result: Result) -> None:
    save(plot_rows(*_first_batch(given, settings.batch_size)), settings.out / "rows.png")
    losses = {"padded, unmodified model": result.padded.losses, "packed": result.packed.losses}
    save(plot_losses(losses), settings.out / "losses.png")
    numbers = {
        "settings": {
            name: str(value) if isinstance(value, Path) else value for name, value in asdict(settings).items()
        },
        "padded": asdict(result.padded),
        "packed": asdict(result.packed),
        "gradients": asdict(result.agreement),
    }
    (settings.out / "demo.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")


def _first_batch(given: Contestants, size: int) -> tuple[PaddedBatch, PackedRow]:
    samples = [given.records[i] for i in range(size)]
    padded, packed = (VLMCollator(given.processor, layout=layout).collate(samples) for layout in LAYOUTS)
    assert isinstance(padded, PaddedBatch)
    assert isinstance(packed, PackedRow)
    return padded, packed
