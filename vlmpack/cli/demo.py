"""`vlmpack demo`: train on receipts, padded and packed in turn, and compare the two."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from vlmpack.cli import options
from vlmpack.cli.inputs import quiet_transformers
from vlmpack.errors import check_extra
from vlmpack.files import write_text
from vlmpack.terminal import make_table, number_columns, print_table, print_text, progress_lines

if TYPE_CHECKING:
    from vlmpack.cli.training import Run
    from vlmpack.collate.collator import BatchLayout
    from vlmpack.testing.comparison import GradientCosine

ROWS, LOSSES, NUMBERS = "rows.png", "losses.png", "demo.json"


def demo(
    model: Annotated[
        str | None,
        typer.Option(help="Hub id or folder of a vision-language model; without it, a small random one is made."),
    ] = None,
    data: Annotated[
        str,
        typer.Option(help='"synthetic" draws receipts; or a hub id (naver-clova-ix/cord-v2), folder or parquet file.'),
    ] = "synthetic",
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Device of both trainings.")] = "cpu",
    dtype: Annotated[
        options.Dtype | None, typer.Option(help="By default bfloat16 for a given model on cuda, else float32.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each training.")] = 20,
    batch_size: Annotated[int, typer.Option(min=2, help="Samples in a step.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, receipts and their order.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for pictures and numbers.")] = Path("demo-output"),
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Train on receipts with Hugging Face Trainer, padded and packed in turn, and compare the two.

    By default: a small random model, drawn receipts, no GPU, no network, about a minute on two cores.
    """
    check_extra("demo", "accelerate", "matplotlib", needed_by="`vlmpack demo`")
    if model is not None:
        options.refuse_file("--model", model)
    # Read when torch is first imported. Threads that spin at a barrier make every step several times slower on a
    # machine that runs other work; elsewhere this costs little.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    dtype = dtype or ("bfloat16" if model is not None and device == "cuda" else "float32")

    from vlmpack.cli.training import Setup, packed_against_alone, train
    from vlmpack.collate.collator import VLMCollator
    from vlmpack.layout.batch import PaddedBatch
    from vlmpack.plots import plot_losses, plot_rows, save

    console = Console(quiet=as_json)
    options.torch_device(device)
    options.make_folder("--out", out)
    setup = Setup(model=model, data=data, device=device, dtype=dtype, steps=steps, batch_size=batch_size, seed=seed)
    with quiet_transformers(), TemporaryDirectory() as scratch, progress_lines(quiet=quiet) as progress:
        progress("reading processor and receipts")
        samples = setup.receipts[:batch_size]
        batch = VLMCollator(setup.processor, layout="padded").collate(samples)
        print_text(console, f"[bold]{escape(setup.title)}[/], on {escape(data)} receipts, {device}")
        runs: dict[str, Run] = {}
        trained: Any = None
        layouts: tuple[BatchLayout, ...] = ("padded", "packed")
        for layout in layouts:
            report = partial(progress, f"training, {layout}", total=steps)
            report(0)
            trained = None  # before the next one is made: two may not fit
            trained = setup.make_model()
            runs[layout] = train(layout, trained, setup, scratch=scratch, report=report)
        progress("comparing gradients: packed, and each sample alone")
        agreement = packed_against_alone(trained, setup.processor, samples)
    padded, packed = runs["padded"], runs["packed"]
    assert isinstance(batch, PaddedBatch)
    save(plot_rows(batch), out / ROWS)
    save(plot_losses({"padded, unmodified model": padded.losses, "packed": packed.losses}), out / LOSSES)
    parts = {name: asdict(part) for name, part in {**runs, "gradients": agreement}.items()}
    numbers = json.dumps({"settings": {**asdict(setup), "out": str(out)}, **parts}, indent=2)
    write_text(out / NUMBERS, numbers + "\n")
    console.print()
    print_comparison(padded, packed, agreement, console, device=device)
    print_text(console, escape(f"Pictures: {out / ROWS}, {out / LOSSES}\nNumbers:  {out / NUMBERS}"))
    if as_json:
        typer.echo(numbers)


def print_comparison(padded: Run, packed: Run, agreement: GradientCosine, console: Console, *, device: str) -> None:
    """Print the table, one row a measure, and the meaning of its numbers."""
    table = make_table("", *number_columns("padded", "packed", "packed / padded"))

    def add(name: str, form: str, before: float, after: float) -> None:
        table.add_row(name, form.format(before), form.format(after), f"{after / before:.2f}")

    add("real tokens", "{:,}", padded.real_tokens, packed.real_tokens)
    add("physical tokens", "{:,}", padded.physical_tokens, packed.physical_tokens)
    table.add_row("fill ratio", f"{padded.fill:.1%}", f"{packed.fill:.1%}", "")
    add("step time", "{:,.0f} ms", padded.step_seconds * 1000, packed.step_seconds * 1000)
    add("real tokens/s", "{:,.0f}", padded.tokens_per_second, packed.tokens_per_second)
    memory = "peak memory" if device == "cuda" else "peak memory*"
    add(memory, "{:,.0f} MiB", padded.peak_bytes / 2**20, packed.peak_bytes / 2**20)
    table.add_section()
    differences = [abs(a - b) for a, b in zip(padded.losses, packed.losses, strict=True)]  # nats per target
    table.add_row("final loss", f"{padded.losses[-1]:.6f}", f"{packed.losses[-1]:.6f}", f"off by {differences[-1]:.1e}")
    table.add_row("largest loss difference", "", "", f"{max(differences):.1e}")
    table.add_row("smallest gradient cosine", "", "", f"[bold green]{agreement.cosine:.13f}[/]")
    print_table(console, table)
    lengths = [length for step in packed.lengths for length in step]
    lines = [
        f"[dim]{len(packed.losses)} steps of {len(packed.lengths[0])} samples, {min(lengths)} to {max(lengths)} tokens "
        "each; step times are medians.[/]",
        f"[dim]cosine: one packed batch against each of its samples alone, in float32, the worst of "
        f"{agreement.parameters} parameters, vision tower included ({agreement.parameter}).[/]",
    ]
    if device != "cuda":
        lines.append("[dim]* tensors alive at one time in the forward and backward pass of one batch.[/]")
    speed, memory = padded.step_seconds / packed.step_seconds, packed.peak_bytes / padded.peak_bytes
    result = f"[bold]{speed:.2f} times as fast[/] with [bold]{memory:.2f} times the memory[/]"
    for line in (*lines, "", f"The same training, {result}."):
        print_text(console, line)
