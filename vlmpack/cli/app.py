"""The `vlmpack` command: its verbs, its errors, its exit statuses and its end by Ctrl-C."""

from __future__ import annotations

import errno
import inspect
import io
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from vlmpack import __version__
from vlmpack.cli import analyze, demo, doctor, pack, serve, train
from vlmpack.errors import VlmpackError

SYSTEM_ERRORS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""Refusals of the system: missing rights, a read-only file system, a full or a broken disk."""
REFUSED = 2
INTERRUPTED = 128 + signal.SIGINT
VERBS: Mapping[Callable[..., None], str] = {
    analyze.analyze: "nothing was written; with --cache FILE the next run keeps the lengths that it has measured",
    pack.pack: "run the same command again: it goes on where it was, and the files will be the same",
    train.train: "run it again with resume_from_checkpoint=true: it goes on from the last checkpoint, if there is one",
    demo.demo: "nothing was written; run it again, with fewer --steps if it takes long",
    doctor.doctor: "nothing was changed; run it again, or probe one family: vlmpack doctor --probe tiny:qwen3_vl",
    serve.serve: "run it again: requests that were accepted are in the journal, and go on",
}
"""Verbs, with what is printed after Ctrl-C: how to go on."""


class OneLineErrors(TyperGroup):
    """Print an error of vlmpack or of the system, and the end by Ctrl-C, as one line; a bug keeps its traceback.

    The exit status of an error is 2, as of an option that does not exist. 1 is a verb's result, such as that of a probe
    with a leak. 130 is the end by Ctrl-C.
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
            file = "" if error.filename is None else f"{error.filename}: "
            raise _exit(f"{file}{error.strerror}; get the right to read and write there, or see to the disk") from error
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # once more ends it at once, without a traceback
            if os.environ.get("LOCAL_RANK", "0") != "0":
                raise typer.Exit(INTERRUPTED) from None  # rank 0 prints it for all
            if sys.stderr.isatty():
                typer.echo(err=True)  # a bar of progress may stand on the line
            hints = {verb.__name__: hint for verb, hint in VERBS.items()}
            raise _exit(f"interrupted; {hints[ctx.invoked_subcommand]}", INTERRUPTED) from None


def _exit(message: str, status: int = REFUSED) -> typer.Exit:
    typer.secho(f"vlmpack: {message}", err=True, fg=typer.colors.RED)
    return typer.Exit(status)


app = typer.Typer(cls=OneLineErrors, no_args_is_help=True, pretty_exceptions_show_locals=False)
for verb in VERBS:
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
