"""`vlmpack bench`: hands everything after it to `vlmpack.bench`, or to the report of what it wrote."""

from __future__ import annotations

import typer

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
REPORT = "report"


def bench(ctx: typer.Context) -> None:
    """Measure packed against padded on this machine, as ratios of runs that alternate in one process.

    `vlmpack bench report FILE...` puts the figures of several runs side by side, `vlmpack bench gpu` measures one GPU.
    """
    if ctx.args[:1] == [REPORT]:
        from vlmpack.cli.bench_report import report_app

        report_app(ctx.args[1:], prog_name="vlmpack bench report", standalone_mode=False)
        return
    from vlmpack.bench import measure

    raise typer.Exit(measure(ctx.args))
