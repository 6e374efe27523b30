"""`vlmpack bench`: hands everything after it to `vlmpack.bench`."""

from __future__ import annotations

import typer

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def bench(ctx: typer.Context) -> None:
    """Measure packed against padded on this machine, as ratios of runs that alternate in one process."""
    from vlmpack.bench import main

    raise typer.Exit(main(ctx.args))
