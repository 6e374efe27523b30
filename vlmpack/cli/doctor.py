"""`vlmpack doctor`: what is installed here, which attention can serve, and whether packed samples stay apart."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from vlmpack.cli.environment import Serving, Version
    from vlmpack.cli.probe import Probe

CAPTION = """\
[dim]leak   how far a sample's logits move when only its neighbour in the row changes
rest   how far the row is from its samples alone; as parts of the largest entry
plain  unmodified transformers, given the same row with [3, 1, T] or [4, 1, T]
       position ids and nothing else: what packing by hand comes to[/]
"""


def doctor(
    model: Annotated[
        str | None,
        typer.Option(
            help="Hub id or folder: probe a small random copy of this model's configuration, not each supported family."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show versions, devices and attention back-ends, and probe whether packed samples leak into each other here.

    The exit status is 0 if nothing leaks, 1 otherwise.
    """
    from rich.console import Console

    from vlmpack.cli import environment

    console = Console(quiet=as_json)
    console.print("[bold]Versions[/]")
    versions = environment.versions()
    console.print(_versions_table(versions))
    devices = environment.devices()
    console.print("\n[bold]Devices[/]")
    for found in devices:
        console.print(f"  {found.type:<5} {found.name}")
    serving = environment.serving([found.type for found in devices])
    console.print("\n[bold]Attention back-ends[/] [dim](heads 32, key-value heads 8, head dimension 128)[/]")
    console.print(_serving_table(serving))
    console.print("\n[bold]Probe[/] [dim](two samples in one packed row)[/]")
    probes = _probe(model, device or devices[-1].type, console)
    console.print(_probe_table(probes))
    healthy = all(probe.verdict == "exact" for probe in probes if not probe.plain)
    console.print(CAPTION)
    _print_verdict(probes, console, healthy=healthy)
    if as_json:
        parts = {"versions": versions, "devices": devices, "attention": serving, "probes": probes}
        report: dict[str, Any] = {name: [asdict(entry) for entry in entries] for name, entries in parts.items()}
        typer.echo(json.dumps({**report, "healthy": healthy}, indent=2))
    raise typer.Exit(0 if healthy else 1)


def _probe(model_id: str | None, device: str, console: Console) -> list[Probe]:
    from vlmpack.cli.device import checked_device, quiet_transformers
    from vlmpack.cli.probe import probe_model
    from vlmpack.cli.shrink import small_copy
    from vlmpack.families import FAMILIES
    from vlmpack.families.tiny import tiny_model

    checked_device(device)
    probes = []
    with quiet_transformers(), console.status("probing"):
        for name in [model_id] if model_id else list(FAMILIES):
            model = small_copy(name) if model_id else tiny_model(name)  # pyright: ignore[reportArgumentType]
            probes += probe_model(model, device)
    return probes


def _versions_table(versions: Sequence[Version]) -> Any:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for entry in versions:
        problem = f"[yellow]{entry.problem}[/]" if entry.problem else ""
        table.add_row(f"  {entry.name}", entry.version or "[dim]not installed[/]", problem)
    return table


def _serving_table(serving: Sequence[Serving]) -> Any:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for entry in serving:
        answer = f"[dim]no: {'; '.join(entry.reasons)}[/]" if entry.reasons else "[green]yes[/]"
        table.add_row(f"  {entry.device}", entry.dtype, entry.backend, answer)
    return table


def _probe_table(probes: Sequence[Probe]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("family")
    table.add_column("row computed by", no_wrap=True)
    for title in ("leak", "logits", "loss", "gradients"):
        table.add_column(title, justify="right")
    table.add_column("verdict")
    for i, probe in enumerate(probes):
        first = i == 0 or probes[i - 1].family != probe.family
        errors = ["", "", ""] if probe.errors is None else [f"{e:.0e}" for e in vars(probe.errors).values()]
        table.add_row(
            probe.family if first else "",
            probe.how if probe.dtype == "float32" else f"{probe.how}, {probe.dtype}",
            "" if probe.leak is None else f"{probe.leak:.0e}" if probe.leak else "0",
            *errors,
            _verdict(probe),
            end_section=i + 1 < len(probes) and probes[i + 1].family != probe.family,
        )
    return table


def _verdict(probe: Probe) -> str:
    colour = "green" if probe.verdict == "exact" else "yellow" if probe.plain else "red"
    word = "isolated" if probe.plain and probe.verdict == "exact" else probe.verdict
    return f"[{colour}]{word}[/]"


def _print_verdict(probes: Sequence[Probe], console: Console, *, healthy: bool) -> None:
    for probe in probes:
        if probe.verdict != "exact" and not probe.plain:
            console.print(f"[red]{probe.family}, {probe.how}: {probe.verdict}.[/] {probe.detail}", highlight=False)
    if healthy:
        console.print("[green]Nothing leaks:[/] every packed sample is what it would have been alone.")
    else:
        console.print("[red]Packed rows are not safe here.[/] Do not train on them; please report this table.")
