"""Print the reports of probes: in full, or as a line each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from vlmpack.probing.report import Check, Report
from vlmpack.terminal import make_table, number_columns, print_table, print_text, text_column

PARTS = {
    "isolation": "isolation: how far other samples move",
    "mechanism": "mechanisms, each by itself",
    "work": "work",
}
GRADIENT = "gradient of "
ROUTERS = ("load-balancing loss", "routers' part of the loss", "routers' gradient")
COLOURS = {"ok": "green", "exact": "green", "leaks": "red", "differs": "red", "fails": "red"}
PLAIN_COLOURS = {"exact": "green", "leaks": "yellow", "differs": "yellow", "fails": "yellow"}
CAPTION = """\
[dim]Errors are parts of the largest entry (of logits, or of each parameter's
gradient); gradients are those of the worst parameter, and value is the worst of
all circumstances but autocast. A limit is what float32 accounts for, and twice
the error that the model makes without packing.[/]
"""
PLAIN_CAPTION = """\
[dim]leak    how far a sample's logits move when only another one changes
logits  how far they are from those of the sample alone
pairs   of query and key, a layer[/]
"""
SUMMARY_CAPTION = """\
[dim]leak   how far a sample's logits move when only another one in the row changes
rest   how far the row is from its samples alone; as parts of the largest entry
plain  unmodified transformers, given the same row with positions that restart
       and nothing else: what packing by hand comes to[/]
