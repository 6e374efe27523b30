"""The answer of a probe, for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vlmpack.probing import Baseline, Check, Report
from vlmpack.terminal import print_table, print_text

COLOURS = {
    "ok": "green",
    "exact": "green",
    "leaks": "red",
    "differs": "red",
    "fails": "red",
    "not deterministic": "yellow",
}
TITLES = {
    "isolation": "isolation: how far other samples move",
    "mechanism": "mechanisms, each by itself",
    "work": "work",
}
GRADIENT = "gradient of "
ROUTERS = ("load-balancing loss", "routers' part of the loss", "routers' gradient")
CAPTION = """\
[dim]Errors are parts of the largest entry (of logits, or of each parameter's
gradient); gradients are those of the worst parameter, and seen is the worst of
all circumstances but autocast. A limit is what float32 accounts for, and twice
the error that the model makes without packing.[/]
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
    print_text(console, f"rows of up to {report.row_tokens} tokens: {'; '.join(report.samples)}\n")
    print_table(console, _checks(report.checks))
    print_table(console, _circumstances(report))
    print_table(console, _gradients(report.checks))
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
            print_text(console, f"[red]{check.name} {check.finding}.[/]{cause} {escape(check.detail)}")
    console.print(f"[red]{report.verdict.capitalize()}.[/] The cause: [bold]{', '.join(report.causes)}[/].")
    if report.verdict == "not deterministic":
        console.print("Nothing that could be compared leaks or differs; the rest is not proved.")
    else:
        console.print("Do not train packed rows here; please report this table.")


def _checks(checks: Sequence[Check]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("what", "seen", "allowed", "finding"):
        is_number = title in ("seen", "allowed")
        table.add_column(
            title,
            justify="right" if is_number else "left",
            no_wrap=is_number or title == "what",
            overflow="fold" if title == "finding" else "ellipsis",
        )
    for part, title in TITLES.items():
        table.add_row(f"[dim]{title}[/]")
        found = [check for check in checks if check.part == part]
        for i, check in enumerate(found):
            note = f" [dim]{escape(check.detail)}[/]" if check.detail and not check.is_bad else ""
            row = (f"  {check.name}", _number(check.seen), _number(check.allowed), _finding(check.finding) + note)
            table.add_row(*row, end_section=i + 1 == len(found))
    return table


def _circumstances(report: Report) -> Table:
    """One line a circumstance, and one for each comparison that belongs to none of the columns."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("against each sample alone", overflow="fold")
    for title in ("logits", "loss", "samples'", "gradients"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("finding", overflow="fold")
    equality = [check for check in report.checks if check.part == "equality"]
    for name, title in report.circumstances.items():
        own = {check.name.removeprefix(f"{name}: "): check for check in equality if check.name.startswith(f"{name}: ")}
        own |= {check.name: check for check in equality if check.name == name}
        if own:
            table.add_row(title, *_worst_of_each(own), _findings(own.values()))
    others = [check for check in equality if check.name.partition(":")[0] not in report.circumstances]
    for check in others:
        table.add_row(check.name, "", "", "", "", _finding(check.finding))
    for name in ROUTERS:
        found = [check for check in equality if check.name.endswith(name)]
        if found:
            seen = _number(max(check.seen or 0.0 for check in found))
            numbers = ("", "", "", seen) if "gradient" in name else ("", seen, "", "")
            table.add_row(f"  {name}", *numbers, _findings(found))
    return table


def _worst_of_each(checks: Mapping[str, Check]) -> list[str]:
    columns = ("logits", "loss", "sample losses")
    numbers = [_number(checks[name].seen if name in checks else None) for name in columns]
    gradients = [check.seen for name, check in checks.items() if name.startswith(GRADIENT) and check.seen is not None]
    return [*numbers, _number(max(gradients, default=None))]


def _findings(checks: Iterable[Check]) -> str:
    """The bad ones; ok if there are none."""
    findings = dict.fromkeys(check.finding for check in checks)
    return ", ".join(_finding(one) for one in findings if one != "ok") or _finding("ok")


def _gradients(checks: Sequence[Check]) -> Table:
    """One line a group of parameters: the worst of all circumstances, and the one in mixed precision.

    They stand below the part of the model that they are of, so that a name fits a narrow terminal.
    """
    groups: dict[str, list[Check]] = {}
    for check in checks:
        what = check.name.partition(": ")[2]
        if check.part == "equality" and what.startswith(GRADIENT):
            groups.setdefault(what, []).append(check)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("worst parameter of each group", overflow="fold")
    for title in ("seen", "allowed", "autocast"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("finding", overflow="fold")
    above = ""
    for what, found in groups.items():
        of, name = _placed(what)
        if of and of != above:
            table.add_section()
            table.add_row(f"[dim]gradients of {of}[/]")
        elif above and not of:
            table.add_section()
        above = of
        mixed = next((check.seen for check in found if check.name.startswith("autocast: ")), None)
        own = [check for check in found if not check.name.startswith("autocast: ")]
        seen = max((check.seen for check in own if check.seen is not None), default=None)
        allowed = max((check.allowed for check in own if check.allowed is not None), default=None)
        table.add_row(name, _number(seen), _number(allowed), _number(mixed), _findings(found))
    return table


def _placed(what: str) -> tuple[str, str]:
    """(part of the model, the rest of the name) of the gradient of a group; ("", all of it) of anything else."""
    part, _, rest = what.removeprefix(GRADIENT).partition(".")
    return (part, f"  {rest}") if what.startswith(GRADIENT) and rest else ("", what)


def _plain(contrasts: Sequence[Baseline]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("given", overflow="fold")
    for title in ("leak", "logits", "loss", "pairs"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
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
