"""`vlmpack doctor`: what is installed here, which attention can serve, and whether packed samples stay apart."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmpack.cli.options import BestDeviceOption, JsonOption
from vlmpack.cli.processors import reading, refuse_file, tiny_family

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch
    from rich.console import Console

    from vlmpack.cli.environment import Serving, Version
    from vlmpack.proof import Contrast, Report

CAPTION = """\
[dim]leak   how far a sample's logits move when only another one in the row changes
rest   how far the row is from its samples alone; as parts of the largest entry
plain  unmodified transformers, given the same row with positions that restart
       and nothing else: what packing by hand comes to[/]
"""


def doctor(
    model: Annotated[
        str | None,
        typer.Option(
            help="Hub id or folder: probe a small random copy of this model's configuration, not every family; or "
            '"tiny", "tiny:FAMILY": one family.'
        ),
    ] = None,
    device: BestDeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show versions, devices and attention back-ends, and probe whether packed samples leak into each other here.

    The exit status is 0 if nothing leaks, 1 if something does, 2 if it cannot be run as asked.
    """
    if model is not None:
        refuse_file("--model", model)

    from rich.console import Console

    from vlmpack.cli import environment
    from vlmpack.cli.device import best_device, checked_device

    console = Console(quiet=as_json)
    where = checked_device(device or best_device())
    models = None if model is None else _named(model, where, console)
    console.print("[bold]Versions[/]")
    versions = environment.versions()
    print_versions(versions, console)
    devices = environment.devices()
    console.print("\n[bold]Devices[/]")
    for found in devices:
        console.print(f"  {found.type:<5} {found.name}")
    serving = environment.serving([found.type for found in devices])
    console.print("\n[bold]Attention back-ends[/] [dim](heads 32, key-value heads 8, head dimension 128)[/]")
    print_serving(serving, console)
    gated = environment.delta_serving([found.type for found in devices])
    console.print("\n[bold]Gated delta layers[/] [dim](Qwen3.5, Qwen3-Next; training)[/]")
    print_serving(gated, console)
    console.print("\n[bold]Probe[/] [dim](a few samples in one packed row; `vlmpack probe` tells more)[/]")
    reports = _probe(_of_every_family(where) if models is None else models, where, console)
    print_probes(reports, console)
    healthy = all(report.verdict == "exact" for report in reports)
    console.print(CAPTION)
    _print_verdict(reports, console, healthy=healthy)
    if as_json:
        parts = {"versions": versions, "devices": devices, "attention": serving, "gated_delta": gated}
        answer: dict[str, Any] = {name: [asdict(entry) for entry in entries] for name, entries in parts.items()}
        probes = [report.to_dict() for report in reports]
        typer.echo(json.dumps({**answer, "probes": probes, "healthy": healthy}, indent=2))
    raise typer.Exit(0 if healthy else 1)


def _named(name: str, device: torch.device, console: Console) -> list[Any]:
    """A small random model of a family, or with the configuration of another model, in each type to be probed.

    Raises:
        ConfigError: nothing can be read there. FamilyError: the family cannot be packed exactly, or is not known.
    """
    from vlmpack.cli.device import quiet_transformers
    from vlmpack.proof import small_copy
    from vlmpack.testing import tiny_model

    if (family := tiny_family(name)) is not None:
        return [tiny_model(family, dtype=dtype) for dtype in _dtypes(device)]
    with quiet_transformers(), console.status("reading the model"), reading("--model", name):
        return [small_copy(name, dtype=dtype) for dtype in _dtypes(device)]


def _of_every_family(device: torch.device) -> Iterator[Any]:
    from vlmpack.families import FAMILIES
    from vlmpack.testing import tiny_model

    return (tiny_model(name, dtype=dtype) for name in FAMILIES for dtype in _dtypes(device))


def _dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    import torch

    return (torch.float32,) if device.type == "cpu" else (torch.float32, torch.bfloat16)


