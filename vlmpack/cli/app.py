"""The command itself: its verbs, and what a user sees when one of them refuses."""

from __future__ import annotations

import errno
import io
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from vlmpack import __version__
from vlmpack.cli import analyze, demo, doctor, pack, probe, show
from vlmpack.errors import VlmpackError

OF_THE_SYSTEM = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""What the system refuses, wherever it is noticed: rights, a file system for reading alone, a full or a broken disk."""


class ClearErrors(TyperGroup):
    """A refusal of vlmpack or of the system is one clear line and exit status 2; anything else is a bug and keeps its
    traceback.

    2 as for an option that does not exist: status 1 is the answer of a verb, such as `probe`'s that something leaks.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        try:
            return super().invoke(ctx)
        except VlmpackError as error:
            typer.secho(f"vlmpack: {error}", err=True, fg=typer.colors.RED)
            raise typer.Exit(2) from error
        except OSError as error:
            if error.errno not in OF_THE_SYSTEM:
                raise
            place = "" if error.filename is None else f"{error.filename}: "
            message = f"vlmpack: {place}{error.strerror}; get the right to read and write there, or see to the disk"
            typer.secho(message, err=True, fg=typer.colors.RED)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=ClearErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command("analyze")(analyze.analyze)
app.command("show")(show.show)
app.command("pack")(pack.pack)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("probe")(probe.probe)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"vlmpack {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train unmodified Hugging Face Qwen-VL models on packed rows: packed == alone, proved on your machine."""


def main() -> None:
    """What the `vlmpack` script runs."""
    _write_anything()
    app(prog_name="vlmpack")


def _write_anything() -> None:
    """What the terminal's encoding lacks, in somebody's texts and ids, is written as an escape, as in error messages.

    Raising there would end a verb after its work is done. An error handler that was asked for is left alone.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")
