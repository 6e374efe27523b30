"""`vlmpack demo`: train on the same samples, padded and then packed, and compare the two."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer import Option

from vlmpack.cli import options
from vlmpack.errors import check_extra
from vlmpack.files import write_text
from vlmpack.terminal import number_columns, print_table, print_text, progress_lines, quiet_transformers

if TYPE_CHECKING:
    from vlmpack.cli.training import Run
    from vlmpack.collate.collator import BatchLayout
    from vlmpack.testing.comparison import GradientCosine

PICTURES = ("rows.png", "losses.png")
NUMBERS = "demo.json"


@dataclass(frozen=True, kw_only=True)
class DemoOptions(options.OutputOptions):
    """Settings of both trainings."""

    model: str | None = None
    """Hub id or folder of a vision-language model; by default a small random one."""
    data: str = "synthetic"
    """"synthetic" (generated receipts); or a file, folder or hub id of conversations."""
    device: options.Device = "cpu"
    """Device of both trainings."""
    dtype: options.Dtype | None = None
    """By default bfloat16 for a given model on cuda, else float32."""
    steps: options.AtLeast1 = 20
    """Optimizer steps of each training."""
    batch_size: Annotated[int, Option(min=2)] = 8
    """Samples per step."""
    seed: Annotated[int, Option(min=0)] = 0
    """Seed of the weights, the receipts and their order."""
    out: Path = Path("demo-output")
    """Folder for pictures and numbers."""


@options.with_options
def demo(setup: DemoOptions) -> None:
    """Train on the same samples, padded with plain transformers and then packed, and compare the two.

    By default: a small random model and generated receipts, without GPU or network, in about a minute on two cores.
    """
    check_extra("demo", "matplotlib", needed_by="`vlmpack demo`")
    # Read when torch is first imported. Threads that spin at a barrier make every step several times slower on a
    # machine that runs other work; elsewhere this costs little.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    is_low = setup.model is not None and setup.device == "cuda"
    setup = replace(setup, dtype=setup.dtype or ("bfloat16" if is_low else "float32"))

    from vlmpack.cli.training import Trainings, packed_against_alone
    from vlmpack.collate.collator import VLMCollator
    from vlmpack.layout.batch import PaddedBatch
    from vlmpack.plots import plot_losses, plot_rows, save

    console, out = Console(quiet=setup.as_json), setup.out
    options.torch_device(setup.device)
    options.make_folder(out)
    with quiet_transformers(), progress_lines(quiet=setup.quiet) as progress:
        progress("loading processor and samples")
        trainings = Trainings(setup)
        samples = trainings.samples(0)
        batch = VLMCollator(trainings.processor, layout="padded").collate(samples)
        title = setup.model or "a small random model with 4 layers of width 128"
        print_text(console, escape(f"{title}, {setup.dtype}, on {setup.data}, {setup.device}"))
        runs: dict[str, Run] = {}
        trained: Any = None
        layouts: tuple[BatchLayout, ...] = ("padded", "packed")
        for layout in layouts:
            report = partial(progress, f"training, {layout}", total=setup.steps)
            report(0)
            trained = None  # free it before the next model is made, because two may not fit
            trained = trainings.make_model()
            runs[layout] = trainings.train(layout, trained, report=report)
        progress("comparing gradients of the packed row and of each sample alone")
        agreement = packed_against_alone(trained, trainings.processor, samples)
    padded, packed = runs["padded"], runs["packed"]
    assert isinstance(batch, PaddedBatch)
    curves = {"padded, unmodified model": padded.losses, "packed": packed.losses}
    for name, figure in zip(PICTURES, (plot_rows(batch), plot_losses(curves)), strict=True):
        save(figure, out / name)
    parts = {name: asdict(part) for name, part in {**runs, "gradients": agreement}.items()}
    settings = {name: value for name, value in vars(setup).items() if name not in ("as_json", "quiet")}
    numbers = json.dumps({"settings": {**settings, "out": str(out)}, **parts}, indent=2)
    write_text(out / NUMBERS, numbers + "\n")
    console.print()
    print_comparison(padded, packed, agreement, console, device=setup.device)
    pictures = ", ".join(str(out / name) for name in PICTURES)
    print_text(console, escape(f"Pictures: {pictures}\nNumbers:  {out / NUMBERS}"))
    if setup.as_json:
        typer.echo(numbers)


def print_comparison(padded: Run, packed: Run, agreement: GradientCosine, console: Console, *, device: str) -> None:
    """Print a table with one row per measure, and explain its numbers."""
    before, after = padded.measures(), packed.measures()
    rows = [(name, f"{before[name]:,.0f}", f"{now:,.0f}", f"{now / before[name]:.2f}") for name, now in after.items()]
    differences = [abs(a - b) for a, b in zip(padded.losses, packed.losses, strict=True)]  # nats per target
    rows += [
        (),
        ("final loss", f"{padded.losses[-1]:.6f}", f"{packed.losses[-1]:.6f}", f"differs by {differences[-1]:.1e}"),
        ("largest loss difference", "", "", f"{max(differences):.1e}"),
        ("smallest gradient cosine", "", "", f"[bold green]{agreement.cosine:.13f}[/]"),
    ]
    print_table(console, ("", *number_columns("padded", "packed", "packed / padded")), rows)
    lengths = [length for step in packed.lengths for length in step]
    lines = [
        f"[dim]{len(packed.losses)} steps of {len(packed.lengths[0])} samples with {min(lengths)} to {max(lengths)} "
        "tokens each; step times are medians.[/]",
        f"[dim]cosine: gradients of one packed batch and of its samples alone, in float32; the smallest of "
        f"{agreement.parameters} parameters ({agreement.parameter}).[/]",
    ]
    if device != "cuda":
        lines.append("[dim]memory: of all tensors alive in the forward and backward pass of one batch.[/]")
    speed, memory = before["step time, ms"] / after["step time, ms"], packed.peak_bytes / padded.peak_bytes
    result = f"[bold]{speed:.2f} times as fast[/] with [bold]{memory:.2f} times the memory[/]"
    for line in (*lines, "", f"The same training, {result}."):
        print_text(console, line)
