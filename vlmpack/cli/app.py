"""The `vlmpack` command: its verbs, its errors and its exit statuses."""

from __future__ import annotations

import errno
import inspect
import io
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from vlmpack import __version__
from vlmpack.cli import analyze, demo, doctor, pack, serve, show
from vlmpack.errors import VlmpackError

SYSTEM_ERRORS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""Refusals of the system: missing rights, a read-only file system, a full or a broken disk."""


class OneLineErrors(TyperGroup):
    """Print an error of vlmpack or of the system as one line with exit status 2; any other keeps its traceback.

    2 is the status of an option that does not exist, too. 1 is a verb's result, such as that of a probe with a leak.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        try:
            return super().invoke(ctx)
        except VlmpackError as error:
            raise _exit(str(error)) from error
        except OSError as error:
            if error.errno not in SYSTEM_ERRORS:
                raise
            place = "" if error.filename is None else f"{error.filename}: "
            raise _exit(
                f"{place}{error.strerror}; get the right to read and write there, or see to the disk"
            ) from error


def _exit(message: str) -> typer.Exit:
    typer.secho(f"vlmpack: {message}", err=True, fg=typer.colors.RED)
    return typer.Exit(2)


app = typer.Typer(
    cls=OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
for verb in (analyze.analyze, show.show, pack.pack, demo.demo, doctor.doctor, serve.serve):
    paragraphs = inspect.cleandoc(verb.__doc__ or "").split("\n\n")
    app.command(help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs))(verb)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"vlmpack {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train unmodified Hugging Face models on packed rows: packed == alone, proved on your machine."""


def main() -> None:
    """Run the `vlmpack` script.

    Characters that the terminal's encoding lacks, as in texts and ids of samples, are written as escapes: raising there
    would end a verb after its work is done. An error handler set by the user stays.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")
    app(prog_name="vlmpack")
