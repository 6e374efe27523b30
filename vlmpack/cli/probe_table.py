"""The answer of a probe, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vlmpack.proof import Check, Contrast, Report
from vlmpack.terminal import print_table

COLOURS = {"ok": "green", "exact": "green", "leaks": "red", "differs": "red", "fails": "red"}
TITLES = {
    "isolation": "isolation: how far the other samples' logits move",
    "mechanism": "mechanisms, each by itself",
    "work": "work",
}
GRADIENT = "gradient of "
CAPTION = """\
[dim]row     a packed row
padded  a padded batch, which the step packs itself
Errors are parts of the largest entry (of logits, or of each parameter's
gradient). A limit is what float32 accounts for, and twice the error that the
model makes without packing.[/]
"""
PLAIN_CAPTION = """\
[dim]leak    how far a sample's logits move when only another one changes
logits  how far they are from those of the sample alone
pairs   of query and key, a layer[/]
"""


def print_report(report: Report, console: Console) -> None:
    """Tables, and one line that says it all."""
    console.print(f"[bold]{report.model}[/] [dim]({report.family})[/], {escape(report.weights)}", highlight=False)
    console.print(f"{report.device}, {report.dtype}, attention by {report.attention}", highlight=False)
    console.print(f"a row of {report.row_tokens} tokens: {'; '.join(report.samples)}\n", highlight=False)
    print_table(console, _checks(report.checks))
    print_table(console, _equality(report.checks))
    console.print(CAPTION)
    if report.plain:
        console.print("[bold]Plain transformers[/], given the same samples")
        print_table(console, _plain(report.plain))
        console.print(PLAIN_CAPTION)
    print_verdict(report, console)


def print_verdict(report: Report, console: Console) -> None:
    """One line a fault, or one line."""
    if report.verdict == "exact":
        console.print("[green]Exact:[/] every packed sample is what it would have been alone.")
        return
    for check in report.checks:
        if check.is_bad:
            cause = f" [bold]{check.cause}[/]:" if check.cause else ""
            console.print(f"[red]{check.name} {check.finding}.[/]{cause} {escape(check.detail)}", highlight=False)
    console.print(f"[red]{report.verdict.capitalize()}.[/] The cause: [bold]{', '.join(report.causes)}[/].")
    console.print("Do not train packed rows here; please report this table.")


def _checks(checks: Sequence[Check]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("what", "seen", "allowed", "finding"):
        table.add_column(title, justify="right" if title in ("seen", "allowed") else "left")
    for part, title in TITLES.items():
        table.add_row(f"[dim]{title}[/]")
        found = [check for check in checks if check.part == part]
        for i, check in enumerate(found):
            note = f" [dim]{escape(check.detail)}[/]" if check.detail and not check.is_bad else ""
            row = (f"  {check.name}", _number(check.seen), _number(check.allowed), _finding(check.finding) + note)
            table.add_row(*row, end_section=i + 1 == len(found))
    return table


def _equality(checks: Sequence[Check]) -> Table:
    """One line for what is compared both ways: the row as such, and the padded batch that the step packs.

    Gradients stand below the part of the model that they are of, so that a name fits a narrow terminal.
    """
    lines: dict[str, dict[str, Check]] = {}
    for check in (check for check in checks if check.part == "equality"):
        way, _, what = check.name.partition(": ")
        lines.setdefault(what or check.name, {})[way if what else "row"] = check
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("against each sample alone", overflow="fold")
    for title in ("row", "padded", "allowed"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("finding")
    above = ""
    for what, ways in lines.items():
        of, name = _placed(what)
        if of and of != above:
            table.add_section()
            table.add_row(f"[dim]gradients of {of}[/]")
        elif above and not of:
            table.add_section()
        above = of
        findings = dict.fromkeys(check.finding for check in ways.values())
        seen = (_number(ways[way].seen if way in ways else None) for way in ("row", "padded"))
        allowed = next(iter(ways.values())).allowed
        table.add_row(name, *seen, _number(allowed), ", ".join(_finding(finding) for finding in findings))
    return table


def _placed(what: str) -> tuple[str, str]:
    """(part of the model, the rest of the name) of the gradient of a group; ("", all of it) of anything else."""
    part, _, rest = what.removeprefix(GRADIENT).partition(".")
    return (part, f"  {rest}") if what.startswith(GRADIENT) and rest else ("", what)


def _plain(contrasts: Sequence[Contrast]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("given")
    for title in ("leak", "logits", "loss", "pairs"):
        table.add_column(title, justify="right")
    table.add_column("verdict")
    for one in contrasts:
        colour = "green" if one.verdict == "exact" else "yellow"
        why = f": {', '.join(one.causes)}" if one.causes else f": {escape(one.detail)}" if one.detail else ""
        numbers = [_number(value) for value in (one.leak, one.logits, one.loss)]
        pairs = "" if one.pairs is None else f"{one.pairs:,}"
        table.add_row(one.name, *numbers, pairs, f"[{colour}]{one.verdict}[/]{why}")
    return table


def _finding(finding: str) -> str:
    colour = COLOURS.get(finding, "dim")
    return f"[{colour}]{finding}[/]"


def _number(value: Any) -> str:
    """Errors in two digits, counts whole."""
    if value is None:
        return ""
    if value == 0:
        return "0"
    return f"{int(value):,}" if value >= 1 and float(value).is_integer() else f"{value:.0e}"