"""


WIDTHS = {"family": 22, "row computed by": 19, "leak": 5, "logits": 6, "loss": 5, "gradients": 9}
"""Columns of the summary, which is printed line by line: as wide as their widest cell, so that 80 columns hold them."""
SHORT = {"bfloat16": "bf16", "float16": "fp16"}


def print_reports(reports: Iterable[Report], console: Console, *, summarise: bool) -> bool:
    """Print each report as it comes, in full or a line each; then every fault, and the verdict.

    What was found before an error, or before Ctrl-C, is printed as well.

    Returns:
        True if every report is exact.
    """
    known: list[Report] = []
    is_complete = False
    try:
        for report in reports:
            if summarise and not known:
                print_table(console, _summary([[*WIDTHS, "verdict"]]))
            if summarise:
                print_table(console, _summary(_summary_rows(report)))
            else:
                print_report(report, console)
            console.file.flush()
            known.append(report)
        is_complete = True
    finally:
        if known:
            _print_verdict(known, console, summarise=summarise, is_complete=is_complete)
    return all(report.verdict == "exact" for report in known)


def _print_verdict(reports: Sequence[Report], console: Console, *, summarise: bool, is_complete: bool) -> None:
    if summarise:
        console.print(f"\n{SUMMARY_CAPTION}")
    bad = [report for report in reports if report.verdict != "exact"]
    for report in bad:
        for check in report.checks:
            if check.is_bad:
                cause = f" [bold]{check.cause}[/]:" if check.cause else ""
                print_text(console, f"[red]{check.name} {check.finding}.[/]{cause} {escape(check.detail)}")
        name = f"{report.family}, {report.attention}"
        console.print(f"[red]{name}: {report.verdict}.[/] The cause: [bold]{', '.join(report.causes)}[/].")
    if bad and any(report.verdict != "not deterministic" for report in bad):
        console.print("Do not train packed rows here; please report this table.")
    elif bad:
        console.print("Nothing that could be compared leaks or differs; the rest is not proved.")
    elif is_complete:
        console.print("[green]Exact:[/] every packed sample is what it would have been alone.")
    if not is_complete:
        console.print("Not finished: what is not listed was not probed.")


def print_report(report: Report, console: Console) -> None:
    """Print one report: where it was made, every check, and plain transformers for contrast."""
    console.print(f"[bold]{report.model}[/] [dim]({report.family})[/], {escape(report.weights)}", highlight=False)
    console.print(f"{report.device}, {report.dtype}, attention by {report.attention}", highlight=False)
    print_text(console, f"rows of up to {report.row_tokens} tokens: {'; '.join(report.samples)}\n")
    for table in (_checks(report.checks), _circumstances(report), _gradients(report.checks)):
        print_table(console, table)
    console.print(CAPTION)
    if report.plain:
        console.print("[bold]Plain transformers[/], given the same samples")
        print_table(console, _plain(report))
        console.print(PLAIN_CAPTION)


def _summary(rows: Iterable[Sequence[str]]) -> Table:
    """Make a table of some lines, whose columns are as wide as in every other."""
    names = ("family", "row computed by")
    columns = [
        Column(name, no_wrap=True, min_width=width, justify="left" if name in names else "right")
        for name, width in WIDTHS.items()
    ]
    table = make_table(*columns, text_column("verdict"), header=False)
    for row in rows:
        table.add_row(*row)
    return table


def _summary_rows(report: Report) -> Iterator[list[str]]:
    """Make the line of a report, and below it those of plain transformers with the same row."""
    yield [report.family, *_summary_row(report)]
    for plain in report.plain[:-1]:
        way = f"plain, {plain.name.removeprefix('one row, ').removesuffix(' positions')}"
        cells = [_number(value) for value in (plain.leak, plain.logits, plain.loss, None)]
        yield [report.family, escape(way), *cells, _coloured(plain.verdict, PLAIN_COLOURS)]


def _summary_row(report: Report) -> list[str]:
    dtype = SHORT.get(report.dtype, report.dtype)
    way = report.attention if dtype == "float32" else f"{report.attention}, {dtype}"
    # Mixed precision stands apart: its limits are others.
    equality = [c for c in report.checks if c.part == "equality" and not c.name.startswith("autocast: ")]
    columns = [[check for check in report.checks if check.part == "isolation"]]
    columns += [
        [check for check in equality if check.name.partition(": ")[2].startswith(what)]
        for what in ("logits", "loss", "gradient")
    ]
    return [way, *(_number(_largest(column)) for column in columns), _coloured(report.verdict)]


def _checks(checks: Sequence[Check]) -> Table:
    table = make_table("what", *number_columns("value", "allowed"), text_column("finding"))
    for part, title in PARTS.items():
        table.add_row(f"[dim]{title}[/]")
        for check in (check for check in checks if check.part == part):
            note = f" [dim]{escape(check.detail)}[/]" if check.detail and not check.is_bad else ""
            finding = _coloured(check.finding) + note
            table.add_row(f"  {check.name}", _number(check.value), _number(check.allowed), finding)
        table.add_section()
    return table


def _circumstances(report: Report) -> Table:
    """Make a line for each circumstance, and for each comparison that belongs to none of the columns."""
    numbers = number_columns("logits", "loss", "samples'", "gradients")
    table = make_table(text_column("against each sample alone"), *numbers, text_column("finding"))
    equality = [check for check in report.checks if check.part == "equality"]
    for circumstance, title in report.circumstances.items():
        checks = {
            check.name.removeprefix(f"{circumstance}: "): check
            for check in equality
            if check.name.partition(": ")[0] == circumstance
        }
        if checks:
            columns = [[checks[key]] if key in checks else [] for key in ("logits", "loss", "sample losses")]
            columns.append([check for key, check in checks.items() if key.startswith(GRADIENT)])
            table.add_row(title, *(_number(_largest(column)) for column in columns), _findings(checks.values()))
    for check in equality:
        if check.name.partition(":")[0] not in report.circumstances:
            table.add_row(check.name, "", "", "", "", _coloured(check.finding))
    for router in ROUTERS:
        if additions := [check for check in equality if check.name.endswith(router)]:
            worst = _number(_largest(additions) or 0.0)
            cells = ("", "", "", worst) if "gradient" in router else ("", worst, "", "")
            table.add_row(f"  {router}", *cells, _findings(additions))
    return table


def _gradients(checks: Sequence[Check]) -> Table:
    """Make a line for each group of parameters: the worst of all circumstances, and mixed precision.

    They stand below their part of the model, so that a name fits a narrow terminal.
    """
    groups: dict[str, list[Check]] = {}
    for check in checks:
        group = check.name.partition(": ")[2]
        if check.part == "equality" and group.startswith(GRADIENT):
            groups.setdefault(group, []).append(check)
    numbers = number_columns("value", "allowed", "autocast")
    table = make_table(text_column("worst parameter of each group"), *numbers, text_column("finding"))
    above = ""
    for group, of_group in groups.items():
        part, _, rest = group.removeprefix(GRADIENT).partition(".")
        part = part if rest else ""
        if part != above:
            table.add_section()
            if part:
                table.add_row(f"[dim]gradients of {part}[/]")
        above = part
        mixed = [check for check in of_group if check.name.startswith("autocast: ")]
        others = [check for check in of_group if check not in mixed]
        allowed = max((check.allowed for check in others if check.allowed is not None), default=None)
        cells = [_number(value) for value in (_largest(others), allowed, _largest(mixed[:1]))]
        table.add_row(f"  {rest}" if rest else group, *cells, _findings(others))
    return table


def _plain(report: Report) -> Table:
    table = make_table(text_column("given"), *number_columns("leak", "logits", "loss", "pairs"), text_column("verdict"))
    for plain in report.plain:
        why = f": {', '.join(plain.causes)}" if plain.causes else f": {escape(plain.detail)}" if plain.detail else ""
        cells = [_number(value) for value in (plain.leak, plain.logits, plain.loss, plain.pairs)]
        table.add_row(plain.name, *cells, _coloured(plain.verdict, PLAIN_COLOURS) + why)
    return table


def _largest(checks: Iterable[Check]) -> float | None:
    return max((check.value for check in checks if check.value is not None), default=None)


def _findings(checks: Iterable[Check]) -> str:
    """List the findings that are not ok; ok if there are none."""
    findings = dict.fromkeys(check.finding for check in checks if check.finding != "ok")
    return ", ".join(map(_coloured, findings or ["ok"]))


def _coloured(finding: str, colours: Mapping[str, str] = COLOURS) -> str:
    return f"[{colours.get(finding, 'dim')}]{finding}[/]"


def _number(value: float | None) -> str:
    """Format errors in two digits, counts in full."""
    if value is None:
        return ""
    if value == 0:
        return "0"
    return f"{int(value):,}" if value >= 1 and float(value).is_integer() else f"{value:.0e}"
