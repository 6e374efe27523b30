"""The `vlmpack` command: verbs, one-line errors, exit statuses and Ctrl-C."""

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
"""Missing permissions, a read-only file system, a full or a failing disk."""
REFUSED = 2
INTERRUPTED = 128 + signal.SIGINT
VERBS: Mapping[Callable[..., None], str] = {
    analyze.analyze: "nothing was written; with --cache FILE the next run reuses the lengths it has measured",
    pack.pack: "run the same command again to continue; the files will be the same",
    train.train: "run it again with resume_from_checkpoint=true to continue from the last checkpoint, if there is one",
    demo.demo: "nothing was written; run it again, with fewer --steps if it takes too long",
    doctor.doctor: "nothing was changed; run it again, or probe a single family: vlmpack doctor --probe tiny:qwen3_vl",
    serve.serve: "run it again to continue; accepted requests are in the journal",
}
"""Each verb, and what to print after Ctrl-C: how to continue."""


class OneLineErrors(TyperGroup):
    """Prints errors of vlmpack and of the system, and Ctrl-C, as one line. A bug keeps its traceback.

    The exit status is 2 for an error (as for an unknown option), 130 for Ctrl-C, and 1 if a verb found a problem, such
    as a probe that found a leak.
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
            raise _exit(f"{file}{error.strerror}; check the permissions there, and the disk") from error
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends the process without a traceback
            if os.environ.get("LOCAL_RANK", "0") != "0":
                raise typer.Exit(INTERRUPTED) from None  # rank 0 prints the message for all
            if sys.stderr.isatty():
                typer.echo(err=True)  # the cursor may be on a progress bar
            hints = {verb.__name__: hint for verb, hint in VERBS.items()}
            raise _exit(f"interrupted; {hints[ctx.invoked_subcommand]}", INTERRUPTED) from None


def _exit(message: str, status: int = REFUSED) -> typer.Exit:
    typer.secho(f"vlmpack: {message}", err=True, fg=typer.colors.RED)
    return typer.Exit(status)


app = typer.Typer(cls=OneLineErrors, no_args_is_help=True, pretty_exceptions_show_locals=False)
for verb in VERBS:
    paragraphs = inspect.cleandoc(verb.__doc__ or "").split("\n\n")
    settings = {"ignore_unknown_options": verb is train.train}  # its own error shows how settings are written
    app.command(help="\n\n".join(" ".join(each.split()) for each in paragraphs), context_settings=settings)(verb)


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

    Characters that the terminal's encoding lacks are written as escapes, because an error while printing would end a
    verb after its work is done. An error handler set by the user stays.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")
    app(prog_name="vlmpack")