def _probe(models: Iterable[Any], device: torch.device, console: Console) -> list[Report]:
    from vlmpack.cli.device import quiet_transformers
    from vlmpack.proof import backends_for, probe

    reports: list[Report] = []
    with quiet_transformers(), console.status("probing") as status:
        for model in models:
            model.to(device)
            for backend in backends_for(model):
                status.update(f"probing {model.config.model_type}, {backend}")
                first = not reports or reports[-1].family != model.config.model_type
                reports.append(probe(model, attention=backend, plain=first))
    return reports


def print_versions(versions: Sequence[Version], console: Console) -> None:
    """A line a package."""
    from rich.table import Table

    from vlmpack.terminal import print_table

    table = Table.grid(padding=(0, 2))
    for entry in versions:
        problem = f"[yellow]{entry.problem}[/]" if entry.problem else ""
        table.add_row(f"  {entry.name}", entry.version or "[dim]not installed[/]", problem)
    print_table(console, table)


def print_serving(serving: Sequence[Serving], console: Console) -> None:
    """A line for each device, precision and back-end."""
    from rich.table import Table

    from vlmpack.terminal import print_table

    table = Table.grid(padding=(0, 2))
    for entry in serving:
        answer = f"[dim]no: {'; '.join(entry.reasons)}[/]" if entry.reasons else "[green]yes[/]"
        table.add_row(f"  {entry.device}", entry.dtype, entry.backend, answer)
    print_table(console, table)


def print_probes(reports: Sequence[Report], console: Console) -> None:
    """A line for each family and back-end, and below it plain transformers."""
    from rich import box
    from rich.table import Table

    from vlmpack.terminal import print_table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("family", overflow="fold")
    table.add_column("row computed by", overflow="fold")
    for title in ("leak", "logits", "loss", "gradients"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    families = dict.fromkeys(report.family for report in reports)
    for family in families:
        own = [report for report in reports if report.family == family]
        rows = [_row(report) for report in own] + [_plain_row(one) for report in own for one in report.plain[:-1]]
        for i, row in enumerate(rows):
            table.add_row("" if i else family, *row, end_section=i + 1 == len(rows))
    print_table(console, table)


def _row(report: Report) -> list[str]:
    how = report.attention if report.dtype == "float32" else f"{report.attention}, {report.dtype}"
    leak = [check.seen for check in report.checks if check.part == "isolation"]
    rest = [
        [check.seen for check in report.checks if check.part == "equality" and _is_of(check.name, what)]
        for what in ("logits", "loss", "gradient")
    ]
    return [how, *(_largest(seen) for seen in (leak, *rest)), _verdict(report)]


def _is_of(name: str, what: str) -> bool:
    """Mixed precision stands apart: its limits are others."""
    circumstance, _, of = name.partition(": ")
    return circumstance != "autocast" and of.startswith(what)


def _plain_row(one: Contrast) -> list[str]:
    how = f"plain, {one.name.removeprefix('one row, ').removesuffix(' positions')}"
    colour = "green" if one.verdict == "exact" else "yellow"
    numbers = [_largest([seen]) for seen in (one.leak, one.logits, one.loss, None)]
    return [how, *numbers, f"[{colour}]{one.verdict}[/]"]


def _largest(seen: Sequence[float | None]) -> str:
    known = [value for value in seen if value is not None]
    return f"{max(known):.0e}" if any(known) else "0" if known else ""


def _verdict(report: Report) -> str:
    colour = "green" if report.verdict == "exact" else "red"
    return f"[{colour}]{report.verdict}[/]"


def _print_verdict(reports: Sequence[Report], console: Console, *, healthy: bool) -> None:
    from rich.text import Text

    from vlmpack.terminal import print_text

    for report in reports:
        if report.verdict == "exact":
            continue
        what = f"{report.family}, {report.attention}: {report.verdict}, by {', '.join(report.causes)}."
        console.print(f"[red]{what}[/]", highlight=False)
        for check in report.checks:
            if check.is_bad:
                print_text(console, Text(f"{check.name} {check.finding}. {check.detail}"), indent=2)
    if healthy:
        console.print("[green]Nothing leaks:[/] every packed sample is what it would have been alone.")
    else:
        console.print("[red]Packed rows are not safe here.[/] Do not train on them; please report this table.")
